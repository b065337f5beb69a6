"""Recorded attention calls of a PyTorch model, as linear operators on tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from attrace.capture.memory import check_fits
from attrace.capture.recorded import RecordedOp, check_rows
from attrace.errors import CaptureError, InputError, NonFiniteError, ShapeError
from attrace.ops.attention.rows import CHUNK, blocks, contract, mean_of_heads, weight_rows, working_dtype
from attrace.ops.heads import CheckedHeads, check_heads, fuse_heads
from attrace.ops.namespace import Name
from attrace.types import Heads

if TYPE_CHECKING:
    from attrace.capture.torch_blocks import Block


MASKED = -1e4
"""Below this an additive mask leaves no weight."""
FEW_CELLS = 1 << 17
"""Below as many weights it is quicker to compute all rows than to choose among them."""


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written to; tensors made under inference mode don't count that."""
    return -1 if tensor.is_inference() else tensor._version


@dataclass(eq=False)
class TorchAttention(RecordedOp):
    """One recorded call.  Subclasses give `_rows`; products run over blocks of rows, never over (B, H, Q, T)."""

    vectors: ClassVar[Name] = "torch"
    windows: int = field(default=1, kw_only=True)
    """W where each item of the batch is cut into W windows that attend within themselves: B of `shape` is then
    items * W, and rows and columns count the tokens of one window."""
    value: Tensor | None = field(default=None, repr=False)
    """(B, K, T, Dv), kept only where the recorder was asked for it."""
    block: Block | None = field(default=None, repr=False)
    step: int | None = None
    """The call's step in the trace's stream graph, where the model has one."""

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        raise NotImplementedError

    def _rows(self, rows: Tensor) -> Tensor:
        """(R,) -> (B, H, R, T)."""
        raise NotImplementedError

    def _all_rows(self) -> Tensor:
        """(B, H, Q, T), for a map small enough to be made at once."""
        return self._rows(torch.arange(self.shape[2], device=self.device))

    def weights(self, rows: int | Sequence[int] | Tensor | None = None) -> Tensor:
        """The map, (B, H, Q, T), or only the given query rows of it, (B, H, len(rows), T).

        Weights are those before dropout, in float32 (float64 for a float64 model).  Rows sum to one, or less
        where the model has a sink; a row with nothing to attend to is all zeros.  A row out of range is an
        InputError; NaN is a NonFiniteError that names layer and row; a map larger than half of the available memory
        is a MemoryLimitError, and some of its rows can be asked for instead.
        """
        index = self._row_numbers(rows)
        batch, heads, _, keys = self.shape
        self._fits((batch, heads, len(index), keys), "Ask for some of its rows at a time: weights(rows=...).")
        return self._checked(index)

    def _row_numbers(self, rows: int | Sequence[int] | Tensor | None) -> Tensor:
        if rows is None:
            return torch.arange(self.shape[2], device=self.device)
        return torch.tensor(check_rows(rows, self), device=self.device)

    def _fits(self, shape: tuple[int, ...], advice: str) -> None:
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else None
        check_fits(shape, self.dtype.itemsize, name=f"the map of {self.name}", advice=advice, free=free)

    def matvec(self, x: Tensor, *, heads: Heads = "mean") -> Tensor:
        """Fused map times x: (B, T) -> (B, Q), or (B, T, M) -> (B, Q, M), in x's dtype and on its device."""
        columns = self._columns(x, self.shape[3], "keys")
        parts = [contract(fused, columns) for fused in self._fused_blocks(heads)]
        product = self._sound(torch.cat(parts, dim=1)).to(x)
        return product.squeeze(-1) if x.ndim == 2 else product

    def rmatvec(self, r: Tensor, *, heads: Heads = "mean") -> Tensor:
        """Transposed fused map times r: (B, Q) -> (B, T), or (B, Q, M) -> (B, T, M), in r's dtype, on its device.

        Rows of r that are zero for the whole batch are not computed: one target costs one row of the top layer.
        """
        columns = self._columns(r, self.shape[2], "queries")
        few = self.shape[0] * self.heads * self.shape[2] * self.shape[3] <= FEW_CELLS
        if few and self.shape[2] <= CHUNK and isinstance(heads, str) and heads == "mean":
            product = self._sound(mean_of_heads(columns, self._all_rows())).to(r)
        else:
            product = self._sound(self._sum_of_rows(columns, heads, few=few)).to(r)
        return product.squeeze(1) if r.ndim == 2 else product.transpose(1, 2)

    def _sum_of_rows(self, columns: Tensor, heads: Heads, *, few: bool) -> Tensor:
        """(B, Q, M) -> (B, M, T), over blocks of rows."""
        rows = torch.arange(self.shape[2], device=self.device)
        if not few and not columns.requires_grad:  # a zero has a gradient too
            rows = rows[(columns != 0).any(dim=2).any(dim=0)]
        product: Tensor | float = 0.0
        coefficients = _coefficients(check_heads(heads, self.heads), self.heads)
        for block in blocks(rows, self.shape[0] * self.heads * self.shape[3]):
            left, weights = columns.index_select(1, block).transpose(1, 2), self._rows(block)
            if coefficients is None:
                product = product + contract(left, fuse_heads(weights, heads))
            else:  # a linear fusion goes to the small side of the product
                if heads == "mean":
                    wide = (left / self.heads).repeat(1, 1, self.heads)
                else:
                    c = torch.tensor(coefficients, dtype=left.dtype, device=left.device)
                    wide = (left[:, :, None, :] * c[:, None]).flatten(2)
                product = product + contract(wide, weights.flatten(1, 2))
        if isinstance(product, float):  # no row was asked for
            product = columns.new_zeros(self.shape[0], columns.shape[2], self.shape[3])
        return product

    def fused(self, heads: Heads = "mean") -> Tensor:
        """The head-fused map, (B, Q, T)."""
        batch, _, length, keys = self.shape
        self._fits((batch, length, keys), "Ask for products with it, matvec and rmatvec, or for rows of its heads.")
        return self._sound(torch.cat(list(self._fused_blocks(heads)), dim=1))

    def _fused_blocks(self, heads: Heads) -> Iterator[Tensor]:
        for block in self._row_blocks():
            yield fuse_heads(self._rows(block), heads)

    def _row_blocks(self) -> Iterator[Tensor]:
        every = torch.arange(self.shape[2], device=self.device)
        yield from blocks(every, self.shape[0] * self.heads * self.shape[3])

    def _sound(self, product: Tensor) -> Tensor:
        """The product itself; where it holds NaN, the row of weights that brought it is looked for and named."""
        if math.isnan(product.detach().sum().item()):  # a finite product adds up, NaN stays: one pass
            for block in self._row_blocks():
                self._checked(block)
        return product

    def _columns(self, x: Tensor, length: int, side: str) -> Tensor:
        if not isinstance(x, Tensor):
            raise InputError(
                f"Expected a vector as a PyTorch tensor. Received: {type(x).__name__}. Use torch.as_tensor."
            )
        if x.ndim not in (2, 3) or x.shape[0] != self.shape[0] or x.shape[1] != length:
            raise ShapeError(
                f"Expected (B, n) or (B, n, M) with B={self.shape[0]} and n={length}, the {side} of {self.name}. "
                f"Received: {tuple(x.shape)}."
            )
        if x.is_complex() or not x.is_floating_point():
            raise InputError(f"Expected a vector of floats. Received: {x.dtype}. Convert it with .float().")
        return (x[..., None] if x.ndim == 2 else x).to(self.device, self.dtype)

    def _checked(self, rows: Tensor) -> Tensor:
        """(R,) -> (B, H, R, T); NonFiniteError where a weight is NaN."""
        weights = self._rows(rows)
        # The sum is NaN exactly where a weight is: one pass, no mask of the block's size.
        bad = weights.detach().sum(dim=(1, 3)).isnan()
        if bad.any():
            item, row = (int(i) for i in bad.nonzero()[0])
            raise NonFiniteError(
                f"Expected finite attention weights. Received: NaN in layer {self.layer} ({self.name}), token "
                f"{int(rows[row])}, batch item {item}. Check the model's weights and its input for NaN."
            )
        return weights


