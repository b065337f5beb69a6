from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_api
import pytest

import attrace
from attrace.apps import cli

PROGRAM = Path(fake_api.__file__).with_name("fake_cli.py")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The stand-in api in this process; returns the list of calls it gets."""
    module = fake_api.make()
    monkeypatch.setitem(sys.modules, "attrace.api", module)
    monkeypatch.setattr(attrace, "api", module, raising=False)
    for name in ("FAKE_API", "FAKE_LINES", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    fake_api.CALLS.clear()
    return fake_api.CALLS


@pytest.fixture
def attrace_run(api: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """attrace_run("explain", "x") -> (exit code, standard output, standard error), in this process."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[bytes]]:
    """start("explain", "x", FAKE_API="sleep") starts the command line over the stand-in api in a child."""

    def begin(
        *arguments: str, stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE, **settings: str
    ) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(PROGRAM.parent), os.environ["PYTHONPATH"]])
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": path, **settings},
        )

    return begin
