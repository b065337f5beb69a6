"""attrace's layers for PyTorch: `attrace.torch.AttentionRollout` and the like."""

from __future__ import annotations

from attrace.errors import MissingDependencyError

try:
    from attrace.layers.torch.rollout import AttentionRollout
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingDependencyError(
        "Expected PyTorch for attrace.torch. Received: no module named torch. "
        "Install it with: pip install 'attrace[torch]'"
    ) from error

__all__ = ["AttentionRollout"]