@dataclass(eq=False)
class QueryKeyAttention(TorchAttention):
    """A fused call: the weights are recomputed from query and key, row block by row block."""

    query: Tensor = field(kw_only=True, repr=False)
    key: Tensor = field(kw_only=True, repr=False)
    bias: Tensor | None = field(default=None, kw_only=True, repr=False)
    is_causal: bool = field(default=False, kw_only=True)
    scale: float | None = field(default=None, kw_only=True)

    @property
    def causal(self) -> bool:
        return self.is_causal

    def __post_init__(self) -> None:
        self._held = [t for t in (self.query, self.key, self.bias) if t is not None]
        self._versions = [version_of(t) for t in self._held]

    def hold(self, key: Tensor) -> None:
        """Take the first keys of the call out of a store that nothing else writes to, (B, K, T', D)."""
        count = key.shape[2]
        self.key, self.shape = key, (*self.shape[:3], count)
        self.value = None if self.value is None else self.value[:, :, :count]
        self.bias = None if self.bias is None or self.bias.ndim == 0 else self.bias[..., :count]
        self._held = [t for t in (self.query, self.bias) if t is not None]
        self._versions = [version_of(t) for t in self._held]

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def dtype(self) -> torch.dtype:
        return working_dtype(self.query.dtype)

    def first_bad_row(self) -> int | None:
        held = [t for t in (self.query, self.key, self.value) if t is not None]
        bad = [~t.isfinite().all(-1).all(1).all(0) for t in held if not bool(t.isfinite().all())]
        return min((row for b in bad if (row := _first(b)) is not None), default=None)

    def leaves_room(self, filled: int) -> bool:
        """Whether the mask gives no weight to the keys after the first `filled`, in no row."""
        if self.bias is None or self.bias.shape[-1] <= filled:
            return False
        rest = self.bias[..., filled:]
        return not bool(rest.any()) if rest.dtype == torch.bool else bool((rest < MASKED).all())

    def _rows(self, rows: Tensor) -> Tensor:
        return self._recomputed(rows)

    def _all_rows(self) -> Tensor:
        return self._recomputed(None)

    def _recomputed(self, rows: Tensor | None) -> Tensor:
        self._check_versions()
        return weight_rows(self.query, self.key, rows=rows, scale=self.scale, bias=self.bias, causal=self.is_causal)

    def _check_versions(self) -> None:
        if [version_of(t) for t in self._held] != self._versions:
            raise CaptureError(
                f"Expected the query and key of {self.name} as the model used them. Received: tensors that were "
                "written to since (a static cache, for one). Read the weights before the model runs again."
            )


