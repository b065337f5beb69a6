"""A Keras text model with one text and one target: what the methods ask.  On TensorFlow and JAX without PyTorch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from attrace.capture.keras_encoding import KerasEncoding, Reader, any_length, encode, masked, reader, without
from attrace.capture.keras_ops import to_numpy
from attrace.capture.keras_recorder import recording
from attrace.capture.keras_seam import Call, listening
from attrace.capture.keras_targets import Answer, answer_of, class_question, next_question
from attrace.capture.targets import Question
from attrace.capture.trace import Trace
from attrace.errors import CaptureError, InputError, NonFiniteError, ShapeError
from attrace.types import Floats, Progress

TOKENS_AT_ONCE = 4096
"""Tokens of one batched pass when parts of the input are removed."""
NUMBERS_AT_ONCE = 1 << 26
"""Numbers that the model may give back at once."""


@dataclass(eq=False)
class KerasSubject:
    """A Keras model, an encoded text and a target; implements `attrace.types.Subject`."""

    model: Any
    reader: Reader
    encoding: KerasEncoding
    answer: Answer
    question: Question
    trace: Trace
    readout: Floats
    protected: NDArray[np.bool_]

    @property
    def name(self) -> str:
        return str(self.model.name)

    @property
    def task(self) -> str:
        return self.answer.task

    @property
    def unit(self) -> str:
        """What `score` gives."""
        if self.answer.head == "regression":
            return "output"
        return "log-odds" if self.question.rival is not None else "log-probability"

    @property
    def width(self) -> int:
        """Of the vectors that contributions would be made of: none are."""
        return 0

    @property
    def parameters(self) -> int:
        """Parameters that work on every token: all but the embedding tables."""
        tables = [x for x in self.model._flatten_layers() if isinstance(x, keras.layers.Embedding)]
        return int(self.model.count_params() - sum(x.count_params() for x in tables))

    @property
    def settings(self) -> dict[str, Any]:
        """What it ran on, as JSON values."""
        backend = keras.backend.backend()
        return {"backend": backend, "dtype": str(self.model.dtype_policy.name), "packages": ("keras", backend)}

    @property
    def remarks(self) -> list[str]:
        """What the reader must know of model and text."""
        if not self.encoding.unknown:
            return []
        return [f"{self.encoding.unknown} tokens are unknown to the vocabulary: the model cannot tell them apart."]

    def score(self, keep: NDArray[np.bool_], *, operator: str = "delete", progress: Progress | None = None) -> Floats:
        """The target's score with only the kept tokens: (m, n) -> (m,).

        Log-probability in nats; with a contrast, log p(A) - log p(B); for a regression, the output.  `operator`
        "delete" takes the other tokens out of the sequence (where the model reads one length only, padding follows at
        the end), "hide" leaves them in place and sets the padding mask to zero there.  Protected tokens always stay.
        """
        if keep.ndim != 2 or keep.shape[1] != len(self.protected):
            raise ShapeError(f"Expected keep of shape (m, {len(self.protected)}). Received: {keep.shape}.")
        if operator not in ("delete", "hide"):
            raise ValueError(f"Expected operator delete or hide. Received: {operator!r}.")
        kept = keep | self.protected
        kept[:, self.question.length :] &= self.answer.task == "classifier"  # not shown to a language model
        values = np.zeros(len(kept))
        counts = kept.sum(1)
        if not counts.all():
            raise InputError("Expected a token to stay. Received: a text of one token. Give a longer text.")
        done = 0
        for count in np.unique(counts):
            rows = np.flatnonzero(counts == count)
            for part in np.split(rows, range(self._rows_at_once(), len(rows), self._rows_at_once())):
                values[part] = self._scores(kept[part], operator)
                done += len(part)
                if progress is not None:
                    progress("removing tokens", done, len(kept))
        return values

    def _rows_at_once(self) -> int:
        n = len(self.encoding)
        numbers = n * int(self.trace.output.shape[-1]) if self.answer.task == "causal" else 1
        return max(1, min(TOKENS_AT_ONCE // n, NUMBERS_AT_ONCE // numbers))

    def _scores(self, kept: NDArray[np.bool_], operator: str) -> Floats:
        """For rows that keep equally many tokens."""
        if operator == "delete":
            batch = without(self.encoding, kept, pad=not any_length(self.model))
        else:
            batch = masked(self.encoding, kept)
        output = to_numpy(self.model(batch)).astype(np.float64)
        if self.answer.task == "causal":  # the next token is read at the last one that stayed
            places = kept.sum(1) - 1 if operator == "delete" else kept.shape[1] - 1 - kept[:, ::-1].argmax(1)
            output = output[np.arange(len(kept)), places]
        values = self.answer.log_probabilities(output)
        rival = self.question.rival
        found: Floats = values[:, self.question.target.index] - (0 if rival is None else values[:, rival])
        return found


def ask(model: Any, processor: Any, text: str, target: str) -> KerasSubject:
    """Run the model once on the text, recorded, and make the target exact.

    Raises InputError for a processor that is none, TargetError for a target that the model does not have, CaptureError
    where no attention was seen, NonFiniteError where the model gives NaN.
    """
    found = reader(processor)
    encoding = encode(found, model, text)
    states = LastStates(len(encoding))
    with listening(states), recording(model) as trace:
        output = model(encoding.inputs)
    trace.check()
    answer = answer_of(model, output, len(encoding), causal=trace.is_causal())
    values = to_numpy(output)[0].astype(np.float64)
    if not np.isfinite(values).all():
        raise NonFiniteError(
            f"Expected finite numbers from {model.name}. Received: NaN or infinity{_where(trace, encoding)}. "
            "Give a sound copy of the model."
        )
    if answer.task == "causal":
        question = next_question(answer, found, encoding, values, target)
    else:
        question = class_question(answer, found.labels, values, target, len(encoding))
    at, n = question.target.position, len(encoding)
    readout = np.eye(n)[at] if at is not None else _readout(model, encoding, question, states)
    protected = encoding.special.copy()
    protected[question.length :] = True  # a causal model does not see what comes after the target
    return KerasSubject(model, found, encoding, answer, question, trace, readout, protected)


def _where(trace: Trace, encoding: KerasEncoding) -> str:
    for op in trace.ops:
        row = op.first_bad_row()
        if row is not None:
            return f", first seen in layer {op.layer} ({op.name}), token {row} ({encoding.pieces[row]!r})"
    return ""


class LastStates:
    """Remembers the layer that gave the last vectors per token, (1, n, d), and in which of its calls."""

    def __init__(self, length: int) -> None:
        self.layer: Any = None
        self.call = 0
        self._length = length
        self._calls: dict[int, int] = {}

    def enter(self, layer: Any, call: Call) -> bool:
        return True

    def leave(self, layer: Any, output: Any) -> None:
        shape = tuple(getattr(output, "shape", ()))
        self._calls[id(layer)] = self._calls.get(id(layer), 0) + 1
        if len(shape) == 3 and shape[1] == self._length and shape[2] > 1:
            self.layer, self.call = layer, self._calls[id(layer)]

    def ignored(self, call: Call, output: Any) -> None:
        """Softmax and products are not of interest."""

    softmax = product = fused = torch_fused = ignored


def _readout(model: Any, encoding: KerasEncoding, question: Question, states: LastStates) -> Floats:
    """How the target reads the last states: norms of d target / d h_i, (n,), divided by their sum.

    Their gradient is exact on each backend and one backward pass through the head alone; probing by differences would
    take a pass for each token and direction, and a step size.
    """
    if states.layer is None:
        raise CaptureError(
            f"Expected a layer of {model.name} that gives a vector per token. Received: none. Trace the model with "
            "attrace.trace and name the row to start from: trace.rollout(target=...)."
        )
    with _states_of(states) as change:
        model(encoding.inputs)
        hidden = change.pop()

        def logit(h: Any) -> Any:
            change.append(h)
            try:
                output = model(encoding.inputs)[0]
            finally:
                change.clear()
            value = output[question.target.index] if output.shape[0] > 1 else output[0]
            return value if question.rival is None else value - output[question.rival]

        gradient = _gradient(logit, hidden)
    norms = np.linalg.norm(gradient[0], axis=-1)
    if not np.isfinite(norms).all() or norms.sum() == 0:
        raise CaptureError(
            f"Expected the target {question.target.label!r} to depend on the last states of {model.name} "
            f"({states.layer.name}). Received: a gradient of zero or NaN at every position."
        )
    readout: Floats = norms / norms.sum()
    return readout


@contextmanager
def _states_of(states: LastStates) -> Iterator[list[Any]]:
    """A list that the last states are put into, or taken from where it holds some; on this thread alone."""
    layer, thread, change = states.layer, threading.get_ident(), list[Any]()
    original, calls = layer.call, 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        output = original(*args, **kwargs)
        if threading.get_ident() != thread:
            return output
        calls += 1
        if calls < states.call:
            return output
        calls = 0
        if change:
            return change[0]
        change.append(output)
        return output

    object.__setattr__(layer, "call", call)
    try:
        yield change
    finally:
        object.__delattr__(layer, "call")


def _gradient(function: Any, x: Any) -> Floats:
    backend = keras.backend.backend()
    if backend == "tensorflow":
        tape = sys.modules["tensorflow"].GradientTape()
        with tape:
            tape.watch(x)
            value = function(x)
        return to_numpy(tape.gradient(value, x)).astype(np.float64)
    if backend == "jax":
        return to_numpy(sys.modules["jax"].grad(function)(x)).astype(np.float64)
    torch = sys.modules["torch"]
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf)
    return to_numpy(gradient).astype(np.float64)
