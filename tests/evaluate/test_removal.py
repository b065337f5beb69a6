"""Removal: exact cases of a linear model, ties, protected tokens, random orders, intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attrace.errors import InputError, NonFiniteError, ShapeError
from attrace.evaluate.removal import (
    bootstrap_interval,
    random_drop,
    removal_drop,
    removal_drops,
    removed,
)


class Linear:
    """score = b + sum of the weights of the tokens kept; hidden tokens count a tenth."""

    trace = None
    unit = "log-probability"
    readout = np.zeros(0)

    def __init__(self, weights: list[float], b: float = 0.0, protected: list[int] | None = None) -> None:
        self.weights, self.b = np.array(weights), b
        self.protected = np.isin(np.arange(len(weights)), protected or [])
        self.asked: list[np.ndarray] = []

    def score(self, keep: np.ndarray, *, operator: str = "delete", progress: object = None) -> np.ndarray:
        self.asked.append(keep)
        left = 0.1 if operator == "hide" else 0.0
        return self.b + np.where(keep, 1.0, left) @ self.weights


# Exact fractions of the shared cases metric-aopc-1 to -3: b, w, scores, bins, comprehensiveness and its mean.
GOLDEN = [
    (0.1, [0.4, 0.2, 0.1, 0.05], [0.9, 0.5, 0.3, 0.1], [0.25, 0.5, 0.75], [2 / 5, 3 / 5, 7 / 10], 17 / 30),
    (
        0.3,
        [0.1, 0.3, -0.2, 0.25, 0.05],
        [0.1, 0.2, 0.9, 0.7, 0.3],
        [0.2, 0.4, 0.6, 0.8],
        [-1 / 5, 1 / 20, 1 / 10, 2 / 5],
        7 / 80,
    ),
    (0.2, [0.5, 0.1, 0.05], [0.1, 0.2, 0.3], [0.34, 0.67], [3 / 20, 13 / 20], 2 / 5),
]


@pytest.mark.parametrize("case", GOLDEN, ids=["aopc-1", "aopc-2", "aopc-3"])
def test_the_exact_cases(
    case: tuple[float, list[float], list[float], list[float], list[float], float],
) -> None:
    b, weights, values, bins, drops, mean = case
    subject = Linear(weights, b)
    assert removal_drop(subject, values, fractions=bins) == pytest.approx(mean, abs=1e-9)
    for share, drop in zip(bins, drops, strict=True):
        assert removal_drop(subject, values, fractions=[share]) == pytest.approx(drop, abs=1e-9)


def test_of_equal_values_the_lower_index_goes_first() -> None:
    subject = Linear([1.0, 2.0, 4.0, 8.0])
    assert removal_drop(subject, [0, 5, 5, 5], fractions=[0.5]) == 6.0
    assert removal_drop(subject, [0, 0, 0, 0], fractions=[0.25]) == 1.0


def test_signed_values_are_ranked_as_they_are() -> None:
    assert removal_drop(Linear([1.0, 2.0]), [-9.0, 1.0], fractions=[0.5]) == 2.0


def test_protected_tokens_stay_and_are_not_counted() -> None:
    subject = Linear([100.0, 1.0, 2.0, 100.0], protected=[0, 3])
    assert removal_drop(subject, [9, 1, 2, 9], fractions=[0.5]) == 2.0
    assert removal_drop(subject, [9, 1, 2, 9], fractions=[1.0]) == 3.0
    assert all(keep[:, [0, 3]].all() for keep in subject.asked)


def test_the_operator_is_passed_on() -> None:
    assert removal_drop(Linear([1.0, 2.0]), [0, 1], fractions=[0.5], operator="hide") == pytest.approx(1.8)


def test_many_rankings_equal_one_by_one_and_equal_sets_are_scored_once() -> None:
    subject = Linear([1.0, 2.0, 4.0, 8.0])
    rankings = [[1, 2, 3, 4], [1, 2, 3, 5], [4, 3, 2, 1]]
    together = removal_drops(subject, rankings)
    assert len(subject.asked[0]) == 5  # all; the first one, the first two, from either end
    np.testing.assert_allclose(together, [removal_drop(subject, r) for r in rankings])
    assert together[0] == together[1] != together[2]


def test_random_orders_are_seeded_and_average_out() -> None:
    subject = Linear([1.0, 2.0, 3.0, 6.0])
    assert random_drop(subject, seed=3) == random_drop(subject, seed=3) != random_drop(subject, seed=4)
    # Half of four tokens, of mean weight 3, in a random order.
    assert random_drop(subject, draws=4000, fractions=[0.5]) == pytest.approx(6.0, abs=0.1)


def test_random_lies_between_best_and_worst() -> None:
    weights = [1.0, -2.0, 3.0, 6.0, 0.5]
    subject = Linear(weights)
    best, worst = removal_drop(subject, weights), removal_drop(subject, np.negative(weights))
    assert worst < random_drop(subject, draws=50) < best


@pytest.mark.parametrize(
    ("share", "n", "count"), [(0.1, 30, 3), (0.3, 10, 3), (0.1, 4, 1), (0.5, 5, 3), (0.07, 100, 7), (1, 9, 9)]
)
def test_how_many_are_removed(share: float, n: int, count: int) -> None:
    assert removed(share, n) == count


@pytest.mark.parametrize("share", [0, -0.1, 1.1, math.nan])
def test_a_fraction_out_of_range_is_an_error(share: float) -> None:
    with pytest.raises(InputError, match="fractions"):
        removal_drop(Linear([1.0, 2.0]), [0, 1], fractions=[share])


def test_unfit_values_are_errors() -> None:
    with pytest.raises(ShapeError, match=r"\(m, 2\)"):
        removal_drop(Linear([1.0, 2.0]), [0, 1, 2])
    with pytest.raises(NonFiniteError, match="token 1"):
        removal_drop(Linear([1.0, 2.0]), [0, math.nan])
    with pytest.raises(InputError, match="0 tokens"):
        removal_drop(Linear([1.0], protected=[0]), [0])
    with pytest.raises(InputError, match="0 fractions"):
        removal_drop(Linear([1.0]), [0], fractions=[])
    with pytest.raises(InputError, match="draw"):
        random_drop(Linear([1.0]), draws=0)


def test_the_interval_covers_the_mean_at_its_level() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for i in range(200):
        low, high = bootstrap_interval(rng.normal(5, 2, 40), draws=500, seed=i)
        hits += low <= 5 <= high
    assert 0.88 < hits / 200 < 0.99


def test_the_interval_is_the_normal_one_for_many_values() -> None:
    values = np.random.default_rng(0).normal(0, 1, 400)
    low, high = bootstrap_interval(values)
    half = 1.96 * values.std() / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.01)
    assert high == pytest.approx(values.mean() + half, abs=0.01)
    assert bootstrap_interval(values) == (low, high)
    narrow = bootstrap_interval(values, level=0.5)
    assert low < narrow[0] < narrow[1] < high


@pytest.mark.parametrize("values", [[], [[1.0]]])
def test_an_interval_of_nothing_is_an_error(values: list[float]) -> None:
    with pytest.raises(InputError, match="Expected values"):
        bootstrap_interval(values)


def test_an_interval_of_nan_is_an_error() -> None:
    with pytest.raises(NonFiniteError):
        bootstrap_interval([1.0, math.nan])
