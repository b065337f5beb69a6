"""How a softmax lies in memory: which of its axes are batch, windows and heads, read as (B * W, H, Q, T)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attrace.capture.callers import Caller

if TYPE_CHECKING:
    from attrace.capture.torch_ops import SoftmaxAttention


def storage_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def is_transposed(tensor: Tensor) -> bool:
    """Whether the last two axes lie in memory the other way round."""
    return tensor.ndim > 1 and tensor.stride(-1) > tensor.stride(-2)


@dataclass
class PendingSoftmax:
    """A softmax that has not met its values yet, with the copies that keep its storages alive."""

    map: Tensor
    version: int
    caller: Caller
    carriers: dict[int, bool] = field(default_factory=dict)
    """Storage -> whether keys and queries change places in it, compared with how it lies in memory."""
    alive: list[Tensor] = field(default_factory=list)


@dataclass
class Weighted:
    """Values that a softmax was multiplied with one by one, waiting to be summed over the keys."""

    softmax: PendingSoftmax
    weights: Tensor
    """The softmax as it was broadcast."""
    value: Tensor
    product: Tensor

    def is_read(self, dims: list[int]) -> bool:
        """Whether the sum is A V of one stream of values: (..., Q, T, 1) times (..., 1, T, D), summed over T."""
        shape, out = self.softmax.map.shape, self.product.shape
        one_stream = self.value.ndim == self.product.ndim and (
            self.value.shape[-3] == 1 or self.value.stride(-3) == 0 or shape[-2] == 1
        )
        by_keys = dims in ([-2], [len(out) - 2])
        return one_stream and by_keys and tuple(self.weights.shape) == (*shape, 1) and out[:-1] == shape


@dataclass
class Rearranged:
    """A softmax that was padded or joined with others before it met values."""

    softmax: PendingSoftmax
    copy: Tensor


@dataclass
class Given:
    """What a recorded map gave, where the module has sinks that it may still apply: a factor for each row."""

    softmax: PendingSoftmax
    op: SoftmaxAttention
    output: Tensor

    def take(self, args: tuple[Any, ...]) -> bool:
        """Give the recorded call its factor, (B, H, Q), where this product has one."""
        batch, heads, queries, _ = self.op.shape
        for factor in args[:2]:
            if isinstance(factor, Tensor) and tuple(factor.shape) == (batch, heads, queries, 1):
                self.op.factor = factor.detach()[..., 0].clone()
                return True
        return False


Pending = PendingSoftmax | Weighted | Rearranged | Given


def softmax_of(pending: Pending) -> PendingSoftmax:
    return pending if isinstance(pending, PendingSoftmax) else pending.softmax


@dataclass(frozen=True)
class Reading:
    """A softmax as one map per head, and how to lay what was multiplied with it beside it."""

    weights: Tensor
    """(B * W, H, Q, T), before dropout."""
    source: Tensor
    """The tensor that the weights are a view or a copy of."""
    lead: tuple[int, ...]
    """The leading axes in the order in which the product took them."""
    order: tuple[int, ...]
    """Where those axes go: batch and windows first, heads last."""

    def value(self, other: Tensor) -> Tensor:
        """The values of the product, (N, T, Dv) -> (B * W, H, T, Dv)."""
        laid = other.reshape(*self.lead, *other.shape[-2:]).permute(*self.order, -2, -1)
        return laid.reshape(*self.weights.shape[:2], *other.shape[-2:])


def read_map(softmax: Tensor, used: Tensor, *, heads: int | None, batch: int | None) -> Reading | str:
    """The map that multiplied the values; where it cannot be told, why.

    softmax (..., Q, T) as it was computed; used (N, Q, T') as the product took it, N the product of the leading
    axes; T' < T where a column was cut off (a sink).  `heads` is what the module says it has, `batch` what the
    model's inputs have.
    """
    length, keys = softmax.shape[-2:]
    shape = tuple(softmax.shape)
    if used.shape[-2] != length or used.shape[-1] > keys or math.prod(used.shape[:-2]) != math.prod(shape[:-2]):
        return f"a map of shape {shape} that met its values as {tuple(used.shape)}"
    if used.shape[-1] < keys - 1:
        return f"a map of shape {shape} of which only {used.shape[-1]} columns met these values"
    found = axes_of(shape[:-2], heads, batch)
    if isinstance(found, str):
        return f"a map of shape {shape}{found}"
    lead, order = found
    map_ = softmax.reshape(*lead, length, keys)
    places = [p for p in permutations(range(len(lead))) if moves(p, lead)]
    for place in places:  # as the softmax lies, nearly always; einsum may have put another axis first
        laid = back(used, lead, place)
        if used.shape[-1] == keys and (same(map_, laid) or is_dropout_of(map_, laid)):
            return Reading(merged(map_, order), softmax, picked(lead, place), chained(place, order))
    # Masked, cut (a sink) or scaled after the softmax: what the values saw is the map.
    gaps = [nearness(map_, back(used, lead, place)) for place in places]
    place = places[gaps.index(min(gaps))]
    if gaps.count(min(gaps)) > 1:
        return f"a map of shape {shape} that was changed and laid out anew before it met its values"
    return Reading(merged(back(used, lead, place), order), used, picked(lead, place), chained(place, order))


def axes_of(
    lead: tuple[int, ...], heads: int | None, batch: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]] | str:
    """The leading axes, those that are merged taken apart, and their order with the heads last; or what is unclear."""
    if len(lead) == 1:
        return merged_axes(lead[0], heads, batch)
    if len(lead) == 2:
        if batch and heads and lead[1] != heads and lead[0] == batch * heads:  # blocks behind merged heads
            return (batch, heads, lead[1]), (0, 2, 1)
        if batch is not None and lead[0] != batch and lead[1] == batch and lead[1] != heads:
            return ", whose batch is not its first axis"
        return lead, (0, 1)
    places = [axis for axis in range(1, len(lead)) if lead[axis] == heads]
    if heads is None or len(places) != 1:
        return (
            f", of which {'no axis is' if not places else 'several axes may be'} that of the {heads or 'unknown'} heads"
        )
    return lead, (*(axis for axis in range(len(lead)) if axis != places[0]), places[0])


def merged_axes(size: int, heads: int | None, batch: int | None) -> tuple[tuple[int, int], tuple[int, int]] | str:
    """Batch and heads that share one axis: (B * H, Q, T)."""
    if batch and size == batch:  # one head, whatever the module has elsewhere
        heads = 1
    elif heads is None and batch and size % batch == 0:
        heads = size // batch
    if not heads or size % heads:
        return ", whose heads are not told by its module"
    return (size // heads, heads), (0, 1)


def moves(place: tuple[int, ...], lead: tuple[int, ...]) -> bool:
    """Whether a permutation is the identity or really changes the order of what lies in memory."""
    wide = [axis for axis in place if lead[axis] > 1]
    narrow = [axis for axis in place if lead[axis] == 1]
    return narrow == sorted(narrow) and (place == tuple(range(len(lead))) or wide != sorted(wide))


def back(used: Tensor, lead: tuple[int, ...], place: tuple[int, ...]) -> Tensor:
    """(N, Q, T) whose leading axes were taken in the order `place` -> (*lead, Q, T)."""
    apart = used.reshape(*picked(lead, place), *used.shape[-2:])
    return apart.permute(*(place.index(axis) for axis in range(len(lead))), -2, -1)


def picked(lead: tuple[int, ...], place: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(lead[axis] for axis in place)


def chained(place: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(place.index(axis) for axis in order)


def merged(map_: Tensor, order: tuple[int, ...]) -> Tensor:
    """(*lead, Q, T) -> (B * W, H, Q, T)."""
    laid = map_.permute(*order, -2, -1)
    return laid.reshape(-1, *laid.shape[-3:])


def same(map_: Tensor, used: Tensor) -> bool:
    return torch.equal(map_.to(used.dtype), used)


def is_dropout_of(map_: Tensor, used: Tensor) -> bool:
    """Whether each entry is either dropped or scaled up by one factor, as inverted dropout does."""
    kept = used != 0
    if not bool(kept.any()):
        return False
    ratio = used[kept].float() / map_[kept].float()
    return bool(ratio.min() > 1.0001) and bool(ratio.max() - ratio.min() < 0.02 * ratio.max())


def nearness(map_: Tensor, used: Tensor) -> float:
    """How far a map that was changed is from the softmax that it came from: the smallest over the columns it kept."""
    keys = used.shape[-1]
    cuts = {0, map_.shape[-1] - keys}
    return min(float((map_[..., c : c + keys].float() - used.float()).abs().sum()) for c in cuts)
