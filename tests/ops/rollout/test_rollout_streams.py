"""Rollout over streams on random graphs: against the dense reference, paths written out, and the law of mass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import Call, vector
from hypothesis import given, settings
from hypothesis import strategies as st

from attrace.errors import CaptureError
from attrace.ops.rollout.streamed import Mixing
from attrace.ops.rollout.streams import (
    Attend,
    Cut,
    Gather,
    Run,
    StreamGraph,
    Unknown,
    in_order,
    naive,
    source_shares,
    target_shares,
)

few = settings(max_examples=40, deadline=None, derandomize=True)
FRAMEWORKS = ("numpy", "torch")


def random_map(rng: np.random.Generator, shape: tuple[int, ...], *, sinks: bool) -> Any:
    found = rng.dirichlet(np.full(shape[-1], 0.5), shape[:-1])
    return found * rng.uniform(0.4, 1.0, (*shape[:-1], 1)) if sinks else found


@st.composite
def graphs(draw: st.DrawFn) -> tuple[StreamGraph, dict[int, Any]]:
    """A graph of up to four streams and nine steps, with the map of each call (B, H, Q, T)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    batch, heads, sinks = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.booleans())
    graph, maps = StreamGraph(), {}
    for k in range(draw(st.integers(1, 3))):
        graph.start(f"s{k}", draw(st.integers(1, 4)))
    for number in range(draw(st.integers(1, 9))):
        one, other = (draw(st.integers(0, len(graph.states) - 1)) for _ in range(2))
        first, second = graph.states[one], graph.states[other]
        kind = draw(st.sampled_from(["attend", "attend", "attend", "join", "average", "cut"]))
        if kind == "join" and first.length + second.length <= 8:
            graph.join([one, other], [first.length, second.length])
        elif kind == "average" and first.stream == second.stream and first.length == second.length and one != other:
            graph.average(one, other)
        elif kind == "cut" and first.length > 1:
            start = draw(st.integers(0, first.length - 1))
            graph.cut(one, start, draw(st.integers(1, first.length - start)), named=draw(st.booleans()))
        else:
            shape = (batch, heads, first.length, second.length)
            step, _ = graph.attend(one, other, shape, f"call {number}")
            maps[step] = random_map(rng, shape, sinks=sinks)
    return graph, maps


def calls(maps: dict[int, Any], framework: str) -> dict[int, Any]:
    return {step: Call("", "", found).on(framework) for step, found in maps.items()}


@given(data=st.data())
@few
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_both_ways_equal_the_dense_reference(framework: str, data: Any) -> None:
    graph, maps = data.draw(graphs())
    if not maps:
        return
    heads = data.draw(st.sampled_from(["mean", "max", 0]))
    discard = data.draw(st.sampled_from([0.0, 0.3]))
    residual = data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    normalize = data.draw(st.booleans())
    chosen = data.draw(st.sets(st.sampled_from(sorted(maps)), min_size=1))
    mixing = Mixing(heads, residual, "one" if normalize else "none", discard)
    ops = {step: call for step, call in calls(maps, framework).items() if step in chosen}
    batch = next(iter(maps.values())).shape[0]
    state = data.draw(st.integers(0, len(graph.states) - 1))
    for item in range(batch):
        want = naive.shares(
            graph,
            {step: found[item] for step, found in maps.items()},
            heads=heads,
            residual=residual,
            normalize=normalize,
            discard=discard,
            layers=sorted(chosen),
        )
        length = graph.states[state].length
        start = vector(np.broadcast_to(np.eye(length), (batch, length, length)).copy(), framework)
        found = target_shares(graph, ops, state, start, mixing)
        assert set(found) <= set(want[state])
        for stream, block in want[state].items():
            got = np.asarray(found[stream])[item].T if stream in found else np.zeros_like(block)
            np.testing.assert_allclose(got, block, atol=1e-12)
        for at, there in enumerate(graph.states):
            if there.made is not None:
                continue
            start = vector(np.broadcast_to(np.eye(there.length), (batch, there.length, there.length)).copy(), framework)
            upwards = source_shares(graph, ops, at, start, mixing)
            for later, shares in enumerate(want):
                block = shares.get(there.stream, np.zeros((graph.states[later].length, there.length)))
                got = np.asarray(upwards[later])[item] if later in upwards else np.zeros_like(block)
                np.testing.assert_allclose(got, block, atol=1e-12)


