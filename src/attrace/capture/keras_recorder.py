"""The Keras seam: see every attention call under any layer, on TensorFlow, JAX and PyTorch, and change nothing.

A fused call is recorded by its arguments, an unfused one by its softmax, once that softmax meets the values in a
product: what a call is decides, not what its layer is named.  Whether an operand comes from a softmax is seen on its
numbers, so that casts, masks, dropout and reshapes in between need no table.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import keras
import numpy as np
from keras.src.backend import in_symbolic_scope
from numpy.typing import NDArray

from attrace.capture.beside import beside_tokens
from attrace.capture.keras_forms import Form, einsum_form, matmul_form
from attrace.capture.keras_ops import KerasFused, KerasMap, held, to_numpy
from attrace.capture.keras_seam import Call, listening
from attrace.capture.keras_streams import Frame, frame_of, joined
from attrace.capture.numpy_ops import NumpyAttention
from attrace.capture.trace import Trace
from attrace.errors import CaptureError
from attrace.ops.attention.numpy_rows import empty_rows
from attrace.ops.namespace import dtype_name, framework_of
from attrace.types import Array

HEAD_COUNTS = ("num_heads", "_num_heads", "num_query_heads", "num_attention_heads")
# Arguments of an attention layer's call that hold a second stream.
SECOND_STREAMS = (
    "key_value_states",
    "encoder_hidden_states",
    "encoder_states",
    "encoder_sequence",
    "memory",
    "context",
)
PADDING = ("padding_mask", "attention_mask", "mask")
# Layers that turn scores into weights for the layer around them.
INNER = (keras.layers.Softmax, keras.layers.Activation, keras.layers.Dropout)
# Layers whose softmax is their activation.
OUTER = (keras.layers.Dense, keras.layers.EinsumDense)


@dataclass
class Pending:
    """A softmax that has not met its values yet."""

    weights: Array
    name: str
    empty: NDArray[np.bool_] | None = None
    """The rows in which all is masked, (..., 1), where there are any."""

    def read(self, used: Array) -> Array | None:
        """The map, if it is this one that multiplied the values as `used`; rows in which all is masked are zero."""
        found = used_map(self.weights, used)
        if found is None or self.empty is None or prod(used.shape[:-1]) != self.empty.size:
            return found
        values = to_numpy(found)
        return np.where(self.empty.reshape(*used.shape[:-1], 1), values.dtype.type(0), values)


class Recorder:
    """Fills a trace while the model runs; hears its own thread only (`keras_seam.Listener`)."""

    def __init__(self, trace: Trace, model: Any) -> None:
        self._trace = trace
        self._model = model
        self._own = {id(layer) for layer in model._flatten_layers()}
        self._stack: list[Frame] = []
        self._pending: list[Pending] = []
        self._batch: int | None = None

    # Which layer runs

    def enter(self, layer: Any, call: Call) -> bool:
        if in_symbolic_scope():
            return False
        if not self._stack:
            given = keras.tree.flatten(call)
            symbolic = any(isinstance(x, keras.KerasTensor) for x in given)
            if symbolic or id(layer) not in self._own:  # a model that is being put together, or another model
                return False
            if layer is self._model or not self._trace.starts:
                self._begin(layer, call, given)
        self._stack.append(frame_of(layer, call, self._stack[-1] if self._stack else None))
        return True

    def _begin(self, layer: Any, call: Call, given: list[Any]) -> None:
        arguments = named_arguments(layer, call)
        self._batch = next((x.shape[0] for x in given if len(getattr(x, "shape", ())) > 0), None)
        first = next(iter(arguments.values()), None)
        named = {**(first if isinstance(first, Mapping) else {}), **arguments}
        self._trace.begin(next((named[k] for k in PADDING if len(getattr(named.get(k), "shape", ())) == 2), None))
        self._trace.dropout |= bool(arguments.get("training"))

    def leave(self, layer: Any, output: Any) -> None:
        self._stack.pop()
        if isinstance(layer, keras.layers.Softmax) and output is not None:
            self._softmax_layer(layer, output)
        if layer is self._model and output is not None:
            self._trace.output = output
        if not self._stack:
            self._settle(output)

    def _settle(self, output: Any) -> None:
        """What is left when the model returns: maps that met no values, unless they are the answer itself."""
        answers = [x for x in keras.tree.flatten(output) if x is not None]
        for softmax in self._pending:
            shape = tuple(softmax.weights.shape)
            answer = any(tuple(x.shape) == shape for x in answers)
            if len(shape) > 3 and output is not None and not answer:  # the routers of experts have three axes
                self._trace.unread.append(f"{softmax.name} (a softmax of shape {shape} that multiplies no values)")
        self._pending.clear()

    def _owner(self) -> tuple[Frame, Frame | None]:
        """The innermost layer that is more than a step of attention, and the one around it."""
        whole = [frame for frame in self._stack if not isinstance(frame.layer, INNER)] or self._stack
        return whole[-1], whole[-2] if len(whole) > 1 else None

    def _name(self) -> str:
        layers = [frame.layer for frame in self._stack if not isinstance(frame.layer, INNER)]
        names = [layer.name for layer in layers if layer is not self._model]
        return "/".join(names) or str(self._model.name)

    # What it calls

    def softmax(self, call: Call, output: Any) -> None:
        if not self._stack or isinstance(self._stack[-1].layer, OUTER) or len(output.shape) < 3:
            return
        axis = next((call[1][k] for k in ("axis", "dim") if k in call[1]), call[0][1] if len(call[0]) > 1 else -1)
        if axis not in (None, -1, len(output.shape) - 1):
            return
        if self._has_values(output):
            scores = to_numpy(call[0][0] if call[0] else next(iter(call[1].values())))
            empty = empty_rows(scores)
            if empty.any():  # but not where the model itself has NaN
                empty &= ~np.isnan(to_numpy(output)[..., :1])
            self._pending.append(Pending(held(output), self._name(), empty if empty.any() else None))

    def _softmax_layer(self, layer: Any, output: Any) -> None:
        """Its own output stands for what it called: masked cells are zero, and it may go over several axes."""
        axes = layer.axis if isinstance(layer.axis, list | tuple) else (layer.axis,)
        count = len(output.shape)
        if count < 3 or not self._has_values(output):
            return
        empty = None
        if len(axes) == 1 and self._pending and tuple(self._pending[-1].weights.shape) == tuple(output.shape):
            empty = self._pending.pop().empty
        if max(axis % count for axis in axes) == count - 1:
            self._pending.append(Pending(held(output), self._name(), empty))

    def product(self, call: Call, output: Any) -> None:
        if not self._stack or not self._pending or not self._has_values(output):
            return
        args = [*call[0], *(call[1][k] for k in ("x1", "x2", "a", "b", "input", "mat2", "other") if k in call[1])]
        equation = args.pop(0) if isinstance(args[0], str) else None
        if len(args) != 2 or call[1].get("transpose_a") or any(not hasattr(x, "shape") for x in args):
            return
        for which in (0, 1) if equation is not None else (0,):
            used, other = args[which], args[1 - which]
            for softmax in reversed(self._pending):
                weights = softmax.read(held(used))
                if weights is None:
                    continue
                self._pending.remove(softmax)
                shapes = tuple(used.shape), tuple(other.shape)
                form = matmul_form(*shapes) if equation is None else einsum_form(equation, which, *shapes)
                if form is not None:
                    self._map(weights, form, shapes[1])
                return

    def fused(self, call: Call, output: Any) -> None:
        """`keras.ops.dot_product_attention` and `jax.nn.dot_product_attention`: (B, Q, H, D)."""
        if not self._stack or not self._has_values(output):
            return
        given = dict(zip(("query", "key", "value", "bias", "mask"), call[0], strict=False)) | call[1]
        strange = [
            k
            for k in ("query_seq_lengths", "key_value_seq_lengths", "local_window_size", "attn_logits_soft_cap")
            if given.get(k) is not None and not (k == "attn_logits_soft_cap" and not on_tpu())
        ]
        if strange or len(given["query"].shape) != 4:
            self._trace.unread.append(f"{self._name()} (fused attention with {', '.join(strange) or 'other axes'})")
            return
        batch, queries, heads, _ = given["query"].shape
        causal, scale = given.get("is_causal", False), given.get("scale")
        bias, mask = given.get("bias"), given.get("mask")
        shape = (batch, heads, queries, given["key"].shape[1])
        if self._is_beside(shape, given["value"].shape[-1]):
            return
        self._record(
            KerasFused(
                **self._where(shape),
                query=held(given["query"]),
                key=held(given["key"]),
                bias=None if bias is None else held(bias),
                mask=None if mask is None else held(mask),
                is_causal=bool(causal),
                scale=None if scale is None else float(scale),
            )
        )

    def torch_fused(self, call: Call, output: Any) -> None:
        """`torch.nn.functional.scaled_dot_product_attention`: (B, H, Q, D)."""
        if not self._stack or not self._has_values(output):
            return
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, call[0], strict=False)) | call[1]
        query, key, mask = given["query"], given["key"], given.get("attn_mask")
        if len(query.shape) != 4:
            self._trace.unread.append(f"{self._name()} (fused attention of {len(query.shape)} axes)")
            return
        boolean = mask is not None and dtype_name(mask) == "bool"
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        if self._is_beside(shape, given["value"].shape[-1]):
            return
        self._record(
            KerasFused(
                **self._where(shape),
                query=held(query),
                key=held(key),
                bias=None if mask is None or boolean else held(mask),
                mask=held(mask) if boolean else None,
                is_causal=bool(given.get("is_causal", False)),
                scale=given.get("scale"),
                heads_first=True,
            )
        )

    def _map(self, weights: Array, form: Form | str, value: tuple[int, ...]) -> None:
        shape = tuple(weights.shape)
        found = form if isinstance(form, str) else form.shape(shape, self._batch, self._heads())
        if isinstance(form, str) or isinstance(found, str):
            self._trace.unread.append(f"{self._name()} ({found})")
            return
        width = prod(value) // (found[0] * (1 if form.grouped else found[1]) * found[3])
        if not self._is_beside(found, width):
            self._record(KerasMap(**self._where(found), map=weights, axes=form.axes))

    def _is_beside(self, shape: tuple[int, int, int, int], width: int) -> bool:
        """Whether a call attends among something else than tokens, of which the trace is then told."""
        frame, _ = self._owner()
        given = next((x.shape for x in named_arguments(frame.layer, frame.call).values() if hasattr(x, "shape")), ())
        what = beside_tokens(given, shape, width, heads=self._heads(), tokens=None)
        if what:
            self._trace.beside.setdefault(self._name(), (what, shape))
        return bool(what)

    def _heads(self) -> int | None:
        layer = self._owner()[0].layer
        found = (getattr(layer, name, None) for name in HEAD_COUNTS)
        return next((heads for heads in found if isinstance(heads, int) and heads > 0), None)

    def _where(self, shape: tuple[int, int, int, int]) -> dict[str, Any]:
        frame, outer = self._owner()
        query, source, cross = query_and_source(named_arguments(frame.layer, frame.call), shape)
        queries, keys = joined(frame, outer, query, source, cross=cross)
        kind: Literal["self", "cross"] = "cross" if cross else "self"
        where = {"name": self._name(), "layer": len(self._trace.ops), "shape": shape, "kind": kind}
        return {**where, "queries": queries, "keys": keys}

    def _record(self, op: NumpyAttention) -> None:
        self._trace.ops.append(op)

    def _has_values(self, output: Any) -> bool:
        if in_symbolic_scope():  # a layer that is built during the call works out its shapes
            return False
        framework = framework_of(output)
        if framework is None or framework.known(output):
            return True
        self._trace.compiled = True
        return False


def used_map(softmax: Array, used: Array) -> Array | None:
    """The map that multiplied the values, before dropout, in the axes of `used`; None where it is not this softmax.

    It may have been masked, cut (a sink), cast, reshaped, dropped out or scaled since.
    """
    if used is softmax:
        return softmax
    before, after = tuple(softmax.shape), tuple(used.shape)
    cut = before[:-1] == after[:-1] and after[-1] < before[-1]
    if before != after and not cut and prod(before) != prod(after):
        return None
    made, seen = to_numpy(softmax), to_numpy(used)
    made = made[..., : after[-1]] if cut else made.reshape(after)
    kept = seen != 0
    if not kept.any():
        return None if made.any() else softmax
    with np.errstate(divide="ignore"):
        ratio = seen[kept] / made[kept]
    low, high = float(ratio.min()), float(ratio.max())
    # Half precision is off by up to 2^-8.
    near = 1e-4 if dtype_name(used) in ("float32", "float64") else 1e-2
    if not high - low <= max(0.02 * high, 2 * near):  # NaN ends here too
        return used if np.isnan(made).any() and np.array_equal(made, seen, equal_nan=True) else None
    if 1 - near <= low and high <= 1 + near:
        masked: NDArray[Any] = np.where(kept, made, made.dtype.type(0))
        return softmax if before == after and not (made != masked).any() else masked
    return made if low > 1 else used


def query_and_source(given: dict[str, Any], shape: tuple[int, int, int, int]) -> tuple[Any, Any, bool]:
    """The arguments of an attention layer that hold queries and keys, and whether these are of another stream."""
    query, sources = given.get("query"), [given[k] for k in ("key", "value") if given.get(k) is not None]
    listed = given.get("inputs")
    if isinstance(listed, list | tuple) and len(listed) > 1:
        query, sources = listed[0], list(listed[1:])
    if query is not None and sources:
        return query, sources[-1], all(source is not query for source in sources)
    first = next((x for x in given.values() if hasattr(x, "shape")), None)
    second = next((given[k] for k in SECOND_STREAMS if hasattr(given.get(k), "shape")), None)
    if second is not None:
        return first, second, True
    return first, first, shape[2] != shape[3]


def named_arguments(layer: Any, call: Call) -> dict[str, Any]:
    """The arguments of the layer's call by name, those given by position as well."""
    try:
        return dict(inspect.signature(layer.call).bind_partial(*call[0], **call[1]).arguments)
    except (TypeError, ValueError):  # the call itself will tell
        return dict(call[1])


def on_tpu() -> bool:
    """Where alone Keras heeds a soft cap of the logits."""
    if keras.backend.backend() != "jax":
        return False
    import jax

    return bool(jax.devices()[0].platform == "tpu")


@contextmanager
def recording(model: Any) -> Iterator[Trace]:
    """Record a Keras model or layer: `attrace.record` without its warnings.

    The model must be called itself, on values; what Keras compiles (predict, fit, generate) shows none.
    """
    if not isinstance(model, keras.Layer):
        raise CaptureError(f"Expected a Keras model or layer. Received: {type(model).__name__}.")
    trace = Trace(type(model).__name__)
    with listening(Recorder(trace, model)):
        yield trace
