"""Images of several sizes in one run, and the places of their tokens in a language model's prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from attrace.capture.geometry_families import BLOCKS, image_token, merge_factor
from attrace.capture.observed import Observed
from attrace.layout import Grid, ImageSpan

PACKED = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos", "grid_thw": "hidden_states"}
"""The argument that tells (frames, height, width) of each image, and the one that holds their patches."""


def calls(ops: Sequence[Any]) -> Iterator[list[Any]]:
    """Attention calls that one module made in a row: packed images are attended to one by one."""
    for _, group in groupby(ops, key=lambda op: op.name):
        yield list(group)


def told_grids(ops: Sequence[Any], config: Any, seen: Observed, refused: list[str]) -> dict[str, tuple[Grid, ...]]:
    """Grids that an argument of the call tells, by the name of the argument that holds the patches."""
    found: dict[str, tuple[Grid, ...]] = {}
    for told, argument in PACKED.items():
        if told in seen.sizes:
            grids = packed_grids(seen.sizes[told], config)
            if isinstance(grids, str):
                refused.append(f"{argument}: {grids}")
                continue
            total = sum(len(grid) for grid in grids)
            if not any(sum(op.shape[2] for op in group) == total for group in calls(ops)):
                refused.append(f"{argument}: {total} patches by {told}, and no layer attends to as many")
            else:
                found[argument] = grids
    if "spatial_shapes" in seen.sizes:
        padded = padded_grids(seen.sizes["spatial_shapes"], seen.shapes.get("pixel_values", ()), ops, config)
        if isinstance(padded, str):
            refused.append(f"pixel_values: {padded}")
        else:
            found["pixel_values"] = padded
    return found


def packed_grids(sizes: Sequence[Sequence[int]], config: Any) -> tuple[Grid, ...] | str:
    """The grids of images packed into one sequence, one after the other, or why they cannot be told."""
    kind = getattr(config, "model_type", "").removesuffix("_vision")
    vision = getattr(config, "vision_config", None) or config
    if kind not in BLOCKS:
        return f"in which order a model of type {kind!r} packs its patches is not known"
    merge, side = vision.spatial_merge_size, vision.patch_size
    window = vision.window_size // merge // side if BLOCKS[kind] else None
    grids: list[Grid] = []
    for frames, height, width in sizes:
        if height % merge or width % merge:
            return f"a grid of {height} x {width} patches does not divide into blocks of {merge} x {merge}"
        grids.append(
            Grid(
                height,
                width,
                frames=frames,
                patch=(side, side),
                stride=(side, side),
                image=(height * side, width * side),
                start=grids[-1].stop if grids else 0,
                order=block_order(frames, height, width, merge, window),
            )
        )
    return tuple(grids)


def block_order(frames: int, height: int, width: int, block: int, window: int | None = None) -> tuple[int, ...]:
    """Patches block by block, and block x block of them inside, each counted row by row over the whole grid.

    `window`: blocks in windows of window x window blocks, those at the edges smaller.

    >>> block_order(1, 2, 4, 2)
    (0, 1, 4, 5, 2, 3, 6, 7)
    """
    rows, columns = height // block, width // block
    step = window or max(rows, columns)
    cells = [
        (row, column)
        for top in range(0, rows, step)
        for left in range(0, columns, step)
        for row in range(top, min(top + step, rows))
        for column in range(left, min(left + step, columns))
    ]
    return tuple(
        (frame * height + row * block + down) * width + column * block + right
        for frame in range(frames)
        for row, column in cells
        for down in range(block)
        for right in range(block)
    )


def padded_grids(
    sizes: Sequence[Sequence[int]], given: tuple[int, ...], ops: Sequence[Any], config: Any
) -> tuple[Grid, ...] | str:
    """One grid for each image of a batch that is padded to equal length, or why they cannot be told."""
    if len(given) != 3 or len(sizes) != given[0]:
        return f"{len(sizes)} sizes for patches of shape {given}"
    batch, n = given[:2]
    if not any(op.shape[0] == batch and op.shape[2] == op.shape[3] == n for op in ops):
        return f"{n} patches an image, and no layer attends to as many"
    side = getattr(getattr(config, "vision_config", None) or config, "patch_size", None)
    patch = (side, side) if isinstance(side, int) else None
    grids = []
    for height, width in sizes:
        if height * width > n:
            return f"an image of {height} x {width} patches in {n} tokens"
        image = (height * side, width * side) if isinstance(side, int) else None
        padding = ("padding",) * (n - height * width)
        grids.append(Grid(height, width, suffix=padding, patch=patch, stride=patch, image=image))
    return tuple(grids)


# In the prompt


def prompt_spans(
    config: Any, seen: Observed, images: Mapping[str, tuple[Grid, ...]], counts: Mapping[str, int], refused: list[str]
) -> tuple[ImageSpan, ...]:
    """Where each image is in the prompts of the batch."""
    token = image_token(config)
    if token is None or "pixel_values" not in images:
        return ()
    if seen.ids is None:
        refused.append("prompt: no input_ids, so that the image tokens cannot be found")
        return ()
    grids = images["pixel_values"]
    if len(grids) == 1:
        grids *= counts.get("pixel_values", 1)
    found: list[ImageSpan] = []
    waiting = [in_prompt(grid, config) for grid in grids]
    for item, row in enumerate(seen.ids.tolist()):
        places = [i for i, one in enumerate(row) if one == token]
        while places:
            image = len(found)
            tokens = sum(len(one) for one in waiting if not isinstance(one, str))
            more = f"more image tokens than the {tokens} of {len(waiting)} images"
            grid = waiting[image] if image < len(waiting) else more
            if not isinstance(grid, str) and places[: len(grid)] != list(range(places[0], places[0] + len(grid))):
                grid = (
                    f"{len(places)} image tokens left for an image of {grid.height} x {grid.width}, which are not "
                    f"{len(grid)} in a row"
                )
            if isinstance(grid, str):
                refused.append(f"prompt {item}: {grid}")
                return ()
            found.append(ImageSpan(item, image, replace(grid, start=places[0])))
            places = places[len(grid) :]
    if len(found) < len(waiting):
        refused.append(f"prompt: image tokens of {len(found)} images, and {len(waiting)} images")
        return ()
    return tuple(found)


def in_prompt(grid: Grid, config: Any) -> Grid | str:
    """The tokens that stand for an image in the prompt, or why they cannot be told."""
    if getattr(config, "num_query_tokens", None):
        return "tokens that are learned queries, not places in the image"
    factor = merge_factor(config, grid.height)
    if factor is None or grid.height % factor or grid.width % factor:
        return f"a grid of {grid.height} x {grid.width} patches that does not merge evenly"
    kept = grid.prefix if getattr(config, "vision_feature_select_strategy", None) == "full" else ()
    merged = grid.merged(factor) if factor > 1 else grid
    return replace(merged, prefix=kept, suffix=(), start=0, order=None)
