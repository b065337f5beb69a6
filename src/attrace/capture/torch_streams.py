"""Which token stream every attention call of a PyTorch model reads, found by following its data.

A label is a state of the stream graph (`attrace.ops.rollout.streams`).  The arguments of the model's forward get one
each, named after the argument; what an operator computes takes the label of its first labelled argument; parameters
and masks have none.  An attention call makes a new state, and a sum of two states of one stream is the newer one.
Labels belong to storages, which views share.  A weak reference to each keeps its address from being given to another
storage; the data goes when the model lets go of it.

Only models with more than one stack of layers, or more than one input, are followed: the rest have one stream.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attrace.capture.stream_labels import Labels
from attrace.capture.torch_fastpath import named_arguments
from attrace.capture.torch_forms import Weighted, storage_of
from attrace.capture.torch_layers import modules_of
from attrace.capture.torch_ops import TorchAttention
from attrace.capture.torch_recorder import PARTS, GuardedRecorder, Recorder
from attrace.ops.rollout.streams import StreamGraph

aten = torch.ops.aten

NO_STREAM = (
    "mask",
    "position",
    "type_id",
    "segment",
    "past_key",
    "cache",
    "bias",
    "labels",
    "size",
    "grid",
    "num_",
    "use_",
)
"""Parts of the names of arguments that hold no tokens."""
TOKEN_INPUTS = {"input_ids", "pixel_values", "input_features", "input_values", "visual_feats", "visual_embeds"}
CROSSING = re.compile("cross|encoder_attn|encdec|multihead_attn", re.IGNORECASE)
"""Names of modules that read a second stream."""
LEARNED = re.compile(r"^(latents?|probe|query_tokens?|queries|query_embeds?)$")
"""Names of parameters that are tokens by themselves."""
PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
CATS = {aten.cat.default}
# Operators that take nothing but shape and type from their arguments.
EMPTY = {
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
}
PASS, MUTATES, FRESH, CAT = range(4)


class StreamRecorder(Recorder):
    """A recorder that also follows which stream everything belongs to."""

    follows_streams = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._graph = StreamGraph()
        self._trace.flow = self._graph
        self._labels = Labels()
        self._learned: dict[str, int] = {}
        """Stream of learned tokens -> its newest state."""
        self._unasked: list[int] = []
        """Storages of learned tokens, parameters among them, that have a label for one call of the model."""
        self._cuts: dict[tuple[int, int, int], int] = {}
        """(state, start, count) -> the state of these tokens alone."""
        self._two_sided = bool(getattr(self._trace.config, "is_encoder_decoder", False))

    def enter_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        super().enter_model(model, args, kwargs)
        if self._running and kwargs is not None:
            self._labels.drop_dead()
            self._learned.clear()
            for address in self._unasked:
                self._labels.forget(address)
            self._unasked.clear()
            given, seen = named_arguments(model, args, kwargs), set[int]()
            encoded = self._adopted()
            mask = given.get("decoder_attention_mask")
            self._trace.masks = {"decoder_input_ids": mask != 0} if isinstance(mask, Tensor) and mask.ndim == 2 else {}
            for name, tensor in streams_given(given, two_sided=self._two_sided):
                label, address = self._labels.get(storage_of(tensor)), storage_of(tensor)
                if label is None or (address not in seen and self._graph.states[label].made is None):
                    begun = encoded if name == "encoder_outputs" else None
                    self._labels.set(tensor, self._graph.start(name) if begun is None else begun)
                seen.add(address)  # what an earlier call computed goes on; what it was given begins anew

    def _adopted(self) -> int | None:
        """What an encoder gave that ran by itself before the model, as for generation; its calls follow each other."""
        outside = [op for op in self._trace.ops if op.step is None]
        for op in outside:
            state = self._graph.latest(op.queries)
            state = self._graph.start(op.queries) if state is None else state
            op.step, _ = self._graph.attend(state, state, op.shape, op.name)
        return self._graph.newest(outside[-1].queries) if outside else None

    def leave_model(self, _model: nn.Module, _args: Any, output: Any) -> None:
        super().leave_model(_model, _args, output)
        self._labels.drop_dead()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        how = HOW.get(func)
        if how is None:
            how = HOW[func] = how_of(func)
        if how == PASS or not self._running:
            return super().__torch_dispatch__(func, types, args, kwargs)
        count, ends = len(self._trace.ops), None
        part = PARTS[func]
        if part in ("fused", "external"):
            ends = args[0], args[2], args[1]
        elif part in ("product", "linear") and self._pending:
            left, right = args[-2:]
            ends = (left, right, None) if storage_of(left) in self._pending else (right, left, None)
        elif part == "sum" and isinstance(weighted := self._pending.get(storage_of(args[0])), Weighted):
            ends = weighted.weights, weighted.value, None
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self._trace.ops) > count and (new := [op for op in self._trace.ops[count:] if op.step is None]):
            self._join(new, ends or ends_among(args), out)
        else:
            self._follow(func, how, args, out)
        return out

    def _state_read(self, tensor: Tensor, axis: int | None = None) -> int | None:
        """The label of a tensor: that of its storage, or of the tokens of it that the tensor has.

        `axis` is that of the tokens, where it is known.
        """
        label = self._labels.get(storage_of(tensor))
        if label is None or label < 0:
            return label
        state = self._graph.states[label]
        if state.length is None and axis is None and not self._two_sided:
            return label  # it may as well be cut into heads
        found = self._labels.run_of(tensor, state.length, axis)
        if found is None:
            return label
        start, count, total = found
        at = self._cuts.get((label, start, count))
        if at is None:
            state.length = total
            named = self._two_sided and not self._graph.is_attended(label)
            at = self._cuts[label, start, count] = self._graph.cut(label, start, count, named=named)
        return at

    # Attention

    def joined(self, ops: list[TorchAttention], query: Tensor, key: Tensor, value: Tensor, output: Any) -> None:
        self._join([op for op in ops if op.step is None], (query, value, key), output)

    def _join(self, ops: list[TorchAttention], ends: tuple[Tensor, Tensor, Tensor | None], out: Any) -> None:
        """Note which states new calls read, and label what they give."""
        query, value, key = ends
        for op in ops:
            queries, keys = self._state_read(query, -2), self._state_read(value, -2)
            if keys is None and key is not None:
                keys = self._state_read(key, -2)
            if queries is None or queries < 0:
                queries = self._learned_state(stack_of(op.name), op.shape[2])
            if keys is None or keys < 0:
                same_tokens = op.kind == "self" and op.shape[2] == op.shape[3]
                keys = queries if same_tokens else self._learned_state(f"{stack_of(op.name)}.keys", op.shape[3])
            op.step, made = self._graph.attend(queries, keys, op.shape, op.name)
            op.queries, op.keys = (self._graph.states[state].stream for state in (queries, keys))
            op.kind = "self" if op.queries == op.keys else "cross"
            if op.queries in self._learned:
                self._learned[op.queries] = made
            for tensor in tensors_of(out):
                self._labels.set(tensor, made)

    def _learned_state(self, name: str, length: int) -> int:
        """The state of tokens that come from no input, named after their stack of modules."""
        at = self._learned.get(name)
        if at is None or self._graph.states[at].length != length:
            name = name if at is None else f"{name}#{len(self._learned) + 1}"
            at = self._learned[name] = self._graph.start(name, length)
        return at

    # Everything else

    def _follow(self, func: Any, how: int, args: tuple[Any, ...], out: Any) -> None:
        outputs = [out] if isinstance(out, Tensor) else [t for t in tensors_of(out) if t.is_floating_point()]
        if not outputs or outputs[0].dtype == torch.bool:
            return
        if how == FRESH and self._labels.get(storage_of(outputs[0])) is not None:
            return  # a composite operator whose parts were followed
        label = self._cat(args) if how == CAT else self._label_of(func, args, outputs[0])
        if label is not None:
            for tensor in outputs:
                self._labels.set(tensor, label)

    def _label_of(self, func: Any, args: tuple[Any, ...], out: Tensor) -> int | None:
        label, ids = None, None
        for tensor in tensors_of(args):
            found = self._state_read(tensor)
            if found is None:
                continue
            if not (tensor.is_floating_point() or tensor.is_complex()):
                ids = tensor if ids is None else ids
            elif label is None:
                label = found
            elif found != label:
                label = self._newer(label, found)
        if func in PRODUCTS:  # scores belong to their queries, whether these are labelled or not
            left = self._state_read(args[-2], -2)
            if left is not None:
                return left
            return label if label is None or label < 0 else ~label
        if label is None and ids is not None:
            label = self._labels.get(storage_of(ids))
            if label is not None and out.is_floating_point():
                label = self._first_read(label, ids)
        return label

    def _newer(self, one: int, other: int) -> int:
        """The label of what was made of two labelled parts."""
        if one < 0 or other < 0:
            return one
        graph = self._graph
        older, newer = sorted((one, other))
        if graph.descends(newer, older):
            return newer
        if graph.states[one].stream == graph.states[other].stream:
            return graph.average(one, other)
        return one

    def _first_read(self, label: int, ids: Tensor) -> int:
        """The state of ids that are embedded: a new stream where attention is over what they gave before.

        A model without decoder_input_ids makes them of its input.
        """
        stream = self._graph.states[label].stream
        if not self._graph.attended_since(label):
            return label
        name = f"{stack_of(self._caller().name)}.{stream}"
        if self._two_sided and self._graph.latest("decoder_input_ids") is None:
            name = "decoder_input_ids"
        label = self._graph.start(name)
        self._labels.set(ids, label)
        return label

    def _cat(self, args: tuple[Any, ...]) -> int | None:
        """The label of tensors laid side by side: a new state where they are different tokens."""
        parts = [t for t in args[0] if t.numel()]
        labels = [self._state_read(t) for t in parts]
        known = [label for label in labels if label is not None and label >= 0]
        if not known:
            return next((label for label in labels if label is not None), None)
        if len(parts) == 1 or len(set(labels)) == 1:
            return known[0]
        dim = (args[1] if len(args) > 1 else 0) % parts[0].ndim
        sizes = [t.shape[dim] for t in parts]
        if any(label is not None and label < 0 for label in labels) or not self._along_tokens(labels, parts, dim):
            merged = known[0]
            for other in known[1:]:
                merged = merged if other == merged else self._newer(merged, other)
            return merged
        if None not in labels:
            return self._graph.join(known, sizes)
        if len(set(known)) == 1 and self._graph.states[known[0]].length is None:
            return known[0]  # a class token before the first layer: part of the stream
        name = stack_of(self._caller().name)
        states = []
        for label, tensor, size in zip(labels, parts, sizes, strict=True):
            if label is not None:
                states.append(label)
                continue
            states.append(self._learned_state(name, size))
            self._labels.set(tensor, states[-1])
            self._unasked.append(storage_of(tensor))
        return self._graph.join(states, sizes)

    def _along_tokens(self, labels: list[int | None], parts: list[Tensor], dim: int) -> bool:
        """Whether a cat's axis is that of the tokens: never the last one, of features or of keys (a sink's column)."""
        if dim == parts[0].ndim - 1:
            return False
        usual = (parts[0].ndim, dim) in ((3, 1), (4, 2))
        for label, tensor in zip(labels, parts, strict=True):
            if label is not None:
                length = self._graph.states[label].length
                if length != tensor.shape[dim] and not (length is None and usual):
                    return False
        return True


class GuardedStreamRecorder(GuardedRecorder, StreamRecorder):
    """The same for a model with compiled parts."""


StreamRecorder.guarded = GuardedStreamRecorder


HOW: dict[Any, int] = {**dict.fromkeys(EMPTY, PASS), **dict.fromkeys(CATS, CAT)}


def how_of(func: Any) -> int:
    """What an operator does with the storages of its arguments."""
    if func.is_view:
        return PASS
    return MUTATES if func._schema.is_mutable else FRESH


def ends_among(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    """(query, value, key) of a call whose operator is not known: its first three tensors, or one for all."""
    found = list(tensors_of(args))
    if len(found) > 2 and min(tensor.ndim for tensor in found[:3]) > 2:
        return found[0], found[2], found[1]
    return found[0], found[0], None


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Tensors among arguments or results, those in lists too."""
    for value in (values,) if isinstance(values, Tensor) else values if isinstance(values, tuple | list) else ():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


