"""Attention flow against the golden cases, minimum cuts in exact fractions, another solver, and its own laws."""

from __future__ import annotations

import doctest
import itertools
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attrace.errors import InputError, MissingDependencyError, NonFiniteError, ShapeError
from attrace.ops.rollout import naive as rollout_naive

pytest.importorskip("scipy", reason="SciPy is not installed (pip install scipy); CI has it")

from attrace.ops.flow import attention_flow, naive

HERE = Path(__file__).resolve().parents[2] / "cases" / "golden.json"
CASES = {c["id"]: c for c in json.loads(HERE.read_text(encoding="utf-8")) if c["id"].startswith("flow-")}
GOOD = np.full((2, 3, 4, 4), 0.25)

few = settings(max_examples=25, deadline=None, derandomize=True)

Exact = list[list[list[Fraction]]]
"""Capacities (L, n, n)."""


def smallest_cut(capacities: Exact, i: int, j: int) -> Fraction:
    """Over all ways to part the nodes, with token i after the last layer on one side and input j on the other.

    Other nodes of these two layers have no way in or none out: on the side of the source the ones at the
    bottom add nothing, and likewise the ones at the top.
    """
    n, layers = len(capacities[0]), len(capacities)
    cuts = []
    for sides in itertools.product((False, True), repeat=n * (layers - 1)):
        inner = [list(sides[k * n : (k + 1) * n]) for k in range(layers - 1)]
        near = [[token != j for token in range(n)], *inner, [token == i for token in range(n)]]
        cuts.append(
            sum(
                (
                    capacities[layer][a][b]
                    for layer in range(layers)
                    for a, b in itertools.product(range(n), repeat=2)
                    if near[layer + 1][a] and not near[layer][b]
                ),
                Fraction(0),
            )
        )
    return min(cuts)


def cut_matrix(capacities: Exact) -> list[list[Fraction]]:
    n = len(capacities[0])
    return [[smallest_cut(capacities, i, j) for j in range(n)] for i in range(n)]


def exactly(capacities: Any) -> Exact:
    """The value of each float, with no rounding."""
    return [[[Fraction(float(x)) for x in row] for row in layer] for layer in capacities]


def as_maps(capacities: Any) -> list[Any]:
    return [np.asarray(layer, dtype=np.float64)[None, None] for layer in capacities]


def row_stochastic(seed: int, layers: int, batch: int, heads: int, n: int) -> Any:
    return np.random.default_rng(seed).dirichlet(np.full(n, 0.5), (layers, batch, heads, n))


@st.composite
def some_maps(draw: st.DrawFn, smallest: int = 1) -> Any:
    sizes = [draw(st.integers(low, top)) for low, top in ((1, 4), (1, 2), (1, 3), (smallest, 5))]
    return row_stochastic(draw(st.integers(0, 2**16)), *sizes)


@st.composite
def wild_capacities(draw: st.DrawFn) -> Any:
    """Non-negative numbers of very different size, many zeros and many equals: (L, n, n)."""
    layers, n = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    size = (layers, n, n)
    return rng.integers(0, 4, size) * np.exp2(rng.integers(-draw(st.sampled_from([0, 3, 60])), 3, size))


def test_the_golden_cases_are_these() -> None:
    assert list(CASES) == ["flow-1", "flow-2", "flow-3"]


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("normalize", [False, True])
def test_case(name: str, normalize: bool) -> None:
    case = CASES[name]
    key = "flow_row_normalised" if normalize else "flow"
    found = attention_flow(as_maps(case["inputs"]["A"]), normalize=normalize)
    assert found.dtype == np.float64
    assert found.shape == (1, 3, 3)
    np.testing.assert_allclose(found[0], case["expected"][key], rtol=0, atol=case["tol"])
    exact = [[Fraction(x) for x in row] for row in case["expected"][key + "_exact"]]
    # The thirds of the input are rounded, so the last bit may differ.
    np.testing.assert_allclose(found[0], np.array(exact, dtype=np.float64), rtol=0, atol=2e-16)


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_cuts_here_give_the_golden_fractions(name: str) -> None:
    case = CASES[name]
    exact = [[[Fraction(x) for x in row] for row in layer] for layer in case["inputs"]["A_exact"]]
    half = Fraction(1, 2)
    capacities = [
        [[half * x + half * (i == j) for j, x in enumerate(row)] for i, row in enumerate(layer)] for layer in exact
    ]
    cuts = cut_matrix(capacities)
    assert cuts == [[Fraction(x) for x in row] for row in case["expected"]["flow_exact"]]
    assert [[x / sum(row) for x in row] for row in cuts] == [
        [Fraction(x) for x in row] for row in case["expected"]["flow_row_normalised_exact"]
    ]


