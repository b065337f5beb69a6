"""What is explained of a Keras model: a class, or the next token.  Nothing here imports PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np

from attrace.capture.keras_encoding import KerasEncoding, Reader
from attrace.capture.targets import Question, causal_target, contrast_of, listed, one_of_classes, one_of_tokens
from attrace.errors import ModelError, TargetError
from attrace.types import Floats

Head = Literal["softmax", "probabilities", "sigmoid", "yes or no", "regression"]


@dataclass(frozen=True)
class Answer:
    """How a model's output reads: the task, and what its numbers are."""

    task: Literal["classifier", "causal"]
    head: Head

    def log_probabilities(self, output: Floats) -> Floats:
        """Of each class or token, on the last axis; the outputs themselves for a regression."""
        with np.errstate(divide="ignore"):
            if self.head == "softmax":
                shifted = output - output.max(-1, keepdims=True)
                found: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
                return found
            if self.head in ("probabilities", "sigmoid"):
                logarithms: Floats = np.log(output)
                return logarithms
            if self.head == "yes or no":
                both: Floats = np.log(np.concatenate([1 - output, output], axis=-1))
                return both
        return output


def answer_of(model: Any, output: Any, n: int, *, causal: bool) -> Answer:
    """Read off the shape of the output, (1, C) or (1, n, V), and the model's last activation."""
    shape = tuple(getattr(output, "shape", ()))
    if len(shape) == 3 and shape[1] == n and causal:
        return Answer("causal", "probabilities" if last_activation(model) == "softmax" else "softmax")
    if len(shape) != 2 or shape[0] != 1:
        seen = shape or f"a {type(output).__name__}"
        raise ModelError(
            f"Expected a text classifier, with an output (1, classes), or a causal language model, (1, {n}, "
            f"vocabulary). Received: {type(model).__name__} with {seen}. Its attention can be read: "
            "attrace.trace(model, inputs)."
        )
    activation = last_activation(model)
    if not getattr(model, "outputs", None) and abs(float(keras.ops.sum(output)) - 1) < 1e-3 and shape[1] > 1:
        activation = "softmax"  # a subclassed model tells no more than its numbers
    if shape[1] == 1:
        return Answer("classifier", "yes or no" if activation == "sigmoid" else "regression")
    heads: dict[str, Head] = {"softmax": "probabilities", "sigmoid": "sigmoid"}
    return Answer("classifier", heads.get(activation, "softmax"))


def last_activation(model: Any) -> str:
    """The name of the activation of the layer that gives the output."""
    layers = [layer for layer in model._flatten_layers(include_self=False, recursive=True) if layer.name != "dropout"]
    known = [x for x in layers if isinstance(x, keras.layers.Dense | keras.layers.Activation | keras.layers.Softmax)]
    tensors = keras.tree.flatten(getattr(model, "outputs", None) or [])
    history = [getattr(getattr(x, "_keras_history", None), "operation", None) for x in tensors]
    last = history[0] if history and history[0] is not None else (known[-1] if known else None)
    if isinstance(last, keras.layers.Softmax):
        return "softmax"
    return str(getattr(getattr(last, "activation", None), "__name__", ""))


def class_question(answer: Answer, labels: tuple[str, ...] | None, output: Floats, target: str, n: int) -> Question:
    """`output` (C,), as the model gave it."""
    values = answer.log_probabilities(output)
    count = len(values)
    names = list(labels) if labels is not None and len(labels) == count else [str(i) for i in range(count)]
    shares = None if answer.head == "regression" else np.exp(values)
    return one_of_classes(names, shares, int(values.argmax()), target, n)


def next_question(answer: Answer, found: Reader, encoding: KerasEncoding, output: Floats, target: str) -> Question:
    """`output` (n, V): the next token, or the token at a position given those before it."""
    kind, text, before = causal_target(target, int((~encoding.hidden).sum()))
    shares = np.exp(answer.log_probabilities(output[before - 1]))
    rival = None
    if kind == "next":
        index, rival = contrast_of(text, lambda name: _token_index(found, name, shares))
    else:
        index = int(encoding.ids[before]) if kind == "token" else int(shares.argmax())
    return one_of_tokens(
        "next", shares, lambda i: shown(found, i), index=index, at=before - 1, rival=rival, length=before
    )


def shown(found: Reader, index: int) -> str:
    """A vocabulary entry as text."""
    return found.piece(index).replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")


def _token_index(found: Reader, text: str, shares: Floats) -> int:
    """The vocabulary id of one token's text, with or without a blank before it, whichever is likelier."""
    if found.vocabulary is None:
        raise TargetError(
            "Expected a vocabulary as a list in processor=(function, vocabulary), to find next:TEXT. Received: a "
            "function."
        )
    forms = {text, f" {text}", f"Ġ{text}", f"▁{text}"}
    found_at = [i for i, word in enumerate(found.vocabulary[: len(shares)]) if word in forms]
    if not found_at:
        likely = [shown(found, int(i)) for i in np.argsort(-shares)[:10]]
        raise TargetError(
            f"Expected the text of one token; the likeliest here are {listed(likely)}. Received: {text!r}, which is "
            "no entry of the vocabulary."
        )
    return max(found_at, key=lambda i: float(shares[i]))
