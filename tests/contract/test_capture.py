"""Contracts 1 to 6 of the design, for every family and backend."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from leftovers import leftovers
from tiny import traced
from together import together
from torch import Tensor, nn

import attrace
from attrace.capture.torch_ops import QueryKeyAttention
from attrace.errors import AttraceWarning
from attrace.ops.attention import naive

every_family = pytest.mark.parametrize(("family", "backend"), tiny.CASES)
PADDINGS = [("left", 0), ("left", 2), ("right", 2)]


def eager_maps(family: str, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The library's own weights."""
    twin = tiny.model(family, "eager")
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        return twin(**inputs, output_attentions=True).attentions


@every_family
@pytest.mark.parametrize("grad", [False, True])
def test_output_is_bit_identical_and_nothing_is_left(family: str, backend: str, grad: bool) -> None:
    model, inputs = tiny.model(family, backend), tiny.inputs(pad=2)
    before = leftovers(model)
    with torch.set_grad_enabled(grad):
        plain = model(**inputs)
        trace = attrace.trace(model, **inputs)
    assert torch.equal(trace.output[0], plain[0])
    assert trace.output[0].requires_grad == plain[0].requires_grad
    assert leftovers(model) == before


@every_family
@pytest.mark.parametrize(("side", "pad"), PADDINGS)
def test_weights_are_the_librarys_own(family: str, backend: str, side: str, pad: int) -> None:
    model, inputs = tiny.model(family, backend), tiny.inputs(pad=pad, side=side)
    trace = traced(model, inputs)
    expected = eager_maps(family, model, inputs)
    assert len(trace.ops) == len(expected)
    for op, own in zip(trace.ops, expected, strict=True):
        assert op.kind == "self"
        assert op.heads == 4
        for item, real in enumerate(inputs["attention_mask"].bool()):  # padded queries attend to what they like
            torch.testing.assert_close(op.weights()[item][:, real], own[item][:, real], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "backend", "side"),
    [
        (*case, side)
        for case in tiny.CASES
        for side in ("left", "right")
        if side == "right" or case[0] not in tiny.COUNTED
    ],
)
def test_a_padded_batch_equals_its_rows_one_by_one(family: str, backend: str, side: str) -> None:
    # rep-rollout-batch-1
    model, batch = tiny.model(family, backend), tiny.inputs(pad=2, side=side)
    if side == "left" and family in tiny.POSITIONED:  # learned positions would count the padding
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    together = traced(model, batch)
    for item, real in enumerate(batch["attention_mask"].bool()):
        alone = traced(model, tiny.row(batch, item))
        for op, single in zip(together.ops, alone.ops, strict=True):
            part = op.weights()[item][:, real][:, :, real]
            torch.testing.assert_close(part, single.weights()[0], atol=1e-5, rtol=0)
        last = int(real.nonzero()[-1])
        for options in ({}, {"discard": 0.3}):
            row = together.rollout(target=last, **options)[item][real]
            torch.testing.assert_close(row, alone.rollout(target=-1, **options)[0], atol=1e-5, rtol=0)


@every_family
def test_products_agree_with_the_float64_reference(family: str, backend: str) -> None:
    trace = traced(tiny.model(family, backend), tiny.inputs(length=9, pad=2))
    rng = np.random.default_rng(0)
    for op in trace.ops:
        if isinstance(op, QueryKeyAttention):
            reference = naive.attention_weights(
                op.query.numpy(),
                op.key.numpy(),
                scale=op.scale,
                bias=None if op.bias is None else op.bias.numpy(),
                causal=op.causal,
            )
            np.testing.assert_allclose(op.weights().numpy(), reference, atol=1e-6)
        else:
            reference = op.weights().double().numpy()
        x, r = rng.dirichlet(np.ones(9), (2, 3)), rng.dirichlet(np.ones(9), (2, 3))
        x, r = np.swapaxes(x, 1, 2), np.swapaxes(r, 1, 2)
        for heads, fused in (
            ("mean", reference.mean(1)),
            ("max", reference.max(1)),
            ("min", reference.min(1)),
            (2, reference[:, 2]),
            ([1, 0, 2, 1], np.average(reference, axis=1, weights=[1, 0, 2, 1])),
        ):
            got = op.rmatvec(torch.tensor(r), heads=heads).double().numpy()
            assert np.abs(got - np.swapaxes(fused, 1, 2) @ r).sum(1).max() <= 1e-5
            got = op.matvec(torch.tensor(x), heads=heads).double().numpy()
            assert np.abs(got - fused @ x).max() <= 1e-5
            np.testing.assert_allclose(op.fused(heads).double().numpy(), fused, atol=1e-5)


@every_family
def test_rollout_streams_what_the_dense_reference_gives(family: str, backend: str) -> None:
    trace = traced(tiny.model(family, backend), tiny.inputs())
    maps = [op.weights().double().numpy() for op in trace.ops]
    for options in ({}, {"residual": 0.2, "heads": "max"}, {"discard": 0.4}, {"layers": [1], "heads": 1}):
        normalize = ("heads" in options and options["heads"] == "max") or "discard" in options
        whole = attrace.rollout(maps, **{**options, "normalize": normalize})
        options["normalize"] = normalize
        np.testing.assert_allclose(trace.rollout(**options).numpy(), whole, atol=1e-5)
        np.testing.assert_allclose(trace.rollout(target=3, **options).numpy(), whole[:, 3], atol=1e-5)
        np.testing.assert_allclose(trace.rollout(target=[-1, 2], **options).numpy(), whole[:, [-1, 2]], atol=1e-5)
        np.testing.assert_allclose(trace.rollout(source=0, **options).numpy(), whole[:, :, 0], atol=1e-5)
        start = np.full(7, 1 / 7)
        np.testing.assert_allclose(trace.rollout(target=start, **options).numpy(), start @ whole, atol=1e-5)
    spans = trace.rollout(segments=[(0, 3), (3, 7)])
    whole = attrace.rollout(maps, normalize=False)
    np.testing.assert_allclose(spans.numpy(), np.stack([whole[..., :3].sum(-1), whole[..., 3:].sum(-1)], -1), atol=1e-5)


