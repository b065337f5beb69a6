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
from functools import lru_cache
from types import FrameType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from attrace.capture.registered import RegistryObserver
from attrace.capture.registry import refuse_flex, watching
from attrace.capture.steps import Call, KeyStore, below_compiler, call_of, joins_cache
from attrace.capture.torch_blocks import BlockInputs
from attrace.capture.torch_forms import Caller, Pending, PendingSoftmax, Reading, Rearranged, Weighted, read_map
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
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
}
# Arguments of a model's forward whose first axis is the batch.
BATCHED = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "decoder_input_ids",
    "pixel_values",
    "input_features",
    "input_values",
    "past_values",
)
# Copies into another shape: a softmax that meets values after one of them is not followed, but not passed over either.
REARRANGED = {aten.constant_pad_nd.default, aten.cat.default}
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "num_attn_heads")
# Arguments of an attention module's forward that hold a second stream.
SECOND_STREAMS = ("key_value_states", "encoder_hidden_states", "encoder_states", "memory")
PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
PARTS: dict[Any, str] = {
    **dict.fromkeys(FUSED, "fused"),
    **dict.fromkeys(SOFTMAX, "softmax"),
    **dict.fromkeys(PRODUCTS, "product"),
    **dict.fromkeys(CARRIERS | REARRANGED, "carrier"),
    aten.sum.dim_IntList: "sum",
}


def storage_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def is_transposed(tensor: Tensor) -> bool:
    """Whether the last two axes lie in memory the other way round."""
    return tensor.ndim > 1 and tensor.stride(-1) > tensor.stride(-2)


ANOTHER = Caller("")
"""Who calls where it is no module of the model."""


