"""Characters as readers see them, against what the regex package finds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from attrace.aggregate.graphemes import boundaries, widen

# One or more of every class of Unicode Annex 29, but for viramas, where regex joins more than GB9c says.
ALPHABET = (
    "a é\u0301\u0308\r\n\t\u200b\u200c\u200d\ufe0f😀👩👧❤✊\U0001f3fd🇩🇪🇫\u1100\u1161\u11a8가각"
    "क\u0937ि東ーｶ\uff9e\u0600س\u064b\u202eก\u0e33©1\u20e3\U000e0067"
)


@given(st.text(alphabet=ALPHABET, max_size=12))
def test_agrees_with_regex(text):
    assert [text[a:b] for a, b in pairwise(boundaries(text))] == regex.findall(r"\X", text)


@pytest.mark.parametrize(
    "character",
    ["👩‍👩‍👧‍👦", "👋🏽", "🇩🇪", "e\u0301", "한", "क्षि", "1️⃣", "❤️‍🔥", "\r\n", "🏴󠁧󠁢󠁥󠁮󠁧󠁿"],
)
def test_one_character_is_never_cut(character):
    assert boundaries(character + "x") == [0, len(character), len(character) + 1]
    middle = max(1, len(character) // 2)
    assert widen(boundaries(character), middle - 1, middle) == (0, len(character))


def test_empty_text_has_one_boundary():
    assert boundaries("") == [0]


def test_an_empty_span_is_not_widened():
    assert widen(boundaries("🇩🇪"), 1, 1) == (1, 1)


def test_a_virama_joins_consonants_only():
    assert boundaries("क\u094d\u0937") == [0, 3]
    assert boundaries("\u094dक") == [0, 1, 2]
    assert boundaries("क\u094da") == [0, 2, 3]
