"""Attention weights in blocks of query rows, on NumPy arrays: what `rows.py` is for PyTorch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    masked: float = -np.inf,
) -> NDArray[Any]:
    """The given query rows of softmax(scale Q K^T + bias), masked cells set to `masked` before the softmax.

    query (B, H, Q, D), key (B, K, T, D), `rows` (R,) integer -> (B, H, R, T); `bias` and `mask` (True = attend)
    broadcast to (B, H, Q, T), `causal` lets query i see keys 0..i.  In query's dtype.  A row of nothing but -inf is
    all zeros; with a finite `masked` a row in which all is masked is uniform, as the kernels have it that fill in a
    large negative number.
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
        np.copyto(scores, scores.dtype.type(masked), where=hidden)
    peak = scores.max(axis=-1, keepdims=True)
    np.copyto(peak, 0, where=np.isneginf(peak))
    scores -= peak
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    scores /= np.where(total > 0, total, 1)
    return scores


def _rows_of(whole: NDArray[Any], rows: Rows) -> NDArray[Any]:
    """The given query rows of what broadcasts to (B, H, Q, T)."""
    return whole if whole.ndim < 2 or whole.shape[-2] == 1 else whole[..., rows, :]


def blocks(rows: Rows, elements_per_row: int) -> Iterator[Rows]:
    """Cut row indices into blocks of about BLOCK_ELEMENTS weights."""
    size = max(1, BLOCK_ELEMENTS // max(1, elements_per_row))
    yield from np.split(rows, range(size, len(rows), size))
