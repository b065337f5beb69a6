"""Rollout over attention operators: no map per head and layer is ever held.

`naive.py` is the truth.  Here each layer is an operator, and the product is applied to what was asked for:
r^T A_L ... A_1 from the top for target rows, A_L ... A_1 x from the bottom for source columns (Abnar and Zuidema
2020, sec. 4, with the residual share as a parameter).

Vectors belong to whichever framework the operators take them in.  On the way that nearly every call takes, mixing
alone, nothing asks for it: PyTorch and NumPy share the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attrace.ops.namespace import Framework, framework_of
from attrace.ops.rollout.discard import drop_smallest
from attrace.types import Array, AttentionOp, Heads

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
    valid: Array | None = None
    """(B, Q), True at the queries' real tokens: discarding counts cells between real tokens only."""
    valid_keys: Array | None = None
    """(B, T), the same for the keys."""


@dataclass(frozen=True)
class Layer:
    """residual * I + (1 - residual) * A for one attention call, rows optionally divided by their own sums.

    Where keys are of another stream, I stands for the queries' stream and A reads the keys'.
    """

    op: AttentionOp
    mixing: Mixing

    def matvec(self, x: Array) -> Array:
        """(B, n, M) -> (B, n, M)."""
        return self.forward(x, x)

    def rmatvec(self, r: Array) -> Array:
        """(B, n, M) -> (B, n, M)."""
        r = self._scaled(r)
        return self._mix(self._attend_back(r), r)

    def forward(self, queries: Array, keys: Array) -> Array:
        """(B, Q, M) and (B, T, M) -> (B, Q, M)."""
        return self._scaled(self._mix(self._attend(keys), queries))

    def back(self, r: Array) -> tuple[Array, Array]:
        """(B, Q, M) -> what stays with the queries, (B, Q, M), and what goes to the keys, (B, T, M)."""
        r = self._scaled(r)
        return self.mixing.residual * r, (1 - self.mixing.residual) * self._attend_back(r)

    def _mix(self, attended: Array, kept: Array) -> Array:
        return (1 - self.mixing.residual) * attended + self.mixing.residual * kept

    def _scaled(self, x: Array) -> Array:
        if self.mixing.scaling == "none":
            return x
        xp = _framework(x).xp
        ones = keys = xp.ones_like(x[..., :1])
        if self.op.shape[3] != self.op.shape[2]:
            keys = xp.broadcast_to(xp.ones_like(x[:, :1, :1]), (x.shape[0], self.op.shape[3], 1))
        sums = self._mix(self._attend(keys), ones)
        wanted = ones
        if self.mixing.scaling == "own":
            wanted = self._mix(self.op.matvec(keys, heads="mean"), ones)
        return x * wanted / xp.where(sums > 0, sums, ones)  # a row of zeros stays one

    def _attend(self, x: Array) -> Array:
        if self.mixing.discard:
            return self._times(self._kept(), x)
        product: Array = self.op.matvec(x, heads=self.mixing.heads)
        return product

    def _attend_back(self, r: Array) -> Array:
        if self.mixing.discard:
            return self._times(self._kept().swapaxes(1, 2), r)
        product: Array = self.op.rmatvec(r, heads=self.mixing.heads)
        return product

    @staticmethod
    def _times(fused: Array, x: Array) -> Array:
        return _framework(x).contract(fused, x)

    def _kept(self) -> Array:
        """The fused map, (B, Q, T), without its smallest cells."""
        fused: Array = self.op.fused(self.mixing.heads)
        share, rows, keys = self.mixing.discard, self.mixing.valid, self.mixing.valid_keys
        framework = _framework(fused)
        if all(valid is None or bool(valid.all()) for valid in (rows, keys)):
            whole: Array = drop_smallest(framework, fused, share)
            return whole
        xp = framework.xp
        kept = xp.asarray(fused, copy=True)
        for item in range(fused.shape[0]):
            at, of = _real(rows, item, fused[item, :, 0]), _real(keys, item, fused[item, 0])
            cells = fused[item : item + 1, at[:, None], of]
            kept[item, at[:, None], of] = drop_smallest(framework, cells, share)[0]
        return kept


def _real(valid: Array | None, item: int, like: Array) -> Array:
    """Positions of one item's real tokens; `like` is (n,)."""
    framework = _framework(like)
    flags = framework.xp.ones_like(like) > 0 if valid is None else framework.follow(valid[item], like)
    return framework.xp.nonzero(flags)[0]


def is_pooling(op: AttentionOp) -> bool:
    """Whether an operator makes fewer tokens of many, between stages: no residual goes around it."""
    return getattr(op, "pooling", False)


def target_rows(ops: Sequence[AttentionOp], r: Array, mixing: Mixing, *, tolerance: float = 0.0) -> Array:
    """r^T A_L ... A_1: (B, n, M) -> (B, n, M), top layer first; n changes where layers pool.

    `tolerance` is the mass that may be dropped per column, spread evenly over the layers: the lightest entries go
    first, and where rows sum to one the result falls short by exactly what was dropped.
    """
    for op in reversed(ops):
        if tolerance:
            r = drop_lightest(r, tolerance / len(ops))
        r = op.rmatvec(r) if is_pooling(op) else Layer(op, mixing).rmatvec(r)
    return r


def drop_lightest(r: Array, budget: float) -> Array:
    """The lightest entries of each column, (B, n, M), as long as their sum is within the budget, set to zero."""
    xp = _framework(r).xp
    order = xp.argsort(r, axis=1)
    dropped = xp.cumulative_sum(xp.take_along_axis(r, order, axis=1), axis=1) <= budget
    places = xp.argsort(order, axis=1)
    return xp.where(xp.take_along_axis(dropped, places, axis=1), xp.zeros_like(r), r)


def source_columns(ops: Sequence[AttentionOp], x: Array, mixing: Mixing) -> Array:
    """A_L ... A_1 x: (B, n, M) -> (B, n, M), bottom layer first; with x the identity, the whole map."""
    for op in ops:
        x = op.matvec(x) if is_pooling(op) else Layer(op, mixing).matvec(x)
    return x


def _framework(x: Array) -> Framework:
    framework = framework_of(x)
    assert framework is not None
    return framework
