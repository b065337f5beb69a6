"""Unfused attention: a softmax, what becomes of it, and the product or sum in which it meets the values."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import enable_reentrant_dispatch

from attrace.capture.callers import ANOTHER
from attrace.capture.layouts import whole
from attrace.capture.torch_blocks import BlockInputs
from attrace.capture.torch_forms import (
    CallByAxes,
    Lost,
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
from attrace.capture.torch_ops import SoftmaxAttention, version_of
from attrace.capture.torch_placing import Placing
from attrace.capture.trace import Trace
from attrace.ops.attention.rows import empty_rows

aten = torch.ops.aten

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
# Copies into another shape: a softmax that meets values after one of them is not followed, but not passed over either.
REARRANGED = {aten.constant_pad_nd.default, aten.cat.default}
SHARED_BYTES = 1 << 18
"""Masks and biases as large as this are looked for among those of the layers before."""
MOST_BIASES = 4


class Softmaxes(Placing):
    """Follows each softmax under a caller of the model until it multiplies values."""

    def __init__(self, trace: Trace, modules: dict[str, nn.Module], *, blocks: BlockInputs | None) -> None:
        super().__init__(trace, modules, blocks=blocks)
        self._exponents: weakref.ref[Tensor] | None = None
        self._biases: deque[tuple[Tensor, int]] = deque(maxlen=MOST_BIASES)
        self._noise: dict[int, Tensor] = {}
        """What dropout drew, by its storage."""

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

    def _is_unbatched(self, args: tuple[Any, ...]) -> bool:
        """Whether a product of matrices is of a softmax (Q, T), not of one whose axes it has merged."""
        found = (self._pending.get(storage_of(arg)) for arg in args[-2:])
        return any(isinstance(f, Weights | Lost) and f.softmax.map.ndim == 2 for f in found)

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
        own = "" if call.beside else call.own_values(batch, self._call.tokens)
        if own == "points":
            self._unreadable(softmax, OWN_VALUES.format(tuple(softmax.map.shape)))
            return
        if own == "experts":
            call.beside, out = "experts", None
        follows = out is not None and (caller.sinks is not None or not self._is_certain(call, batch, width))
        self._begin(call, follows=follows)
        if out is not None and follows:
            sides = (read.row, whole(len(read.lead) + 1, width))
            axes = (read.items, *(sides if is_left else sides[::-1]))
            self._follow_result(call, axes[3 - out.ndim :], out, width=width, sums=softmax.sums)
