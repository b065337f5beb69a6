"""Where a model family keeps the parts of its attention block.  Loaded when values are recorded.

Paths start at the module that calls attention, as in relative imports: ".o_proj" is its child, ".." its
parent, "..output.dense" a child of its parent's child.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """The attention block x -> norm?(x + projection(attention(x))) of one family."""

    attention: str
    """Last part of the name of the module that calls attention."""
    projection: str
    """The output projection."""
    block: str
    """The module whose first argument, or `hidden_states`, is the residual input x."""
    norm: str | None = None
    """The layer norm after the sum; None in pre-norm families."""
    transposed: bool = False
    """The projection keeps its weight as (in, out)."""


_BERT = Family("self", "..output.dense", "..", "..output.LayerNorm")
_LLAMA = Family("self_attn", ".o_proj", "..")

FAMILIES = {
    "albert": Family("attention", ".dense", ".", ".LayerNorm"),
    "bert": _BERT,
    "camembert": _BERT,
    "distilbert": Family("attention", ".out_lin", ".", "..sa_layer_norm"),
    "electra": _BERT,
    "gpt2": Family("attn", ".c_proj", "..", transposed=True),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mpnet": Family("attn", ".o", "..", "..LayerNorm"),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
}
"""By the configuration's model_type.  Blocks that add attention and feed-forward at once (GPT-NeoX, GPT-J,
Phi) are left out: their feed-forward part reads the token itself, beside attention, and the decomposition has no place
for it.
"""


def path_from(name: str, path: str) -> str:
    """The dotted name that a relative path leads to.

    >>> path_from("encoder.layer.0.attention.self", "..output.dense")
    'encoder.layer.0.attention.output.dense'
    """
    rest = path.lstrip(".")
    parts = name.split(".")
    kept = parts[: len(parts) - (len(path) - len(rest)) + 1]
    return ".".join([*kept, rest] if rest else kept)
