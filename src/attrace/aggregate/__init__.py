"""Tokens to words, heads to one map, patches to pixels."""

from __future__ import annotations

from attrace.aggregate.tokens import label_tokens
from attrace.aggregate.words import split_words, words

__all__ = ["label_tokens", "split_words", "words"]
