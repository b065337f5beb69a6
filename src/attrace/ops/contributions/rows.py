"""Contributions in blocks of query rows and tiles of keys, on PyTorch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from attrace.ops.attention.rows import BLOCK_ELEMENTS
from attrace.ops.contributions.naive import Norm


def block_output(
    weights: Tensor,
    value: Tensor,
    projection: Tensor,
    *,
    residual: Tensor,
    rows: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """The given rows of the attention block's output, residual and norm included: (B, R, E).

    Arguments as in `contribution_rows`.  Equals what the model's own block computed, which is how capture
    is tested.
    """
    before = _before_norm(weights, value, projection, residual.index_select(1, rows), bias)
    if norm is None:
        return before
    return torch.nn.functional.layer_norm(before, before.shape[-1:], norm.gain, norm.shift, norm.eps)


def contribution_rows(
    weights: Tensor,
    value: Tensor,
    projection: Tensor,
    *,
    residual: Tensor,
    rows: Tensor,
    bias: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """The given query rows of `naive.contributions`: (B, R, T), rows sum to one.

    `weights` (B, H, R, T) are those of `rows` (R,) only; `value` (B, K, T, D), `projection` (E, H * D),
    `residual` (B, Q, E), `bias` (E,), all of one dtype.  The vectors T_i(x_j) are made for a tile of keys
    at a time, about BLOCK_ELEMENTS numbers; key heads are never expanded, and a tile that no row attends to
    is skipped.
    """
    batch, heads, count, keys = weights.shape
    groups, size = value.shape[1], value.shape[3]
    x = residual.index_select(1, rows)
    output = block_output(weights, value, projection, residual=residual, rows=rows, bias=bias, norm=norm)
    length = output.abs()
    if norm is not None:
        # The layer norm is linear once the row's deviation is known: centre and gain go into the projection
        # and into x, one over the deviation into the row of weights.
        before = _before_norm(weights, value, projection, x, bias)
        deviation = before.var(-1, correction=0).add(norm.eps).sqrt()
        projection = norm.gain[:, None] * (projection - projection.mean(0))
        x = norm.gain * (x - x.mean(-1, keepdim=True)) / deviation[..., None]
        weights = weights / deviation[:, None, :, None]
    per_group = projection.reshape(-1, groups, heads // groups, size).permute(1, 3, 2, 0)
    per_group = per_group.reshape(groups, size, -1)
    width = projection.shape[0]
    shares = weights.new_zeros(batch, count, keys)
    every = torch.arange(keys, device=rows.device)
    for tile in torch.split(every, max(1, BLOCK_ELEMENTS // max(1, batch * count * width))):
        first, last = int(tile[0]), int(tile[-1]) + 1
        attention = weights[..., first:last]
        own = (rows[:, None] == tile).nonzero()
        if not len(own) and not attention.any():
            continue
        given = value[:, :, first:last] @ per_group  # (B, K, t, H/K * E)
        given = given.reshape(batch, groups, -1, heads // groups, width).permute(0, 2, 1, 3, 4).flatten(2, 3)
        parts = attention.permute(0, 3, 2, 1) @ given  # (B, t, R, E)
        parts[:, own[:, 1], own[:, 0]] += x[:, own[:, 0]]
        # |y - T| - |y| entry by entry, not sum by sum: exactly zero for a token that gives nothing.
        further = parts.neg_().add_(output[:, None]).abs_().sub_(length[:, None]).sum(-1)
        shares[..., first:last] = further.neg_().clamp_(min=0).transpose(1, 2)
    total = shares.sum(-1, keepdim=True)
    alone = (rows[:, None] == every).to(shares.dtype)
    return torch.where(total > 0, shares / torch.where(total > 0, total, 1), alone)


def _before_norm(weights: Tensor, value: Tensor, projection: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Projected context plus residual, (B, R, E)."""
    batch, heads, count, _ = weights.shape
    groups = value.shape[1]
    # The heads of a group share its value head, which is never expanded.
    context = weights.reshape(batch, groups, heads // groups * count, -1) @ value
    context = context.reshape(batch, heads, count, -1).transpose(1, 2).flatten(2)
    return torch.nn.functional.linear(context, projection, bias) + x
