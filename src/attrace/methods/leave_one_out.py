"""Leave-one-out: take each token away and see how far the output falls."""

from __future__ import annotations

import numpy as np

from attrace.types import Options, Progress, Scores, Subject


def leave_one_out(subject: Subject, options: Options, progress: Progress | None = None) -> Scores:
    """Log p(target | x) - log p(target | x without token i), in nats; positive where the token spoke for it.

    Li et al. 2016, "Understanding Neural Networks through Representation Erasure", eq. 1, in log-probability.
    Special tokens and the target's own position are left in place and score zero.  Cost: n forward passes, batched.
    """
    free = np.flatnonzero(~subject.protected)
    keep = np.ones((len(free) + 1, len(subject.protected)), dtype=bool)
    keep[np.arange(len(free)), free] = False  # the last row keeps everything
    scores = subject.score(keep, progress=progress)
    values = np.zeros(len(subject.protected))
    values[free] = scores[-1] - scores[:-1]
    return Scores(values=values, signed=True, unit=f"drop in {subject.unit}")
