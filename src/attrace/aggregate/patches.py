"""Scores of patch tokens as an array in the shape of the image."""

from __future__ import annotations

import numpy as np

from attrace.errors import InputError, ShapeError
from attrace.layout import Grid
from attrace.types import Floats


def patch_map(scores: Floats, grid: Grid) -> Floats:
    """The patches' scores in the grid's shape: (n,) -> (height, width), or (frames, height, width) for a clip.

    Prefix and suffix tokens are left out; their part of the mass is what the map is short of.  `scores` covers the
    whole stream, also where it packs several images.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or len(values) < grid.stop:
        raise ShapeError(
            f"Expected scores (n,) over at least {grid.stop} tokens: {len(grid.prefix)} + {grid.frames} x "
            f"{grid.height} x {grid.width} + {len(grid.suffix)} from token {grid.start}. Received: {values.shape}. "
            "Give a whole row of the rollout, for one item."
        )
    cells = values[list(grid.tokens)].reshape(grid.frames, grid.height, grid.width)
    return cells if grid.frames > 1 else cells[0]


def pixel_map(scores: Floats, grid: Grid, size: tuple[int, int] | None = None) -> Floats:
    """Each pixel with the mean score of the patches that cover it: (n,) -> size, or (frames, *size) for a clip.

    `size` is (height, width) of the model's input; by default the grid's own.  Pixels that no patch covers (the edge
    of an image whose side is no multiple of the patch) are zero.
    """
    size = size or grid.image
    if size is None or grid.patch is None or grid.stride is None:
        raise InputError("Expected a grid that knows its patch and image size. Received: neither. Give size=(H, W).")
    cells = patch_map(scores, grid).reshape(grid.frames, grid.height, grid.width)
    rows, columns = (
        _cover(count, size[axis], grid.offset[axis], grid.stride[axis], grid.patch[axis])
        for axis, count in enumerate((grid.height, grid.width))
    )
    total = rows @ cells @ columns.T
    covered = np.outer(rows.sum(1), columns.sum(1))
    pixels = np.divide(total, covered, out=np.zeros_like(total), where=covered > 0)
    return pixels if grid.frames > 1 else pixels[0]


def _cover(count: int, length: int, offset: int, stride: int, patch: int) -> Floats:
    """(length, count), 1 where a patch covers a pixel of one axis."""
    pixel = np.arange(length)[:, None]
    start = offset + stride * np.arange(count)
    return ((pixel >= start) & (pixel < start + patch)).astype(np.float64)
