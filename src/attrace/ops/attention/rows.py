"""Attention weights in blocks of query rows, on PyTorch tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attrace.ops.attention.masked import EVEN, LOWEST, SPREAD, STEPS
from attrace.ops.namespace import without_autocast

BLOCK_ELEMENTS = 1 << 21
"""Weights held at once (B * H * rows * T): 8 MiB of float32, about the size of a last-level cache."""

CHUNK = 128


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything else is recomputed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def weight_rows(
    query: Tensor,
    key: Tensor,
    *,
    rows: Tensor | None,
    scale: float | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """The given query rows of softmax(scale Q K^T + bias).

    query (B, H, Q, D), key (B, K, T, D), `rows` (R,) integer, None for all -> (B, H, R, T); arguments and result as in
    `naive.attention_weights`, in float32 (float64 where the input is).
    """
    with without_autocast(query):
        return _weight_rows(query, key, rows=rows, scale=scale, bias=bias, causal=causal)


def _weight_rows(
    query: Tensor, key: Tensor, *, rows: Tensor | None, scale: float | None, bias: Tensor | None, causal: bool
) -> Tensor:
    dtype, length = working_dtype(query.dtype), key.shape[2]
    scores = score_rows(query, key, rows=rows, scale=scale)
    if bias is not None:
        one_for_all = bias.ndim < 2 or bias.shape[-2] == 1
        block = bias if rows is None or one_for_all else bias.index_select(-2, rows)
        scores = scores.masked_fill_(~block, -torch.inf) if block.dtype == torch.bool else scores.add_(block.to(dtype))
    if causal:
        at = torch.arange(query.shape[2], device=query.device) if rows is None else rows
        later = torch.arange(length, device=query.device) > at[:, None]
        scores.masked_fill_(later, -torch.inf)
    weights = scores.softmax(-1)
    if bias is not None:  # only a mask can leave a row with nothing to attend to
        weights.masked_fill_(empty_rows(scores), 0.0)
    return weights


def empty_rows(scores: Tensor, keys: int = -1) -> Tensor:
    """Rows with nothing to attend to: every key masked, by -inf or by a number so low that it leaves only itself.

    Masks are added as -inf, as the lowest number of the model's type or as one like -1e9.  A softmax over nothing but
    these gives NaN or an even row; what it means is no weight at all.  Scores that are low by themselves differ by
    more.  scores (..., T) -> (..., 1) booleans, or the same with the keys along another axis.
    """
    top = scores.amax(keys, keepdim=True)
    low = top <= LOWEST
    if not bool(low.any()):
        return low
    kind = torch.finfo(scores.dtype)
    near = (-top * EVEN).clamp(max=SPREAD).maximum(-top * (STEPS * kind.eps))
    return low & ((top - scores.amin(keys, keepdim=True) <= near) | (top <= kind.min / 2))


def score_rows(query: Tensor, key: Tensor, *, rows: Tensor | None, scale: float | None = None) -> Tensor:
    """The given query rows of scale Q K^T, before mask and softmax: (B, H, R, T), as in `weight_rows`."""
    dtype = working_dtype(query.dtype)
    if rows is not None:
        query = query.index_select(2, rows)
    batch, heads, count, width = query.shape
    groups, length = key.shape[1], key.shape[2]
    q = query.to(dtype) * (width**-0.5 if scale is None else scale)
    k = key.to(dtype)
    if groups == heads:
        return q @ k.transpose(-1, -2)
    # Grouped heads: the query heads of a group share one key head, which is never expanded.
    q = q.reshape(batch, groups, heads // groups * count, width)
    return (q @ k.transpose(-1, -2)).reshape(batch, heads, count, length)


def blocks(rows: Tensor, elements_per_row: int) -> Iterator[Tensor]:
    """Cut row indices into blocks of about BLOCK_ELEMENTS weights."""
    yield from rows.split(max(1, BLOCK_ELEMENTS // max(1, elements_per_row)))


def mean_of_heads(left: Tensor, weights: Tensor) -> Tensor:
    """Left (B, Q, M) and weights (B, H, Q, T) -> (B, M, T), summed over at most CHUNK rows and averaged over heads."""
    with without_autocast(left):
        wide = torch.float32 if left.device.type == "mps" else torch.float64
        return (left.transpose(1, 2)[:, None] @ weights).mean(1, dtype=wide)


def contract(left: Tensor, right: Tensor) -> Tensor:
    """Left (B, M, K) @ right (B, K, N) -> (B, M, N), the sums over K carried on in float64 every CHUNK terms.

    Sums of thousands of float32 weights all err to the same side: over 30 layers a plain product loses 5e-5 of
    the mass, this one 3e-7, in the same time.  A product of large matrices adds up in blocks by itself; it is the
    plain one, as everywhere on a device without float64.
    """
    with without_autocast(left):
        return _contract(left, right)


def _contract(left: Tensor, right: Tensor) -> Tensor:
    if min(left.shape[1], right.shape[2]) > CHUNK:
        return left @ right
    terms = left.shape[-1]
    whole = terms // CHUNK * CHUNK
    wide = torch.float32 if left.device.type == "mps" else torch.float64
    product = (left[..., whole:] @ right[:, whole:]).to(wide)
    if whole:
        chunks = left[..., :whole].unflatten(-1, (-1, CHUNK)).movedim(-2, 1)
        product = product + (chunks @ right[:, :whole].unflatten(1, (-1, CHUNK))).sum(1, dtype=wide)
    return product
