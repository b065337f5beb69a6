"""`attrace --help` is quick because it loads next to nothing.  benchmarks/startup.py measures how quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "transformers", "tensorflow", "jax", "keras")
HEAVY = (*FRAMEWORKS, "numpy", "jinja2", "safetensors", "array_api_compat")
# What typer would load for coloured help pages, and the parts of attrace that a command imports when it runs.
HELP_PAGES = ("rich", "rich.markdown", "markdown_it", "pygments")
ROOMS = tuple(f"attrace.{room}" for room in ("api", "capture", "methods", "aggregate", "render", "layers", "ops"))


def loaded(program: str, modules: tuple[str, ...]) -> list[str]:
    """Which of `modules` are imported once `program` has run in a process of its own."""
    code = f"import sys\n{program}\nprint('LOADED', *[m for m in {modules!r} if m in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    word, *found = done.stdout.splitlines()[-1].split()
    assert word == "LOADED"
    return found


def command(*arguments: str) -> str:
    return f"from attrace.apps.cli import run\nassert run({list(arguments)!r}) == 0"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["explain", "--help"], ["demo", "--help"], ["doctor", "--help"]], ids=" ".join
)
def test_a_help_page_loads_next_to_nothing(arguments: list[str]) -> None:
    assert loaded(command(*arguments), HEAVY + HELP_PAGES + ROOMS) == []


@pytest.mark.parametrize("arguments", [["--version"], ["doctor"], ["demo", "--list"]], ids=" ".join)
def test_no_framework_and_no_numpy_is_loaded(arguments: list[str]) -> None:
    assert loaded(command(*arguments), (*FRAMEWORKS, "numpy", "jinja2", "safetensors", *ROOMS)) == []


def test_judging_a_path_loads_no_renderer() -> None:
    program = "import os\nfrom attrace.render.files import check_writable\ncheck_writable(os.devnull)"
    assert loaded(program, HEAVY + HELP_PAGES) == []


def test_importing_attrace_loads_no_framework() -> None:
    assert loaded("import attrace", HEAVY + ROOMS) == []
