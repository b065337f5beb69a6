"""Rollout over several token streams, applied to what was asked for: no map per head and layer is ever held.

`naive.py` is the truth.  A vector per state of the graph is all that is carried: downwards from a target, mass that
splits at every call between the queries' stream and the keys' stream; upwards from a source, shares that every call
mixes from the two states that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attrace.ops.rollout.streamed import Layer, Mixing, drop_lightest
from attrace.ops.rollout.streams.graph import Attend, StreamGraph
from attrace.types import Array, AttentionOp


def target_shares(
    graph: StreamGraph,
    ops: Mapping[int, AttentionOp],
    state: int,
    r: Array,
    mixing: Mixing,
    *,
    valid: Mapping[str, Array] | None = None,
    tolerance: float = 0.0,
) -> dict[str, Array]:
    """Mass r, (B, n, M), at a state -> where it ends: {stream: (B, n_stream, M)}, streams that it can reach.

    `ops` has the call of each `Attend` step that counts; the others keep all with their queries.  `valid` has the
    real tokens of streams, (B, n), for discarding.  Together the streams hold what r held, less what calls with rows
    short of one (sinks) did not pass on, less what was dropped: at most `tolerance` per column.
    """
    mass: dict[int, Array] = {state: r}
    for number in range(len(graph.steps) - 1, -1, -1):
        step = graph.steps[number]
        here = mass.pop(step.makes, None)
        if here is None:
            continue
        if not isinstance(step, Attend):
            for part in step.parts:
                _add(mass, part.state, _weighed(part.moves.rmatvec(here), part.share))
        elif number not in ops:
            _add(mass, step.queries, here)
        else:
            if tolerance:
                here = drop_lightest(here, tolerance / len(ops))
            kept, sent = Layer(ops[number], _mixing_of(mixing, graph, step, valid)).back(here)
            _add(mass, step.queries, kept)
            _add(mass, step.keys, sent)
    found: dict[str, Array] = {}
    for at in sorted(mass):
        name = graph.states[at].stream
        found[name] = mass[at] if name not in found else found[name] + mass[at]
    return found


def source_shares(
    graph: StreamGraph,
    ops: Mapping[int, AttentionOp],
    state: int,
    x: Array,
    mixing: Mixing,
    *,
    valid: Mapping[str, Array] | None = None,
) -> dict[int, Array]:
    """Shares x, (B, n, M), of a state -> those in every later state that can hold some: {state: (B, n_state, M)}."""
    found: dict[int, Array] = {state: x}
    for number, step in enumerate(graph.steps):
        if not isinstance(step, Attend):
            for part in step.parts:
                if part.state in found:
                    _add(found, step.makes, _weighed(part.moves.matvec(found[part.state]), part.share))
            continue
        queries, keys = found.get(step.queries), found.get(step.keys)
        if number not in ops:
            if queries is not None:
                found[step.makes] = queries
        elif queries is not None or keys is not None:
            op = ops[number]
            queries = _zeros(keys, op.shape[2]) if queries is None else queries
            keys = _zeros(queries, op.shape[3]) if keys is None else keys
            found[step.makes] = Layer(op, _mixing_of(mixing, graph, step, valid)).forward(queries, keys)
    return found


def _mixing_of(mixing: Mixing, graph: StreamGraph, step: Attend, valid: Mapping[str, Array] | None) -> Mixing:
    if not mixing.discard or not valid:
        return mixing
    rows, keys = (valid.get(graph.states[state].stream) for state in (step.queries, step.keys))
    return replace(mixing, valid=rows, valid_keys=keys)


def _zeros(like: Array, n: int) -> Array:
    from attrace.ops.namespace import framework_of

    found = framework_of(like)
    assert found is not None
    return found.xp.broadcast_to(found.xp.zeros_like(like[:, :1]), (like.shape[0], n, like.shape[2]))


def _weighed(x: Array, share: float) -> Array:
    return x if share == 1.0 else share * x


def _add(mass: dict[int, Array], state: int, more: Array) -> None:
    mass[state] = mass[state] + more if state in mass else more
