"""A stand-in for a flash kernel: its arguments, its rules, and a computation of its own that no recorder sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

NAME = "stand_in"


def runs(module: Any, query: Tensor, key: Tensor, mask: Tensor | None, rest: dict[str, Any]) -> Iterator[Any]:
    """(batch item, query places, key places) of each run of tokens that attends within itself."""
    batch, _, queries, _ = query.shape
    keys, positions = key.shape[2], rest.get("position_ids")
    if mask is not None:
        for item in range(batch):
            real = mask[item].bool().numpy()
            asking = real if queries == len(real) else real[-queries:] if queries > 1 else np.ones(1, bool)
            yield item, np.nonzero(asking)[0], np.nonzero(real)[0]
    elif rest.get("cu_seq_lens_q") is not None:
        starts, ends = (rest[f"cu_seq_lens_{side}"].tolist() for side in "qk")
        for (a, b), (c, d) in zip(pairwise(starts), pairwise(ends), strict=True):
            yield 0, np.arange(a, b), np.arange(c, d)
    elif batch == 1 and positions is not None and positions.shape[-1] > 1 and bool((positions.diff() != 1).any()):
        starts = [*np.nonzero((positions[0] == positions.min()).numpy())[0], queries]
        for a, b in pairwise(starts):
            yield 0, np.arange(a, b), np.arange(a, b)
    else:
        for item in range(batch):
            yield item, np.arange(queries), np.arange(keys)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Cell by cell in NumPy and float64, with sums in the order of the keys."""
    causal = module.is_causal if is_causal is None else is_causal
    group = query.shape[1] // key.shape[1]
    window = sliding_window if sliding_window is not None and key.shape[2] > sliding_window else None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x.detach().to(torch.float64).numpy() for x in (query, key, value))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for item, asking, asked in runs(module, query, key, attention_mask, rest):
        for head in range(q.shape[1]):
            for i, row in enumerate(asking):
                at, mass = i + len(asked) - len(asking), 0.0
                for j, column in enumerate(asked):
                    if (causal and j > at) or (window is not None and abs(at - j) >= window):
                        continue
                    score = float(q[item, head, row] @ k[item, head // group, column]) * scaling
                    score = softcap * np.tanh(score / softcap) if softcap is not None else score
                    mass += np.exp(score)
                    out[item, head, row] += np.exp(score) * v[item, head // group, column]
                mass += 0.0 if s_aux is None else float(torch.exp(s_aux[head]))
                out[item, head, row] /= mass
    return torch.from_numpy(out).to(query.dtype).transpose(1, 2).contiguous(), None


@contextmanager
def registered(function: Any = attend, masks: Any = flash_attention_mask) -> Iterator[None]:
    """A function under the stand-in's name, with flash's masks unless others are given; gone afterwards."""
    mappings = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    before = [mapping.get(NAME) for mapping in mappings]
    AttentionInterface.register(NAME, function)
    AttentionMaskInterface.register(NAME, masks)
    try:
        yield
    finally:
        for mapping, old in zip(mappings, before, strict=True):
            mapping.pop(NAME, None)
            if old is not None:
                mapping[NAME] = old
