"""`attrace demo` and `attrace doctor`."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import FileHash, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attrace.apps import doctor, samples

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def mails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "samples"
    folder.mkdir()
    rows = [
        {"file": "dinner.txt", "label": "ham", "about": "Friends are invited."},
        {"file": "prize.txt", "label": "spam", "about": "A made-up prize."},
    ]
    (folder / "index.json").write_text(json.dumps(rows))
    (folder / "dinner.txt").write_text("Pasta\n\nCome round.\n")
    (folder / "prize.txt").write_text("You won\n")
    monkeypatch.setattr(samples, "folder", lambda: folder)
    return folder


@pytest.mark.usefixtures("mails")
def test_demo_explains_the_first_spam_with_the_embedded_model(attrace_run: Run, api: list[dict[str, Any]]) -> None:
    code, out, err = attrace_run("demo")
    assert (code, out) == (0, "0 You won [bold]top 10 words\n")
    assert err == "sample: prize (spam): A made-up prize.\n"
    assert (api[0]["model"], api[0]["inputs"]) == (None, "You won")


@pytest.mark.usefixtures("mails")
def test_demo_takes_a_name_and_the_output_options(attrace_run: Run, api: list[dict[str, Any]], tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    code, out, err = attrace_run("demo", "dinner", "--json", "--quiet", "--html", str(report), "--method", "rollout")
    assert (code, err) == (0, "")
    assert json.loads(out)["text"] == "Pasta\n\nCome round."
    assert api[0]["method"] == "rollout"
    assert report.exists()


@pytest.mark.usefixtures("mails")
def test_demo_lists_its_mails(attrace_run: Run, api: list[dict[str, Any]]) -> None:
    out = "dinner  ham   Friends are invited.\nprize   spam  A made-up prize.\n"
    assert attrace_run("demo", "--list") == (0, out, "")
    code, out, _ = attrace_run("demo", "--list", "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)] == ["dinner", "prize"]
    assert api == []


@pytest.mark.usefixtures("mails")
@pytest.mark.parametrize("name", ["nonsense", "../dinner", ""])
def test_demo_names_the_mails_where_there_is_none(attrace_run: Run, name: str) -> None:
    code, out, err = attrace_run("demo", name)
    assert (code, out) == (3, "")
    assert "dinner, prize" in err


def test_the_packaged_samples_are_complete() -> None:
    known = samples.samples()
    assert len({s.name for s in known}) == len(known)
    assert {s.label for s in known} == {"ham", "spam"}
    assert all(samples.text(s).strip() and s.about for s in known)
    assert {f"{s.name}.txt" for s in known} == {p.name for p in samples.folder().iterdir()} - {"index.json"}


def test_doctor_reports_what_is_installed(attrace_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTRACE_CACHE", str(tmp_path))
    code, out, err = attrace_run("doctor", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["attrace"] == version("attrace")
    assert found["core"]["numpy"] == version("numpy")
    assert found["extras"]["hf"]["torch"] == version("torch")
    assert set(found["extras"]) == {"flow", "hf", "keras", "torch"}
    assert found["cache"] == str(tmp_path)
    code, out, _ = attrace_run("doctor")
    assert code == 0
    assert "missing:" not in out
    assert f"Python {'.'.join(map(str, sys.version_info[:3]))}" in out


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.version

    def without_torch(name: str) -> str:
        if name == "torch":
            raise doctor.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor, "version", without_torch)
    report = "\n".join(doctor.lines(doctor.examine()))
    assert "missing: torch (pip install 'attrace[hf]')" in report


@pytest.mark.parametrize(("recorded", "state"), [("same", True), ("other", False), ("none", None)])
def test_doctor_compares_the_model_with_the_installers_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: str, state: bool | None
) -> None:
    weights = tmp_path / "assets" / "spam" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"weights").digest()).rstrip(b"=").decode()

    class File(SimpleNamespace):
        def as_posix(self) -> str:
            return "attrace/assets/spam/model.safetensors"

    hashes = {"same": FileHash(f"sha256={digest}"), "other": FileHash("sha256=abc"), "none": None}
    monkeypatch.setattr(doctor, "files", lambda _: tmp_path)
    monkeypatch.setattr(doctor, "distribution", lambda _: SimpleNamespace(files=[File(hash=hashes[recorded])]))
    assert doctor._embedded() == {
        "bytes": 7,
        "sha256": hashlib.sha256(b"weights").hexdigest(),
        "as_packaged": state,
    }
