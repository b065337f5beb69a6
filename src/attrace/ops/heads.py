"""Head fusion: (..., H, Q, T) -> (..., Q, T), one small function for whole maps and for blocks of rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, cast

from attrace.errors import InputError, ShapeError
from attrace.ops.namespace import dtype_name, framework_of, wide_dtype
from attrace.types import Heads

Named = Literal["mean", "max", "min"]
CheckedHeads = Named | int | tuple[float, ...]
"""A name, a head's index from 0, or weights that sum to one."""


def check_heads(heads: Heads, count: int) -> CheckedHeads:
    """The fusion in its plain form, for maps of `count` heads.

    A negative index counts from the end.  Weights are divided by their sum: what counts is their ratio, so
    equal weights are the mean whatever their size, and the balance with the residual never shifts.

    Raises InputError for an unknown name, an index that does not exist, and weights that are not `count`
    finite, non-negative numbers with a positive sum.

    >>> check_heads([1, 1, 2], 3)
    (0.25, 0.25, 0.5)
    >>> check_heads(-1, 12)
    11
    """
    if isinstance(heads, str):
        if heads not in ("mean", "max", "min"):
            raise InputError(f"{_EXPECTED} Received: {heads!r}. Use one of the three names.")
        return cast(Named, heads)
    if isinstance(heads, bool):
        raise InputError(f"{_EXPECTED} Received: {heads}. Give the head's index as an integer.")
    if hasattr(heads, "__index__") and not hasattr(heads, "__len__"):
        return _check_head_index(operator.index(heads), count)
    try:
        weights = [_check_weight(weight, head) for head, weight in enumerate(cast(Sequence[float], heads))]
    except TypeError:
        raise InputError(f"{_EXPECTED} Received: {heads!r}. Give one of these.") from None
    if isinstance(heads, (set, frozenset, dict, bytes, bytearray)):
        raise InputError(f"{_EXPECTED} Received: a {type(heads).__name__}. Give the weights in order.")
    if len(weights) != count:
        raise InputError(
            f"Expected one weight per head, {count} in all. Received: {len(weights)}. "
            "Give a weight for each head, 0 for those to leave out."
        )
    total = sum(weights)
    if not 0.0 < total < math.inf:
        raise InputError(
            f"Expected head weights with a positive, finite sum. Received: the sum {total}. "
            "Give at least one head a positive weight."
        )
    return tuple(weight / total for weight in weights)


def fuse_heads(block: Any, heads: Heads = "mean") -> Any:
    """Fuse the heads of attention maps, or of any block of their rows.

    Shapes: (..., H, Q, T) -> (..., Q, T); element-wise, so a block of query rows gives those rows of the
    result. Half precision (float16, bfloat16) is added up and returned in float32; float32 and float64 stay
    as they are. The input is not changed; in torch, JAX and TensorFlow gradients flow.

    Raises InputError for what is not an array, another dtype, or heads that `check_heads` refuses;
    ShapeError for fewer than three axes.

    >>> import numpy as np
    >>> block = np.array([[[0.5, 0.5]], [[0.1, 0.9]]])  # 2 heads, 1 query row, 2 keys
    >>> fuse_heads(block, "max")
    array([[0.5, 0.9]])
    >>> fuse_heads(block, [3, 1])
    array([[0.4, 0.6]])
    """
    framework = framework_of(block)
    if framework is None:
        raise InputError(
            f"Expected a NumPy, PyTorch, JAX or TensorFlow array. Received: {type(block).__name__}. "
            "Convert it first, for instance with numpy.asarray."
        )
    if len(block.shape) < 3:
        raise ShapeError(
            f"Expected maps of shape (..., H, Q, T). Received: {tuple(block.shape)}. Add the missing axes."
        )
    xp = framework.xp
    name = dtype_name(block)
    wide = getattr(xp, wide_dtype(name))
    how = check_heads(heads, block.shape[-3])
    if how == "max":
        return xp.astype(xp.max(block, axis=-3), wide)
    if how == "min":
        return xp.astype(xp.min(block, axis=-3), wide)
    if how == "mean":
        if wide_dtype(name) == name:
            return xp.mean(block, axis=-3)
        how = (1.0 / block.shape[-3],) * block.shape[-3]
    if isinstance(how, int):
        return xp.astype(block[..., how, :, :], wide)
    # One head at a time: no widened copy of all heads.
    fused = None
    for head, weight in enumerate(how):
        if weight > 0.0:
            part = weight * xp.astype(block[..., head, :, :], wide)
            fused = part if fused is None else fused + part
    return fused


_EXPECTED = 'Expected heads to be "mean", "max", "min", a head\'s index or a weight per head.'


def _check_head_index(head: int, count: int) -> int:
    if not -count <= head < count:
        raise InputError(
            f"Expected a head from 0 to {count - 1} (or -{count} to -1, from the end). Received: {head}. "
            f"Choose one of the {count} heads."
        )
    return head % count


def _check_weight(weight: Any, head: int) -> float:
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise InputError(
            f"Expected head weights to be plain numbers. Received: {type(weight).__name__} for head {head}. "
            "Give a list of floats, for instance with .tolist()."
        )
    if not 0.0 <= float(weight) < math.inf:
        raise InputError(
            f"Expected head weights that are finite and not negative. Received: {weight} for head {head}. "
            "Use 0 to leave a head out."
        )
    return float(weight)
