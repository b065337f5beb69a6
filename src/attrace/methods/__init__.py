"""Trace -> scores per token.  One file per method, one registry."""
