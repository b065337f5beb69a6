"""The torch seam: see every attention call under any module of any library, and change nothing.

A dispatch mode sees the operators below autograd.  A fused kernel's call is recorded by its arguments; an unfused
one by its softmax, once that softmax is multiplied with values: what a call is decides, not what its module is
named.  The call stack tells which module it is.  All of it belongs to the recording thread alone and is gone when
the block ends, also after an error in the model.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from attrace.capture.torch_blocks import BlockInputs
from attrace.capture.torch_ops import QueryKeyAttention, SoftmaxAttention, TorchAttention
from attrace.capture.trace import Trace
from attrace.errors import CaptureError

aten = torch.ops.aten

# Position of the additive mask and of is_causal among the arguments; None: a keyword or absent.
FUSED: dict[Any, tuple[int | None, int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (None, 4),
    aten._scaled_dot_product_flash_attention.default: (None, 4),
    aten._scaled_dot_product_efficient_attention.default: (3, 6),
    aten._scaled_dot_product_cudnn_attention.default: (3, 6),
    aten._scaled_dot_product_fused_attention_overrideable.default: (3, 5),
}
SOFTMAX = {aten._softmax.default, aten._safe_softmax.default}
# A softmax may be copied, cast, masked, sliced or dropped out before it meets the values.
CARRIERS = {
    aten.clone.default,
    aten._to_copy.default,
    aten.native_dropout.default,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.where.self,
    aten.nan_to_num.default,
}
PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
PARTS: dict[Any, str] = {
    **dict.fromkeys(FUSED, "fused"),
    **dict.fromkeys(SOFTMAX, "softmax"),
    **dict.fromkeys(PRODUCTS, "product"),
    **dict.fromkeys(CARRIERS, "carrier"),
}


def storage_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


@dataclass
class PendingSoftmax:
    """A softmax that has not met its values yet, with the copies that keep its storages alive."""

    map: Tensor
    module: str
    carriers: list[Tensor]


class Recorder(TorchDispatchMode):
    """Fills a trace while the model runs under it."""

    def __init__(self, trace: Trace, model: nn.Module, *, blocks: BlockInputs | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._blocks = blocks
        self._values = blocks is not None
        self._thread = threading.get_ident()
        self._names = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
        self._running = False
        self._batch: int | None = None
        self._pending: dict[int, PendingSoftmax] = {}

    # Which module runs

    def _module(self) -> str:
        """The innermost module of the model on the call stack, by the first argument of its functions.

        Looked up for attention calls alone: hooks on every module would cost more than the rest of the recorder,
        switch off the fast paths that check for hooks, and run in other threads.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_argcount:
                first = frame.f_locals.get(frame.f_code.co_varnames[0])
                if (name := self._names.get(id(first))) is not None:
                    return name
            frame = frame.f_back
        return self._trace.model

    def enter_model(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # Another thread may run the same model while this hook is taken away, and then call it without kwargs.
        if threading.get_ident() != self._thread or kwargs is None:
            return
        self._running = True
        self._pending.clear()
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim]
        self._batch = tensors[0].shape[0] if tensors else None
        self._trace.begin(kwargs.get("attention_mask"))

    def leave_model(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running = False
            self._pending.clear()
            self._trace.output = output

    # What it calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # Every operator of the model comes by here: one look-up decides.
        part = PARTS.get(func)
        if part is None or not self._running:
            return out
        if part == "fused":
            with enable_reentrant_dispatch():  # so that detached tensors share their version counters
                self._fused(func, args, kwargs)
        elif part == "softmax":
            self._softmax(args, out)
        elif self._pending and part == "product":
            with enable_reentrant_dispatch():
                self._product(args)
        elif self._pending:
            self._carry(args, out)
        return out

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query, key, value = args[:3]
        bias_at, causal_at = FUSED[func]
        bias = kwargs.get("attn_mask") if bias_at is None else args[bias_at]
        self._record(
            QueryKeyAttention(
                name=self._module(),
                layer=len(self._trace.ops),
                shape=(query.shape[0], query.shape[1], query.shape[2], key.shape[2]),
                value=value.detach() if self._values else None,
                query=query.detach(),
                key=key.detach(),
                bias=None if bias is None else bias.detach(),
                causal=bool(args[causal_at]) if len(args) > causal_at else False,
                scale=kwargs.get("scale"),
            )
        )

    def _softmax(self, args: tuple[Any, ...], out: Tensor) -> None:
        dim = args[1]
        if out.ndim >= 3 and dim in (-1, out.ndim - 1):
            self._pending[storage_of(out)] = PendingSoftmax(out.detach(), self._module(), [])

    def _carry(self, args: tuple[Any, ...], out: Any) -> None:
        result = out[0] if isinstance(out, tuple) else out
        for arg in args:
            if isinstance(arg, Tensor) and (found := self._pending.get(storage_of(arg))):
                if result.shape == arg.shape:
                    found.carriers.append(result)
                    self._pending[storage_of(result)] = found
                return

    def _product(self, args: tuple[Any, ...]) -> None:
        for left, right in (args[-2:], args[-2:][::-1]):
            if found := self._pending.get(storage_of(left)):
                for key in [k for k, p in self._pending.items() if p is found]:
                    del self._pending[key]
                weights = self._as_map(found, left)
                if weights is not None:
                    batch, heads, length, keys = weights.shape
                    value = right.detach().reshape(batch, heads, keys, -1) if self._values else None
                    self._record(
                        SoftmaxAttention(
                            name=found.module,
                            layer=len(self._trace.ops),
                            shape=(batch, heads, length, keys),
                            value=value,
                            map=weights,
                        )
                    )
                return

    def _as_map(self, found: PendingSoftmax, used: Tensor) -> Tensor | None:
        """The softmax as (B, H, Q, T): as computed, or as used where a column (a sink) was cut off."""
        weights, whole = found.map, found.map.numel() == used.numel()
        if weights.ndim == 4 and whole:
            return weights
        if weights.ndim == 4 and used.shape[-2] == weights.shape[-2]:
            return used.detach().reshape(*weights.shape[:3], used.shape[-1])
        if weights.ndim == 3 and whole and self._batch and weights.shape[0] % self._batch == 0:  # (B * H, Q, T)
            return weights.reshape(self._batch, -1, *weights.shape[1:])
        self._trace.unread.append(f"{found.module} (a map of shape {tuple(weights.shape)})")
        return None

    def _record(self, op: TorchAttention) -> None:
        if self._blocks is not None:
            op.block = self._blocks.block_of(op.name, op.value)
        self._trace.ops.append(op)


@contextmanager
def record(model: nn.Module, *, values: bool = False) -> Iterator[Trace]:
    """Record the attention of every call of `model` inside the block.

    The model runs unchanged, under its own attention backend; its output is bit-identical and nothing is left on
    it afterwards, also after an error.  Query and key of each call are held until the trace goes (the map itself
    where the model computes one); `values=True` holds what contributions need besides: the values, and where the
    family is known the block's input.  Only the thread that opened the block is
    recorded.  An unfit model is a CaptureError.

    >>> import torch, attrace
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(1, 4, 8)
    >>> with attrace.record(layer) as trace:
    ...     _ = layer(x, x, x, need_weights=False)
    >>> trace.ops[0].weights().shape
    torch.Size([1, 2, 4, 4])
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"Expected a torch.nn.Module. Received: {type(model).__name__}.")
    trace = Trace(type(model).__name__)
    blocks = None
    if values:
        blocks = BlockInputs(model)
        trace.values, trace.family = True, blocks.family_of("")
    recorder = Recorder(trace, model, blocks=blocks)
    with ExitStack() as undo:
        for handle in blocks.watch() if blocks else ():
            undo.callback(handle.remove)
        handles = (
            model.register_forward_pre_hook(recorder.enter_model, with_kwargs=True, prepend=True),
            model.register_forward_hook(recorder.leave_model, prepend=True, always_call=True),
        )
        for handle in handles:
            undo.callback(handle.remove)
        undo.enter_context(recorder)
        yield trace


def trace(model: nn.Module, /, *args: Any, **inputs: Any) -> Trace:
    """Run the model once, unchanged, and return its trace: `record` around one call.

    Raises CaptureError where no attention was seen, with what was seen instead.

    >>> import torch, attrace
    >>> encoder = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(1, 4, 8)
    >>> attrace.trace(encoder, x, x, x, need_weights=False).ops[0].shape
    (1, 2, 4, 4)
    """
    with record(model) as recorded:
        model(*args, **inputs)
    recorded.check()
    return recorded
