"""How streams are followed: labels and the lives of storages, which models are followed, names."""

from __future__ import annotations

import gc
import weakref

import pytest
import tiny
import tiny_streams
import torch
from tiny import traced
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

import attrace
from attrace.capture import torch_streams
from attrace.capture.stream_labels import Labels
from attrace.capture.torch_forms import storage_of
from attrace.capture.torch_ops import QueryKeyAttention
from attrace.capture.torch_recorder import GuardedRecorder, Recorder
from attrace.capture.torch_streams import StreamRecorder, has_streams, recorder_class, stack_of
from attrace.errors import InputError


def joined(trace: attrace.Trace) -> list[tuple[str, str]]:
    return [(op.queries, op.keys) for op in trace.ops]


def test_a_label_goes_with_its_storage_and_keeps_no_data() -> None:
    labels = Labels()
    for number in range(200):  # addresses would be used again at once
        tensor = torch.randn(4)
        assert labels.get(storage_of(tensor)) is None
        labels.set(tensor, number)
        assert labels.get(storage_of(tensor.view(2, 2))) == number
    labels.drop_dead()
    assert len(labels) == 1
    labels.forget(storage_of(tensor))
    assert len(labels) == 0
    big = torch.zeros(1 << 20)
    gone = weakref.ref(big)
    labels.set(big, 7)
    del big
    gc.collect()
    assert gone() is None
    labels.drop_dead()
    assert len(labels) == 0


def test_a_run_of_tokens_is_told_from_heads_and_features() -> None:
    labels = Labels()
    hidden = torch.randn(2, 6, 8)
    labels.set(hidden, 0)
    assert labels.run_of(hidden, 6, None) is None
    assert labels.run_of(hidden[:, 1:], 6, None) == (1, 5, 6)
    assert labels.run_of(hidden[..., 4:], 6, None) is None
    assert labels.run_of(hidden[:, 2:4, 4:], 6, None) == (2, 2, 6)
    assert labels.run_of(hidden.view(2, 6, 2, 4).transpose(1, 2)[:, :1], 6, None) is None  # one head
    assert labels.run_of(hidden.view(2, 6, 2, 4).transpose(1, 2)[:, :, 3:], 6, None) == (3, 3, 6)
    assert labels.run_of(hidden[1:], 6, None) is None  # one item
    merged = torch.randn(12, 24)  # query, key and value of two items of six tokens
    labels.set(merged, 1)
    query = merged[:, :8].view(2, 6, 2, 4).transpose(1, 2)
    assert labels.run_of(query, None, -2) is None
    packed = torch.randn(6, 24)
    labels.set(packed, 2)
    key = packed[:, 8:16].view(1, 6, 2, 4).transpose(1, 2)
    assert labels.run_of(key, None, -2) is None
    assert labels.run_of(key[:, :, 2:5], None, -2) == (2, 3, 6)


def test_a_trace_keeps_no_hidden_states_alive() -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Watched(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            hidden = left * 2.0
            kept.append(weakref.ref(hidden))
            out = torch.nn.functional.scaled_dot_product_attention(left, right, right)
            return out + hidden

    trace = attrace.trace(Watched(), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 3, 8))
    gc.collect()
    assert trace.ops
    assert kept[0]() is None


def test_only_models_that_may_have_streams_are_followed() -> None:
    for family in tiny.FAMILIES:
        model = tiny.model(family, "eager")
        assert not has_streams(model), family
        assert recorder_class(model, guarded=False) is Recorder
        assert recorder_class(model, guarded=True) is GuardedRecorder
    for family in tiny_streams.SETTINGS:
        model = tiny_streams.model(family, "eager")
        assert has_streams(model), family
        assert issubclass(recorder_class(model, guarded=True), StreamRecorder)


@pytest.mark.parametrize(("family", "backend"), tiny.CASES)
def test_one_stream_is_found_as_one(family: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followed all the same, every model with one stream gives one, and its graph is the chain of its layers."""
    model, given = tiny.model(family, backend), tiny.inputs(pad=2)
    expected = traced(model, given)
    monkeypatch.setitem(torch_streams._FOLLOWED, model, True)
    trace = traced(model, given)
    assert trace.flow is not None
    assert joined(trace) == joined(expected)
    assert [(step.queries, step.keys, step.makes) for step in trace.flow.steps] == [
        (i, i, i + 1) for i in range(len(trace.ops))
    ]
    assert torch.equal(trace.rollout(), expected.rollout())


def test_one_stream_is_named_after_the_models_main_input() -> None:
    trace = traced(tiny.model("bert"), tiny.inputs())
    assert trace.streams == {"input_ids": 7}
    assert joined(trace) == [("input_ids", "input_ids")] * 2
    assert torch.equal(trace.rollout(target=("input_ids", 2)), trace.rollout(target=2))
    with pytest.raises(InputError, match=r"the one stream of BertForSequenceClassification, 'input_ids'"):
        trace.rollout(target=("pixel_values", 2))


def test_stack_names() -> None:
    assert stack_of("qformer.encoder.layer.0.attention.attention") == "qformer.encoder"
    assert stack_of("h.3.attn") == "h"
    assert stack_of("vision_model.head.attention") == "vision_model.head.attention"


def test_a_call_that_no_operator_showed_is_told() -> None:
    """A backend that is seen at another seam tells the recorder what it read and gave."""

    class Told(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            with _disable_current_modes():  # what runs out of sight leaves no label
                hidden = torch.zeros_like(left)
            op = QueryKeyAttention(name="told", layer=0, shape=(1, 2, 4, 3), kind="self", query=left, key=right)
            recorder._trace.ops.append(op)
            recorder.joined([op], left, right, right, hidden)
            return left + hidden

    model = Told()
    with attrace.record(model) as trace:
        (recorder,) = (m for m in _get_current_dispatch_mode_stack() if isinstance(m, StreamRecorder))
        model(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 3, 8))
    assert [(op.queries, op.keys, op.kind) for op in trace.ops] == [("left", "right", "cross")]
    assert trace.rollout(target=0)["right"].shape == (1, 3)
