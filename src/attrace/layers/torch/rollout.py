"""Attention rollout as a PyTorch module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from attrace.ops.rollout import rollout
from attrace.ops.rollout.checks import check_discard, check_residual, check_switch
from attrace.types import Heads


class AttentionRollout(nn.Module):
    """Roll out attention maps: the differentiable module over `attrace.rollout`.

    Shapes: forward(L maps of (B, H, n, n)) -> (B, n, n); with `target` its rows, with `source` its columns.
    The options mean what they mean in `attrace.rollout`, and the errors are the same.  It has no parameters
    and keeps nothing between calls.  Which cells are discarded counts as constant for gradients.  Under
    `torch.compile` the values of the maps are not checked.  Autocast does not lower its precision: half maps
    are computed in float32.

    Source: Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", arXiv 2005.00928, section 4.

    >>> import torch
    >>> first = torch.tensor([[[[0.5, 0.5], [0.0, 1.0]]]], requires_grad=True)
    >>> last = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])
    >>> row = AttentionRollout()([first, last], target=-1)
    >>> row.tolist()
    [[0.1875, 0.8125]]
    >>> row[0, 0].backward()
    >>> first.grad is not None
    True
    """

    def __init__(
        self,
        heads: Heads = "mean",
        residual: float = 0.5,
        normalize: bool = True,
        discard: float = 0.0,
        layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.heads: Heads = heads
        self.residual = check_residual(residual)
        self.normalize = check_switch("normalize", normalize)
        self.discard = check_discard(discard)
        self.layers = layers

    def forward(
        self,
        maps: Iterable[Tensor] | Tensor,
        target: int | Sequence[int] | None = None,
        source: int | Sequence[int] | None = None,
    ) -> Tensor:
        result: Tensor = rollout(
            maps,
            heads=self.heads,
            residual=self.residual,
            normalize=self.normalize,
            discard=self.discard,
            layers=self.layers,
            target=target,
            source=source,
        )
        return result

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads!r}, residual={self.residual}, normalize={self.normalize}, "
            f"discard={self.discard}, layers={self.layers}"
        )
