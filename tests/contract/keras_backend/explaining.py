"""attrace.explain on Keras models; run once per backend."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
from keras import layers
from keras_cases import as_numpy

import attrace
from attrace.errors import CaptureError, InputError, ModelError, TargetError

TEXT = "The cats sat on a mat!"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "on", "a", "mat", "!"]
LENGTH = 16


def widen(model: Any) -> Any:
    for variable in model.trainable_variables:
        if len(variable.shape) > 1:
            variable.assign(variable * 4)
    return model


@pytest.fixture(scope="module")
def bert() -> tuple[Any, Any]:
    keras.utils.set_random_seed(0)
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=WORDS, lowercase=True)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=LENGTH)
    body = keras_hub.models.BertBackbone(
        vocabulary_size=len(WORDS), num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=16,
        max_sequence_length=LENGTH,
    )  # fmt: skip
    return widen(keras_hub.models.BertTextClassifier(backbone=body, num_classes=3)), preprocessor


@pytest.fixture(scope="module")
def gpt2() -> tuple[Any, Any]:
    keras.utils.set_random_seed(0)
    words = ["<|endoftext|>", *(chr(c) for c in range(97, 123)), "Ġ", "Ġt", "he", "Ġthe", "Ġa"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=["Ġ t", "h e", "Ġt he", "Ġ a"])
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=LENGTH)
    body = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(words), num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=16,
        max_sequence_length=LENGTH,
    )  # fmt: skip
    return widen(keras_hub.models.GPT2CausalLM(backbone=body, preprocessor=preprocessor)), preprocessor


def functional(activation: str | None, classes: int, *, length: int | None = 8, masked: bool = True) -> tuple[Any, Any]:
    """A user's own model over a TextVectorization layer: one block, mean pooling."""
    keras.utils.set_random_seed(1)
    vectorize = layers.TextVectorization(output_sequence_length=length, vocabulary=["the", "cats", "sat", "mat"])
    given = keras.Input((length,), dtype="int32")
    x = layers.Embedding(6, 8, mask_zero=masked)(given)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4, name="attention")(x, x)])  # a plain sum would lose the mask
    x = layers.LayerNormalization()(x)
    x = layers.GlobalAveragePooling1D()(x)
    return widen(keras.Model(given, layers.Dense(classes, activation=activation)(x), name="mine")), vectorize


def log_softmax(x: Any) -> Any:
    x = as_numpy(x).astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_a_classifier_of_keras_hub(bert: tuple[Any, Any]) -> None:
    model, preprocessor = bert
    own = log_softmax(model(preprocessor([TEXT])))[0]
    result = attrace.explain(model, TEXT, processor=preprocessor)
    assert (result.target.kind, result.target.label) == ("class", str(own.argmax()))
    assert result.target.probability == pytest.approx(np.exp(own.max()), abs=1e-5)
    assert [t.text for t in result.tokens] == ["[CLS]", "The", "cat", "s", "sat", "on", "a", "mat", "!", "[SEP]"]
    assert [w.text for w in result.words] == ["The", "cats", "sat", "on", "a", "mat", "!"]
    assert (result.method, result.signed) == ("rollout", False)
    assert "Contributions" in result.notes[0]
    assert result.scores.sum() == pytest.approx(1, abs=1e-5)
    # BERT's head reads the class token alone, and padding is masked: the row of the rollout is row 0.
    ids = {k: as_numpy(v)[:, :10] for k, v in preprocessor([TEXT]).items()}
    np.testing.assert_allclose(result.scores, attrace.trace(model, ids).rollout(target=0)[0], atol=1e-6)
    last = attrace.explain(model, TEXT, processor=preprocessor, method="last-layer")
    maps = attrace.trace(model, ids).ops[-1].weights()
    np.testing.assert_allclose(last.scores, maps[0].mean(0)[0], atol=1e-6)
    assert result.settings["backend"] == keras.backend.backend()


@pytest.mark.parametrize("target", ["class:1", "class:1~2"])
def test_leave_one_out_takes_tokens_away(bert: tuple[Any, Any], target: str) -> None:
    model, preprocessor = bert
    result = attrace.explain(model, TEXT, processor=preprocessor, method="leave-one-out", target=target)

    def value(ids: list[int]) -> float:
        tokens = np.array([ids])
        given = {"token_ids": tokens, "padding_mask": np.ones_like(tokens), "segment_ids": np.zeros_like(tokens)}
        own = log_softmax(model(given))[0]
        return float(own[1] - own[2] if "~" in target else own[1])

    ids = [2, 5, 6, 7, 8, 9, 10, 11, 12, 3]
    expected = [0 if i in (0, 9) else value(ids) - value(ids[:i] + ids[i + 1 :]) for i in range(10)]
    np.testing.assert_allclose(result.scores, expected, atol=1e-5)
    assert result.unit == ("drop in log-odds" if "~" in target else "drop in log-probability")


