"""Attention flow in the plainest form: NumPy, float64, one maximum flow per output and input token.

SciPy finds the flows.  Its solver takes whole numbers of 32 bits, so it is asked several times, each time for
what the flow found so far leaves over, until a cut of the graph proves that no more fits through.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from attrace.errors import InputError, MissingDependencyError, NonFiniteError
from attrace.ops.heads import fuse_heads
from attrace.ops.rollout.checks import MapKind, MapReader, check_map, check_positions, check_residual, check_switch
from attrace.ops.rollout.naive import mix
from attrace.types import Floats, Heads

_BITS = 28
"""Of the gap's size in one question to the solver; sums of two edges at most twice as wide still fit in 31 bits."""
_CLOSED = 2.0**-50
"""The share of a flow that may lie between it and the cut that bounds it: a few roundings of float64."""


def attention_flow(
    maps: Iterable[Any],
    *,
    heads: Heads = "mean",
    residual: float = 0.5,
    target: int | Sequence[int] | None = None,
    normalize: bool = False,
) -> Floats:
    """The maximum flow from each token of the last layer to each input token: rows are outputs, columns inputs.

    Shapes: L NumPy maps (B, H, n, n), first layer first -> (B, n, n); one `target` -> its row (B, n), k
    targets -> (B, k, n).  The graph has n nodes before the first layer and n after each one; the edge from
    token i after a layer to token j before it holds at most ((1 - residual) A + residual I)[i, j], with A the
    layer's map after head fusion.  Each cell is a flow of its own, so a row need not sum to one;
    `normalize=True` divides each row by its sum, and a row of zeros stays one.
    Source: Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", arXiv 2005.00928, section 4.

    Where the rows of all maps sum to at most one, no cell lies below that of the rollout with
    `normalize=False`.  A cell is the capacity of a cut, summed without rounding in between, and a flow proves
    that no cut is smaller by more than 2**-50 of it.  Each cell costs a maximum flow on (L + 1) n nodes: meant
    for short texts, and for testing what is faster.

    Raises InputError, ShapeError and NonFiniteError as `attrace.rollout` does, InputError for maps of another
    framework, and MissingDependencyError without SciPy (extra `flow`).

    >>> first = np.array([[[[0.5, 0.5], [0.0, 1.0]]]])
    >>> last = np.array([[[[1.0, 0.0], [0.5, 0.5]]]])
    >>> attention_flow([first, last])
    array([[[0.75, 0.25],
            [0.25, 1.  ]]])
    """
    residual = check_residual(residual)
    check_switch("normalize", normalize)
    capacities = _capacities(maps, heads, residual)
    batch, n, _ = capacities[0].shape
    positions, single = (list(range(n)), False) if target is None else check_positions("target", target, n)
    result = np.zeros((batch, len(positions), n))
    for item in range(batch):
        graph = _graph([capacity[item] for capacity in capacities])
        for row, i in enumerate(positions):
            for j in range(n):
                result[item, row, j] = _maximum_flow(graph, len(graph) - n + i, j)
    if normalize:
        sums = result.sum(axis=-1, keepdims=True)
        result /= np.where(sums > 0.0, sums, 1.0)
    return result[:, 0] if single else result


def _capacities(maps: Iterable[Any], heads: Heads, residual: float) -> list[Floats]:
    """What the edges of each layer hold: L of (B, n, n)."""
    reader = MapReader(maps, None, top_first=False)
    kind: MapKind | None = None
    capacities = []
    while reader.advance():
        attention = reader.take()
        kind = check_map(attention, reader.layer, kind)
        if kind.framework.name != "numpy":
            raise InputError(
                f"Expected NumPy maps for the attention flow. Received: {kind.framework.name} in layer "
                f"{reader.layer}. Convert them first, for instance with numpy.asarray."
            )
        with np.errstate(over="ignore"):
            fused = fuse_heads(np.asarray(attention, dtype=np.float64), heads)
            capacity = np.stack([mix(of_one, residual, normalize=False) for of_one in fused])
            total = capacity.sum() * kind.n  # bounds every flow, and the sum of a row of flows
        if not math.isfinite(total):
            raise NonFiniteError(
                f"Expected maps whose sums are far from overflow. Received: {capacity.max()} in layer {reader.layer}. "
                "Divide the map's rows by their sums."
            )
        capacities.append(capacity)
    return capacities


def _graph(capacities: list[Floats]) -> Floats:
    """L of (n, n) -> ((L + 1) n, (L + 1) n): node l * n + i is token i after l layers, its edges lead down."""
    n = len(capacities[0])
    size = (len(capacities) + 1) * n
    graph = np.zeros((size, size))
    for layer, capacity in enumerate(capacities):
        graph[(layer + 1) * n : (layer + 2) * n, layer * n : (layer + 1) * n] = capacity
    return graph


def _maximum_flow(graph: Floats, source: int, sink: int) -> float:
    """The capacity of a minimum cut between two nodes, with a flow as the proof that no cut is smaller."""
    sparse, csgraph = _scipy()
    left = graph.copy()
    found = 0.0
    bound = min(math.fsum(graph[source]), math.fsum(graph[:, sink]))
    while bound - found > _CLOSED * bound:
        # A power of two, so that multiples of it are subtracted without rounding; at least the smallest float.
        unit = math.ldexp(1.0, max(math.frexp(bound - found)[1] - _BITS, -1074))
        # An edge twice as wide as the gap is as good as a wider one, and lies in no minimum cut.
        with np.errstate(over="ignore"):
            whole = np.minimum(np.floor(left / unit), 2.0 ** (_BITS + 1)).astype(np.int32)
        solved = csgraph.maximum_flow(sparse.csr_array(whole), source, sink)
        flow = solved.flow.toarray()
        reached = csgraph.breadth_first_order(
            sparse.csr_array((whole > flow).astype(np.int32)), source, return_predecessors=False
        )
        near = np.zeros(len(graph), dtype=bool)
        near[reached] = True
        bound = min(bound, math.fsum(graph[near][:, ~near].ravel()))
        if solved.flow_value == 0:
            break  # what is left between flow and cut is rounding
        found += solved.flow_value * unit
        left -= flow * unit
    return bound


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import sparse
        from scipy.sparse import csgraph
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"Expected SciPy for the attention flow. Received: {error}. Install it with: pip install 'attrace[flow]'."
        ) from None
    return sparse, csgraph
