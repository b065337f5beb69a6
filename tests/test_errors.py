"""Every error that attrace raises on purpose says what was expected, what came, and what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import attrace
from attrace import errors

SOURCE = Path(attrace.__file__).parent
ROOMS = ("aggregate", "apps", "layers", "ops", "render")
KINDS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
FORM = re.compile(r"(Expected|X) .*Received: .*[.X:)] (X|[A-Z].*[.X])", re.DOTALL)
"""X stands for what is filled in."""


def text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "X"


def messages() -> Iterator[tuple[str, str]]:
    for room in ROOMS:
        for path in sorted((SOURCE / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                    yield f"{path.relative_to(SOURCE).as_posix()}:{node.lineno}", text(node.args[0])


def test_there_are_messages() -> None:
    assert len(list(messages())) > 50


@pytest.mark.parametrize(("place", "message"), [pytest.param(*found, id=found[0]) for found in messages()])
def test_the_form_of_a_message(place: str, message: str) -> None:
    assert message == "X" or FORM.fullmatch(message), place
