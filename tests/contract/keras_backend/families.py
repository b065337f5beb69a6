"""Contracts 1 to 4 for every family of KerasHub; run once per backend by tests/contract/test_keras.py."""

from __future__ import annotations

import keras
import keras_cases as cases
import numpy as np
import pytest
from keras_cases import FAMILIES, RIGHT_PADDED, SINKS, backbone, inputs, layer_of, numbers, probe

import attrace
from attrace.capture.keras_seam import _wrapping
from attrace.ops.heads import fuse_heads

pytestmark = pytest.mark.filterwarnings("ignore:.*does not support masking:UserWarning")
every_family = pytest.mark.parametrize("family", FAMILIES)
CROSSED = {"t5", "bart", "whisper"}


@every_family
def test_output_is_bit_identical_and_nothing_is_left(family: str) -> None:
    model, given = backbone(family), inputs(family)
    call, softmax = keras.Layer.__call__, keras.src.backend.nn.softmax
    plain = numbers(model(given))
    trace = attrace.trace(model, given)
    assert all(np.array_equal(a, b) for a, b in zip(numbers(trace.output), plain, strict=True))
    assert keras.Layer.__call__ is call
    assert keras.src.backend.nn.softmax is softmax
    assert not _wrapping._replaced


@every_family
def test_weights_equal_what_unit_values_show(family: str) -> None:
    model, given = backbone(family), inputs(family)
    trace = attrace.trace(model, given)
    assert [op.layer for op in trace.ops] == list(range(len(trace.ops)))
    for name in dict.fromkeys(op.name for op in trace.ops):
        ops = [op for op in trace.ops if op.name == name]
        with probe(layer_of(model, name), ops[0].heads) as seen:
            model(given)
        assert len(seen) == len(ops)
        # A layer that is called again reads, the second time, what the units made of the first.
        op, context = ops[0], seen[0]
        np.testing.assert_allclose(op.weights(), context[..., : op.shape[3]], atol=1e-5, rtol=0)
        np.testing.assert_array_equal(context[..., op.shape[3] :], 0)
        np.testing.assert_array_equal(op.weights([1, -1]), op.weights()[:, :, [1, -1]])


@every_family
def test_kinds_and_rows(family: str) -> None:
    trace = attrace.trace(backbone(family), inputs(family))
    kinds = [op.kind for op in trace.ops]
    assert kinds == (["self"] * 2 + ["self", "cross"] * 2 if family in CROSSED else ["self"] * len(kinds))
    above = {"whisper": "encoder_features"}.get(family, "encoder_token_ids")
    own = {"vit": "images", "dinov2": "images", "deit": "tokens", "swin": "tokens"}.get(family, "token_ids")
    below = [("decoder_token_ids", "decoder_token_ids"), ("decoder_token_ids", above)]
    assert [(op.queries, op.keys) for op in trace.ops] == (
        [(above, above)] * 2 + below * 2 if family in CROSSED else [(own, own)] * len(kinds)
    )
    for op in trace.ops:
        sums = op.weights().sum(-1)
        if family in SINKS:
            assert ((sums > 0.05) & (sums < 1)).all()
        else:
            np.testing.assert_allclose(sums, 1, atol=1e-5)


@pytest.mark.parametrize("family", RIGHT_PADDED)
def test_a_padded_batch_equals_its_rows_alone(family: str) -> None:
    model = backbone(family)
    together = attrace.trace(model, inputs(family))
    for item, length in ((0, cases.TOKENS), (1, cases.REAL)):
        alone = attrace.trace(model, inputs(family, item=item))
        for op, single in zip(together.ops, alone.ops, strict=True):
            weights = op.weights()[item, :, :length]
            np.testing.assert_allclose(weights[..., :length], single.weights()[0], atol=2e-5, rtol=0)


@every_family
def test_products_equal_the_reference(family: str) -> None:
    trace = attrace.trace(backbone(family), inputs(family))
    rng = np.random.default_rng(0)
    for op in trace.ops:
        batch, count, queries, keys = op.shape
        for heads in ("mean", "max", 1, [float(h) for h in range(1, count + 1)]):
            fused = fuse_heads(op.weights().astype(np.float64), heads)
            np.testing.assert_allclose(op.fused(heads), fused, atol=1e-6)
            x, r = rng.random((batch, keys, 3)), rng.random((batch, queries, 3))
            np.testing.assert_allclose(op.matvec(x, heads=heads), fused @ x, rtol=1e-5)
            np.testing.assert_allclose(op.rmatvec(r, heads=heads), fused.swapaxes(1, 2) @ r, rtol=1e-5)
            np.testing.assert_allclose(op.rmatvec(r[..., 0], heads=heads), op.rmatvec(r, heads=heads)[..., 0])


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in CROSSED | {"swin"}])
def test_a_rollout_row_keeps_the_mass(family: str) -> None:
    trace = attrace.trace(backbone(family), inputs(family))
    row, dense = trace.rollout(target=2), trace.rollout()
    assert (row >= 0).all()
    np.testing.assert_allclose(row, dense[:, 2], atol=1e-6)
    reference = attrace.rollout([op.weights().astype(np.float64) for op in trace.ops], normalize=False)
    np.testing.assert_allclose(dense, reference, atol=1e-5)
    if family not in SINKS:
        np.testing.assert_allclose(row.sum(1), 1, atol=1e-5)
