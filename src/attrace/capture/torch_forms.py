"""How a softmax meets its values: which of its axes are batch, heads, queries and keys, told by strides alone.

A softmax may be copied, cast, masked and laid out anew before a product takes it.  The product says which of its axes
are queries and keys; where the result's axes end up among the channels says which are heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from attrace.capture.callers import Caller
from attrace.capture.layouts import (
    Axes,
    Layout,
    Piece,
    axes_of_shape,
    axes_within,
    in_order,
    laid_out,
    split_by,
    whole,
)
from attrace.capture.torch_ops import QueryKeyAttention, SoftmaxAttention, version_of


def storage_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


@dataclass(eq=False)
class PendingSoftmax:
    """A softmax that has not met its values yet."""

    map: Tensor
    keys: int
    """The axis along which it sums to one."""
    caller: Caller
    is_log: bool = False
    sums: Tensor | None = None
    """The logarithm of each row's sum before it was divided by it, where the module has sinks."""
    empty: Tensor | None = None
    """Which rows had nothing to attend to, its keys' axis being one, where any had not."""
    storages: list[int] = field(default_factory=list)
    """Those that hold its weights."""


@dataclass(eq=False)
class Weights:
    """A tensor that holds the weights of a softmax, as they are or changed."""

    softmax: PendingSoftmax
    layout: Layout
    """How it lies in memory, in pieces of the softmax' axes."""
    weights: Tensor
    """What the values are going to see, but for dropout."""
    axes: Axes
    """What the axes of `weights` are made of."""
    version: int
    alive: Tensor
    """Keeps the storage."""
    dropped: bool = False
    changed: bool = False
    """Whether the weights are not the softmax itself any more."""
    unclear: str = ""

    @classmethod
    def of(cls, softmax: PendingSoftmax) -> Weights | None:
        """The softmax itself."""
        made = softmax.map
        axes = axes_of_shape(made.shape)
        layout = laid_out(axes, made)
        return None if layout is None else cls(softmax, layout, made, axes, version_of(made), made)

    def carried(self, given: Tensor, result: Tensor, *, how: str) -> Weights | str:
        """The same in a copy of its view `given`; `how` is "copied", "dropped" or "changed"."""
        axes = axes_within(self.layout, given)
        layout = None if axes is None else laid_out(axes, result)
        if axes is None or layout is None:
            return "laid out anew"
        new = replace(self, layout=layout, alive=result)
        cut = given.numel() != self.weights.numel()
        if how == "changed":
            if self.dropped:
                new.unclear = "changed after dropout"
            new.weights, new.axes, new.version, new.changed = result, axes, version_of(result), True
        elif cut:
            if self.dropped:
                new.unclear = "cut after dropout"
            new.weights, new.axes, new.version = given, axes, version_of(given)
        new.dropped = self.dropped or how == "dropped"
        return new


@dataclass(eq=False)
class Weighted:
    """Values that a softmax was multiplied with one by one, waiting to be summed over the keys."""

    found: Weights
    weights: Tensor
    """The softmax as it was broadcast."""
    value: Tensor
    product: Tensor

    def axes(self) -> Axes | None:
        """What each axis of the product is made of, in pieces of the softmax' axes."""
        own = axes_within(self.found.layout, self.weights)
        return None if own is None else ((),) * (self.product.ndim - len(own)) + own

    def as_product(self, axes: Axes, dim: int) -> tuple[Layout, Layout, Tensor] | None:
        """The sum over `dim` as a product A V: what its items and its rows are made of, and V, (N, T, Dv)."""
        count = self.product.ndim
        value = self.value.reshape((1,) * (count - self.value.ndim) + tuple(self.value.shape))
        varies = [value.shape[a] > 1 and value.stride(a) != 0 for a in range(count)]
        others = [a for a in range(count) if a != dim]
        items = [a for a in others if axes[a] and varies[a]]
        rows = [a for a in others if axes[a] and not varies[a]]
        width = [a for a in others if not axes[a]]
        if not varies[dim] and axes[dim]:  # one value for all keys
            return None
        value = value[tuple(slice(1) if a in rows else slice(None) for a in range(count))]
        laid = value.permute(*items, *rows, dim, *width)
        laid = laid.reshape(-1, self.product.shape[dim], math.prod(value.shape[a] for a in width))
        return tuple(p for a in items for p in axes[a]), tuple(p for a in rows for p in axes[a]), laid


@dataclass(eq=False)
class Lost:
    """A copy of a softmax that was padded, joined or laid out so that it is not followed, and not passed over."""

    softmax: PendingSoftmax
    why: str
    alive: Tensor


