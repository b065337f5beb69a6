"""How the axes of one tensor lie in another's memory, read off shapes and strides: no value is looked at.

A dense tensor is a list of pieces, outermost in memory first; a view of it covers, with each of its axes, the pieces
whose strides lie between the axis' own and the end of it.  So views need not be followed: wherever one is met, its
strides tell which parts of the first tensor's axes each of its axes is made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """A part of an axis: index = ... + i * low, i < size; the whole axis of n is (axis, 1, n, n)."""

    axis: int
    low: int
    high: int
    size: int
    """high / low, or less where entries were cut off."""


Layout = tuple[Piece, ...]
"""A dense tensor's pieces, outermost in memory first."""
Axes = tuple[Layout, ...]
"""For each axis of a tensor the pieces that it is made of; none for an axis of size one."""


def whole(axis: int, size: int) -> Layout:
    """A whole axis.

    >>> whole(2, 5), whole(0, 1)
    ((Piece(axis=2, low=1, high=5, size=5),), ())
    """
    return (Piece(axis, 1, size, size),) if size > 1 else ()


def axes_of_shape(shape: Sequence[int]) -> Axes:
    """Each axis of a tensor as itself."""
    return tuple(whole(axis, size) for axis, size in enumerate(shape))


def laid_out(axes: Axes, tensor: Tensor) -> Layout | None:
    """The pieces of a tensor's axes in the order in which they lie in its memory; None where it has gaps."""
    order = sorted((a for a in range(tensor.ndim) if tensor.shape[a] > 1), key=tensor.stride, reverse=True)
    expected = 1
    for axis in reversed(order):
        if tensor.stride(axis) != expected:
            return None
        expected *= tensor.shape[axis]
    return merged(piece for axis in order for piece in axes[axis])


def merged(pieces: Iterable[Piece]) -> Layout:
    """Pieces with each that continues its predecessor joined to it.

    >>> merged([Piece(0, 4, 16, 4), Piece(0, 1, 4, 4)])
    (Piece(axis=0, low=1, high=16, size=16),)
    """
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last and (last.axis, last.low) == (piece.axis, piece.high) and piece.size == piece.high // piece.low:
            found[-1] = Piece(piece.axis, piece.low, last.high, last.size * piece.size)
        else:
            found.append(piece)
    return tuple(found)


def axes_within(layout: Layout, view: Tensor) -> Axes | None:
    """What each axis of a view covers of the dense tensor that it looks at; None where that is not pieces of it.

    >>> import torch
    >>> x = torch.zeros(2, 3, 4, 5)  # (B, H, Q, D)
    >>> axes_within(laid_out(axes_of_shape(x.shape), x), x.view(6, 4, 5))[0]
    (Piece(axis=0, low=1, high=2, size=2), Piece(axis=1, low=1, high=3, size=3))
    """
    return strided_within(layout, tuple(zip(view.shape, view.stride(), strict=True)), view.numel())


def strided_within(layout: Layout, sizes: Sequence[tuple[int, int]], count: int) -> Axes | None:
    """The same for axes given as (size, stride), `count` elements together."""
    total = math.prod(piece.size for piece in layout)
    if not count:
        return None
    found: list[Layout] = []
    for size, stride in sizes:
        if size == 1:
            found.append(())
            continue
        axis = _covered(layout, size, stride, total, count)
        if not axis:
            return None
        found.append(axis)
    covered = math.prod(piece.size for axis in found for piece in axis)
    return tuple(found) if covered == count else None


def _covered(layout: Layout, size: int, stride: int, total: int, count: int) -> Layout | None:
    pieces: list[Piece] = []
    step, end = 1, size * stride
    for piece in reversed(layout):
        low, high = max(stride, step), min(end, step * piece.size)
        if stride == step and end < step * piece.size and total * size == count * piece.size:
            return (piece._replace(size=size),)  # some of its entries alone
        if low < high:
            first, last = low // step, high // step
            if low % step or high % step or piece.size % last or last % first:
                return None
            if piece.size != piece.high // piece.low and (first, last) != (1, piece.size):
                return None
            cut = piece if (first, last) == (1, piece.size) else None
            pieces.append(cut or Piece(piece.axis, piece.low * first, piece.low * last, last // first))
        step *= piece.size
    return merged(reversed(pieces)) if math.prod(p.size for p in pieces) == size else None


def joined_within(layout: Layout, parts: Sequence[Tensor], dim: int) -> Axes | None:
    """The axes of equal views of one dense tensor, side by side in memory, that are joined along `dim`."""
    first = parts[0]
    steps = {int(b.storage_offset() - a.storage_offset()) for a, b in pairwise(parts)}
    alike = {(tuple(part.shape), part.stride()) for part in parts}
    if len(steps) != 1 or len(alike) != 1 or (step := steps.pop()) <= 0:
        return None
    sizes: list[tuple[int, int]] = [(len(parts), int(step)), *zip(first.shape, first.stride(), strict=True)]
    axes = strided_within(layout, sizes, len(parts) * first.numel())
    if axes is None:
        return None
    outer, own = axes[0], list(axes[1:])
    own[dim] = (*outer, *own[dim])
    return tuple(own)


def in_order(tensor: Tensor, axes: Axes, groups: Sequence[Layout]) -> Tensor:
    """A tensor whose axes are made of pieces, with one axis for each group of them, in that order."""
    pieces = [piece for axis in axes for piece in axis]
    wanted = [piece for group in groups for piece in group]
    sizes = [math.prod(piece.size for piece in group) for group in groups]
    if pieces != wanted:
        cuts = {*pieces, *wanted}
        pieces, wanted = _refined(pieces, cuts), _refined(wanted, cuts)
    if pieces == wanted:
        return tensor.reshape(sizes)
    return tensor.reshape([p.size for p in pieces]).permute([pieces.index(p) for p in wanted]).reshape(sizes)


def _refined(pieces: Iterable[Piece], cuts: Iterable[Piece]) -> list[Piece]:
    """Whole pieces, each split wherever one of `cuts` begins or ends within it."""
    found: list[Piece] = []
    for piece in pieces:
        ends = {end for cut in cuts if cut.axis == piece.axis for end in (cut.low, cut.high)}
        if piece.size == piece.high // piece.low:
            inside = [piece.low, *sorted(end for end in ends if piece.low < end < piece.high), piece.high]
            found += (Piece(piece.axis, low, high, high // low) for low, high in reversed(list(pairwise(inside))))
        else:
            found.append(piece)
    return found


def split_by(cuts: Iterable[Piece], axis: int, size: int) -> Layout:
    """A whole axis as pieces, outermost first, that begin and end wherever one of `cuts` does.

    >>> [p.size for p in split_by([Piece(0, 2, 6, 3)], 0, 12)]
    [2, 3, 2]
    """
    ends = sorted({1, size, *(end for p in cuts if p.axis == axis for end in (p.low, p.high))})
    return tuple(Piece(axis, low, high, high // low) for low, high in reversed(list(pairwise(ends))))