class Recorder(TorchDispatchMode):
    """Fills a trace while the model runs under it."""

    guarded: ClassVar[type[Recorder]]
    """The same for a model with compiled parts."""

    def __init__(self, trace: Trace, modules: dict[str, nn.Module], *, blocks: BlockInputs | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._blocks = blocks
        self._values = blocks is not None
        self._thread = threading.get_ident()
        self._names = {id(module): name or trace.model for name, module in modules.items()}
        self._running = False
        self._call = Call()
        self._keys = KeyStore()
        self._batch: int | None = None
        self._pending: dict[int, Pending] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without torch's guard against compilation inside a dispatch, which costs a quarter of the recording."""
        return False

    # Which module runs

    def _caller(self) -> Caller:
        """The innermost module of the model on the call stack, by the first argument of its functions.

        Looked up for attention calls alone: hooks on every module would cost more than the rest of the recorder,
        switch off the fast paths that check for hooks, and run in other threads.  ANOTHER where no module of the
        model is on the stack.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_argcount:
                local = frame.f_locals
                module = local.get(code.co_varnames[0])
                name = self._names.get(id(module))
                if name is not None:
                    queries = local.get("q_length") if code.co_name == "sdpa_attention_forward" else None
                    if code.co_name != "forward" or not isinstance(module, nn.Module):
                        frame = self._forward_of(module, frame)
                        local = {} if frame is None else frame.f_locals
                    return Caller(name, heads_of(module), is_cross(local), queries)
            frame = frame.f_back
        return Caller(self._trace.model) if self._running else ANOTHER

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
        if below_compiler() and not self._should_skip_dynamo():
            self.__class__ = self.guarded  # generate() compiles the model when it has already begun
        self._running = True
        self._pending.clear()
        given = named_arguments(model, args, kwargs)
        sizes = {v.shape[0] for k in BATCHED if isinstance(v := given.get(k), Tensor) and v.ndim}
        self._batch = sizes.pop() if len(sizes) == 1 else None
        self._call = call_of(given, self._call)
        self._call.running = True
        self._trace.begin(given.get("attention_mask"), self._call)

    def leave_model(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running = self._call.running = False
            self._call.made(output)
            self._pending.clear()
            self._trace.output = output

    @property
    def model(self) -> str:
        return self._trace.model

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
        if part is None:
            return out
        if part == "fused":
            with enable_reentrant_dispatch():  # so that detached tensors share their version counters
                self._fused(func, args, kwargs)
            self._keys.share(self._trace.ops, self._call)
        elif part == "softmax":
            self._softmax(args, out)
        elif self._pending and part == "product":
            self._product(args)
        elif self._pending and part == "sum":
            self._sum(args, out)
        elif self._pending:
            self._carry(func, args, out)
        return out

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query, key, value = args[:3]
        bias_at, causal_at = FUSED[func]
        bias = kwargs.get("attn_mask") if bias_at is None else args[bias_at]
        caller = self._caller()
        if caller is ANOTHER:
            return
        if caller.queries == 1 < query.shape[2]:  # one token, the heads of each group along the query axis
            query, bias = (
                t if t is None or t.shape[1] == 1 else t.reshape(t.shape[0], -1, 1, t.shape[3]) for t in (query, bias)
            )
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        windows = self._windows(shape[0])
        self._record(
            QueryKeyAttention(
                name=caller.name,
                layer=len(self._trace.ops),
                shape=shape,
                kind=self._kind_of(caller, shape, windows),
                windows=windows,
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
        column = out.ndim == 3 and dim in (1, -2) and out.shape[0] == self._batch and out.shape[2] == 1
        if not (out.ndim >= 3 and (dim in (-1, out.ndim - 1) or column)):
            return
        if (caller := self._caller()) is not ANOTHER:
            with enable_reentrant_dispatch():
                kept = out.detach()
                if column:  # one query for each item, its weights upright: (B, T, 1)
                    kept = kept.transpose(1, 2)
            if not self._running:  # nothing else clears what met no values
                self._pending = {k: p for k, p in self._pending.items() if p.caller.name == caller.name}
            found = PendingSoftmax(kept, version_of(kept), caller)
            found.carriers[storage_of(out)] = is_transposed(out)
            self._pending[storage_of(out)] = found

    def _carry(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        result = out[0] if isinstance(out, tuple) else out
        for arg in args[0] if func is aten.cat.default else args:
            if not isinstance(arg, Tensor) or not (found := self._pending.get(storage_of(arg))):
                continue
            if not isinstance(found, PendingSoftmax):
                return
            if func in REARRANGED:
                self._pending[storage_of(result)] = Rearranged(found, result)
                return
            if storage_of(result) == storage_of(arg):
                if not found.map.is_inference():  # masked in place, which counts once this operator is done
                    found.version += 1
            elif result.shape == arg.shape:
                turned = found.carriers[storage_of(arg)] ^ is_transposed(arg) ^ is_transposed(result)
                found.carriers[storage_of(result)] = turned
                found.alive.append(result)
                self._pending[storage_of(result)] = found
            elif func is aten.mul.Tensor and arg.numel() == found.map.numel():
                value = args[0] if arg is args[1] else args[1]
                self._pending[storage_of(result)] = Weighted(found, arg, value, result)
            return

    def _sum(self, args: tuple[Any, ...], out: Tensor) -> None:
        """A sum over the keys of values that a softmax weighed one by one."""
        weighted = self._pending.get(storage_of(args[0]))
        if not isinstance(weighted, Weighted):
            return
        found = weighted.softmax
        if out.numel() * found.map.shape[-1] != weighted.product.numel():  # over something else than the keys
            return
        for key in (*found.carriers, storage_of(args[0])):
            self._pending.pop(key, None)
        shape = tuple(found.map.shape)
        if args[0].shape != weighted.product.shape or not weighted.is_read(list(args[1])):
            self._trace.unread.append(
                f"{found.caller.name} (weights of shape {shape} that each query spends on values of its own: sampled "
                "points or a window, not one stream of keys)"
            )
            return
        with enable_reentrant_dispatch():
            weights = weighted.weights.detach()
        read = read_map(found.map, weights.reshape(-1, *shape[-2:]), heads=found.caller.heads, batch=self._batch)
        value = weighted.value.expand(weighted.product.shape)[..., 0, :, :].reshape(-1, *weighted.product.shape[-2:])
        self._read(found, read, weights, value)

    def _product(self, args: tuple[Any, ...]) -> None:
        """A batched product that takes a pending softmax from the left, A V, or turned from the right, V' A'."""
        left, right = args[-2:]
        for used, other, turned in ((left, right, False), (right, left, True)):
            found = self._pending.get(storage_of(used))
            if isinstance(found, Rearranged):
                found = found.softmax
                for key in (*found.carriers, storage_of(used)):
                    self._pending.pop(key, None)
                self._read(
                    found, f"a map of shape {tuple(found.map.shape)}, padded or joined before its values", used, used
                )
                return
            if not isinstance(found, PendingSoftmax):
                continue
            other_way = found.carriers[storage_of(used)] ^ is_transposed(used) ^ turned
            twice = isinstance(self._pending.get(storage_of(other)), PendingSoftmax)
            for key in found.carriers:
                self._pending.pop(key, None)
            read: Reading | str
            kept = used
            if other_way:
                read = "summed over its queries"
            elif twice:
                read = "multiplied with a map"
            elif version_of(found.map) != found.version:
                read = "written to before it met its values"
            else:
                with enable_reentrant_dispatch():  # so that detached tensors share their version counters
                    kept = used.detach()
                as_map = kept.mT if turned else kept
                read = read_map(found.map, as_map, heads=found.caller.heads, batch=self._batch)
            self._read(found, read, kept, other.mT if turned else other)
            return

    def _read(self, found: PendingSoftmax, read: Reading | str, used: Tensor, value: Tensor) -> None:
        if isinstance(read, str):
            self._trace.unread.append(f"{found.caller.name} ({read})")
            return
        batch, heads, length, keys = read.weights.shape
        windows = self._windows(batch)
        source = found.map if read.source is found.map else used
        self._record(
            SoftmaxAttention(
                name=found.caller.name,
                layer=len(self._trace.ops),
                shape=(batch, heads, length, keys),
                kind=self._kind_of(found.caller, (batch, heads, length, keys), windows),
                windows=windows,
                value=read.value(value.detach()) if self._values else None,
                map=read.weights,
                source=source,
                version=version_of(source),
            )
        )

    def _windows(self, maps: int) -> int:
        """Into how many windows each item of the batch is cut, where its windows lie in the batch axis."""
        batch = self._batch
        return maps // batch if batch and maps > batch and maps % batch == 0 else 1

    def _kind_of(self, caller: Caller, shape: tuple[int, int, int, int], windows: int = 1) -> Literal["self", "cross"]:
        if caller.cross is None and self._running and joins_cache(shape, self._call):
            return "self"
        return kind_of(caller, shape, windows)

    def _record(self, op: TorchAttention) -> None:
        if self._blocks is not None:
            op.block = self._blocks.block_of(op.name, op.value)
        op.queries = op.keys = self._trace.main
        self._trace.ops.append(op)

    def joined(self, ops: list[TorchAttention], query: Tensor, key: Tensor, value: Tensor, output: Any) -> None:
        """Be told of recorded calls that no operator showed; a recorder of streams notes what they join."""


class GuardedRecorder(Recorder):
    """For a model with compiled parts: nothing of the recorder itself is compiled with them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


Recorder.guarded = GuardedRecorder


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


def kind_of(caller: Caller, shape: tuple[int, int, int, int], windows: int) -> Literal["self", "cross"]:
    cross = shape[2] != shape[3] and windows == 1 if caller.cross is None else caller.cross
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
    from attrace.capture.torch_streams import default_stream, recorder_class

    trace = Trace(type(model).__name__, config=getattr(model, "config", None), main=default_stream(model))
    blocks = None
    if values:
        blocks = BlockInputs(model)
        trace.values, trace.family = True, blocks.family_of("")
    modules = modules_of(model)
    kind = recorder_class(model, guarded=has_compiled_parts(modules.values()))
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
        undo.enter_context(watching(model, RegistryObserver(recorder)))
        refuse_flex(kind)
        undo.enter_context(recorder)
        yield trace
