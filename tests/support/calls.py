"""Attention calls that simply hold their map, on NumPy arrays or tensors."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attrace.ops.heads import fuse_heads


def vector(x: Any, framework: str) -> Any:
    return sys.modules["torch"].tensor(x) if framework == "torch" else np.asarray(x)


@dataclass(eq=False)
class Call:
    """One call between two streams; `map` is (B, H, Q, T) in float64."""

    queries: str
    keys: str
    map: Any
    name: str = "layer"

    def on(self, framework: str) -> Call:
        if framework == "torch":
            import torch

            return replace(self, map=torch.tensor(self.map))
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.map.shape)

    def fused(self, heads: Any = "mean") -> Any:
        return fuse_heads(self.map, heads)

    def matvec(self, x: Any, *, heads: Any = "mean") -> Any:
        return self.fused(heads) @ x

    def rmatvec(self, r: Any, *, heads: Any = "mean") -> Any:
        return self.fused(heads).swapaxes(1, 2) @ r
