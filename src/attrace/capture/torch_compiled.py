"""Models that torch.compile has compiled, in whole or in part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

Enter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
Leave = Callable[[nn.Module, Any, Any], None]


def has_compiled_parts(modules: Iterable[nn.Module]) -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        return False
    whole = compiler.OptimizedModule
    return any(m._compiled_call_impl is not None or isinstance(m, whole) for m in modules)


class Ends:
    """Watches the ends of a model that was compiled in place, `model.compile()`: hooks would be compiled with it.

    Stands in the place of the compiled call until it is removed.  Where several threads watch one model, whoever is
    removed while another stands on top becomes transparent, and goes with that one.
    """

    def __init__(self, model: nn.Module, enter: Enter, leave: Leave) -> None:
        self._model, self._enter, self._leave = model, enter, leave
        self.inner: Any = model._compiled_call_impl
        self.removed = False
        model._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.removed:
            return self.inner(*args, **kwargs)
        self._enter(self._model, args, kwargs)
        output = None
        try:
            output = self.inner(*args, **kwargs)
        finally:
            self._leave(self._model, args, output)
        return output

    def remove(self) -> None:
        self.removed = True
        call = self._model._compiled_call_impl
        while isinstance(call, Ends) and call.removed:
            call = call.inner
        self._model._compiled_call_impl = call
