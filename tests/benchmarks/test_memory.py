"""The memory of a trace, as benchmarks/memory.py measures it: the model's own and its queries and keys."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux sets the mark of memory back")
FILE = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.fixture(scope="module")
def memory() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_memory", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedded classifier", "decoder, packed projection"])
def test_a_trace_takes_its_queries_and_keys_and_no_more(name: str, memory: ModuleType) -> None:
    plain = memory.in_a_process(name, traced=False)
    traced = memory.in_a_process(name, traced=True)
    assert traced["held"] == traced["queries_and_keys"]
    assert traced["maps"] == 0
    more = traced["peak"] - plain["peak"]
    assert more <= max(1.1 * traced["held"], traced["held"] + (2 << 20))
    assert more >= 0.5 * traced["held"]  # the measure sees what is held
