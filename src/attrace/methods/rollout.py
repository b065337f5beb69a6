"""Attention rollout: the product of the layers' maps, read at the target's row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attrace.ops.namespace import to_floats
from attrace.types import Floats, Options, Progress, Scores, Sink, Subject

COLLAPSE = 0.9
"""One position above this share, whatever the target, is a collapse and not an explanation."""
ROUNDING = 1e-5
"""Sums of float32 weights over many layers are this close to one."""


def rollout(subject: Subject, options: Options, progress: Progress | None = None) -> Scores:
    """r^T A_L ... A_1 with A = residual I + (1 - residual) mean_h softmax(s Q K^T + M).

    Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", sec. 4.  r is the target's readout over
    positions.  Values are ignored, and the map is the same for every class.  Cost: one Q K^T pass a layer.
    """
    values = rollout_values(subject, options)
    return Scores(values=values, sink_mass=missing_mass(values), sink=find_sink(subject, options, values))


def missing_mass(values: Floats) -> float:
    """What a row of shares lacks to one, beyond rounding: the mass that the model's own sinks took."""
    missing = 1.0 - float(values.sum())
    return missing if missing > ROUNDING else 0.0


def rollout_values(subject: Subject, options: Options) -> Floats:
    """The target's row of the rollout: (n,)."""
    return _ask(subject, options, target=subject.readout)


def find_sink(subject: Subject, options: Options, values: Floats) -> Sink | None:
    """The position on which rollout collapses, if there is one."""
    return collapse(values, lambda index: _ask(subject, options, source=index))


def collapse(values: Floats, column: Callable[[int], Floats]) -> Sink | None:
    """The position that takes more than COLLAPSE of this target and of half the other positions.

    `values` (n,) is the target's row; column(j) gives token j's share in every position, (n,).
    """
    index = int(values.argmax())
    if len(values) < 3 or values[index] <= COLLAPSE:
        return None
    others = np.delete(column(index), index)
    return Sink(index, float(values[index])) if float(np.median(others)) > COLLAPSE else None


def _ask(subject: Subject, options: Options, **question: object) -> Floats:
    answer = subject.trace.rollout(
        **question,
        heads=options.heads,
        residual=options.residual,
        discard=options.discard,
        layers=options.layers,
    )
    values = to_floats(answer[0])
    return values
