"""Attention weights in blocks of query rows, on NumPy arrays: what `rows.py` is for PyTorch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attrace.ops.attention.masked import EVEN, LOWEST, SPREAD, STEPS

Rows = NDArray[np.intp]

BLOCK_ELEMENTS = 1 << 21
"""Weights held at once (B * H * rows * T): 8 MiB of float32."""


def weight_rows(
    query: NDArray[Any],
    key: NDArray[Any],
    *,
    rows: Rows,
    scale: float | None = None,
    bias: NDArray[Any] | None = None,
    mask: NDArray[np.bool_] | None = None,
    causal: bool = False,
) -> NDArray[Any]:
    """The given query rows of softmax(scale Q K^T + bias).

    query (B, H, Q, D), key (B, K, T, D), `rows` (R,) integer -> (B, H, R, T); `bias` and `mask` (True = attend)
    broadcast to (B, H, Q, T), `causal` lets query i see keys 0..i.  In query's dtype.  A row in which all is masked is
    all zeros.
    """
    batch, heads, _, width = query.shape
    groups, length = key.shape[1], key.shape[2]
    q = query[:, :, rows] * query.dtype.type(width**-0.5 if scale is None else scale)
    if groups != heads:  # grouped heads: the query heads of a group share one key head, which is never expanded
        q = q.reshape(batch, groups, heads // groups * len(rows), width)
    scores: NDArray[Any] = (q @ key.swapaxes(-1, -2)).reshape(batch, heads, len(rows), length)
    if bias is not None:
        scores += _rows_of(bias, rows)
    hidden = None if mask is None else ~_rows_of(mask, rows)
    if causal:
        later = np.arange(length) > rows[:, None]
        hidden = later if hidden is None else hidden | later
    if hidden is not None:
        np.copyto(scores, -np.inf, where=hidden)
    empty = None if bias is None else empty_rows(scores)
    peak = scores.max(axis=-1, keepdims=True)
    np.copyto(peak, 0, where=np.isneginf(peak))
    scores -= peak
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    scores /= np.where(total > 0, total, 1)
    if empty is not None:
        np.copyto(scores, 0, where=empty)
    return scores


def empty_rows(scores: NDArray[Any]) -> NDArray[np.bool_]:
    """Rows with nothing to attend to, (..., T) -> (..., 1); the rule is that of `rows.empty_rows`."""
    top = scores.max(axis=-1, keepdims=True)
    low: NDArray[np.bool_] = top <= LOWEST
    if not low.any():
        return low
    kind = np.finfo(scores.dtype)
    near = np.maximum(np.minimum(-top * EVEN, SPREAD), -top * (STEPS * kind.eps))
    with np.errstate(invalid="ignore"):  # of a row of nothing but -inf
        even = top - scores.min(axis=-1, keepdims=True) <= near
    found: NDArray[np.bool_] = low & (even | (top <= kind.min / 2))
    return found


def _rows_of(whole: NDArray[Any], rows: Rows) -> NDArray[Any]:
    """The given query rows of what broadcasts to (B, H, Q, T)."""
    return whole if whole.ndim < 2 or whole.shape[-2] == 1 else whole[..., rows, :]


def blocks(rows: Rows, elements_per_row: int) -> Iterator[Rows]:
    """Cut row indices into blocks of about BLOCK_ELEMENTS weights."""
    size = max(1, BLOCK_ELEMENTS // max(1, elements_per_row))
    yield from np.split(rows, range(size, len(rows), size))
