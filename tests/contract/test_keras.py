"""The Keras seam on each backend.  A process has one backend, so each runs in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# JAX compiles each operator for each shape; small ones need no optimising.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
MODULES = sorted((Path(__file__).parent / "keras_backend").glob("*.py"))


def test_there_is_something_to_run() -> None:
    assert [path.stem for path in MODULES] == ["explaining", "families", "layers", "seam"]


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_backend(backend: str) -> None:
    for package in ("keras", "keras_hub", backend):
        if not os.environ.get("CI"):
            pytest.importorskip(package, reason=f"{package} is not installed; `make test` installs it")
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *map(str, MODULES)],
        env={**os.environ, "KERAS_BACKEND": backend, "XLA_FLAGS": QUICK, "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    assert re.search(r"\d+ passed", found.stdout)
    assert "skipped" not in found.stdout
