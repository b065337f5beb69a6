"""The torch seam: see every attention call under any module of any library, and change nothing.

A dispatch mode sees the operators below autograd.  A fused kernel's call is recorded by its arguments; an unfused
one by its softmax, once that softmax is multiplied with values: what a call is decides, not what its module is
named.  The call stack tells which module it is.  All of it belongs to the recording thread alone and is gone when
the block ends, also after an error in the model.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from attrace.capture import observed
from attrace.capture.torch_blocks import BlockInputs
from attrace.capture.torch_ops import QueryKeyAttention, SoftmaxAttention, TorchAttention, version_of
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
# Arguments of a model's forward whose first axis is the batch.
BATCHED = ("input_ids", "inputs_embeds", "attention_mask", "decoder_input_ids", "pixel_values", "input_features")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead")
# Arguments of an attention module's forward that hold a second stream.
SECOND_STREAMS = ("key_value_states", "encoder_hidden_states", "encoder_states", "memory")
PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
PARTS: dict[Any, str] = {
    **dict.fromkeys(FUSED, "fused"),
    **dict.fromkeys(SOFTMAX, "softmax"),
    **dict.fromkeys(PRODUCTS, "product"),
    **dict.fromkeys(CARRIERS, "carrier"),
}
PARTS = {**dict.fromkeys(observed.PARTS, "seen"), **PARTS}


def storage_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def is_transposed(tensor: Tensor) -> bool:
    """Whether the last two axes lie in memory the other way round."""
    return tensor.ndim > 1 and tensor.stride(-1) > tensor.stride(-2)


@dataclass(frozen=True)
class Caller:
    """The module that makes a call, and what its arguments say of it."""

    name: str
    heads: int | None = None
    cross: bool | None = None
    """Whether keys come from another stream than queries; None where the arguments do not tell."""


@dataclass
class PendingSoftmax:
    """A softmax that has not met its values yet, with the copies that keep its storages alive."""

    map: Tensor
    version: int
    caller: Caller
    carriers: dict[int, bool] = field(default_factory=dict)
    """Storage -> whether keys and queries change places in it, compared with how it lies in memory."""
    alive: list[Tensor] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Fills a trace while the model runs under it."""

    def __init__(self, trace: Trace, modules: dict[str, nn.Module], *, blocks: BlockInputs | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._modules = modules
        self._blocks = blocks
        self._values = blocks is not None
        self._thread = threading.get_ident()
        self._names = {id(module): name or trace.model for name, module in modules.items()}
        self._running = False
        self._batch: int | None = None
        self._pending: dict[int, PendingSoftmax] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without torch's guard against compilation inside a dispatch, which costs a quarter of the recording."""
        return False

    # Which module runs

    def _caller(self) -> Caller:
        """The innermost module of the model on the call stack, by the first argument of its functions.

        Looked up for attention calls alone: hooks on every module would cost more than the rest of the recorder,
        switch off the fast paths that check for hooks, and run in other threads.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_argcount:
                local = frame.f_locals
                module = local.get(code.co_varnames[0])
                name = self._names.get(id(module))
                if name is not None:
                    if code.co_name != "forward" or not isinstance(module, nn.Module):
                        frame = self._forward_of(module, frame)
                        local = {} if frame is None else frame.f_locals
                    return Caller(name, heads_of(module), is_cross(local))
            frame = frame.f_back
        return Caller(self._trace.model)

    def _forward_of(self, module: Any, frame: FrameType) -> FrameType | None:
        """The frame of the module's own forward, from a function that it called with itself."""
        outer: FrameType | None = frame
        while outer is not None:
            if outer.f_code.co_name == "forward" and outer.f_locals.get("self") is module:
                return outer
            outer = outer.f_back
        return None

    def enter_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # Another thread may run the same model while this hook is taken away, and then call it without kwargs.
        if threading.get_ident() != self._thread or kwargs is None:
            return
        self._running = True
        self._pending.clear()
        given = named_arguments(model, args, kwargs)
        self._batch = next((v.shape[0] for k in BATCHED if isinstance(v := given.get(k), Tensor) and v.ndim), None)
        self._trace.begin(given.get("attention_mask"))
        if self._trace.seen is None or not (self._trace.seen.steps or self._trace.seen.sizes):
            self._trace.seen = observed.Observed.of(given)

    def leave_model(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running = False
            self._pending.clear()
            self._trace.output = output
            if self._trace.seen is not None:
                self._trace.seen.end(self._modules, {op.name for op in self._trace.ops})

    # What it calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and is_composite(func):
            # Below inference mode composite operators arrive whole; they are made of the ones that are known here.
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        # Every operator of the model comes by here: one look-up decides.
        part = PARTS.get(func)
        if part is None or not self._running:
            return out
        if func in observed.PARTS:
            self._see(func, args, out)
        if part == "fused":
            with enable_reentrant_dispatch():  # so that detached tensors share their version counters
                self._fused(func, args, kwargs)
        elif part == "softmax":
            self._softmax(args, out)
        elif self._pending and part == "product":
            with enable_reentrant_dispatch():
                self._product(args)
        elif self._pending and part == "carrier":
            self._carry(args, out)
        return out

    def _see(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        if self._trace.seen is not None and not self._trace.seen.ended:
            name = "" if func in observed.JOINS else self._caller().name
            self._trace.seen.see(func, args, out, name=name, at=len(self._trace.ops), modules=self._modules)

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query, key, value = args[:3]
        bias_at, causal_at = FUSED[func]
        bias = kwargs.get("attn_mask") if bias_at is None else args[bias_at]
        caller = self._caller()
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        self._record(
            QueryKeyAttention(
                name=caller.name,
                layer=len(self._trace.ops),
                shape=shape,
                kind=kind_of(caller, shape),
                value=value.detach() if self._values else None,
                query=query.detach(),
                key=key.detach(),
                bias=None if bias is None else bias.detach(),
                is_causal=bool(args[causal_at]) if len(args) > causal_at else False,
                scale=kwargs.get("scale"),
            )
        )

    def _softmax(self, args: tuple[Any, ...], out: Tensor) -> None:
        dim = args[1]
        if out.ndim >= 3 and dim in (-1, out.ndim - 1):
            with enable_reentrant_dispatch():
                kept = out.detach()
            found = PendingSoftmax(kept, version_of(kept), self._caller())
            found.carriers[storage_of(out)] = is_transposed(out)
            self._pending[storage_of(out)] = found

    def _carry(self, args: tuple[Any, ...], out: Any) -> None:
        result = out[0] if isinstance(out, tuple) else out
        for arg in args:
            if isinstance(arg, Tensor) and (found := self._pending.get(storage_of(arg))):
                if result.shape == arg.shape and storage_of(result) != storage_of(arg):
                    turned = found.carriers[storage_of(arg)] ^ is_transposed(arg) ^ is_transposed(result)
                    found.carriers[storage_of(result)] = turned
                    found.alive.append(result)
                    self._pending[storage_of(result)] = found
                return

    def _product(self, args: tuple[Any, ...]) -> None:
        """A batched product that takes a pending softmax from the left, A V, or turned from the right, V' A'."""
        left, right = args[-2:]
        for used, other, turned in ((left, right, False), (right, left, True)):
            if found := self._pending.get(storage_of(used)):
                other_way = found.carriers[storage_of(used)] ^ is_transposed(used) ^ turned
                twice = self._pending.get(storage_of(other)) is not None
                for key in found.carriers:
                    self._pending.pop(key, None)
                weights = None if other_way or twice else self._as_map(found, used.mT if turned else used)
                if weights is None:
                    shape = tuple(found.map.shape)
                    why = "summed over its queries" if other_way else f"a map of shape {shape}"
                    self._trace.unread.append(f"{found.caller.name} ({'multiplied with a map' if twice else why})")
                    return
                batch, heads, length, keys = weights.shape
                value = (other.mT if turned else other).detach()
                self._record(
                    SoftmaxAttention(
                        name=found.caller.name,
                        layer=len(self._trace.ops),
                        shape=(batch, heads, length, keys),
                        kind=kind_of(found.caller, (batch, heads, length, keys)),
                        value=value.reshape(batch, heads, keys, -1) if self._values else None,
                        map=weights,
                        version=version_of(weights),
                    )
                )
                return

    def _as_map(self, found: PendingSoftmax, used: Tensor) -> Tensor | None:
        """The map that multiplied the values, (B, H, Q, T), before dropout; None where it has another form."""
        length, keys = found.map.shape[-2:]
        if used.shape[-2] != length or used.shape[-1] > keys or version_of(found.map) != found.version:
            return None
        axes = self._batch_and_heads(found)
        if axes is None or used.numel() != axes[0] * axes[1] * length * used.shape[-1]:
            return None
        weights = found.map.reshape(*axes, length, keys)
        as_used = used.detach().reshape(*axes, length, used.shape[-1])
        if used.shape[-1] == keys and (same(weights, as_used) or is_dropout_of(weights, as_used)):
            return weights
        return as_used  # masked, cut (a sink) or scaled after the softmax: this is what the values saw

    def _batch_and_heads(self, found: PendingSoftmax) -> tuple[int, int] | None:
        """B and H of a softmax: (B, H, Q, T), or (B * H, Q, T)."""
        shape, batch = found.map.shape, self._batch
        if len(shape) == 4:
            swapped = batch is not None and shape[0] != batch and shape[1] == batch
            return None if swapped else (shape[0], shape[1])
        heads = found.caller.heads
        if len(shape) == 3 and heads is None and batch and shape[0] % batch == 0:
            heads = shape[0] // batch
        return (shape[0] // heads, heads) if len(shape) == 3 and heads and shape[0] % heads == 0 else None

    def _record(self, op: TorchAttention) -> None:
        if self._blocks is not None:
            op.block = self._blocks.block_of(op.name, op.value)
        self._trace.ops.append(op)


class GuardedRecorder(Recorder):
    """For a model with compiled parts: nothing of the recorder itself is compiled with them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """What `named_modules` gives, in a third of its time: a trace of a small model feels it."""
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    ahead = [("", model)]
    while ahead:
        name, module = ahead.pop()
        if module in seen:
            continue
        seen.add(module)
        found[name] = module
        if module._modules:
            start = f"{name}." if name else ""
            ahead += [(start + key, child) for key, child in reversed(module._modules.items()) if child is not None]
    return found


def has_compiled_parts(modules: Iterable[nn.Module]) -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        return False
    whole = compiler.OptimizedModule
    return any(m._compiled_call_impl is not None or isinstance(m, whole) for m in modules)


def named_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the model's forward by name, those given by position as well."""
    if not args:
        return kwargs
    try:
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call itself will tell
        return kwargs
    return {**bound, **kwargs}


def same(map_: Tensor, used: Tensor) -> bool:
    return torch.equal(map_.to(used.dtype), used)


def is_dropout_of(map_: Tensor, used: Tensor) -> bool:
    """Whether each entry is either dropped or scaled up by one factor, as inverted dropout does."""
    kept = used != 0
    if not bool(kept.any()):
        return False
    ratio = used[kept].float() / map_[kept].float()
    return bool(ratio.min() > 1.0001) and bool(ratio.max() - ratio.min() < 0.02 * ratio.max())


def heads_of(module: Any) -> int | None:
    """How many heads an attention module says it has."""
    found = (getattr(module, name, None) for name in HEAD_COUNTS)
    return next(
        (heads for heads in found if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0), None
    )


def is_cross(local: Mapping[str, Any]) -> bool | None:
    """Whether a forward's arguments name a second stream for keys and values; None where they name none."""
    known = [name for name in SECOND_STREAMS if name in local]
    if any(isinstance(local[name], Tensor) for name in known):
        return True
    if isinstance(local.get("query"), Tensor) and isinstance(local.get("key"), Tensor):
        return local["query"] is not local["key"] if "key_padding_mask" in local else None
    return False if known else None


def kind_of(caller: Caller, shape: tuple[int, int, int, int]) -> Literal["self", "cross"]:
    cross = shape[2] != shape[3] if caller.cross is None else caller.cross
    return "cross" if cross else "self"


@lru_cache(maxsize=4096)
def is_composite(func: Any) -> bool:
    """Whether an operator is nothing but other operators."""
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return found


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
    trace = Trace(type(model).__name__, config=getattr(model, "config", None))
    blocks = None
    if values:
        blocks = BlockInputs(model)
        trace.values, trace.family = True, blocks.family_of("")
    modules = modules_of(model)
    kind = GuardedRecorder if has_compiled_parts(modules.values()) else Recorder
    recorder = kind(trace, modules, blocks=blocks)
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
        output = model(*args, **inputs)
    recorded.output = output  # also what a hook of the caller made of it
    recorded.check()
    return recorded
