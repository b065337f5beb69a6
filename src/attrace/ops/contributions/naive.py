"""The plain reference: NumPy, float64, one vector per pair of tokens.  `rows.py` is tested against it.

Ferrando, Gállego and Costa-jussà 2022, "Measuring the Mixing of Contextual Information in the Transformer"
(arXiv 2203.04212), eq. 8 to 12.  Letters as in `attrace.types`; besides them K value heads, D their size
and E the width of the residual stream.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from attrace.types import Floats


class Norm(NamedTuple):
    """The layer norm after the residual of a post-norm block: gain * (z - mean) / sqrt(variance + eps) + shift."""

    gain: Any
    """(E,)"""
    shift: Any
    """(E,), or None."""
    eps: float


def transformed(
    weights: ArrayLike,
    value: ArrayLike,
    projection: ArrayLike,
    *,
    residual: ArrayLike,
    bias: ArrayLike | None = None,
    norm: Norm | None = None,
) -> tuple[Floats, Floats]:
    """What each token gives to each row of the block's output, T_i(x_j), and that output: (B, Q, T, E), (B, Q, E).

    T_i(x_j) = sum_h A^h_ij W_O^h v^h_j, plus x_i itself where j = i.  The output is their sum over j plus
    the bias. With `norm` both go through the layer norm, which is linear once the row's standard deviation
    s_i is known: gain * (T - mean(T)) / s_i.  Bias and shift are in the output and in no token's share.
    """
    w, v, p, x = (np.asarray(a, np.float64) for a in (weights, value, projection, residual))
    batch, heads, queries, keys = w.shape
    size, group = v.shape[-1], heads // v.shape[1]
    parts = np.zeros((batch, queries, keys, p.shape[0]))
    for b in range(batch):
        for i in range(queries):
            for j in range(keys):
                for h in range(heads):
                    parts[b, i, j] += w[b, h, i, j] * p[:, h * size : (h + 1) * size] @ v[b, h // group, j]
            parts[b, i, i] += x[b, i]
    output = parts.sum(axis=2)
    if bias is not None:
        output = output + np.asarray(bias, np.float64)
    if norm is None:
        return parts, output
    gain = np.asarray(norm.gain, np.float64)
    deviation = np.sqrt(output.var(axis=-1) + norm.eps)
    parts = gain * (parts - parts.mean(axis=-1, keepdims=True)) / deviation[:, :, None, None]
    output = gain * (output - output.mean(axis=-1, keepdims=True)) / deviation[:, :, None]
    if norm.shift is not None:
        output = output + np.asarray(norm.shift, np.float64)
    return parts, output


def contributions(
    weights: ArrayLike,
    value: ArrayLike,
    projection: ArrayLike,
    *,
    residual: ArrayLike,
    bias: ArrayLike | None = None,
    norm: Norm | None = None,
) -> Floats:
    """Each token's share in each row of one self-attention block's output: (B, Q, T), rows sum to one.

    c_ij = max(0, |y_i|_1 - |y_i - T_i(x_j)|_1), divided by the row's sum.  `weights` (B, H,
    Q, T), `value` (B, K, T, D) with its own bias inside and H a multiple of K, `projection` (E, H * D) as
    in nn.Linear, `residual` (B, Q, E) the block's input x, `bias` (E,).  Q = T.  A row in which no token
    brings the output nearer is left to its own token: it counts as passed on unchanged.

    >>> import numpy as np
    >>> half = np.full((1, 1, 2, 2), 0.5)
    >>> x = np.array([[[1.0, 0.0], [0.0, 1.0]]])
    >>> contributions(half, x[:, None], np.eye(2), residual=x)[0].round(2)
    array([[0.75, 0.25],
           [0.25, 0.75]])
    """
    parts, output = transformed(weights, value, projection, residual=residual, bias=bias, norm=norm)
    distance = np.abs(output[:, :, None] - parts).sum(axis=-1)
    shares = np.maximum(0.0, np.abs(output).sum(axis=-1)[:, :, None] - distance)
    total = shares.sum(axis=-1, keepdims=True)
    own = np.broadcast_to(np.eye(shares.shape[1]), shares.shape)
    rows: Floats = np.divide(shares, total, out=own.copy(), where=total > 0)
    return rows
