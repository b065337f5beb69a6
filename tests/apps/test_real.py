"""The command line over the real api and real models, each run in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import attrace
from attrace.apps import samples

PACKAGE = Path(attrace.__file__).parent
# A job in the background of a script is started deaf to Ctrl-C.
START = (
    "import signal, sys;signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from attrace.apps.cli import main; sys.argv[0] = 'attrace'; main()"
)

pytestmark = pytest.mark.slow


def attrace_process(
    *arguments: str | Path, folder: Path | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **settings},
        cwd=folder,
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
    known = samples.samples()
    found = {sample.name: attrace.explain(None, samples.text(sample)).target.label for sample in known}
    assert found == {sample.name: sample.label for sample in known}


README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^attrace explain .*$", README, re.MULTILINE)


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_readme_run(real: Callable[[str], Path], tmp_path: Path, line: str) -> None:
    (tmp_path / "mail.txt").write_text("Claim your FREE prize now")
    program, *arguments = shlex.split(line, comments=True)
    arguments = [str(real("minilm")) if argument == "FOLDER" else argument for argument in arguments]
    assert program == "attrace"
    done = attrace_process(*arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert (tmp_path / "report.html").exists() == ("--html" in arguments)


def test_the_python_example_of_the_readme_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("spam ")
    assert (tmp_path / "report.html").exists()


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
