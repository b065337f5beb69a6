"""See which inputs a Transformer's output drew on, and how far the picture can be trusted."""

from __future__ import annotations
