"""The faithfulness benchmark on linear models, where the right numbers are known."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from attrace.methods.registry import METHODS

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "faithfulness.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with the two ways that need no recorded run."""
    spec = importlib.util.spec_from_file_location("faithfulness", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "faithfulness", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "WAYS", tuple(w for w in module.WAYS if w.method == "leave-one-out"))
    return module


class Linear:
    """Deleting token i costs weights[i]; hiding it costs the weights in the reverse order."""

    trace = None
    unit = "log-probability"
    readout = np.zeros(0)

    def __init__(self, weights: list[float]) -> None:
        self.weights = np.array(weights)
        self.protected = np.zeros(len(weights), dtype=bool)

    def score(self, keep: np.ndarray, *, operator: str = "delete", progress: object = None) -> np.ndarray:
        return keep @ (self.weights if operator == "delete" else self.weights[::-1])


SUBJECTS = [Linear([1.0, 2.0, 3.0, 4.0]), Linear([8.0, 6.0, 4.0, 2.0])]


def found(script: ModuleType) -> dict[str, Any]:
    return script.summary(script.measure("A model", "Two inputs.", SUBJECTS, seed=0), seed=0)


def test_each_way_is_judged_by_each_operator(script: ModuleType) -> None:
    rows = {r["method"]: r for r in found(script)["methods"]}
    # 10, 20 % of four tokens are one token, 30 to 50 % are two.
    best, worst = (2 * 4 + 3 * 7) / 5, (2 * 1 + 3 * 3) / 5
    by_delete = rows["leave-one-out by delete"]
    assert by_delete["delete"]["per_input"] == pytest.approx([best, 2 * best])
    assert by_delete["hide"]["per_input"] == pytest.approx([worst, 2 * worst])
    by_hide = rows["leave-one-out by hide"]
    assert by_hide["hide"]["per_input"] == pytest.approx([best, 2 * best])
    assert by_hide["delete"]["per_input"] == pytest.approx([worst, 2 * worst])
    assert by_delete["passes_per_input"] == by_hide["passes_per_input"] == 5
    assert by_delete["delete"]["own_operator"]
    assert not by_delete["hide"]["own_operator"]


def test_the_difference_from_random_is_paired(script: ModuleType) -> None:
    numbers = found(script)
    row, chance = numbers["methods"][0]["delete"], numbers["random"]["delete"]
    gains = np.subtract(row["per_input"], chance["per_input"])
    assert row["over_random"]["mean"] == pytest.approx(gains.mean())
    assert min(gains) - 1e-9 <= row["over_random"]["low"] <= row["over_random"]["high"] <= max(gains) + 1e-9


def test_a_method_is_not_praised_for_its_own_operator(script: ModuleType) -> None:
    numbers = found(script)
    assert script.verdict(numbers).startswith("Worse than random")
    text = script.table(numbers)
    lines = text.splitlines()
    assert [line.count("|") for line in lines] == [8] * 5
    own = [cell for cell in lines[2].split("|") if "\\*" in cell]
    assert len(own) == 2
    assert own[0].strip().startswith("8.70 ")


def test_the_page_and_the_json_hold_every_model(script: ModuleType, tmp_path: Path, capsys: Any) -> None:
    script.prompts = lambda _folder: iter(SUBJECTS)
    (tmp_path / "config.json").write_text("{}")
    out, record = tmp_path / "page.md", tmp_path / "numbers.json"
    arguments = ["--models", "smollm2", "--smollm2", str(tmp_path), "--out", str(out), "--json", str(record)]
    assert script.main(arguments) == 0
    page, numbers = out.read_text(), json.loads(record.read_text())
    assert script.table(numbers["models"][0]) in page
    assert script.table(numbers["models"][0]) in capsys.readouterr().out
    assert str(tmp_path) not in page
    assert numbers["seed"] == 0


def test_a_missing_model_is_said_and_ends_with_one(script: ModuleType, tmp_path: Path, capsys: Any) -> None:
    assert script.main(["--models", "smollm2", "--smollm2", str(tmp_path)]) == 1
    assert "make real-models" in capsys.readouterr().err


def test_the_inputs_are_what_the_page_says(script: ModuleType) -> None:
    assert len(set(script.PROMPTS)) == 25
    assert {w.method for w in importlib.import_module("faithfulness").WAYS} <= set(METHODS)


def test_mails_are_cut_by_tokens(script: ModuleType) -> None:
    class Words:
        def __call__(self, text: str, *, max_length: int, **_options: Any) -> dict[str, Any]:
            starts = [i for i in range(len(text)) if i == 0 or text[i - 1] == " "]
            spans = [(s, (text + " ").index(" ", s)) for s in starts]
            return {"offset_mapping": [(0, 0), *spans[: max_length - 2], (0, 0)]}

    text = " ".join(["word"] * 200)
    assert script.cut(Words(), text) == " ".join(["word"] * 126)
    assert script.cut(Words(), "two words") == "two words"