Pending = Weights | Weighted | Lost


def softmax_of(pending: Pending) -> PendingSoftmax:
    return pending.found.softmax if isinstance(pending, Weighted) else pending.softmax


@dataclass(frozen=True, eq=False)
class Reading:
    """A map by its leading axes, queries and keys, and how the product's other sides lie beside it."""

    map: Tensor
    """(*lead, Q, T), before dropout."""
    source: Tensor
    """The model's tensor that the map is a view or a copy of."""
    version: int
    items: Layout
    """What the product's leading axis is made of, in pieces of `lead`."""
    row: Layout
    """The same for its axis of queries."""
    empty: Tensor | None = None
    """(*lead, Q, 1): rows with nothing to attend to."""
    whole: bool = False
    """Whether it is all of a softmax, unchanged: then its rows sum to one but for rounding."""

    @property
    def lead(self) -> tuple[int, ...]:
        return tuple(self.map.shape[:-2])

    def value(self, other: Tensor) -> Tensor:
        """The values of the product, (N, T, Dv) -> (*lead, T, Dv); expanded where queries share them."""
        lead, (keys, width) = self.lead, other.shape[-2:]
        count = len(lead)
        axes = (self.items, whole(count, keys), whole(count + 1, width))
        groups = [
            tuple(sorted((p for p in self.items if p.axis == axis), key=lambda p: -p.low)) for axis in range(count)
        ]
        laid = in_order(other.reshape(-1, keys, width), axes, [*groups, *axes[1:]])
        return laid.expand(*lead, keys, width)


def read_map(found: Weights, used: Tensor, *, left: bool) -> Reading | str:
    """The map that a batched product takes from the left, A V, or turned from the right, V' A'; else what is wrong.

    used (N, Q, T), or (N, T, Q) from the right, N the product of the leading axes; T may lack a column (a sink).
    """
    shape = tuple(found.softmax.map.shape)
    axes = axes_within(found.layout, used)
    if axes is None:
        return f"a map of shape {shape} that met its values as {tuple(used.shape)}"
    rows, columns = (axes[-2], axes[-1]) if left else (axes[-1], axes[-2])
    items = tuple(piece for axis in axes[:-2] for piece in axis)
    return read_axes(found, used, items=items, rows=rows, columns=columns, axes=axes)


def read_axes(
    found: Weights, used: Tensor, *, items: Layout, rows: Layout, columns: Layout, axes: Axes
) -> Reading | str:
    """The same, told which pieces are items, queries and keys of the product; `axes` are those of `used`."""
    softmax = found.softmax
    shape, keys = tuple(softmax.map.shape), softmax.keys
    if any(piece.axis == keys for piece in rows) and not any(piece.axis == keys for piece in columns):
        return f"a map of shape {shape} that was summed over its queries"
    full, kept = whole(keys, shape[keys]), math.prod(piece.size for piece in columns)
    if [p.axis for p in columns] != [p.axis for p in full] or (full and columns[0][:3] != full[0][:3]):
        return f"a map of shape {shape} that met its values as {tuple(used.shape)}"
    if kept < shape[keys] - 1:
        return f"a map of shape {shape} of which only {kept} columns met these values"
    if found.unclear:
        return f"a map of shape {shape} that was {found.unclear}"
    weights, laid, version = found.weights, found.axes, found.version
    if used.numel() != weights.numel():
        if found.dropped:
            return f"a map of shape {shape} that was cut after dropout"
        weights, laid, version = used, axes, version_of(used)
    groups = _leading(shape, keys, items, rows)
    numbers = {p: at for axis, pieces in enumerate(groups) for p, at in _numbered(axis, pieces).items()}
    query, last = rows[-1:], len(groups)
    numbers.update(_numbered(last, query))
    map_ = in_order(weights, laid, [*groups, query, columns])
    empty = softmax.empty
    if empty is not None:
        own = list(axes_of_shape(shape))
        own[keys] = ()
        known = math.prod(p.size for group in [*groups, query] for p in group) == empty.numel()
        empty = in_order(empty, tuple(own), [*groups, query, ()]) if known else None
    unchanged = not found.changed and kept == shape[keys]
    return Reading(map_, weights, version, _renamed(items, numbers), _renamed(rows, numbers), empty, unchanged)


