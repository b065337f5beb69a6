"""What `attrace explain` and `attrace demo` do once their options are read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrace.apps.terminal import Waiting, delivering, print_json, results, tell
from attrace.errors import InputError, OutputError

if TYPE_CHECKING:
    from attrace.api import Explanation


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the api is asked, as it takes it."""

    model: str | None = None
    target: str = "auto"
    method: str = "auto"
    layers: Sequence[int] | None = None
    heads: str | int | Sequence[float] = "mean"
    residual: float = 0.5
    discard: float = 0.0
    truncate: bool = False
    device: str | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the answer goes and in which form."""

    html: Path | None = None
    as_json: bool = False
    top: int | None = None
    """None: as many as the terminal and the report list by default."""
    units: Literal["words", "tokens"] = "words"
    quiet: bool = False


def check_output(output: Output, *, source: Path | None = None) -> None:
    """Refuse what cannot be written, before a text is read or a model loaded."""
    if sys.stdout is None and output.html is None:
        raise OutputError("Expected a place for the result. Received: standard output is closed. Name a file: --html.")
    if output.html is None:
        return
    if source is not None and _is_there(source) and _is_there(output.html) and source.samefile(output.html):
        raise InputError(
            f"Expected two files. Received: {str(source)!r} to read and to write over. Name another file: --html."
        )
    from attrace import api

    api.check_output(output.html)


def answer(text: str, question: Question, output: Output) -> None:
    """Explain the text, write the file that was asked for, then print the result."""
    calm_libraries(question.model)
    with Waiting(quiet=output.quiet) as waiting:
        from attrace import api

        found = api.explain(
            question.model,
            text,
            target=question.target,
            method=question.method,
            layers=question.layers,
            heads=question.heads,
            residual=question.residual,
            discard=question.discard,
            truncate=question.truncate,
            device=question.device,
            seed=question.seed,
            progress=waiting,
        )
    # The file first: a reader of standard output that goes away must not cost it.
    if output.html is not None:
        found.to_html(output.html, units=output.units, **_number(output))
        if not output.quiet:
            tell("written", str(output.html))
    deliver(found, output)


def deliver(found: Explanation, output: Output) -> None:
    """Print the result on standard output."""
    if output.as_json:
        print_json(found.to_dict())
    elif sys.stdout is not None:
        with delivering():
            found.show(results(), units=output.units, **_number(output))


def _number(output: Output) -> dict[str, int]:
    return {} if output.top is None else {"top": output.top}


def _is_there(path: Path) -> bool:
    try:
        return path.expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long a name, an unknown user's home
        return False


def calm_libraries(model: str | None) -> None:
    """Before transformers is imported: no telemetry, no chatter, no network unless a hub name asks for it."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if model is None or _is_there(Path(model)):
        os.environ["HF_HUB_OFFLINE"] = "1"
