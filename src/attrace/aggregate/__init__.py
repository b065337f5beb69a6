"""Tokens to words, heads to one map, patches to pixels."""

from __future__ import annotations

from attrace.aggregate.patches import patch_map, pixel_map
from attrace.aggregate.tokens import label_tokens
from attrace.aggregate.words import split_words, words

__all__ = ["label_tokens", "patch_map", "pixel_map", "split_words", "words"]
