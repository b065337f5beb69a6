"""A scene in the terminal: colours where there are some, marks where there are none."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from typing import Literal

from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from attrace.render.palette import (
    DEFAULT,
    INK,
    STEPS,
    Palette,
    Scheme,
    accent,
    accent_256,
    background,
    background_256,
    step,
)
from attrace.render.scene import Scene, Segment, Units, build_scene
from attrace.types import Attribution

Theme = Literal["auto", "light", "dark"]
_WIDEST = 100
_LEAST = 3
"""Weaker steps get no colour: beside a background that is not known a faint one could look strong."""
_FAINTEST = 6
"""The colour step that the weakest weight begins at."""
_NARROWEST = 20
_PLAIN = Console(width=_WIDEST, color_system=None, _environ={})  # only measures and wraps
_PREDICTIONS = 5
_PLAINER = {"“": '"', "”": '"', "·": "-", "…": "...", "×": "x", "⏎": "\\n", "⇥": "\\t", "␣": "_"}
_DIM, _BOLD = Style(dim=True), Style(bold=True)


def _scheme(theme: Theme) -> Scheme:
    """Whether the terminal is light, by COLORFGBG where it is set; dark where nothing is known."""
    if theme != "auto":
        return theme
    return "light" if os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15") else "dark"


class _Ink:
    """Styles for one console: by its colours, none where it has too few to tell weights apart."""

    def __init__(self, console: Console, scheme: Scheme, palette: Palette) -> None:
        system = None if console.no_color else console.color_system
        self.depth = system if system in ("truecolor", "256") else None
        self.scheme, self.palette = scheme, palette

    def weight(self, weight: float) -> Style | None:
        """Background and text colour; None where it is too weak for a colour."""
        number = step(weight)
        if self.depth is None or abs(number) < _LEAST:
            return None
        if self.depth == "truecolor":
            shown = math.copysign(_FAINTEST + abs(number) * (STEPS - _FAINTEST) / STEPS, number)
            back = background(round(shown), self.scheme, self.palette)
            return Style(color=Color.parse(INK[self.scheme]), bgcolor=Color.parse(back))
        pair = background_256(number, self.scheme, self.palette)
        return pair and Style(color=Color.from_ansi(pair[1]), bgcolor=Color.from_ansi(pair[0]))

    def bar(self, positive: bool) -> Style:
        """The colour of bars."""
        if self.depth is None:
            return Style.null()
        if self.depth == "truecolor":
            return Style(color=Color.parse(accent(self.scheme, positive, self.palette)))
        return Style(color=Color.from_ansi(accent_256(self.scheme, positive, self.palette)))


def _bar(cells: float, ascii_only: bool, leftwards: bool) -> str:
    """A bar as long as `cells`; anything above nothing is seen."""
    if ascii_only:
        return "#" * max(1, round(cells))
    if leftwards:
        halves = max(1, round(cells * 2))
        return "▐" * (halves % 2) + "█" * (halves // 2)
    eighths = max(1, round(cells * 8))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].rstrip()


def _fit(text: str, width: int) -> str:
    """Cut a label to a width in cells."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…"


class TerminalView:
    """An attribution as a rich renderable: `rich.print(TerminalView(attribution))`.

    It shows the prediction, the text with the weight as background, the `top` words with their share, the
    special tokens apart, and how it was made.  Where there are no colours (NO_COLOR, a pipe, a dumb terminal,
    16 colours) the top words are marked in the text, `[free 12.4 %]`.  `theme` says whether the terminal is
    light or dark; "auto" reads COLORFGBG and takes dark otherwise.  `units`, `scale` and the errors are those
    of `build_scene`; they are raised here, not when it is drawn.
    """

    def __init__(
        self,
        attribution: Attribution,
        *,
        top: int = 10,
        units: Units = "words",
        scale: float | None = None,
        theme: Theme = "auto",
        palette: Palette = DEFAULT,
    ) -> None:
        self.scene = build_scene(attribution, top=top, units=units, scale=scale)
        self.theme: Theme = theme
        self.palette = palette

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one text after another."""
        width = max(_NARROWEST, min(options.max_width, _WIDEST))
        ink = _Ink(console, _scheme(self.theme), self.palette)
        ascii_only = options.ascii_only
        for text in _draw(self.scene, ink, width, ascii_only):
            yield _encodable(text, options.encoding) if ascii_only else text


def _encodable(text: Text, encoding: str) -> Text:
    """The text with characters that the output cannot write as escapes; its styles kept."""
    result = Text(overflow="fold", no_wrap=text.no_wrap)
    for start, char in enumerate(text.plain):
        safe = char
        try:
            char.encode(encoding)
        except UnicodeEncodeError:
            safe = _PLAINER.get(char) or char.encode("ascii", "backslashreplace").decode()
        result.append(safe)
        for span in text.spans:
            if span.start <= start < span.end:
                result.stylize(span.style, len(result) - len(safe))
    return result


def _draw(scene: Scene, ink: _Ink, width: int, ascii_only: bool) -> Iterator[Text]:
    yield from _head(scene, width)
    yield Text()
    yield from _body(scene, ink, width)
    yield Text()
    yield from _table(scene, ink, width, ascii_only)
    yield from _foot(scene, width)


def _wrap(text: Text, width: int) -> Iterator[Text]:
    """Lines of a text no wider than `width`; line ends and indentation stay, blanks before line ends go."""
    for line in text.wrap(_PLAIN, width, overflow="fold", tab_size=4):
        line.rstrip()
        yield line


def _joined(parts: Iterable[str], width: int) -> list[str]:
    """Parts side by side, a dot between them, in lines that break between parts."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + cell_len(part) + 3 <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines


