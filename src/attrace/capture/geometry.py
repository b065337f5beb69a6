"""What the tokens of a recorded run are, read off the run itself: `Trace.geometry`.

Patch grids come from the convolutions that made the tokens and the size of what they read, never from a square root of
a token count; tokens around the patches from the parameters that were put beside them.  Each count is checked against
the attention calls.  What does not add up is refused, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from attrace.capture.geometry_families import rate_of
from attrace.capture.joined import levels_of
from attrace.capture.observed import Observed
from attrace.capture.packed import PACKED, prompt_spans, told_grids
from attrace.capture.stems import Stem, around, stems
from attrace.errors import CaptureError
from attrace.layout import Frames, Grid, ImageSpan

if TYPE_CHECKING:
    from attrace.capture.trace import Trace


@dataclass(frozen=True)
class Geometry:
    """What the tokens of a run's images and sounds are."""

    images: Mapping[str, tuple[Grid, ...]] = field(default_factory=dict)
    """By the name of the forward's argument: one grid that all images share, or one for each image."""
    sounds: Mapping[str, Frames] = field(default_factory=dict)
    prompt: tuple[ImageSpan, ...] = ()
    """Where the images are in a language model's prompt."""
    levels: Mapping[int, Grid] = field(default_factory=dict)
    """The grid that an attention call works on, by `op.layer`; it changes where a model merges its tokens."""
    refused: tuple[str, ...] = ()
    """What could not be told, and why."""

    @property
    def grid(self) -> Grid:
        """The one grid of the run, before any merging; CaptureError where there is none, or more than one."""
        grids = [grid for grids in self.images.values() for grid in grids]
        if len(grids) != 1:
            why = "; ".join(self.refused) or f"{len(grids)} of them"
            raise CaptureError(f"Expected one patch grid. Received: {why}. See .images, .prompt and .refused.")
        return grids[0]

    @property
    def frames(self) -> Frames:
        """The one sound of the run; CaptureError where there is none, or more than one."""
        if len(self.sounds) != 1:
            why = "; ".join(self.refused) or f"{len(self.sounds)} of them"
            raise CaptureError(f"Expected the frames of one sound. Received: {why}.")
        return next(iter(self.sounds.values()))


def geometry_of(trace: Trace) -> Geometry:
    """Read the geometry of a trace; what cannot be told is in `refused`."""
    seen: Observed | None = trace.seen
    refused: list[str] = []
    if seen is None:
        return Geometry(refused=(f"{trace.model} was not recorded in PyTorch, where tokens are followed to the image",))
    if not (seen.steps or seen.sizes):
        return Geometry(refused=(f"{trace.model} read neither an image nor a sound by a convolution",))
    reading = _Reading(trace, seen, refused)
    packed = bool(set(seen.sizes) & set(PACKED))
    reading.images.update(told_grids(trace.ops, trace.config, seen, refused))
    for chains in stems(seen):
        if trace.ops and chains[0].argument not in reading.images and not packed:
            reading.read(chains)
    if not (reading.images or reading.sounds or refused):
        refused.append(f"no convolution of {trace.model} reads an argument of the call as it came")
    prompt = prompt_spans(trace.config, seen, reading.images, reading.counts, refused)
    return Geometry(reading.images, reading.sounds, prompt, reading.levels, tuple(refused))


@dataclass
class _Reading:
    """What was found so far."""

    trace: Trace
    seen: Observed
    refused: list[str]
    images: dict[str, tuple[Grid, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """How many images came in an argument."""
    sounds: dict[str, Frames] = field(default_factory=dict)
    levels: dict[int, Grid] = field(default_factory=dict)

    def read(self, chains: Sequence[Stem]) -> None:
        """Note what an argument holds, by the first chain of convolutions whose tokens the attention calls count."""
        tower = tower_of(chains[0].name, self.trace.ops)
        why = []
        for stem in chains:
            n = tower[0].shape[2]
            # A spectrogram whose frequencies went into the tokens' vectors has fewer tokens than it has cells.
            along = stem.flat and not stem.turned and n == stem.counts[0] != math.prod(stem.counts)
            one = self._sound(stem, n) if len(stem.counts) == 1 or along else self._image(stem, tower)
            if not one:
                return
            why.append(one)
        self.refused.append(f"{chains[0].argument}: {why[0]}")

    def _sound(self, stem: Stem, n: int) -> str:
        """Note the frames of a sound, or say why they cannot be told."""
        count = stem.counts[0]
        named = around(count, n, stem, self.seen)
        if isinstance(named, str):
            return f"{count} frames from {stem.sizes[0]} steps by {stem.name}; {named}"
        self.sounds[stem.argument] = Frames(
            count,
            stem.stride[0],
            stem.reach[0],
            offset=stem.offset[0],
            length=stem.sizes[0],
            rate=rate_of(self.trace.config),
            prefix=tuple(named[0]),
        )
        return ""

    def _in_one_sequence(self, grid: Grid, stem: Stem, first: Any) -> tuple[Grid, ...]:
        """A grid for each image, where a batch of them, each cut to its own size, became one sequence."""
        sizes = self.seen.sizes.get("image_sizes", [list(stem.sizes)] * stem.batch)
        grids: list[Grid] = []
        for height, width in sizes if len(stem.sizes) == 2 else ():
            rows, columns = height // stem.stride[0], width // stem.stride[1]
            start = grids[-1].stop if grids else 0
            if min(rows, columns) < 1:
                return ()
            grids.append(replace(grid, height=rows, width=columns, image=(height, width), start=start))
        fits = len(grids) == stem.batch and first.shape[0] == 1 and first.shape[2] == sum(len(one) for one in grids)
        return tuple(grids) if fits else ()

    def _image(self, stem: Stem, tower: list[Any]) -> str:
        """Note the grid of an image, or say why it cannot be told."""
        height, width = stem.counts[-2:]
        grid = Grid(
            height,
            width,
            frames=stem.counts[0] if len(stem.counts) == 3 else 1,
            patch=(stem.reach[-2], stem.reach[-1]),
            stride=(stem.stride[-2], stem.stride[-1]),
            offset=(stem.offset[-2], stem.offset[-1]),
            image=(stem.sizes[-2], stem.sizes[-1]),
            axes=("frequency", "time") if stem.turned else ("height", "width"),
            rate=rate_of(self.trace.config) if stem.turned else None,
        )
        if any(op.name in self.seen.windows for op in tower):
            found = levels_of(grid, stem.batch, tower, self.seen.windows)
            if isinstance(found, str):
                return found
            self.levels.update(found)
        else:
            named = around(grid.patches, tower[0].shape[2], stem, self.seen)
            if isinstance(named, str) and (cropped := self._in_one_sequence(grid, stem, tower[0])):
                self.images[stem.argument] = cropped
                return ""
            if isinstance(named, str):
                return f"{height} x {width} patches of {stem.sizes} by {stem.name}; {named}"
            grid = replace(grid, prefix=tuple(named[0]), suffix=tuple(named[1]))
            self.levels.update({op.layer: grid for op in tower if op.shape[2] == op.shape[3] == len(grid)})
        self.images[stem.argument] = (grid,)
        self.counts[stem.argument] = stem.batch
        return ""


def tower_of(stem: str, ops: Sequence[Any]) -> list[Any]:
    """The attention calls nearest to a module: those under the innermost module around it that makes any."""
    parts = stem.split(".")
    for end in range(len(parts) - 1, 0, -1):
        inside = ".".join(parts[:end]) + "."
        found = [op for op in ops if op.name.startswith(inside)]
        if found:
            return found
    return list(ops)
