"""`attrace --help` is quick because it loads next to nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("numpy", "torch", "transformers", "tensorflow", "jax", "keras", "jinja2", "safetensors")


@pytest.mark.parametrize("arguments", [["--help"], ["explain", "--help"], ["--version"], ["doctor"]], ids=" ".join)
def test_no_framework_and_no_numpy_is_loaded(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from attrace.apps.cli import run\n"
        f"code = run({arguments!r})\n"
        f"print('LOADED', code, [m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED 0 []"


def test_importing_attrace_loads_no_framework() -> None:
    code = f"import sys, attrace; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_help_takes_at_most_three_tenths_of_a_second_more_than_an_empty_program() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "startup.py"
    done = subprocess.run([sys.executable, str(script), "5"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
