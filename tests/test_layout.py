"""Records of what tokens are: places, boxes, names, seconds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attrace.errors import InputError
from attrace.layout import Frames, Grid

GRID = Grid(3, 5, prefix=("class", "register 1"), suffix=("detection 1",), patch=(14, 14), stride=(14, 14))


def test_names_and_indices() -> None:
    assert len(GRID) == 18
    assert (GRID.first, GRID.stop, GRID.patches) == (2, 18, 15)
    assert [GRID.name(token) for token in (0, 1, 2, 8, 17)] == [
        "class", "register 1", "row 0, column 0", "row 1, column 1", "detection 1",
    ]  # fmt: skip
    assert [GRID.named(name) for name in ("class", "register 1", "detection 1")] == [0, 1, 17]
    assert (GRID.place(0), GRID.place(17), GRID.box(17)) == (None, None, None)


def test_a_token_that_the_model_does_not_have_is_named_in_the_error() -> None:
    with pytest.raises(InputError, match=r"class, register 1, detection 1\. Received: 'distillation'"):
        GRID.named("distillation")
    with pytest.raises(InputError, match=r"none besides the patches\. Received: 'class'"):
        Grid(2, 2).named("class")


@given(
    frames=st.integers(1, 3), height=st.integers(1, 6), width=st.integers(1, 6), before=st.integers(0, 3),
    after=st.integers(0, 2), start=st.integers(0, 9), seed=st.none() | st.integers(0, 99),
)  # fmt: skip
def test_place_and_token_undo_each_other(
    frames: int, height: int, width: int, before: int, after: int, start: int, seed: int | None
) -> None:
    order = None
    if seed is not None:
        places = list(range(frames * height * width))
        random.Random(seed).shuffle(places)
        order = tuple(places)
    grid = Grid(height, width, frames=frames, prefix=("p",) * before, suffix=("s",) * after, start=start, order=order)
    seen = {}
    for token in range(grid.start, grid.stop):
        place = grid.place(token)
        if place is not None:
            assert grid.token(place[1], place[2], place[0]) == token
            seen[place] = token
    assert len(seen) == grid.patches
    assert [seen[place] for place in sorted(seen)] == list(grid.tokens)


def test_boxes_overlap_and_end_at_the_image() -> None:
    grid = Grid(2, 2, patch=(7, 7), stride=(4, 4), offset=(-3, -3), image=(6, 8))
    assert [grid.box(token) for token in range(4)] == [(0, 0, 4, 4), (0, 1, 4, 8), (1, 0, 6, 4), (1, 1, 6, 8)]


def test_merged_patches_reach_over_their_parts() -> None:
    grid = Grid(5, 4, patch=(4, 4), stride=(4, 4), image=(20, 16)).merged(2)
    assert (grid.height, grid.width, grid.patch, grid.stride) == (3, 2, (8, 8), (8, 8))
    assert grid.box(5) == (16, 8, 20, 16)
    assert Grid(5, 4, patch=(7, 7), stride=(4, 4)).merged(2).patch == (11, 11)
    assert Grid(4, 4).merged(2).patch is None


def test_frames_and_their_prefix() -> None:
    frames = Frames(3, stride=2, window=5, offset=-2, length=6, rate=100.0, prefix=("class",))
    assert (len(frames), frames.steps(0), frames.seconds(0)) == (4, None, None)
    assert [frames.steps(token) for token in (1, 2, 3)] == [(0, 3), (0, 5), (2, 6)]
    assert frames.seconds(3) == pytest.approx((0.02, 0.06))


@pytest.mark.parametrize(("call", "why"), [
    (lambda: Grid(0, 2), "at least one patch. Received: 1 x 0 x 2"),
    (lambda: Grid(1, 2, order=(0, 0)), "each of the 2 patches once"),
    (lambda: GRID.place(18), "from 0 to 17: 2 before and 1 after 1 x 3 x 5 patches. Received: 18"),
    (lambda: GRID.token(3, 0), "row from 0 to 2. Received: 3"),
    (lambda: GRID.token(0, -1), "column from 0 to 4. Received: -1"),
    (lambda: GRID.token(0, 0, 1), "frame from 0 to 0. Received: 1"),
    (lambda: Grid(2, 2).box(0), "knows its patch size"),
    (lambda: GRID.seconds(2), "axis of time"),
    (lambda: Frames(3, 2, 5).steps(3), "from 0 to 2. Received: 3"),
    (lambda: Frames(3, 2, 5).seconds(0), "sampling rate"),
])  # fmt: skip
def test_errors_say_what_there_is(call: object, why: str) -> None:
    with pytest.raises(InputError, match=why):
        call()  # type: ignore[operator]


def test_a_rate_can_be_set() -> None:
    assert replace(Frames(3, 160, 400), rate=16000.0).seconds(1) == pytest.approx((0.01, 0.035))
