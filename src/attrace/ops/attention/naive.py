"""The plain reference: NumPy, float64, dense.  Every faster path is tested against it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from attrace.types import Floats


def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    scale: float | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
) -> Floats:
    """softmax(scale Q K^T + bias), Vaswani et al. 2017, eq. 1.

    query (B, H, Q, D), key (B, K, T, D) with H a multiple of K (head h reads key head h // (H / K)); `bias`
    broadcasts to (B, H, Q, T): a boolean one says True = attend, any other is added.  `causal` lets query i see
    keys 0..i, as the fused kernels align it (top-left).  Returns (B, H, Q, T); a row with nothing to attend to is
    all zeros.

    >>> import numpy as np
    >>> attention_weights(np.zeros((1, 1, 2, 4)), np.zeros((1, 1, 2, 4)), causal=True)[0, 0]
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    q, k = np.asarray(query, np.float64), np.asarray(key, np.float64)
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = (q @ np.swapaxes(k, -1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        b = np.asarray(bias)
        scores = scores + (np.where(b, 0.0, -np.inf) if b.dtype == bool else b.astype(np.float64))
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True)
    exp = np.exp(scores - np.where(np.isneginf(peak), 0.0, peak))
    total = exp.sum(axis=-1, keepdims=True)
    weights: Floats = np.divide(exp, total, out=np.zeros_like(exp), where=total > 0)
    return weights
