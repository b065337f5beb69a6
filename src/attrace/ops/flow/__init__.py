"""Attention flow: how much could reach an output token from an input token at most.  `naive` is the exact reference."""

from __future__ import annotations

from attrace.ops.flow.naive import attention_flow

__all__ = ["attention_flow"]
