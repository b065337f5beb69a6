"""Layouts in which people write attention: whichever comes first, batch or heads, the map is read as (B, H, Q, T)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import attrace
from attrace.capture.layouts import axes_of_shape, axes_within, in_order, laid_out, whole
from attrace.errors import AttraceWarning, CaptureError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v, (B, N, H, D) -> (B, N, H * D)."""


class Layer(nn.Module):
    """Attention of a user's own between two projections; it says how many heads it has, or does not."""

    def __init__(self, attend: Attend, heads: int, width: int, *, says: bool = True) -> None:
        super().__init__()
        self.attend, self.count = attend, heads
        self.qkv, self.out = nn.Linear(heads * width, 3 * heads * width), nn.Linear(heads * width, heads * width)
        if says:
            self.num_heads = heads

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.count, x.shape[2] // self.count).unbind(2)
        return q, k, v

    def forward(self, input_ids: Tensor) -> Tensor:  # named like a model's, so that the batch is known
        y: Tensor = self.out(self.attend(*self.parts(input_ids)))
        return y

    def expected(self, x: Tensor) -> Tensor:
        q, k, _ = self.parts(x)
        return reference(q, k)


def reference(q: Tensor, k: Tensor) -> Tensor:
    """(B, N, H, D) -> (B, H, N, N)."""
    return torch.einsum("bqhd,bkhd->bhqk", q, k).div(q.shape[-1] ** 0.5).softmax(-1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The rows of any leading axes: (..., N, D) -> (..., N, D)."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def batch_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attended(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).flatten(2)


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attended(*(t.permute(2, 0, 1, 3) for t in (q, k, v))).permute(1, 2, 0, 3).flatten(2)


def heads_first_joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat(list(attended(*(t.permute(2, 0, 1, 3) for t in (q, k, v)))), -1)


def heads_times_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attended(*(torch.cat(t.unbind(2), 0) for t in (q, k, v)))
    return torch.cat(out.split(q.shape[0], 0), -1)


def heads_times_batch_viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attended(*(t.permute(2, 0, 1, 3).flatten(0, 1) for t in (q, k, v)))
    return out.view(q.shape[2], q.shape[0], *out.shape[1:]).permute(1, 2, 0, 3).flatten(2)


def batch_times_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attended(*(t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)))
    return out.view(q.shape[0], q.shape[2], *out.shape[1:]).transpose(1, 2).flatten(2)


def fused_one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    merged = (t.transpose(1, 2).flatten(0, 1).unsqueeze(1) for t in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(*merged)
    return out.view(q.shape[0], q.shape[2], *out.shape[2:]).transpose(1, 2).flatten(2)


def fused_heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = nn.functional.scaled_dot_product_attention(*(t.permute(2, 0, 1, 3) for t in (q, k, v)))
    return out.permute(1, 2, 0, 3).flatten(2)


def fused_in_five_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2).unsqueeze(1) for t in (q, k, v)))
    return out.squeeze(1).transpose(1, 2).flatten(2)


def einsum_by_position(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bqhd,bkhd->bqhk", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("bqhk,bkhd->bqhd", weights, v).flatten(2)


def einsum_with_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bqhd,bkhd->bqkh", q, k).div(q.shape[-1] ** 0.5).softmax(2)
    return torch.einsum("bqkh,bkhd->bqhd", weights, v).flatten(2)


def keys_upright(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = (k @ q.mT / q.shape[-1] ** 0.5).softmax(-2)
    return (v.mT @ weights).permute(0, 3, 1, 2).flatten(2)


def by_logarithm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).log_softmax(-1).exp()
    return (weights @ v).transpose(1, 2).flatten(2)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2)


