"""Rollout over several token streams in the plainest form: NumPy, float64, dense, one step at a time.

This is what rollout over streams *means*; the fast path in `product.py` is tested against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attrace.ops.rollout.naive import drop_smallest, fuse
from attrace.ops.rollout.streams.graph import Attend, StreamGraph
from attrace.types import Floats, Heads

Shares = dict[str, Floats]
"""Stream -> (n, n_stream), the share of each of its input tokens in each position of one state."""


def shares(
    graph: StreamGraph,
    maps: Mapping[int, Any],
    *,
    heads: Heads = "mean",
    residual: float = 0.5,
    normalize: bool = True,
    discard: float = 0.0,
    layers: Sequence[int] | None = None,
) -> list[Shares]:
    """For one item: what every state of the graph draws on, in the order of the states.

    `maps` has the call's map (H, Q, T) for each `Attend` step's number.  A call keeps the share `residual` of what
    its queries' stream held and takes the rest from its keys' stream; a call that is not among `layers` (steps)
    keeps all.  Where rows of maps sum to one, the shares of a position sum to one over the streams.
    """
    made = {step.makes: number for number, step in enumerate(graph.steps)}
    found: list[Shares] = []
    for number, state in enumerate(graph.states):
        if number not in made:
            assert state.length is not None
            found.append({state.stream: np.eye(state.length)})
            continue
        step = graph.steps[made[number]]
        total: Shares = {}
        if isinstance(step, Attend):
            _add(total, found[step.queries], np.eye(state.length or 0))
            if layers is None or made[number] in layers:
                fused = drop_smallest(fuse(np.asarray(maps[made[number]], dtype=np.float64), heads), discard)
                kept, taken = residual * np.eye(len(fused)), (1.0 - residual) * fused
                if normalize:
                    sums = kept.sum(1, keepdims=True) + taken.sum(1, keepdims=True)
                    sums[sums == 0.0] = 1.0
                    kept, taken = kept / sums, taken / sums
                total = {}
                _add(total, found[step.queries], kept)
                _add(total, found[step.keys], taken)
        else:
            for part in step.parts:
                moved = part.moves.dense()
                _add(total, found[part.state], part.share * (np.eye(state.length or 0) if moved is None else moved))
        found.append(total)
    return found


def _add(total: Shares, shares: Shares, left: Floats) -> None:
    for stream, block in shares.items():
        total[stream] = total.get(stream, 0.0) + left @ block
