"""Attention weights of one call: the plain reference and streamed row blocks."""
