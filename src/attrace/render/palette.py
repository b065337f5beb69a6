"""Weights to colours.

Two hues that people with any kind of colour blindness tell apart, orange for more and blue for less.  Equal
sizes have equal lightness (CIE L*), so that +0.5 and -0.5 stand out alike.  Every step leaves a contrast of
4.5 : 1 or more to the text on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Scheme = Literal["light", "dark"]

STEPS = 32
"""Colour steps on each side of zero."""
INK = {"light": "#16181d", "dark": "#f3f3f0"}
PAGE = {"light": "#fdfdfb", "dark": "#15171b"}
_LIGHTNESS = {"light": (98.0, 64.0), "dark": (9.0, 45.0)}
_CHROMA = (0.01, 0.17)


@dataclass(frozen=True, slots=True)
class Palette:
    """The two hues, as angles in OKLCH: 0 pink, 60 orange, 110 yellow, 145 green, 195 cyan, 250 blue.

    >>> Palette(positive=145, negative=330).positive
    145
    """

    positive: float = 58.0
    negative: float = 250.0


DEFAULT = Palette()


def step(weight: float) -> int:
    """The colour step of a weight in [-1, 1]: an integer in [-STEPS, STEPS].

    >>> step(1.0), step(-0.5), step(0.001)
    (32, -16, 0)
    """
    return round(max(-1.0, min(1.0, weight)) * STEPS)


def _to_linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def _from_linear(value: float) -> float:
    return 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055


def _channels(colour: str) -> tuple[float, float, float]:
    red, green, blue = (_to_linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    return red, green, blue


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb", 0 to 1 (WCAG 2).

    >>> luminance("#ffffff")
    1.0
    """
    red, green, blue = _channels(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2).

    >>> round(contrast("#000000", "#ffffff"), 1)
    21.0
    """
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lightness(colour: str) -> float:
    """CIE L* of "#rrggbb", 0 to 100.

    >>> round(lightness("#777777"))
    50
    """
    y = luminance(colour)
    return 116 * y ** (1 / 3) - 16 if y > 216 / 24389 else y * 24389 / 27


def _oklch(light: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """Linear RGB of an OKLCH colour (B. Ottosson, 2020); may lie outside of [0, 1]."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (light - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


def mix(target_lightness: float, chroma: float, hue: float) -> str:
    """The colour, "#rrggbb", of a CIE L* and an OKLCH hue, with as much of the chroma as a screen shows."""
    y = ((target_lightness + 16) / 116) ** 3 if target_lightness > 8 else target_lightness * 27 / 24389
    while True:
        low, high = 0.0, 1.0
        for _ in range(24):
            middle = (low + high) / 2
            red, green, blue = _oklch(middle, chroma, hue)
            if 0.2126 * red + 0.7152 * green + 0.0722 * blue < y:
                low = middle
            else:
                high = middle
        linear = _oklch((low + high) / 2, chroma, hue)
        if all(-1e-4 <= value <= 1.0001 for value in linear) or chroma <= 0:
            break
        chroma = max(0.0, chroma - 0.004)
    return "#" + "".join(f"{round(255 * _from_linear(min(1.0, max(0.0, value)))):02x}" for value in linear)


@lru_cache(maxsize=1024)
def background(number: int, scheme: Scheme, palette: Palette = DEFAULT) -> str:
    """The background of colour step `number`, "#rrggbb"; step 0 is the page itself.

    >>> background(0, "light")
    '#fdfdfb'
    """
    if number == 0:
        return PAGE[scheme]
    part = min(abs(number), STEPS) / STEPS
    first, last = _LIGHTNESS[scheme]
    chroma = _CHROMA[0] + (_CHROMA[1] - _CHROMA[0]) * part
    return mix(first + (last - first) * part, chroma, palette.positive if number > 0 else palette.negative)


@lru_cache(maxsize=16)
def accent(scheme: Scheme, positive: bool = True, palette: Palette = DEFAULT) -> str:
    """The colour of bars, "#rrggbb"."""
    return mix(54.0 if scheme == "light" else 66.0, 0.13, palette.positive if positive else palette.negative)


def colour_256(number: int) -> str:
    """The "#rrggbb" of one of the colours 16 to 231 of a 256-colour terminal."""
    levels = (0, 95, 135, 175, 215, 255)
    red, rest = divmod(number - 16, 36)
    return "#" + "".join(f"{levels[part]:02x}" for part in (red, *divmod(rest, 6)))


def _oklab(colour: str) -> tuple[float, float, float]:
    red, green, blue = _channels(colour)
    long = math.cbrt(0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue)
    medium = math.cbrt(0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue)
    short = math.cbrt(0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


@lru_cache(maxsize=1024)
def nearest_256(colour: str) -> int:
    """The colour of the 6 x 6 x 6 cube of 256-colour terminals that looks most like "#rrggbb".

    >>> nearest_256("#ff0000")
    196
    """
    goal = _oklab(colour)
    return min(range(16, 232), key=lambda number: math.dist(goal, _oklab(colour_256(number))))


# Pairs (positive, negative) of like lightness, weak to strong, and the steps from which they are used.
_PAIRS_256 = {
    "dark": ((52, 18), (88, 20), (124, 24), (160, 26)),
    "light": ((223, 189), (216, 117), (209, 111), (202, 69)),
}
_LEVELS_256 = (4, 10, 18, 26)


_BARS_256 = {"dark": (203, 75), "light": (202, 32)}


def accent_256(scheme: Scheme, positive: bool = True, palette: Palette = DEFAULT) -> int:
    """The colour of bars in the 256-colour palette."""
    if palette == DEFAULT:
        return _BARS_256[scheme][0 if positive else 1]
    return nearest_256(accent(scheme, positive, palette))


@lru_cache(maxsize=1024)
def background_256(number: int, scheme: Scheme, palette: Palette = DEFAULT) -> tuple[int, int] | None:
    """(background, text) of colour step `number` in the 256-colour palette; None where too weak to colour."""
    level = sum(abs(number) >= least for least in _LEVELS_256)
    if level == 0:
        return None
    if palette == DEFAULT:
        back = _PAIRS_256[scheme][level - 1][0 if number > 0 else 1]
    else:
        back = nearest_256(background(number, scheme, palette))
    ink, other = (231, 16) if scheme == "dark" else (16, 231)
    return back, ink if contrast(colour_256(back), colour_256(ink)) >= 4.5 else other
