"""Sub-words to words, by character offsets into the source text."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from attrace.aggregate.graphemes import boundaries, is_flag_letter, is_pictograph
from attrace.errors import InputError, NonFiniteError, ShapeError
from attrace.types import Token, Word

# Punctuation that never splits a word from what stands beside it: user_name, 50%, #1, @home, R&D.
_WORD_MARKS = frozenset("_%‰#@&")
# Punctuation that is cut off at the ends of a word but stays inside of it: don't, well-known, 3.14, and/or.
_INNER_MARKS = frozenset("'’-‐‑./:\\?·׳״")
_DIGIT_MARKS = frozenset(",٫٬")
_BLANKS = frozenset("\u200b\ufeff")

_IDEOGRAPHS = (
    (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3021, 0x3029), (0x3031, 0x3035), (0x3041, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0xFF66, 0xFF9D),
    (0x1B000, 0x1B16F), (0x20000, 0x3FFFD),
)  # fmt: skip


def _kind(cluster: str) -> str:
    """One of blank, lone (a word by itself), inner, mark (punctuation) and letter."""
    char = cluster[0]
    if all(part.isspace() or part in _BLANKS for part in cluster):
        return "blank"
    if char.isascii() and (char.isalnum() or char in "$"):
        return "letter" if "\u20e3" not in cluster else "lone"  # a keycap emoji
    code = ord(char)
    category = unicodedata.category(char)
    if category[0] == "P":
        if char in _WORD_MARKS:
            return "letter"
        return "inner" if char in _INNER_MARKS or char in _DIGIT_MARKS else "mark"
    if category in ("Sm", "Sk"):
        return "mark"
    lone = (
        any(low <= code <= high for low, high in _IDEOGRAPHS)
        or (is_pictograph(char) and code > 0xFF)
        or is_flag_letter(char)
        or "\ufe0f" in cluster
    )
    return "lone" if lone else "letter"


def split_words(text: str) -> list[tuple[int, int]]:
    """Spans of the words of a text, in order and without overlap; blanks belong to none.

    A word is a run without blanks, its punctuation split off: what leads it, what trails it, and what stands
    inside of it except apostrophes, hyphens and the marks of numbers and addresses (`don't`, `well-known`,
    `1,000.50`, `and/or`, `a.b@c.org`).  Punctuation that touches forms one span.  Each ideograph, kana and
    emoji is a word of its own.  Other scripts that write no blanks (Thai, Khmer) stay in runs.
    No span begins or ends inside a character that a reader sees as one.

    >>> [ "«Don't», 50% 东京!"[start:end] for start, end in split_words("«Don't», 50% 东京!") ]
    ['«', "Don't", '»,', '50%', '东', '京', '!']
    """
    bounds = boundaries(text)
    spans = list(pairwise(bounds))
    kinds = [_kind(text[start:end]) for start, end in spans]
    for at, kind in enumerate(kinds):
        if kind != "inner":
            continue
        left = kinds[at - 1] if at else "blank"
        right = next((later for later in kinds[at + 1 :] if later != "inner"), "blank")
        keeps = left == "letter" and right == "letter"
        if keeps and text[spans[at][0]] in _DIGIT_MARKS:
            keeps = text[spans[at - 1][0]].isdigit() and text[spans[at + 1][0]].isdigit()
        kinds[at] = "letter" if keeps else "mark"
    words: list[tuple[int, int]] = []
    last = "blank"
    for (start, end), kind in zip(spans, kinds, strict=True):
        if kind != "blank":
            if kind == last and kind != "lone":
                words[-1] = (words[-1][0], end)
            else:
                words.append((start, end))
        last = kind
    return words


def _merge(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Join spans that share a place: (first, last, token) with last included -> (first, last, tokens)."""
    merged: list[tuple[int, int, tuple[int, ...]]] = []
    for first, last, token in sorted(spans):
        if merged and first <= merged[-1][1]:
            start, end, members = merged[-1]
            merged[-1] = (start, max(end, last), (*members, token))
        else:
            merged.append((first, last, (token,)))
    return [(first, last, tuple(sorted(members))) for first, last, members in merged]


def _home(text: str, token: Token, run_at: Sequence[int]) -> int:
    """The run that a token of blanks only belongs to, or -1: the one around it, or the one that it leads."""
    inside = run_at[token.start]
    single = token.end - token.start == 1 and text[token.start] in " \xa0\u3000"
    if inside >= 0 or not single or token.end == len(text):
        return inside
    leads = token.start == 0 or not text[token.start - 1].isspace()
    return run_at[token.end] if leads else -1


