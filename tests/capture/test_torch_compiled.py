"""Models that torch.compile has compiled: their compiled code runs, and what it shows is read."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import small
import tiny
import torch
from leftovers import leftovers
from torch import Tensor, nn

import attrace
from attrace.errors import AttraceWarning, CaptureError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


class Layers(nn.Module):
    """Two layers whose queries and keys are made by one kernel each: compiled code takes their buffers again."""

    def __init__(self, fused: str = "all") -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(2):
            q, k = x.sin(), x.cos()
            if self.fused == "all" or (self.fused == "first" and layer == 0):
                mixed = nn.functional.scaled_dot_product_attention(q, k, x)
            else:
                mixed = (q @ k.transpose(-2, -1)).softmax(-1) @ x
            x = nn.functional.gelu(mixed.exp() * 0.5 + x.tanh())
        return x


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("how", ["whole", "in place"])
@pytest.mark.parametrize("warm", [True, False])
def test_compiled_code_runs_and_its_buffers_are_not_trusted(how: str, warm: bool, backend: str, compiler: str) -> None:
    model, x = Layers(), torch.randn(1, 2, 6, 8)
    expected = [op.weights() for op in attrace.trace(model, x).ops]
    if how == "whole":
        model = torch.compile(model, backend=backend)
    else:
        model.compile(backend=backend)
    with torch.no_grad():
        if warm:
            model(x)
        before = leftovers(model)
        trace = attrace.trace(model, x)
        plain = model(x)
        again = attrace.trace(model, x)
    assert leftovers(model)[:10] == before[:10]
    assert torch.equal(trace.output, plain)
    assert torch.equal(again.output, plain)
    for op, own, second in zip(trace.ops, expected, again.ops, strict=True):
        torch.testing.assert_close(op.weights(), own, atol=1e-5, rtol=0)
        assert torch.equal(op.weights(), second.weights())
    assert not trace.notes


def test_attention_that_the_compiler_fused_away_is_an_error_with_a_way_out(compiler: str) -> None:
    x = torch.randn(1, 2, 6, 8)
    model = torch.compile(Layers("none"))
    with torch.no_grad():
        with pytest.raises(CaptureError, match=r"compiled parts of .*Received: none.*set_stance\('force_eager'\)"):
            attrace.trace(model, x)
        with torch.compiler.set_stance("force_eager"):
            trace = attrace.trace(model, x)
    q, k = x.sin(), x.cos()
    torch.testing.assert_close(trace.ops[0].weights(), (q @ k.mT).softmax(-1))
    assert len(trace.ops) == 2


def test_layers_missing_from_compiled_code_are_counted(compiler: str) -> None:
    class Config:
        num_hidden_layers = 2

    inner = Layers("first")
    inner.config = Config()
    model = torch.compile(inner)
    with torch.no_grad(), pytest.warns(AttraceWarning, match=r"in 1 of 2 layers: compiled code.*force_eager"):
        attrace.trace(model, torch.randn(1, 2, 6, 8))


def test_blocks_of_a_compiled_model_are_read_from_its_own_code() -> None:
    model = tiny.model("bert")
    plain = tiny.traced(model, tiny.inputs())
    for i, layer in enumerate(model.bert.encoder.layer):
        model.bert.encoder.layer[i] = torch.compile(layer, backend="aot_eager")
    with torch.no_grad(), attrace.record(model, values=True) as trace:
        output = model(**tiny.inputs())
    assert torch.equal(output[0], plain.output[0])
    assert all(op.value is not None for op in trace.ops)
    for op, own in zip(trace.ops, plain.ops, strict=True):
        torch.testing.assert_close(op.weights(), own.weights())


def test_an_explanation_reads_all_of_a_compiled_model() -> None:
    tokenizer = small.word_pieces()
    model = tiny.model("bert", "eager")
    plain = attrace.explain(model, "The capital of France", processor=tokenizer, method="rollout")
    model.compile(backend="aot_eager")
    original = model._compiled_call_impl
    result = attrace.explain(model, "The capital of France", processor=tokenizer, method="rollout")
    assert result.scores.tolist() == plain.scores.tolist()
    assert result.notes == plain.notes
    assert model._compiled_call_impl is original


def test_one_model_compiled_in_place_in_several_threads() -> None:
    model, x = Layers(), [torch.randn(1, 2, 6, 8) for _ in range(2)]
    model.compile(backend="aot_eager")
    original = model._compiled_call_impl
    with torch.no_grad():
        model(x[0])
    expected = [attrace.trace(model, item).ops[0].weights() for item in x]
    assert model._compiled_call_impl is original
    inside, leave = [threading.Event() for _ in x], [threading.Event() for _ in x]
    results: dict[int, attrace.Trace] = {}

    def work(i: int) -> None:
        with torch.no_grad(), attrace.record(model) as trace:
            inside[i].set()
            leave[i].wait(60)
            model(x[i])
        results[i] = trace

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for i, thread in enumerate(threads):  # the first to come is the first to go
        thread.start()
        inside[i].wait(60)
    for i, thread in enumerate(threads):
        leave[i].set()
        thread.join()
    assert model._compiled_call_impl is original
    for i, own in enumerate(expected):
        assert len(results[i].ops) == 2
        assert torch.equal(results[i].ops[0].weights(), own)
