"""The measurement of scripts/coverage.py, one architecture at a time, for tests."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from torch import nn

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name: str) -> Any:
    """One of the project's scripts, as a module."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))


def measure(model_type: str) -> dict[str, Any]:
    """What the coverage script finds of one model type."""
    found: dict[str, Any] = script("coverage_measure").measure(model_type)
    return found


def built(model_type: str) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model of a type that runs on the library's eager attention, and its input."""
    models = script("tiny_models")
    config = next(iter(models.configurations(model_type)))
    model = models.built(models.class_of(model_type, models.CONFIG_MAPPING[model_type]), config, "eager")
    batch, why = script("coverage_measure").first_inputs(model_type, model)
    assert batch is not None, why
    return model, batch