def _units(text: str, tokens: Sequence[Token]) -> list[tuple[int, int, str, tuple[int, ...]]]:
    """(start, end, label, token indices) for words, runs of blanks, and tokens that stand for no text."""
    spans = split_words(text)
    word_at = np.full(len(text), -1, dtype=np.int64)
    for number, (start, end) in enumerate(spans):
        word_at[start:end] = number
    units: list[tuple[int, int, str, tuple[int, ...]]] = []
    wordy: list[tuple[int, int, int]] = []
    blank: list[tuple[int, int, int]] = []
    for index, token in enumerate(tokens):
        if token.special:
            continue
        if token.start == token.end:
            units.append((token.start, token.end, token.text, (index,)))
            continue
        touched = word_at[token.start : token.end]
        touched = touched[touched >= 0]
        if touched.size:
            wordy.append((int(touched[0]), int(touched[-1]), index))
        else:
            blank.append((token.start, token.end - 1, index))
    runs = [(spans[first][0], spans[last][1], members) for first, last, members in _merge(wordy)]
    run_at = [-1] * len(text)
    for number, (start, end, _) in enumerate(runs):
        run_at[start:end] = [number] * (end - start)
    alone = []
    for first, last, index in blank:
        home = _home(text, tokens[index], run_at)
        if home < 0:
            alone.append((first, last, index))
        else:
            start, end, members = runs[home]
            runs[home] = (start, end, tuple(sorted((*members, index))))
    runs += [(first, last + 1, members) for first, last, members in _merge(alone)]
    units += [(start, end, text[start:end], members) for start, end, members in runs]
    return sorted(units, key=lambda unit: (unit[0], unit[3]))


def words(text: str, tokens: Sequence[Token], scores: ArrayLike, *, total: float | None = None) -> tuple[Word, ...]:
    """Group n tokens into the words of the source text and add up their scores.

    `tokens` are n tokens with code point spans into `text`, as `label_tokens` gives them; `scores` n
    numbers, shares of mass or signed effects.  The words come in the order of the text, each with the sum
    of its tokens' scores and with `share`, |score| / `total` (0 where that is 0).  `total` is the sum of
    |scores| by default; for shares of mass give `abs(scores).sum() + lost_mass + sink_mass`, then the shares
    of words, special tokens, lost mass and sinks add up to one.

    Words come from the text alone (see `split_words`); a token belongs to the words that its span touches,
    so that markers such as `##` or a leading blank inside of the span play no part.  A token that touches
    two words joins them, and tokens that share a character are together.  Every token that is not special
    is in exactly one word.  A token that is one blank between two words belongs to the word that it leads,
    as a blank inside of a token does; other tokens of blanks only (indentation, new lines) form units of
    their own with the blanks as text, and tokens that stand for no text are units of their own under their
    own name.  So no score disappears: the scores of words and special tokens add up to the sum of `scores`.

    Raises ShapeError where there is not one score per token, NonFiniteError for a score that is NaN or
    infinite, InputError for a span outside the text or a total that is negative or not finite.

    >>> cats = (Token("new", 0, 3), Token(" c", 3, 5), Token("ats", 5, 8))
    >>> [(word.text, word.tokens, word.score) for word in words("new cats", cats, [0.25, 0.5, 0.25])]
    [('new', (0,), 0.25), ('cats', (1, 2), 0.75)]
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.shape != (len(tokens),):
        raise ShapeError(
            f"Expected one score per token, shape ({len(tokens)},). Received: shape {values.shape}. "
            "Give scores and tokens of one encoding."
        )
    for index, token in enumerate(tokens):
        if not math.isfinite(values[index]):
            raise NonFiniteError(
                f"Expected finite scores. Received: {values[index]} at token {index} ({token.text!r}). "
                "Look for NaN in the model's weights, or set the score to zero."
            )
        if not 0 <= token.start <= token.end <= len(text):
            raise InputError(
                f"Expected a span 0 <= start <= end <= {len(text)}, code points of the text. Received: "
                f"({token.start}, {token.end}) at token {index} ({token.text!r}). Give the tokens of this text."
            )
    whole = math.fsum(abs(values)) if total is None else float(total)
    if not (math.isfinite(whole) and whole >= 0):
        raise InputError(
            f"Expected a total that is finite and not negative. Received: {total}. "
            "Leave it out for the sum of the scores."
        )
    result = []
    for start, end, label, members in _units(text, tokens):
        score = math.fsum(values[list(members)])
        result.append(Word(label, start, end, members, score, abs(score) / whole if whole else 0.0))
    return tuple(result)