def _leading(shape: Sequence[int], keys: int, items: Layout, rows: Layout) -> list[Layout]:
    """The pieces of each leading axis: all but those of the keys and of the (last) axis of queries."""
    query = rows[-1:]
    pieces = {*items, *rows[:-1]}
    if query:
        own = query[0].axis
    else:  # one query: any axis of one
        own = next((axis for axis in reversed(range(len(shape))) if shape[axis] == 1 and axis != keys), -1)
    groups = []
    for axis in range(len(shape)):
        group = tuple(sorted((p for p in pieces if p.axis == axis), key=lambda p: -p.low))
        if axis != keys and (group or axis != own):
            groups.append(group)
    return groups


def _numbered(axis: int, pieces: Layout) -> dict[Piece, Piece]:
    """Pieces, outermost first, as pieces of an axis made of them alone."""
    low, found = 1, {}
    for piece in reversed(pieces):
        found[piece] = Piece(axis, low, low * piece.size, piece.size)
        low *= piece.size
    return found


def _renamed(pieces: Layout, numbers: dict[Piece, Piece]) -> Layout:
    return tuple(numbers[piece] for piece in pieces)


# Which of the leading axes are heads


def heads_among(lead: tuple[int, ...], heads: int | None, batch: int | None) -> tuple[Layout, str]:
    """The pieces of the leading axes that are heads, as far as the sizes tell, and what they leave unclear.

    `heads` is what the module says it has, `batch` what the model's inputs have.
    """
    if len(lead) < 2:
        return _merged_heads(lead[0], heads, batch) if lead else ((), "")
    if len(lead) == 2:
        found, unclear = whole(1, lead[1]), ""
        if batch and heads and lead[1] != heads and lead[0] == batch * heads:  # blocks behind merged heads
            found = _inner(0, heads)
        elif batch is not None and lead[0] != batch and lead[1] == batch and lead[1] != heads:
            found, unclear = whole(0, lead[0]), "" if lead[0] == heads else ", whose batch is not its first axis"
        return found, unclear
    places = [axis for axis in range(1, len(lead)) if lead[axis] == heads]
    if heads is None or len(places) != 1:
        which = "no axis is" if not places else "several axes may be"
        return (), f", of which {which} that of the {heads or 'unknown'} heads"
    return whole(places[0], lead[places[0]]), ""


def _merged_heads(size: int, heads: int | None, batch: int | None) -> tuple[Layout, str]:
    """Batch and heads that share one axis: (B * H, Q, T)."""
    if batch and size == batch:  # one head, whatever the module has elsewhere
        return (), ""
    if heads is None and batch and size % batch == 0:
        heads = size // batch
    if not heads or size % heads:
        return (), ", whose heads are not told by its module"
    return _inner(0, heads), ""


def _inner(axis: int, count: int) -> Layout:
    return (Piece(axis, 1, count, count),) if count > 1 else ()


def arranged(tensor: Tensor, heads: Layout, *, keys: bool = False) -> Tensor:
    """(*lead, Q, X) -> (B, H, Q, X), with these pieces of the leading axes and of the queries as heads.

    What is laid out by `keys`, (*lead, T, X), has no queries: heads that are part of these share it.
    """
    count = tensor.ndim - 2
    if count == 2 and heads == whole(1, tensor.shape[1]):
        return tensor
    inside = tuple(p for p in heads if p.axis == count)
    axes: list[Layout] = [split_by(heads, axis, tensor.shape[axis]) for axis in range(count)]
    batch = tuple(p for axis in axes for p in axis if p not in heads)
    if keys:
        rows = whole(-1, tensor.shape[-2])
        shared = math.prod(p.size for p in inside)
        tensor = tensor.unsqueeze(count).expand(*tensor.shape[:count], shared, *tensor.shape[count:])
        axes += [inside, rows]
    else:
        axes.append(split_by(heads, count, tensor.shape[-2]))
        rows = tuple(p for p in axes[-1] if p not in heads)
    columns = whole(-2, tensor.shape[-1])
    return in_order(tensor, (*axes, columns), [batch, heads, rows, columns])


