"""Rollout of maps that the user holds.  `naive` is the plain reference, `arrays` the same in any framework."""

from __future__ import annotations

from attrace.ops.rollout.arrays import rollout, row_mass

__all__ = ["rollout", "row_mass"]
