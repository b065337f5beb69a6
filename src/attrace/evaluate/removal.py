"""How far the output falls when the tokens that a method marks are removed, and random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attrace.errors import InputError, NonFiniteError, ShapeError
from attrace.types import Floats, Subject

FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of the free tokens that are removed."""


def removal_drop(
    subject: Subject,
    values: ArrayLike,
    *,
    fractions: Sequence[float] = FRACTIONS,
    operator: str = "delete",
) -> float:
    """Mean over the fractions f of score(all) - score(without the ceil(f * n_free) highest-valued tokens).

    Comprehensiveness averaged over shares (DeYoung et al. 2020, "ERASER", sec. 4; the area over the perturbation
    curve of Samek et al. 2017), in the unit of `subject.score`: nats where that is a log-probability.
    Positive: the output falls.  Larger is better.  `values` (n,) are ranked as signed numbers, the highest
    first, and of equal ones the lower index first.  Only free tokens are ranked and removed: n_free counts
    those that `subject.protected` leaves, so special tokens neither help nor hurt a method.  `operator` says
    how tokens go, see `Subject.score`.  Cost: at most len(fractions) + 1 forward passes, batched.

    Raises ShapeError where `values` is not (n,), NonFiniteError for NaN or infinity, InputError where no
    token is free or a fraction lies outside (0, 1].
    """
    return float(removal_drops(subject, np.asarray(values)[None], fractions=fractions, operator=operator)[0])


def removal_drops(
    subject: Subject,
    values: ArrayLike,
    *,
    fractions: Sequence[float] = FRACTIONS,
    operator: str = "delete",
) -> Floats:
    """`removal_drop` of several rankings in one batch: (m, n) -> (m,).  Equal sets are scored once."""
    ranked = np.asarray(values, np.float64)
    n = len(subject.protected)
    if ranked.ndim != 2 or ranked.shape[1] != n:
        raise ShapeError(f"Expected values of shape (m, {n}), one per token. Received: {ranked.shape}.")
    if not np.isfinite(ranked).all():
        row, token = (int(i) for i in np.argwhere(~np.isfinite(ranked))[0])
        raise NonFiniteError(
            f"Expected finite values. Received: {ranked[row, token]} at token {token} of ranking {row}."
        )
    free = np.flatnonzero(~subject.protected)
    counts = [removed(f, len(free)) for f in fractions]
    if not counts or not len(free):
        raise InputError(
            f"Expected tokens to remove and shares of them. Received: {len(free)} tokens that are not "
            f"protected and {len(counts)} fractions."
        )
    orders = free[np.argsort(-ranked[:, free], axis=1, kind="stable")]
    keep = np.ones((len(ranked) * len(counts) + 1, n), dtype=bool)  # the last row keeps everything
    for i, order in enumerate(orders):
        for j, count in enumerate(counts):
            keep[i * len(counts) + j, order[:count]] = False
    sets, where = np.unique(keep, axis=0, return_inverse=True)
    scores = subject.score(sets, operator=operator)[where.reshape(-1)]
    drops: Floats = scores[-1] - scores[:-1].reshape(len(ranked), len(counts)).mean(axis=1)
    return drops


def random_drop(
    subject: Subject,
    *,
    draws: int = 8,
    seed: int = 0,
    fractions: Sequence[float] = FRACTIONS,
    operator: str = "delete",
) -> float:
    """Mean `removal_drop` of `draws` random orders: what a method must beat.

    The same seed gives the same orders for subjects of equal length.
    """
    values = random_values(len(subject.protected), draws=draws, seed=seed)
    return float(removal_drops(subject, values, fractions=fractions, operator=operator).mean())


def random_values(n: int, *, draws: int = 8, seed: int = 0) -> Floats:
    """Values that rank n tokens in `draws` random orders: (draws, n)."""
    if draws < 1:
        raise InputError(f"Expected at least one draw. Received: {draws}.")
    return np.random.default_rng(seed).random((draws, n))


def removed(fraction: float, n_free: int) -> int:
    """ceil(fraction * n_free), not one more where the product is whole but for rounding.

    >>> removed(0.1, 30), removed(0.3, 10), removed(0.1, 4)
    (3, 3, 1)
    """
    if not 0 < fraction <= 1:
        raise InputError(f"Expected fractions from 0 to 1, 0 excluded. Received: {fraction!r}.")
    return math.ceil(fraction * n_free - 1e-9)


def bootstrap_interval(
    values: ArrayLike, *, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean over inputs (Efron 1979): resample the N values with replacement.

    `values` (N,) holds one number per input; for a comparison of two methods give their differences input by
    input, which is the paired interval.  Returns (low, high) in the values' unit.  The same seed, the same
    interval.  Raises InputError for no values or a level outside (0, 1), NonFiniteError for NaN.

    >>> bootstrap_interval([2.0, 2.0, 2.0])
    (2.0, 2.0)
    """
    sample = np.asarray(values, np.float64)
    if sample.ndim != 1 or not len(sample) or not 0 < level < 1:
        raise InputError(
            f"Expected values (N,) with N of 1 or more and a level between 0 and 1. Received: shape "
            f"{sample.shape}, level {level!r}."
        )
    if not np.isfinite(sample).all():
        raise NonFiniteError(f"Expected finite values. Received: {sample[~np.isfinite(sample)][0]}.")
    picks: NDArray[np.int64] = np.random.default_rng(seed).integers(len(sample), size=(draws, len(sample)))
    low, high = np.quantile(sample[picks].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
