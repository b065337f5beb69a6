"""Which module of a PyTorch model makes an attention call, read off the call stack."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Literal

from torch import Tensor, nn

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "num_attn_heads")
# Arguments of an attention module's forward that hold a second stream.
SECOND_STREAMS = ("key_value_states", "encoder_hidden_states", "encoder_states", "memory")


@dataclass(frozen=True, eq=False)
class Caller:
    """The module that makes a call, and what its arguments say of it."""

    name: str
    heads: int | None = None
    cross: bool | None = None
    """Whether keys come from another stream than queries; None where the arguments do not tell."""
    queries: int | None = None
    """How many tokens ask, where the heads of a group share the query axis of the call instead."""
    given: tuple[int, ...] = ()
    """Shape of the first tensor among the arguments of the module's forward."""
    convolves: bool = False
    """Whether the module has convolutions along one axis, and may be given its channels first."""
    sinks: Tensor | None = None
    """(H,) The module's learned sinks, which it may apply to what its map gave."""


ANOTHER = Caller("")
"""Who calls where it is no module of the model."""


def caller_among(names: Mapping[int, str]) -> Caller | None:
    """The innermost of these modules (by their `id`) on the call stack, by the first argument of its functions.

    Looked up for attention calls alone: hooks on every module would cost more than the rest of the recorder, switch
    off the fast paths that check for hooks, and run in other threads.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            local = frame.f_locals
            module = local.get(code.co_varnames[0])
            name = names.get(id(module))
            if name is not None:
                queries = local.get("q_length") if code.co_name == "sdpa_attention_forward" else None
                if code.co_name != "forward" or not isinstance(module, nn.Module):
                    frame = forward_of(module, frame)
                    local = {} if frame is None else frame.f_locals
                given = () if frame is None else shape_given(frame.f_code, local)
                return Caller(
                    name,
                    heads_of(module),
                    is_cross(local),
                    queries,
                    given,
                    convolves=module is not None
                    and len(given) == 3
                    and any(isinstance(part, nn.Conv1d) for part in module.children()),
                    sinks=sinks if isinstance(sinks := getattr(module, "sinks", None), Tensor) else None,
                )
        frame = frame.f_back
    return None


def forward_of(module: Any, frame: FrameType) -> FrameType | None:
    """The frame of the module's own forward, from a function that it called with itself."""
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_code.co_name == "forward" and outer.f_locals.get("self") is module:
            return outer
        outer = outer.f_back
    return None


def shape_given(code: CodeType, local: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of the first tensor among a forward's arguments."""
    for name in code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]:
        if isinstance(value := local.get(name), Tensor):
            return () if value.is_nested else tuple(value.shape)
    return ()


def heads_of(module: Any) -> int | None:
    """How many heads an attention module says it has."""
    found = (getattr(module, name, None) for name in HEAD_COUNTS)
    return next(
        (heads for heads in found if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0), None
    )


def is_cross(local: Mapping[str, Any]) -> bool | None:
    """Whether a forward's arguments name a second stream for keys and values; None where they name none."""
    known = [name for name in SECOND_STREAMS if name in local]
    if any(isinstance(local[name], Tensor) for name in known):
        return True
    if isinstance(local.get("query"), Tensor) and isinstance(local.get("key"), Tensor):
        return local["query"] is not local["key"] if "key_padding_mask" in local else None
    return False if known else None


def kind_of(caller: Caller, shape: tuple[int, int, int, int], windows: int) -> Literal["self", "cross"]:
    cross = shape[2] != shape[3] and windows == 1 if caller.cross is None else caller.cross
    return "cross" if cross else "self"
