"""The measurement of scripts/coverage.py, one architecture at a time, for tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def measure(model_type: str) -> dict[str, Any]:
    """What the coverage script finds of one model type."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import coverage_measure
    finally:
        sys.path.remove(str(SCRIPTS))
    found: dict[str, Any] = coverage_measure.measure(model_type)
    return found
