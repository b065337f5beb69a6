"""The main job on small models: every kind of target, every method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
import transformers

import attrace
from attrace import api, errors

TEXT = "The capital of France is Paris"


def plain(folder: Path, kind: str) -> tuple[Any, Any]:
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def whole(result: api.Explanation) -> float:
    return float(result.scores.sum()) + result.lost_mass + result.sink_mass


def test_classifier(models: dict[str, Path]) -> None:
    result = attrace.explain(models["classifier"], TEXT)
    model, tokenizer = plain(models["classifier"], "AutoModelForSequenceClassification")
    with torch.no_grad():
        own = model(**tokenizer(TEXT, return_tensors="pt")).logits.softmax(-1)[0]
    assert result.target.kind == "class"
    assert result.target.label == ["ham", "spam", "A~B"][int(own.argmax())]
    assert result.target.probability == pytest.approx(float(own.max()), abs=1e-6)
    assert [p.probability for p in result.predictions] == sorted(own.tolist(), reverse=True)
    assert (result.method, result.signed) == ("alti", False)
    assert whole(result) == pytest.approx(1, abs=1e-5)
    assert [w.text for w in result.words] == TEXT.split()
    assert result.tokens[0].special
    assert result.tokens[0].text == "[CLS]"
    # BERT's head reads the class token alone: the row of the rollout is row 0
    trace = attrace.trace(model, **tokenizer(TEXT, return_tensors="pt"))
    result = attrace.explain(models["classifier"], TEXT, method="rollout")
    np.testing.assert_allclose(result.scores, trace.rollout(target=0)[0].numpy(), atol=1e-6)


def test_the_readout_is_the_gradient_of_the_target(models: dict[str, Path]) -> None:
    from attrace.capture.encoding import encode
    from attrace.capture.huggingface import load
    from attrace.capture.text import ask

    loaded = load(models["causal-classifier"])
    subject = ask(loaded, encode(loaded, TEXT), "class:spam")
    n = len(subject.encoding)
    np.testing.assert_allclose(subject.readout, np.eye(n)[-1], atol=1e-7)  # GPT-2 classifies at the last token
    frozen = load(models["causal-classifier"])
    frozen.model.requires_grad_(False)
    np.testing.assert_allclose(ask(frozen, encode(frozen, TEXT), "class:spam").readout, subject.readout)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert all(not m._forward_hooks for m in loaded.model.modules())

    class Mean(torch.nn.Module):
        """A head that reads the mean of all positions."""

        def __init__(self, body: Any) -> None:
            super().__init__()
            self.body = body

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.body(hidden.mean(1, keepdim=True).expand_as(hidden))

    pooled = load(models["classifier"])
    pooled.model.bert.pooler = Mean(pooled.model.bert.pooler)
    readout = ask(pooled, encode(pooled, TEXT), "auto").readout
    np.testing.assert_allclose(readout, np.full(len(readout), 1 / len(readout)), atol=1e-6)


@pytest.mark.parametrize("label", ["spam", "SPAM", "1"])
def test_class_targets(models: dict[str, Path], label: str) -> None:
    result = attrace.explain(models["classifier"], TEXT, target=f"class:{label}", method="leave-one-out")
    assert (result.target.label, result.target.index) == ("spam", 1)
    model, tokenizer = plain(models["classifier"], "AutoModelForSequenceClassification")
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        full = model(ids).logits.log_softmax(-1)[0, 1]
        for i in range(1, ids.shape[1] - 1):
            without = model(torch.cat([ids[:, :i], ids[:, i + 1 :]], 1)).logits.log_softmax(-1)[0, 1]
            assert result.scores[i] == pytest.approx(float(full - without), abs=1e-4)
    assert result.scores[0] == result.scores[-1] == 0
    assert result.signed


def test_contrast_and_a_label_with_a_tilde(models: dict[str, Path]) -> None:
    ask = {"method": "leave-one-out"}
    a, b = (attrace.explain(models["classifier"], TEXT, target=f"class:{x}", **ask) for x in ("spam", "ham"))
    contrast = attrace.explain(models["classifier"], TEXT, target="class:spam~ham", **ask)
    assert (contrast.target.label, contrast.target.contrast) == ("spam", "ham")
    np.testing.assert_allclose(contrast.scores, a.scores - b.scores, atol=1e-4)
    assert attrace.explain(models["classifier"], TEXT, target="class:A~B").target.index == 2


def test_causal(models: dict[str, Path]) -> None:
    result = attrace.explain(models["causal"], TEXT)
    model, tokenizer = plain(models["causal"], "AutoModelForCausalLM")
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        own = model(ids).logits[0, -1].log_softmax(-1)
        assert result.target.index == int(own.argmax())
        assert result.target.probability == pytest.approx(float(own.max().exp()), abs=1e-5)
        assert result.method == "leave-one-out"
        for i in range(ids.shape[1]):
            without = model(torch.cat([ids[:, :i], ids[:, i + 1 :]], 1)).logits[0, -1].log_softmax(-1)
            assert result.scores[i] == pytest.approx(float(own[own.argmax()] - without[own.argmax()]), abs=1e-4)


def test_a_position_of_a_causal_model_is_explained_by_what_stands_before_it(models: dict[str, Path]) -> None:
    _, tokenizer = plain(models["causal"], "AutoModelForCausalLM")
    ids = tokenizer(TEXT)["input_ids"]
    prefix = tokenizer.decode(ids[:5])
    for method in ("leave-one-out", "rollout", "last-layer"):
        at = attrace.explain(models["causal"], TEXT, target="token:5", method=method)
        assert at.target.index == ids[5]
        assert at.scores[5:] == pytest.approx(0)
        if len(tokenizer(prefix)["input_ids"]) == 5 and method != "leave-one-out":
            alone = attrace.explain(models["causal"], prefix, method=method)
            np.testing.assert_allclose(at.scores[:5], alone.scores, atol=1e-5)
    assert attrace.explain(models["causal"], TEXT, target="token:-1").target.index == ids[-1]


def test_next_targets_take_the_likelier_of_two_forms(models: dict[str, Path]) -> None:
    _, tokenizer = plain(models["causal"], "AutoModelForCausalLM")
    result = attrace.explain(models["causal"], TEXT, target="next:the")
    assert result.target.label in ("the", " the")
    with pytest.raises(errors.TargetError, match="likeliest here are"):
        attrace.explain(models["causal"], TEXT, target="next:incomprehensible words")
    contrast = attrace.explain(models["causal"], TEXT, target="next:the~of")
    assert contrast.target.contrast is not None
    assert tokenizer is not None


def test_masked(models: dict[str, Path]) -> None:
    result = attrace.explain(models["masked"], "The capital of [MASK] is Paris")
    assert result.target.kind == "token"
    assert result.tokens[result.target.position or 0].text == "[MASK]"
    assert result.method == "alti"
    removed = attrace.explain(models["masked"], "The capital of [MASK] is Paris", method="leave-one-out")
    assert removed.scores[result.target.position or 0] == 0
    at = attrace.explain(models["masked"], TEXT, target="token:2")
    assert at.target.position == 2
    with pytest.raises(errors.TargetError, match=r"one \[MASK\] to fill, or token:POSITION.*0 \[MASK\]"):
        attrace.explain(models["masked"], TEXT)


def test_encoder(models: dict[str, Path]) -> None:
    result = attrace.explain(models["encoder"], TEXT)
    assert (result.target.kind, result.target.label) == ("embedding", "sentence vector")
    model, tokenizer = plain(models["encoder"], "AutoModel")
    inputs = tokenizer(TEXT, return_tensors="pt")
    n = inputs["input_ids"].shape[1]
    result = attrace.explain(models["encoder"], TEXT, method="rollout")
    rollout = attrace.trace(model, **inputs).rollout()[0].mean(0).numpy()
    np.testing.assert_allclose(result.scores, rollout, atol=1e-6)
    removed = attrace.explain(models["encoder"], TEXT, method="leave-one-out")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state[0].mean(0)
        ids = inputs["input_ids"]
        part = model(torch.cat([ids[:, :1], ids[:, 2:]], 1)).last_hidden_state[0].mean(0)
    drop = 1 - float(torch.cosine_similarity(hidden, part, dim=0))
    assert removed.scores[1] == pytest.approx(drop, abs=1e-5)
    assert removed.unit == "drop in cosine similarity"
    assert len(removed.scores) == n


@pytest.mark.parametrize("task", ["classifier", "causal", "masked", "encoder"])
@pytest.mark.parametrize("method", ["rollout", "last-layer", "alti", "leave-one-out"])
def test_every_method_on_every_task(models: dict[str, Path], task: str, method: str) -> None:
    text = "The capital of [MASK] is Rome" if task == "masked" else TEXT
    first = attrace.explain(models[task], text, method=method)
    again = attrace.explain(models[task], text, method=method)
    assert first.to_dict() == again.to_dict()
    assert first.method == method
    assert len(first.tokens) == len(first.scores)
    assert sum(w.share for w in first.words) <= 1 + 1e-6
    if not first.signed:
        assert (first.scores >= 0).all()
        assert whole(first) == pytest.approx(1, abs=1e-5)


def test_a_model_object_is_left_as_it_was(models: dict[str, Path]) -> None:
    model, tokenizer = plain(models["classifier"], "AutoModelForSequenceClassification")
    by_name = attrace.explain(models["classifier"], TEXT)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    state = torch.random.get_rng_state()
    result = attrace.explain(model, TEXT, processor=tokenizer, seed=3)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    np.testing.assert_allclose(result.scores, by_name.scores, atol=1e-6)
    assert not any("dropout" in note for note in result.notes)
    model.bert.embeddings.dropout.p = 0.1
    result = attrace.explain(model, TEXT, processor=tokenizer, seed=3)
    assert any("training mode" in note for note in result.notes)
    with pytest.raises(errors.InputError, match="tokenizer of BertForSequenceClassification"):
        attrace.explain(model, TEXT)


def test_options_change_what_they_say(models: dict[str, Path]) -> None:
    base = attrace.explain(models["classifier"], TEXT, method="rollout")
    for options in ({"residual": 0.9}, {"heads": "max"}, {"heads": 1}, {"layers": [-1]}, {"discard": 0.5}):
        other = attrace.explain(models["classifier"], TEXT, method="rollout", **options)
        assert not np.allclose(other.scores, base.scores, atol=1e-4), options
        assert whole(other) == pytest.approx(1, abs=1e-5)
    still = attrace.explain(models["classifier"], TEXT, residual=1.0)
    assert still.method == "rollout"  # contributions have no residual to set
    np.testing.assert_allclose(still.scores, np.eye(len(base.tokens))[0], atol=1e-6)
    with pytest.raises(errors.InputError, match=r"leave-one-out uses \(none\).*layers"):
        attrace.explain(models["classifier"], TEXT, method="leave-one-out", layers=[0])


def test_saved_results_come_back(models: dict[str, Path], tmp_path: Path) -> None:
    result = attrace.explain(models["classifier"], TEXT)
    result.save(tmp_path / "r.json")
    back = attrace.load(tmp_path / "r.json")
    assert back.to_dict() == result.to_dict()
    assert np.array_equal(back.scores, result.scores)
    back.to_html(tmp_path / "r.html")
    assert TEXT.split()[1] in (tmp_path / "r.html").read_text(encoding="utf-8")
    for name, content in (("missing.json", None), ("bad.json", "{}"), ("worse.json", "\udcff")):
        if content is not None:
            (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(errors.InputError):
            attrace.load(tmp_path / name)


def test_progress_is_told(models: dict[str, Path]) -> None:
    seen: list[tuple[str, int, int]] = []
    attrace.explain(models["causal"], TEXT, progress=lambda *step: seen.append(step))
    assert {stage for stage, _, _ in seen} == {"loading the model", "running the model", "removing tokens"}
    assert seen[-1][1] == seen[-1][2] > 0


def test_the_default_follows_the_maps_and_says_why(models: dict[str, Path]) -> None:
    causal = attrace.explain(models["causal-classifier"], TEXT)  # a classifier on a causal body
    assert causal.method == "leave-one-out"
    contrast = attrace.explain(models["classifier"], TEXT, target="class:spam~ham")
    assert contrast.method == "leave-one-out"
    assert "contrast" in contrast.notes[0]
    assert contrast.target.probability is None
    told = attrace.explain(models["classifier"], TEXT, heads="max")
    assert told.method == "rollout"
    assert "heads" in told.notes[0]
    asked = attrace.explain(models["classifier"], TEXT, target="class:spam")
    assert any("not what spoke for or against" in note for note in asked.notes)
    last = attrace.explain(models["classifier"], TEXT, method="last-layer")
    assert last.settings["layers"] == [1]


def test_a_classifier_without_padding_token_is_scored_row_by_row(models: dict[str, Path], tmp_path: Path) -> None:
    folder = small.save("causal-classifier", tmp_path / "m", pad_token_id=None)
    result = attrace.explain(folder, TEXT)
    assert result.method == "leave-one-out"
    assert np.isfinite(result.scores).all()


def test_tuples_asked_for_in_the_configuration(models: dict[str, Path], tmp_path: Path) -> None:
    folder = small.save("classifier", tmp_path / "m", return_dict=False)
    assert attrace.explain(folder, TEXT, method="leave-one-out").signed


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification"])
def test_scores_of_other_heads(tmp_path: Path, kind: str) -> None:
    folder = small.save("classifier", tmp_path / kind, problem_type=kind)
    model, tokenizer = plain(folder, "AutoModelForSequenceClassification")
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        both = [model(x).logits[0] for x in (ids, torch.cat([ids[:, :1], ids[:, 2:]], 1))]
    one = [x if kind == "regression" else torch.nn.functional.logsigmoid(x) for x in both]
    result = attrace.explain(folder, TEXT, target="class:spam", method="leave-one-out")
    assert result.scores[1] == pytest.approx(float(one[0][1] - one[1][1]), abs=1e-4)
    assert result.unit == ("drop in output" if kind == "regression" else "drop in log-probability")
    contrast = attrace.explain(folder, TEXT, target="class:spam~ham", method="leave-one-out")
    expected = (one[0][1] - one[0][0]) - (one[1][1] - one[1][0])
    assert contrast.scores[1] == pytest.approx(float(expected), abs=1e-4)


def test_under_inference_mode(models: dict[str, Path]) -> None:
    expected = attrace.explain(models["classifier"], TEXT)
    with torch.inference_mode():
        result = attrace.explain(models["classifier"], TEXT)
    np.testing.assert_allclose(result.scores, expected.scores)
    assert result != expected
    assert result == result  # noqa: PLR0124


def test_numbers_of_numpy_are_numbers(models: dict[str, Path]) -> None:
    result = attrace.explain(
        models["classifier"], TEXT, method="rollout", heads=np.int64(1), layers=np.arange(1), residual=np.float32(0.25)
    )
    assert json.loads(json.dumps(result.to_dict()))["settings"]["heads"] == 1
