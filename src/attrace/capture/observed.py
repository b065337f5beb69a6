"""What a run shows of where its tokens come from: convolutions, joined tokens, windows.  Sizes and names only.

The recorder passes by every operator of the model; these few are noted with their shapes, so that the grid of an
image need not be guessed from a token count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

aten = torch.ops.aten

CONVOLUTIONS = {aten.convolution.default}
# Operator -> position of (kernel, stride, padding, dilation) among its arguments.
POOLS: dict[Any, tuple[int, int, int, int | None]] = {
    aten.max_pool2d_with_indices.default: (1, 2, 3, 4),
    aten.avg_pool2d.default: (1, 2, 3, None),
}
JOINS = {aten.cat.default}
PARTS: set[Any] = CONVOLUTIONS | JOINS | set(POOLS)

GRID_INPUTS = ("image_grid_thw", "video_grid_thw", "grid_thw", "spatial_shapes", "image_sizes")
"""Arguments of a model's forward that tell the size of each image."""
LIBRARIES: dict[str, Literal["pad first", "roll first"]] = {
    "transformers": "pad first",
    "torchvision": "pad first",
    "timm": "roll first",
}
"""Which of the two a library's window attention does first; it matters where windows do not fill the grid."""
UNSHIFTED = ("_sam", "samvision", "vitdet")
"""In the names of classes whose windows never shift; elsewhere a window size alone may mean something else."""

