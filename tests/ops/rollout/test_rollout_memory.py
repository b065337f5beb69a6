"""How much is alive at once: one layer's map, whatever the number of layers."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import attrace
from attrace.ops.rollout import row_mass

from_one_source = np.random.default_rng(0).dirichlet(np.ones(6), (12, 1, 2, 6))


class Watched:
    """Makes maps on demand and counts how many earlier ones are alive whenever the next is asked for.

    No garbage collection in between: each must go by its reference count, at once.
    """

    def __init__(self, made: Any) -> None:
        self.made = made
        self.references: list[Any] = []
        self.alive: list[int] = []

    def make(self, layer: int) -> Any:
        self.alive.append(sum(reference() is not None for reference in self.references))
        array = self.made.array(from_one_source[layer])
        self.references.append(weakref.ref(array))
        return array

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(12))


class Lazy(Watched):
    """The same as a sequence, which a target needs."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, layer: int) -> Any:
        return self.make(layer)


@pytest.mark.parametrize("options", [{}, {"source": 1}, {"source": [0, 2]}, {"heads": 0}, {"discard": 0.5}])
def test_each_map_is_let_go_before_the_next_is_made(made: Any, options: dict[str, Any]) -> None:
    watched = Watched(made)
    result = attrace.rollout(iter(watched), **options)
    assert watched.alive == [0] * 12
    want = attrace.rollout(from_one_source, **options)
    np.testing.assert_allclose(made.numpy(result), want, atol=1e-12)


def test_row_mass_keeps_no_map(made: Any) -> None:
    watched = Watched(made)
    row_mass(iter(watched))
    assert watched.alive == [0] * 12


def test_with_one_layer_chosen_only_that_map_is_used(made: Any) -> None:
    watched = Watched(made)
    result = attrace.rollout(iter(watched), layers=[11])
    assert watched.alive == [0] * 12
    np.testing.assert_allclose(made.numpy(result), attrace.rollout(from_one_source[11:]), atol=1e-12)
    early = Watched(made)
    attrace.rollout(iter(early), layers=[2])
    assert len(early.references) == 3  # nothing after the last chosen layer is asked for


def test_a_lazy_sequence_is_read_from_the_top(made: Any) -> None:
    lazy = Lazy(made)
    row = attrace.rollout(lazy, target=3)
    assert lazy.alive == [0] * 12
    np.testing.assert_allclose(made.numpy(row), attrace.rollout(from_one_source, target=3), atol=1e-12)
    chosen = Lazy(made)
    attrace.rollout(chosen, target=3, layers=[11])
    assert len(chosen.references) == 1


def peak(maps: Any, **options: Any) -> float:
    """The most memory a call took, in float32 maps of n x n."""
    n = 768
    tracemalloc.start()
    try:
        attrace.rollout(maps, **options)
        return tracemalloc.get_traced_memory()[1] / (4 * n * n)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("options", [{}, {"target": 5}, {"source": 5}])
def test_the_peak_does_not_grow_with_layers_or_heads(options: dict[str, Any]) -> None:
    layer = np.full((1, 8, 768, 768), 1 / 768, dtype=np.float32)
    attrace.rollout([layer], **options)
    few, many = peak([layer] * 2, **options), peak([layer] * 8, **options)
    assert many == pytest.approx(few, rel=0.1)
    # A row or column: the fused map alone.  The whole map: that, the state, its product and one temporary.
    assert many < (1.2 if options else 5.2)
