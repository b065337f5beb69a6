"""A scene as one self-contained HTML document that runs no script and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

from attrace.escapes import visible
from attrace.render.palette import DEFAULT, INK, PAGE, STEPS, Palette, Scheme, accent, background, step
from attrace.render.scene import Scene, Segment, Unit, Units, build_scene
from attrace.types import Attribution

if TYPE_CHECKING:
    import jinja2

Direction = Literal["ltr", "rtl"]


@dataclass(frozen=True, slots=True)
class _Run:
    """Pieces without a blank between, isolated together from what stands around them."""

    segments: tuple[Segment, ...]
    direction: Direction | None

    @property
    def is_gap(self) -> bool:
        return all(segment.unit is None for segment in self.segments)


@dataclass(frozen=True, slots=True)
class _Phrase:
    """Runs that read in one direction; `direction` is set where it is not the line's."""

    runs: tuple[_Run, ...]
    direction: Direction | None


@dataclass(frozen=True, slots=True)
class _Line:
    phrases: tuple[_Phrase, ...]
    direction: Direction | Literal["auto"]


def direction(text: str) -> Direction | None:
    """The direction of the first letter that has one.

    >>> direction("1. שלום"), direction("abc"), direction("123")
    ('rtl', 'ltr', None)
    """
    for char in text:
        kind = unicodedata.bidirectional(char)
        if kind in ("R", "AL"):
            return "rtl"
        if kind == "L":
            return "ltr"
    return None


def _runs(line: tuple[Segment, ...]) -> Iterator[_Run]:
    pending: list[Segment] = []

    def close() -> Iterator[_Run]:
        if pending:
            yield _Run(tuple(pending), direction("".join(segment.text for segment in pending)))
            pending.clear()

    for segment in line:
        if segment.text.isspace() or segment.sign:
            yield from close()
            yield _Run((segment,), None)
        else:
            pending.append(segment)
    yield from close()


def _phrases(runs: list[_Run], base: Direction | Literal["auto"]) -> Iterator[_Phrase]:
    """Put runs that read against the line together, so that isolating each leaves their order as it was."""
    at = 0
    while at < len(runs):
        against = runs[at].direction
        if against is None or against == base:
            yield _Phrase((runs[at],), None)
            at += 1
            continue
        last, ahead = at, at
        while ahead < len(runs) and runs[ahead].direction in (None, against):
            last = ahead if runs[ahead].direction == against else last
            ahead += 1
        yield _Phrase(tuple(runs[at : last + 1]), against)
        at = last + 1


def _layout(lines: tuple[tuple[Segment, ...], ...]) -> tuple[_Line, ...]:
    result = []
    for line in lines:
        base = direction("".join(segment.text for segment in line)) or "auto"
        result.append(_Line(tuple(_phrases(list(_runs(line)), base)), base))
    return tuple(result)


def _css_class(weight: float) -> str:
    number = step(weight)
    return "" if number == 0 else f"p{number}" if number > 0 else f"n{-number}"


def _tip(scene: Scene, unit: Unit) -> str:
    """What a word says on hover and focus; the word is isolated so that its direction stays its own."""
    parts = [f"\u2068{unit.label}\u2069", unit.amount]
    if scene.signed:
        parts.append(scene.unit)
    indices = unit.tokens
    if len(indices) == 1:
        parts.append(f"token {indices[0]}")
    elif indices == tuple(range(indices[0], indices[-1] + 1)):
        parts.append(f"tokens {indices[0]}–{indices[-1]}")
    else:
        parts.append(f"{len(indices)} tokens")
    if unit.kind == "sink":
        parts.append("sink, left out of the colours")
    elif unit.kind == "special":
        parts.append("special token")
    return " · ".join(parts)


@lru_cache(maxsize=32)
def _style(signed: bool, palette: Palette) -> str:
    """The style sheet with its colours; the same text for the same options, so that its hash is stable."""

    def steps(scheme: Scheme) -> str:
        rules = [f".p{n}{{background:{background(n, scheme, palette)}}}" for n in range(1, STEPS + 1)]
        if signed:
            rules += [f".n{n}{{background:{background(-n, scheme, palette)}}}" for n in range(1, STEPS + 1)]
        return "".join(rules)

    def variables(scheme: Scheme) -> str:
        return (
            f"--page:{PAGE[scheme]};--ink:{INK[scheme]};"
            f"--more:{accent(scheme, True, palette)};--less:{accent(scheme, False, palette)};"
        )

    css = files("attrace.render").joinpath("templates/report.css").read_text(encoding="utf-8")
    return (
        f":root{{{variables('light')}}}{steps('light')}"
        f"@media (prefers-color-scheme:dark){{:root{{{variables('dark')}}}{steps('dark')}}}\n{css}"
    )


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files("attrace.render").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)


def to_html(
    attribution: Attribution,
    *,
    top: int = 20,
    units: Units = "words",
    title: str | None = None,
    scale: float | None = None,
    palette: Palette = DEFAULT,
) -> str:
    """One HTML document with everything in it: the text, the top words, special tokens, how it was made.

    It opens from a disk without a network, in light and dark.  Its content security policy allows the one
    style sheet inside by hash and nothing else: no script, no request, no form.  All text from outside
    (tokens, labels, `title`, notes, settings) is escaped and stays text.  `top`, `units`, `scale` and the
    errors are those of `build_scene`; `palette` sets the two hues.

    >>> import numpy as np
    >>> from attrace.types import Target, Token
    >>> page = to_html(Attribution(text="hi", tokens=(Token("hi", 0, 2),), scores=np.array([1.0]), words=(),
    ...                            target=Target("class", "<b>"), method="rollout"))
    >>> "<b>" in page, "&lt;b&gt;" in page
    (False, True)
    """
    from markupsafe import Markup

    scene = build_scene(attribution, top=top, units=units, scale=scale)
    style = _style(attribution.signed, palette)
    strongest = [scene.units[number] for number in scene.top]
    lowest = min(0.0, *(unit.score for unit in strongest), 0.0)
    highest = max(0.0, *(unit.score for unit in strongest), 0.0)
    return _template().render(
        scene=scene,
        title=visible(title) if title is not None else f"{scene.label} {scene.amount}".strip(),
        style=Markup(style),  # our own text; the policy names its hash
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        lines=_layout(scene.lines),
        strongest=[(unit, 100 * abs(unit.score) / (highest - lowest)) for unit in strongest],
        axis=-100 * lowest / (highest - lowest) if strongest else 0.0,
        css_class=_css_class,
        tip=lambda unit: _tip(scene, unit),
        swatches=[_css_class(weight / 8) for weight in range(-8 if scene.signed else 0, 9)],
    )
