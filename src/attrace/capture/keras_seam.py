"""Where Keras' backends compute attention: functions that are wrapped while somebody listens, and put back after.

TensorFlow and JAX have no dispatch mode, and Keras' layers share no method in which attention happens.  What all of
them share are a few functions: the backend's softmax and fused attention, and the products that meet the softmax.
Each is wrapped once for the whole process and only passes on where the calling thread has no listener, so that other
threads and other models run as before.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Listener(Protocol):
    """Hears of each call on its own thread.  `args` and `kwargs` are the caller's."""

    def enter(self, layer: Any, call: Call) -> bool:
        """A layer is called; whether `leave` is wanted."""
        ...

    def leave(self, layer: Any, output: Any) -> None:
        """It has returned, or failed with output None."""
        ...

    def softmax(self, call: Call, output: Any) -> None: ...

    def product(self, call: Call, output: Any) -> None: ...

    def fused(self, call: Call, output: Any) -> None: ...

    def torch_fused(self, call: Call, output: Any) -> None: ...


# Below Keras: the frameworks' own functions, as users' layers call them.  (owner, name, role)
FRAMEWORKS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "tensorflow": (
        ("nn", "softmax", "softmax"),
        ("", "matmul", "product"),
        ("linalg", "matmul", "product"),
        ("", "einsum", "product"),
        ("linalg", "einsum", "product"),
        ("Tensor", "__matmul__", "product"),
    ),
    "jax": (
        ("nn", "softmax", "softmax"),
        ("nn", "dot_product_attention", "fused"),
        ("numpy", "matmul", "product"),
        ("numpy", "einsum", "product"),
        ("Array", "__matmul__", "product"),
    ),
    "torch": (
        ("", "softmax", "softmax"),
        ("nn.functional", "softmax", "softmax"),
        ("Tensor", "softmax", "softmax"),
        ("nn.functional", "scaled_dot_product_attention", "torch_fused"),
        ("", "matmul", "product"),
        ("", "bmm", "product"),
        ("", "einsum", "product"),
        ("Tensor", "__matmul__", "product"),
    ),
}
KERAS = (
    ("nn", "softmax", "softmax"),
    ("nn", "sparsemax", "softmax"),
    ("nn", "dot_product_attention", "fused"),
    ("numpy", "matmul", "product"),
    ("numpy", "einsum", "product"),
)

_ABSENT = object()


class _Thread(threading.local):
    listeners: tuple[Listener, ...] = ()
    inside = False
    """A wrapped function runs: what it calls is part of it."""


_thread = _Thread()


class _Wrapping:
    """The one set of wrapped functions, there as long as anybody listens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners = 0
        self._replaced: list[tuple[Any, str, Any]] = []
        """Owner, name, and what the owner itself had under it."""

    def join(self) -> None:
        with self._lock:
            if not self._listeners:
                self._wrap()
            self._listeners += 1

    def part(self) -> None:
        with self._lock:
            self._listeners -= 1
            if not self._listeners:
                self._unwrap()

    def _wrap(self) -> None:
        from keras.src import backend
        from keras.src.layers.layer import Layer

        framework = sys.modules[backend.backend()]
        places = [(backend, *place) for place in KERAS]
        places += [(framework, *place) for place in FRAMEWORKS.get(backend.backend(), ())]
        try:
            for root, path, name, role in places:
                owner = functools.reduce(getattr, path.split("."), root) if path else root
                if path == "Array":  # the class of JAX's arrays, not the abstract one
                    owner = type(framework.numpy.zeros(()))
                if hasattr(owner, name):
                    self._replace(owner, name, _told(getattr(owner, name), role))
            self._replace(Layer, "__call__", _entered(Layer.__call__))
        except BaseException:
            self._unwrap()
            raise

    def _replace(self, owner: Any, name: str, by: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, by)

    def _unwrap(self) -> None:
        while self._replaced:
            owner, name, was = self._replaced.pop()
            if was is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, was)


_wrapping = _Wrapping()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let the listener hear what this thread calls inside the block."""
    _wrapping.join()
    before = _thread.listeners
    _thread.listeners = (*before, listener)
    try:
        yield
    finally:
        _thread.listeners = before
        _wrapping.part()


def _told(function: Any, role: str) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _thread.listeners or _thread.inside:
            return function(*args, **kwargs)
        _thread.inside = True
        try:
            output = function(*args, **kwargs)
            for listener in _thread.listeners:
                getattr(listener, role)((args, kwargs), output)
        finally:
            _thread.inside = False
        return output

    return call


def _entered(function: Any) -> Any:
    @functools.wraps(function)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not _thread.listeners or _thread.inside:
            return function(layer, *args, **kwargs)
        entered = [listener for listener in _thread.listeners if listener.enter(layer, (args, kwargs))]
        output = None
        try:
            output = function(layer, *args, **kwargs)
        finally:
            for listener in entered:
                listener.leave(layer, output)
        return output

    return call
