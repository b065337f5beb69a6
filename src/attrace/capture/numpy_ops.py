"""Recorded attention calls that are read as NumPy arrays, as linear operators on tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attrace.capture.recorded import RecordedOp, check_rows
from attrace.errors import InputError, NonFiniteError, ShapeError
from attrace.ops.attention.numpy_rows import Rows, blocks
from attrace.ops.heads import check_heads, fuse_heads
from attrace.ops.namespace import Name, framework_of
from attrace.types import Array, Heads


@dataclass(eq=False)
class NumpyAttention(RecordedOp):
    """One recorded call.  Subclasses give `_rows`; products run over blocks of rows, never over (B, H, Q, T).

    Vectors go in as arrays of any framework and come out as NumPy arrays.
    """

    vectors: ClassVar[Name] = "numpy"

    @property
    def device(self) -> str:
        return "cpu"

    def _rows(self, rows: Rows) -> NDArray[Any]:
        """(R,) -> (B, H, R, T)."""
        raise NotImplementedError

    def weights(self, rows: int | Sequence[int] | Array | None = None) -> NDArray[Any]:
        """The map, (B, H, Q, T), or only the given query rows of it, (B, H, len(rows), T).

        Weights are those before dropout, in float32 (float64 for a float64 model).  Rows sum to one, or less
        where the model has a sink.  A row out of range is an InputError; NaN is a NonFiniteError that names layer
        and row.
        """
        wanted = range(self.shape[2]) if rows is None else check_rows(rows, self)
        return self._checked(np.asarray(wanted, dtype=np.intp))

    def matvec(self, x: Array, *, heads: Heads = "mean") -> NDArray[Any]:
        """Fused map times x: (B, T) -> (B, Q), or (B, T, M) -> (B, Q, M), in x's dtype."""
        given, columns = self._columns(x, self.shape[3], "keys")
        parts = [fused.astype(np.float64) @ columns for fused in self._fused_blocks(heads)]
        product = self._sound(np.concatenate(parts, axis=1)).astype(given.dtype)
        return product[..., 0] if given.ndim == 2 else product

    def rmatvec(self, r: Array, *, heads: Heads = "mean") -> NDArray[Any]:
        """Transposed fused map times r: (B, Q) -> (B, T), or (B, Q, M) -> (B, T, M), in r's dtype.

        Rows of r that are zero for the whole batch are not computed: one target costs one row of the top layer.
        """
        given, columns = self._columns(r, self.shape[2], "queries")
        batch, count, _, keys = self.shape
        product = np.zeros((batch, keys, columns.shape[2]))
        for block in blocks(np.flatnonzero(columns.any(axis=(0, 2))), batch * count * keys):
            fused = fuse_heads(self._rows(block), heads)
            product += fused.astype(np.float64).swapaxes(1, 2) @ columns[:, block]
        check_heads(heads, count)  # also where no row was asked for
        product = self._sound(product).astype(given.dtype)
        return product[..., 0] if given.ndim == 2 else product

    def fused(self, heads: Heads = "mean") -> NDArray[Any]:
        """The head-fused map, (B, Q, T)."""
        return self._sound(np.concatenate(list(self._fused_blocks(heads)), axis=1))

    def _fused_blocks(self, heads: Heads) -> Iterator[NDArray[Any]]:
        for block in self._row_blocks():
            yield fuse_heads(self._rows(block), heads)

    def _row_blocks(self) -> Iterator[Rows]:
        yield from blocks(np.arange(self.shape[2]), self.shape[0] * self.heads * self.shape[3])

    def _sound(self, product: NDArray[Any]) -> NDArray[Any]:
        """The product itself; where it holds NaN, the row of weights that brought it is looked for and named."""
        if np.isnan(product).any():
            for block in self._row_blocks():
                self._checked(block)
        return product

    def _columns(self, x: Array, length: int, side: str) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """The vectors as they came and as (B, n, M) in float64."""
        framework = framework_of(x)
        if framework is None:
            raise InputError(f"Expected a vector as an array. Received: {type(x).__name__}. Use numpy.asarray.")
        if len(x.shape) not in (2, 3) or x.shape[0] != self.shape[0] or x.shape[1] != length:
            raise ShapeError(
                f"Expected (B, n) or (B, n, M) with B={self.shape[0]} and n={length}, the {side} of {self.name}. "
                f"Received: {tuple(x.shape)}."
            )
        given = x if isinstance(x, np.ndarray) else framework.to_numpy(x)
        if given.dtype.kind != "f":
            raise InputError(f"Expected a vector of floats. Received: {given.dtype}. Convert it first.")
        return given, (given[..., None] if given.ndim == 2 else given).astype(np.float64)

    def _checked(self, rows: Rows) -> NDArray[Any]:
        """(R,) -> (B, H, R, T); NonFiniteError where a weight is NaN."""
        weights = self._rows(rows)
        bad = np.argwhere(np.isnan(weights.sum(axis=(1, 3))))
        if len(bad):
            item, row = bad[0]
            raise NonFiniteError(
                f"Expected finite attention weights. Received: NaN in layer {self.layer} ({self.name}), token "
                f"{rows[row]}, batch item {item}. Check the model's weights and its input for NaN."
            )
        return weights