def _head(scene: Scene, width: int) -> Iterator[Text]:
    title = Text.assemble((scene.label, _BOLD), (f"  {scene.amount}" if scene.amount else "", _BOLD))
    details = " · ".join((scene.question, *scene.details) if scene.question else scene.details)
    gap = width - title.cell_len - cell_len(details)
    if gap >= 3:
        yield Text.assemble(title, " " * gap, (details, _DIM))
    else:
        yield from _wrap(title, width)
        yield from _wrap(Text.assemble((details, _DIM)), width)
    if len(scene.predictions) > 1:
        shown = [f"{label} {amount}" for label, amount in scene.predictions[:_PREDICTIONS]]
        for line in _joined(shown, width):
            yield from _wrap(Text.assemble((line, _DIM)), width)
    if scene.sink:
        yield Text()
        yield from _wrap(Text.assemble(("Sink  ", _BOLD), scene.sink), width)


def _body(scene: Scene, ink: _Ink, width: int) -> Iterator[Text]:
    """The text itself, its line ends and indentation kept."""
    marked: set[int] = set(scene.top) if ink.depth is None else set()
    for line in scene.lines:
        text = Text()
        for at, segment in enumerate(line):
            if segment.unit is not None and segment.unit in marked:
                unit = scene.units[segment.unit]
                opens = at == 0 or line[at - 1].unit != segment.unit
                closes = at + 1 == len(line) or line[at + 1].unit != segment.unit
                text.append("[" if opens else "")
                text.append(unit.label if segment.text.isspace() else segment.text)
                text.append(f" {unit.amount.replace(' ', '')}]" if closes else "")
            else:
                text.append(segment.text, _segment_style(scene, ink, segment))
        yield from _wrap(text, width)


def _segment_style(scene: Scene, ink: _Ink, segment: Segment) -> Style:
    if segment.unit is None:
        return Style.null()
    unit = scene.units[segment.unit]
    style = ink.weight(unit.weight)
    if style is None:
        return _DIM if segment.sign or unit.kind in ("special", "sink") else Style.null()
    return style


def _table(scene: Scene, ink: _Ink, width: int, ascii_only: bool) -> Iterator[Text]:
    if not scene.top:
        return
    units = [scene.units[number] for number in scene.top]
    amounts = [unit.amount for unit in units] + ([scene.rest[1]] if scene.rest else [])
    more = f"{scene.rest[0]:,} more" if scene.rest else ""
    wide = max(map(len, amounts))
    space = max(8, min(28, width - wide - 14))
    column = min(space, max([cell_len(unit.label) for unit in units] + [len(more), 8]))
    bars = max(4, min(40, width - column - wide - 6))
    heading = f"Top {scene.unit_name}s"
    yield Text.assemble((heading, _BOLD), (f"  {scene.unit}" if scene.signed else "", _DIM))
    lowest, highest = min(0.0, *(unit.score for unit in units)), max(0.0, *(unit.score for unit in units))
    left = min(bars - 1, max(1, round(bars * lowest / (lowest - highest)))) if lowest else 0
    per_cell = max(-lowest / max(left, 1), highest / (bars - left))
    for unit in units:
        label = _fit(unit.label, column)
        row = Text("  ", no_wrap=True)
        row.append(label, ink.weight(unit.weight) or Style.null())
        row.append(" " * (column - cell_len(label)) + f"  {unit.amount:>{wide}}  ")
        cells = abs(unit.score) / per_cell
        bar = _bar(cells, ascii_only, leftwards=unit.score < 0)
        row.append(" " * (left - len(bar) if unit.score < 0 else left))
        row.append(bar, ink.bar(unit.score > 0))
        row.rstrip()
        yield row
    if scene.rest:
        yield Text(f"  {more:<{column}}  {scene.rest[1]:>{wide}}", _DIM)
    yield Text()


def _times(name: str, count: int) -> str:
    return f"{name} ×{count}" if count > 1 else name


def _foot(scene: Scene, width: int) -> Iterator[Text]:
    indent = 16 if width >= 60 else 2
    room = width - indent
    specials = [f"{_times(name, count)} {amount}" for name, count, amount in scene.specials]
    mass = [f"{name} {amount}" for name, amount in scene.ledger]
    method = [scene.method, *(f"{key} {value}" for key, value in scene.settings)]
    rows = (
        ("Special tokens", _joined(specials, room), _DIM),
        ("Mass", _joined(mass, room), _DIM),
        ("Method", _joined(method, room), _DIM),
        ("Note" if len(scene.notes) == 1 else "Notes", scene.notes, Style.null()),
    )
    for name, parts, style in rows:
        if parts and indent == 2:
            yield Text.assemble((name, _BOLD))
        lines = [line for part in parts for line in _wrap(Text.assemble((part, style)), room)]
        for at, line in enumerate(lines):
            head = name if at == 0 and indent > 2 else ""
            yield Text.assemble((f"{head:<{indent}}", _BOLD), line)


def to_text(
    attribution: Attribution,
    *,
    width: int = 80,
    top: int = 10,
    units: Units = "words",
    scale: float | None = None,
    colors: Literal["none", "256", "truecolor"] = "none",
    theme: Theme = "dark",
    palette: Palette = DEFAULT,
) -> str:
    """What `TerminalView` prints at a width of `width` cells (40 or more), as a string."""
    console = Console(
        width=width,
        force_terminal=colors != "none",
        color_system=None if colors == "none" else colors,
        no_color=colors == "none",
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
        _environ={},
    )
    view = TerminalView(attribution, top=top, units=units, scale=scale, theme=theme, palette=palette)
    with console.capture() as capture:
        console.print(view)
    return capture.get()
