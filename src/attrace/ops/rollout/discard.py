"""Setting the smallest cells of a fused map to zero."""

from __future__ import annotations

import math
from typing import Any

from attrace.ops.namespace import Framework


def drop_smallest(framework: Framework, fused: Any, discard: float) -> Any:
    """(B, Q, T) -> (B, Q, T) with the floor(discard * Q * T) smallest cells of each item set to zero.

    Exactly that many, over the whole map: among equal cells those first in reading order go.  The selection
    is a constant for gradients, which flow through the cells that stay.
    """
    rows, columns = fused.shape[-2:]
    count = math.floor(discard * rows * columns)
    if count == 0:
        return fused
    xp = framework.xp
    flat = xp.reshape(framework.constant(fused), (-1, rows * columns))
    threshold = framework.kth_smallest(flat, count)
    below, equal = flat < threshold, flat == threshold
    ties = count - framework.running_count(below)[:, -1:]
    dropped = below | (equal & (framework.running_count(equal) <= ties))
    return xp.where(xp.reshape(dropped, (-1, rows, columns)), xp.zeros_like(fused), fused)
