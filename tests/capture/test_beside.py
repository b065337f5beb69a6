"""Attention among channels or among layers: told, never shown as a map of tokens; sinks that come after the values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from measured import built, measure
from tiny import traced
from torch import Tensor, nn

import attrace
from attrace.capture.beside import beside_tokens
from attrace.errors import AttraceWarning, CaptureError


class Channels(nn.Module):
    """Cross-covariance attention (XCiT) on (B, N, C), or on an image (B, C, h, w)."""

    def __init__(self, width: int = 16, heads: int = 4, *, fused: bool = False, last: bool = True) -> None:
        super().__init__()
        self.num_heads, self.fused, self.last = heads, fused, last
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x if self.last else x.flatten(2).mT
        batch, count, width = tokens.shape
        q, k, v = self.qkv(tokens).reshape(batch, count, 3, self.num_heads, -1).permute(2, 0, 3, 4, 1)
        fused = nn.functional.scaled_dot_product_attention
        y = fused(q, k, v) if self.fused else (q @ k.mT).softmax(-1) @ v
        y = y.permute(0, 3, 1, 2).reshape(batch, count, width)
        return y if self.last else y.mT.reshape(x.shape)


class Tokens(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("given", "heads", "last"), [((2, 9, 16), 4, True), ((2, 9, 16), 1, True), ((2, 16, 3, 5), 4, False)]
)
def test_attention_among_channels_is_refused(given: tuple[int, ...], heads: int, last: bool, fused: bool) -> None:
    model = nn.Sequential(Channels(heads=heads, fused=fused, last=last))
    with pytest.raises(CaptureError, match=r"Expected attention among tokens .* among channels \(0\)"):
        attrace.trace(model, torch.randn(given))


@pytest.mark.parametrize("fused", [True, False])
def test_channels_between_tokens_are_told_with_how_much_was_seen(fused: bool) -> None:
    model = nn.Sequential(Tokens(), Channels(fused=fused), Tokens(), Channels(fused=fused))
    x = torch.randn(2, 9, 16)
    with pytest.warns(AttraceWarning, match=r"among tokens is 2 of 4 layers .* among channels \(1, 3\)"):
        trace = attrace.trace(model, x)
    assert [op.shape for op in trace.ops] == [(2, 4, 9, 9)] * 2
    assert torch.equal(trace.output, model(x))
    torch.testing.assert_close(trace.rollout(target=0).sum(-1), torch.ones(2))


@pytest.mark.parametrize(
    ("given", "shape", "width", "expected"),
    [
        ((2, 196, 128), (2, 4, 32, 32), 196, "channels"),
        ((2, 14, 14, 128), (2, 4, 32, 32), 196, "channels"),
        ((2, 128, 14, 14), (2, 4, 32, 32), 196, "channels"),
        ((2, 196, 128), (2, 4, 196, 196), 32, ""),
        ((2, 128, 14, 14), (2, 1, 196, 196), 128, ""),  # one head over an image
        ((2, 196, 128), (2, 4, 196, 49), 32, ""),  # keys of fewer tokens
        ((2, 32, 128), (2, 4, 32, 32), 32, ""),  # as many tokens as channels of a head: cannot be told
        ((8, 49, 96), (8, 3, 49, 49), 32, ""),  # windows
        ((2, 7, 3, 32), (2, 7, 1, 3), 32, "layers"),
        ((2, 7, 3, 32), (2, 4, 7, 7), 8, ""),
        ((2, 4, 1, 8), (2, 4, 1, 1), 8, ""),  # given in heads
        ((), (2, 4, 32, 32), 196, ""),
        ((2,), (2, 4, 32, 32), 196, ""),
    ],
)
def test_what_is_told_from_shapes(
    given: tuple[int, ...], shape: tuple[int, int, int, int], width: int, expected: str
) -> None:
    assert beside_tokens(given, shape, width, heads=4, tokens=7) == expected


def test_a_module_that_convolves_may_have_its_channels_first() -> None:
    class Along(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Conv1d(8, 24, 1)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, 1)
            out: Tensor = v @ (q.mT @ k).softmax(-1).mT
            return out

    (op,) = attrace.trace(nn.Sequential(Along()), torch.randn(2, 8, 5)).ops
    assert op.shape == (2, 1, 5, 5)


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_attention_over_earlier_layers_is_told() -> None:
    model, batch = built("inkling2_text")
    with pytest.warns(AttraceWarning, match=r"among tokens is 2 of 6 layers .*among layers \(layers\.0\.mlp_input"):
        trace = traced(model, batch)
    assert [op.name for op in trace.ops] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert float(trace.rollout(target=-1).sum(-1).max()) < 1  # its sinks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["granite_swa", "granitemoe_swa"])
def test_sinks_applied_after_the_values_leave_rows_short(kind: str) -> None:
    model, batch = built(kind)
    sinks = next(part for name, part in model.named_modules() if name.endswith("self_attn")).sinks
    live = batch["attention_mask"][:, None].expand(2, 4, -1).bool()
    sinks.data.fill_(-1e4)
    whole = traced(model, batch).ops[0].weights()
    torch.testing.assert_close(whole.sum(-1)[live], torch.ones(int(live.sum())))
    sinks.data.fill_(1e4)
    assert float(traced(model, batch).ops[0].weights()[live].abs().max()) == 0
    assert measure(kind)["evidence"] == {"probing": 2}  # and between the two


def test_a_sink_module_without_a_factor_is_read_as_it_is() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks, self.num_heads = nn.Parameter(torch.zeros(2)), 2

        def forward(self, x: Tensor) -> Any:
            heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
            scores = torch.cat([heads @ heads.mT, self.sinks.reshape(1, 2, 1, 1).expand(len(x), 2, x.shape[1], 1)], -1)
            return (scores.softmax(-1)[..., :-1] @ heads).mul(0.5).transpose(1, 2).flatten(2)

    x = torch.randn(2, 5, 8)
    weights = attrace.trace(Plain(), x).ops[0].weights()
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    expected = torch.cat([heads @ heads.mT, torch.zeros(2, 2, 5, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(weights, expected)