@dataclass(eq=False)
class SoftmaxAttention(TorchAttention):
    """An unfused call: the softmax that the model itself computed, (B, H, Q, T)."""

    map: Tensor = field(kw_only=True, repr=False)
    source: Tensor = field(kw_only=True, repr=False)
    """The model's own tensor, which the map is a view or a copy of."""
    version: int = field(kw_only=True, repr=False)
    """How often it had been written to when the model computed it."""
    factor: Tensor | None = field(default=None, kw_only=True, repr=False)
    """(B, H, Q): what the model multiplied each row's result with, where its sinks come after the values."""
    rounded: bool = field(default=False, kw_only=True)
    """Whether it is a softmax in half precision, whose rows sum to one only but for the rounding of each weight."""

    @property
    def device(self) -> torch.device:
        return self.map.device

    @property
    def dtype(self) -> torch.dtype:
        return working_dtype(self.map.dtype)

    def first_bad_row(self) -> int | None:
        return _first(self.map.isnan().any(-1).any(1).any(0))

    def _rows(self, rows: Tensor) -> Tensor:
        if version_of(self.source) != self.version:
            raise CaptureError(
                f"Expected the softmax of {self.name} as the model computed it. Received: one that was written to "
                "since (dropout in place, for one). Put the model in evaluation mode, or use another backend."
            )
        weights = self.map.index_select(2, rows).to(self.dtype)
        if self.rounded:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(self.map.dtype).tiny)
        return weights if self.factor is None else weights * self.factor.index_select(2, rows)[..., None]


def _coefficients(heads: CheckedHeads, count: int) -> list[float] | None:
    """The weight of each head in a linear fusion; None for the largest and the smallest."""
    if heads == "mean":
        return [1 / count] * count
    if isinstance(heads, int):
        return [float(head == heads) for head in range(count)]
    return None if isinstance(heads, str) else list(heads)


def _first(flags: Tensor) -> int | None:
    where = flags.nonzero()
    return int(where[0]) if len(where) else None
