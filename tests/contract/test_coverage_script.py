"""The coverage script on a few types, as a user runs it: its results file, its page, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "coverage.py"
EXPECTED = {
    "bert": "covered",
    "gpt_oss": "covered",
    "t5": "covered",
    "swin": "covered",
    "clip": "covered",
    "patchtst": "covered",
    "hiera": "covered",
    "mamba": "no attention",
    "led": "refused",
    "bark": "no inputs",
    "sam_mask_decoder": "not buildable",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A plain script: it runs outside the test's own restrictions on warnings."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True, text=True, check=False, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_script_measures_goes_on_and_writes_its_page(tmp_path: Path) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    first = run("--only", *EXPECTED, "--json", str(results), "--markdown", str(page))
    assert first.returncode == 0, first.stderr
    found = json.loads(results.read_text())
    assert {name: record["status"] for name, record in found.items()} == EXPECTED
    assert found["t5"]["evidence"] == {"own weights": 6}
    assert found["gpt_oss"]["evidence"] == {"own weights": 2}
    assert first.stdout.splitlines()[-1].startswith("7 covered")
    text = page.read_text()
    assert "| covered | 7 | 7 |" in text
    assert "| `hiera` | HieraModel |" in text
    assert "padded or joined before its values" in text
    assert str(tmp_path) not in text
    again = run("--only", "bert", "--json", str(results))
    assert again.returncode == 0
    assert set(json.loads(results.read_text())) == set(EXPECTED)


def test_rows_of_zeros_are_no_evidence_unless_the_model_masked_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from coverage_measure import difference

    reference = torch.rand(1, 2, 3, 4).softmax(-1)
    assert difference(reference, reference) == 0.0
    assert difference(torch.zeros_like(reference), reference) == float("inf")
    one = reference.clone()
    one[0, 1, 2] = 0.0
    assert difference(one, reference) == float("inf")
    for masked in (0.0, 0.25, float("nan")):
        there = reference.clone()
        there[0, 1, 2] = masked
        assert difference(one, there) == 0.0


@pytest.mark.parametrize("wrong", [["--only", "no-such-type"], ["--jobs", "two"]])
def test_bad_options(wrong: list[str]) -> None:
    bad = run(*wrong)
    assert bad.returncode == 2
    assert wrong[1] in bad.stderr
