"""Streamed NumPy rows against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attrace.ops.attention import naive, numpy_rows
from attrace.ops.attention import rows as torch_rows


@given(
    seed=st.integers(0, 2**16),
    sizes=st.tuples(*[st.integers(1, 5)] * 5),
    groups=st.integers(1, 3),
    scale=st.sampled_from([None, 0.3]),
    shapes=st.sampled_from(["none", "whole", "row", "item"]),
    causal=st.booleans(),
)
def test_rows_equal_the_reference(
    seed: int, sizes: tuple[int, ...], groups: int, scale: float | None, shapes: str, causal: bool
) -> None:
    batch, keyed, queries, keys, width = sizes
    rng = np.random.default_rng(seed)
    query = rng.normal(0, 3, (batch, keyed * groups, queries, width))
    key = rng.normal(0, 3, (batch, keyed, keys, width))
    shape = {
        "none": (),
        "whole": (batch, keyed * groups, queries, keys),
        "row": (1, 1, 1, keys),
        "item": (batch, 1, queries, keys),
    }[shapes]
    bias = rng.normal(0, 2, shape)
    mask = rng.random(shape) > 0.4
    rows = rng.permutation(queries)[: rng.integers(1, queries + 1)]
    expected = naive.attention_weights(query, key, scale=scale, bias=np.where(mask, bias, -np.inf), causal=causal)
    found = numpy_rows.weight_rows(query, key, rows=rows, scale=scale, bias=bias, mask=mask, causal=causal)
    np.testing.assert_allclose(found, expected[:, :, rows], atol=1e-12)
    narrow: list[Any] = [x.astype(np.float32) for x in (query, key, bias)]
    single = numpy_rows.weight_rows(
        narrow[0], narrow[1], rows=rows, scale=scale, bias=narrow[2], mask=mask, causal=causal
    )
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, expected[:, :, rows], atol=2e-5)


@pytest.mark.parametrize("low", [None, -np.inf, -1e9, -0.7 * float(np.finfo(np.float32).max)])
def test_a_row_in_which_all_is_masked_is_zero(low: float | None) -> None:
    q = np.random.default_rng(0).normal(size=(1, 1, 3, 4)).astype(np.float32)
    mask = np.array([[True, False, True], [False, False, False], [True, True, True]])
    bias = None if low is None else np.where(mask, 0, low).astype(np.float32)
    given = mask if low is None else None
    weights = numpy_rows.weight_rows(q, q, rows=np.arange(3), mask=given, bias=bias)[0, 0]
    np.testing.assert_array_equal(weights[1], 0)
    assert weights[0, 1] == 0
    np.testing.assert_allclose(weights[[0, 2]].sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_are_masked_by_the_rule_of_torch(dtype: Any) -> None:
    random = np.random.default_rng(3)
    sizes, spreads = 10.0 ** np.arange(14), (0, 1e-9, 1e-4, 1e-2, 1)
    rows = [random.normal(0, size * spread, 6) - size for size in sizes for spread in spreads]
    rows += [np.full(6, low) + random.normal(0, 5, 6) for low in (-np.inf, np.finfo(np.float32).min, -65504.0, -1e9)]
    scores = np.stack(rows).astype(dtype)
    found = numpy_rows.empty_rows(scores)
    assert found[-4:].all()
    assert 0 < found.mean() < 1
    np.testing.assert_array_equal(found, torch_rows.empty_rows(torch.as_tensor(scores)).numpy())


def test_blocks_cover_all_rows_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_rows, "BLOCK_ELEMENTS", 10)
    parts = list(numpy_rows.blocks(np.arange(7), 4))
    assert [len(part) for part in parts] == [2, 2, 2, 1]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(7))
