"""The command line over the real api and real models, each run in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import attrace

PACKAGE = Path(attrace.__file__).parent
START = "import sys; from attrace.apps.cli import main; sys.argv[0] = 'attrace'; main()"

pytestmark = pytest.mark.slow


def attrace_process(*arguments: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
    )


def test_demo_prints_a_result_and_nothing_but_its_own_line_on_standard_error() -> None:
    done = attrace_process("demo")
    assert done.returncode == 0, done.stderr
    assert "spam" in done.stdout
    assert done.stderr.startswith("sample: ")
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stdout


def test_every_sample_gets_its_label() -> None:
    samples = json.loads(attrace_process("demo", "--list", "--json").stdout)
    for sample in samples[:1] + samples[-1:]:
        done = attrace_process("demo", sample["name"], "--json", "--quiet")
        assert done.stderr == ""
        assert json.loads(done.stdout)["target"]["label"] == sample["label"]


def test_two_runs_give_the_same_json() -> None:
    first, second = (attrace_process("explain", "Claim your free prize now", "--json") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    assert first.stdout == second.stdout


def test_the_embedded_model_uses_no_network() -> None:
    # tests/support/offline raises in the child on any connection, which would be a fault with a traceback
    done = attrace_process("explain", "Claim your free prize now", HF_HUB_OFFLINE="0")
    assert (done.returncode, done.stderr) == (0, "")


def test_colours_follow_the_environment(real: Callable[[str], Path]) -> None:
    command = ("explain", "A man is eating food.", "--model", real("minilm"))
    coloured = attrace_process(*command, FORCE_COLOR="1", TERM="xterm-256color")
    assert coloured.returncode == 0, coloured.stderr
    assert "\x1b[" in coloured.stdout
    plain = attrace_process(*command, NO_COLOR="1")
    assert "\x1b[" not in plain.stdout


def test_bad_models_and_targets_are_one_message(real: Callable[[str], Path], tmp_path: Path) -> None:
    minilm = real("minilm")
    (tmp_path / "empty").mkdir()
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(minilm / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    report = tmp_path / "report.html"
    for model, target, says in (
        (tmp_path / "empty", "auto", "config.json"),
        (tmp_path / "nothing" / "there", "auto", "nothing there"),
        (pickled, "auto", "safetensors"),
        (minilm, "class:nonsense", "class"),
        (minilm, "token:999", "999"),
    ):
        done = attrace_process("explain", "a text", "--model", model, "--target", target, "--html", report)
        assert done.returncode == 3, (says, done.stderr)
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert says in done.stderr
        assert "Traceback" not in done.stderr
        assert not report.exists()


def test_a_text_longer_than_the_context_says_both_lengths(real: Callable[[str], Path], tmp_path: Path) -> None:
    mail = tmp_path / "mail.txt"
    mail.write_text("word " * 2000)
    command = ("explain", f"@{mail}", "--model", real("minilm"), "--json")
    done = attrace_process(*command)
    assert done.returncode == 3
    assert "2002" in done.stderr.replace(",", "")
    assert "512" in done.stderr
    assert "--truncate" in done.stderr or "truncate" in done.stderr
    done = attrace_process(*command, "--truncate")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == 512


@pytest.mark.parametrize("seconds", [0.5, 1.5, 3.0, 5.0])
def test_ctrl_c_at_any_moment_leaves_a_whole_report_or_none(
    real: Callable[[str], Path], tmp_path: Path, seconds: float
) -> None:
    command = ["explain", "The capital of France is", "--model", str(real("smollm2"))]
    child = subprocess.Popen(
        [sys.executable, "-c", START, *command, "--html", str(tmp_path / "report.html")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    time.sleep(seconds)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    left = [p.name for p in tmp_path.iterdir()]
    if child.returncode == 0:  # it was quicker than the signal
        assert left == ["report.html"]
    else:
        assert child.returncode == 130, err
        assert b"Traceback" not in err
        assert left in ([], ["report.html"])
    for name in left:
        assert (tmp_path / name).read_text(encoding="utf-8").rstrip().endswith("</html>")
