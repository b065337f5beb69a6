"""Recorded attention blocks of a PyTorch model: what each token contributes to each row of their output."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attrace.capture.families import FAMILIES, Family, path_from
from attrace.capture.torch_ops import TorchAttention, version_of
from attrace.errors import CaptureError
from attrace.ops.attention.rows import blocks
from attrace.ops.contributions.naive import Norm
from attrace.ops.contributions.rows import block_output, contribution_rows
from attrace.ops.namespace import without_autocast


@dataclass(eq=False)
class Block:
    """What surrounds one attention call: norm?(residual + projection(context) + bias)."""

    value: Tensor
    """(B, K, n, D), as in the call."""
    residual: Tensor
    """(B, n, E), the block's input."""
    projection: Tensor
    """(E, H * D)"""
    bias: Tensor | None
    norm: Norm | None

    def __post_init__(self) -> None:
        self._versions = self._now()

    def unchanged(self) -> bool:
        """Whether no part was written to since it was recorded."""
        return self._now() == self._versions

    def _now(self) -> list[int]:
        parts = (self.value, self.residual, self.projection, self.bias)
        return [version_of(t) for t in parts if t is not None]


class BlockInputs:
    """Sees the residual input of each attention block while a model of a known family runs."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._thread = threading.get_ident()
        self._families: dict[str, Family] = {}
        for name in self._modules:
            family = FAMILIES.get(self.family_of(name))
            if family and name.rpartition(".")[2] == family.attention:
                self._families[name] = family
        self._inputs: dict[str, Tensor] = {}

    def family_of(self, name: str) -> str:
        """The model_type of the nearest configuration above a module; its class where there is none."""
        while True:
            module = self._modules.get(name)
            found = getattr(getattr(module, "config", None), "model_type", None)
            if isinstance(found, str):
                return found
            if not name:
                return type(module).__name__
            name = name.rpartition(".")[0]

    def watch(self) -> Iterator[RemovableHandle]:
        """Place a hook on every block, after those that are there and may change its input."""
        for name in {path_from(a, f.block) for a, f in self._families.items()} & set(self._modules):
            hook = self._noting(name)
            yield self._modules[name].register_forward_pre_hook(hook, with_kwargs=True)

    def block_of(self, name: str, value: Tensor | None) -> Block | None:
        """The block around the attention module that has just called; None where its family is not known."""
        family = self._families.get(name)
        residual = self._inputs.get(path_from(name, family.block)) if family else None
        if family is None or residual is None or value is None:
            return None
        projection = self._modules.get(path_from(name, family.projection))
        weight = _weight(projection, family)
        norm = self._modules.get(path_from(name, family.norm)) if family.norm else None
        if weight is None or (family.norm and not isinstance(norm, nn.LayerNorm)):
            return None
        after = None
        if isinstance(norm, nn.LayerNorm):
            after = Norm(norm.weight.detach(), None if norm.bias is None else norm.bias.detach(), norm.eps)
        bias = getattr(projection, "bias", None)
        return Block(value, residual, weight, None if bias is None else bias.detach(), after)

    def _noting(self, name: str) -> Any:
        def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            # Called without kwargs in another thread while this hook is taken away.
            hidden = args[0] if args else (kwargs or {}).get("hidden_states")
            if threading.get_ident() == self._thread and isinstance(hidden, Tensor):
                self._inputs[name] = hidden.detach()

        return note


def _weight(projection: nn.Module | None, family: Family) -> Tensor | None:
    """(E, H * D); None where the projection is no plain linear map (quantised, or with an adapter around it)."""
    weight = getattr(projection, "weight", None)
    plain = isinstance(projection, nn.Linear) or (family.transposed and type(projection).__name__ == "Conv1D")
    if not plain or not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    return weight.detach().T if family.transposed else weight.detach()


@dataclass(eq=False)
class Contributions(TorchAttention):
    """One attention block as an operator on tokens, (B, 1, Q, T): row i holds each token's share in output i.

    The vectors behind the shares are made for a tile of rows and keys at a time, in float32 (float64 where
    the model runs in it).
    """

    source: TorchAttention = field(kw_only=True, repr=False)
    block: Block = field(kw_only=True, repr=False)

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def first_bad_row(self) -> int | None:
        return self.source.first_bad_row()

    def output(self, rows: Tensor) -> Tensor:
        """The given rows of the attention block's output, recomputed from the recorded parts: (B, R, E)."""
        return block_output(self.source.weights(rows), rows=rows, **self._parts())

    def _rows(self, rows: Tensor) -> Tensor:
        batch, heads, _, keys = self.source.shape
        parts = self._parts()
        with without_autocast(self):
            found = [
                contribution_rows(self.source.weights(block), rows=block, **parts)
                for block in blocks(rows, batch * heads * keys)
            ]
        return torch.cat(found or [rows.new_zeros(batch, 0, keys, dtype=self.dtype)], dim=1)[:, None]

    def _parts(self) -> dict[str, Any]:
        if not self.block.unchanged():
            raise CaptureError(
                f"Expected the values, the input and the output projection of {self.name} as the model used "
                "them. Received: tensors that were written to since (training, for one). Read the "
                "contributions before the model changes."
            )
        norm, bias = self.block.norm, self.block.bias
        if norm is not None:
            shift = None if norm.shift is None else norm.shift.to(self.dtype)
            norm = Norm(norm.gain.to(self.dtype), shift, norm.eps)
        return {
            "value": self.block.value.to(self.dtype),
            "projection": self.block.projection.to(self.dtype),
            "residual": self.block.residual.to(self.dtype),
            "bias": None if bias is None else bias.to(self.dtype),
            "norm": norm,
        }


def contributions_of(op: TorchAttention, family: str, *, values: bool) -> Contributions:
    """The block around a recorded call as an operator; CaptureError where it was not recorded or is not
    known.
    """
    if not values:
        raise CaptureError(
            f"Expected a trace with values, for contributions. Received: one without ({op.name}). Record "
            "with record(model, values=True)."
        )
    if op.block is None:
        raise CaptureError(
            "Expected attention blocks of a family whose output projection and norm are known "
            f"({', '.join(FAMILIES)}). Received: {op.name} of family {family}. Use the method rollout, "
            "last-layer or leave-one-out, which need no such table, or add a line to "
            "attrace/capture/families.py."
        )
    batch, _, length, keys = op.shape
    return Contributions(
        name=op.name, layer=op.layer, shape=(batch, 1, length, keys), kind=op.kind, source=op, block=op.block,
        queries=op.queries, keys=op.keys, step=op.step,
    )  # fmt: skip
