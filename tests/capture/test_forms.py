"""Forms in which a softmax meets its values: blocks, windows, other orders of axes, sums instead of products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attrace
from attrace.capture.layouts import Piece, whole
from attrace.capture.torch_forms import heads_among
from attrace.errors import CaptureError

B, H, N, Q, D = 2, 3, 4, 5, 8
"""Batch, heads, blocks, tokens of a block, head size."""


class Form(nn.Module):
    """Attention of a user's own, whose module says how many heads it has."""

    def __init__(self, attend: Callable[[Tensor], Tensor], heads: int | None = H) -> None:
        super().__init__()
        self.attend = attend
        if heads is not None:
            self.num_heads = heads

    def forward(self, input_ids: Tensor) -> Tensor:  # named like a model's, so that the batch is known
        return self.attend(input_ids)


def scores(x: Tensor) -> Tensor:
    return (x @ x.mT / D).softmax(-1)


def test_blocks_beside_the_heads() -> None:
    for shape, heads_at in (((B, N, H, Q, D), 2), ((B, H, N, Q, D), 1)):
        x = torch.randn(shape)
        (op,) = attrace.trace(Form(lambda x: scores(x) @ x), x).ops
        assert (op.shape, op.windows, op.kind) == ((B * N, H, Q, Q), N, "self")
        expected = scores(x).movedim(heads_at, 2).reshape(B * N, H, Q, Q)
        torch.testing.assert_close(op.weights(), expected)


def test_values_follow_the_blocks() -> None:
    x = torch.randn(B, H, N, Q, D)
    model = Form(lambda x: scores(x) @ x)
    with attrace.record(model, values=True) as trace:
        out = model(x)
    (op,) = trace.ops
    expected = out.movedim(1, 2).reshape(B * N, H, Q, D)
    torch.testing.assert_close(op.weights() @ op.value, expected)


@pytest.mark.parametrize(
    ("shape", "heads", "why"),
    [
        ((B, H, H, Q, D), H, "several axes may be that of the 3 heads"),
        ((B, N, N, Q, D), H, "no axis is that of the 3 heads"),
        ((B, N, H, Q, D), None, "no axis is that of the unknown heads"),
    ],
)
def test_blocks_that_cannot_be_told_from_heads_are_an_error(
    shape: tuple[int, ...], heads: int | None, why: str
) -> None:
    with pytest.raises(CaptureError, match=why):
        attrace.trace(Form(lambda x: scores(x) @ x, heads), torch.randn(shape))


def test_blocks_behind_merged_heads() -> None:
    x = torch.randn(B, H, N, Q, D)

    def attend(x: Tensor) -> Tensor:
        x = x.reshape(B * H, N, Q, D)
        return scores(x) @ x

    (op,) = attrace.trace(Form(attend), x).ops
    assert (op.shape, op.windows) == ((B * N, H, Q, Q), N)
    torch.testing.assert_close(op.weights(), scores(x).movedim(1, 2).reshape(B * N, H, Q, Q))


def test_three_axes_are_one_head_where_they_are_the_batch() -> None:
    for heads in (H, B, None):
        (op,) = attrace.trace(Form(lambda x: scores(x) @ x, heads), torch.randn(B, Q, D)).ops
        assert op.shape == (B, 1, Q, Q)
    (op,) = attrace.trace(Form(lambda x: scores(x.flatten(0, 1)) @ x.flatten(0, 1)), torch.randn(B, H, Q, D)).ops
    assert op.shape == (B, H, Q, Q)


def test_windows_in_the_batch_axis_are_counted() -> None:
    def windows(x: Tensor) -> Tensor:
        x = x.reshape(B * N, H, Q, D)
        return nn.functional.scaled_dot_product_attention(x, x, x) + scores(x) @ x

    trace = attrace.trace(Form(windows), torch.randn(B, N, H, Q, D))
    assert [(op.shape, op.windows) for op in trace.ops] == [((B * N, H, Q, Q), N)] * 2
    plain = attrace.trace(Form(lambda x: scores(x) @ x), torch.randn(B, H, Q, D))
    assert plain.ops[0].windows == 1


EINSUMS = {
    "values by position": lambda a, v: torch.einsum("bhqk,bkhd->bqhd", a, v.transpose(1, 2)).transpose(1, 2),
    "heads first": lambda a, v: torch.einsum("bhqk,bhkd->hbqd", a, v).transpose(0, 1),
    "laid out heads first": lambda a, v: (
        (a.transpose(0, 1).reshape(-1, Q, Q) @ v.transpose(0, 1).reshape(-1, Q, D)).view(H, B, Q, D).transpose(0, 1)
    ),
    "values from the left": lambda a, v: torch.einsum("bhkd,bhqk->bhqd", v, a),
}


@pytest.mark.parametrize("how", EINSUMS)
def test_other_orders_of_batch_and_heads(how: str) -> None:
    x = torch.randn(B, H, Q, D)
    model = Form(lambda x: EINSUMS[how](scores(x), x))
    (op,) = attrace.trace(model, x).ops
    torch.testing.assert_close(op.weights(), scores(x))
    torch.testing.assert_close(op.weights() @ x, model(x))


