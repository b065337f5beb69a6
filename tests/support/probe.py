"""The weights of a model's attention, found without the recorder.

A function mode stands between the model and torch's Python functions.  A fused call is made a second time with unit
vectors as values: its output then is the map.  An unfused one shows its softmax.  `nn.MultiheadAttention` is asked
for its own weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

SOFTMAX = (torch.softmax, functional.softmax, Tensor.softmax)


class Probe(TorchFunctionMode):
    def __init__(self, *, softmax: bool) -> None:
        super().__init__()
        self.maps: list[Tensor] = []
        self._softmax = softmax

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            self.maps.append(probed(*args, **given))
        if func is functional.multi_head_attention_forward:
            asked = {**given, "need_weights": True, "average_attn_weights": False}
            self.maps.append(func(*args, **asked)[1])
        out = func(*args, **given)
        if self._softmax and func in SOFTMAX and out.ndim > 3:
            self.maps.append(out)
        return out


def probed(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **given: Any) -> Tensor:
    """What the fused call does with one unit vector per key; in float64 where the model's numbers are coarse."""
    if query.dtype in (torch.float16, torch.bfloat16):
        query, key = query.double(), key.double()
        mask = rest[0] if rest else given.get("attn_mask")
        if mask is not None and mask.dtype != torch.bool:
            given = {**given, "attn_mask": mask.double()}
            rest = ()
    units = torch.eye(key.shape[-2], dtype=query.dtype).expand(*value.shape[:-1], key.shape[-2])
    return functional.scaled_dot_product_attention(query, key, units, *rest, **given)


def own_maps(call: Callable[[], object], *, softmax: bool = False) -> list[Tensor]:
    """The maps of all attention calls, in order; with `softmax` every softmax over four axes counts as one."""
    with torch.no_grad(), Probe(softmax=softmax) as probe:
        call()
    return probe.maps
