"""The methods by name.  The api, its error messages and the command line's tests read this list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attrace.errors import InputError
from attrace.methods.alti import alti
from attrace.methods.last_layer import last_layer
from attrace.methods.leave_one_out import leave_one_out
from attrace.methods.rollout import rollout
from attrace.types import Options, Progress, Scores, Subject


@dataclass(frozen=True, slots=True)
class Method:
    """One way to score tokens, and what it costs."""

    name: str
    run: Callable[[Subject, Options, Progress | None], Scores]
    cost: str
    uses: tuple[str, ...]
    """Which of the options it heeds."""
    sees_target: bool = False
    """Whether the picture depends on the class or token that is asked for, and not only on where it is read."""


METHODS = {
    m.name: m
    for m in (
        Method("rollout", rollout, "one Q K^T pass a layer", ("heads", "residual", "discard", "layers")),
        Method("last-layer", last_layer, "one Q K^T row", ("heads", "discard", "layers")),
        Method("alti", alti, "n x n vectors of the model's width a layer and head", ("layers",)),
        Method("leave-one-out", leave_one_out, "n forward passes, batched", (), sees_target=True),
    )
}


def method(name: str) -> Method:
    """The method of that name; InputError that lists the names where there is none."""
    if name not in METHODS:
        raise InputError(f"Expected a method: {', '.join(METHODS)} or auto. Received: {name!r}.")
    return METHODS[name]