def test_a_changed_map_is_read_in_the_order_of_the_softmax() -> None:
    x = torch.randn(B, H, Q, D)
    kept = torch.ones(Q, Q).tril()

    def attend(x: Tensor) -> Tensor:
        weights = (scores(x) * kept).transpose(0, 1).reshape(-1, Q, Q)
        return weights @ x.transpose(0, 1).reshape(-1, Q, D)

    (op,) = attrace.trace(Form(attend), x).ops
    torch.testing.assert_close(op.weights(), scores(x) * kept)


def test_a_sink_is_one_column() -> None:
    x = torch.randn(B, H, Q, D)

    def with_sinks(count: int) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.cat([x @ x.mT / D, torch.ones(B, H, Q, count)], -1).softmax(-1)[..., :-count] @ x

    (op,) = attrace.trace(Form(with_sinks(1)), x).ops
    torch.testing.assert_close(op.weights() @ x, with_sinks(1)(x))
    assert (op.weights().sum(-1) < 1).all()
    with pytest.raises(CaptureError, match="only 5 columns met these values"):
        attrace.trace(Form(with_sinks(3)), x)


def test_a_map_masked_in_place_is_what_the_values_saw() -> None:
    x = torch.randn(B, H, Q, D)
    hidden = torch.ones(Q, Q, dtype=torch.bool).triu(1)
    model = Form(lambda x: scores(x).masked_fill_(hidden, 0.0) @ x)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            (op,) = attrace.trace(model, x).ops
        torch.testing.assert_close(op.weights(), scores(x).tril())
    with torch.inference_mode():
        torch.testing.assert_close(attrace.trace(model, x).ops[0].weights(), scores(x).tril())
    with pytest.raises(CaptureError, match="written to before"):
        attrace.trace(Form(lambda x: scores(x).mul_(2.0) @ x), x)


def test_a_sum_of_weighed_values_is_a_product() -> None:
    x = torch.randn(B, H, Q, D)
    (op,) = attrace.trace(Form(lambda x: (scores(x)[..., None] * x[..., None, :, :]).sum(-2)), x).ops
    torch.testing.assert_close(op.weights(), scores(x))


def test_one_query_whose_weights_stand_upright() -> None:
    x = torch.randn(B, Q, D)
    model = Form(lambda x: (x.sum(-1, keepdim=True) / D).softmax(1).transpose(1, 2) @ x, heads=None)
    (op,) = attrace.trace(model, x).ops
    assert op.shape == (B, 1, 1, Q)
    torch.testing.assert_close(op.weights()[:, 0] @ x, model(x))

    def written(x: Tensor) -> Tensor:
        weights = (x.sum(-1, keepdim=True) / D).softmax(1)
        out = weights.transpose(1, 2) @ x
        weights.zero_()
        return out

    with pytest.raises(CaptureError, match="written to since"):
        attrace.trace(Form(written, heads=None), x).ops[0].weights()


def test_values_of_each_querys_own_are_no_keys() -> None:
    x = torch.randn(B, H, Q, D)
    sampled = torch.randn(B, H, Q, N, D)
    with pytest.raises(CaptureError, match=r"Form \(weights of shape \(2, 3, 5, 4\) that each query spends on values"):
        attrace.trace(Form(lambda x: (x[..., :N].softmax(-1)[..., None] * sampled).sum(-2)), x)
    # A gate is no attention: what it weighs is not summed over its entries.
    gated = Form(lambda x: scores(x) @ x + (x.softmax(-1)[..., None] * sampled[..., :1, :6]).sum(-1))
    assert len(attrace.trace(gated, x).ops) == 1


@pytest.mark.parametrize("how", ["padded", "joined"])
def test_a_map_rearranged_before_its_values_is_not_passed_over(how: str) -> None:
    def attend(x: Tensor) -> Tensor:
        whole = scores(x) @ x
        band = scores(x[..., :4, :])
        if how == "padded":
            return whole + nn.functional.pad(band, (0, 1, 0, 1)) @ x
        return whole + torch.cat([band, band[..., :1]], -1)[..., :1, :] @ x

    with pytest.raises(
        CaptureError, match=r"Form \(a map of shape \(2, 3, 4, 4\), padded or joined before its values\)"
    ):
        attrace.trace(Form(attend), torch.randn(B, H, Q, D))


def test_sizes_tell_heads_where_they_can() -> None:
    assert heads_among((B, H), H, B) == heads_among((B, H), None, None) == (whole(1, H), "")
    assert heads_among((H, B), H, B) == (whole(0, H), "")
    assert heads_among((B * H,), H, None) == heads_among((B * H,), None, B) == ((Piece(0, 1, H, H),), "")
    assert heads_among((B * H, N), H, B) == ((Piece(0, 1, H, H),), "")
    assert heads_among((B,), H, B) == ((), "")
    assert heads_among((H, B), None, B)[1] == ", whose batch is not its first axis"
