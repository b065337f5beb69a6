"""Words by character offsets."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attrace.aggregate import label_tokens, split_words, words
from attrace.errors import InputError, NonFiniteError, ShapeError
from attrace.types import Token


def split(text):
    return [text[start:end] for start, end in split_words(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n\t", []),
        ("new cats", ["new", "cats"]),
        ("(Hello), world!!!", ["(", "Hello", "),", "world", "!!!"]),
        ("don't well-known rock’n’roll", ["don't", "well-known", "rock’n’roll"]),
        ("'quoted' -dash- ...", ["'", "quoted", "'", "-", "dash", "-", "..."]),
        ("3.14 1,000 50% $9.99 a,b", ["3.14", "1,000", "50%", "$9.99", "a", ",", "b"]),
        ("joe@x.org http://a.b/c", ["joe@x.org", "http://a.b/c"]),
        ('print("hi"):', ["print", '("', "hi", '"):']),
        ("x+=user_name", ["x", "+=", "user_name"]),
        ("东京に行くよ。", ["东", "京", "に", "行", "く", "よ", "。"]),
        ("서울에 갔다", ["서울에", "갔다"]),
        ("free😀👩‍👧now", ["free", "😀", "👩‍👧", "now"]),
        ("I ❤️ 🇩🇪🇫🇷", ["I", "❤️", "🇩🇪", "🇫🇷"]),
        ("cafe\u0301, nai\u0308ve", ["cafe\u0301", ",", "nai\u0308ve"]),
        ("مرحبا iPhone بكم", ["مرحبا", "iPhone", "بكم"]),
        ("a\u200bb", ["a", "b"]),
        ("end.-", ["end", ".-"]),
    ],
)
def test_split_words(text, expected):
    assert split(text) == expected


def test_leading_blank_inside_the_span_joins_nothing():
    tokens = (Token("new", 0, 3), Token(" cats", 3, 8))
    assert [(w.text, w.start, w.end, w.tokens) for w in words("new cats", tokens, [0.5, 0.5])] == [
        ("new", 0, 3, (0,)),
        ("cats", 4, 8, (1,)),
    ]


def test_trailing_blank_and_newline_inside_the_span_join_nothing():
    tokens = (Token("new ", 0, 4), Token("cats\n", 4, 9), Token("x", 9, 10))
    assert [w.text for w in words("new cats\nx", tokens, [0.5, 0.25, 0.25])] == ["new", "cats", "x"]


def test_a_token_over_two_words_joins_them():
    tokens = (Token("New", 0, 3), Token(" Yo", 3, 6), Token("rk ci", 6, 11), Token("ty", 11, 13))
    (new, rest) = words("New York city", tokens, [0.1, 0.2, 0.3, 0.4])
    assert new.text == "New"
    assert (rest.text, rest.tokens, rest.score) == ("York city", (1, 2, 3), pytest.approx(0.9))


def test_bytes_of_one_emoji_are_one_word():
    tokens = tuple(Token("😀", 2, 3) for _ in range(3))
    (word,) = words("a 😀", tokens, [0.1, 0.2, 0.3])
    assert (word.text, word.tokens, word.score) == ("😀", (0, 1, 2), pytest.approx(0.6))


def test_blank_tokens_are_units_of_their_own():
    text = "if x:\n    y"
    tokens = (Token("if x:", 0, 5), Token("\n", 5, 6), Token("    ", 6, 10), Token("y", 10, 11))
    assert [w.text for w in words(text, tokens, [0.25] * 4)] == ["if x:", "\n", "    ", "y"]


def test_one_blank_belongs_to_the_word_that_it_leads():
    tokens = (Token("a", 0, 1), Token(" ", 1, 2), Token("b", 2, 3), Token(" ", 3, 4))
    assert [(w.text, w.tokens) for w in words("a b ", tokens, [0.25] * 4)] == [
        ("a", (0,)),
        ("b", (1, 2)),
        (" ", (3,)),
    ]


def test_a_blank_that_leads_a_word_without_tokens_stays_alone():
    tokens = (Token("a", 0, 1), Token(" ", 1, 2))
    assert [w.text for w in words("a b", tokens, [0.5, 0.5])] == ["a", " "]


def test_special_tokens_never_merge_and_empty_tokens_stay():
    tokens = (Token("<s>", 0, 0, True), Token("▁", 0, 0), Token("hi", 0, 2), Token("hi", 0, 2, True))
    assert [(w.text, w.tokens) for w in words("hi", tokens, [0.1, 0.2, 0.3, 0.4])] == [
        ("▁", (1,)),
        ("hi", (2,)),
    ]


def test_shares_are_of_the_total():
    tokens = (Token("a", 0, 1), Token("b", 2, 3))
    assert [w.share for w in words("a b", tokens, [0.3, -0.1])] == pytest.approx([0.75, 0.25])
    assert [w.share for w in words("a b", tokens, [0.3, 0.1], total=1.0)] == pytest.approx([0.3, 0.1])
    assert [w.share for w in words("a b", tokens, [0.0, 0.0])] == [0.0, 0.0]


def test_opposite_effects_cancel_in_the_score():
    (word,) = words("ab", (Token("a", 0, 1), Token("b", 1, 2)), [0.5, -0.5])
    assert (word.score, word.share) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_named(bad):
    tokens = (Token("a", 0, 1), Token("bad", 1, 4))
    with pytest.raises(NonFiniteError, match=r"token 1 \('bad'\)"):
        words("abad", tokens, [0.1, bad])


def test_lengths_must_fit():
    with pytest.raises(ShapeError, match=r"\(1,\).*\(2,\)"):
        words("a", (Token("a", 0, 1),), [0.1, 0.2])


@pytest.mark.parametrize("span", [(0, 9), (-1, 1), (1, 0)])
def test_spans_must_lie_in_the_text(span):
    with pytest.raises(InputError, match="token 0"):
        words("a", (Token("a", *span),), [0.1])


@pytest.mark.parametrize("total", [-1.0, math.nan, math.inf])
def test_total_must_be_a_mass(total):
    with pytest.raises(InputError, match="total"):
        words("a", (Token("a", 0, 1),), [0.1], total=total)


TEXT = st.text(alphabet="ab, .'-\n\t 東京😀👩\u200d👧é\u0301🇩🇪12()", max_size=24)


@st.composite
def attributions(draw):
    text = draw(TEXT)
    count = draw(st.integers(0, 12))
    spans, special = [], []
    for _ in range(count):
        start = draw(st.integers(0, len(text)))
        spans.append((start, draw(st.integers(start, min(len(text), start + 5)))))
        special.append(draw(st.booleans()))
    tokens = label_tokens(text, spans, [f"p{i}" for i in range(count)], special)
    masses = draw(st.lists(st.floats(0, 1), min_size=count + 2, max_size=count + 2))
    whole = math.fsum(masses) or 1.0
    return text, tokens, np.array(masses[:count]) / whole, masses[-2] / whole, masses[-1] / whole


@given(attributions())
def test_no_mass_is_lost(case):
    text, tokens, scores, lost, sink = case
    total = abs(scores).sum() + lost + sink
    grouped = words(text, tokens, scores, total=total)
    special = sum(abs(scores[i]) for i, token in enumerate(tokens) if token.special)
    if total:
        assert math.isclose(sum(w.share for w in grouped) + (special + lost + sink) / total, 1.0, abs_tol=1e-9)
    seen = [index for word in grouped for index in word.tokens]
    assert sorted(seen) == [index for index, token in enumerate(tokens) if not token.special]


@given(attributions())
def test_words_are_ordered_disjoint_slices(case):
    text, tokens, scores, _, _ = case
    spans = [(w.start, w.end) for w in words(text, tokens, scores) if w.start != w.end]
    assert spans == sorted(spans)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))
    for word in words(text, tokens, scores):
        if word.start != word.end:
            assert word.text == text[word.start : word.end]


@given(TEXT)
def test_split_words_covers_all_but_blanks(text):
    spans = split_words(text)
    covered = {at for start, end in spans for at in range(start, end)}
    assert all(at in covered or char.isspace() for at, char in enumerate(text))
    assert all(start < end for start, end in spans)