@dataclass(eq=False)
class CallByAxes:
    """A recorded call by its leading axes, from which it is laid out as (B, H, Q, T) once its heads are known."""

    op: QueryKeyAttention | SoftmaxAttention
    caller: Caller
    parts: dict[str, Tensor | None]
    """`map` or `query`, (*lead, Q, X); `key`, `value`, (*lead, T, X); `bias`."""
    heads: Layout
    unclear: str = ""
    """Why the sizes do not tell the heads; then the call cannot be read unless what it gives does."""
    beside: str = ""
    """What the sizes say it attends among where that is not tokens; then it is not recorded unless ..."""

    @property
    def lead(self) -> tuple[int, ...]:
        return tuple(self._rows.shape[:-2])

    @property
    def why_unclear(self) -> str:
        return f"{self.op.name} (a map of shape {(*self.lead, self.queries, self.keys)}{self.unclear})"

    def own_values(self, batch: int | None, tokens: int | None) -> Literal["", "points", "experts"]:
        """What each token weighs where the values are its own: sampled points or experts, not one stream of keys."""
        given, heads = self.caller.given, self.caller.heads
        apart = math.prod(self.lead) // (batch or self.lead[0]) if self.lead else 1
        if self.queries > 1 or self.keys < 2 or apart in (1, heads):
            return ""
        if heads is None and apart == (math.prod(given[1:-1]) if len(given) > 2 else tokens):
            return "experts" if len(self.lead) == 2 else "points"
        among = len(given) > 3 and apart in given[1:]  # a place of the module's grid, not a head
        return "points" if heads is not None or among else ""

    @property
    def queries(self) -> int:
        return self._rows.shape[-2]

    @property
    def keys(self) -> int:
        key = self.parts.get("key")
        return self._rows.shape[-1] if key is None else key.shape[-2]

    @property
    def _rows(self) -> Tensor:
        rows = self.parts.get("query", self.parts.get("map"))
        assert rows is not None
        return rows

    def lay_out(self, heads: Layout) -> None:
        """Give the operator its tensors with these heads."""
        self.heads = heads
        op = self.op
        for name, part in self.parts.items():
            if part is not None:
                setattr(op, name, self._laid(name, part, heads))
        rows = op.map if isinstance(op, SoftmaxAttention) else op.query
        op.shape = (rows.shape[0], rows.shape[1], rows.shape[2], self.keys)

    def _laid(self, name: str, part: Tensor, heads: Layout) -> Tensor:
        lead = self.lead
        if name in ("query", "map"):
            return arranged(part, heads)
        if len(lead) == 2 and heads == whole(1, lead[1]):
            return part  # (B, 1, ...) and a key for each group of heads as well
        if name == "bias":
            if part.shape[:-2].numel() == 1 and all(piece.axis < len(lead) for piece in heads):
                return part
            part = part.expand(*lead, *part.shape[-2:])
            return arranged(part, heads, keys=part.shape[-2] == 1)
        if part.shape[: len(lead)] != lead:
            part = part.repeat_interleave(lead[1] // part.shape[1], 1)
        return arranged(part, heads, keys=True)


@dataclass(eq=False)
class Following:
    """What a recorded call gave, followed until it shows which of its axes are heads."""

    call: CallByAxes
    layout: Layout
    """How it lies in memory: pieces of the leading axes 0 to k - 1, the queries k, a value's width k + 1."""
    width: int
    alive: Tensor
    sums: Tensor | None = None
    """(B, H, Q) logarithms of the sums that the softmax divided by, where the module has sinks."""
    compared: bool = False
    """Whether its rows were compared with others', as tokens are."""

    def within(self, view: Tensor) -> Axes | None:
        return axes_within(self.layout, view)

    def moved(self, axes: Axes, copy: Tensor) -> Following | None:
        """The same in a copy of a view of these axes."""
        layout = laid_out(axes, copy)
        return None if layout is None else replace(self, layout=layout, alive=copy)

    def take_factor(self, factors: Sequence[object]) -> None:
        """Give the call what its rows are multiplied with, where that is what the module's sinks leave them."""
        op, sinks = self.call.op, self.call.caller.sinks
        if self.sums is None or sinks is None or not isinstance(op, SoftmaxAttention):
            return
        rest = (self.sums.float() - sinks.detach().float().view(1, -1, 1)).sigmoid()[..., None]
        for factor in factors:
            if isinstance(factor, Tensor) and factor.shape == rest.shape and rest.shape[:3] == op.shape[:3]:
                near = 1e-5 if factor.dtype == torch.float32 else 2e-2
                op.factor = factor[..., 0].clone() if torch.allclose(factor.float(), rest, atol=near) else op.factor

    def told_by(self, channels: Layout, *, items: int | None) -> Layout | str | None:
        """What an axis of channels tells: the pieces that are heads, or what is attended among instead of tokens.

        Channels are the heads' values side by side; where queries lie there in the place of the values' width, they
        are channels themselves.  `items` is the size of the batch, where it is known.
        """
        lead = self.call.lead
        query, width = len(lead), len(lead) + 1
        inside = tuple(p for p in channels if p.axis == query)
        if self.width > 1 and not any(p.axis == width for p in channels):
            return "channels" if inside else None
        apart = math.prod(lead) > (items or 1)
        if math.prod(p.size for p in inside) == self.call.queries == self.call.keys > 1 and apart:
            return "heads"
        return tuple(p for p in channels if p.axis != width)
