"""Keras' own attention layers and a user's, against the scores that they return; run once per backend."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras.src import backend
from keras_cases import as_numpy, numbers, returned
from numpy.typing import NDArray

import attrace
from attrace.capture.keras_ops import KerasFused, KerasMap
from attrace.errors import AttraceWarning

B, N, T, D = 2, 5, 7, 8


def batch(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


QUERY, OTHER = batch(B, N, D), batch(B, T, D, seed=1)
HOLES = np.random.default_rng(2).random((B, N, N)) > 0.4
HOLES[:, :, 0] = True
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"use_causal_mask": True},
    "mask": {"attention_mask": HOLES},
    "mask and causal": {"attention_mask": HOLES, "use_causal_mask": True},
}
LAYERS = {
    "multi-head": lambda **k: layers.MultiHeadAttention(2, 4, **k),
    "gated": lambda **k: layers.MultiHeadAttention(2, 4, use_gate=True, **k),
    "grouped": lambda **k: layers.GroupQueryAttention(4, 4, 2, **k),
    "one key head": lambda **k: layers.GroupQueryAttention(4, 4, 1, **k),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["fused", "unfused"])
@pytest.mark.parametrize("kind", LAYERS)
def test_heads(kind: str, dropout: float, call: str) -> None:
    layer = LAYERS[kind](dropout=dropout)
    expected = returned(layer, QUERY, QUERY, **CALLS[call])
    plain = numbers(layer(QUERY, QUERY, **CALLS[call]))
    trace = attrace.trace(layer, QUERY, QUERY, **CALLS[call])
    (op,) = trace.ops
    assert (op.kind, op.name, op.shape) == ("self", layer.name, expected.shape)
    assert isinstance(op, KerasMap if dropout else KerasFused)
    np.testing.assert_allclose(op.weights(), expected, atol=1e-6)
    assert np.array_equal(numbers(trace.output)[0], plain[0])
    np.testing.assert_allclose(trace.rollout(target=1).sum(1), 1, atol=1e-6)


@pytest.mark.parametrize("window", [1, 3])
def test_windows(window: int) -> None:
    layer = layers.MultiHeadAttention(2, 4, sliding_window=window)
    expected = returned(layer, QUERY, QUERY, use_causal_mask=True)
    (op,) = attrace.trace(layer, QUERY, QUERY, use_causal_mask=True).ops
    np.testing.assert_allclose(op.weights(), expected, atol=1e-6)


def test_two_streams() -> None:
    layer = layers.MultiHeadAttention(2, 4)
    expected = returned(layer, QUERY, OTHER)
    (op,) = attrace.trace(layer, query=QUERY, value=OTHER).ops
    assert (op.kind, op.shape) == ("cross", (B, 2, N, T))
    np.testing.assert_allclose(op.weights(), expected, atol=1e-6)
    (same_length,) = attrace.trace(layer, QUERY, batch(B, N, D, seed=5)).ops
    assert same_length.kind == "cross"
    (placed,) = attrace.trace(layer, QUERY, value=batch(B, N, D, seed=5), key=QUERY).ops
    assert placed.kind == "self"  # positions are added to query and key, not to the value


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        layers.Attention,
        lambda: layers.Attention(use_scale=True),
        lambda: layers.Attention(score_mode="concat"),
        layers.AdditiveAttention,
        lambda: layers.AdditiveAttention(use_scale=False),
    ],
    ids=["dot", "scaled", "concat", "additive", "additive without scale"],
)
def test_one_head(make: Any, causal: bool, masked: bool) -> None:
    layer, given = make(), {"use_causal_mask": causal}
    if masked:
        given["mask"] = [None, ops.convert_to_tensor(np.arange(T) < np.array([[T], [3]]))]
    expected = returned(layer, [QUERY, OTHER], **given)
    (op,) = attrace.trace(layer, [QUERY, OTHER], **given).ops
    assert (op.kind, op.shape) == ("cross", (B, 1, N, T))
    np.testing.assert_allclose(op.weights()[:, 0], expected, atol=1e-6)
    (own,) = attrace.trace(layer, [QUERY, QUERY]).ops
    assert own.kind == "self"


def test_several_axes_are_read_as_one() -> None:
    layer, given = layers.MultiHeadAttention(2, 4, attention_axes=(1, 2)), batch(B, 3, 4, D)
    expected = returned(layer, given, given)
    (op,) = attrace.trace(layer, given, given).ops
    np.testing.assert_allclose(op.weights(), expected.reshape(B, 2, 12, 12), atol=1e-6)


def test_a_row_in_which_all_is_masked_is_zero() -> None:  # rep-keras-masks-2
    mask = np.ones((1, N, N), bool)
    mask[0, 2] = False
    unfused = layers.MultiHeadAttention(2, 4, dropout=0.1)
    expected = returned(unfused, QUERY, QUERY, attention_mask=mask)
    (op,) = attrace.trace(unfused, QUERY, QUERY, attention_mask=mask).ops
    np.testing.assert_allclose(op.weights(), expected, atol=1e-6)
    assert (op.weights()[:, :, 2] == 0).all()
    # The fused call fills in one large negative number and uses a uniform row: what it means is no weight at all.
    fused = layers.MultiHeadAttention(2, N, value_dim=N)
    fused(QUERY, QUERY)
    fused._value_dense.call = lambda _: ops.convert_to_tensor(
        np.eye(N, dtype=np.float32)[None, :, None].repeat(2, 2).repeat(B, 0)
    )
    seen: list[Any] = []
    project = fused._output_dense.call
    fused._output_dense.call = lambda x: (seen.append(as_numpy(x)), project(x))[1]
    (op,) = attrace.trace(fused, QUERY, QUERY, attention_mask=mask).ops
    used = seen[0].swapaxes(1, 2)
    np.testing.assert_allclose(used[:, :, 2], 1 / N, atol=1e-6)
    others = [row for row in range(N) if row != 2]
    np.testing.assert_allclose(op.weights()[:, :, others], used[:, :, others], atol=1e-6)
    assert (op.weights()[:, :, 2] == 0).all()
    assert np.isfinite(attrace.trace(fused, QUERY, QUERY, attention_mask=mask).rollout()).all()


@pytest.mark.parametrize("low", [-1e9, -0.7 * float(np.finfo(np.float32).max)])
@pytest.mark.parametrize("layered", [False, True])
def test_a_row_to_which_a_low_number_is_added_is_zero(low: float, layered: bool) -> None:
    class Own(layers.Layer):
        num_heads = 1

        def __init__(self) -> None:
            super().__init__()
            self.normal = layers.Softmax()

        def call(self, x: Any, bias: Any) -> Any:
            scores = (ops.matmul(x, ops.transpose(x, (0, 2, 1))) + bias)[:, None]
            weights = self.normal(scores) if layered else ops.softmax(scores)
            return ops.matmul(weights, x[:, None])[:, 0]

    bias = np.zeros((1, N, N), np.float32)
    bias[0, 2], bias[0, 3, :2] = low, low
    (op,) = attrace.trace(Own(), QUERY, bias).ops
    weights = op.weights()
    assert (weights[:, :, 2] == 0).all()
    assert (weights[:, :, 3, :2] == 0).all()
    np.testing.assert_allclose(np.delete(weights, 2, axis=2).sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16", "mixed_float16"])
def test_half_precision_is_read_in_float32(policy: str, dropout: float) -> None:
    layer = layers.MultiHeadAttention(2, 4, dropout=dropout, dtype=policy)
    plain = as_numpy(ops.cast(layer(QUERY, QUERY), "float32"))
    trace = attrace.trace(layer, QUERY, QUERY)
    assert np.array_equal(as_numpy(ops.cast(trace.output, "float32")), plain)
    weights = trace.ops[0].weights()
    assert weights.dtype == np.float32
    twin = layers.MultiHeadAttention(2, 4)
    twin.build(QUERY.shape, QUERY.shape)
    for mine, its in zip(twin.weights, layer.weights, strict=True):
        mine.assign(ops.cast(its, "float32"))
    # The scores are sums of products of 8 bits: wrong by up to a few of them, more where they are large.
    np.testing.assert_allclose(weights, returned(twin, QUERY, QUERY), atol=0.06)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-2 if dropout else 1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_training_is_told_and_weights_are_those_before_dropout(dropout: float) -> None:
    layer = layers.MultiHeadAttention(2, 4, dropout=dropout)
    expected = returned(layer, QUERY, QUERY, use_causal_mask=True)
    with pytest.warns(AttraceWarning, match="dropout was on"):
        trace = attrace.trace(layer, QUERY, QUERY, use_causal_mask=True, training=True)
    np.testing.assert_allclose(trace.ops[0].weights(), expected, atol=1e-6)


class OneHead(layers.Layer):
    """A user's own layer, written in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__(name="mine")
        self.way = way

    def call(self, x: Any) -> Any:
        scores = ops.matmul(x, ops.transpose(x, (0, 2, 1)))
        if self.way == "layer":
            return ops.matmul(layers.Softmax()(scores), x)
        if self.way == "sparse":
            return ops.matmul(ops.sparsemax(scores), x)
        weights = ops.softmax(scores)
        return {
            "matmul": lambda: ops.matmul(weights, x),
            "operator": lambda: weights @ x,
            "einsum": lambda: ops.einsum("bqk,bkd->bqd", weights, x),
            "einsum, values first": lambda: ops.einsum("bkd,bqk->bqd", x, weights),
            "einsum, dots": lambda: ops.einsum("...qk,...kd->...qd", weights, x),
            "sink": lambda: ops.matmul(weights[..., :-1], x[:, :-1]),
            "scaled": lambda: ops.matmul(weights * 0.25, x),
        }[self.way]()

    @property
    def map(self) -> NDArray[Any]:
        scores = QUERY @ QUERY.swapaxes(1, 2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        if self.way == "sparse":
            weights = as_numpy(ops.sparsemax(ops.convert_to_tensor(scores)))
        return {"sink": weights[..., :-1], "scaled": weights * 0.25}.get(self.way, weights)


WAYS = ["matmul", "operator", "einsum", "einsum, values first", "einsum, dots", "layer", "sparse", "sink", "scaled"]


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_of_ones_own(way: str) -> None:
    given = keras.Input((N, D))
    model = keras.Model(given, layers.Dense(2)(OneHead(way)(given)))
    trace = attrace.trace(model, QUERY)
    assert [(op.name, op.heads) for op in trace.ops] == [("mine", 1)]
    np.testing.assert_allclose(trace.ops[0].weights()[:, 0], OneHead(way).map, atol=1e-6)


def own_functions() -> Any:
    """softmax and the product of the backend's framework, past Keras."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return lambda s, x: tf.matmul(tf.nn.softmax(s), x)
    if keras.backend.backend() == "jax":
        import jax

        return lambda s, x: jax.numpy.matmul(jax.nn.softmax(s), x)
    import torch

    return lambda s, x: torch.bmm(torch.softmax(s, -1), x)


def test_the_frameworks_own_functions() -> None:
    class Past(layers.Layer):
        def call(self, x: Any) -> Any:
            return own_functions()(ops.matmul(x, ops.transpose(x, (0, 2, 1))), x)

    trace = attrace.trace(Past(name="past"), QUERY)
    assert [op.name for op in trace.ops] == ["past"]
    np.testing.assert_allclose(trace.ops[0].weights()[:, 0], OneHead("matmul").map, atol=1e-6)


@pytest.mark.parametrize("order", ["batch first", "merged", "grouped"])
def test_axes_follow_from_the_product(order: str) -> None:
    q, k, v = (batch(B, 4, N, 3, seed=s) for s in (1, 2, 3))
    scores = np.einsum("bhqd,bhkd->bhqk", q, k)
    expected = np.exp(scores - scores.max(-1, keepdims=True))
    expected /= expected.sum(-1, keepdims=True)

    class Heads(layers.Layer):
        num_heads = 4

        def call(self, _: Any) -> Any:
            s = ops.convert_to_tensor(scores)
            if order == "batch first":
                return ops.einsum("bhqk,bkhd->bqhd", ops.softmax(s), ops.transpose(v, (0, 2, 1, 3)))
            if order == "merged":
                return ops.matmul(ops.softmax(ops.reshape(s, (-1, N, N))), ops.reshape(v, (-1, N, 3)))
            grouped = ops.softmax(ops.reshape(s, (B, 2, 2, N, N)))
            return ops.einsum("bkgts,bskh->btkgh", grouped, ops.convert_to_tensor(v[:, :2].swapaxes(1, 2)))

    (op,) = attrace.trace(Heads(), QUERY).ops
    assert op.shape == (B, 4, N, N)
    np.testing.assert_allclose(op.weights(), expected, atol=1e-6)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_streams_follow_from_the_graph_and_from_arguments(policy: str) -> None:
    class Decoder(layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="decoder", dtype=policy)
            self.own = layers.MultiHeadAttention(2, 4, name="own", dtype=policy)
            self.other = layers.MultiHeadAttention(2, 4, name="other", dtype=policy)

        def build(self, x_shape: Any, memory_shape: Any) -> None:
            self.own.build(x_shape, x_shape)
            self.other.build(x_shape, memory_shape)

        def call(self, x: Any, memory: Any) -> Any:
            x = x + self.own(x, x)
            return x + self.other(x, memory)

    below, above = keras.Input((N, D), name="answer"), keras.Input((T, D), name="question")
    mask = keras.Input((T,), name="question_mask", dtype="bool")
    memory = layers.MultiHeadAttention(2, 4, name="encoder", dtype=policy)(above, above, attention_mask=mask[:, None])
    x = ops.tanh(layers.Dense(D, dtype=policy)(below))
    inner = keras.Model([below, above, mask], Decoder()(x, layers.LayerNormalization(dtype=policy)(memory + above)))
    outputs = layers.Dense(2, dtype=policy)(inner([below, above, mask]))
    given = {"answer": QUERY, "question": OTHER, "question_mask": np.ones((B, T), bool)}
    expected = [("question", "question"), ("answer", "answer"), ("answer", "question")]
    for model in (inner, keras.Model([below, above, mask], outputs)):
        trace = attrace.trace(model, [given["answer"], given["question"], given["question_mask"]])
        assert [(op.queries, op.keys) for op in trace.ops] == expected
        assert [op.kind for op in trace.ops] == ["self", "self", "cross"]


def test_a_shared_layer_is_told_apart_call_by_call() -> None:
    first, second = keras.Input((N, D), name="first"), keras.Input((N, D), name="second")
    shared = layers.MultiHeadAttention(2, 4, name="shared")
    model = keras.Model([first, second], layers.Add()([shared(first, first), shared(second, second)]))
    trace = attrace.trace(model, [QUERY, QUERY + 1])
    assert [(op.queries, op.keys) for op in trace.ops] == [("first", "first"), ("second", "second")]


def test_the_same_weights_in_pytorch_give_the_same_rollout() -> None:  # rep-devices-multiframework-1
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; CI has it")
    keras.utils.set_random_seed(3)
    given = keras.Input((5, 8))
    first, second = layers.MultiHeadAttention(2, 4), layers.MultiHeadAttention(2, 4)
    hidden = layers.Add()([given, first(given, given)])
    model = keras.Model(given, layers.Add()([hidden, second(hidden, hidden)]))

    def held(variables: list[Any]) -> Any:
        """Kernels as (out, in), biases as they are, one below the other."""
        rows = [as_numpy(variable + 0.0) for variable in variables]
        return torch.from_numpy(np.concatenate([r.reshape(-1, 8).T if r.size > 8 else r.ravel() for r in rows]))

    class Twin(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
            for layer, other in zip(self.layers, (first, second), strict=True):
                dense = [other._query_dense, other._key_dense, other._value_dense]
                layer.in_proj_weight.data.copy_(held([part.kernel for part in dense]))
                layer.in_proj_bias.data.copy_(held([part.bias for part in dense]))
                layer.out_proj.weight.data.copy_(held([other._output_dense.kernel]))
                layer.out_proj.bias.data.copy_(held([other._output_dense.bias]))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + layer(x, x, x, need_weights=False)[0]
            return x

    x = np.random.default_rng(0).normal(0, 2, (2, 5, 8)).astype(np.float32)
    ours = attrace.trace(model, x)
    with torch.no_grad():
        theirs = attrace.trace(Twin().eval(), torch.from_numpy(x))
    np.testing.assert_allclose(as_numpy(ours.output), theirs.output.numpy(), atol=1e-5)
    np.testing.assert_allclose(as_numpy(ours.rollout()), theirs.rollout().numpy(), atol=1e-5)


def test_flash_attention_is_read_from_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:  # rep-keras-scores-3
    layer = layers.MultiHeadAttention(2, 4)
    expected, plain = returned(layer, QUERY, QUERY), numbers(layer(QUERY, QUERY))[0]
    flash = layers.MultiHeadAttention(2, 4, flash_attention=True)
    flash.build(QUERY.shape, QUERY.shape)
    for own, other in zip(flash.weights, layer.weights, strict=True):
        own.assign(other.value)
    with pytest.raises((ValueError, RuntimeError)):  # a processor has no such kernel: the layer's own error passes
        attrace.trace(flash, QUERY, QUERY)
    attend, asked = backend.nn.dot_product_attention, []

    def stand_in(*args: Any, flash_attention: bool | None = None, **kwargs: Any) -> Any:
        asked.append(flash_attention)
        return attend(*args, **kwargs)

    monkeypatch.setattr(backend.nn, "dot_product_attention", stand_in)
    trace = attrace.trace(flash, QUERY, QUERY)
    assert asked == [True]
    np.testing.assert_allclose(trace.ops[0].weights(), expected, atol=1e-6)
    assert np.array_equal(numbers(trace.output)[0], plain)


def test_scores_need_no_flag_of_the_layer() -> None:  # rep-keras-scores-1, rep-keras-scores-5
    given = keras.Input((N, D))
    layer = layers.MultiHeadAttention(2, 4)
    model = keras.Model(given, layer(given, given))
    (op,) = attrace.trace(model, QUERY).ops
    np.testing.assert_allclose(op.weights(), returned(layer, QUERY, QUERY), atol=1e-6)
    np.testing.assert_allclose(op.weights().sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_causal_mask_stays_beside_dropout(kind: str, training: bool) -> None:  # rep-keras-masks-1
    layer = LAYERS[kind](dropout=0.1)
    with pytest.warns(AttraceWarning) if training else nullcontext():
        (op,) = attrace.trace(layer, QUERY, QUERY, use_causal_mask=True, training=training).ops
    weights = op.weights()
    assert (weights[..., np.triu_indices(N, 1)[0], np.triu_indices(N, 1)[1]] == 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


def test_a_padded_batch_in_half_precision() -> None:  # rep-keras-fp16-1
    for dropout in (0.0, 0.1):
        layer = layers.MultiHeadAttention(2, 4, dropout=dropout, dtype="mixed_float16")
        mask = np.ones((B, 1, N), bool)
        mask[1, :, 3:] = False
        (op,) = attrace.trace(layer, QUERY, QUERY, attention_mask=mask).ops
        weights = op.weights()
        assert weights.dtype == np.float32
        assert np.isfinite(weights).all()
        assert (weights[1, :, :, 3:] == 0).all()
        np.testing.assert_allclose(weights.sum(-1), 1, atol=5e-3)
