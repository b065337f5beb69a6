"""The thread's stack of dispatch modes: a recorder enters it, steps aside, and leaves it in any order.

A mode's own exit takes the topmost mode away, whose ever it is, and puts back what torch noted for the whole process
when the mode came: two threads that leave in the order in which they entered would leave the note that a mode is on,
and torch would compile nothing any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import _python_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

_LOCK = threading.Lock()
_ENTERED = 0
_BEFORE: dict[str, bool] = {}
"""What torch had noted before the first of the modes that are entered now."""
NOTES = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def enter(mode: TorchDispatchMode) -> None:
    global _ENTERED  # noqa: PLW0603
    with _LOCK:
        if not _ENTERED:
            _BEFORE.update({name: getattr(_python_dispatch, name) for name in NOTES if hasattr(_python_dispatch, name)})
        _ENTERED += 1
        mode.__enter__()


def leave(mode: TorchDispatchMode) -> None:
    """Take a mode away, wherever among the thread's modes it is by now."""
    global _ENTERED  # noqa: PLW0603
    with _LOCK:
        _take(mode)
        _ENTERED -= 1
        if not _ENTERED:
            for name, value in _BEFORE.items():
                setattr(_python_dispatch, name, value)
            if tell := getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None):
                tell(_BEFORE[NOTES[-1]])


def _take(mode: TorchDispatchMode) -> None:
    stack = modes()
    if mode not in stack:  # closed from another thread
        return
    above = stack[stack.index(mode) + 1 :]
    if not above:
        mode.__exit__(None, None, None)
        return
    for name, ours in vars(mode).items():  # what torch noted passes on to the next above
        theirs = getattr(above[0], name, None)
        if isinstance(ours, deque) and ours and theirs:
            theirs[-1] = ours.pop()
    restack([other for other in stack if other is not mode])


def modes() -> list[TorchDispatchMode]:
    """The thread's dispatch modes, torch's own machinery left out."""
    return [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None) is None]


def restack(stack: list[TorchDispatchMode]) -> None:
    """Put these in place of the thread's dispatch modes."""
    for _ in modes():
        _pop_mode()
    for mode in stack:
        _push_mode(mode)


@contextmanager
def aside(kind: type[TorchDispatchMode]) -> Iterator[None]:
    """Run without the modes of this kind in this thread; others stay, in their order."""
    left = []
    while (stack := modes()) and isinstance(stack[-1], kind):
        mode: Any = stack[-1]
        mode.__exit__(None, None, None)
        left.append(mode)
    # Below modes of others the compiler stands still in any case: the stack alone is changed.
    below = any(isinstance(mode, kind) for mode in stack)
    if below:
        restack([mode for mode in stack if not isinstance(mode, kind)])
    try:
        yield
    finally:
        if below:
            restack(stack)
        for mode in reversed(left):
            mode.__enter__()
