"""The command line as a process: signals, pipes, closed streams, the progress bar on a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Start = Callable[..., subprocess.Popen[bytes]]


def test_exit_codes_of_the_process(start: Start) -> None:
    for arguments, settings, code in (
        (["explain", "x"], {}, 0),
        (["explain", "x", "--nonsense"], {}, 2),
        (["explain", ""], {}, 3),
        (["explain", "x"], {"FAKE_API": "fault"}, 70),
    ):
        child = start(*arguments, **settings)
        child.communicate(timeout=60)
        assert child.returncode == code, arguments


def test_ctrl_c_exits_with_130_and_leaves_no_file(start: Start, tmp_path: Path) -> None:
    child = start("explain", "x", "--html", str(tmp_path / "report.html"), FAKE_API="sleep")
    assert child.stderr is not None
    assert child.stderr.readline() == b"ready\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert out == b""
    assert err == b"interrupted: nothing more was written\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_reader_that_goes_away_is_no_error(start: Start, extra: list[str]) -> None:
    read, write = os.pipe()
    child = start("explain", "word " * 20_000, *extra, stdout=write, FAKE_LINES="20")
    os.close(write)
    os.read(read, 10)
    os.close(read)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")


def test_a_reader_that_never_came_is_no_error_and_the_report_is_written(start: Start, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    report = tmp_path / "report.html"
    child = start("explain", "x", "--quiet", "--html", str(report), stdout=write)
    os.close(write)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")
    assert report.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_told(start: Start) -> None:
    with open("/dev/full", "wb") as full:
        child = start("explain", "x", stdout=full)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 3
    assert err.startswith(b"error: Expected to write to standard output.")
    assert b"Traceback" not in err


def closed(command: subprocess.Popen[bytes], streams: str) -> subprocess.CompletedProcess[bytes]:
    """Run the same command again by a shell that closes standard streams, as in `>&-`."""
    arguments = command.args
    assert isinstance(arguments, list)
    command.communicate(timeout=60)
    line = ["sh", "-c", f'exec "$@" {streams}', "sh", *arguments]
    path = os.pathsep.join([str(Path(arguments[1]).parent), os.environ["PYTHONPATH"]])
    return subprocess.run(line, capture_output=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": path})


def test_closed_streams(start: Start, tmp_path: Path) -> None:
    done = closed(start("explain", "x"), ">&-")
    assert done.returncode == 3
    assert done.stderr.startswith(b"error: Expected a place for the result.")
    report = tmp_path / "report.html"
    done = closed(start("explain", "x", "--html", str(report)), ">&- 2>&- <&-")
    assert (done.returncode, report.read_text()) == (0, "<p>x, top 20 words")
    done = closed(start("explain", "-"), "<&-")
    assert done.returncode == 3
    assert b"standard input is closed" in done.stderr
    assert closed(start("explain", ""), "2>&-").returncode == 3


def test_a_plain_output_encoding_gets_escapes_and_valid_json(start: Start) -> None:
    child = start("explain", "\u4e2d", "--json", PYTHONIOENCODING="ascii")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")
    assert b'"\\u4e2d"' in out
    child = start("explain", "\u4e2d", PYTHONIOENCODING="ascii")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, b"")
    assert b"\\u4e2d" in out


def on_a_terminal(start: Start, *arguments: str, seconds: str) -> tuple[bytes, bytes]:
    """Run with standard error on a pseudo-terminal; returns (standard output, what the terminal got)."""
    terminal, other = pty.openpty()
    settings = {"FAKE_API": "sleep", "FAKE_SECONDS": seconds, "TERM": "xterm", "COLUMNS": "80"}
    child = start(*arguments, stderr=other, **settings)
    os.close(other)
    shown, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # the other end is closed: the child has gone
                break
            if not piece:
                break
            shown += piece
    os.close(terminal)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    return out, shown


@pytest.mark.slow
def test_a_progress_bar_appears_on_a_terminal_after_a_second(start: Start) -> None:
    out, shown = on_a_terminal(start, "explain", "x", seconds="2.5")
    assert b"forward passes" in shown
    assert out == b"0 x [bold]top 10 words\n"


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "seconds"), [(["--quiet"], "2"), ([], "0.1")])
def test_no_bar_with_quiet_or_for_what_is_quick(start: Start, arguments: list[str], seconds: str) -> None:
    _, shown = on_a_terminal(start, "explain", "x", *arguments, seconds=seconds)
    assert b"forward passes" not in shown


def test_no_bar_where_standard_error_is_no_terminal(start: Start) -> None:
    child = start("explain", "x", FAKE_API="sleep", FAKE_SECONDS="1.5", FORCE_COLOR="1")
    _, err = child.communicate(timeout=60)
    assert err == b"ready\n"
