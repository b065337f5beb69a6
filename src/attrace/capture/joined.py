"""The calls of a run over whole grids: windows and packed pieces joined, mergings between stages in their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from attrace.capture.observed import Windows
from attrace.capture.packed import calls
from attrace.capture.windows import GridAttention, Merging, Piece, Places, window_places
from attrace.errors import CaptureError
from attrace.layout import Grid

if TYPE_CHECKING:
    from attrace.capture.trace import Trace


def joined(trace: Trace) -> list[Any]:
    """The trace's operators, each over all tokens of its grid, with a `Merging` where one grid becomes the next.

    Operators that need no joining are the trace's own.
    """
    if trace.known is not None:
        return list(trace.ops)
    geometry = trace.geometry
    windows = trace.seen.windows if trace.seen is not None else {}
    totals = {sum(len(grid) for grid in grids) for grids in geometry.images.values() if len(grids) > 1}
    ops: list[Any] = []
    last: Grid | None = None
    for group in calls(trace.ops):
        here = geometry.levels.get(group[0].layer)
        if here is not None and windows:
            made = [over_grid(op, here, windows.get(op.name)) for op in group]
            if last is not None and (last.height, last.width) != (here.height, here.width):
                ops.append(Merging.of(last.height, last.width, 2, made[0]))
            ops += made
            last = here
        elif len(group) > 1 and sum(op.shape[2] for op in group) in totals:
            ops.append(packed(group))
        else:
            ops += group
    return ops


def chain_over_grids(trace: Trace) -> list[Any] | None:
    """The run's operators over whole grids, one after the other; None where they are a chain as they are.

    CaptureError where the batch axis holds windows whose places cannot be told, or the chain breaks.
    """
    geometry, windows = trace.geometry, bool(trace.seen.windows)
    refused = "; ".join(geometry.refused)
    if windows and not geometry.levels:
        raise CaptureError(
            f"Expected windows of {trace.model} whose places in the grid can be told. Received: {refused}. The maps "
            "of each window are in trace.ops."
        )
    if not windows and not (geometry.images or geometry.sounds):
        items = max(step.given[0] for step in trace.seen.steps)
        pieces = max(op.shape[0] for op in trace.ops)
        if pieces > items:
            raise CaptureError(
                f"Expected maps of {trace.model} over the whole of each of its {items} inputs. Received: {pieces} "
                f"pieces in the batch axis; {refused}. The maps of each piece are in trace.ops."
            )
    if not windows and all(len(grids) == 1 for grids in geometry.images.values()):
        return None
    ops = joined(trace)
    for before, op in pairwise(ops):
        if op.kind != "self" or before.shape[0] != op.shape[0] or before.shape[2] != op.shape[3]:
            if not windows:
                return None
            raise CaptureError(
                f"Expected layers of {trace.model} that form one chain. Received: {op.name} with (B, H, Q, T) = "
                f"{op.shape} after {before.name} with {before.shape}. The maps of each call are in trace.joined().ops."
            )
    return ops


def over_grid(op: Any, grid: Grid, cut: Windows | None) -> Any:
    """A windowed call over its whole grid; a call that sees the whole grid as it is."""
    places = None if cut is None else places_of(grid, cut)
    if places is None or isinstance(places, str) or np.array_equal(places, [range(grid.patches)]):
        return op
    batch = op.shape[0] // len(places)
    shape = (batch, op.shape[1], grid.patches, grid.patches)
    return whole(op, shape, (Piece(op, places),))


def packed(group: Sequence[Any]) -> GridAttention:
    """Calls that attend to one piece of a sequence after the other, as one call over all of it."""
    first, pieces, start = group[0], [], 0
    for op in group:
        pieces.append(Piece(op, np.arange(start, start + op.shape[2])[None]))
        start += op.shape[2]
    shape = (first.shape[0], first.shape[1], start, start)
    return whole(first, shape, pieces)


def whole(op: Any, shape: tuple[int, int, int, int], pieces: Sequence[Piece]) -> GridAttention:
    """The pieces of one layer as one call; `op` is the first of its calls."""
    return GridAttention(
        name=op.name, layer=op.layer, shape=shape, kind="self", queries=op.queries, keys=op.keys, pieces=tuple(pieces)
    )


def levels_of(grid: Grid, batch: int, tower: Sequence[Any], windows: Mapping[str, Windows]) -> dict[int, Grid] | str:
    """The grid of each call of a windowed model, by `op.layer`, or why its windows do not add up."""
    levels: dict[int, Grid] = {}
    merged = min((windows[op.name].merges for op in tower if op.name in windows), default=0)
    here = grid
    for op in tower:
        cut = windows.get(op.name)
        while cut is not None and merged < cut.merges:
            here, merged = here.merged(2), merged + 1
        places = None if cut is None else places_of(here, cut)
        if isinstance(places, str):
            return f"{op.name}: {places}"
        wanted = (batch, here.patches) if places is None else (batch * len(places), places.shape[1])
        if op.shape[::2] != wanted:
            size = "no windows" if cut is None else f"windows of {cut.size[0]} x {cut.size[1]}"
            return (
                f"{op.name}: {size} on {batch} grids of {here.height} x {here.width} make {wanted[0]} x {wanted[1]} "
                f"tokens, seen were {op.shape[0]} x {op.shape[2]}"
            )
        levels[op.layer] = here
    return levels


def places_of(grid: Grid, cut: Windows) -> Places | str:
    """Places of the windows' tokens in the grid, or why they cannot be told."""
    down, right = cut.shift
    if cut.library == "torchvision":  # it does not shift along a side that one window covers
        down = 0 if cut.size[0] >= grid.height else down
        right = 0 if cut.size[1] >= grid.width else right
    padded = grid.height % cut.size[0] or grid.width % cut.size[1]
    if cut.padding is None and padded and (down or right):
        return f"whether {cut.library} pads before it shifts is not known"
    return window_places(grid.height, grid.width, cut.size, (down, right), first=cut.padding or "pad first")
