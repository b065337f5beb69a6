"""The four frameworks behind one fixture, so that each test runs in all of them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

NAMES = ("numpy", "torch", "jax", "tensorflow")


@dataclass(frozen=True)
class Made:
    """How arrays of one framework are made and read."""

    name: str
    array: Callable[..., Any]
    numpy: Callable[[Any], Any]
    kind: type


def load(name: str) -> Any:
    """The framework; missing, the test fails in CI and is skipped with its reason elsewhere."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name or os.environ.get("CI"):
            raise
        pytest.skip(f"{name} is not installed (pip install {name}); CI runs this test with all four frameworks")


@pytest.fixture(params=NAMES)
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    module = load(request.param)
    if request.param == "torch":
        yield Made(
            "torch",
            lambda x, dtype="float64": module.tensor(np.asarray(x).tolist(), dtype=getattr(module, dtype)),
            lambda x: x.detach().double().numpy(),
            module.Tensor,
        )
    elif request.param == "jax":
        before = module.config.jax_enable_x64
        module.config.update("jax_enable_x64", True)
        yield Made(
            "jax",
            lambda x, dtype="float64": module.numpy.asarray(x).astype(dtype),
            lambda x: np.asarray(x, dtype=np.float64),
            module.Array,
        )
        module.config.update("jax_enable_x64", before)
    elif request.param == "tensorflow":
        yield Made(
            "tensorflow",
            lambda x, dtype="float64": module.cast(module.convert_to_tensor(np.asarray(x)), dtype),
            lambda x: module.cast(x, "float64").numpy(),
            module.Tensor,
        )
    else:
        yield Made("numpy", lambda x, dtype="float64": np.asarray(x).astype(dtype), np.asarray, np.ndarray)


def random_maps(seed: int, layers: int = 3, batch: int = 2, heads: int = 4, n: int = 5) -> Any:
    """Maps with rows that sum to one, (L, B, H, n, n), NumPy float64."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(n, 0.5), (layers, batch, heads, n))


@pytest.fixture
def maps() -> Any:
    return random_maps(7)
