"""Contracts 1 to 6 of the design, for every family and backend."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_globals
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import attrace
from attrace.capture.torch_ops import QueryKeyAttention
from attrace.errors import CaptureError, InputError, NonFiniteError, ShapeError
from attrace.ops.attention import naive

every_family = pytest.mark.parametrize(("family", "backend"), tiny.CASES)
PADDINGS = [("left", 0), ("left", 2), ("right", 2)]


def traced(model: nn.Module, inputs: dict[str, Tensor]) -> attrace.Trace:
    with torch.no_grad():
        return attrace.trace(model, **inputs)


def eager_maps(family: str, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The library's own weights."""
    twin = tiny.model(family, "eager")
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        return twin(**inputs, output_attentions=True).attentions


def leftovers(model: nn.Module) -> list[object]:
    """Hooks of the process and of the model, and modes of this thread."""
    return [
        len(module_globals._global_forward_hooks),
        len(module_globals._global_forward_pre_hooks),
        len(_get_current_dispatch_mode_stack()),
        len(_get_current_function_mode_stack()),
        [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        model.training,
        getattr(model.config, "_attn_implementation", None),
        getattr(model.config, "output_attentions", None),
        torch.is_grad_enabled(),
    ]


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
def test_a_second_call_gives_the_same(family: str, backend: str) -> None:
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
    start, results = threading.Barrier(len(models)), {}

    def work(i: int) -> None:
        start.wait()
        results[i] = [traced(models[i], tiny.inputs(seed=i)).rollout() for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, rollout in enumerate(expected):
        assert all(torch.equal(got, rollout) for got in results[i])


def test_one_model_in_two_threads() -> None:
    model = tiny.model("bert")
    expected = [traced(model, tiny.inputs(seed=i)).rollout() for i in range(2)]
    results: dict[int, list[Tensor]] = {}

    def work(i: int) -> None:
        results[i] = [traced(model, tiny.inputs(seed=i)).rollout() for _ in range(10)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
        trace = traced(model, tiny.inputs())
        torch.testing.assert_close(trace.ops[0].weights(), expected[0], atol=1e-6, rtol=0)


def test_a_fully_masked_row_is_zero_and_stays_finite() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    mask = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    mask[0, 1, 2] = False
    trace = attrace.trace(Plain(), torch.randn(1, 2, 4, 8), mask)
    weights = trace.ops[0].weights()
    assert (weights[0, 1, 2] == 0).all()
    torch.testing.assert_close(weights[0, 0].sum(-1), torch.ones(4))
    assert trace.rollout().isfinite().all()


def test_nothing_captured_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    with pytest.raises(CaptureError, match=r"Expected attention in Sequential\. Received: none"):
        attrace.trace(model, torch.randn(2, 3, 4))
    with attrace.record(model) as trace:
        pass
    with pytest.raises(CaptureError, match="0 calls of the model"):
        trace.rollout()
    with pytest.raises(CaptureError, match=r"torch\.nn\.Module.*str"):
        attrace.trace("bert")


def test_maps_that_cannot_be_read_are_an_error() -> None:
    class Blocks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.transpose(-1, -2)).softmax(-1) @ x

    with pytest.raises(CaptureError, match=r"Blocks \(a map of shape \(2, 3, 4, 5, 5\)\)"):
        attrace.trace(Blocks(), torch.randn(2, 3, 4, 5, 8))


def test_a_softmax_that_multiplies_no_values_is_no_attention() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x) * self.attention(x).softmax(-1)

    trace = attrace.trace(Router(), torch.randn(1, 2, 5, 8))
    assert [(op.name, op.shape) for op in trace.ops] == [("Router", (1, 2, 5, 5))]


def test_tensors_written_to_since_are_an_error() -> None:
    model = tiny.model("llama")
    trace = traced(model, tiny.inputs())
    trace.ops[0].key.mul_(2)
    with pytest.raises(CaptureError, match=r"model\.layers\.0\.self_attn.*written to since"):
        trace.ops[0].weights()


def test_two_calls_in_one_trace_are_not_one_chain() -> None:
    model = tiny.model("bert")
    with torch.no_grad(), attrace.record(model) as trace:
        model(**tiny.inputs())
        model(**tiny.inputs())
    assert len(trace.ops) == 4
    with pytest.raises(CaptureError, match=r"one call.*Received: 2"):
        trace.rollout()


def test_inference_mode_changes_nothing() -> None:
    for family, backend in (("bert", "sdpa"), ("llama", "eager"), ("falcon", "sdpa")):
        model = tiny.model(family, backend)
        expected = traced(model, tiny.inputs(pad=2))
        with torch.inference_mode():
            plain = model(**tiny.inputs(pad=2))
            trace = attrace.trace(model, **tiny.inputs(pad=2))
            assert torch.equal(trace.output[0], plain[0])
            assert torch.equal(trace.rollout(), expected.rollout())


def test_an_encoder_decoder_is_no_chain() -> None:
    import transformers

    config = transformers.BartConfig(
        vocab_size=100, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
    )  # fmt: skip
    trace = traced(transformers.BartModel(config).eval(), tiny.inputs())
    assert [op.kind for op in trace.ops] == ["self", "self", "cross"]
    with pytest.raises(CaptureError, match="an encoder and a decoder"):
        trace.rollout()
    layer = nn.TransformerDecoderLayer(8, 2, batch_first=True).eval()
    crossed = attrace.trace(layer, torch.randn(1, 4, 8), torch.randn(1, 4, 8))
    assert [op.kind for op in crossed.ops] == ["self", "cross"]
    with pytest.raises(CaptureError, match="self-attention over the same"):
        crossed.rollout()


def test_three_axes_are_split_by_the_modules_own_heads() -> None:
    layer = nn.MultiheadAttention(8, 2).eval()  # sequence first
    x = torch.randn(4, 3, 8)
    own = layer(x, x, x, average_attn_weights=False)[1]
    trace = attrace.trace(layer, x, x, x)
    torch.testing.assert_close(trace.ops[0].weights(), own)
    model = tiny.model("xglm", "eager")
    inputs = tiny.inputs()
    trace = traced(model, {"position_ids": torch.arange(7)[None], **inputs})
    assert trace.ops[0].shape == (2, 4, 7, 7)


def test_a_map_written_to_in_place_is_an_error() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weights = (x @ x.mT).softmax(-1)
            out = weights @ x
            weights.zero_()
            return out

    trace = attrace.trace(InPlace(), torch.randn(1, 2, 5, 8))
    with pytest.raises(CaptureError, match="written to since"):
        trace.ops[0].weights()


def test_a_map_summed_over_its_queries_is_no_attention_map() -> None:
    class Turned(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.how = how

        def forward(self, x: Tensor) -> Tensor:
            weights = (x @ x.mT * 3).softmax(-1)
            if self.how == "values from the left":
                return (x.mT @ weights.mT).mT
            return weights.mT @ x if self.how == "queries" else (x.mT @ weights).mT

    x = torch.randn(1, 2, 5, 8)
    trace = attrace.trace(Turned("values from the left"), x)
    torch.testing.assert_close(trace.ops[0].weights(), (x @ x.mT * 3).softmax(-1))
    torch.testing.assert_close(trace.ops[0].weights() @ x, trace.output)
    for how in ("queries", "queries from the left"):
        with pytest.raises(CaptureError, match="summed over its queries"):
            attrace.trace(Turned(how), x)


class Custom(nn.Module):
    """Attention of a user's own, with something done to its weights before they meet the values."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change((x @ x.mT).softmax(-1)) @ x


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "masked after the softmax": lambda a: a.masked_fill(torch.eye(5, dtype=torch.bool), 0.0),
    "masked and set back to one": lambda a: (a * torch.ones(5, 5).tril()) / (a * torch.ones(5, 5).tril()).sum(-1, True),
    "the largest kept": lambda a: torch.where(a >= a.max(-1, keepdim=True).values, a, 0.0),
    "a head switched off": lambda a: a * torch.tensor([1.0, 0.0])[:, None, None],
    "squared": lambda a: a * a,
    "a slice": lambda a: torch.cat([a, a], -1)[..., :5].contiguous(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_map_is_what_multiplied_the_values(change: str) -> None:
    x = torch.randn(2, 2, 5, 8)
    model = Custom(CHANGES[change])
    try:
        weights = attrace.trace(model, x).ops[0].weights()
    except CaptureError:
        assert change == "a slice"  # the copy that joins is not followed: nothing seen, and said
        return
    torch.testing.assert_close(weights @ x, model(x))


@pytest.mark.parametrize(
    "change", [lambda a: torch.einsum("bhqk,hg->bgqk", a, torch.randn(2, 2)), lambda a: a @ a], ids=["mixed", "twice"]
)
def test_maps_that_meet_no_values_are_an_error(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="Custom"):
        attrace.trace(Custom(change), torch.randn(2, 2, 5, 8))


def test_dropout_after_the_softmax_is_taken_back() -> None:
    x = torch.randn(1, 2, 5, 8)
    model = Custom(nn.Dropout(0.5))
    trace = attrace.trace(model, x)
    torch.testing.assert_close(trace.ops[0].weights(), (x @ x.mT).softmax(-1))
    with pytest.raises(CaptureError):
        attrace.trace(Custom(nn.Dropout(0.5, inplace=True)), x)


def test_autocast_does_not_lower_what_is_read() -> None:
    trace = traced(tiny.model("bert"), tiny.inputs())
    expected = trace.rollout(target=0, discard=0.2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(trace.rollout(target=0, discard=0.2), expected)
        assert trace.ops[0].weights().dtype == torch.float32


def test_products_with_vectors_of_other_kinds() -> None:
    op = traced(tiny.model("bert"), tiny.inputs()).ops[0]
    r = torch.zeros(2, 7)
    r[:, 2] = 1.0
    r.requires_grad_()
    op.rmatvec(r)[:, 3].sum().backward()
    torch.testing.assert_close(r.grad, op.fused()[:, :, 3])
    for wrong in (torch.ones(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.complex64)):
        with pytest.raises(InputError, match="vector of floats"):
            op.matvec(wrong)


def test_sinks_keep_their_mass_whatever_the_fusion() -> None:
    trace = traced(tiny.model("gpt_oss", "eager"), tiny.inputs())
    plain = 1 - trace.rollout(target=-1, layers=[1]).sum(-1)
    assert (plain > 0.01).all()
    for options in ({"heads": "max"}, {"discard": 0.3}):
        kept = 1 - trace.rollout(target=-1, layers=[1], **options).sum(-1)
        torch.testing.assert_close(kept, plain, atol=1e-5, rtol=0)
    assert torch.allclose(trace.rollout(target=-1, heads="max", normalize=True).sum(-1), torch.ones(2))


def test_arguments_by_position_and_hooks_of_the_caller() -> None:
    model, inputs = tiny.model("bert"), tiny.inputs(pad=2)
    with torch.no_grad():
        named = attrace.trace(model, **inputs)
        placed = attrace.trace(model, inputs["input_ids"], inputs["attention_mask"])
        assert torch.equal(named.rollout(discard=0.3), placed.rollout(discard=0.3))
        handle = model.register_forward_hook(lambda *_: "mine")
        assert attrace.trace(model, **inputs).output == "mine"
        handle.remove()


def test_bad_questions() -> None:
    trace = traced(tiny.model("bert"), tiny.inputs())
    for wrong in ({"target": 7}, {"source": -8}, {"layers": [2]}, {"layers": []}, {"layers": [0, 0]}, {"heads": 4},
                  {"heads": "sum"}, {"heads": [1, 2]}, {"residual": 1.5}, {"residual": float("nan")}, {"discard": 1},
                  {"tolerance": -0.1}, {"segments": []}, {"segments": [(2, 2)]}, {"segments": [(0, 8)]}, {"target": []},
                  {"target": 0, "source": 1}):  # fmt: skip
        with pytest.raises(InputError, match=r"Expected .* Received"):
            trace.rollout(**wrong)
    with pytest.raises(ShapeError, match=r"\(7,\) or \(2, 7\)"):
        trace.rollout(target=np.ones(3))
    with pytest.raises(ShapeError, match="B=2 and n=7"):
        trace.ops[0].rmatvec(torch.ones(2, 6))
    for rows in ([7], [0.5], [-8]):
        with pytest.raises(InputError, match="query rows"):
            trace.ops[0].weights(rows)
    torch.testing.assert_close(trace.ops[0].weights([-1, 2]), trace.ops[0].weights()[:, :, [-1, 2]])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_nan_names_layer_and_token(backend: str) -> None:
    model = tiny.model("llama", backend)
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = torch.nan
    trace = traced(model, tiny.inputs())
    trace.ops[0].weights()
    with pytest.raises(NonFiniteError, match=r"layer 1 \(model\.layers\.1\.self_attn\), token 0, batch item 0"):
        trace.rollout()
