from __future__ import annotations
from typing import Any
from attrace.types import Heads
def head_weights(heads: Heads, count: int) -> list[float] | None:
    if heads == "mean":
        return [1 / count] * count
    if isinstance(heads, int):
        return [float(i == heads % count) for i in range(count)]
    if isinstance(heads, str):
        return None
    return [float(w) for w in heads]
def fuse(weights: Any, heads: Heads) -> Any:
    if heads == "max":
        return weights.amax(-3)
    if heads == "min":
        return weights.amin(-3)
    c = head_weights(heads, weights.shape[-3])
    return sum(w * weights[..., i, :, :] for i, w in enumerate(c))
def check_heads(heads: Heads, count: int) -> None: ...
