"""What a rollout of a recorded run is asked: each check returns the plain form or says what is wrong with it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrace.capture.memory import check_fits
from attrace.errors import InputError, NonFiniteError, ShapeError
from attrace.ops.namespace import dtype_name, framework, framework_of
from attrace.ops.rollout.checks import check_index, check_integers, check_positions
from attrace.types import Array

if TYPE_CHECKING:
    from attrace.capture.recorded import RecordedOp

Question = int | Sequence[int] | tuple[str, int | Sequence[int]]
"""Token positions, of one stream where its name comes first."""
Ask = Literal["target", "source", "segments", "map"]
Start = tuple[Array, Ask, bool]
"""The vectors to start from, (B, n, M), which question they ask, and whether M is to be dropped."""
FLOATS = ("float16", "bfloat16", "float32", "float64")


def check_one(target: Any, source: Any, segments: Any) -> None:
    if sum(asked is not None for asked in (target, source, segments)) > 1:
        raise InputError("Expected one of target, source and segments. Received: more than one. Ask one by one.")


def starting_vectors(
    op: RecordedOp, n: int, target: Any, source: Any, segments: Any, *, generated: bool = False
) -> Start:
    """The vectors to start from.

    `op` reads the stream that is asked about, of n tokens.  What is carried from layer to layer is float64 where
    the device has it, for vectors; a whole map is float32.  `generated`: the last token has no row.
    """
    batch = op.shape[0]
    arrays = framework(op.vectors)
    wide = arrays.double(op.device)

    def ones_at(places: Sequence[Any]) -> Array:
        start = arrays.xp.zeros((batch, n, len(places)), dtype=wide, device=op.device)
        for column, place in enumerate(places):
            start[:, place, column] = 1.0
        return start

    if target is None and source is None and segments is None:
        advice = "Ask for rows of it: rollout(target=...)."
        check_fits((batch, n, n), 4, name="a whole rollout", advice=advice)
        eye = arrays.xp.eye(n, dtype=op.dtype, device=op.device)
        return arrays.xp.broadcast_to(eye, (batch, n, n)), "map", False
    if segments is not None:
        return ones_at(check_segments(segments, n)), "segments", False
    if getattr(target, "ndim", 0) and framework_of(target) and dtype_name(target) in FLOATS:
        row = _check_row(arrays.convert(target, wide, op.device), batch, n)
        return arrays.xp.broadcast_to(row, (batch, n))[..., None], "target", True
    ask: Literal["target", "source"] = "target" if source is None else "source"
    if generated and n in (target, source):
        raise InputError(
            f"Expected {ask} from {-n} to {n - 1}. Received: {n}, the last token of the generation: the model was "
            f"never given it. Row {n - 1} is the one that predicted it."
        )
    at, single = check_positions(ask, target if source is None else source, n)
    return ones_at(at), ask, single


def check_item(item: Any, batch: int) -> int:
    """The index of a batch item, from 0."""
    return check_index("item", item, batch, f"the batch has {batch} items; tokens are named by target=")


def check_layers(layers: Sequence[int] | None, count: int) -> list[int]:
    """Layer numbers, negative ones from the end, in forward order; InputError where one does not exist."""
    if layers is None:
        return list(range(count))
    given = check_integers("layers", layers)
    chosen = {check_index("layers", layer, count, f"the model has {count} layers") for layer in given}
    if not chosen or len(chosen) < len(given):
        raise InputError(f"Expected at least one layer, each once. Received: {given!r}. Leave layers out for all.")
    return sorted(chosen)


def check_segments(segments: Any, n: int) -> list[slice]:
    """(start, stop) pairs as slices of n tokens."""
    listed = segments if isinstance(segments, Iterable) and not isinstance(segments, str | bytes | dict) else [segments]
    found = [_check_segment(segment, n) for segment in listed]
    if not found:
        raise InputError("Expected at least one segment (start, stop). Received: none. Leave segments out for the map.")
    return found


def _check_segment(segment: Any, n: int) -> slice:
    try:
        first, last = segment
        start, stop = operator.index(first), operator.index(last)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"Expected segments as (start, stop) pairs of integers. Received: {segment!r}. Write segments=[(0, 5)] for "
            "tokens 0 to 4."
        ) from None
    if not 0 <= start < stop <= n:
        raise InputError(
            f"Expected segments (start, stop) with 0 <= start < stop <= {n}. Received: {(start, stop)}. Choose them "
            f"within: the maps have n = {n} tokens."
        )
    return slice(start, stop)


def _check_row(row: Array, batch: int, n: int) -> Array:
    """Shares to start from: (n,), or (B, n)."""
    if tuple(row.shape) not in ((n,), (batch, n)):
        raise ShapeError(
            f"Expected a row of shape ({n},) or ({batch}, {n}). Received: {tuple(row.shape)}. Give a share for each "
            "token, or the positions as integers."
        )
    found = framework_of(row)
    assert found is not None
    if not bool(found.xp.all(found.xp.isfinite(row))):
        raise NonFiniteError(
            "Expected a row of finite shares to start from. Received: NaN or infinity. Look for it where the row was "
            "made."
        )
    if bool(found.xp.any(row < 0)):
        raise InputError(
            f"Expected a row of shares that are not negative. Received: {float(found.xp.min(row)):g}. Ask for the "
            "positive and the negative part one by one."
        )
    return row
