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
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from attrace.capture import observed, torch_external, torch_fastpath
from attrace.capture.callers import ANOTHER
from attrace.capture.layouts import axes_of_shape, whole
from attrace.capture.modes import enter, leave
from attrace.capture.registered import RegistryObserver
from attrace.capture.registry import in_use, refuse_flex, watching
from attrace.capture.steps import KeyStore, below_compiler, call_of
from attrace.capture.torch_blocks import BlockInputs
from attrace.capture.torch_compiled import has_compiled_parts
from attrace.capture.torch_forms import CallByAxes, heads_among, storage_of
from attrace.capture.torch_layers import described, layers_without, modules_of, stacks_of
from attrace.capture.torch_ops import QueryKeyAttention
from attrace.capture.torch_softmaxes import CARRIERS, REARRANGED, Softmaxes
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
PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
PARTS = torch_external.Parts({
    **dict.fromkeys(observed.PARTS, "seen"),
    **dict.fromkeys(FUSED, "fused"),
    **dict.fromkeys(SOFTMAX, "softmax"),
    aten._log_softmax.default: "softmax",
    aten.exp.default: "exp",
    **dict.fromkeys(PRODUCTS, "product"),
    aten.mm.default: "linear",
    aten.addmm.default: "linear",
    aten.native_layer_norm.default: "norm",
    aten.add.Tensor: "add",
    **dict.fromkeys(CARRIERS | REARRANGED, "carrier"),
    **dict.fromkeys(torch_fastpath.LAYERS, "layer"),
    aten.sum.dim_IntList: "sum",
    torch_fastpath.NESTING: "nesting",
    aten.native_dropout.default: "dropout",
    aten.bernoulli_.float: "dropout",
})  # fmt: skip


class Recorder(Softmaxes, TorchDispatchMode):
    """Fills a trace while the model runs under it."""

    guarded: ClassVar[type[Recorder]]
    """The same for a model with compiled parts."""

    def __init__(self, trace: Trace, modules: dict[str, nn.Module], *, blocks: BlockInputs | None) -> None:
        Softmaxes.__init__(self, trace, modules, blocks=blocks)
        TorchDispatchMode.__init__(self)
        self._modules = modules
        self._layers = torch_fastpath.FusedLayers(modules)
        self._keys = KeyStore()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without torch's guard against compilation inside a dispatch, which costs a quarter of the recording."""
        return False

    def enter_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # Another thread may run the same model while this hook is taken away, and then call it without kwargs.
        if threading.get_ident() != self._thread or kwargs is None:
            return
        if below_compiler() and not self._should_skip_dynamo():
            self.__class__ = self.guarded  # generate() compiles the model when it has already begun
        self._running = True
        self._forget()
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
            self._forget()
            self._trace.output = output
            if self._trace.seen is not None:
                self._trace.seen.end(self._modules, {op.name for op in self._trace.ops})

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
                (self._fused if part == "fused" else self._external)(func, args, kwargs, out)
            self._keys.share(self._trace.ops, self._call)
        elif part == "softmax":
            self._softmax(args, out, is_log=func is aten._log_softmax.default)
        elif part == "layer":
            self._layer(func, args, kwargs)
        elif part == "nesting":
            self._layers.nest(args)
        elif part == "write":
            if self._pending:
                self._written(func, args, kwargs)
        elif part == "exp":
            self._exp(args, out)
        elif self._pending or self._followed or self._exponents:
            self._meet(func, part, args, out)
        return out

    def _meet(self, func: Any, part: str, args: tuple[Any, ...], out: Any) -> None:
        """An operator that may take a pending softmax to its values, or show where the heads of a call are."""
        if self._followed:
            self._watch(func, part, args, out)
        if func is aten.bernoulli_.float:
            self._noise[storage_of(out)] = out
        elif func is aten.div.Tensor and self._exponents is not None:
            self._divided(args, out)
        if not self._pending:
            return
        if part == "product" or (part == "linear" and self._is_unbatched(args)):
            self._product(args, out)
        elif part == "sum":
            self._sum(args)
        elif part in ("carrier", "dropout"):
            self._carry(func, args, out)

    def _see(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        if self._trace.seen is not None and not self._trace.seen.ended:
            name = "" if func in observed.JOINS else self._caller().name
            self._trace.seen.see(func, args, out, name=name, at=len(self._trace.ops), modules=self._modules)

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        query, key, value = args[:3]
        bias_at, causal_at = FUSED[func]
        self._trace.dropout |= self._running and len(args) >= causal_at and args[causal_at - 1] > 0
        bias = kwargs.get("attn_mask") if bias_at is None else args[bias_at]
        causal = bool(args[causal_at]) if len(args) > causal_at else False
        self._query_key(query, key, value, bias=bias, causal=causal, scale=kwargs.get("scale"), out=out[0])

    def _external(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> None:
        call = torch_external.read(func, args, kwargs)
        if isinstance(call, str):
            if (caller := self._caller()) is not ANOTHER:
                self._trace.unread.append(f"{caller.name} ({call})")
            return
        self._trace.dropout |= self._running and call.dropout > 0
        self._query_key(call.query, call.key, call.value, bias=call.bias, causal=call.causal, scale=call.scale)

    def _query_key(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        bias: Tensor | None,
        causal: bool,
        scale: float | None,
        out: Tensor | None = None,
    ) -> None:
        caller = self._caller()
        if caller is ANOTHER:
            return
        packed = storage_of(query) == storage_of(key) == storage_of(value) and not self._values and query is not key
        if caller.queries == 1 < query.shape[2]:  # one token, the heads of each group along the query axis
            out = None
            query = query.reshape(query.shape[0], -1, 1, query.shape[3])
            if bias is not None and bias.shape[1] > 1:
                bias = bias.reshape(bias.shape[0], -1, 1, bias.shape[3])
        op = QueryKeyAttention(
            name=caller.name,
            layer=0,
            kind="self",
            shape=(query.shape[0], query.shape[1], query.shape[2], key.shape[2]),
            value=value.detach() if self._values else None,
            query=self._kept(query, packed=packed),
            key=self._kept(key, packed=packed),
            bias=None if bias is None else self._kept_bias(bias),
            is_causal=causal,
            scale=scale,
        )
        heads, unclear = heads_among((op.shape[0], op.shape[1]), caller.heads, self._batch)
        parts = {"query": op.query, "key": op.key, "value": op.value, "bias": op.bias}
        call = CallByAxes(op, caller, parts, heads, unclear)
        if heads != whole(1, op.shape[1]):
            call.lay_out(heads)
        call.beside = self._beside(caller, op.shape, value.shape[-1])
        follows = out is not None and not self._is_certain(call, self._batch, value.shape[-1])
        self._begin(call, follows=follows)
        if out is not None and follows:
            self._follow_result(call, axes_of_shape(out.shape), out, width=value.shape[-1])

    def _layer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caller = self._caller()
        if caller is ANOTHER:
            return
        kind, tensors = self._layers.read(func, args, kwargs, values=self._values)
        shape = (*tensors["query"].shape[:3], tensors["key"].shape[2])
        name = self._layers.name_of(args, caller.name)
        self._record(kind(name=name, layer=len(self._trace.ops), shape=shape, kind="self", **tensors))


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
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"Expected a module whose layers run as Python. Received: {type(model).__name__}, traced or scripted code, "
            "which takes no hooks. Give the module that it was made from."
        )
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
        enter(recorder)
        undo.callback(leave, recorder)  # recordings kept in generators or in an ExitStack end in any order
        yield trace
    recorder.sum_up()
