"""The last layer's attention, as it is."""

from __future__ import annotations

from attrace.methods.rollout import missing_mass
from attrace.ops.namespace import to_floats
from attrace.types import Options, Progress, Scores, Subject


def last_layer(subject: Subject, options: Options, progress: Progress | None = None) -> Scores:
    """r^T mean_h A_L: the target's row of the last layer (of the last chosen one, with `layers`).

    The oldest reading of attention (Bahdanau et al. 2015, sec. 5.2.1).  Says nothing of the layers below, where
    tokens have already been mixed.  Cost: one Q K^T row.
    """
    layer = -1 if options.layers is None else max(options.layers)
    answer = subject.trace.rollout(
        target=subject.readout, heads=options.heads, residual=0.0, discard=options.discard, layers=[layer]
    )
    values = to_floats(answer[0])
    return Scores(values=values, sink_mass=missing_mass(values))
