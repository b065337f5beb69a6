"""Recorded attention calls of a Keras model, on any of its backends: the backend's arrays are held, NumPy is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attrace.capture.numpy_ops import NumpyAttention
from attrace.errors import CaptureError
from attrace.ops.attention.numpy_rows import Rows, weight_rows
from attrace.ops.namespace import dtype_name, framework_of
from attrace.types import Array


def held(x: Array) -> Array:
    """The array itself, without the graph that made it."""
    return x.detach() if hasattr(x, "detach") else x


def version_of(x: Array) -> int | None:
    """How often a PyTorch tensor was written to; the arrays of TensorFlow and JAX cannot be."""
    return None if not hasattr(x, "is_inference") or x.is_inference() else x._version


def to_numpy(x: Array) -> NDArray[Any]:
    """The values as NumPy, half precision as float32."""
    framework = framework_of(x)
    if framework is None or dtype_name(x) not in ("float16", "bfloat16"):
        return np.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x)
    values: NDArray[Any] = framework.to_numpy(x)
    return values


@dataclass(eq=False)
class KerasFused(NumpyAttention):
    """A fused call: the weights are recomputed from query and key, row block by row block."""

    query: Array = field(kw_only=True, repr=False)
    """(B, Q, H, D), as Keras lays it out; (B, H, Q, D) where `heads_first`."""
    key: Array = field(kw_only=True, repr=False)
    bias: Array | None = field(default=None, kw_only=True, repr=False)
    mask: Array | None = field(default=None, kw_only=True, repr=False)
    """True = attend."""
    is_causal: bool = field(default=False, kw_only=True)
    scale: float | None = field(default=None, kw_only=True)
    heads_first: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._held = [x for x in (self.query, self.key, self.bias, self.mask) if x is not None]
        self._versions = [version_of(x) for x in self._held]

    @property
    def causal(self) -> bool:
        return self.is_causal

    @property
    def dtype(self) -> Any:
        return np.dtype(np.float64 if dtype_name(self.query) == "float64" else np.float32)

    def first_bad_row(self) -> int | None:
        found = [_first(~np.isfinite(self._heads_first(x)).all(axis=(0, 1, 3))) for x in (self.query, self.key)]
        return min((row for row in found if row is not None), default=None)

    def _heads_first(self, x: Array) -> NDArray[Any]:
        values = to_numpy(x)
        return (values if self.heads_first else values.swapaxes(1, 2)).astype(self.dtype, copy=False)

    def _rows(self, rows: Rows) -> NDArray[Any]:
        if [version_of(x) for x in self._held] != self._versions:
            raise written_to(self.name, "query and key")
        return weight_rows(
            self._heads_first(self.query),
            self._heads_first(self.key),
            rows=rows,
            scale=self.scale,
            bias=None if self.bias is None else to_numpy(self.bias).astype(self.dtype, copy=False),
            mask=None if self.mask is None else to_numpy(self.mask).astype(bool, copy=False),
            causal=self.is_causal,
        )


@dataclass(eq=False)
class KerasMap(NumpyAttention):
    """An unfused call: the softmax that the model itself computed."""

    map: Array = field(kw_only=True, repr=False)
    """In the model's own axes."""
    axes: tuple[int, ...] = field(kw_only=True, repr=False)
    """The order that makes them (..., H, Q, T); reshaping to `shape` does the rest."""

    def __post_init__(self) -> None:
        self._version = version_of(self.map)

    @property
    def dtype(self) -> Any:
        return np.dtype(np.float64 if dtype_name(self.map) == "float64" else np.float32)

    def first_bad_row(self) -> int | None:
        return _first(np.isnan(self._whole()).any(axis=(0, 1, 3)))

    def _whole(self) -> NDArray[Any]:
        if version_of(self.map) != self._version:
            raise written_to(self.name, "softmax")
        return to_numpy(self.map).transpose(self.axes).reshape(self.shape)

    def _rows(self, rows: Rows) -> NDArray[Any]:
        return self._whole()[:, :, rows].astype(self.dtype, copy=False)


def written_to(name: str, what: str) -> CaptureError:
    return CaptureError(
        f"Expected the {what} of {name} as the model computed them. Received: tensors that were written to since. "
        "Read the weights before the model runs again."
    )


def _first(flags: NDArray[np.bool_]) -> int | None:
    where = np.flatnonzero(flags)
    return int(where[0]) if len(where) else None
