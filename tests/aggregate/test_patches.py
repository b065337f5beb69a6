"""Scores of tokens as arrays in the image's shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attrace.aggregate import patch_map, pixel_map
from attrace.errors import InputError, ShapeError
from attrace.layout import Grid


def test_patches_lie_row_by_row_without_the_prefix() -> None:
    grid = Grid(2, 3, prefix=("class",), suffix=("padding",))
    assert patch_map(np.arange(8.0), grid).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_an_image_in_a_packed_sequence_and_in_blocks() -> None:
    grid = Grid(2, 4, start=3, order=(0, 1, 4, 5, 2, 3, 6, 7))
    assert patch_map(np.arange(12.0), grid).tolist() == [[3, 4, 7, 8], [5, 6, 9, 10]]


def test_a_clip_has_a_map_a_frame() -> None:
    grid = Grid(1, 2, frames=2, patch=(2, 2), stride=(2, 2), image=(2, 4))
    assert patch_map(np.arange(4.0), grid).tolist() == [[[0, 1]], [[2, 3]]]
    assert pixel_map(np.arange(4.0), grid)[1].tolist() == [[2, 2, 3, 3]] * 2


@given(
    height=st.integers(1, 4), width=st.integers(1, 4), patch=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)), offset=st.tuples(st.integers(-2, 0), st.integers(-2, 0)),
    margin=st.integers(0, 3),
)  # fmt: skip
def test_a_pixel_has_the_mean_of_the_patches_whose_box_holds_it(
    height: int, width: int, patch: tuple[int, int], stride: tuple[int, int], offset: tuple[int, int], margin: int
) -> None:
    image = height * stride[0] + margin, width * stride[1] + margin
    grid = Grid(height, width, ("class",), patch=patch, stride=stride, offset=offset, image=image)
    scores = np.random.default_rng(0).random(len(grid))
    found = pixel_map(scores, grid)
    assert found.shape == image
    for y in range(image[0]):
        for x in range(image[1]):
            over = []
            for token in range(1, len(grid)):
                top, left, bottom, right = grid.box(token) or (0, 0, 0, 0)
                if top <= y < bottom and left <= x < right:
                    over.append(scores[token])
            assert found[y, x] == pytest.approx(np.mean(over) if over else 0.0)


def test_pixels_beside_all_patches_are_zero() -> None:
    grid = Grid(29, 29, patch=(14, 14), stride=(14, 14), image=(416, 416))
    pixels = pixel_map(np.ones(841), grid)
    assert pixels[:406, :406].min() == 1.0
    assert not pixels[406:].any()


@pytest.mark.parametrize("shape", [(3,), (2, 4)])
def test_scores_of_another_length_name_the_sizes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"at least 5 tokens: 1 \+ 1 x 2 x 2 \+ 0 from token 0"):
        patch_map(np.zeros(shape), Grid(2, 2, ("class",)))


def test_pixels_need_a_patch_size() -> None:
    with pytest.raises(InputError, match="patch and image size"):
        pixel_map(np.zeros(4), Grid(2, 2))
