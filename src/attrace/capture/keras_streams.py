"""Which token streams the arguments of a Keras layer belong to.

A functional model's graph says from which input each tensor comes, exactly; inside a layer of another kind its own
arguments are known again when they are passed on, and what it computes belongs to the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import keras

from attrace.capture.keras_seam import Call

UNNAMED = "tokens"
MADE_UP = "keras_tensor"
"""How Keras names inputs that nobody has named."""
# Inputs that hold no tokens of their own.
ASIDE = ("mask", "segment", "position", "token_type")


@dataclass
class Frame:
    """One layer that runs."""

    layer: Any
    call: Call
    labels: dict[int, str] = field(default_factory=dict)
    """Of the tensors among its arguments, by identity: they live as long as the call."""
    graph: dict[int, list[list[str | None]]] = field(default_factory=dict)
    """For a functional model: the labels of the tensors that each of its layers is called with, call by call."""

    @property
    def first(self) -> str | None:
        return next(iter(self.labels.values()), None)

    def label(self, tensor: Any) -> str | None:
        """Of one of its own arguments, or of what it computed from them."""
        return self.labels.get(id(tensor), self.first)


def frame_of(layer: Any, call: Call, outer: Frame | None) -> Frame:
    """The frame of a layer that is called inside of another, or of the outermost one."""
    frame = Frame(layer, call)
    tensors = [x for x in keras.tree.flatten(call) if hasattr(x, "shape")]
    calls = outer.graph.get(id(layer)) if outer is not None else None
    known: list[str | None]
    if calls:
        known = calls.pop(0) if len(calls) > 1 else calls[0]
    elif outer is not None:
        known = [outer.label(x) for x in tensors]
    else:
        known = []
    for tensor, label in zip(tensors, known, strict=False):
        if label is not None:
            frame.labels.setdefault(id(tensor), label)
    inputs = getattr(layer, "inputs", None)
    if isinstance(layer, keras.Model) and inputs and hasattr(layer, "_nodes_by_depth"):
        given = dict(zip([id(x) for x in inputs], known, strict=False)) if outer is not None else {}
        frame.graph = graph_labels(layer, given)
    return frame


def graph_labels(model: Any, given: dict[int, str | None]) -> dict[int, list[list[str | None]]]:
    """Layer -> for each of its calls the label of each tensor: the input that it comes from, first come first."""
    numbered = {id(x): f"input_{at}" if len(model.inputs) > 1 else UNNAMED for at, x in enumerate(model.inputs)}
    names = {
        id(x): given.get(id(x)) or (numbered[id(x)] if x.name.startswith(MADE_UP) else x.name) for x in model.inputs
    }
    labels: dict[int, str | None] = {
        key: None if any(word in name for word in ASIDE) else name for key, name in names.items()
    }
    found: dict[int, list[list[str | None]]] = {}
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            if node.is_input:
                continue
            known = [labels.get(id(x)) for x in node.input_tensors]
            found.setdefault(id(node.operation), []).append(known)
            for x in node.outputs:
                labels[id(x)] = next((label for label in known if label is not None), None)
    return found


def joined(frame: Frame, outer: Frame | None, query: Any, source: Any, *, cross: bool) -> tuple[str, str]:
    """The streams of queries and keys of an attention layer's call."""
    queries, keys = frame.label(query), frame.label(source)
    if not cross:
        return queries or UNNAMED, queries or UNNAMED
    if queries == keys and outer is not None:  # its argument was cast on the way
        others = set(outer.labels.values()) - {queries}
        keys = others.pop() if len(others) == 1 else keys
    return queries or UNNAMED, keys or UNNAMED
