"""The torch seam: see every attention call under any module of any library, and change nothing.

A dispatch mode sees the operators below autograd.  A fused kernel's call is recorded by its arguments; an unfused
one by its softmax, once that softmax is multiplied with values: what a call is decides, not what its module is
named.  The call stack tells which module it is.  All of it belongs to the recording thread alone and is gone when
the block ends, also after an error in the model.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
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
from attrace.capture.layouts import Axes, Layout, axes_of_shape, joined_within, laid_out, whole
from attrace.capture.modes import enter, leave
from attrace.capture.registered import RegistryObserver
from attrace.capture.registry import in_use, refuse_flex, watching
from attrace.capture.steps import Call, KeyStore, below_compiler, call_of, joins_cache
from attrace.capture.torch_blocks import BlockInputs
from attrace.capture.torch_compiled import has_compiled_parts
from attrace.capture.torch_forms import (
    CallByAxes,
    Following,
    Lost,
    Pending,
    PendingSoftmax,
    Reading,
    Weighted,
    Weights,
    heads_among,
    read_axes,
    read_map,
    softmax_of,
    storage_of,
)
from attrace.capture.torch_layers import described, layers_without, modules_of, stacks_of
from attrace.capture.torch_ops import QueryKeyAttention, SoftmaxAttention, TorchAttention, version_of
from attrace.capture.trace import Trace
from attrace.errors import CaptureError
from attrace.ops.attention.rows import empty_rows

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
COPIES = {aten.clone.default, aten._to_copy.default}
OWN_VALUES = (
    "weights of shape {} that each query spends on values of its own: sampled points or a window, not one stream of "
    "keys"
)
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
SHARED_BYTES = 1 << 18
"""Masks and biases as large as this are looked for among those of the layers before."""
MOST_BIASES = 4
MOST_FOLLOWED = 32
"""Results of calls whose heads are not told yet."""
# Operators that read channels: which of their arguments holds them, and along which axis.
CHANNELS: dict[str, tuple[slice, int]] = {
    "product": (slice(-2, -1), -1),
    "linear": (slice(-2, -1), -1),
    "norm": (slice(1), -1),
    "add": (slice(2), -1),
    "seen": (slice(1), 1),
}
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


class Recorder(TorchDispatchMode):
    """Fills a trace while the model runs under it."""

    follows_streams: ClassVar[bool] = False
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
        self._followed: dict[int, Following] = {}
        self._exponents: weakref.ref[Tensor] | None = None
        self._biases: deque[tuple[Tensor, int]] = deque(maxlen=MOST_BIASES)
        self._noise: dict[int, Tensor] = {}
        """What dropout drew, by its storage."""

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

    def _forget(self) -> None:
        while self._followed:
            self._settle(next(iter(self._followed.values())), None)
        self._pending.clear()
        self._noise.clear()
        self._biases.clear()
        self._exponents = None

    def _note_loose(self) -> None:
        """Tell the trace of softmaxes with the form of maps that met no values."""
        read = {op.name for op in self._trace.ops}
        for found in {id(f): f for f in map(softmax_of, self._pending.values())}.values():
            name, heads, shape = found.caller.name, found.caller.heads, tuple(found.map.shape)
            # One over the heads that its module names, or over as many keys as queries, is attention; others count
            # where nothing else was seen.
            square = shape.count(shape[found.keys]) > 1 and shape[found.keys] > 1
            if (square or len(shape) > 3) and (
                not read or (name not in read and (square or (len(shape) > 3 and heads in shape[1:3])))
            ):
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

    def _is_unbatched(self, args: tuple[Any, ...]) -> bool:
        """Whether a product of matrices is of a softmax (Q, T), not of one whose axes it has merged."""
        found = (self._pending.get(storage_of(arg)) for arg in args[-2:])
        return any(isinstance(f, Weights | Lost) and f.softmax.map.ndim == 2 for f in found)

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

    def _kept(self, tensor: Tensor, *, packed: bool = False) -> Tensor:
        """The tensor as it is now: compiled code takes its buffers again, what is packed would keep values alive.

        Tensors of inference mode don't count how often they are written to, so that nothing would show it later.
        """
        if not (self._trace.precompiled or packed or tensor.is_inference()):
            return tensor.detach()
        once = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())  # where it is expanded
        return tensor.detach()[once].clone().expand(tensor.shape)

    def _kept_bias(self, bias: Tensor) -> Tensor:
        """The same for a mask or bias, of which layers that make it anew from one mask share one."""
        if bias.untyped_storage().nbytes() < SHARED_BYTES:
            return self._kept(bias)
        for kept, version in self._biases:
            if version_of(kept) == version and kept.dtype == bias.dtype and torch.equal(kept, bias):
                return kept
        kept = self._kept(bias)
        self._biases.append((kept, version_of(kept)))
        return kept

    def _layer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caller = self._caller()
        if caller is ANOTHER:
            return
        kind, tensors = self._layers.read(func, args, kwargs, values=self._values)
        shape = (*tensors["query"].shape[:3], tensors["key"].shape[2])
        name = self._layers.name_of(args, caller.name)
        self._record(kind(name=name, layer=len(self._trace.ops), shape=shape, kind="self", **tensors))

    def _softmax(self, args: tuple[Any, ...], out: Tensor, *, is_log: bool = False) -> None:
        if out.is_nested:
            self._trace.unread.append(f"{self._caller().name} (on a nested tensor; give a padded batch and its mask)")
            return
        if not (out.ndim > 2 or (out.ndim == 2 and out.shape[0] == out.shape[1])) or not out.numel():
            return
        caller = self._caller()
        if caller is ANOTHER:
            return
        if not self._running:  # nothing else clears what met no values
            self._pending = {k: p for k, p in self._pending.items() if softmax_of(p).caller.name == caller.name}
        keys = args[1] % out.ndim
        with enable_reentrant_dispatch():  # so that detached tensors share their version counters
            made = self._kept(out) if self._trace.precompiled else out.detach()
            found = PendingSoftmax(made, keys, caller, is_log)
        if caller.sinks is not None:
            found.sums = args[0].logsumexp(keys)
        else:
            empty = empty_rows(args[0], keys)
            if bool(empty.any()):  # but not where the model itself has NaN
                found.empty = empty & ~out.narrow(keys, 0, 1).isnan()
        self._pend(found, Weights.of(found), out)

    def _pend(self, softmax: PendingSoftmax, weights: Weights | Lost | Weighted | None, tensor: Tensor) -> None:
        if weights is not None:
            softmax.storages.append(storage_of(tensor))
            self._pending[storage_of(tensor)] = weights

    def _exp(self, args: tuple[Any, ...], out: Tensor) -> None:
        """The beginning of a softmax by hand, or the end of one from its logarithm."""
        found = self._pending.get(storage_of(args[0]))
        if isinstance(found, Weights) and found.softmax.is_log:
            softmax = found.softmax
            self._drop(softmax)
            with enable_reentrant_dispatch():
                made = self._kept(out) if self._trace.precompiled else out.detach()
                softmax = PendingSoftmax(made, softmax.keys, softmax.caller, sums=softmax.sums, empty=softmax.empty)
            self._pend(softmax, Weights.of(softmax), out)
        elif out.ndim > 2:
            self._exponents = weakref.ref(out)

    def _divided(self, args: tuple[Any, ...], out: Tensor) -> None:
        """The end of a softmax by hand: exponents by their sums."""
        exponents = None if self._exponents is None else self._exponents()
        if exponents is None or not isinstance(args[1], Tensor) or storage_of(exponents) != storage_of(args[0]):
            return
        sums = (1,) * (out.ndim - args[1].ndim) + tuple(args[1].shape)
        axes = [axis for axis in range(out.ndim) if sums[axis] != out.shape[axis]]
        if out.shape == exponents.shape and len(axes) == 1 and sums[axes[0]] == 1:
            self._exponents = None
            self._softmax((exponents.log(), axes[0]), out)

    def _drop(self, softmax: PendingSoftmax) -> None:
        for key in softmax.storages:
            self._pending.pop(key, None)
        self._noise.clear()

    def _carry(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        result = out[0] if isinstance(out, tuple) else out
        for arg in args[0] if func is aten.cat.default else args:
            if isinstance(arg, Tensor) and isinstance(found := self._pending.get(storage_of(arg)), Weights):
                self._carry_weights(found, func, args, arg, result)
                return

    def _is_noise(self, args: tuple[Any, ...]) -> bool:
        """Whether one of the factors was drawn by dropout."""
        return any(storage_of(arg) in self._noise for arg in args if isinstance(arg, Tensor))

    def _carry_weights(self, found: Weights, func: Any, args: tuple[Any, ...], arg: Tensor, result: Tensor) -> None:
        softmax = found.softmax
        if func in REARRANGED:
            self._pend(softmax, Lost(softmax, "padded or joined", result), result)
        elif storage_of(result) == storage_of(arg):
            self._carry_in_place(found, arg, result)
        elif result.shape == arg.shape:
            how = "changed"
            if func in COPIES:
                how = "copied"
            elif func is aten.native_dropout.default or self._is_noise(args):
                how = "dropped"
            with enable_reentrant_dispatch():
                carried = found.carried(arg.detach(), result.detach(), how=how)
            self._pend(softmax, Lost(softmax, carried, result) if isinstance(carried, str) else carried, result)
        elif func is aten.mul.Tensor:
            value = args[0] if arg is args[1] else args[1]
            if isinstance(value, Tensor):
                self._pend(softmax, Weighted(found, arg, value, result), result)

    def _carry_in_place(self, found: Weights, arg: Tensor, result: Tensor) -> None:
        """Masked in place, which counts once this operator is done."""
        counts = not result.is_inference()
        if storage_of(found.weights) == storage_of(result):
            found.version += counts
            found.changed = True
            return
        softmax = found.softmax
        with enable_reentrant_dispatch():
            carried = found.carried(arg.detach(), result.detach(), how="changed")
        if isinstance(carried, str) or arg.numel() != found.weights.numel():
            self._pend(softmax, Lost(softmax, "written to in part", result), result)
        else:
            carried.version += counts
            self._pend(softmax, carried, result)

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator wrote to its arguments: a softmax among them is not what it was."""
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            tensor = args[at] if at < len(args) else kwargs.get(argument.name)
            found = self._pending.get(storage_of(tensor)) if isinstance(tensor, Tensor) else None
            if found is not None and isinstance(tensor, Tensor):
                softmax = softmax_of(found)
                self._pend(softmax, Lost(softmax, "written to", tensor), tensor)

    def _sum(self, args: tuple[Any, ...]) -> None:
        """A sum over the keys of values that a softmax weighed one by one."""
        weighted = self._pending.get(storage_of(args[0]))
        if not isinstance(weighted, Weighted) or (axes := weighted.axes()) is None:
            return
        found, softmax = weighted.found, weighted.found.softmax
        dims = [dim % args[0].ndim for dim in args[1] or range(args[0].ndim)]
        if args[0].shape == weighted.product.shape:
            if not any(p.axis == softmax.keys for dim in dims for p in axes[dim]):
                return  # over something else than the keys
            call = weighted.as_product(axes, dims[0]) if len(dims) == 1 else None
        else:
            call = None
        self._drop(softmax)
        if call is None:
            self._unreadable(softmax, OWN_VALUES.format(tuple(softmax.map.shape)))
            return
        items, rows, value = call
        with enable_reentrant_dispatch():
            weights = weighted.weights.detach()
        own = axes[len(axes) - weights.ndim :]
        read = read_axes(found, weights, items=items, rows=rows, columns=axes[dims[0]], axes=own)
        if isinstance(read, str):
            self._unreadable(softmax, read)
        else:
            self._read(softmax, read, value)

    def _product(self, args: tuple[Any, ...], out: Tensor) -> None:
        """A product that takes a pending softmax from the left, A V, or turned from the right, V' A'."""
        left, right = args[-2:]
        for used, other, is_left in ((left, right, True), (right, left, False)):
            found = self._pending.get(storage_of(used))
            if found is None or isinstance(found, Weighted):
                continue
            softmax, twice = found.softmax, isinstance(self._pending.get(storage_of(other)), Weights)
            self._drop(softmax)
            shape = tuple(softmax.map.shape)
            with enable_reentrant_dispatch():  # so that detached tensors share their version counters
                as_used, out = used.detach(), out.detach()
            read: Reading | str
            if isinstance(found, Lost):
                read = f"a map of shape {shape}, {found.why} before its values"
            elif version_of(found.weights) != found.version:
                read = "written to before it met its values"
            elif twice:
                read = "multiplied with a map"
            elif (inner := self._followed.get(storage_of(other))) and not inner.compared:
                self._settle(inner, "channels")  # linear attention: over channels, twice
                self._trace.beside.setdefault(softmax.caller.name, ("channels", shape))
                return
            else:
                read = read_map(found, as_used, left=is_left)
            if isinstance(read, str):
                self._unreadable(softmax, read)
            else:
                self._read(softmax, read, other if is_left else other.mT, out, is_left=is_left)
            return

    def _unreadable(self, softmax: PendingSoftmax, why: str) -> None:
        self._trace.unread.append(f"{softmax.caller.name} ({why})")

    def _batch_of(self, softmax: PendingSoftmax) -> int | None:
        """How many items a softmax is of: what the model was given, else what its module was, where the axes agree."""
        given, shape = softmax.caller.given, softmax.map.shape
        if self._batch is None and len(given) == len(shape) == 3 and shape[0] == given[0] and shape[1] in given[1:]:
            return given[0]
        return self._batch

    def _read(
        self,
        softmax: PendingSoftmax,
        read: Reading,
        value: Tensor,
        out: Tensor | None = None,
        *,
        is_left: bool = True,
    ) -> None:
        caller = softmax.caller
        batch = self._batch_of(softmax)
        heads, unclear = heads_among(read.lead, caller.heads, batch)
        map_, source, version = self._kept(read.map), read.source, read.version
        if read.empty is not None:
            map_ = map_.masked_fill(read.empty, 0.0)
        if storage_of(map_) != storage_of(source):  # a copy, whatever becomes of the model's own
            source, version = map_, version_of(map_)
        op = SoftmaxAttention(
            name=caller.name,
            layer=0,
            kind="self",
            shape=(0, 0, 0, 0),
            map=map_,
            source=source,
            version=version,
            rounded=read.whole and map_.dtype in (torch.float16, torch.bfloat16),
        )
        parts = {"map": map_, "value": read.value(value.detach()) if self._values else None}
        call = CallByAxes(op, caller, parts, heads, unclear)
        call.lay_out(heads)
        width = value.shape[-1]
        call.beside = self._beside(caller, op.shape, width)
        if not call.beside and call.has_own_values(batch, self._call.tokens):
            if caller.heads is not None or len(read.lead) != 2:
                self._unreadable(softmax, OWN_VALUES.format(tuple(softmax.map.shape)))
                return
            call.beside, out = "experts", None
        follows = out is not None and (caller.sinks is not None or not self._is_certain(call, batch, width))
        self._begin(call, follows=follows)
        if out is not None and follows:
            sides = (read.row, whole(len(read.lead) + 1, width))
            axes = (read.items, *(sides if is_left else sides[::-1]))
            self._follow_result(call, axes[3 - out.ndim :], out, width=width, sums=softmax.sums)

    # Which of its axes are heads

    def _is_certain(self, call: CallByAxes, batch: int | None, width: int) -> bool:
        """Whether sizes alone tell a call's heads and tokens from all else."""
        lead, given = call.lead, call.caller.given
        if call.beside == "layers":
            return True
        if call.unclear or call.beside or len(lead) != 2 or lead != (batch, call.caller.heads) or len(given) != 3:
            return False
        ordered = batch == 1 or lead[0] != lead[1]
        others = (width, lead[1]) if lead[1] > 1 else ()  # sizes that could be taken for the tokens'
        return ordered and given[:2] == (batch, call.queries) and call.queries not in others

    def _begin(self, call: CallByAxes, *, follows: bool) -> None:
        """Record a call, unless it is not among tokens; one that is followed may prove to be another."""
        if not follows:
            self._settle_call(call, None)
        if not call.beside:
            self._place(call, len(self._trace.ops))
            self._record(call.op)

    def _place(self, call: CallByAxes, layer: int) -> None:
        op = call.op
        op.layer, op.windows = layer, self._windows(op.shape[0])
        op.kind = self._kind_of(call.caller, op.shape, op.windows)

    def _follow_result(
        self, call: CallByAxes, axes: Axes, out: Tensor, *, width: int, sums: Tensor | None = None
    ) -> None:
        layout = laid_out(axes, out)
        if layout is None:
            self._settle_call(call, None)
        else:
            self._followed[storage_of(out)] = Following(call, layout, width, out.detach(), sums)
        if len(self._followed) > MOST_FOLLOWED:
            self._settle(next(iter(self._followed.values())), None)

    def _watch(self, func: Any, part: str, args: tuple[Any, ...], out: Any) -> None:
        """Look for what recorded calls gave: where its axes end up tells which are heads."""
        if func is aten.cat.default:
            self._watch_joined(args, out)
        elif part in ("carrier", "dropout"):
            result = out[0] if isinstance(out, tuple) else out
            given = next((a for a in args if isinstance(a, Tensor) and storage_of(a) in self._followed), None)
            if given is None or storage_of(result) == storage_of(given):
                return
            found = self._followed[storage_of(given)]
            found.take_factor(args)
            axes = found.within(given)
            if axes is not None and not self._tells(found, axes[-1]) and result.shape == given.shape:
                self._follow_copy(found, axes, result)
        elif part in CHANNELS:
            place, axis = CHANNELS[part]
            for given in args[place]:
                known = self._followed.get(storage_of(given)) if isinstance(given, Tensor) else None
                axes = None if known is None else known.within(given)
                if known is not None and axes is not None:
                    self._tells(known, axes[axis], projects=part in ("linear", "seen"))
            if part == "product":
                self._watch_product(args)

    def _watch_product(self, args: tuple[Any, ...]) -> None:
        """Rows that are summed over by weights of their own are channels; those that are compared are tokens."""
        if any(storage_of(arg) in self._pending for arg in args[-2:]):
            return  # told with the softmax
        for at, axis in ((-2, -1), (-1, -2)):
            found = self._followed.get(storage_of(args[at]))
            axes = None if found is None else found.within(args[at])
            if found is None or axes is None:
                continue
            if not any(p.axis == len(found.call.lead) for p in axes[axis]):
                found.compared = True
            elif at == -1 and not found.compared:
                self._settle(found, "channels")

    def _watch_joined(self, args: tuple[Any, ...], out: Tensor) -> None:
        parts: list[Tensor] = list(args[0])
        found = self._followed.get(storage_of(parts[0]))
        if found is None or len(parts) < 2 or any(storage_of(t) != storage_of(parts[0]) for t in parts):
            return
        axes = joined_within(found.layout, parts, (args[1] if len(args) > 1 else 0) % out.ndim)
        if axes is not None and not self._tells(found, axes[-1]):
            self._follow_copy(found, axes, out)

    def _follow_copy(self, found: Following, axes: Axes, copy: Tensor) -> None:
        if (moved := found.moved(axes, copy.detach())) is not None:
            self._followed[storage_of(copy)] = moved

    def _tells(self, found: Following, channels: Layout, *, projects: bool = False) -> bool:
        """Whether an axis of channels settles a call; one head at least where they are projected as they are."""
        told, call = found.told_by(channels, items=self._batch), found.call
        if told is None or (told == () and not (projects and call.caller.heads is None)):
            return False
        self._settle(found, told)
        return True

    def _settle(self, found: Following, told: Layout | str | None) -> None:
        self._followed = {k: f for k, f in self._followed.items() if f.call is not found.call}
        self._settle_call(found.call, told)

    def _settle_call(self, call: CallByAxes, told: Layout | str | None) -> None:
        """A call's heads, or what it is among instead of tokens; None where nothing tells."""
        op, ops, unread = call.op, self._trace.ops, self._trace.unread
        placed = op.layer < len(ops) and ops[op.layer] is op
        if not placed and told is not None and (not call.beside or self.follows_streams):
            told = call.beside or None  # taken out since, by the call that it was part of
        if told is None and call.unclear and not call.beside:
            unread.append(call.why_unclear)
        told = told or call.beside if told != () else told
        if isinstance(told, str) and told:
            if placed and op.step is not None:
                unread.append(f"{op.name} (attention among {told})")
                return
            if placed:
                del ops[op.layer]
                for layer, later in enumerate(ops[op.layer :], op.layer):
                    later.layer = layer
            self._trace.beside.setdefault(op.name, (told, op.shape))
        elif isinstance(told, tuple) and (told != call.heads or not placed):
            before = op.shape
            call.lay_out(told)
            self._place(call, op.layer if placed else len(ops))
            if not placed:
                self._record(op)
            elif op.step is not None and (before[0], before[2]) != (op.shape[0], op.shape[2]):
                unread.append(f"{op.name} (heads in an order of their own, where streams are joined)")

    def _beside(self, caller: Caller, shape: tuple[int, int, int, int], width: int) -> str:
        """What a call attends among, by its sizes, where that is not tokens."""
        return beside_tokens(
            caller.given,
            shape,
            width,
            heads=caller.heads,
            tokens=self._call.tokens,
            convolves=caller.convolves,
        )

    def is_beside(self, caller: Caller, shape: tuple[int, int, int, int], width: int) -> bool:
        """Whether a call attends among something else than tokens, of which the trace is then told."""
        what = self._beside(caller, shape, width)
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
