"""Layers of one model on several devices: what is carried from layer to layer goes where the layer is.

No accelerator is needed: fake tensors have a device and no values, and refuse to meet one of another device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attrace.capture.torch_ops import QueryKeyAttention, TorchAttention
from attrace.capture.trace import Trace
from attrace.capture.windows import GridAttention, Merging, Piece

N = 6


@pytest.fixture(autouse=True)
def no_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake tensors, whose values nothing may ask for."""
    monkeypatch.setattr(TorchAttention, "_sound", lambda _, product: product)
    monkeypatch.setattr(TorchAttention, "_fits", lambda *_: None)
    with FakeTensorMode():
        yield


def call(layer: int, device: str, batch: int = 2, n: int = N, keys: int = N) -> QueryKeyAttention:
    query, key = torch.randn(batch, 2, n, 4, device=device), torch.randn(batch, 2, keys, 4, device=device)
    return QueryKeyAttention(
        name=f"layers.{layer}", layer=layer, shape=(batch, 2, n, keys), kind="self", query=query, key=key
    )


def spread(*devices: str) -> Trace:
    trace = Trace("a model", ops=[call(layer, device) for layer, device in enumerate(devices)], starts=[0])
    trace.valid = torch.ones(2, N, dtype=torch.bool)
    return trace


@pytest.mark.parametrize("devices", [("cpu", "lazy:0"), ("lazy:0", "lazy:1"), ("lazy:1", "cpu", "lazy:0")])
@pytest.mark.parametrize(
    "question",
    [{"target": 1}, {"target": [0, 2]}, {"source": 1}, {"segments": [(0, 2)]}, {}, {"target": 1, "tolerance": 0.1}],
)
@pytest.mark.parametrize("heads", ["mean", "max", 1, (0.5, 1.5)])
def test_rollout_over_layers_on_several_devices(devices: Any, question: Any, heads: Any) -> None:
    answer = spread(*devices).rollout(heads=heads, **question)
    assert answer.shape[0] == 2
    assert answer.shape[-1] in (1, N)


@pytest.mark.parametrize("normalize", [True, False, None])
def test_rows_divided_by_their_sums(normalize: bool | None) -> None:
    assert spread("lazy:0", "lazy:1").rollout(target=1, normalize=normalize, heads="max").shape == (2, N)


def test_products_come_back_to_where_the_vector_was() -> None:
    op, x = call(0, "lazy:1"), torch.ones(2, N, dtype=torch.float64)
    for product in (op.matvec(x), op.rmatvec(x), op.matvec(x[..., None]), op.rmatvec(x[..., None])):
        assert product.device == x.device
        assert product.dtype == x.dtype


def test_windows_and_merging_follow_too() -> None:
    x = torch.ones(2, 4)
    piece = Piece(call(0, "lazy:1", batch=4, n=2, keys=2), np.array([[0, 1], [2, 3]]))
    op = GridAttention(name="windows", layer=0, shape=(2, 2, 4, 4), kind="self", pieces=(piece,))
    merging = Merging.of(2, 2, 2, op)
    for product in (op.matvec(x), op.rmatvec(x), merging.matvec(x), merging.rmatvec(x[:, :1])):
        assert product.device == x.device


@pytest.mark.parametrize("question", [{"target": ("text", 1)}, {"source": ("image", 0)}, {"target": 0, "discard": 0.2}])
def test_streams_on_several_devices(question: Any) -> None:
    trace = spread("lazy:0", "lazy:1", "lazy:0", "cpu")
    trace.valid = None
    for op, queries, keys in zip(trace.ops, "itit", "itti", strict=True):
        names = {"i": "image", "t": "text"}
        op.queries, op.keys = names[queries], names[keys]
        op.kind = "self" if queries == keys else "cross"
    answer = trace.rollout(**question)
    assert isinstance(answer, dict)
    assert {len(found) for found in answer.values()} == {2}


def test_discarding_on_several_devices() -> None:
    trace = spread("lazy:0", "lazy:1")
    trace.valid = None
    assert trace.rollout(target=1, discard=0.5).shape == (2, N)
