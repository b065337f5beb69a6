"""The project's own files agree with each other and name no machine."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torchvision_ops
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "lock.txt"


def pinned() -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for line in LOCK.read_text().splitlines():
        requirement = Requirement(line)
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def asked_for() -> list[Requirement]:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = data["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    lines = [*project["dependencies"], *extras]
    return [r for r in map(Requirement, lines) if r.name != "attrace"]


def test_the_lock_pins_exact_releases_and_names_no_host_and_no_path() -> None:
    text = LOCK.read_text()
    assert not re.search(r"://|@|/|--", text)
    for requirements in pinned().values():
        assert all(re.fullmatch(r"==[^*,]+", str(r.specifier)) for r in requirements)


@pytest.mark.parametrize("requirement", asked_for(), ids=str)
def test_the_lock_satisfies_the_project(requirement: Requirement) -> None:
    locked = pinned()[canonicalize_name(requirement.name)]
    for pin in locked:
        release = str(pin.specifier).removeprefix("==")
        assert requirement.specifier.contains(release, prereleases=True)


def test_hand_pins_are_in_the_lock() -> None:
    lines = (line.split("#")[0].strip() for line in (ROOT / "requirements" / "pins.txt").read_text().splitlines())
    for pin in map(Requirement, filter(None, lines)):
        assert [str(r.specifier) for r in pinned()[pin.name]] == [str(pin.specifier)]


@pytest.mark.skipif(not os.environ.get("CI"), reason="only CI must have everything; elsewhere tests say what they miss")
@pytest.mark.parametrize(
    "module",
    [
        "torch",
        "transformers",
        "jax",
        "tensorflow",
        "ml_dtypes",
        "networkx",
        "scipy",
        "sklearn",
        "onnx",
        "playwright",
        "timm",
        "open_clip",
        "peft",
        "accelerate",
    ],
)
def test_ci_has_what_tests_skip_for_elsewhere(module: str) -> None:
    assert find_spec(module) is not None


@pytest.mark.skipif(not os.environ.get("CI"), reason="outside of CI a test skips what is not installed, and says so")
@pytest.mark.parametrize("name", ["torchao", "torchvision"])
def test_ci_has_what_lies_in_a_folder_of_its_own(name: str) -> None:
    assert (torchvision_ops.FOLDER / name).is_dir()


def test_tracked_text_names_no_absolute_path_of_a_machine() -> None:
    # \b would also match inside "docs/home/": what counts is a path that starts at the root.
    pattern = r"(^|[^A-Za-z0-9_.$)}~-])/(home|root|Users|work|tmp)/[A-Za-z]"
    listed = subprocess.run(
        ["git", "grep", "-nIE", pattern, "--", ".", ":!scripts/real_models.py", ":!tests/packaging"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.stdout == ""
