"""Characters that act or hide."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attrace.escapes import visible, visible_characters, visible_label


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\nb\tc\r", "a\\x0ab\\x09c\\x0d"),
        ("\x9b2J\x7f\x00", "\\x9b2J\\x7f\\x00"),
        ("\u202eabc\u2069", "\\u202eabc\\u2069"),
        ("a\u200bb\ufeff\u00ad", "a\\u200bb\\ufeff\\xad"),
        ("\u2028\u2029\u200e\u061c", "\\u2028\\u2029\\u200e\\u061c"),
        ("\ud800", "\\ud800"),
        ("x\u200dy\u200d", "x\\u200dy\\u200d"),
        ("a\U000e0041\U000e007f", "a\\U000e0041\\U000e007f"),
        ("x\U000e0101", "x\\U000e0101"),
        ("a\ufe0f\ufe0f", "a\ufe0f\\ufe0f"),
        ("\u3164\u2800", "\\u3164\\u2800"),
        ("\u180e", "\\u180e"),
    ],
)
def test_hidden_characters_are_shown(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "plain ASCII ~ \\x1b",
        "👩‍👩‍👧‍👦 👋🏽 ❤️‍🔥 ❤️",
        "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
        "می‌خواهم",
        "क्‍ष",
        "مرحبا בוקר 東京 e\u0301",
        "\u0600123",
        "葛\U000e0100",
    ],
)
def test_what_a_script_needs_stays(text):
    assert visible(text) == text


def test_a_flag_tag_sequence_has_an_end():
    text = "\U0001f3f4" + "\U000e0061" * 9
    assert visible(text).count("\\U000e0061") == 2


@given(st.text(st.characters(min_codepoint=0, max_codepoint=0x10FFFF, exclude_categories=())))
def test_nothing_acts_on_a_terminal(text):
    shown = visible(text)
    assert len(visible_characters(text)) == len(text)
    assert not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in shown)
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200b\u200e\u200f\ufeff")
    shown.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (" cats\n", "cats"),
        ("a\r\nb", "a⏎b"),
        ("a\tb", "a⇥b"),
        (" ", "␣"),
        ("    ", "␣×4"),
        ("\n\n  \t", "⏎×2␣×2⇥"),
        ("\x0b", "\\x0b"),
        ("\u2003", "\\u2003"),
        ("", "(empty)"),
    ],
)
def test_labels_fit_one_line(text, label):
    assert visible_label(text) == label
