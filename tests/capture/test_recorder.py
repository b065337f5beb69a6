"""The recorder on models of a user's own, and on what cannot be read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tiny
import torch
from tiny import traced
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import attrace
from attrace.errors import AttraceWarning, CaptureError, InputError, NonFiniteError, ShapeError
from attrace.ops.attention import naive


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

    with pytest.raises(CaptureError, match=r"Blocks \(a map of shape \(2, 3, 4, 5, 5\), of which no axis"):
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
    with pytest.warns(AttraceWarning, match="dropout was on"):
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


@pytest.mark.parametrize("length", [1, 7, 127, 128, 129, 200])
def test_products_of_short_and_long_maps_are_the_same_sum(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    query, key = (torch.randn(2, 4, length, 8, generator=generator) for _ in "qk")

    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, key, is_causal=True)

    op = attrace.trace(Attention(), query, key).ops[0]
    weights = naive.attention_weights(query.double().numpy(), key.double().numpy(), causal=True)
    r = torch.rand(2, length, 3, generator=generator, dtype=torch.float64)
    got = op.rmatvec(r).numpy()
    assert got == pytest.approx(np.einsum("bqm,bhqt->btm", r.numpy(), weights) / 4, abs=1e-6)


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "masked": lambda a: a.masked_fill_(torch.eye(5, dtype=torch.bool), 0.0),
    "set": lambda a: a[..., 0].fill_(0.0),
    "copied into": lambda a: a.copy_(a.softmax(-1)),
    "by index": lambda a: a.index_fill_(-1, torch.tensor([1]), 0.0),
    "divided": lambda a: a.div_(2.0),
    "into its own storage": lambda a: torch.mul(a, 2.0, out=a),
}


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "a copy"])
def test_a_map_written_to_before_its_values_is_read_so_or_refused(change: str, *, copied: bool) -> None:
    def changed(a: Tensor) -> Tensor:
        a = a.clone() if copied else a
        IN_PLACE[change](a)
        return a

    x = torch.randn(1, 2, 5, 8)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            model = Custom(changed)
            expected = model(x)
            if change == "masked":
                torch.testing.assert_close(attrace.trace(model, x).ops[0].weights() @ x, expected)
            else:
                with pytest.raises(CaptureError, match="written to"):
                    attrace.trace(model, x)


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e9, -65504.0])
@pytest.mark.parametrize("fused", [True, False])
def test_a_row_masked_by_a_low_number_is_zero(low: float, *, fused: bool) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            if fused:
                return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            return (x @ x.mT * 8**-0.5 + mask).softmax(-1) @ x

    x, mask = torch.randn(2, 3, 5, 8), torch.zeros(2, 1, 5, 5)
    mask[1, :, 2] = low
    mask[0, :, :, 4] = low
    weights = attrace.trace(Masked(), x, mask).ops[0].weights()
    expected = (x @ x.mT * 8**-0.5 + mask).softmax(-1)
    expected[1, :, 2] = 0
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize(
    ("size", "spread"), [(1e4, 1.0), (1e4, 7e-3), (1e6, 7e-3), (1e6, 1e-3), (1e9, 7e-3), (1e9, 1e-4), (1e13, 1e-3)]
)
def test_large_scores_alone_are_no_mask(size: float, spread: float) -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor, key: Tensor) -> Tensor:
            return (x @ key.mT).softmax(-1) @ x

    x = torch.ones(1, 2, 5, 8)
    key = -size * torch.linspace(1, 1 + spread, 5)[:, None].expand(1, 2, 5, 8)
    torch.testing.assert_close(
        attrace.trace(Large(), x, key).ops[0].weights(), torch.eye(5)[0].expand(1, 2, 5, 5), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_a_softmax_in_half_precision_sum_to_one(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 300, 8, dtype=dtype)
    weights = attrace.trace(Custom(lambda a: a), x).ops[0].weights()
    own = (x @ x.mT).softmax(-1)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 300), rtol=0, atol=1e-6)
    torch.testing.assert_close(weights, own.float(), rtol=2e-2, atol=0)
    halved = attrace.trace(Custom(lambda a: a * 0.5), x).ops[0].weights()
    torch.testing.assert_close(halved, own.float() / 2)


def test_layers_that_expand_one_mask_share_it() -> None:
    class Layers(nn.Module):
        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            for _ in range(3):
                x = F.scaled_dot_product_attention(x, x, x, attn_mask=seen)
            return F.scaled_dot_product_attention(x, x, x, attn_mask=seen.roll(1, -1))

    length = 300
    x = torch.randn(1, 2, length, 8)
    seen = torch.rand(1, 1, length, length) < 0.5
    trace = attrace.trace(Layers(), x, seen)
    biases = [op.bias.untyped_storage().data_ptr() for op in trace.ops]
    assert biases[0] == biases[1] == biases[2] != biases[3]
    for op, mask in zip(trace.ops, [seen, seen, seen, seen.roll(1, -1)], strict=True):
        scores = (op.query @ op.key.mT * 8**-0.5).masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(op.weights(), scores.softmax(-1))


# Sizes that could be taken for one another


SAME_SIZES = [(2, 4, 8, 8), (1, 8, 8, 8), (4, 2, 8, 8), (8, 1, 8, 8)]


@pytest.mark.parametrize(("batch", "heads", "length", "width"), SAME_SIZES)
@pytest.mark.parametrize("training", [False, True])
def test_sequence_first_attention_whose_sizes_are_all_the_same(
    batch: int, heads: int, length: int, width: int, *, training: bool
) -> None:
    layer = nn.MultiheadAttention(width, heads, batch_first=False).train(training)
    x = torch.randn(length, batch, width)
    trace = attrace.trace(layer, x, x, x, need_weights=False)
    expected = layer(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(trace.ops[0].weights(), expected)


@pytest.mark.parametrize(("batch", "width", "length"), [(2, 8, 5), (2, 8, 8), (1, 8, 8), (8, 8, 8)])
@pytest.mark.parametrize("fused", [False, True])
def test_channels_first_with_one_head(batch: int, width: int, length: int, *, fused: bool) -> None:
    """As in self-attention GANs: projections are convolutions, (B, C, N)."""

    class ChannelsFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Conv1d(width, width, 1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.query(x), self.key(x), self.value(x)
            if fused:
                return F.scaled_dot_product_attention(q.mT[:, None], k.mT[:, None], v.mT[:, None], scale=1.0)[:, 0].mT
            return v @ (q.mT @ k).softmax(-1).mT

    model, x = ChannelsFirst(), torch.randn(batch, width, length)
    trace = attrace.trace(model, x)
    weights = trace.ops[0].weights()
    torch.testing.assert_close(weights[:, 0], (model.query(x).mT @ model.key(x)).softmax(-1))
    torch.testing.assert_close(weights[:, 0] @ model.value(x).mT, trace.output.mT)
