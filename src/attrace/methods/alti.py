"""Contribution-weighted rollout: what each token gives to each block's output, multiplied over the layers."""

from __future__ import annotations

from attrace.methods.rollout import collapse
from attrace.ops.namespace import to_floats
from attrace.types import Floats, Options, Progress, Scores, Subject


def alti(subject: Subject, options: Options, progress: Progress | None = None) -> Scores:
    """r^T C_L ... C_1 with c_ij = max(0, |y_i|_1 - |y_i - T_i(x_j)|_1), rows divided by their sums.

    Ferrando, Gállego and Costa-jussà 2022, "Measuring the Mixing of Contextual Information in the
    Transformer" (arXiv 2203.04212), eq. 8 to 12.  T_i(x_j) is what token j adds to row i of the attention
    block's output y: its value through the output projection, the residual at j = i, and the block's layer
    norm made linear.  r is the target's readout over positions.  Shares of a mass of one; feed-forward parts
    are not seen, and the map is the same for every class.

    Needs a subject that was asked with detail, of a model family whose blocks are known; CaptureError
    otherwise.  Cost: n^2 vectors of the model's width per layer and head, in tiles.
    """
    blocks = subject.trace.contributions()

    def ask(**question: object) -> Floats:
        answer = blocks.rollout(**question, residual=0.0, layers=options.layers)
        values = to_floats(answer[0])
        return values

    values = ask(target=subject.readout)
    return Scores(values=values, sink=collapse(values, lambda index: ask(source=index)))