def test_hidden_tokens_are_those_that_the_mask_leaves_out(bert: tuple[Any, Any]) -> None:
    from attrace.capture.keras_text import ask

    model, preprocessor = bert
    subject = ask(model, preprocessor, TEXT, "class:1")
    keep = np.ones((2, 10), bool)
    keep[0, 4:6] = False
    given = {k: as_numpy(v)[:, :10] for k, v in preprocessor([TEXT]).items()}
    given["padding_mask"] = keep[:1].astype("int32")
    hidden, whole = subject.score(keep, operator="hide")
    assert hidden == pytest.approx(log_softmax(model(given))[0, 1], abs=1e-5)
    assert whole == pytest.approx(
        np.log(attrace.explain(model, TEXT, processor=preprocessor, target="class:1").target.probability), abs=1e-5
    )


@pytest.mark.parametrize(
    ("activation", "classes"), [(None, 3), ("softmax", 3), ("sigmoid", 3), ("sigmoid", 1), (None, 1)]
)
def test_a_model_of_ones_own_with_text_vectorization(activation: str | None, classes: int) -> None:
    model, vectorize = functional(activation, classes)
    output = as_numpy(model(vectorize([TEXT])))[0]
    result = attrace.explain(model, TEXT, processor=vectorize)
    likely = {
        (None, 3): lambda: np.exp(log_softmax(output)),
        ("softmax", 3): lambda: output,
        ("sigmoid", 3): lambda: output,
        ("sigmoid", 1): lambda: np.array([1 - output[0], output[0]]),
        (None, 1): lambda: None,
    }[activation, classes]()
    if likely is None:
        assert result.target.probability is None
        assert result.predictions == ()
    else:
        assert result.target.label == str(likely.argmax())
        assert result.target.probability == pytest.approx(likely.max(), abs=1e-5)
    # "The cats sat on a mat!" is read as the cats sat [UNK] [UNK] mat, then two paddings.
    assert [t.text for t in result.tokens] == ["The", "cats", "sat", "on", "a", "mat", "[PAD]", "[PAD]"]
    assert any("2 tokens are unknown" in note for note in result.notes)
    # Mean pooling over what is not masked: the readout is the same at each word, and the rollout its mean.
    row = np.array([1 / 6] * 6 + [0, 0])
    expected = attrace.trace(model, as_numpy(vectorize([TEXT]))).rollout(target=row)[0]
    np.testing.assert_allclose(result.scores, expected, atol=1e-6)
    removed = attrace.explain(model, TEXT, processor=vectorize, method="leave-one-out")
    ids = as_numpy(vectorize([TEXT]))
    shorter = np.concatenate([ids[:, 1:], ids[:, :1] * 0], axis=1)
    pick = result.target.index or 0

    def value(given: Any) -> float:
        out = as_numpy(model(given))[0].astype(np.float64)
        if activation is None:
            return float(log_softmax(out)[pick] if classes > 1 else out[0])
        return float(np.log([1 - out[0], out[0]][pick] if classes == 1 else out[pick]))

    assert removed.scores[0] == pytest.approx(value(ids) - value(shorter), abs=1e-5)
    assert (removed.scores[6:] == 0).all()


def test_the_readout_is_the_gradient_at_the_last_states() -> None:
    from attrace.capture.keras_text import ask

    model, vectorize = functional("softmax", 3, masked=False)
    before = {id(layer): dict(vars(layer)).get("call") for layer in model._flatten_layers()}
    subject = ask(model, vectorize, TEXT, "class:2")
    np.testing.assert_allclose(subject.readout, 1 / 8, atol=1e-6)  # a mean over all eight, padding too
    masked, _ = functional("softmax", 3)
    np.testing.assert_allclose(ask(masked, vectorize, TEXT, "class:2").readout, [1 / 6] * 6 + [0, 0], atol=1e-6)
    assert {id(layer): dict(vars(layer)).get("call") for layer in model._flatten_layers()} == before


def test_a_causal_language_model(gpt2: tuple[Any, Any]) -> None:
    model, preprocessor = gpt2
    text = "the cat a the"
    given = preprocessor.generate_preprocess([text])
    ids = as_numpy(given["token_ids"])[:, : int(as_numpy(given["padding_mask"]).sum())]
    own = log_softmax(model({"token_ids": ids, "padding_mask": np.ones_like(ids)}))[0]
    result = attrace.explain(model, text, processor=preprocessor)
    assert (result.method, result.target.kind, result.target.index) == ("leave-one-out", "next", own[-1].argmax())
    assert result.target.probability == pytest.approx(np.exp(own[-1].max()), abs=1e-5)
    assert len(result.scores) == ids.shape[1]
    free = [i for i, token in enumerate(result.tokens) if not token.special]
    for i in (free[0], free[-1]):
        rest = np.delete(ids, i, axis=1)
        cut = log_softmax(model({"token_ids": rest, "padding_mask": np.ones_like(rest)}))[0, -1]
        assert result.scores[i] == pytest.approx(own[-1].max() - cut[own[-1].argmax()], abs=1e-5)
    named = attrace.explain(model, text, processor=preprocessor, target="next:the~a", method="rollout")
    assert (named.target.label.strip(), named.target.contrast) in ((("the"), " a"), (("the"), "a"))
    row = attrace.trace(model, {"token_ids": ids, "padding_mask": np.ones_like(ids)}).rollout(target=-1)[0]
    np.testing.assert_allclose(named.scores, row, atol=1e-6)
    at = attrace.explain(model, text, processor=preprocessor, target="token:3", method="leave-one-out")
    assert (at.target.index, at.target.position) == (ids[0, 3], 2)
    assert (at.scores[3:] == 0).all()


