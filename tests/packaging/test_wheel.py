"""The built wheel: what is in it, and that it works where nothing else is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import lonely
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "attrace"
LIMIT = 5_000_000  # the embedded model takes at most 4 MB of it

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is built from the sdist, so the sdist is known to be complete."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def environment() -> dict[str, str]:
    """This process' environment without what could lead an interpreter to another one's packages."""
    return {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "PYTHONHOME"}}


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )


def source_files() -> set[str]:
    """Files that git knows or would add, below the package."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/attrace"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.removeprefix("src/") for line in listed.stdout.splitlines() if (ROOT / line).is_file()}


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = {n for n in archive.namelist() if not n.endswith("/")}
    info = {n for n in names if ".dist-info/" in n}
    assert {n.split("/", 1)[1] for n in info} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }
    assert names - info == source_files()
    assert "attrace/py.typed" in names


def test_data_files_are_in_the_wheel(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
    data = [p for p in PACKAGE.rglob("*") if p.suffix in {".j2", ".json", ".css", ".js", ".safetensors", ".txt"}]
    assert {f"attrace/{p.relative_to(PACKAGE).as_posix()}" for p in data} <= names


def test_the_wheel_is_small(built: tuple[Path, Path]) -> None:
    assert built[1].stat().st_size < LIMIT


def test_the_sdist_has_sources_and_tests_and_no_scratch(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    assert {"pyproject.toml", "LICENSE", "README.md", "Makefile", "requirements/lock.txt"} <= names
    assert "tests/packaging/test_wheel.py" in names
    tops = {n.split("/", 1)[0] for n in names}
    assert not {t for t in tops if t.startswith(".") and t != ".gitignore"}
    assert not {n for n in names if "__pycache__" in n or n.endswith((".pyc", ".log", ".html.tmp"))}


def test_metadata_names_the_extras_and_no_url(built: tuple[Path, Path]) -> None:
    requirements = lonely.wheel_requirements(built[1])
    assert not [r for r in requirements if r.url]
    core = {r.name for r in requirements if lonely.applies(r, set())}
    assert core == {"array-api-compat", "jinja2", "numpy", "rich", "safetensors", "typer"}


@pytest.fixture(scope="module")
def core(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lonely.make(tmp_path_factory.mktemp("core") / "env", built[1], set())


@pytest.fixture(scope="module")
def main_job(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lonely.make(tmp_path_factory.mktemp("hf") / "env", built[1], {"hf"})


def test_core_rolls_out_maps_without_a_framework(core: Path, tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np, attrace\n"
        "maps = [np.full((1, 2, 3, 3), 1 / 3)] * 2\n"
        "print(attrace.rollout(maps).sum())\n"
        "print([m for m in ('torch', 'transformers', 'tensorflow', 'jax', 'keras') if m in sys.modules])\n"
    )
    done = run(core / "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    total, loaded = done.stdout.splitlines()
    assert float(total) == pytest.approx(3.0)
    assert loaded == "[]"


def test_core_says_how_to_get_the_main_job(core: Path, tmp_path: Path) -> None:
    done = run(core / "attrace", "explain", "a text", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "pip install 'attrace[hf]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_core_shows_help_and_version(core: Path, tmp_path: Path) -> None:
    assert run(core / "attrace", "--help", cwd=tmp_path).returncode == 0
    assert run(core / "attrace", "--version", cwd=tmp_path).stdout == "attrace 0.1.0\n"


def test_the_installed_demo_explains_an_email(main_job: Path, tmp_path: Path) -> None:
    done = run(main_job / "attrace", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_installed_explain_writes_json(main_job: Path, tmp_path: Path) -> None:
    done = run(main_job / "attrace", "explain", "Win a free prize, click here now", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
