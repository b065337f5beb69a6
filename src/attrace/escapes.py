r"""Text from outside as visible text: what would act or hide is shown as an escape such as \x1b or \u202e.

A terminal obeys control characters, both terminals and browsers obey direction overrides, and invisible
characters hide text inside of text.  Joiners, selectors and tags stay only where a script or an emoji needs
them.
"""

from __future__ import annotations

import unicodedata

_JOINERS = "\u200c\u200d"
_NUMBER_SIGNS = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u0890\u0891")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_FILLERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\u180b\u180c\u180d\u180e\u180f")


def _is_selector(char: str) -> bool:
    return "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"


def _is_tag(char: str) -> bool:
    return "\U000e0020" <= char <= "\U000e007f"


def _joins_letters(char: str) -> bool:
    """Letters and marks of the scripts that spell with joiners: Arabic and its kin, the scripts of India."""
    if unicodedata.category(char)[0] not in "LM":
        return False
    return unicodedata.bidirectional(char) in ("AL", "NSM") or 0x0900 <= ord(char) <= 0x109F


def _joiner_belongs(text: str, at: int) -> bool:
    if not 0 < at < len(text) - 1:
        return False
    before, after = text[at - 1], text[at + 1]
    if _joins_letters(before) and _joins_letters(after):
        return True
    if text[at] != "\u200d" or unicodedata.category(after) != "So":
        return False
    return unicodedata.category(before) == "So" or before == "\ufe0f" or "\U0001f3fb" <= before <= "\U0001f3ff"


def _selector_belongs(text: str, at: int) -> bool:
    if at == 0 or text[at - 1].isspace() or unicodedata.category(text[at - 1])[0] in "CMZ":
        return False
    return text[at] < "\U000e0100" or unicodedata.category(text[at - 1]) == "Lo"


def _tag_belongs(text: str, at: int) -> bool:
    back = at
    while back > 0 and _is_tag(text[back]):
        back -= 1
    return text[back] == "\U0001f3f4" and at - back <= 7


def _is_hidden(text: str, at: int) -> bool:
    char = text[at]
    if " " <= char <= "~":
        return False
    if _is_selector(char):
        return not _selector_belongs(text, at)
    if char in _FILLERS:
        return True
    if unicodedata.category(char) not in _HIDDEN or char in _NUMBER_SIGNS:
        return False
    if char in _JOINERS:
        return not _joiner_belongs(text, at)
    return not (_is_tag(char) and _tag_belongs(text, at))


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def visible_characters(text: str) -> list[str]:
    r"""What to show for each of n code points: the code point itself, or its escape.

    >>> visible_characters("a\x1b")
    ['a', '\\x1b']
    """
    return [_escape(char) if _is_hidden(text, at) else char for at, char in enumerate(text)]


def visible(text: str) -> str:
    r"""The text with everything that would act or hide as an escape; line ends and tabs included.

    >>> print(visible("spam\x1b[31m\u202e"))
    spam\x1b[31m\u202e
    """
    return "".join(visible_characters(text))


def visible_label(text: str) -> str:
    r"""A label for one line: blanks at the ends left out, line ends and tabs inside as signs.

    A label of blanks only becomes signs altogether, so that it can be seen and counted.

    >>> visible_label(" cats"), visible_label("    "), visible_label("\n\n  ")
    ('cats', '␣×4', '⏎×2␣×2')
    """
    if text and text.isspace():
        return _blank_signs(text)
    text = text.strip(" \t\r\n").replace("\r\n", "\n").replace("\n", "⏎").replace("\t", "⇥")
    return visible(text) if text else "(empty)"


def _blank_signs(text: str) -> str:
    signs = {" ": "␣", "\xa0": "␣", "\u3000": "␣", "\n": "⏎", "\t": "⇥"}
    runs: list[tuple[str, int]] = []
    for char in text.replace("\r\n", "\n"):
        sign = signs.get(char) or visible(char)
        if sign.isspace():
            sign = _escape(char)
        if runs and runs[-1][0] == sign:
            runs[-1] = (sign, runs[-1][1] + 1)
        else:
            runs.append((sign, 1))
    return "".join(sign if count == 1 else f"{sign}×{count}" for sign, count in runs)
