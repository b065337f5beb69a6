"""What a trace could leave behind, and which operators a call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_globals
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode


def leftovers(model: nn.Module) -> list[object]:
    """Hooks of the process and of the model, modes of this thread, functions and settings put on the model."""
    config = getattr(model, "config", None)
    return [
        len(module_globals._global_forward_hooks),
        len(module_globals._global_forward_pre_hooks),
        len(module_globals._global_forward_hooks_always_called),
        len(module_globals._global_forward_hooks_with_kwargs),
        bool(module_globals._has_any_global_hook()),
        len(_get_current_dispatch_mode_stack()),
        len(_get_current_function_mode_stack()),
        is_in_torch_dispatch_mode(),  # for the whole process: torch compiles nothing then
        [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        [m.training for m in model.modules()],
        [sorted(vars(m)) for m in model.modules()],
        [id(vars(m).get("forward")) for m in model.modules()],
        [(name, p.device, p.dtype) for name, p in model.named_parameters()],
        getattr(config, "_attn_implementation", None),
        getattr(config, "output_attentions", None),
        torch.is_grad_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    ]


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Failing(TorchDispatchMode):
    """Raises a KeyError in the place of one operator, by its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == -1:
            raise KeyError("in the model")
        return func(*args, **(kwargs or {}))


def operators(call: Callable[[], object]) -> list[str]:
    """Names of the operators that a call runs, in order."""
    with _Seen() as seen:
        call()
    return seen.names