def one_call_for_all_items(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(torch.vmap(attended, 1, 1))(q, k, v).flatten(2)


LAYOUTS = [
    batch_first,
    heads_first,
    heads_first_joined,
    heads_times_batch,
    heads_times_batch_viewed,
    batch_times_heads,
    fused_one_head,
    fused_heads_first,
    fused_in_five_axes,
    einsum_by_position,
    einsum_with_heads_last,
    keys_upright,
    by_logarithm,
    by_hand,
    one_call_for_all_items,
]


@pytest.mark.parametrize("attend", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width"),
    [(2, 5, 3, 4), (1, 5, 3, 4), (3, 5, 3, 4), (4, 5, 2, 8), (2, 5, 4, 8), (2, 4, 3, 4), (2, 6, 3, 2), (2, 3, 3, 3)],
)
def test_a_map_is_read_in_every_layout(
    attend: Attend, says: bool, batch: int, tokens: int, heads: int, width: int
) -> None:
    model = Layer(attend, heads, width, says=says).eval()
    x = torch.randn(batch, tokens, heads * width)
    with torch.no_grad():
        trace = attrace.trace(model, x)
        torch.testing.assert_close(trace.output, model.out(batch_first(*model.parts(x))))
        expected = model.expected(x)
    (op,) = trace.ops
    assert (op.shape, op.kind, op.windows) == ((batch, heads, tokens, tokens), "self", 1)
    torch.testing.assert_close(op.weights(), expected)
    torch.testing.assert_close(trace.rollout(residual=0.0).sum(-1), torch.ones(batch, tokens))


def queries_by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attended(q.flatten(1, 2), k[:, :, 0], v[:, :, 0])
    return out.reshape(q.shape).flatten(2)


def heads_by_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attended(q.transpose(1, 2).flatten(1, 2), k[:, :, 0], v[:, :, 0])
    return out.view(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("attend", [queries_by_heads, heads_by_queries], ids=lambda f: f.__name__)
def test_heads_that_share_their_keys_may_stand_among_the_queries(attend: Attend) -> None:
    model, x = Layer(attend, 3, 4).eval(), torch.randn(2, 5, 12)
    with torch.no_grad():
        (op,) = attrace.trace(model, x).ops
        q, k, _ = model.parts(x)
        torch.testing.assert_close(op.weights(), reference(q, k[:, :, :1].expand_as(k)))


def test_one_sequence_without_batch_and_heads() -> None:
    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attended(x, x, x) + nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(5, 4)
    ops = attrace.trace(One(), x).ops
    assert [op.shape for op in ops] == [(1, 1, 5, 5)] * 2
    for op in ops:
        torch.testing.assert_close(op.weights()[0, 0], (x @ x.T / 2).softmax(-1))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = attended(x, x, x)
        return attended(y, y, y)


def test_layers_without_projections_between_them() -> None:
    for shape in ((2, 5, 4), (2, 4, 4), (1, 4, 4)):
        x = torch.randn(shape)
        first = attended(x, x, x)
        ops = attrace.trace(Twice(), x).ops
        assert [op.shape for op in ops] == [(shape[0], 1, shape[1], shape[1])] * 2
        torch.testing.assert_close(ops[1].weights()[:, 0], (first @ first.mT / 2).softmax(-1))


# What is not attention among tokens


def among_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attended(q, k, v).flatten(2)


def among_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attended(*(t.permute(0, 2, 3, 1) for t in (q, k, v))).permute(0, 3, 1, 2).flatten(2)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Efficient attention (Shen et al., 2021): a softmax of the queries and one of the keys, no map of tokens."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return (q.softmax(-1) @ (k.softmax(-2).mT @ v)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("attend", [among_heads, among_channels, linear], ids=lambda f: f.__name__)
@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "width"), [(5, 3, 4), (4, 3, 4), (3, 3, 4), (3, 3, 3)])
def test_what_is_not_among_tokens_is_never_shown(
    attend: Attend, says: bool, tokens: int, heads: int, width: int
) -> None:
    x = torch.randn(2, tokens, heads * width)
    with pytest.raises(CaptureError, match=r"among (heads|channels)"):
        attrace.trace(Layer(attend, heads, width, says=says), x)
    full = Layer(batch_first, heads, width, says=says)
    mixed = nn.Sequential(full, Layer(attend, heads, width, says=says))
    with pytest.warns(AttraceWarning, match=r"1 of 2 layers"):
        (op,) = attrace.trace(mixed, x).ops
    torch.testing.assert_close(op.weights(), full.expected(x))


