"""Torch's own fused Transformer layers: no attention shows inside them, their arguments tell it.

`nn.TransformerEncoder` and `nn.MultiheadAttention` run without gradients as one operator each.  Query and key
are projected once more from that operator's input and weights; the operator itself runs as it is.  An encoder that
packs a padded batch into a nested tensor is shown in the padded layout that the caller knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.utils.hooks import RemovableHandle

from attrace.capture.torch_compiled import Ends, Enter, Leave
from attrace.capture.torch_ops import QueryKeyAttention

aten = torch.ops.aten

LAYERS = {aten._transformer_encoder_layer_fwd.default, aten._native_multi_head_attention.default}
NESTING = aten._nested_tensor_from_mask.default

# What the kernels' `mask_type` says of the mask's axes.
QUERY_BY_KEY, BATCH_BY_KEY = 0, 1


@dataclass(eq=False)
class PackedAttention(QueryKeyAttention):
    """A call on sequences of several lengths, in the padded layout: rows of padding are all zeros."""

    real: Tensor = field(kw_only=True, repr=False)
    """(B, n), True at the tokens that the packed sequences hold."""

    def _recomputed(self, rows: Tensor | None) -> Tensor:
        real = self.real if rows is None else self.real[:, rows]
        return super()._recomputed(rows) * real[:, None, :, None]


class FusedLayers:
    """Reads the calls of fused layers of one model, in order."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._names: dict[int, str] | None = None
        self._layout: tuple[Tensor, int] | None = None
        self._bias: Tensor | None = None

    def nest(self, args: tuple[Any, ...]) -> None:
        """Note the layout of a padded batch that is being packed: (x, mask, mask_check)."""
        self._layout = (args[1].sum(1), args[1].shape[1])

    def name_of(self, args: tuple[Any, ...], caller: str) -> str:
        """The attention module whose weights a fused layer uses, as the layer's unfused call would name it."""
        if self._names is None:
            weights = ((n, getattr(m, "in_proj_weight", None)) for n, m in self._modules.items())
            self._names = {w.untyped_storage()._cdata: n for n, w in weights if n and isinstance(w, Tensor)}
        weight = next(a for a in args if isinstance(a, Tensor) and a.ndim == 2)
        return self._names.get(weight.untyped_storage()._cdata, caller)

    def read(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, values: bool
    ) -> tuple[type[QueryKeyAttention], dict[str, Any]]:
        """The kind of operator that a call is, and its tensors by name."""
        given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        given |= {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        streams = [given["src"]] * 3 if "src" in given else [given[k] for k in ("query", "key", "value")]
        lengths = lengths_of(streams[0])
        padded: list[Tensor] = []
        for number, stream in enumerate(streams):  # the same tensor, as a rule: then it is padded once
            same = next((p for s, p in zip(streams[:number], padded, strict=False) if s is stream), None)
            padded.append(self._padded(stream) if same is None else same)
        if given.get("norm_first"):
            width = (given["embed_dim"],)
            normed = nn.functional.layer_norm(
                padded[0], width, given["norm_weight_1"], given["norm_bias_1"], given["eps"]
            )
            padded = [normed] * 3
        heads = given["num_heads"] if "num_heads" in given else given["num_head"]
        weights, biases = given["qkv_weight"].detach().chunk(3), given["qkv_bias"].detach().chunk(3)
        parts = ("query", "key", "value") if values else ("query", "key")
        tensors: dict[str, Any] = {
            part: nn.functional.linear(x, w, b).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, x, w, b in zip(parts, padded, weights, biases, strict=False)
        }
        if lengths is not None:
            tensors["real"] = torch.arange(padded[0].shape[1], device=lengths.device) < lengths[:, None]
            tensors["bias"] = tensors["real"][:, None, None]
            return PackedAttention, tensors
        tensors["bias"] = self._attended(given.get("mask"), given.get("mask_type"))
        return QueryKeyAttention, tensors

    def _padded(self, x: Tensor) -> Tensor:
        """A packed batch in its padded layout (B, n, E); another one as it is."""
        lengths = lengths_of(x)
        if lengths is None:
            return x.detach()
        n = int(lengths.max())
        if self._layout is not None and torch.equal(lengths, self._layout[0]):
            n = self._layout[1]  # the caller may have padded further than the longest sequence
        return x.detach().to_padded_tensor(0.0, (len(lengths), n, x.size(-1)))

    def _attended(self, mask: Tensor | None, kind: int | None) -> Tensor | None:
        """The mask as the kernels read it: whatever is not zero hides a key, an additive bias too."""
        if mask is None:
            self._bias = None
            return None
        if kind == BATCH_BY_KEY and mask.ndim == 2:
            mask = mask[:, None, None]
        elif kind != QUERY_BY_KEY and mask.ndim == 4:
            # Expanded for every layer anew, (B, H, Q, T): what is the same for all heads is kept once.
            mask = mask[:1] if mask.stride(0) == 0 else mask
            mask = mask[:, :1] if mask.stride(1) == 0 or bool((mask == mask[:, :1]).all()) else mask
        attended = mask.detach() == 0
        if self._bias is not None and torch.equal(attended, self._bias):
            return self._bias
        self._bias = attended
        return attended


def lengths_of(x: Tensor) -> Tensor | None:
    """The lengths of a packed batch, (B,); None where x is not packed."""
    return x._nested_tensor_size()[:, 0].to(x.device) if x.is_nested else None


def named_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the model's forward by name, those given by position as well."""
    if not args:
        return kwargs
    try:
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call itself will tell
        return kwargs
    return {**bound, **kwargs}


def real_tokens(given: Mapping[str, Any]) -> Any:
    """The mask of real tokens, 1 or True, among a forward's arguments; torch's own modules name the padding."""
    for name in ("src_key_padding_mask", "key_padding_mask"):
        if isinstance(padding := given.get(name), Tensor):
            return padding == 0
    return given.get("attention_mask")


def watch(
    model: nn.Module,
    enter: Enter,
    leave: Leave,
    tell: Enter,
) -> tuple[Ends | Outside | RemovableHandle, ...]:
    """Hooks at the ends of the model's forward.

    A `nn.TransformerEncoderLayer` that sees hooks on itself leaves its fast path, and its output changes in the
    last digits.  It is watched from outside, by hooks on all modules; those are told the keyword arguments only
    after the call, and `tell` passes them on.
    """
    if model._compiled_call_impl is not None:
        return (Ends(model, enter, leave),)
    if not isinstance(model, nn.TransformerEncoderLayer):
        return (
            model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(leave, prepend=True, always_call=True),
        )

    def entering(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module is model:
            enter(module, args, {})

    def leaving(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if module is model:
            if len(rest) == 2:  # after an error a hook is called without keyword arguments
                tell(module, args, rest[0])
            leave(module, args, rest[-1])

    return (
        every_module.register_module_forward_pre_hook(entering),
        Outside(every_module.register_module_forward_hook(leaving, with_kwargs=True, always_call=True)),
    )


class Outside:
    """A hook on all modules that is told keyword arguments; torch forgets to take back the note that it is."""

    def __init__(self, handle: RemovableHandle) -> None:
        self._handle = handle

    def remove(self) -> None:
        self._handle.remove()
        every_module._global_forward_hooks_with_kwargs.pop(self._handle.id, None)
