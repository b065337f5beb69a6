"""The e-mails that the package carries for `attrace demo`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from attrace.errors import InputError


@dataclass(frozen=True, slots=True)
class Sample:
    """One e-mail; `text` is not part of it, so a list reads one file only."""

    name: str
    label: str
    about: str


def folder() -> Traversable:
    """Where the samples lie in the package."""
    return files("attrace") / "assets" / "samples"


def samples() -> list[Sample]:
    """All samples, in the order of index.json."""
    rows = json.loads((folder() / "index.json").read_text(encoding="utf-8"))
    return [Sample(row["file"].removesuffix(".txt"), row["label"], row["about"]) for row in rows]


def find(name: str | None) -> Sample:
    """The sample of that name; without one the first that is spam."""
    known = samples()
    for sample in known:
        if sample.name == name or (name is None and sample.label == "spam"):
            return sample
    raise InputError(f"Expected a sample: {', '.join(s.name for s in known)}. Received: {name!r}. Name one of them.")


def text(sample: Sample) -> str:
    """The e-mail itself."""
    return (folder() / f"{sample.name}.txt").read_text(encoding="utf-8").rstrip("\n")