class Mixture(nn.Module):
    """A dense mixture of experts: each token weighs what the experts make of it."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        return torch.einsum("bne,bned->bnd", gates, torch.stack([expert(x) for expert in self.experts], 2))


@pytest.mark.parametrize("experts", [2, 4, 5])
def test_a_mixture_of_experts_is_no_map(experts: int) -> None:
    full, x = Layer(batch_first, 3, 4), torch.randn(2, 5, 12)
    with pytest.warns(AttraceWarning, match="among experts"):
        (op,) = attrace.trace(nn.Sequential(full, Mixture(12, experts)), x).ops
    torch.testing.assert_close(op.weights(), full.expected(x))


# Changed weights


def test_weights_are_those_that_the_values_saw() -> None:
    def attend(change: Callable[[Tensor], Tensor]) -> Attend:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (change(reference(q, k)) @ v.transpose(1, 2)).transpose(1, 2).flatten(2)

        return call

    kept = torch.ones(5, 5).tril()
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda a: a * kept / (a * kept).sum(-1, keepdim=True),
        lambda a: a * 2,
        lambda a: a.masked_fill(kept == 0, 0.0),
        lambda a: a.to(torch.float64).to(torch.float32),
    ]
    x = torch.randn(2, 5, 12)
    for change in changes:
        model = Layer(attend(change), 3, 4)
        (op,) = attrace.trace(model, x).ops
        torch.testing.assert_close(op.weights(), change(model.expected(x)))


@pytest.mark.parametrize("by_noise", [True, False])
def test_dropout_is_not_seen(by_noise: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = reference(q, k)
        if by_noise:
            weights = weights * torch.empty_like(weights).bernoulli_(0.5).div_(0.5)
        else:
            weights = nn.functional.dropout(weights, 0.5, training=True)
        return (weights @ v.transpose(1, 2)).transpose(1, 2).flatten(2)

    model, x = Layer(attend, 3, 4), torch.randn(2, 5, 12)
    with pytest.warns(AttraceWarning, match="dropout"):
        (op,) = attrace.trace(model, x).ops
    torch.testing.assert_close(op.weights(), model.expected(x))


@pytest.mark.parametrize("attend", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(0, 5, 12), (2, 0, 12)])
def test_nothing_to_attend_to_is_an_error(attend: Attend, shape: tuple[int, ...]) -> None:
    if attend is by_hand and not shape[1]:
        pytest.skip("a maximum over no keys fails in torch itself")
    if attend is one_call_for_all_items or (attend is heads_times_batch and not shape[0]):
        pytest.skip("torch takes no axis of size zero there")
    with pytest.raises(CaptureError):
        attrace.trace(Layer(attend, 3, 4), torch.zeros(shape))


# The arithmetic of strides


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.randoms(use_true_random=False), st.data())
def test_strides_tell_the_axes_of_a_view(sizes: list[int], random: object, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    dense = torch.arange(torch.Size(sizes).numel()).view(sizes)
    layout = laid_out(axes_of_shape(sizes), dense)
    assert layout is not None
    view = dense.permute(order)
    axes = axes_within(layout, view)
    assert axes is not None
    copy = view.contiguous()
    again = laid_out(axes, copy)
    assert again is not None
    start = data.draw(st.integers(0, len(sizes) - 1))
    flat = copy.flatten(start)
    axes = axes_within(again, flat)
    assert axes is not None
    wanted = [whole(axis, size) for axis, size in enumerate(sizes)]
    assert torch.equal(in_order(flat, axes, wanted), dense)
