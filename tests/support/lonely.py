"""An environment that holds only what a wheel's own metadata asks for, made without a network.

pip resolves the same requirements in `make demo`; here the distributions that are installed beside the
tests are followed from requirement to requirement and hard-linked, file by file, into a new environment.
What no requirement names is not there, so a forgotten dependency fails as it would for a user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def wheel_requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"))
    return [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]


def applies(requirement: Requirement, extras: set[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in {"", *extras})


def closure(requirements: list[Requirement], extras: set[str]) -> dict[str, Distribution]:
    """Distributions that the requirements lead to, by canonical name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    todo = [r for r in requirements if applies(r, extras)]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        installed = found.setdefault(name, distribution(name))
        assert requirement.specifier.contains(installed.version, prereleases=True), (
            f"{requirement} asked for, {installed.version} installed"
        )
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                wanted = [Requirement(line) for line in installed.requires or []]
                todo += [r for r in wanted if applies(r, {extra})]
    return found


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:  # two distributions of one namespace may share a file
        pass
    except OSError:  # another file system
        shutil.copy2(source, target)


def make(folder: Path, wheel: Path, extras: set[str]) -> Path:
    """Make the environment in folder, install the wheel into it, return its bin folder."""
    venv.create(folder, with_pip=False, symlinks=True)
    programs = folder / "bin"
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for installed in closure(wheel_requirements(wheel), extras).values():
        for file in installed.files or ():
            if file.parts[0] != "..":  # programs in bin/ name the other environment's interpreter
                link(Path(str(installed.locate_file(file))), site / file)
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    subprocess.run([*pip, "check"], check=True)
    return programs
