"""`attrace doctor`: what is installed and what is missing, found without importing any of it."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

INTERNAL = {"dev", "prepare", "all"}
"""Extras that are no feature of their own."""


def examine() -> dict[str, Any]:
    """Everything that doctor reports, as JSON values."""
    return {
        "attrace": version("attrace"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "core": _versions(_requirements(None)),
        "extras": {extra: _versions(_requirements(extra)) for extra in _extras()},
        "cache": str(Path(os.environ.get("ATTRACE_CACHE") or "~/.cache/attrace").expanduser()),
        "hub_cache": str(_hub_cache()),
        "embedded_model": _embedded(),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The report for a person, one fact a line."""
    report = [
        f"attrace {found['attrace']}, Python {found['python']}, {found['platform']}",
        f"core        {_listed(found['core'])}",
    ]
    for extra, packages in found["extras"].items():
        missing = [name for name, installed in packages.items() if installed is None]
        cure = f"; missing: {', '.join(missing)} (pip install 'attrace[{extra}]')" if missing else ""
        report.append(f"{extra:<11} {_listed(packages) or 'nothing'}{cure}")
    model = found["embedded_model"]
    if model is None:
        report.append("model       missing from this installation")
    else:
        state = {
            True: "as packaged",
            False: "CHANGED since it was packaged",
            None: "not recorded, source checkout",
        }
        report.append(f"model       {model['bytes']:,} bytes, sha256 {model['sha256']} ({state[model['as_packaged']]})")
    report += [f"cache       {found['cache']}", f"hub models  {found['hub_cache']}"]
    return report


def _listed(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {installed}" for name, installed in packages.items() if installed)


def _extras() -> list[str]:
    return [e for e in distribution("attrace").metadata.get_all("Provides-Extra") or [] if e not in INTERNAL]


def _requirements(extra: str | None) -> list[str]:
    """Names of the packages that the core or an extra asks for."""
    names = []
    for line in distribution("attrace").requires or []:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        wanted = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line)
        if name and (wanted[1] if wanted else None) == extra:
            names.append(name[0])
    return sorted(names)


def _versions(names: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _hub_cache() -> Path:
    """Where huggingface_hub keeps models, by its own rules, without importing it."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def _embedded() -> dict[str, Any] | None:
    """Size and checksum of the embedded model's weights, against what the installer wrote down."""
    weights = files("attrace") / "assets" / "spam" / "model.safetensors"
    if not weights.is_file():
        return None
    with as_file(weights) as path:
        digest, size = hashlib.sha256(path.read_bytes()), path.stat().st_size
    recorded = [
        file.hash
        for file in distribution("attrace").files or []
        if file.as_posix() == "attrace/assets/spam/model.safetensors" and file.hash
    ]
    ours = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    return {
        "bytes": size,
        "sha256": digest.hexdigest(),
        "as_packaged": recorded[0].value == ours if recorded else None,
    }
