"""The seam at transformers' attention registry, for backends that show nothing below autograd.

A flash kernel, compiled flex attention or a user's own registered function is called by name through
`ALL_ATTENTION_FUNCTIONS`.  While a model is recorded, the function in use is wrapped there: it runs unchanged, and
its arguments say what it attended to.  Where the function is sdpa or eager nothing is wrapped: the recorder sees
what runs.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attrace.capture.modes import aside
from attrace.errors import CaptureError

PLAIN = ("sdpa", "eager", "paged|eager")
"""Implementations that the recorder sees by itself."""


class Observer(Protocol):
    """Who wants to know of calls, and whose they are."""

    def owns(self, module: Any) -> bool:
        """Whether the call is one of the recorded model, in the recording thread."""
        ...

    def mark(self) -> tuple[int, int]:
        """How much was recorded so far."""
        ...

    def called(self, call: RegisteredCall, output: Any, mark: tuple[int, int]) -> None:
        """A function has run; `mark` is from before it."""
        ...


@dataclass(frozen=True, eq=False)
class RegisteredCall:
    """The arguments of one registered attention function, by their names in transformers."""

    name: str
    """Name of the implementation, for messages."""
    module: nn.Module
    query: Tensor
    """(B, H, Q, D)"""
    key: Tensor
    """(B, K, T, D)"""
    value: Tensor
    """(B, K, T, Dv)"""
    attention_mask: Any = None
    dropout: float = 0.0
    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    is_causal: bool | None = None
    s_aux: Tensor | None = None
    position_bias: Tensor | None = None
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def causal(self) -> bool:
        asked = self.is_causal if self.is_causal is not None else getattr(self.module, "is_causal", True)
        return bool(asked)


USUAL = ("query", "key", "value", "attention_mask")
"""Arguments after the module that every function takes in this order."""


def call_of(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> RegisteredCall:
    """A function's arguments by their names."""
    order = ["module", *USUAL]
    if len(args) > len(order):
        order = list(inspect.signature(function).parameters)
    given = {**dict(zip(order, args, strict=False)), **kwargs}
    known = {key.name for key in fields(RegisteredCall)} - {"name", "others"}
    others = {key: given.pop(key) for key in set(given) - known}
    return RegisteredCall(name=name, others=others, **given)


class Watched:
    """A registered function with those who watch it; called in place of the function."""

    def __init__(self, name: str, real: Callable[..., Any]) -> None:
        self.name, self.real = name, real
        self.observers: list[Observer] = []
        self.__wrapped__ = real

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.real(module, *args, **kwargs)
        watching = [observer for observer in tuple(self.observers) if observer.owns(module)]
        if not watching:
            return self.real(module, *args, **kwargs)
        marks = [observer.mark() for observer in watching]
        if is_sealed(self.real):
            # Compiled parts run another way below a dispatch mode: the recorder steps aside for them.
            with recorders_aside():
                output = self.real(module, *args, **kwargs)
        else:
            output = self.real(module, *args, **kwargs)
        call = call_of(self.name, self.real, (module, *args), kwargs)
        with recorders_aside():
            for observer, mark in zip(watching, marks, strict=True):
                observer.called(call, output, mark)
        return output


def is_sealed(function: Callable[..., Any]) -> bool:
    """Whether the function is one of transformers' own: nothing in it is seen from below."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__module__", "")).partition(".")[0] == "transformers"


def recorders_aside() -> AbstractContextManager[None]:
    """Run without attrace's dispatch modes in this thread."""
    from attrace.capture.torch_recorder import Recorder

    return aside(Recorder)


_LOCK = threading.Lock()
Place = tuple[int, str]
_WATCHED: dict[Place, tuple[MutableMapping[str, Any], Watched]] = {}
"""What is wrapped now, by mapping and name: shared by all recordings of the process."""


@contextmanager
def watching(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Wrap the attention functions that the model uses, where they are neither sdpa nor eager.

    The registry belongs to the process: other threads and models call through the wrapper as if it were not there.
    The last recording to end puts the function back.
    """
    watched: list[Place] = []
    try:
        for mapping, name in in_use(model):
            watched.append(_watch(mapping, name, observer))
        yield
    finally:
        for place in watched:
            _unwatch(place, observer)


def _watch(mapping: MutableMapping[str, Any], name: str, observer: Observer) -> Place:
    place = (id(mapping), name)
    with _LOCK:
        if place not in _WATCHED:
            wrapper = Watched(name, mapping[name])
            _WATCHED[place] = (mapping, wrapper)
            mapping[name] = wrapper
        _WATCHED[place][1].observers.append(observer)
    return place


def _unwatch(place: Place, observer: Observer) -> None:
    with _LOCK:
        mapping, wrapper = _WATCHED[place]
        wrapper.observers.remove(observer)
        if not wrapper.observers:
            del _WATCHED[place]
            if mapping.get(place[1]) is wrapper:  # not where another function was registered meanwhile
                mapping[place[1]] = wrapper.real


def in_use(model: nn.Module) -> list[tuple[MutableMapping[str, Any], str]]:
    """Mapping and name of each registered function that the model's configurations name, sdpa and eager left out."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    shared = library.AttentionInterface._global_mapping
    found: dict[Place, tuple[MutableMapping[str, Any], str]] = {}
    for module in model.modules():
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if not isinstance(name, str) or name in PLAIN:
            continue
        local = getattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS", None)
        own = getattr(local, "_local_mapping", {})
        mapping = own if name in own else shared
        for key in (name, name.removeprefix("paged|")):
            if key in mapping:
                found[id(mapping), key] = (mapping, key)
                break
    return list(found.values())


def refuse_flex(kind: type[TorchDispatchMode]) -> None:
    """Tell torch what a direct call of its flex attention does below a recorder: it says why it cannot be recorded."""
    library = sys.modules.get("torch._higher_order_ops.flex_attention")
    if library is None or kind in library.flex_attention.python_key_table:
        return

    def refuse(recorder: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise CaptureError(
            f"Expected attention that runs below a dispatch mode. Received: a direct call of torch's flex_attention in "
            f"{recorder.model}, which torch compiles. Call it through transformers' AttentionInterface, or use "
            "scaled_dot_product_attention."
        )

    library.flex_attention.py_impl(kind)(torch.compiler.disable(refuse))
