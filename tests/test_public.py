"""The public list is one table, tied to the namespace; importing it loads nothing heavy."""

from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import attrace
from attrace.errors import MissingDependencyError

SOURCE = Path(attrace.__file__).parent
DOCUMENTED = sorted(
    ".".join(("attrace", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def test_the_list_and_the_namespace_are_the_same() -> None:
    assert list(attrace.__all__) == sorted(set(attrace.__all__))
    assert set(attrace.__all__) == set(attrace._NAMES) | set(attrace._MODULES)
    assert set(attrace.__all__) <= set(dir(attrace))
    for name in attrace.__all__:
        assert getattr(attrace, name) is not None
    for name, module in attrace._NAMES.items():
        assert getattr(attrace, name) is getattr(importlib.import_module(module), name)
    for name in attrace._MODULES:
        assert isinstance(getattr(attrace, name), ModuleType)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(attrace.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == attrace._NAMES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rollup'"):
        attrace.rollup  # noqa: B018


def test_importing_is_light() -> None:
    code = """
import sys, attrace
heavy = {"numpy", "torch", "tensorflow", "jax", "transformers", "keras", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_the_extra_is_named() -> None:
    code = """
import sys
sys.modules["torch"] = None
import attrace
try:
    attrace.torch
except attrace.errors.MissingDependencyError as error:
    assert "pip install 'attrace[torch]'" in str(error), error
    assert isinstance(error, ImportError)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_in_docstrings(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert found.failed == 0


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public names that need PyTorch say which extra brings it."""
    for name in [m for m in sys.modules if m.startswith("attrace.capture")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("trace", "record"):
        monkeypatch.delitem(vars(attrace), name, raising=False)
        with pytest.raises(MissingDependencyError, match=r"PyTorch for a model of type object.*'attrace\[torch\]'"):
            getattr(attrace, name)(object()).__enter__()  # trace does not come that far


def test_a_trace_is_framework_neutral() -> None:
    code = """
import sys
from attrace import Trace
found = {"torch", "tensorflow", "jax", "keras", "transformers"} & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True)
