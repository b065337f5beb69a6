"""Attention kernels of other libraries: read where their layout is known, refused by name where not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attrace
from attrace.capture import torch_external
from attrace.errors import AttraceWarning, CaptureError


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """(B, length, heads, size), in the order of the kernels."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous()


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    """Stand-ins with the schemas of xformers' and flash-attention's operators, and one of nobody's."""
    library = torch.library.Library("standin", "DEF")
    library.define(
        "efficient_attention_forward_cutlass(Tensor query, Tensor key, Tensor value, Tensor? attn_bias,"
        " Tensor? seqstart_q, Tensor? seqstart_k, int? max_seqlen_q, float dropout_p, bool compute_logsumexp,"
        " int custom_mask_type, float? scale, Tensor? seqlen_k, int? window_size) -> (Tensor, Tensor)"
    )
    library.define(
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal,"
        " int window_size_left, int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax)"
        " -> (Tensor, Tensor)"
    )
    library.define("attention(Tensor query, Tensor key, Tensor value) -> Tensor")

    def cutlass(*args: Any) -> tuple[Tensor, Tensor]:
        query, key, value, bias = args[:4]
        return attend(query, key, value, bias, args[9] > 0, args[10]), query.new_zeros(1)

    def flash(*args: Any) -> tuple[Tensor, Tensor]:
        return attend(*args[:3], None, args[5], args[4]), args[0].new_zeros(1)

    library.impl("efficient_attention_forward_cutlass", cutlass, "CPU")
    library.impl("_flash_attn_forward", flash, "CPU")
    library.impl("attention", lambda q, k, v: attend(q, k, v, None, False, None), "CPU")
    yield torch.ops.standin
    library._destroy()


class Block(nn.Module):
    """A DINOv2-style block whose attention is a call of an external kernel."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        out = self.call(q, k, v)
        return (out[0] if isinstance(out, tuple) else out).flatten(2)


def expected(block: Block, x: Tensor, *, causal: bool = False, scale: float = 8**-0.5, bias: Any = 0.0) -> Tensor:
    q, k, _ = (t.transpose(1, 2) for t in block.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2))
    scores = q @ k.mT * scale + bias
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1)


BIAS = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("how", ["plain", "scaled", "causal", "bias", "flash", "flash-causal"])
def test_a_known_kernel_is_recomputed_from_its_arguments(how: str, kernels: Any) -> None:  # rep-capture-nomaps-5
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if how.startswith("flash"):
            return kernels._flash_attn_forward(q, k, v, 0.0, 0.3, "causal" in how, -1, -1, 0.0, None, False)
        bias, kind, scale = BIAS if how == "bias" else None, int(how == "causal"), 0.7 if how == "scaled" else None
        return kernels.efficient_attention_forward_cutlass(
            q, k, v, bias, None, None, None, 0.0, False, kind, scale, None, None
        )

    torch.manual_seed(0)
    block, x = Block(call).requires_grad_(False), torch.randn(2, 5, 16)
    block.qkv.weight.mul_(3)
    trace = attrace.trace(block, x)
    assert torch.equal(trace.output, block(x))
    assert [(op.name, op.shape, op.kind) for op in trace.ops] == [("Block", (2, 2, 5, 5), "self")]
    scale = {"scaled": 0.7, "flash": 0.3, "flash-causal": 0.3}.get(how, 8**-0.5)
    own = expected(block, x, causal="causal" in how, scale=scale, bias=BIAS if how == "bias" else 0.0)
    torch.testing.assert_close(trace.ops[0].weights(), own, atol=1e-5, rtol=0)
    block.qkv(x)  # what was recorded belongs to the trace
    torch.testing.assert_close(trace.ops[0].weights(), own, atol=1e-5, rtol=0)


def test_what_is_not_known_of_a_kernel_is_refused_by_name(kernels: Any) -> None:
    x = torch.randn(2, 5, 16)
    cutlass, flash = kernels.efficient_attention_forward_cutlass, kernels._flash_attn_forward
    starts = torch.tensor([0, 5])
    for call, said in (
        (kernels.attention, r"the kernel standin::attention, whose layout is not known"),
        (
            lambda q, k, v: cutlass(q, k, v, None, starts, starts, 5, 0.0, False, 0, None, None, None),
            "seqstart_k, seqstart_q in the kernel",
        ),
        (lambda q, k, v: flash(q, k, v, 0.0, 0.3, False, 3, 0, 0.0, None, False), "window_size_left in the kernel"),
        (lambda q, k, v: flash(q, k, v, 0.0, 0.3, False, -1, -1, 30.0, None, False), "softcap in the kernel"),
        (
            lambda q, k, v: flash(q, k, v, 0.0, 0.3, False, -1, -1, 0.0, torch.ones(2), False),
            "alibi_slopes in the kernel",
        ),
    ):
        with pytest.raises(CaptureError, match=rf"Received from Block: Block \(.*{said}"):
            attrace.trace(Block(call), x)

    def shorter(kind: int) -> Block:
        return Block(
            lambda q, k, v: cutlass(q[:, :3], k, v, None, None, None, None, 0.0, False, kind, None, None, None)
        )

    trace = attrace.trace(shorter(0), x)
    assert [(op.shape, op.kind) for op in trace.ops] == [((2, 2, 3, 5), "cross")]
    library_like = torch_external.read(
        cutlass.default, (*(torch.zeros(1, n, 2, 8) for n in (3, 5, 5)), None, None, None, None, 0.0, False, 1), {}
    )
    assert isinstance(library_like, str)
    assert "a causal map of 3 queries and 5 keys in the kernel" in library_like


def test_dropout_inside_a_kernel_is_warned_of(kernels: Any) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return kernels._flash_attn_forward(q, k, v, 0.5, 8**-0.5, False, -1, -1, 0.0, None, False)

    block, x = Block(call), torch.randn(2, 5, 16)
    with pytest.warns(AttraceWarning, match="dropout was on"):
        trace = attrace.trace(block, x)
    torch.testing.assert_close(trace.ops[0].weights(), expected(block, x).detach(), atol=1e-5, rtol=0)