@given(data=st.data())
@few
def test_mass_is_kept_less_sinks_and_what_was_dropped(data: Any) -> None:
    graph, maps = data.draw(graphs())
    whole = {step: found / found.sum(-1, keepdims=True) for step, found in maps.items()}
    tolerance = data.draw(st.sampled_from([0.0, 0.1, 0.4]))
    if not maps:
        return
    batch = next(iter(maps.values())).shape[0]
    state = len(graph.states) - 1
    length = graph.states[state].length
    start = np.broadcast_to(np.eye(length), (batch, length, length)).copy()
    found = target_shares(graph, calls(whole, "numpy"), state, start, Mixing(), tolerance=tolerance)
    total = sum(block.sum(1) for block in found.values())
    assert all(block.min() >= 0 for block in found.values())
    assert total.max() <= 1 + 1e-12
    assert total.min() >= 1 - tolerance - 1e-12
    short = target_shares(graph, calls(maps, "numpy"), state, start, Mixing())
    assert sum(block.sum(1) for block in short.values()).max() <= 1 + 1e-12


def test_calls_side_by_side_read_what_was_there_before_both() -> None:
    """Co-attention by hand: each stream reads the other's input, not what the other became."""
    rng = np.random.default_rng(0)
    graph = StreamGraph()
    one, other = graph.start("words", 3), graph.start("regions", 2)
    first, _ = graph.attend(one, other, (1, 1, 3, 2), "a")
    second, regions = graph.attend(other, one, (1, 1, 2, 3), "b")
    maps = {first: random_map(rng, (1, 1, 3, 2), sinks=False), second: random_map(rng, (1, 1, 2, 3), sinks=False)}
    start = np.eye(2)[None]
    found = target_shares(graph, calls(maps, "numpy"), regions, start, Mixing(residual=0.25))
    np.testing.assert_allclose(found["words"][0].T, 0.75 * maps[second][0, 0], atol=1e-15)
    np.testing.assert_allclose(found["regions"][0].T, 0.25 * np.eye(2), atol=1e-15)
    # By order alone the second call would read words that already hold regions.
    ordered, steps = in_order([Call("words", "regions", maps[first]), Call("regions", "words", maps[second])])
    by_order = dict(zip(steps, calls(maps, "numpy").values(), strict=True))
    wrong = target_shares(ordered, by_order, ordered.newest("regions"), start, Mixing(residual=0.25))
    assert np.abs(wrong["words"] - found["words"]).max() > 0.1


def test_a_joint_stream_goes_back_to_its_parts() -> None:
    graph = StreamGraph()
    words, image = graph.start("words", 2), graph.start("image", 3)
    both = graph.join([words, image], [2, 3])
    assert graph.states[both].stream == "words+image"
    _, state = graph.attend(both, both, (1, 1, 5, 5), "a")
    map_ = random_map(np.random.default_rng(1), (1, 1, 5, 5), sinks=False)
    found = target_shares(graph, calls({1: map_}, "numpy"), state, np.eye(5)[None], Mixing())
    want = 0.5 * np.eye(5) + 0.5 * map_[0, 0]
    np.testing.assert_allclose(np.concatenate([found["words"], found["image"]], axis=1)[0].T, want, atol=1e-15)


