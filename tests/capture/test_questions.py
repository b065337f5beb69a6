"""What a rollout and the products of a recorded run are asked with: bad questions get a typed error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import attrace
from attrace.errors import InputError, NonFiniteError
from tests.support import tiny, tiny_streams

N = 7
BATCH = 2


@pytest.fixture(scope="module")
def trace() -> Any:
    found = tiny.traced(tiny.model("bert"), tiny.inputs())
    assert found.ops[0].shape[::2] == (BATCH, N)
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_row_to_start_from_is_finite(trace: Any, value: float, dtype: torch.dtype) -> None:
    row = torch.zeros(BATCH, N, dtype=dtype)
    row[1, 3] = value
    for given in (row, row[1], row.numpy()):
        with pytest.raises(NonFiniteError, match="row of finite shares"):
            trace.rollout(target=given)


def test_a_row_to_start_from_is_not_negative(trace: Any) -> None:
    row = torch.full((N,), 0.5)
    row[2] = -0.25
    with pytest.raises(InputError, match=r"not negative\. Received: -0\.25"):
        trace.rollout(target=row)


@pytest.mark.parametrize(
    "segments",
    [
        [1], [(0,)], [(0, 1, 2)], "ab", [("a", "b")], 5, [(0.0, 1.0)], [(0, None)], {0: 1}, torch.tensor([0, 2]),
        [slice(0, 2)], [torch.tensor([[0, 2], [1, 2]])],
    ],
)  # fmt: skip
def test_segments_are_pairs_of_integers(trace: Any, segments: Any) -> None:
    with pytest.raises(InputError, match=r"segments as \(start, stop\) pairs of integers\. Received"):
        trace.rollout(segments=segments)


@pytest.mark.parametrize("segments", [[(0, 99)], [(-3, -1)], [(2, 2)], [(3, 2)]])
def test_segments_lie_within(trace: Any, segments: Any) -> None:
    with pytest.raises(InputError, match=f"stop <= {N}"):
        trace.rollout(segments=segments)


@pytest.mark.parametrize("segments", [[(0, 2)], [[0, 2]], [np.array([0, 2])], torch.tensor([[0, 2]]), ((0, 2),)])
def test_segments_in_any_container(trace: Any, segments: Any) -> None:
    expected = trace.rollout(segments=[(0, 2)])
    assert expected.shape == (BATCH, N, 1)
    assert torch.equal(trace.rollout(segments=segments), expected)


@pytest.mark.parametrize("layers", [5, -1, "a", b"0", {0: 1}, [0.0], [None], [True], [torch.tensor(True)], [[0]]])
def test_layers_are_integers(trace: Any, layers: Any) -> None:
    with pytest.raises(InputError, match="Expected layers to be"):
        trace.rollout(target=0, layers=layers)


@pytest.mark.parametrize("layers", [[], [0, 0], [-1, 1], iter(())])
def test_layers_come_once(trace: Any, layers: Any) -> None:
    with pytest.raises(InputError, match="at least one layer, each once"):
        trace.rollout(target=0, layers=layers)


@pytest.mark.parametrize("layers", [[0], (0,), {0}, range(1), np.array([0]), torch.tensor([0]), iter([0])])
def test_layers_in_any_container(trace: Any, layers: Any) -> None:
    assert torch.equal(trace.rollout(target=0, layers=layers), trace.rollout(target=0, layers=[0]))


@pytest.mark.parametrize("normalize", [0, 1, "yes", 2.0])
def test_normalize_is_a_switch(trace: Any, normalize: Any) -> None:
    with pytest.raises(InputError, match="normalize to be True or False"):
        trace.rollout(target=0, normalize=normalize)


@pytest.mark.parametrize("target", [torch.tensor([True, False]), np.array([True]), [True], True, torch.tensor(True)])
def test_flags_are_not_positions(trace: Any, target: Any) -> None:
    with pytest.raises(InputError, match="target to be given by integers"):
        trace.rollout(target=target)


@pytest.mark.parametrize("item", [0, 1, -1, np.int64(1), torch.tensor(0)])
def test_one_item_of_a_batch(trace: Any, item: Any) -> None:
    for question in ({"target": 1}, {"target": [1, 2]}, {"source": 0}, {"segments": [(0, 2)]}, {}):
        assert torch.equal(trace.rollout(item=item, **question), trace.rollout(**question)[int(item)])


@pytest.mark.parametrize("item", [2, -3, 11, 512])
def test_a_batch_index_out_of_range_names_both_numbers(trace: Any, item: int) -> None:
    # rep-tokens-batchindex-1
    with pytest.raises(InputError, match=rf"item from 0 to 1 .*Received: {item}\. .*the batch has 2 items"):
        trace.rollout(target=0, item=item)


@pytest.mark.parametrize("item", [1.0, "0", [0], True, object()])
def test_a_batch_index_is_an_integer(trace: Any, item: Any) -> None:
    with pytest.raises(InputError, match="item to be given by integers"):
        trace.rollout(target=0, item=item)


def test_one_item_of_several_streams() -> None:
    trace = tiny.traced(tiny_streams.model("t5"), tiny_streams.inputs("t5"))
    whole, one = trace.rollout(target=1), trace.rollout(target=1, item=1)
    assert isinstance(whole, dict)
    assert isinstance(one, dict)
    assert all(torch.equal(one[name], whole[name][1]) for name in whole)
    with pytest.raises(InputError, match="the batch has 2 items"):
        trace.rollout(target=1, item=2)


@pytest.mark.parametrize("rows", [5.0, "a", [0.5], [None], [[0]], True, [True], torch.tensor([0.0]), object(), {0: 1}])
def test_query_rows_are_integers(trace: Any, rows: Any) -> None:
    with pytest.raises(InputError, match=r"query rows of bert\S+ to be"):
        trace.ops[0].weights(rows)


@pytest.mark.parametrize("rows", [N, -N - 1, 10**30, [0, N], torch.tensor([N])])
def test_query_rows_lie_within(trace: Any, rows: Any) -> None:
    with pytest.raises(InputError, match=rf"query rows of bert\S+ from 0 to {N - 1}"):
        trace.ops[0].weights(rows)


@pytest.mark.parametrize("vector", [None, "a", [1.0], np.ones((BATCH, N)), 1.0])
@pytest.mark.parametrize("product", ["matvec", "rmatvec"])
def test_vectors_are_tensors(trace: Any, product: str, vector: Any) -> None:
    with pytest.raises(InputError, match="Expected a vector as a PyTorch tensor"):
        getattr(trace.ops[0], product)(vector)


@pytest.mark.parametrize("layers", [5, "a", [True], [0.5], [None], {0: 1}])
def test_explain_names_what_is_wrong_with_its_layers(layers: Any) -> None:
    with pytest.raises(InputError, match="Expected layers to be"):
        attrace.explain(None, "free prize", layers=layers, method="rollout")


@pytest.mark.parametrize("heads", [None, 1.5, object(), True, ["a"], [None], [math.nan, 1, 1, 1], {0: 1.0}, b"mean"])
def test_explain_names_what_is_wrong_with_its_heads(heads: Any) -> None:
    with pytest.raises(InputError, match=r"Expected head(s to be| weights)"):
        attrace.explain(None, "free prize", heads=heads, method="rollout")


@pytest.mark.parametrize(
    "heads",
    [1, np.int64(1), np.array(1), torch.tensor(1), [0, 1, 0, 0], iter([0, 1, 0, 0]), np.eye(4)[1], torch.eye(4)[1]],
    ids=lambda heads: type(heads).__name__,
)
def test_explain_takes_heads_in_any_container(heads: Any) -> None:
    expected = attrace.explain(None, "free prize", heads=1, method="rollout")
    found = attrace.explain(None, "free prize", heads=heads, method="rollout")
    assert [word.share for word in found.words] == pytest.approx([word.share for word in expected.words], abs=1e-6)
    assert found.words[0].share != pytest.approx(
        attrace.explain(None, "free prize", heads=0, method="rollout").words[0].share, abs=1e-6
    )
