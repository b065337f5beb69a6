"""Record any model, by the seam that its framework has."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from attrace.capture.trace import Trace
from attrace.errors import AttraceWarning, MissingDependencyError


def is_keras(model: Any) -> bool:
    """Whether it is a Keras model or layer, found out without importing anything."""
    layer = getattr(sys.modules.get("keras"), "Layer", None)
    return layer is not None and isinstance(model, layer)


def _recording(model: Any, values: bool) -> AbstractContextManager[Trace]:
    if is_keras(model):
        from attrace.capture.keras_recorder import recording as keras_recording

        return keras_recording(model)
    try:
        from attrace.capture.torch_recorder import recording as torch_recording
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependencyError(
            f"Expected PyTorch for a model of type {type(model).__name__}. Received: {error}. Install it with: "
            "pip install 'attrace[torch]'."
        ) from None
    return torch_recording(model, values=values)


@contextmanager
def record(model: Any, *, values: bool = False) -> Iterator[Trace]:
    """Record the attention of every call of `model` inside the block: a PyTorch module, or a Keras model or layer.

    The model runs unchanged, under its own attention backend; its output is bit-identical and nothing is left on
    it afterwards, also after an error.  Query and key of each call are held until the trace goes (the map itself
    where the model computes one); `values=True` holds what contributions need besides, for PyTorch models: the values,
    and where the family is known the block's input.  Only the thread that opened the block is recorded.  An unfit
    model is a CaptureError; an AttraceWarning at the end of the block says where layers made no attention call, where
    some attention cannot be read, and where dropout was on (`trace.notes`).

    >>> import torch, attrace
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(1, 4, 8)
    >>> with attrace.record(layer) as trace:
    ...     _ = layer(x, x, x, need_weights=False)
    >>> trace.ops[0].weights().shape
    torch.Size([1, 2, 4, 4])
    """
    with _recording(model, values) as recorded:
        yield recorded
    _warn(recorded, 4)


def trace(model: Any, /, *args: Any, **inputs: Any) -> Trace:
    """Run the model once, unchanged, and return its trace: `record` around one call.

    Raises CaptureError where no attention was seen, with what was seen instead; warns as `record` does.

    >>> import torch, attrace
    >>> encoder = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(1, 4, 8)
    >>> attrace.trace(encoder, x, x, x, need_weights=False).ops[0].shape
    (1, 2, 4, 4)
    """
    with _recording(model, False) as recorded:
        output = model(*args, **inputs)
    recorded.output = output  # also what a hook of the caller made of it
    recorded.check()
    _warn(recorded, 3)
    return recorded


def _warn(recorded: Trace, level: int) -> None:
    for note in recorded.notes if recorded.ops else ():  # without any, the trace itself is an error
        warnings.warn(f"{recorded.model}: {note}", AttraceWarning, stacklevel=level)
