"""Option values that are more than a word: layers and heads.  What cannot be parsed is a usage error."""

from __future__ import annotations

import math
import re

import typer

HEAD_FUSIONS = ("mean", "max", "min")
METHODS = ("auto", "alti", "leave-one-out", "rollout", "last-layer")
"""For the help page, which must not load the registry; a test compares the two."""


def layers(text: str | None) -> list[int] | None:
    """Layer numbers out of "0,2,5-7" or "-1"; negative ones count from the last layer.  None: all layers."""
    if text is None:
        return None
    found: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(-?\d{1,6})(?:-(-?\d{1,6}))?\s*", item)
        if not match:
            raise typer.BadParameter(
                f'Expected numbers and ranges. Received: {text!r}. Write them as in "0,2,5-7".', param_hint="--layers"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (first < 0 <= last):
            raise typer.BadParameter(
                f"Expected ranges that go up. Received: {item.strip()!r}. Write the lower number first.",
                param_hint="--layers",
            )
        found += range(first, last + 1)
    return found


def heads(text: str) -> str | int | list[float]:
    """How heads are fused: "mean", "max", "min", one head's index, or a weight per head as in "0.5,0,0.5"."""
    if text in HEAD_FUSIONS:
        return text
    if re.fullmatch(r"-?\d{1,6}", text):
        return int(text)
    try:
        weights = [float(item) for item in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) < 2 or not all(map(math.isfinite, weights)):
        raise typer.BadParameter(
            f"Expected mean, max, min, a head's index, or a weight per head. Received: {text!r}. "
            "Write weights as in 0.5,0,0.5.",
            param_hint="--heads",
        )
    return weights
