"""The torch seam: see every attention call under any module of any library, and change nothing.

A dispatch mode sees the operators below autograd.  A fused kernel's call is recorded by its arguments; an unfused
one by its softmax, once that softmax is multiplied with values: what a call is decides, not what its module is
named.  The call stack tells which module it is.  All of it belongs to the recording thread alone and is gone when
the block ends, also after an error in the model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from attrace.capture import observed, torch_external, torch_fastpath
from attrace.capture.beside import beside_tokens
from attrace.capture.callers import ANOTHER, Caller, caller_among, kind_of
from attrace.capture.registered import RegistryObserver
from attrace.capture.registry import in_use, refuse_flex, watching
from attrace.capture.steps import Call, KeyStore, below_compiler, call_of, joins_cache
from attrace.capture.torch_blocks import BlockInputs
from attrace.capture.torch_compiled import has_compiled_parts
from attrace.capture.torch_forms import (
    Given,
    Pending,
    PendingSoftmax,
    Reading,
    Rearranged,
    Weighted,
    is_transposed,
    read_map,
    softmax_of,
    storage_of,
)
from attrace.capture.torch_layers import described, layers_without, modules_of, stacks_of
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
PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
PARTS = torch_external.Parts({
    **dict.fromkeys(observed.PARTS, "seen"),
    **dict.fromkeys(FUSED, "fused"),
    **dict.fromkeys(SOFTMAX, "softmax"),
    **dict.fromkeys(PRODUCTS, "product"),
    **dict.fromkeys(CARRIERS | REARRANGED, "carrier"),
    **dict.fromkeys(torch_fastpath.LAYERS, "layer"),
    aten.sum.dim_IntList: "sum",
    torch_fastpath.NESTING: "nesting",
    aten.native_dropout.default: "dropout",
    aten.bernoulli_.float: "dropout",
})  # fmt: skip


class Recorder(TorchDispatchMode):
    """Fills a trace while the model runs under it."""

    guarded: ClassVar[type[Recorder]]
    """The same for a model with compiled parts."""

    def __init__(self, trace: Trace, modules: dict[str, nn.Module], *, blocks: BlockInputs | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._modules = modules
        self._blocks = blocks
        self._values = blocks is not None
        self._thread = threading.get_ident()
        self._names = {id(module): name or trace.model for name, module in modules.items()}
        self._layers = torch_fastpath.FusedLayers(modules)
        self._running = False
        self._call = Call()
        self._keys = KeyStore()
        self._batch: int | None = None
        self._pending: dict[int, Pending] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without torch's guard against compilation inside a dispatch, which costs a quarter of the recording."""
        return False

    def _caller(self) -> Caller:
        """Who calls; ANOTHER where no module of the model is on the stack."""
        if not self._running and torch._C._current_graph_task_id() != -1:
            return ANOTHER  # a backward pass runs checkpointed layers again
        return caller_among(self._names) or (Caller(self._trace.model) if self._running else ANOTHER)

    def enter_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # Another thread may run the same model while this hook is taken away, and then call it without kwargs.
        if threading.get_ident() != self._thread or kwargs is None:
            return
        if below_compiler() and not self._should_skip_dynamo():
            self.__class__ = self.guarded  # generate() compiles the model when it has already begun
        self._running = True
        self._pending.clear()
        given = torch_fastpath.named_arguments(model, args, kwargs)
        sizes = {v.shape[0] for k in BATCHED if isinstance(v := given.get(k), Tensor) and v.ndim}
        self._batch = sizes.pop() if len(sizes) == 1 else None
        self._call = call_of(given, self._call)
        self._call.running = True
        self._trace.begin(torch_fastpath.real_tokens(given), self._call)
        if self._trace.seen is None or not (self._trace.seen.steps or self._trace.seen.sizes):
            self._trace.seen = observed.Observed.of(given)

    def see_tokens(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self._thread:
            self._trace.see_tokens(torch_fastpath.real_tokens(torch_fastpath.named_arguments(model, args, kwargs)))

    def leave_model(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running = self._call.running = False
            self._call.made(output)
            self._note_loose()
            self._pending.clear()
            self._trace.output = output
            if self._trace.seen is not None:
                self._trace.seen.end(self._modules, {op.name for op in self._trace.ops})

    def _note_loose(self) -> None:
        """Tell the trace of softmaxes with the form of maps that met no values."""
        if not self._pending:
            return
        read = {op.name for op in self._trace.ops}
        waiting = [softmax_of(found) for found in self._pending.values() if not isinstance(found, Given)]
        for found in {id(f): f for f in waiting}.values():
            name, heads, shape = found.caller.name, found.caller.heads, tuple(found.map.shape)
            # One over the heads that its module names is attention; others count where nothing else was seen.
            if len(shape) > 3 and (not read or (heads in shape[1:3] and name not in read)):
                self._trace.loose.setdefault(name, f"{name} (a softmax of shape {shape})")

    def sum_up(self) -> None:
        """Tell the trace, once the model has run, which of its layers made no attention call."""
        stacks = stacks_of(self._modules)
        if self._trace.ops:
            self._trace.stack, self._trace.without = layers_without(
                stacks, [*(op.name for op in self._trace.ops), *self._trace.beside]
            )
        else:
            self._trace.parts = described(self._modules[""], stacks)

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
        part = PARTS[func]
        if not part:
            return out
        if part == "dropout" and self._running:
            self._trace.dropout |= func is not aten.native_dropout.default or (args[1] > 0 and args[2] is not False)
        if func in observed.PARTS and self._running:
            self._see(func, args, out)
        if part in ("fused", "external"):
            with enable_reentrant_dispatch():  # so that detached tensors share their version counters
                (self._fused if part == "fused" else self._external)(func, args, kwargs)
            self._keys.share(self._trace.ops, self._call)
        elif part == "softmax":
            self._softmax(args, out)
        elif part == "layer":
            self._layer(func, args, kwargs)
        elif part == "nesting":
            self._layers.nest(args)
        elif self._pending and part == "product":
            self._product(args, out)
        elif self._pending and part == "sum":
            self._sum(args, out)
        elif self._pending and part != "seen":
            self._carry(func, args, out)
        return out

    def _see(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        if self._trace.seen is not None and not self._trace.seen.ended:
            name = "" if func in observed.JOINS else self._caller().name
            self._trace.seen.see(func, args, out, name=name, at=len(self._trace.ops), modules=self._modules)

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query, key, value = args[:3]
        bias_at, causal_at = FUSED[func]
        self._trace.dropout |= self._running and len(args) >= causal_at and args[causal_at - 1] > 0
        bias = kwargs.get("attn_mask") if bias_at is None else args[bias_at]
        causal = bool(args[causal_at]) if len(args) > causal_at else False
        self._query_key(query, key, value, bias=bias, causal=causal, scale=kwargs.get("scale"))

    def _external(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = torch_external.read(func, args, kwargs)
        if isinstance(call, str):
            if (caller := self._caller()) is not ANOTHER:
                self._trace.unread.append(f"{caller.name} ({call})")
            return
        self._trace.dropout |= self._running and call.dropout > 0
        self._query_key(call.query, call.key, call.value, bias=call.bias, causal=call.causal, scale=call.scale)

    def _query_key(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, causal: bool, scale: float | None
    ) -> None:
        caller = self._caller()
        if caller is ANOTHER:
            return
        packed = storage_of(query) == storage_of(key) == storage_of(value) and not self._values and query is not key
        if caller.queries == 1 < query.shape[2]:  # one token, the heads of each group along the query axis
            query = query.reshape(query.shape[0], -1, 1, query.shape[3])
            if bias is not None and bias.shape[1] > 1:
                bias = bias.reshape(bias.shape[0], -1, 1, bias.shape[3])
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        if self._is_beside(caller, shape, value.shape[-1]):
            return
        windows = self._windows(shape[0])
        self._record(
            QueryKeyAttention(
                name=caller.name,
                layer=len(self._trace.ops),
                shape=shape,
                kind=self._kind_of(caller, shape, windows),
                windows=windows,
                value=value.detach() if self._values else None,
                query=self._kept(query, packed=packed),
                key=self._kept(key, packed=packed),
                bias=None if bias is None else self._kept(bias),
                is_causal=causal,
                scale=scale,
            )
        )

    def _kept(self, tensor: Tensor, *, packed: bool = False) -> Tensor:
        """The tensor as it is now: compiled code takes its buffers again, what is packed would keep values alive."""
        if not self._trace.precompiled and not packed:
            return tensor.detach()
        once = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())  # where it is expanded
        return tensor.detach()[once].clone().expand(tensor.shape)

    def _layer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caller = self._caller()
        if caller is ANOTHER:
            return
        kind, tensors = self._layers.read(func, args, kwargs, values=self._values)
        shape = (*tensors["query"].shape[:3], tensors["key"].shape[2])
        name = self._layers.name_of(args, caller.name)
        self._record(kind(name=name, layer=len(self._trace.ops), shape=shape, kind="self", **tensors))

    def _softmax(self, args: tuple[Any, ...], out: Tensor) -> None:
        dim = args[1]
        if out.is_nested:
            self._trace.unread.append(f"{self._caller().name} (on a nested tensor; give a padded batch and its mask)")
            return
        column = out.ndim == 3 and dim in (1, -2) and out.shape[0] == self._batch and out.shape[2] == 1
        if not (out.ndim >= 3 and (dim in (-1, out.ndim - 1) or column)):
            return
        if (caller := self._caller()) is not ANOTHER:
            with enable_reentrant_dispatch():
                kept = self._kept(out)
                if column:  # one query for each item, its weights upright: (B, T, 1)
                    kept = kept.transpose(1, 2)
            if not self._running:  # nothing else clears what met no values
                self._pending = {k: p for k, p in self._pending.items() if softmax_of(p).caller.name == caller.name}
            found = PendingSoftmax(kept, version_of(kept), caller)
            found.carriers[storage_of(out)] = is_transposed(out)
            self._pending[storage_of(out)] = found

    def _carry(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        result = out[0] if isinstance(out, tuple) else out
        for arg in args[0] if func is aten.cat.default else args:
            if not isinstance(arg, Tensor) or not (found := self._pending.get(storage_of(arg))):
                continue
            if isinstance(found, Given) and func is aten.mul.Tensor and found.take(args):
                del self._pending[storage_of(arg)]
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
            weights = self._kept(weighted.weights)
        read = read_map(
            found.map, weights.reshape(-1, *shape[-2:]), heads=found.caller.heads, batch=self._batch_of(found)
        )
        value = weighted.value.expand(weighted.product.shape)[..., 0, :, :].reshape(-1, *weighted.product.shape[-2:])
        self._read(found, read, weights, value)

    def _product(self, args: tuple[Any, ...], out: Tensor) -> None:
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
                    kept = self._kept(used)
                as_map = kept.mT if turned else kept
                read = read_map(found.map, as_map, heads=found.caller.heads, batch=self._batch_of(found))
            count = len(self._trace.ops)
            self._read(found, read, kept, other.mT if turned else other)
            if found.caller.sinks and len(self._trace.ops) > count:
                self._pending[storage_of(out)] = Given(found, self._trace.ops[-1], out)
            return

    def _batch_of(self, found: PendingSoftmax) -> int | None:
        """How many items a softmax is of: what the model was given, else what its module was, where the axes agree."""
        given, shape = found.caller.given, found.map.shape
        if self._batch is None and len(given) == len(shape) == 3 and shape[0] == given[0] and shape[1] in given[1:]:
            return given[0]
        return self._batch

    def _read(self, found: PendingSoftmax, read: Reading | str, used: Tensor, value: Tensor) -> None:
        if isinstance(read, str):
            self._trace.unread.append(f"{found.caller.name} ({read})")
            return
        batch, heads, length, keys = read.weights.shape
        if self._is_beside(found.caller, (batch, heads, length, keys), value.shape[-1]):
            return
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

    def _is_beside(self, caller: Caller, shape: tuple[int, int, int, int], width: int) -> bool:
        """Whether a call attends among something else than tokens, of which the trace is then told."""
        what = beside_tokens(
            caller.given,
            shape,
            width,
            heads=caller.heads,
            tokens=self._call.tokens,
            convolves=caller.convolves,
        )
        if what:
            self._trace.beside.setdefault(caller.name, (what, shape))
        return bool(what)

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


class CompiledRecorder(GuardedRecorder):
    """The same, and they run as they were compiled: fused attention is seen there, an unfused softmax may not be."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


Recorder.guarded = GuardedRecorder


@lru_cache(maxsize=4096)
def is_composite(func: Any) -> bool:
    """Whether an operator is nothing but other operators."""
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return found


@contextmanager
def recording(model: nn.Module, *, values: bool = False, compiled: bool = True) -> Iterator[Trace]:
    """Record a PyTorch module: `attrace.record` without its warnings, for those who show the trace's notes themselves.

    `compiled=False` runs the model's own code where it was compiled: for callers that need all maps and not the output.
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
    guarded = has_compiled_parts(modules.values())
    kind = recorder_class(model, guarded=guarded)
    # Compiled code runs as it is unless more than its fused calls has to be seen: hooks on blocks, functions of the
    # registry, the way of the data from stream to stream.
    if guarded and compiled and blocks is None and kind is GuardedRecorder and not in_use(model):
        trace.precompiled, kind = True, CompiledRecorder
    recorder = kind(trace, modules, blocks=blocks)
    with ExitStack() as undo:
        for handle in blocks.watch() if blocks else ():
            undo.callback(handle.remove)
        for end in torch_fastpath.watch(model, recorder.enter_model, recorder.leave_model, recorder.see_tokens):
            undo.callback(end.remove)
        undo.enter_context(watching(model, RegistryObserver(recorder)))
        refuse_flex(kind)
        undo.enter_context(recorder)
        yield trace
    recorder.sum_up()
