"""Attention kernels from outside torch (xformers, flash-attention) and torch's own below its public function.

Such a kernel is one operator with a query, a key and a value among its arguments, by name.  Where its layout is
known, (B, Q, H, D) as all of these have it, and every other argument that shapes the map is known too, its weights
are recomputed; otherwise the call is named and refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUERY, KEY, VALUE = ("query", "q"), ("key", "k"), ("value", "v")
KNOWN = {"_flash_attn_forward", "_flash_attention_forward", "_efficient_attention_forward"} | {
    "efficient_attention_forward_cutlass"
}
"""Operators, whatever their library, whose tensors are (B, length, heads, head size)."""
SCALE, CAUSAL = ("scale", "softmax_scale"), ("causal", "is_causal")
BIAS = ("bias", "attn_bias", "attn_mask")
NEUTRAL = {
    *QUERY, *KEY, *VALUE, *SCALE, *CAUSAL, *BIAS, "custom_mask_type", "dropout_p", "compute_log_sumexp",
    "compute_logsumexp", "return_debug_mask", "return_softmax", "max_q", "max_k", "max_seqlen_q", "max_seqlen_k",
    "philox_seed", "philox_offset",
}  # fmt: skip
"""Arguments that are read, or that do not touch the map."""
UNSET = (None, False, 0, 0.0, -1)


@dataclass(frozen=True)
class ExternalCall:
    """A call as `QueryKeyAttention` takes it."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    causal: bool
    scale: float | None
    dropout: float


class Parts(dict[Any, str]):
    """What an operator is to the recorder; one that is met for the first time is looked at once."""

    def __missing__(self, func: Any) -> str:
        writes = getattr(getattr(func, "_schema", None), "is_mutable", False)
        self[func] = "external" if is_attention(func) else "write" if writes else ""
        return self[func]


def is_attention(func: Any) -> bool:
    """Whether an operator is an attention kernel, by the names of its arguments."""
    schema = getattr(func, "_schema", None)
    names = {argument.name for argument in schema.arguments} if schema is not None else set()
    backward = any(part in getattr(schema, "name", "") for part in ("backward", "overrideable_fake"))
    return not backward and all(names & set(one_of) for one_of in (QUERY, KEY, VALUE))


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExternalCall | str:
    """The call's tensors as (B, heads, length, size), or why it cannot be read."""
    schema = func._schema
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    given |= {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
    if schema.name.partition("::")[2] not in KNOWN:
        return f"the kernel {schema.name}, whose layout is not known"
    query, key, value = (first(given, names) for names in (QUERY, KEY, VALUE))
    if not all(isinstance(t, Tensor) and t.ndim == 4 for t in (query, key, value)):
        return f"packed sequences in the kernel {schema.name}"
    strange = sorted(name for name, value in given.items() if name not in NEUTRAL and not unset(value))
    if strange:
        return f"{', '.join(strange)} in the kernel {schema.name}"
    mask = int(given.get("custom_mask_type") or 0)
    causal = bool(first(given, CAUSAL)) or mask > 0
    length, keys = query.shape[1], key.shape[1]
    if causal and length != keys:
        # Kernels differ in where the diagonal of an oblong map ends.
        return f"a causal map of {length} queries and {keys} keys in the kernel {schema.name}"
    return ExternalCall(
        query=query.transpose(1, 2),
        key=key.transpose(1, 2),
        value=value.transpose(1, 2),
        bias=first(given, BIAS),
        causal=causal,
        scale=first(given, SCALE),
        dropout=float(given.get("dropout_p") or 0),
    )


def first(given: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((given[name] for name in names if name in given), None)


def unset(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and value in UNSET