Modules = Mapping[str, nn.Module]
"""The model's modules by name, in the order in which they were registered; itself as ""."""
NO_TOKENS = (nn.Linear, nn.LayerNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
"""Modules that hold many parameters, none of them a token."""


@dataclass(frozen=True, slots=True)
class Strided:
    """A convolution or a pooling."""

    name: str
    """The module that ran it."""
    at: int
    """How many attention calls came before."""
    given: tuple[int, ...]
    """(B, C, *sizes)"""
    made: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Tokens put one after the other."""

    at: int
    parts: tuple[tuple[str | None, int], ...]
    """(the parameter that the tokens are, None where they were computed; how many) for each part."""


@dataclass(frozen=True, slots=True)
class Windows:
    """How one attention module cuts its grid."""

    size: tuple[int, int]
    shift: tuple[int, int]
    library: str
    padding: Literal["pad first", "roll first"] | None
    """None where the library is not known."""
    merges: int
    """How many mergings of 2 x 2 tokens come before the module."""


@dataclass(eq=False)
class Observed:
    """Filled by the recorder during one call of the model."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The model's tensor arguments that hold floats."""
    sizes: dict[str, list[list[int]]] = field(default_factory=dict)
    """Arguments that tell the sizes of images, by name."""
    ids: Tensor | None = None
    """(B, n) token ids, where an image came with them."""
    steps: list[Strided] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    windows: dict[str, Windows] = field(default_factory=dict)
    """By the name of the module that calls attention."""
    parameters: dict[str, int] = field(default_factory=dict)
    """Tokens that are parameters: name -> how many, by the usual names."""
    ended: bool = False
    _names: dict[int, tuple[str, int]] | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> Observed:
        """Begin a call with these arguments."""
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        for name, value in given.items():  # a wrapper's *args
            if isinstance(value, tuple):
                tensors.update((f"{name}[{i}]", one) for i, one in enumerate(value) if isinstance(one, Tensor))
        tensors = {name: tensor for name, tensor in tensors.items() if not tensor.is_nested}  # that has no one shape
        ids = tensors.get("input_ids")
        return cls(
            shapes={name: tuple(value.shape) for name, value in tensors.items() if value.is_floating_point()},
            sizes={name: tensors[name].tolist() for name in GRID_INPUTS if name in tensors and tensors[name].ndim == 2},
            ids=None if ids is None or ids.ndim != 2 else ids.detach(),
        )

    def see(self, func: Any, args: tuple[Any, ...], out: Any, *, name: str, at: int, modules: Modules) -> None:
        """Note one operator of PARTS."""
        if func in JOINS:
            self._join(args, at, modules)
            return
        made = out[0] if isinstance(out, tuple) else out
        given, axes = args[0], made.ndim - 2
        if func in CONVOLUTIONS:
            if args[6]:  # a transposed convolution makes more of less: no stem
                return
            kernel, stride, padding, dilation = args[1].shape[2:], args[3], args[4], args[5]
        else:
            places = POOLS[func]
            found = [args[place] if place is not None and len(args) > place else None for place in places]
            kernel, stride, padding, dilation = found[0], found[1] or found[0], found[2] or [0], found[3] or [1]
        self.steps.append(
            Strided(
                name,
                at,
                tuple(given.shape),
                tuple(made.shape),
                *(_wide(values, axes) for values in (kernel, stride, padding, dilation)),
            )
        )

    def _join(self, args: tuple[Any, ...], at: int, modules: Modules) -> None:
        tensors, dim = args[0], args[1] if len(args) > 1 else 0
        if len(tensors) < 2 or tensors[0].ndim != 3 or dim not in (1, -2):
            return
        names = self._names_of(modules)
        parts = []
        for tensor in tensors:
            name, count = names.get(tensor.untyped_storage()._cdata, (None, 0))
            length = tensor.shape[1]
            # A slice of a longer parameter (a position encoding) is no token of its own.
            parts.append((name if count == length else None, length))
        self.joins.append(Join(at, tuple(parts)))

    def _names_of(self, modules: Modules) -> dict[int, tuple[str, int]]:
        """The name of each parameter that may be tokens, and how many, by its storage."""
        if self._names is None:
            self._names = {
                parameter.untyped_storage()._cdata: (f"{name}.{own}" if name else own, count)
                for name, module in modules.items()
                if module._parameters and not isinstance(module, NO_TOKENS)
                for own, parameter in module._parameters.items()
                if parameter is not None and (count := token_count(parameter)) and not is_wrapped(parameter)
            }
        return self._names

    def end(self, modules: Modules, callers: set[str]) -> None:
        """Read off the modules what the call left in them."""
        if self.ended:
            return
        self.ended = True
        cut = {name: found for name in callers if (found := windows_around(name, modules[""])) is not None}
        if cut:
            merges = 0
            for name, module in modules.items():
                merges += is_merging(module)
                caller = name or type(module).__name__
                if caller in cut:
                    size, shift, library = cut[caller]
                    self.windows[caller] = Windows(size, shift, library, LIBRARIES.get(library), merges)
        if not (self.steps or self.sizes):
            self.ids = None
            return
        if self.ids is not None:
            self.ids = self.ids.clone()  # a caller may use the buffer again
        self.parameters = {name: count for name, count in self._names_of(modules).values() if prefix_label(name)}
        self._names = None


def token_count(parameter: Tensor) -> int:
    """How many tokens a parameter is: (C,), (k, C) or (1, k, C); 0 for other shapes."""
    if parameter.ndim == 1:
        return 1
    if parameter.ndim == 2 or (parameter.ndim == 3 and parameter.shape[0] == 1):
        return int(parameter.shape[-2])
    return 0


LABELS = {
    "class": ("cls_token", "class_token", "class_embedding", "cls_embedding", "cls"),
    "distillation": ("distillation_token", "dist_token"),
    "register": ("register_tokens", "register_token", "reg_token", "reg_tokens", "registers", "storage_tokens"),
    "detection": ("detection_tokens", "det_token"),
}


def is_wrapped(tensor: Any) -> bool:
    """Whether a tensor, quantised for one, keeps its numbers in others and has no storage of its own."""
    return is_traceable_wrapper_subclass(tensor)


def prefix_label(name: str) -> str | None:
    """What a parameter of this name is as a token, where the name is a usual one.

    >>> prefix_label("vit.embeddings.cls_token")
    'class'
    """
    last = name.rpartition(".")[2]
    return next((label for label, names in LABELS.items() if last in names), None)


def is_merging(module: nn.Module) -> bool:
    """Whether a module makes one token of 2 x 2, as Swin does between its stages."""
    if "PatchMerging" not in type(module).__name__:
        return False
    reduction = getattr(module, "reduction", None)
    return isinstance(reduction, nn.Linear)


def windows_around(name: str, model: nn.Module) -> tuple[tuple[int, int], tuple[int, int], str] | None:
    """Window size, shift and library of the nearest module around that names both."""
    found, module = None, model
    for part in name.split("."):
        inner = module._modules.get(part)  # not by its truth: an empty list, or a compiled module, has none
        module = module if inner is None else inner
        # Not getattr of the module itself, which is slow where there is no such attribute.
        size, shift = (
            as_pair(module.__dict__.get(name, getattr(type(module), name, None)))
            for name in ("window_size", "shift_size")
        )
        kind = type(module)
        if shift is None and any(name in f"{kind.__module__}.{kind.__name__}".lower() for name in UNSHIFTED):
            shift = (0, 0)
        if size is not None and shift is not None and min(size) > 0:
            found = size, shift, kind.__module__.partition(".")[0]
    return found


def as_pair(value: Any) -> tuple[int, int] | None:
    """Two integers of one or two, tensors of one element included."""
    values = list(value) if isinstance(value, tuple | list) else [value, value]
    if len(values) != 2 or any(isinstance(v, bool) or not hasattr(v, "__index__") for v in values):
        return None
    return int(values[0]), int(values[1])


def _wide(values: Any, axes: int) -> tuple[int, ...]:
    """One entry per axis: PyTorch keeps a single one for all."""
    values = [int(v) for v in values]
    return tuple(values * axes if len(values) == 1 else values)
