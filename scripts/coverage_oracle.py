"""What the attention of a run was, found without attrace's capture.

Three sources: the weights that the library itself returns under its eager attention; identity-value probing of every
`scaled_dot_product_attention` and of every eager function that a model looks up in the registry (V replaced by unit
vectors, the rows read off); and every other softmax of a run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface


@dataclass
class Evidence:
    """Maps seen in one run, in the order of the calls."""

    probed: list[Tensor] = field(default_factory=list)
    softmaxes: list[Tensor] = field(default_factory=list)
    multiplied: set[int] = field(default_factory=set)
    """Numbers of the softmaxes that a matrix product took."""
    modules: list[Tensor] = field(default_factory=list)
    """What nn.MultiheadAttention itself returned as its weights."""
    output: Any = None


@contextmanager
def watched(evidence: Evidence) -> Iterator[None]:
    """Every softmax, product and fused call of the block, seen at PyTorch's public functions."""
    places: list[tuple[Any, str, Any]] = []
    origin: dict[int, int] = {}
    alive: list[Tensor] = []
    busy = [0]

    def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        places.append((owner, name, original))
        setattr(owner, name, make(original))

    def softmax(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            busy[0] += 1
            try:
                out = original(*args, **kwargs)
            finally:
                busy[0] -= 1
            if isinstance(out, Tensor) and not busy[0]:
                dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
                kept = out.detach().clone()
                if isinstance(dim, int) and out.ndim >= 2:
                    kept = kept.movedim(dim, -1)
                last = not isinstance(dim, int) or dim in (-1, out.ndim - 1)
                if not last and out.shape[-1] == 1:  # a kernel that each position makes for itself, no map of tokens
                    evidence.softmaxes.append(kept)
                    return out
                origin[out.untyped_storage().data_ptr()] = len(evidence.softmaxes)
                alive.append(out)
                evidence.softmaxes.append(kept)
            return out

        return run

    def product(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            for arg in args[:4]:
                if isinstance(arg, Tensor):
                    number = origin.get(arg.untyped_storage().data_ptr())
                    if number is not None and arg.ndim >= 3:
                        evidence.multiplied.add(number)
            return original(*args, **kwargs)

        return run

    def fused(original: Any) -> Any:
        def run(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            busy[0] += 1
            try:
                out: Tensor = original(query, key, value, *args, **kwargs)
                length = key.shape[-2]
                unit = torch.eye(length, dtype=value.dtype, device=value.device).expand(*value.shape[:-1], length)
                quiet = {**kwargs, "dropout_p": 0.0}
                evidence.probed.append(original(query, key, unit, *args[:1], **quiet).detach())
            finally:
                busy[0] -= 1
            return out

        return run

    def looked_up(original: Any) -> Any:
        """The registry's look-up, which gives the model's own eager function where no other is asked for."""

        def find(self: Any, name: Any, default: Any) -> Any:
            function = original(self, name, default)
            return eager(function) if function is default else function

        return find

    def eager(function: Any) -> Any:
        @functools.wraps(function)
        def run(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            if busy[0]:
                return function(module, query, key, value, *args, **kwargs)
            length = key.shape[-2]
            unit = torch.eye(length, dtype=value.dtype, device=value.device).expand(*value.shape[:-1], length)
            busy[0] += 1
            try:
                rows = function(module, query, key, unit, *args, **kwargs)[0].transpose(1, 2)
            except Exception:  # it takes values of one width alone: its softmax is the evidence then
                rows = None
            finally:
                busy[0] -= 1
            if rows is None or rows.shape != (*query.shape[:3], length):
                return function(module, query, key, value, *args, **kwargs)
            evidence.probed.append(rows.detach())
            busy[0] += 1
            try:
                return function(module, query, key, value, *args, **kwargs)
            finally:
                busy[0] -= 1

        return run

    def multihead(original: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            busy[0] += 1
            try:
                asked = {**kwargs, "need_weights": True, "average_attn_weights": False}
                evidence.modules.append(original(self, *args, **asked)[1].detach())
                out = original(self, *args, **kwargs)
            finally:
                busy[0] -= 1
            return out

        return run

    def weighed(original: Any) -> Any:
        """A product one by one, of a whole softmax with values that have more axes or other lengths."""

        def run(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            for arg in args[:2]:
                if isinstance(arg, Tensor) and arg.ndim >= 3 and isinstance(out, Tensor) and out.shape != arg.shape:
                    number = origin.get(arg.untyped_storage().data_ptr())
                    if number is not None and arg.numel() == evidence.softmaxes[number].numel():
                        evidence.multiplied.add(number)
            return out

        return run

    functional = nn.functional
    patch(nn.MultiheadAttention, "forward", multihead)
    for owner, name in ((functional, "softmax"), (torch, "softmax"), (Tensor, "softmax")):
        patch(owner, name, softmax)
    for owner, name in ((torch, "matmul"), (torch, "bmm"), (Tensor, "matmul"), (Tensor, "bmm"), (Tensor, "__matmul__"),
                        (torch, "einsum"), (torch, "baddbmm")):  # fmt: skip
        patch(owner, name, product)
    for owner, name in ((torch, "mul"), (Tensor, "mul"), (Tensor, "__mul__"), (Tensor, "__rmul__")):
        patch(owner, name, weighed)
    patch(functional, "scaled_dot_product_attention", fused)
    patch(AttentionInterface, "get_interface", looked_up)
    try:
        yield
    finally:
        for owner, name, original in reversed(places):
            setattr(owner, name, original)


def run(model: nn.Module, batch: dict[str, Any], **options: Any) -> Evidence:
    evidence = Evidence()
    torch.manual_seed(11)
    with torch.no_grad(), watched(evidence):
        evidence.output = model(**batch, **options)
    return evidence


def own_maps(output: Any) -> list[Tensor]:
    """The tensors that a model's output calls attentions, those that can be weights: rows of at most one in sum."""
    found: list[Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.ndim >= 3 and value.is_floating_point() and is_map(value):
                found.append(value.detach())
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)

    def fields(value: Any) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                if "attention" in name and "mask" not in name:
                    walk(item)
                elif isinstance(item, dict):
                    fields(item)

    fields(output)
    return found


def is_map(value: Tensor) -> bool:
    sums = value.sum(-1)
    return bool((value >= -1e-6).all()) and bool((sums <= 1 + 1e-4).all())
