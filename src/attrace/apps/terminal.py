"""What the programs say to a person: messages, the results' console, a progress bar for what takes long."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from attrace.errors import OutputError
from attrace.escapes import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PATIENCE = 1.0
"""Seconds before a progress bar appears."""


def tell(kind: str, message: str) -> None:
    """Print "kind: message" on standard error; lines after the first are indented to match."""
    if sys.stderr is None:
        return
    text = f"\n{' ' * (len(kind) + 2)}".join(visible(line) for line in message.split("\n"))
    with contextlib.suppress(OSError):  # nobody is left to be told
        print(f"{kind}: {text}", file=sys.stderr, flush=True)


def drop_stdout() -> None:
    """Point standard output at nothing, so that Python's own flush at exit finds no broken pipe."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def results() -> Console:
    """The console for results.  It takes no markup from data, and tells of a reader that has gone."""
    from rich.console import Console

    class Results(Console):
        def on_broken_pipe(self) -> NoReturn:
            # rich would end the process with 1; this runs inside its `except BrokenPipeError`
            raise BrokenPipeError

    return Results(markup=False, emoji=False, highlight=False)


@contextlib.contextmanager
def delivering() -> Iterator[None]:
    """Around what writes results: a reader that has gone ends the command well, a full disk is told."""
    import typer

    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # `attrace ... | head`: the reader has what it wanted; typer would make it exit code 1
        drop_stdout()
        raise typer.Exit(0) from None
    except OSError as error:
        drop_stdout()
        raise OutputError(
            f"Expected to write to standard output. Received: {error.strerror}. Free the disk, or redirect elsewhere."
        ) from None


def print_lines(lines: Iterable[str]) -> None:
    """Lines on standard output, as they are."""
    with delivering():
        for line in lines:
            print(line)


def print_json(value: Any) -> None:
    """One JSON document on standard output, in characters that it can take."""
    plain = sys.stdout is None or "utf" not in (sys.stdout.encoding or "").lower()
    print_lines([json.dumps(value, ensure_ascii=plain, allow_nan=False, indent=2)])


class Waiting:
    """A progress bar on standard error once the work in the block takes more than a second.

    It is a `Progress` callback itself.  Nothing is shown with `quiet`, and nothing where standard error is no
    terminal: a log is no place for a bar.
    """

    def __init__(self, *, quiet: bool, patience: float = PATIENCE) -> None:
        self._enabled = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self._state = ("loading", 0, 0)
        self._lock = threading.Lock()
        self._over = False
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._timer = threading.Timer(patience, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Waiting:
        if self._enabled:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._bar is not None:
                self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            self._state = (stage, done, total)
            self._update()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._over:
                return
            # Standard output belongs to the results: rich must not take it over while the bar is up.
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task("", total=None)
            self._update()
            self._bar.start()

    def _update(self) -> None:
        if self._bar is not None and self._task is not None:
            stage, done, total = self._state
            self._bar.update(self._task, description=visible(stage), completed=done, total=total or None)
