"""Torch's fused Transformer layers, read from the arguments of their one operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from leftovers import leftovers, operators
from together import together
from torch import Tensor, nn

import attrace
from attrace.errors import CaptureError

LAYER, ATTENTION = "aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")

HIDDEN = torch.ones(6, 6, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 5 + [True], [False] * 3 + [True] * 3])  # longer than the longest sequence
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask": HIDDEN, "is_causal": True},
    "padded": {"src_key_padding_mask": PADDING},
    "both": {"mask": HIDDEN, "src_key_padding_mask": PADDING},
    "floats": {"mask": torch.zeros(6, 6).masked_fill(HIDDEN, -torch.inf)},
    "heads": {"mask": torch.stack([HIDDEN.roll(i, 1) & ~torch.eye(6, dtype=torch.bool) for i in range(8)])},
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def encoder(*, norm_first: bool = False, nested: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first, dtype=dtype)
    built = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval().requires_grad_(False)
    for parameter in built.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)  # layers start as copies, with biases of zero
    return built


@contextmanager
def slow_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def own_maps(model: nn.TransformerEncoder, x: Tensor, given: dict[str, Any]) -> list[Tensor]:
    """The weights that torch itself returns, layer by layer, with the fast path switched off."""
    maps = []
    mask, padding = given.get("mask"), given.get("src_key_padding_mask")
    with slow_path():
        for layer in model.layers:
            inner = layer.norm1(x) if layer.norm_first else x
            maps.append(
                layer.self_attn(inner, inner, inner, attn_mask=mask, key_padding_mask=padding,
                                need_weights=True, average_attn_weights=False)[1]
            )  # fmt: skip
            x = layer(x, src_mask=mask, src_key_padding_mask=padding)
    return maps


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(("norm_first", "nested"), [(False, False), (False, True), (True, False)])
def test_an_encoders_maps_are_those_of_the_slow_path(masks: str, norm_first: bool, nested: bool) -> None:
    model, given, x = encoder(norm_first=norm_first, nested=nested), MASKS[masks], torch.randn(2, 6, 16)
    plain, before = model(x, **given), leftovers(model)
    seen = operators(lambda: attrace.trace(model, x, **given))
    assert seen.count(LAYER) == 2
    assert ("aten::_nested_tensor_from_mask" in seen) == (nested and masks == "padded")
    trace = attrace.trace(model, x, **given)
    assert torch.equal(trace.output, plain)
    assert leftovers(model) == before
    assert [op.name for op in trace.ops] == ["layers.0.self_attn", "layers.1.self_attn"]
    ones = torch.ones(2, 6)
    for op in trace.ops:  # rows of padding are in no product that leaves them out of the map
        fused = op.weights().mean(1)
        torch.testing.assert_close(op.rmatvec(ones), fused.sum(1), atol=1e-5, rtol=0)
        torch.testing.assert_close(op.matvec(ones), fused.sum(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(op.weights([2, 5]), op.weights()[:, :, [2, 5]])
    real = ~given.get("src_key_padding_mask", torch.zeros(2, 6, dtype=torch.bool))
    for op, own in zip(trace.ops, own_maps(model, x, given), strict=True):
        assert (op.shape, op.kind) == ((2, 4, 6, 6), "self")
        for item in range(2):  # padded queries attend to what they like
            torch.testing.assert_close(op.weights()[item][:, real[item]], own[item][:, real[item]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("nested", [False, True])
def test_a_padded_batch_is_shown_in_the_callers_layout(nested: bool) -> None:  # rep-capture-nomaps-4
    model, x = encoder(nested=nested), torch.randn(2, 6, 16)
    trace = attrace.trace(model, x, src_key_padding_mask=PADDING)
    assert trace.valid is not None
    assert torch.equal(trace.valid, ~PADDING)
    for item, length in enumerate((5, 3)):
        alone = attrace.trace(model, x[item : item + 1, :length])
        for op, single in zip(trace.ops, alone.ops, strict=True):
            weights = op.weights()[item]
            assert (weights[:, :, length:] == 0).all()
            torch.testing.assert_close(weights[:, :length, :length], single.weights()[0], atol=1e-5, rtol=0)
            if nested:  # the packed run has no such rows
                assert (weights[:, length:] == 0).all()
        for options in ({}, {"discard": 0.3}):
            row = trace.rollout(target=1, **options)[item]
            torch.testing.assert_close(row[:length], alone.rollout(target=1, **options)[0], atol=1e-5, rtol=0)
            assert (row[length:] == 0).all()


@pytest.mark.parametrize("training", [False, True])
def test_a_stock_encoder_gives_one_map_a_layer(training: bool) -> None:  # rep-capture-nomaps-3
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).train(training)
    x = torch.randn(1, 4, 8)
    with torch.no_grad():
        assert (LAYER in operators(lambda: model(x))) is not training
        trace = attrace.trace(model, x)
        assert torch.equal(trace.output, model(x))
    assert [op.shape for op in trace.ops] == [(1, 2, 4, 4)] * 2
    for op, own in zip(trace.ops, own_maps(model, x, {}), strict=True):
        torch.testing.assert_close(op.weights(), own, atol=1e-5, rtol=0)


def test_an_additive_bias_is_read_as_the_fast_path_reads_it() -> None:
    # Not what its documentation says: the kernel hides every key whose bias is not zero.
    layer = nn.MultiheadAttention(16, 4, batch_first=True).eval().requires_grad_(False)
    x, bias = torch.randn(2, 6, 16), torch.where(torch.rand(2, 4, 6, 6) < 0.3, -1.0, 0.0)
    bias[..., 0] = 0.0

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer

        def forward(self, x: Tensor, mask: Tensor, kind: int) -> tuple[Tensor, Tensor]:
            return torch._native_multi_head_attention(
                x, x, x, 16, 4, layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias,
                mask, True, False, kind,
            )  # fmt: skip

    for mask, kind in ((bias, 2), (bias[0, 0], 0), (bias[:, 0, 0], 1)):
        trace = attrace.trace(Direct(), x, mask, kind)
        torch.testing.assert_close(trace.ops[0].weights(), trace.output[1], atol=1e-6, rtol=0)
        assert (trace.ops[0].weights() == 0).any()
        assert trace.ops[0].name == "inner"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_modules_alone(dtype: torch.dtype) -> None:
    layer = nn.MultiheadAttention(16, 4, batch_first=True, dtype=dtype).eval().requires_grad_(False)
    x = torch.randn(2, 6, 16, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for given in ({"need_weights": False}, {"average_attn_weights": False}, {"key_padding_mask": PADDING}):
        plain = layer(x, x, x, **given)
        assert ATTENTION in operators(lambda given=given: attrace.trace(layer, x, x, x, **given))
        trace = attrace.trace(layer, x, x, x, **given)
        assert torch.equal(trace.output[0], plain[0])
        weights = trace.ops[0].weights()
        assert weights.dtype == wide
        with slow_path():
            own = layer(x, x, x, **{**given, "need_weights": True, "average_attn_weights": False})[1]
        torch.testing.assert_close(weights, own.to(wide), atol=1e-5 if dtype != torch.bfloat16 else 1e-2, rtol=0)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6, dtype=wide))


def test_a_decoders_self_attention_takes_the_fast_path_too() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 2).eval()
    model.requires_grad_(False)
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 3, 16)
    plain = model(x, memory)
    trace = attrace.trace(model, x, memory)
    assert operators(lambda: attrace.trace(model, x, memory)).count(ATTENTION) == 2
    assert torch.equal(trace.output, plain)
    assert [(op.name, op.kind, op.shape[3]) for op in trace.ops] == [
        (f"layers.{i}.{name}", kind, keys)
        for i in range(2)
        for name, kind, keys in (("self_attn", "self", 6), ("multihead_attn", "cross", 3))
    ]
    own = [op.weights() for op in trace.ops]
    with slow_path():
        slow = [op.weights() for op in attrace.trace(model, x, memory).ops]
    for got, expected in zip(own, slow, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_the_users_own_nested_tensor_is_padded_to_its_longest() -> None:
    model = encoder()
    items = [torch.randn(5, 16), torch.randn(3, 16)]
    nested = torch.nested.nested_tensor(items)
    trace = attrace.trace(model.layers[0], nested)
    assert trace.ops[0].shape == (2, 4, 5, 5)
    assert trace.output.is_nested
    alone = attrace.trace(model.layers[0], items[1][None])
    torch.testing.assert_close(trace.ops[0].weights()[1, :, :3, :3], alone.ops[0].weights()[0], atol=1e-5, rtol=0)
    # One encoder's layout is not another's: the same model packs a padded batch of other lengths before.
    both = nn.ModuleList([encoder(nested=True), model.layers[0]])

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = both

        def forward(self, x: Tensor, nested: Tensor) -> Tensor:
            self.parts[0](x, src_key_padding_mask=PADDING[:, 1:])
            return self.parts[1](nested)

    shapes = [op.shape for op in attrace.trace(Two(), torch.randn(2, 5, 16), nested).ops]
    assert shapes == [(2, 4, 5, 5)] * 3


def test_attention_over_nested_tensors_elsewhere_is_refused() -> None:
    class Packed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    strided = torch.nested.nested_tensor([torch.randn(2, 5, 8), torch.randn(2, 3, 8)])
    jagged = torch.nested.nested_tensor([torch.randn(5, 2, 8), torch.randn(3, 2, 8)], layout=torch.jagged)
    for x in (strided, jagged.transpose(1, 2)):
        with pytest.raises(CaptureError, match=r"Packed.*nested tensor.*padded batch"):
            attrace.trace(Packed(), x)


@pytest.mark.parametrize("norm_first", [False, True])
def test_one_layer_as_the_whole_model_keeps_its_fast_path(norm_first: bool) -> None:
    # The layer looks for hooks on itself and leaves the fast path where it finds any.
    model, x = encoder(norm_first=norm_first).layers[0], torch.randn(2, 6, 16)
    plain, before = model(x, src_key_padding_mask=PADDING), leftovers(model)
    assert LAYER in operators(lambda: attrace.trace(model, x, src_key_padding_mask=PADDING))
    with attrace.record(model) as trace:
        model(x, src_key_padding_mask=PADDING)
    assert torch.equal(trace.output, plain)
    assert trace.valid is not None
    assert torch.equal(trace.valid, ~PADDING)
    with pytest.raises(RuntimeError):
        attrace.trace(model, x[..., :3])
    assert leftovers(model) == before


def test_fused_layers_in_two_threads_do_not_mix() -> None:
    models = [encoder().layers[0], encoder().layers[0], encoder(nested=True)]
    inputs = [torch.randn(2, 6, 16) for _ in models]
    given = [{}, {"src_key_padding_mask": PADDING}, {"src_key_padding_mask": PADDING}]
    expected = [attrace.trace(m, x, **k).rollout() for m, x, k in zip(models, inputs, given, strict=True)]

    def work(i: int) -> list[Tensor]:
        return [attrace.trace(models[i], inputs[i], **given[i]).rollout() for _ in range(10)]

    results = together(len(models), work)
    for i, rollout in enumerate(expected):
        assert all(torch.equal(got, rollout) for got in results[i])


def test_values_are_recorded_where_they_are_asked_for() -> None:
    model, x = encoder(norm_first=True), torch.randn(2, 6, 16)
    with attrace.record(model, values=True) as trace:
        model(x)
    layer = model.layers[0]
    own = nn.functional.linear(layer.norm1(x), layer.self_attn.in_proj_weight[32:], layer.self_attn.in_proj_bias[32:])
    torch.testing.assert_close(trace.ops[0].value.transpose(1, 2).flatten(2), own)
    assert attrace.trace(model, x).ops[0].value is None


def test_one_mask_is_held_once_for_all_heads_and_layers() -> None:
    trace = attrace.trace(encoder(), torch.randn(2, 6, 16), **MASKS["both"])
    assert trace.ops[0].bias.shape == (2, 1, 6, 6)
    assert trace.ops[0].bias.dtype == torch.bool
    assert trace.ops[1].bias is trace.ops[0].bias
