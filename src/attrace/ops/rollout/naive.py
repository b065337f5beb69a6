"""Rollout in the plainest form: NumPy, float64, dense, one step at a time.

This is what rollout *means*; the fast paths beside it are tested against it.  It checks little: see
`attrace.rollout` for the same with errors that explain themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from attrace.errors import ShapeError
from attrace.types import Floats, Heads


def rollout(
    maps: Sequence[Any],
    *,
    heads: Heads = "mean",
    residual: float = 0.5,
    normalize: bool = True,
    discard: float = 0.0,
    layers: Sequence[int] | None = None,
    target: int | Sequence[int] | None = None,
    source: int | Sequence[int] | None = None,
) -> Floats:
    """The product of a model's attention maps, last layer leftmost: rows are outputs, columns inputs.

    Shapes: L maps (B, H, n, n) -> (B, n, n); `target` and `source` choose rows and columns of it.
    Source: Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", arXiv 2005.00928, section 4.

    >>> first = np.array([[[[0.5, 0.5], [0.0, 1.0]]]])
    >>> last = np.array([[[[1.0, 0.0], [0.5, 0.5]]]])
    >>> rollout([first, last])
    array([[[0.75  , 0.25  ],
            [0.1875, 0.8125]]])
    """
    chosen = range(len(maps)) if layers is None else sorted(layer % len(maps) for layer in layers)
    batch, _, n, _ = np.shape(maps[0])
    result = np.zeros((batch, n, n))
    for item in range(batch):
        product = np.eye(n)
        for layer in chosen:
            fused = fuse(np.asarray(maps[layer], dtype=np.float64)[item], heads)
            mixed = mix(drop_smallest(fused, discard), residual, normalize)
            product = mixed @ product
        result[item] = product
    if target is not None:
        return result[:, target]
    if source is not None:
        return result[:, :, source]
    return result


def fuse(heads_of_one: Floats, heads: Heads) -> Floats:
    """(H, n, n) -> (n, n)."""
    if isinstance(heads, str):
        return np.asarray(getattr(np, heads)(heads_of_one, axis=0))
    if isinstance(heads, int):
        return np.asarray(heads_of_one[heads])
    fused = np.zeros(heads_of_one.shape[1:])
    for head, weight in enumerate(heads):
        fused += weight * heads_of_one[head]
    return fused / sum(heads)


def drop_smallest(fused: Floats, discard: float) -> Floats:
    """Set the floor(discard * Q * T) smallest cells of a (Q, T) map to zero; of equals, the first in reading order."""
    count = math.floor(discard * fused.size)
    kept = fused.copy().reshape(-1)
    kept[np.argsort(kept, kind="stable")[:count]] = 0.0
    return kept.reshape(fused.shape)


def mix(fused: Floats, residual: float, normalize: bool) -> Floats:
    """(1 - residual) A + residual I, then each row divided by its own sum; a row of zeros stays one."""
    mixed = (1.0 - residual) * fused + residual * np.eye(fused.shape[0])
    if normalize:
        for i in range(len(mixed)):
            if mixed[i].sum() > 0.0:
                mixed[i] /= mixed[i].sum()
    return mixed


def encoder_decoder(
    encoder: Sequence[Any],
    decoder: Sequence[Any],
    cross: Sequence[Any],
    *,
    heads: Heads = "mean",
    residual: float = 0.5,
    normalize: bool = True,
) -> tuple[Floats, Floats]:
    """Rollout of an encoder-decoder model: how much each decoder position draws on either input.

    Shapes, with S encoder and n decoder tokens: `encoder` maps (B, H, S, S); `decoder` maps (B, H, n, n) and
    as many `cross` maps (B, H, n, S), layer by layer -> the shares of the decoder's input (B, n, n) and of
    the encoder's input (B, n, S).

    A self block mixes a stream with itself.  A cross block keeps the share `residual` of what a decoder
    position held and takes the rest from the encoder's output.  With maps whose rows sum to one the two
    shares of a position sum to one.

    >>> encoder = np.array([[[[0.5, 0.5], [0.25, 0.75]]]])
    >>> own, cross = np.array([[[[1.0]]]]), np.array([[[[0.6, 0.4]]]])
    >>> from_decoder, from_encoder = encoder_decoder([encoder], [own], [cross])
    >>> from_decoder, from_encoder
    (array([[[0.5]]]), array([[[0.25, 0.25]]]))
    """
    if len(decoder) != len(cross):
        raise ShapeError(
            "Expected one self map and one cross map per decoder layer. "
            f"Received: {len(decoder)} self maps, {len(cross)} cross maps. Give both lists for the same "
            "layers."
        )
    of_encoder = rollout(encoder, heads=heads, residual=residual, normalize=normalize)
    batch, _, n, length = np.shape(cross[0])
    from_decoder = np.zeros((batch, n, n))
    from_encoder = np.zeros((batch, n, length))
    for item in range(batch):
        own, other = np.eye(n), np.zeros((n, length))
        for self_map, cross_map in zip(decoder, cross, strict=True):
            mixed = mix(fuse(np.asarray(self_map, dtype=np.float64)[item], heads), residual, normalize)
            own, other = mixed @ own, mixed @ other
            taken = (1.0 - residual) * fuse(np.asarray(cross_map, dtype=np.float64)[item], heads)
            kept = np.full((n, 1), residual)
            if normalize:
                total = kept + taken.sum(axis=1, keepdims=True)
                total[total == 0.0] = 1.0
                kept, taken = kept / total, taken / total
            own, other = kept * own, kept * other + taken @ of_encoder[item]
        from_decoder[item], from_encoder[item] = own, other
    return from_decoder, from_encoder


def gradient_rollout(maps: Sequence[Any], gradients: Sequence[Any]) -> Floats:
    """Relevance from maps and the gradients of one output with respect to them, both in forward layer order.

    Shapes: L maps and L gradients (B, H, n, n) -> (B, n, n).  Each layer adds `mean over heads of max(0, g *
    A)` times what was there, starting from the identity; nothing is normalised.
    Source: Chefer, Gur and Wolf 2021, "Generic Attention-model Explainability", arXiv 2103.15679, equations
    5 and 6.

    Gradients caught by backward hooks arrive last layer first: turn them round before.

    >>> one = np.array([[[[0.5, 0.5], [0.25, 0.75]]]])
    >>> gradient_rollout([one], [np.array([[[[1.0, -1.0], [2.0, 4.0]]]])])
    array([[[1.5, 0. ],
            [0.5, 4. ]]])
    """
    if len(maps) != len(gradients):
        raise ShapeError(
            f"Expected one gradient per map. Received: {len(maps)} maps, {len(gradients)} gradients. "
            "Give both lists for the same layers, in forward order."
        )
    batch, _, n, _ = np.shape(maps[0])
    result = np.stack([np.eye(n)] * batch)
    for layer, (attention, gradient) in enumerate(zip(maps, gradients, strict=True)):
        weights, slopes = np.asarray(attention, dtype=np.float64), np.asarray(gradient, dtype=np.float64)
        if weights.shape != slopes.shape:
            raise ShapeError(
                f"Expected a gradient of the map's shape {weights.shape} in layer {layer}. "
                f"Received: {slopes.shape}. Pair each map with its own gradient."
            )
        relevance = np.maximum(weights * slopes, 0.0).mean(axis=1)
        for item in range(batch):
            result[item] = result[item] + relevance[item] @ result[item]
    return result
