"""Tokens without offsets are found again in their text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attrace.capture.alignment import align


@pytest.mark.parametrize(
    ("text", "pieces", "found", "unknown"),
    [
        ("The cats sat!", ["[CLS]", "the", "cat", "##s", "sat", "!"], ["", "The", "cat", "s", "sat", "!"], 0),
        ("Hello world", ["Hello", "Ġworld", "<|endoftext|>"], ["Hello", "world", ""], 0),
        ("a zebra ran", ["a", "[UNK]", "ran", "[PAD]"], ["a", "zebra", "ran", ""], 1),
        ("x, y z", ["[UNK]", "[UNK]", "[UNK]"], ["x", ",", "y"], 3),
        ("İstanbul is big", ["is", "big"], ["is", "big"], 0),
        ("new\nline", ["new", "Ċ", "line"], ["new", "\n", "line"], 0),
        ("low lower", ["▁low", "▁low", "er"], ["low", "low", "er"], 0),
    ],
)
def test_pieces_follow_each_other(text: str, pieces: list[str], found: list[str], unknown: int) -> None:
    places, count = align(text, pieces)
    assert [text[a:b] for a, b in places] == found
    assert count == unknown


@given(st.text(max_size=30), st.lists(st.text(max_size=6), max_size=8))
def test_places_lie_in_the_text_and_never_go_back(text: str, pieces: list[str]) -> None:
    places, count = align(text, [*pieces, "[UNK]"])
    assert len(places) == len(pieces) + 1
    real = [place for place in places if place != (0, 0)]
    assert all(0 <= a <= b <= len(text) for a, b in real)
    assert all(first[1] <= second[0] for first, second in pairwise(real))
    assert count <= len(places)