def streams_given(given: Mapping[str, Any], *, two_sided: bool) -> Iterator[tuple[str, Tensor]]:
    """The arguments of a forward that hold tokens: (name, tensor), nested ones under their outermost name."""
    for argument, value in given.items():
        # An encoder-decoder makes its decoder's input of the labels.
        name = "decoder_input_ids" if two_sided and argument == "labels" else argument
        if any(part in name for part in NO_STREAM):
            continue
        if isinstance(value, Tensor):
            if value.dtype != torch.bool and value.ndim:
                yield name, value
        elif isinstance(value, Mapping):
            held = {key: inner for key, inner in value.items() if isinstance(inner, Tensor)}
            # A model's output given back to it is one stream; a batch of named inputs several.
            outer = None if name in ("kwargs", "inputs", "batch") or not hasattr(value, "to_tuple") else name
            for key, inner in streams_given(held, two_sided=two_sided):
                yield outer or key, inner
        elif isinstance(value, tuple | list):
            for inner in tensors_of(value):
                if inner.dtype != torch.bool and inner.ndim:
                    yield name, inner


def stack_of(name: str) -> str:
    """The stack of modules that a module belongs to: its name up to the first number.

    >>> stack_of("qformer.encoder.layer.0.attention.attention")
    'qformer.encoder'
    """
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    if first == len(parts):
        return name
    return ".".join(parts[: max(1, first - 1)])