def test_a_function_and_its_vocabulary() -> None:
    model, _ = functional(None, 2, length=None)
    words = {"the": 2, "cats": 3, "sat": 4}

    def read(texts: list[str]) -> Any:
        return np.array([[words[w] for w in text.lower().split()] for text in texts])

    names = ["", "[UNK]", "the", "cats", "sat", "mat"]
    results = [
        attrace.explain(model, "The cats sat", processor=(read, vocabulary), method="leave-one-out")
        for vocabulary in (names, names.__getitem__)
    ]
    assert [t.text for t in results[0].tokens] == ["The", "cats", "sat"]
    np.testing.assert_array_equal(results[0].scores, results[1].scores)
    own = [log_softmax(model(np.array([ids])))[0] for ids in ([2, 3, 4], [2, 4])]
    pick = results[0].target.index
    assert results[0].scores[1] == pytest.approx(own[0][pick] - own[1][pick], abs=1e-5)


def test_what_the_processor_cut_off_is_told() -> None:
    model, vectorize = functional(None, 2, length=4)
    result = attrace.explain(model, TEXT, processor=vectorize)
    assert [t.text for t in result.tokens] == ["The", "cats", "sat", "on"]
    assert result.notes[0] == "The processor gave 4 tokens, up to 'The cats sat on': what follows was not read."


def test_what_does_not_work_is_an_error(bert: tuple[Any, Any], gpt2: tuple[Any, Any]) -> None:
    model, preprocessor = bert
    for given, match in (
        ({"processor": None}, r"Expected as processor=.*Received: NoneType"),
        ({"processor": len}, r"Expected as processor=.*Received: builtin_function"),
        ({"processor": (lambda _: np.ones((1, 4)), ["a"])}, r"no token ids of shape \(1, n\) but float64 \(1, 4\)"),
        ({"device": "cpu"}, "stay on its device"),
    ):
        with pytest.raises(InputError, match=match):
            attrace.explain(model, TEXT, **{"processor": preprocessor, **given})
    for target, match in (
        ("class:9", "a class of the model: '0', '1', '2'"),
        ("next:a", "class:LABEL of a classifier"),
    ):
        with pytest.raises(TargetError, match=match):
            attrace.explain(model, TEXT, processor=preprocessor, target=target)
    with pytest.raises(TargetError, match=r"the likeliest here are.*'zebra', which is no entry"):
        attrace.explain(gpt2[0], "the a", processor=gpt2[1], target="next:zebra")
    with pytest.raises(InputError, match="at least one word"):
        attrace.explain(model, " ", processor=preprocessor)
    with pytest.raises(CaptureError, match="Expected a PyTorch model, for contributions"):
        attrace.explain(model, TEXT, processor=preprocessor, method="alti")
    with pytest.raises(ModelError, match=r"a text classifier, with an output \(1, classes\).*with a dict"):
        attrace.explain(model.backbone, TEXT, processor=preprocessor)
    pooled = keras.Sequential([layers.Embedding(20, 4), layers.GlobalAveragePooling1D(), layers.Dense(2)])
    with pytest.raises(CaptureError, match="Expected attention in Sequential"):
        attrace.explain(pooled, TEXT, processor=layers.TextVectorization(vocabulary=["the"]))
    own, vectorize = functional(None, 2)
    from attrace.capture.keras_text import ask

    with pytest.raises(InputError, match="a padding mask among its inputs"):
        ask(own, vectorize, TEXT, "auto").score(np.ones((1, 8), bool), operator="hide")


def test_pytorch_stays_out_on_the_other_backends() -> None:
    code = """
import sys
import keras, numpy as np, attrace
given = keras.Input((None,), dtype="int32")
x = keras.layers.Embedding(9, 8)(given)
x = keras.layers.GlobalAveragePooling1D()(keras.layers.MultiHeadAttention(2, 4)(x, x))
model = keras.Model(given, keras.layers.Dense(2)(x))
read = lambda texts: np.array([[len(word) for word in text.split()] for text in texts])
for method in ("auto", "rollout", "last-layer", "leave-one-out"):
    attrace.explain(model, "a few words", processor=(read, str), method=method)
assert ("torch" in sys.modules) == (keras.backend.backend() == "torch")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
