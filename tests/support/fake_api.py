"""Stands in for attrace.api where a test is about the command line: it answers at once and needs no model.

FAKE_API in the environment chooses what it does, so that a child process can be told as well.
"""

from __future__ import annotations

import os
import sys
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import attrace
from attrace import errors

CALLS: list[dict[str, Any]] = []


@dataclass
class Explanation:
    text: str
    asked: dict[str, Any] = field(default_factory=dict)

    def show(self, console: Any = None, *, top: int = 10, units: str = "words") -> None:
        for index in range(int(os.environ.get("FAKE_LINES", "1"))):
            console.print(f"{index} {self.text} [bold]top {top} {units}")

    def to_html(self, path: Path, *, top: int = 20, units: str = "words") -> None:
        Path(path).write_text(f"<p>{self.text}, top {top} {units}", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        return {"text": self.text, **self.asked}


def explain(model: Any, inputs: str, *, progress: Any = None, **asked: Any) -> Explanation:
    CALLS.append({"model": model, "inputs": inputs, **asked})
    progress("forward passes", 1, 4)
    mode = os.environ.get("FAKE_API", "")
    if mode == "sleep":
        print("ready", file=sys.stderr, flush=True)
        time.sleep(float(os.environ.get("FAKE_SECONDS", "60")))
    elif mode == "fault":
        raise RuntimeError("a bug")
    elif mode:
        raise getattr(errors, mode)("Expected a label.\nReceived: 'a\x1b[31mb\u202e'.")
    return Explanation(inputs, asked)


def check_output(path: Path) -> None:
    if not Path(path).parent.is_dir():
        raise errors.OutputError(f"Expected a folder that can be written. Received: {str(path.parent)!r}.")


def make() -> types.ModuleType:
    """The stand-in module."""
    module = types.ModuleType("attrace.api")
    for thing in (Explanation, explain, check_output):
        setattr(module, thing.__name__, thing)
    return module


def install() -> None:
    """Put the stand-in where `from attrace import api` finds it, for the life of the process."""
    sys.modules["attrace.api"] = attrace.api = make()  # type: ignore[attr-defined]
