"""Record any model, by the seam that its framework has."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from attrace.capture.trace import Trace
from attrace.errors import MissingDependencyError


def is_keras(model: Any) -> bool:
    """Whether it is a Keras model or layer, found out without importing anything."""
    layer = getattr(sys.modules.get("keras"), "Layer", None)
    return layer is not None and isinstance(model, layer)


def record(model: Any, *, values: bool = False) -> AbstractContextManager[Trace]:
    """Record the attention of every call of `model` inside the block: a PyTorch module, or a Keras model or layer.

    The model runs unchanged, under its own attention backend; its output is bit-identical and nothing is left on
    it afterwards, also after an error.  Query and key of each call are held until the trace goes (the map itself
    where the model computes one); `values=True` holds what contributions need besides, for PyTorch models: the values,
    and where the family is known the block's input.  Only the thread that opened the block is recorded.  An unfit
    model is a CaptureError.

    >>> import torch, attrace
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(1, 4, 8)
    >>> with attrace.record(layer) as trace:
    ...     _ = layer(x, x, x, need_weights=False)
    >>> trace.ops[0].weights().shape
    torch.Size([1, 2, 4, 4])
    """
    if is_keras(model):
        from attrace.capture.keras_recorder import record as keras_record

        return keras_record(model, values=values)
    try:
        from attrace.capture.torch_recorder import record as torch_record
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependencyError(
            f"Expected PyTorch for a model of type {type(model).__name__}. Received: {error}. Install it with: "
            "pip install 'attrace[torch]'"
        ) from None
    return torch_record(model, values=values)


def trace(model: Any, /, *args: Any, **inputs: Any) -> Trace:
    """Run the model once, unchanged, and return its trace: `record` around one call.

    Raises CaptureError where no attention was seen, with what was seen instead.

    >>> import torch, attrace
    >>> encoder = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(1, 4, 8)
    >>> attrace.trace(encoder, x, x, x, need_weights=False).ops[0].shape
    (1, 2, 4, 4)
    """
    with record(model) as recorded:
        output = model(*args, **inputs)
    recorded.output = output  # also what a hook of the caller made of it
    recorded.check()
    return recorded
