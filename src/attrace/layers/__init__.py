"""Attention mechanisms and rollout as layers, one framework per folder, same file names."""
