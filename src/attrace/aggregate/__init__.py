"""Tokens to words, heads to one map, patches to pixels."""