def test_positions_that_changed_are_refused_only_where_mass_gets_there() -> None:
    graph = StreamGraph()
    state = graph.start("pixels", 8)
    first, wide = graph.attend(state, state, (1, 1, 8, 8), "stage.0")
    second, _ = graph.attend(wide, wide, (1, 1, 2, 2), "stage.1")
    assert isinstance(graph.steps[second - 1], Gather)
    assert isinstance(graph.steps[second], Attend)
    ops = calls({first: np.full((1, 1, 8, 8), 1 / 8), second: np.full((1, 1, 2, 2), 1 / 2)}, "numpy")
    assert target_shares(graph, ops, wide, np.eye(8)[None], Mixing())["pixels"].shape == (1, 8, 8)
    for ask in (
        lambda: target_shares(graph, ops, graph.newest("pixels"), np.eye(2)[None], Mixing()),
        lambda: source_shares(graph, ops, state, np.eye(8)[None], Mixing()),
    ):
        with pytest.raises(CaptureError, match=r"Expected the 8 tokens of the stream pixels in stage\.1\. Received: 2"):
            ask()


def test_all_parts_of_a_state_side_by_side_are_the_state() -> None:
    graph = StreamGraph()
    a = graph.start("a", 5)
    left, right = graph.cut(a, 0, 2), graph.cut(a, 2, 3)
    assert graph.join([left, right], [2, 3]) == a
    assert graph.join([right, left], [3, 2]) != a
    assert graph.join([left, left], [2, 2]) != a


def test_descent_follows_the_residual_stream_alone() -> None:
    graph = StreamGraph()
    a, b = graph.start("a", 2), graph.start("b", 2)
    _, a1 = graph.attend(a, b, (1, 1, 2, 2), "1")
    _, a2 = graph.attend(a1, b, (1, 1, 2, 2), "2")
    _, side = graph.attend(a, b, (1, 1, 2, 2), "3")
    assert graph.descends(a2, a)
    assert graph.descends(a2, a1)
    assert not graph.descends(a2, b)
    assert not graph.descends(side, a1)
    both = graph.join([a2, b], [2, 2])
    assert graph.descends(both, b)
    assert graph.descends(both, a)
    assert graph.average(a2, side) > both


def test_position_maps_are_their_dense_form() -> None:
    x = np.random.default_rng(2).normal(size=(2, 3, 4))
    run = Run(2, 3, 6)
    np.testing.assert_allclose(run.matvec(x), run.dense() @ x)
    wide = np.random.default_rng(3).normal(size=(2, 6, 4))
    cut = Cut(2, 3, 6)
    np.testing.assert_allclose(cut.matvec(wide), cut.dense() @ wide)
    np.testing.assert_allclose(cut.rmatvec(x), cut.dense().T @ x)
    np.testing.assert_allclose(run.rmatvec(wide), run.dense().T @ wide)
    for ask in (lambda: Unknown("why").matvec(x), lambda: Unknown("why").rmatvec(x), Unknown("why").dense):
        with pytest.raises(CaptureError, match="why"):
            ask()


def test_discarding_counts_cells_between_real_tokens_only() -> None:
    rng = np.random.default_rng(4)
    map_ = random_map(rng, (1, 1, 4, 5), sinks=False)
    rows, keys = np.array([[True, True, True, False]]), np.array([[True, True, False, False, True]])
    graph, steps = in_order([Call("q", "k", map_)])
    ops = {steps[0]: Call("q", "k", map_)}
    mixing = Mixing(residual=0.0, discard=0.4)
    found = target_shares(graph, ops, graph.newest("q"), np.eye(4)[None], mixing, valid={"q": rows, "k": keys})
    block = map_[0, 0][np.ix_([0, 1, 2], [0, 1, 4])]
    cut = np.where(block <= np.sort(block.ravel())[2], 0.0, block)  # floor(0.4 * 9) = 3 cells
    np.testing.assert_allclose(found["k"][0].T[np.ix_([0, 1, 2], [0, 1, 4])], cut, atol=1e-15)
