"""The terminal view: exact text at fixed widths, colours that can be read, nothing that acts."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from attrace.errors import NonFiniteError
from attrace.render.palette import Palette, colour_256, contrast
from attrace.render.terminal import TerminalView, to_text

from .conftest import attribution

GOLDEN = Path(__file__).parent / "golden"


def segments(view, color_system, width=80):
    """The styled pieces that a console would write."""
    console = Console(width=width, color_system=color_system, force_terminal=True, legacy_windows=False, _environ={})
    return [segment for line in console.render_lines(view, pad=False) for segment in line]


def hexadecimal(colour):
    return colour.triplet.hex if colour.triplet else colour_256(colour.number)


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("name", ["mail", "prompt", "sink", "evil"])
def test_golden(name, width, request):
    expected = (GOLDEN / f"{name}-{width}.txt").read_text(encoding="utf-8")
    assert to_text(request.getfixturevalue(name), width=width) == expected


@pytest.mark.parametrize("width", [40, 41, 59, 60, 79, 100, 200])
@pytest.mark.parametrize("name", ["mail", "prompt", "sink", "evil"])
def test_no_line_is_wider_than_the_terminal(name, width, request):
    lines = to_text(request.getfixturevalue(name), width=width).splitlines()
    assert max(map(cell_len, lines)) <= min(width, 100)
    assert all(line == line.rstrip() for line in lines)


def test_wide_characters_stay_in_their_column():
    case = attribution("東京 hi 👩‍👧 " + "x" * 60, [0.4, 0.3, 0.2, 0.1])
    rows = to_text(case, width=60).split("Top words\n")[1].splitlines()[:4]
    assert {cell_len(row[: row.index("%")]) for row in rows} == {cell_len(rows[0][: rows[0].index("%")])}
    assert "x…" in rows[3]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("depth", ["truecolor", "256"])
@pytest.mark.parametrize("name", ["mail", "prompt"])
def test_text_on_colours_can_be_read(name, depth, theme, request):
    view = TerminalView(request.getfixturevalue(name), theme=theme)
    coloured = [s for s in segments(view, depth) if s.style and s.style.bgcolor]
    assert len(coloured) >= 4
    for segment in coloured:
        assert contrast(hexadecimal(segment.style.color), hexadecimal(segment.style.bgcolor)) >= 4.5


@pytest.mark.parametrize("depth", ["truecolor", "256"])
def test_the_weight_is_the_background(mail, depth):
    backgrounds = {s.text: s.style.bgcolor for s in segments(TerminalView(mail), depth) if s.style}
    assert backgrounds["FREE"] is not None
    assert backgrounds["FREE"] != backgrounds["claim"]
    assert "[FREE" not in to_text(mail, colors=depth)


@pytest.mark.parametrize(("depth", "code"), [("256", r"\x1b\[[0-9;]*48;5;"), ("truecolor", r"\x1b\[[0-9;]*48;2;")])
def test_escape_codes_are_of_the_depth_asked_for(mail, depth, code):
    assert re.search(code, to_text(mail, colors=depth))


def test_opposite_effects_have_different_colours(prompt):
    backgrounds = {s.text: s.style.bgcolor for s in segments(TerminalView(prompt), "256") if s.style}
    assert backgrounds["France"].number != backgrounds["of"].number
    changed = TerminalView(prompt, palette=Palette(145, 330))
    assert backgrounds["France"] != {s.text: s.style.bgcolor for s in segments(changed, "256") if s.style}["France"]


@pytest.mark.parametrize(
    "environment", [{"NO_COLOR": "1", "TERM": "xterm-256color"}, {"TERM": "dumb"}, {"TERM": "xterm-16color"}]
)
def test_without_colours_the_words_are_marked(mail, environment):
    output = io.StringIO()
    console = Console(file=output, width=80, force_terminal=True, _environ=environment, legacy_windows=False)
    console.print(TerminalView(mail))
    assert "[FREE 25.0%]" in output.getvalue()
    assert "48;" not in output.getvalue()


def test_a_pipe_gets_plain_text(mail):
    output = io.StringIO()
    Console(file=output, width=80, _environ={"TERM": "xterm-256color"}).print(TerminalView(mail))
    assert "\x1b" not in output.getvalue()
    assert "[FREE 25.0%]" in output.getvalue()


def test_light_terminals_are_known_by_colorfgbg(mail, monkeypatch):
    monkeypatch.setenv("COLORFGBG", "0;15")
    light = segments(TerminalView(mail), "truecolor")
    monkeypatch.setenv("COLORFGBG", "15;0")
    dark = segments(TerminalView(mail), "truecolor")
    assert light == segments(TerminalView(mail, theme="light"), "truecolor")
    assert dark == segments(TerminalView(mail, theme="dark"), "truecolor")
    assert light != dark


@pytest.mark.parametrize("colors", ["none", "256"])
def test_nothing_from_outside_acts(evil, colors):
    output = to_text(evil, colors=colors)
    output = re.sub(r"\x1b\[[0-9;]*m", "", output) if colors != "none" else output
    assert not set(output) & set("\x1b\x07\u202e\u2066\ud800")
    assert "a\\x1b[31mb\\x07" in output
    assert "[bold]red[/bold]" in re.sub(r"[\[ ]?(\[bold]red\[/bold]).*", r"\1", output)


def test_markup_and_emoji_codes_are_text():
    output = io.StringIO()
    console = Console(file=output, width=80, _environ={})
    console.print(TerminalView(attribution("[bold]x[/bold] :smile: [link=y]z", [0.2, 0.1, 0.7]), top=0))
    assert "[bold]x[/bold] :smile: [link=y]z" in output.getvalue()


def test_line_ends_and_indentation_are_kept(prompt):
    lines = to_text(prompt, top=0).splitlines()
    assert "def f(x):" in lines
    assert "    return x" in lines


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_other_encodings_get_what_they_can_write(mail, encoding):
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    console = Console(file=output, width=80, _environ={}, legacy_windows=False)
    console.print(TerminalView(mail))
    console.print(TerminalView(attribution("東京 é", [0.5, 0.5])))
    output.flush()
    text = raw.getvalue().decode(encoding)
    assert "####" in text
    assert "\\u6771" in text
    assert ("é" in text) == (encoding == "cp1252")


def test_units_and_top(mail):
    assert "Top tokens" in to_text(mail, units="tokens")
    assert "1 more" in to_text(mail, top=6)
    assert "Top words" not in to_text(mail, top=0)


def test_bad_scores_are_found_before_anything_is_drawn():
    with pytest.raises(NonFiniteError, match="token 1"):
        TerminalView(attribution("a b c", [0.1, float("nan"), 0.3], words=()))


def test_two_thousand_tokens(tmp_path):
    case = attribution("\n".join("word " * 20 for _ in range(100)), [1 / 2000] * 2000)
    output = to_text(case, width=80, colors="truecolor")
    assert "1,990 more" in output
    assert "0.050 %" in output


@pytest.mark.parametrize("columns", [1, 2, 3, 19])
def test_a_terminal_too_narrow_is_written_over_the_edge(mail, columns):
    console = Console(width=columns, file=io.StringIO(), color_system=None)
    console.print(TerminalView(mail))
    assert console.file.getvalue().strip()
