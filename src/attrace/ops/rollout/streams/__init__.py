"""Rollout over several streams of tokens: `naive` is the plain reference, `product` the same without any map held."""

from __future__ import annotations

from attrace.ops.rollout.streams.graph import (
    Attend,
    Cut,
    Gather,
    Part,
    PositionMap,
    Run,
    Stay,
    StreamGraph,
    Unknown,
    in_order,
    joined_by,
)
from attrace.ops.rollout.streams.product import source_shares, target_shares

__all__ = [
    "Attend",
    "Cut",
    "Gather",
    "Part",
    "PositionMap",
    "Run",
    "Stay",
    "StreamGraph",
    "Unknown",
    "in_order",
    "joined_by",
    "source_shares",
    "target_shares",
]
