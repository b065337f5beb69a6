"""What the Keras seam leaves behind, whom it hears, and what it cannot read; run once per backend."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_cases import as_numpy, backbone, inputs, numbers

import attrace
from attrace.capture.keras_seam import FRAMEWORKS, KERAS, _wrapping
from attrace.errors import AttraceWarning, CaptureError, InputError, NonFiniteError, ShapeError

X = np.random.default_rng(0).normal(0, 2, (2, 5, 8)).astype(np.float32)


def model(name: str = "attention") -> Any:
    keras.utils.set_random_seed(len(name))
    given = keras.Input((5, 8))
    return keras.Model(given, layers.MultiHeadAttention(2, 4, name=name)(given, given))


def places() -> list[Any]:
    """Whatever the seam wraps, as it is now."""
    backend = keras.src.backend
    found = [getattr(getattr(backend, path), name) for path, name, _ in KERAS]
    framework = __import__(keras.backend.backend())
    for path, name, _ in FRAMEWORKS[keras.backend.backend()]:
        owner = framework
        for part in filter(None, path.split(".")):
            owner = getattr(owner, part)
        if path == "Array":
            owner = type(framework.numpy.zeros(()))
        found.append(vars(owner).get(name, getattr(owner, name)))
    return [*found, keras.Layer.__call__]


def test_all_is_put_back_also_after_an_error() -> None:
    class Broken(layers.Layer):
        def call(self, x: Any) -> Any:
            layers.MultiHeadAttention(2, 4)(x, x)
            raise RuntimeError("as it happens")

    before = places()
    with pytest.raises(RuntimeError, match="as it happens"):
        attrace.trace(Broken(), X)
    with attrace.record(model()):
        assert all(a is not b for a, b in zip(places(), before, strict=True))
    assert all(a is b for a, b in zip(places(), before, strict=True))
    assert not _wrapping._replaced
    assert len(attrace.trace(model(), X).ops) == 1


def test_a_second_run_gives_the_same() -> None:
    built = model()
    first, second = attrace.trace(built, X), attrace.trace(built, X)
    assert np.array_equal(first.rollout(), second.rollout())


def test_two_models_at_once() -> None:
    one, other = model("one"), model("other")
    with attrace.record(one) as outer, attrace.record(other) as inner:
        one(X)
        other(X)
        one(X)
    assert [op.name for op in outer.ops] == ["one", "one"]
    assert [op.name for op in inner.ops] == ["other"]
    with pytest.raises(CaptureError, match=r"one call.*Received: 2"):
        outer.rollout()
    assert np.array_equal(inner.rollout(), attrace.trace(other, X).rollout())


def test_a_model_inside_of_another_is_heard_by_both() -> None:
    part = model("part")
    given = keras.Input((5, 8))
    whole = keras.Model(given, layers.Dense(2)(part(given)))
    with attrace.record(whole) as outer, attrace.record(part) as inner:
        whole(X)
    assert [op.name for op in outer.ops] == [f"{part.name}/part"]
    assert [op.name for op in inner.ops] == ["part"]


def test_threads_do_not_mix() -> None:
    built = [model("a"), model("bb")]
    expected = [attrace.trace(m, X).rollout() for m in built]
    results: list[list[Any]] = [[], []]

    def work(which: int) -> None:
        for _ in range(10):
            trace = attrace.trace(built[which], X)
            results[which].append((len(trace.ops), trace.rollout()))

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    with attrace.record(built[0]) as idle:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not idle.ops
    for found, row in zip(results, expected, strict=True):
        assert [count for count, _ in found] == [1] * 10
        assert all(np.array_equal(got, row) for _, got in found)
    assert not _wrapping._replaced


def test_building_a_model_inside_the_block_is_no_call() -> None:
    built = model()
    with attrace.record(built) as trace:
        given = keras.Input((5, 8))
        built(given)
        built(X)
    assert len(trace.ops) == 1
    assert trace.starts == [0]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own, on PyTorch
def test_what_is_compiled_says_what_to_do() -> None:
    built = model()
    before = places()
    with attrace.record(built) as trace:
        built.predict(X, verbose=0)
    assert all(a is b for a, b in zip(places(), before, strict=True))
    if keras.backend.backend() == "torch":  # runs eagerly
        assert len(trace.ops) == 1
        return
    with pytest.raises(CaptureError, match=r"symbols of a function that is being compiled.*attrace\.trace"):
        trace.check()
    with attrace.record(built) as again:
        built.predict(X, verbose=0)
    with pytest.raises(CaptureError, match=r"0 calls of the model.*predict, shows nothing"):
        again.rollout()


def test_no_attention_is_an_error() -> None:
    given = keras.Input((5, 8))
    dense = keras.Model(given, layers.Dense(3, activation="softmax")(given))
    with pytest.raises(CaptureError, match=r"Expected attention in Functional\. Received: none \(1 calls"):
        attrace.trace(dense, X)


def test_maps_that_cannot_be_read_are_an_error() -> None:
    class Blocks(layers.Layer):
        def call(self, x: Any) -> Any:
            blocks = ops.reshape(x, (2, 1, 5, 2, 4))
            return ops.matmul(ops.softmax(ops.matmul(blocks, ops.transpose(blocks, (0, 1, 2, 4, 3)))), blocks)

    class Points(layers.Layer):
        def call(self, x: Any) -> Any:
            weights = ops.softmax(ops.reshape(x, (2, 5, 2, 4)))
            return ops.sum(weights * weights, axis=-1)

    class Turned(layers.Layer):
        def call(self, x: Any) -> Any:
            weights = ops.softmax(ops.matmul(x, ops.transpose(x, (0, 2, 1))))
            return ops.einsum("bqk,bqd->bkd", weights, x)

    for layer, match in (
        (Blocks(name="cut"), r"cut \(a map of shape \(2, 1, 5, 2, 2\)\)"),
        (Points(name="points"), r"points \(a softmax of shape \(2, 5, 2, 4\) that multiplies no values\)"),
        (Turned(name="turned"), r"turned \(summed over its queries\)"),
    ):
        with pytest.raises(CaptureError, match=match):
            attrace.trace(keras.Sequential([layer]), X)


def test_attention_among_channels_is_refused_and_told_among_others() -> None:
    class Channels(layers.Layer):
        num_heads = 2

        def call(self, x: Any) -> Any:
            heads = ops.transpose(ops.reshape(x, (2, 5, 2, 4)), (0, 2, 3, 1))  # (B, H, D, N)
            scores = ops.matmul(heads, ops.transpose(heads, (0, 1, 3, 2)))
            mixed = ops.matmul(ops.softmax(scores), heads)
            return ops.reshape(ops.transpose(mixed, (0, 3, 1, 2)), (2, 5, 8))

    class Fused(layers.Layer):
        num_heads = 2

        def call(self, x: Any) -> Any:
            heads = ops.transpose(ops.reshape(x, (2, 5, 2, 4)), (0, 3, 2, 1))  # (B, D, H, N)
            mixed = ops.dot_product_attention(heads, heads, heads)
            return ops.reshape(ops.transpose(mixed, (0, 3, 2, 1)), (2, 5, 8))

    for layer in (Channels(name="along"), Fused(name="along")):
        with pytest.raises(CaptureError, match=r"attention among channels \(along\)"):
            attrace.trace(keras.Sequential([layer]), X)
        given = keras.Input(batch_shape=(2, 5, 8))
        both = keras.Model(given, layer(layers.MultiHeadAttention(2, 4)(given, given)))
        with pytest.warns(AttraceWarning, match=r"among tokens is 1 of 2 layers"):
            assert [op.shape for op in attrace.trace(both, X).ops] == [(2, 2, 5, 5)]


def test_a_softmax_that_multiplies_no_values_is_no_attention() -> None:
    class Router(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.gate = layers.MultiHeadAttention(2, 4, name="real"), layers.Dense(8)

        def call(self, x: Any) -> Any:
            return self.attention(x, x) * ops.softmax(self.gate(x))

    (op,) = attrace.trace(keras.Sequential([Router()]), X).ops
    assert op.name.endswith("/real")


def test_cached_layers_of_a_language_model() -> None:  # rep-keras-scores-2
    """A pass with a cache, through the layers one by one: every layer's map is that of the plain pass."""
    from keras_hub.models import GPT2CausalLM

    body = backbone("gpt2")
    causal = GPT2CausalLM(backbone=body)
    ids = inputs("gpt2")["token_ids"][:1]
    plain = attrace.trace(body, {"token_ids": ids, "padding_mask": np.ones_like(ids)})
    cache = ops.zeros((1, 2, 2, 8, 2, 8))  # (batch, layers, keys and values, length, heads, width)
    with attrace.record(causal) as trace:
        causal.call_with_cache(ops.convert_to_tensor(ids), cache, 0)
    assert [op.shape for op in trace.ops] == [(1, 2, 6, 8)] * 2
    for op, whole in zip(trace.ops, plain.ops, strict=True):
        np.testing.assert_allclose(op.weights()[..., :6], whole.weights(), atol=1e-5)
        np.testing.assert_array_equal(op.weights()[..., 6:], 0)


