"""Rollout over attention operators on PyTorch tensors: no map per head and layer is ever held.

`naive.py` is the truth.  Here each layer is an operator, and the product is applied to what was asked for:
r^T A_L ... A_1 from the top for target rows, A_L ... A_1 x from the bottom for source columns (Abnar and Zuidema
2020, sec. 4, with the residual share as a parameter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attrace.ops.attention.rows import contract
from attrace.ops.namespace import framework_of
from attrace.ops.rollout.discard import drop_smallest
from attrace.types import AttentionOp, Heads

Scaling = Literal["none", "one", "own"]


@dataclass(frozen=True)
class Mixing:
    """How each layer becomes a matrix: fuse heads, discard, mix with the residual, divide rows by their sums."""

    heads: Heads = "mean"
    residual: float = 0.5
    scaling: Scaling = "none"
    """What each row of the mixed layer is divided by: nothing; its sum ("one": rows sum to one); or what fusion and
    discarding made of its sum ("own": rows keep the sum that the model gave them, short where a sink took mass)."""
    discard: float = 0.0
    valid: Tensor | None = None
    """(B, n), True at real tokens: discarding counts cells between real tokens only."""


@dataclass(frozen=True)
class Layer:
    """residual * I + (1 - residual) * A for one attention call, rows optionally divided by their own sums."""

    op: AttentionOp
    mixing: Mixing

    def matvec(self, x: Tensor) -> Tensor:
        """(B, n, M) -> (B, n, M)."""
        return self._scaled(self._mix(self._attend(x), x))

    def rmatvec(self, r: Tensor) -> Tensor:
        """(B, n, M) -> (B, n, M)."""
        r = self._scaled(r)
        return self._mix(self._attend_back(r), r)

    def _mix(self, attended: Tensor, kept: Tensor) -> Tensor:
        return (1 - self.mixing.residual) * attended + self.mixing.residual * kept

    def _scaled(self, x: Tensor) -> Tensor:
        if self.mixing.scaling == "none":
            return x
        ones = torch.ones_like(x[..., :1])
        sums = self._mix(self._attend(ones), ones)
        wanted = ones
        if self.mixing.scaling == "own":
            wanted = self._mix(self.op.matvec(ones, heads="mean"), ones)
        return x * wanted / torch.where(sums > 0, sums, 1)  # a row of zeros stays one

    def _attend(self, x: Tensor) -> Tensor:
        if self.mixing.discard:
            return self._times(self._kept(), x)
        product: Tensor = self.op.matvec(x, heads=self.mixing.heads)
        return product

    def _attend_back(self, r: Tensor) -> Tensor:
        if self.mixing.discard:
            return self._times(self._kept().transpose(1, 2), r)
        product: Tensor = self.op.rmatvec(r, heads=self.mixing.heads)
        return product

    @staticmethod
    def _times(fused: Tensor, x: Tensor) -> Tensor:
        return contract(fused, x.to(fused.dtype)).to(x.dtype)

    def _kept(self) -> Tensor:
        """The fused map, (B, n, n), without its smallest cells."""
        fused: Tensor = self.op.fused(self.mixing.heads)
        share, valid = self.mixing.discard, self.mixing.valid
        framework = framework_of(fused)
        assert framework is not None
        if valid is None or bool(valid.all()):
            whole: Tensor = drop_smallest(framework, fused, share)
            return whole
        kept = fused.clone()
        for item, real in enumerate(valid):
            at = real.nonzero().squeeze(1)
            cells = fused[item : item + 1, at[:, None], at]
            kept[item, at[:, None], at] = drop_smallest(framework, cells, share)[0]
        return kept


def target_rows(ops: Sequence[AttentionOp], r: Tensor, mixing: Mixing, *, tolerance: float = 0.0) -> Tensor:
    """r^T A_L ... A_1: (B, n, M) -> (B, n, M), top layer first.

    `tolerance` is the mass that may be dropped per column, spread evenly over the layers: the lightest entries go
    first, and where rows sum to one the result falls short by exactly what was dropped.
    """
    for op in reversed(ops):
        if tolerance:
            r = _drop_lightest(r, tolerance / len(ops))
        r = Layer(op, mixing).rmatvec(r)
    return r


def _drop_lightest(r: Tensor, budget: float) -> Tensor:
    light, order = r.sort(dim=1)
    dropped = light.cumsum(1) <= budget
    return r.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), 0.0)


def source_columns(ops: Sequence[AttentionOp], x: Tensor, mixing: Mixing) -> Tensor:
    """A_L ... A_1 x: (B, n, M) -> (B, n, M), bottom layer first; with x the identity, the whole map."""
    for op in ops:
        x = Layer(op, mixing).matvec(x)
    return x