_FOLLOWED: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def has_streams(model: nn.Module) -> bool:
    """Whether a model may have more than one stream: several stacks of layers, or several inputs."""
    found = _FOLLOWED.get(model)
    if found is None:
        found = _FOLLOWED[model] = _has_streams(model)
    return found


def _has_streams(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "sub_configs", None):
        return True
    stacks = set()
    for name, module in modules_of(model).items():
        parts = name.split(".")
        first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if first is not None and first == len(parts) - 1 and next(module.children(), None) is not None:
            stacks.add(tuple(parts[:first]))
        if CROSSING.search(parts[-1]) or any(LEARNED.search(own) for own, _ in module._parameters.items()):
            return True
    return len(stacks) > 1 or _inputs(model) > 1


def _inputs(model: nn.Module) -> int:
    """How many inputs of a forward hold tokens: those of known names, or those that it cannot do without."""
    try:
        found = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return 1
    needed = [p for p in found if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in needed if not any(part in p.name for part in NO_STREAM)]
    return max(len(needed), sum(p.name in TOKEN_INPUTS for p in found))


def default_stream(model: nn.Module) -> str:
    """The name of a model's one stream: its main input."""
    name = getattr(model, "main_input_name", None)
    if isinstance(name, str):
        return name
    try:
        return next(iter(inspect.signature(model.forward).parameters), "input")
    except (TypeError, ValueError):
        return "input"


def recorder_class(model: nn.Module, *, guarded: bool) -> type[Recorder]:
    if has_streams(model):
        return GuardedStreamRecorder if guarded else StreamRecorder
    return GuardedRecorder if guarded else Recorder