def test_bad_rows_and_vectors_and_nan_are_errors() -> None:
    op = attrace.trace(model(), X).ops[0]
    with pytest.raises(InputError, match=r"query rows of attention from 0 to 4 .* Received: 5"):
        op.weights(5)
    with pytest.raises(InputError, match="query rows of attention to be given by integers"):
        op.weights([0.5])
    with pytest.raises(ShapeError, match=r"B=2 and n=5, the keys of attention\. Received: \(2, 4\)"):
        op.matvec(np.ones((2, 4)))
    with pytest.raises(InputError, match="a vector of floats"):
        op.rmatvec(np.ones((2, 5), int))
    with pytest.raises(InputError, match="a vector as an array"):
        op.rmatvec([1.0])
    bad = X.copy()
    bad[1, 3] = np.nan
    trace = attrace.trace(model(), bad)
    assert trace.ops[0].first_bad_row() == 3
    with pytest.raises(NonFiniteError, match=r"NaN in layer 0 \(attention\), token \d, batch item 1"):
        trace.rollout(target=0)


def test_contributions_are_for_pytorch_models() -> None:
    with pytest.raises(CaptureError, match="Expected a PyTorch model, for contributions"):
        attrace.trace(model(), X).contributions()


def test_a_padding_mask_is_kept_for_discarding() -> None:
    trace = attrace.trace(backbone("bert"), inputs("bert"))
    assert as_numpy(trace.valid).tolist() == [[True] * 6, [True] * 4 + [False] * 2]
    row = trace.rollout(target=0, discard=0.5)
    alone = attrace.trace(backbone("bert"), inputs("bert", item=1)).rollout(target=0, discard=0.5)
    np.testing.assert_allclose(row[1, :4], alone[0], atol=1e-5)
    assert numbers(trace.output)
