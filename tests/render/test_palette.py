"""Colours: contrast, equal lightness, order."""

from __future__ import annotations

from itertools import pairwise

import pytest

from attrace.render.palette import (
    INK,
    STEPS,
    Palette,
    accent,
    background,
    background_256,
    colour_256,
    contrast,
    lightness,
    step,
)

SCHEMES = ("light", "dark")
ALL_STEPS = [number for number in range(-STEPS, STEPS + 1) if number]
PALETTES = [Palette(), Palette(145, 330), Palette(110, 280)]


def test_contrast_of_known_pairs():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("palette", PALETTES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_stands_out_on_every_step(scheme, palette):
    assert min(contrast(background(n, scheme, palette), INK[scheme]) for n in [0, *ALL_STEPS]) >= 4.5


@pytest.mark.parametrize("palette", PALETTES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_equal_sizes_have_equal_lightness(scheme, palette):
    for number in range(1, STEPS + 1):
        more, less = (background(sign * number, scheme, palette) for sign in (1, -1))
        assert lightness(more) == pytest.approx(lightness(less), abs=0.5)
        assert more != less


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stronger_is_farther_from_the_page(scheme, sign):
    page = lightness(background(0, scheme))
    distances = [abs(lightness(background(sign * n, scheme)) - page) for n in range(1, STEPS + 1)]
    assert all(near < far for near, far in pairwise(distances))


@pytest.mark.parametrize("palette", PALETTES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_256_colours_keep_the_contrast(scheme, palette):
    pairs = [pair for n in ALL_STEPS if (pair := background_256(n, scheme, palette))]
    assert min(contrast(colour_256(back), colour_256(ink)) for back, ink in pairs) >= 4.5


@pytest.mark.parametrize("scheme", SCHEMES)
def test_256_colours_are_balanced_and_ordered(scheme):
    levels = sorted({n: background_256(n, scheme) for n in range(4, STEPS + 1)}.items())
    values = [lightness(colour_256(back)) for _, (back, _) in levels]
    assert values == sorted(values, reverse=scheme == "light")
    assert len(set(values)) == 4
    for number, (back, _) in levels:
        other = background_256(-number, scheme)
        assert lightness(colour_256(back)) == pytest.approx(lightness(colour_256(other[0])), abs=5)
    assert background_256(3, scheme) is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bars_are_seen(scheme):
    assert all(contrast(accent(scheme, side), background(0, scheme)) >= 3 for side in (True, False))


@pytest.mark.parametrize(("weight", "number"), [(1, 32), (-1, -32), (0, 0), (7, 32), (-7, -32), (0.01, 0)])
def test_step(weight, number):
    assert step(weight) == number
