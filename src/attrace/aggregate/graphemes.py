"""Where the characters that a reader sees begin: extended grapheme clusters (Unicode Annex 29).

Tokenizers count code points or bytes, readers count characters: an emoji with joiners, a letter with its
combining marks, a flag or a Hangul syllable is one of them.  The rules follow the annex (GB3 to GB13); the
character classes are read off the general categories of the standard library's `unicodedata`, so that no
table of our own can grow old.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right

_ZWJ = "\u200d"
_EXTEND_EXTRA = frozenset("\u200c\uff9e\uff9f\u0e33\u0eb3")
_PREPEND = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")
# Viramas that bind the consonant after them to the one before (GB9c).
_LINKERS = frozenset("\u094d\u09cd\u0acd\u0b4d\u0c4d\u0d4d")
_CONTROL = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs"})
_PICTOGRAPHS = (
    (0x203C, 0x203C), (0x2049, 0x2049), (0x2122, 0x2122), (0x2139, 0x2139), (0x2194, 0x21AA),
    (0x231A, 0x23FF), (0x24C2, 0x24C2), (0x25AA, 0x25FE), (0x2600, 0x2605), (0x2607, 0x2612),
    (0x2614, 0x2685), (0x2690, 0x2705), (0x2708, 0x2712), (0x2714, 0x27BF), (0x2934, 0x2935),
    (0x2B05, 0x2B55), (0x3030, 0x3030), (0x303D, 0x303D), (0x3297, 0x3299),
    (0x1F000, 0x1F1E5), (0x1F200, 0x1F3FA), (0x1F400, 0x1FAFF),
)  # fmt: skip


def is_pictograph(char: str) -> bool:
    """Whether the code point is an emoji or a symbol that joins into one."""
    code = ord(char)
    if code < 0x203C:
        return code in (0xA9, 0xAE)
    return any(low <= code <= high for low, high in _PICTOGRAPHS)


def is_flag_letter(char: str) -> bool:
    """Whether the code point is a regional indicator, two of which make a flag."""
    return 0x1F1E6 <= ord(char) <= 0x1F1FF


def _extends(char: str) -> bool:
    code = ord(char)
    if code < 0x300:
        return False
    return (
        unicodedata.category(char)[0] == "M"
        or char in _EXTEND_EXTRA
        or 0x1F3FB <= code <= 0x1F3FF
        or 0xE0020 <= code <= 0xE007F
    )


def _controls(char: str) -> bool:
    return (
        unicodedata.category(char) in _CONTROL
        and char != _ZWJ
        and char not in _EXTEND_EXTRA
        and char not in _PREPEND
        and not 0xE0020 <= ord(char) <= 0xE007F
    )


def _hangul(char: str) -> str:
    code = ord(char)
    if 0x1100 <= code <= 0x115F or 0xA960 <= code <= 0xA97C:
        return "L"
    if 0x1160 <= code <= 0x11A7 or 0xD7B0 <= code <= 0xD7C6:
        return "V"
    if 0x11A8 <= code <= 0x11FF or 0xD7CB <= code <= 0xD7FB:
        return "T"
    if 0xAC00 <= code <= 0xD7A3:
        return "LV" if (code - 0xAC00) % 28 == 0 else "LVT"
    return ""


_HANGUL_JOINS = {"L": ("L", "V", "LV", "LVT"), "LV": ("V", "T"), "V": ("V", "T"), "LVT": ("T",), "T": ("T",)}


def _joins_after_marks(text: str, at: int) -> bool:
    """GB11 and GB9c: look back over the marks that stand before `at`."""
    char = text[at]
    if text[at - 1] == _ZWJ and is_pictograph(char):
        back = at - 2
        while back >= 0 and _extends(text[back]):
            back -= 1
        if back >= 0 and is_pictograph(text[back]):
            return True
    if unicodedata.category(char) != "Lo":
        return False
    linker, back = "", at - 1
    while back >= 0 and (_extends(text[back]) or text[back] == _ZWJ):
        linker = text[back] if text[back] in _LINKERS else linker
        back -= 1
    block = ord(linker) // 0x80 if linker else -1
    return bool(linker) and back >= 0 and ord(text[back]) // 0x80 == block == ord(char) // 0x80


def _joins(text: str, at: int) -> bool:
    """Whether the code point at `at` belongs to the same character as the one before it."""
    before, char = text[at - 1], text[at]
    if before < "\x80" and char < "\x80":
        return before == "\r" and char == "\n"
    if _controls(before) or _controls(char):
        return False
    if _extends(char) or char == _ZWJ or before in _PREPEND:
        return True
    if _hangul(char) in _HANGUL_JOINS.get(_hangul(before), ()):
        return True
    if is_flag_letter(before) and is_flag_letter(char):
        back = at - 1
        while back >= 0 and is_flag_letter(text[back]):
            back -= 1
        return (at - back) % 2 == 0
    return _joins_after_marks(text, at)


def boundaries(text: str) -> list[int]:
    """The code point index at which each character starts, and `len(text)` last.

    >>> boundaries("e\u0301a")
    [0, 2, 3]
    """
    if not text:
        return [0]
    return [0, *(at for at in range(1, len(text)) if not _joins(text, at)), len(text)]


def widen(bounds: list[int], start: int, end: int) -> tuple[int, int]:
    """The smallest span of whole characters that holds `[start, end)`; an empty span stays as it is.

    >>> widen([0, 2, 3], 1, 2)
    (0, 2)
    """
    if start >= end:
        return start, end
    return bounds[bisect_right(bounds, start) - 1], bounds[bisect_left(bounds, end)]
