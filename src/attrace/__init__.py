"""See which inputs a Transformer's output drew on, and how far the picture can be trusted."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attrace.api import Explanation as Explanation
    from attrace.api import explain as explain
    from attrace.api import load as load
    from attrace.capture.seams import record as record
    from attrace.capture.seams import trace as trace
    from attrace.capture.trace import Trace as Trace
    from attrace.ops.rollout import rollout as rollout

# Public name -> the module it is taken from when first used: `import attrace` loads no framework.
_NAMES = {
    "Explanation": "attrace.api",
    "Trace": "attrace.capture.trace",
    "explain": "attrace.api",
    "load": "attrace.api",
    "record": "attrace.capture.seams",
    "trace": "attrace.capture.seams",
    "rollout": "attrace.ops.rollout",
}
# Public modules that need a framework.
_MODULES = ("torch",)

__all__ = ["Explanation", "Trace", "explain", "load", "record", "rollout", "torch", "trace"]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(_module(name), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"attrace.{name}")
    raise AttributeError(f"module 'attrace' has no attribute {name!r}")


def _module(name: str) -> Any:
    try:
        return import_module(_NAMES[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from attrace.errors import MissingDependencyError

        raise MissingDependencyError(
            f"Expected PyTorch for attrace.{name}. Received: {error}. Install it with: pip install 'attrace[torch]'"
        ) from None


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__name__", "__file__", "__path__"])
