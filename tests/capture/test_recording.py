"""A recording from its beginning to its end: what it finds there, and that it leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import tiny
import torch
from tiny import traced
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import attrace
from attrace.capture.torch_layers import modules_of
from attrace.errors import CaptureError


def test_inference_mode_changes_nothing() -> None:
    for family, backend in (("bert", "sdpa"), ("llama", "eager"), ("falcon", "sdpa")):
        model = tiny.model(family, backend)
        expected = traced(model, tiny.inputs(pad=2))
        with torch.inference_mode():
            plain = model(**tiny.inputs(pad=2))
            trace = attrace.trace(model, **tiny.inputs(pad=2))
            assert torch.equal(trace.output[0], plain[0])
            assert torch.equal(trace.rollout(), expected.rollout())


def test_arguments_by_position_and_hooks_of_the_caller() -> None:
    model, inputs = tiny.model("bert"), tiny.inputs(pad=2)
    with torch.no_grad():
        named = attrace.trace(model, **inputs)
        placed = attrace.trace(model, inputs["input_ids"], inputs["attention_mask"])
        assert torch.equal(named.rollout(discard=0.3), placed.rollout(discard=0.3))
        handle = model.register_forward_hook(lambda *_: "mine")
        assert attrace.trace(model, **inputs).output == "mine"
        handle.remove()


def test_modules_are_found_as_torch_finds_them() -> None:
    shared = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.Identity()), "b": shared, "c": nn.ModuleList([shared[0]])})
    model["a"].register_module("none", None)
    assert list(modules_of(model).items()) == list(model.named_modules())


# Inference mode: tensors that don't count how often they are written to


def test_in_inference_mode_what_was_recorded_stays_whatever_the_model_writes() -> None:
    class Reused(nn.Module):
        def __init__(self, *, fused: bool) -> None:
            super().__init__()
            self.fused = fused

        def forward(self, x: Tensor) -> Tensor:
            key = x.clone()
            if self.fused:
                out = F.scaled_dot_product_attention(x, key, x)
            else:
                weights = (x @ key.mT * 8**-0.5).softmax(-1)
                out = weights @ x
                weights.zero_()
            key.zero_()
            return out

    x = torch.randn(1, 2, 5, 8)
    for fused in (True, False):
        with torch.inference_mode():
            trace = attrace.trace(Reused(fused=fused), x)
            torch.testing.assert_close(trace.ops[0].weights(), (x @ x.mT * 8**-0.5).softmax(-1))


# Recordings that end in an order of their own


def test_recordings_that_end_out_of_order_take_away_their_own_mode() -> None:
    from leftovers import leftovers

    model, other = tiny.model("bert"), tiny.model("bert")
    inputs = tiny.inputs()
    before = [leftovers(model), leftovers(other)]
    first, second = attrace.record(model), attrace.record(other)
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    with torch.no_grad():
        model(**inputs)
        other(**inputs)
    second.__exit__(None, None, None)
    assert [len(one.ops), len(two.ops)] == [0, 2]
    assert [leftovers(model), leftovers(other)] == before

    def run() -> Iterator[attrace.Trace]:
        with attrace.record(model) as trace:
            yield trace
            model(**inputs)
            yield trace

    runs = [run(), run(), run()]
    traces = [next(r) for r in runs]
    for r in runs:
        next(r)
    for r in (runs[1], runs[0], runs[2]):
        r.close()
    assert [len(t.ops) for t in traces] == [6, 6, 6]  # each was open while all three ran
    assert leftovers(model) == before[0]


def test_threads_that_leave_in_the_order_they_came_leave_torch_able_to_compile() -> None:
    from leftovers import leftovers

    model = tiny.model("bert")
    before = leftovers(model)
    steps = [threading.Event() for _ in range(3)]

    def first() -> None:
        with attrace.record(model):
            steps[0].set()
            steps[1].wait(30)
        steps[2].set()

    def second() -> None:
        steps[0].wait(30)
        with attrace.record(model):
            steps[1].set()
            steps[2].wait(30)

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(step.is_set() for step in steps)
    assert leftovers(model) == before


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_code_is_refused_as_a_model_and_told_of_as_a_part() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), -1) @ self.value(x)

    x = torch.randn(1, 5, 8)
    for made in (torch.jit.trace(Attends(), x), torch.jit.script(Attends())):
        with pytest.raises(CaptureError, match=r"traced or scripted code.*Give the module that it was made from"):
            attrace.trace(made, x)
    feed = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    own = nn.Sequential(Attends(), feed)
    trace = attrace.trace(own, x)
    torch.testing.assert_close(trace.ops[0].weights()[0, 0] @ own[0].value(x)[0], own[0](x)[0])


# Rows with nothing to attend to, and the rounding of half precision