@every_family
def test_mass_is_kept_or_told(family: str, backend: str) -> None:
    trace = traced(tiny.model(family, backend), tiny.inputs())
    row = trace.rollout(target=-1)
    assert (row >= 0).all()
    assert (row.sum(-1) <= 1 + 1e-5).all()
    if family in tiny.SINKS:
        assert (row.sum(-1) < 0.95).all()
    else:
        torch.testing.assert_close(row.sum(-1), torch.ones(2), atol=1e-5, rtol=0)
    cut = trace.rollout(target=-1, tolerance=0.2)
    lost = (row - cut).sum(-1)
    assert ((row - cut) >= -1e-6).all()
    torch.testing.assert_close((row - cut).abs().sum(-1), lost)
    assert (lost <= 0.2 + 1e-6).all()


@every_family
def test_a_second_call_gives_the_same(family: str, backend: str) -> None:  # rep-rollout-repeat-1
    model = tiny.model(family, backend)
    first = traced(model, tiny.inputs()).rollout()
    traced(model, tiny.inputs(seed=9))
    assert torch.equal(traced(model, tiny.inputs()).rollout(), first)


@pytest.mark.parametrize(
    ("family", "backend"),
    [case for case in tiny.CASES if tiny.FAMILIES[case[0]][0].endswith(("CausalLM", "LMHeadModel"))],
)
def test_causal_models_look_at_no_later_token(family: str, backend: str) -> None:
    for op in traced(tiny.model(family, backend), tiny.inputs()).ops:
        assert (op.weights().triu(1) == 0).all()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_an_error_in_the_model_leaves_nothing(backend: str) -> None:
    model = tiny.model("bert", backend)
    before = leftovers(model)

    def fail(*_: object) -> None:
        raise KeyError("in the model")

    handle = model.bert.encoder.layer[1].output.register_forward_hook(fail)
    with pytest.raises(KeyError, match="in the model"):
        attrace.trace(model, **tiny.inputs())
    handle.remove()
    assert leftovers(model) == before
    model_ok = traced(model, tiny.inputs())
    assert [op.name for op in model_ok.ops] == [f"bert.encoder.layer.{i}.attention.self" for i in (0, 1)]


def test_a_failed_call_inside_the_block_does_not_spoil_the_next() -> None:
    model = tiny.model("bert")
    with torch.no_grad(), attrace.record(model) as trace:
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[5, 1000]]))
        trace.ops.clear()
        trace.starts.clear()
        model(**tiny.inputs())
    assert [op.name for op in trace.ops] == [f"bert.encoder.layer.{i}.attention.self" for i in (0, 1)]
    assert torch.equal(trace.rollout(), traced(model, tiny.inputs()).rollout())


def test_two_models_in_one_block_do_not_mix() -> None:
    a, b = tiny.model("bert"), tiny.model("llama", seed=3)
    with torch.no_grad(), attrace.record(a) as first, attrace.record(b) as second:
        b(**tiny.inputs())
        a(**tiny.inputs())
    assert torch.equal(first.rollout(), traced(a, tiny.inputs()).rollout())
    assert torch.equal(second.rollout(), traced(b, tiny.inputs()).rollout())


def test_threads_do_not_mix() -> None:
    models = [tiny.model("bert", "sdpa"), tiny.model("llama", "eager"), tiny.model("bert", "eager")]
    expected = [traced(m, tiny.inputs(seed=i)).rollout() for i, m in enumerate(models)]
    results = together(len(models), lambda i: [traced(models[i], tiny.inputs(seed=i)).rollout() for _ in range(5)])
    for i, rollout in enumerate(expected):
        assert all(torch.equal(got, rollout) for got in results[i])


def test_one_model_in_two_threads() -> None:
    model = tiny.model("bert")
    expected = [traced(model, tiny.inputs(seed=i)).rollout() for i in range(2)]
    results = together(2, lambda i: [traced(model, tiny.inputs(seed=i)).rollout() for _ in range(10)])
    for i in range(2):
        assert all(torch.equal(got, expected[i]) for got in results[i])


def test_a_half_precision_model_is_read_in_float32() -> None:
    model = tiny.model("llama", dtype=torch.bfloat16)
    trace = traced(model, tiny.inputs())
    assert trace.ops[0].weights().dtype == torch.float32
    torch.testing.assert_close(trace.ops[0].weights().sum(-1), torch.ones(2, 4, 7))
    assert torch.equal(trace.output[0], model(**tiny.inputs())[0])


def test_weights_are_those_before_dropout() -> None:
    for backend in ("sdpa", "eager"):
        model = tiny.model("bert", backend)
        expected = [op.weights() for op in traced(model, tiny.inputs()).ops]
        model.config.attention_probs_dropout_prob = 0.5
        for layer in model.bert.encoder.layer:
            layer.attention.self.dropout.p = 0.5
            layer.attention.self.train()
        model.bert.encoder.layer[0].attention.self.train()
        torch.manual_seed(0)
        with pytest.warns(AttraceWarning, match="training mode"):
            trace = traced(model, tiny.inputs())
        torch.testing.assert_close(trace.ops[0].weights(), expected[0], atol=1e-6, rtol=0)