@given(capacities=wild_capacities())
@few
def test_is_the_smallest_cut_to_the_last_bit(capacities: Any) -> None:
    found = attention_flow(as_maps(capacities), residual=0.0)[0]
    want = [[float(x) for x in row] for row in cut_matrix(exactly(capacities))]
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("seed", range(20))
def test_many_coarse_questions_come_to_the_same_flow(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few bits a question each, the first answers are far off and the last bit is still right."""
    capacities = np.random.default_rng(seed).dirichlet(np.ones(3), (3, 3))
    want = [[float(x) for x in row] for row in cut_matrix(exactly(capacities))]
    monkeypatch.setattr(naive, "_BITS", 5)
    np.testing.assert_array_equal(attention_flow(as_maps(capacities), residual=0.0)[0], want)


@given(maps=some_maps(), residual=st.sampled_from([0.0, 0.3, 0.5, 1.0]), heads=st.sampled_from(["mean", "max", 0]))
@few
def test_equals_another_solver_on_whole_numbers(maps: Any, residual: float, heads: Any) -> None:
    networkx = pytest.importorskip("networkx", reason="networkx is not installed; CI has it")
    found = attention_flow(maps, residual=residual, heads=heads)
    fused = maps.mean(2) if heads == "mean" else maps.max(2) if heads == "max" else maps[:, :, 0]
    n, scale = maps.shape[-1], 2**70
    for item in range(maps.shape[1]):
        graph = networkx.DiGraph()
        graph.add_nodes_from(itertools.product(range(len(maps) + 1), range(n)))
        for layer, (i, j) in itertools.product(range(len(maps)), itertools.product(range(n), repeat=2)):
            share = Fraction(residual)
            capacity = (1 - share) * Fraction(float(fused[layer, item, i, j])) + share * (i == j)
            graph.add_edge((layer + 1, i), (layer, j), capacity=int(capacity * scale))
        for i, j in itertools.product(range(n), repeat=2):
            want = networkx.maximum_flow_value(graph, (len(maps), i), (0, j)) / scale
            assert found[item, i, j] == pytest.approx(want, rel=1e-14, abs=1e-20)


@pytest.mark.parametrize("power", [-1060, -1000, -300, -30, 30, 300, 1000])
def test_numbers_of_any_size(power: int) -> None:
    small = np.array([[[3.0, 1.0], [0.0, 2.0]], [[1.0, 2.0], [5.0, 1.0]]])
    want = attention_flow(as_maps(small), residual=0.0)
    np.testing.assert_array_equal(want, [[[1.0, 3.0], [3.0, 2.0]]])
    found = attention_flow(as_maps(np.ldexp(small, power)), residual=0.0)
    np.testing.assert_array_equal(found, np.ldexp(want, power))


def test_a_narrow_edge_beside_wide_ones_keeps_all_its_digits() -> None:
    narrow = 2.0**-40 / 3
    capacities = [[[1.0, narrow], [0.0, 1.0]], [[1.0, 0.0], [narrow, 1.0]]]
    found = attention_flow(as_maps(capacities), residual=0.0)[0]
    np.testing.assert_array_equal(found, [[1.0, narrow], [narrow, 1.0 + narrow]])


def test_one_layer_is_its_own_flow() -> None:
    (layer,) = row_stochastic(3, 1, 2, 3, 4)
    found = attention_flow([layer], residual=0.25)
    np.testing.assert_allclose(found, 0.75 * layer.mean(1) + 0.25 * np.eye(4), rtol=1e-15)


@given(maps=some_maps(), residual=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
@few
def test_lies_between_the_rollout_and_the_cuts_at_both_ends(maps: Any, residual: float) -> None:
    """The walk that rollout follows is a flow, as no node ever holds more than what it may pass on."""
    found = attention_flow(maps, residual=residual)
    mixed = (1 - residual) * maps.mean(2) + residual * np.eye(maps.shape[-1])
    walk = rollout_naive.rollout(list(maps), residual=residual, normalize=False)
    assert (found >= walk - 1e-14).all()
    assert (found <= mixed[-1].sum(-1)[:, :, None] + 1e-14).all()
    assert (found <= mixed[0].sum(-2)[:, None, :] + 1e-14).all()
    # At least the widest single path.
    widest = mixed[0]
    for layer in mixed[1:]:
        widest = np.minimum(layer[:, :, :, None], widest[:, None, :, :]).max(2)
    assert (found >= widest - 1e-14).all()


def test_rollout_lies_above_where_rows_sum_to_more_than_one() -> None:
    """Why the bound asks for rows of at most one: a walk with gain is no flow."""
    double = as_maps([[[2.0]], [[2.0]]])
    assert attention_flow(double, residual=0.0)[0, 0, 0] == 2.0
    assert rollout_naive.rollout(double, residual=0.0, normalize=False)[0, 0, 0] == 4.0


@given(maps=some_maps(), data=st.data())
@few
def test_a_wider_edge_never_narrows_a_flow(maps: Any, data: Any) -> None:
    layer, item, head, i, j = (data.draw(st.integers(0, size - 1)) for size in maps.shape)
    wider = maps.copy()
    wider[layer, item, head, i, j] += data.draw(st.sampled_from([1e-9, 0.1, 3.0]))
    before, after = attention_flow(maps), attention_flow(wider)
    assert (after >= before - 1e-15).all()
    # No flow gains more than the edge did.
    gained = (0.5 * (wider[layer] - maps[layer]).mean(1)).sum((-1, -2))
    assert (after - before <= gained[:, None, None] + 1e-14).all()


@given(maps=some_maps(smallest=2), seed=st.integers(0, 99))
@few
def test_other_names_for_the_tokens_change_only_the_names(maps: Any, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(maps.shape[-1])
    found = attention_flow(maps[..., order, :][..., order])
    np.testing.assert_allclose(found, attention_flow(maps)[:, order][:, :, order], rtol=1e-14, atol=0)


@given(maps=some_maps())
@few
def test_backwards_it_is_the_same(maps: Any) -> None:
    turned = [layer.swapaxes(-1, -2) for layer in maps[::-1]]
    np.testing.assert_allclose(attention_flow(turned), attention_flow(maps).swapaxes(-1, -2), rtol=1e-14, atol=0)


@given(maps=some_maps(), data=st.data())
@few
def test_a_layer_that_mixes_nothing_changes_nothing(maps: Any, data: Any) -> None:
    still = np.broadcast_to(np.eye(maps.shape[-1]), maps.shape[1:])
    layers = list(maps)
    layers.insert(data.draw(st.integers(0, len(layers))), still)
    np.testing.assert_allclose(attention_flow(layers), attention_flow(maps), rtol=1e-14, atol=0)


def test_causal_maps_stay_causal() -> None:
    maps = np.tril(row_stochastic(5, 3, 2, 2, 5))
    found = attention_flow(maps)
    assert (found[:, np.triu_indices(5, 1)[0], np.triu_indices(5, 1)[1]] == 0.0).all()
    assert (found[:, np.tril_indices(5)[0], np.tril_indices(5)[1]] > 0.0).all()


@pytest.mark.parametrize("normalize", [False, True])
def test_targets_are_rows(normalize: bool) -> None:
    maps = row_stochastic(11, 3, 2, 2, 4)
    whole = attention_flow(maps, normalize=normalize)
    for target in (0, 3, -1, np.int64(2)):
        np.testing.assert_array_equal(attention_flow(maps, target=target, normalize=normalize), whole[:, target])
    np.testing.assert_array_equal(attention_flow(maps, target=[2, -4], normalize=normalize), whole[:, [2, 0]])
    assert attention_flow(maps, target=[1]).shape == (2, 1, 4)
    if normalize:
        np.testing.assert_allclose(whole.sum(-1), 1.0, rtol=1e-15)


def test_a_row_of_zeros_stays_one() -> None:
    empty = as_maps([[[0.5, 0.5], [0.5, 0.5]], [[0.0, 0.0], [1.0, 0.0]]])
    found = attention_flow(empty, residual=0.0, normalize=True)
    np.testing.assert_array_equal(found, [[[0.0, 0.0], [0.5, 0.5]]])


def test_items_do_not_touch_and_the_maps_stay_as_they_are() -> None:
    maps = row_stochastic(12, 2, 3, 2, 3)
    before = maps.copy()
    found = attention_flow(iter(maps))
    np.testing.assert_array_equal(maps, before)
    for item in range(3):
        np.testing.assert_array_equal(attention_flow(maps[:, item : item + 1])[0], found[item])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_short_floats_are_widened_first(dtype: str) -> None:
    maps = row_stochastic(13, 2, 1, 3, 3).astype(dtype)
    found = attention_flow(maps)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, attention_flow(maps.astype(np.float64)))


@pytest.mark.parametrize(
    ("kind", "words", "maps", "options"),
    [
        (InputError, "at least one map", [], {}),
        (InputError, "a sequence of maps", "maps", {}),
        (InputError, "layer 1.*NoneType", [GOOD, None], {}),
        (InputError, "without negative entries.*layer 1", [GOOD, -GOOD], {}),
        (ShapeError, r"one array of shape \(2, 3, 4, 4\)", GOOD, {}),
        (ShapeError, "2 rows, 4 columns", [GOOD[:, :, :2]], {}),
        (ShapeError, "B = 1, n = 4 in layer 1", [GOOD, GOOD[:1]], {}),
        (NonFiniteError, "nan in layer 0", [GOOD * np.nan], {}),
        (NonFiniteError, "far from overflow.*layer 1", [GOOD, np.full((1, 1, 4, 4), 1e308).repeat(2, 0)], {}),
        (InputError, "residual.*1.5", [GOOD], {"residual": 1.5}),
        (InputError, "normalize to be True or False", [GOOD], {"normalize": 1}),
        (InputError, "target from 0 to 3.*Received: 4", [GOOD], {"target": 4}),
        (InputError, "at least one position", [GOOD], {"target": []}),
        (InputError, "'sum'", [GOOD], {"heads": "sum"}),
        (InputError, "one weight per head, 3 in all", [GOOD], {"heads": [1.0, 1.0]}),
    ],
)
def test_refusals(kind: type[Exception], words: str, maps: Any, options: dict[str, Any]) -> None:
    with pytest.raises(kind, match=words) as caught:
        attention_flow(maps, **options)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.startswith("Expected ")
    assert " Received: " in message
    assert message.endswith(".")


def test_maps_of_another_framework_are_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; CI has it")
    with pytest.raises(InputError, match=r"NumPy maps.*Received: torch in layer 0.*numpy\.asarray"):
        attention_flow([torch.tensor(GOOD)])


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'attrace\[flow\]'"):
        attention_flow([GOOD])


def test_scipy_is_loaded_only_when_asked() -> None:
    code = (
        "import sys, numpy as np\n"
        "from attrace.ops.flow import attention_flow\n"
        "assert 'scipy' not in sys.modules\n"
        "attention_flow([np.ones((1, 1, 1, 1))])\n"
        "assert 'scipy' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_examples() -> None:
    found = doctest.testmod(naive)
    assert found.attempted
    assert found.failed == 0
