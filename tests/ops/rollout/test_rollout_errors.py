"""What `rollout` refuses, with which error and which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attrace
from attrace.errors import InputError, NonFiniteError, ShapeError
from attrace.ops.rollout import row_mass

GOOD = np.full((2, 3, 4, 4), 0.25)


def refuse(kind: type[Exception], words: str, maps: Any, **options: Any) -> None:
    with pytest.raises(kind, match=words) as caught:
        attrace.rollout(maps, **options)
    assert type(caught.value) is kind
    message = str(caught.value)
    # What was expected, what came, what to do.
    assert message.startswith("Expected ")
    assert " Received: " in message
    assert message.endswith(".")
    assert message.count(". ") >= 2


@pytest.mark.parametrize(
    ("kind", "words", "maps"),
    [
        (InputError, "at least one map", []),
        (InputError, "at least one map", iter([])),
        (InputError, "a sequence of maps", 3),
        (InputError, "a sequence of maps", "maps"),
        (InputError, "a sequence of maps", {"layer": GOOD}),
        (InputError, "layer 1.*NoneType.*eager", [GOOD, None]),
        (InputError, "layer 0.*list", [[[[[1.0]]]]]),
        (ShapeError, r"one array of shape \(2, 3, 4, 4\)", GOOD),
        (ShapeError, r"layer 1.*\(3, 4, 4\).*maps\[None\]", [GOOD, GOOD[0]]),
        (ShapeError, r"layer 0.*\(4, 4\)", [GOOD[0, 0]]),
        (ShapeError, r"layer 1.*\(2, 3, 2, 4\): 2 rows, 4 columns.*not filled in", [GOOD, GOOD[:, :, :2]]),
        (ShapeError, "n = 4.*layer 0.*n = 2 in layer 1", [GOOD, GOOD[:, :, :2, :2]]),
        (ShapeError, "B = 2.*B = 1.*layer 1", [GOOD, GOOD[:1]]),
        (ShapeError, "no empty axis", [GOOD[:0]]),
        (ShapeError, "no empty axis", [GOOD[:, :0]]),
        (InputError, "Received: int64", [np.ones((1, 1, 2, 2), dtype=np.int64)]),
        (InputError, "Received: bool", [np.ones((1, 1, 2, 2), dtype=bool)]),
        (InputError, "Received: complex128", [np.ones((1, 1, 2, 2), dtype=complex)]),
        (InputError, "numpy float64.*layer 0.*float32 in layer 1", [GOOD, GOOD.astype("float32")]),
    ],
)
def test_maps(kind: type[Exception], words: str, maps: Any) -> None:
    refuse(kind, words, maps)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("-0.1", {"residual": -0.1}),
        ("1.5", {"residual": 1.5}),
        ("nan", {"residual": float("nan")}),
        ("True", {"residual": True}),
        ("'half'", {"residual": "half"}),
        ("from 0 to below 1. Received: 1.0", {"discard": 1.0}),
        ("-0.5", {"discard": -0.5}),
        ("nan", {"discard": float("nan")}),
        ("normalize to be True or False", {"normalize": "no"}),
        ("an empty list, which never means all", {"layers": []}),
        ("from 0 to 1 .*Received: 2.*there are 2 layers", {"layers": [2]}),
        ("Received: -3", {"layers": [-3]}),
        ("each layer once", {"layers": [0, 0]}),
        ("each layer once", {"layers": [1, -1]}),
        ("sequence of integers. Received: 1", {"layers": 1}),
        ("by integers. Received: 0.5", {"layers": [0.5]}),
        ("by integers. Received: True", {"layers": [True]}),
        ("target from 0 to 3.*Received: 4.*n = 4", {"target": 4}),
        ("target from 0 to 3.*Received: -5.*n = 4", {"target": -5}),
        ("source from 0 to 3.*Received: 9.*n = 4", {"source": [0, 9]}),
        ("at least one position", {"target": []}),
        ("target to be a token position", {"target": 1.0}),
        ("by integers. Received: 1.0", {"source": [1.0]}),
        ("by integers. Received: True", {"target": True}),
        ("target to be a token position", {"target": "cls"}),
        ("a target or a source", {"target": 0, "source": 0}),
        ("Received: 'sum'", {"heads": "sum"}),
        ("a head from 0 to 2.*Received: 3", {"heads": 3}),
        ("Received: -4", {"heads": -4}),
        ("Received: True", {"heads": True}),
        ("Received: None", {"heads": None}),
        ("Received: 1.0", {"heads": 1.0}),
        ("one weight per head, 3 in all. Received: 2", {"heads": [0.5, 0.5]}),
        ("one weight per head", {"heads": []}),
        ("Received: nan for head 1", {"heads": [1.0, float("nan"), 1.0]}),
        ("Received: inf for head 2", {"heads": [1.0, 1.0, float("inf")]}),
        ("Received: -1 for head 0", {"heads": [-1, 1, 1]}),
        ("the sum 0", {"heads": [0, 0, 0]}),
        ("the sum inf", {"heads": [1e308, 1e308, 1e308]}),
        ("bool for head 0", {"heads": [True, 1, 1]}),
        ("in order", {"heads": {1.0, 2.0, 3.0}}),
    ],
)
def test_options(words: str, options: dict[str, Any]) -> None:
    refuse(InputError, words, [GOOD, GOOD], **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_numbers_that_are_none(made: Any, value: float, dtype: str) -> None:
    if made.name == "numpy" and dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="NumPy has bfloat16 only through ml_dtypes").bfloat16
    bad = GOOD.copy()
    bad[1, 2, 3, 0] = value
    maps = [made.array(GOOD, dtype), made.array(bad, dtype)]
    for options in ({}, {"heads": "min"}, {"heads": 2}, {"target": 0}, {"source": 0}):
        refuse(NonFiniteError, f"{value} in layer 1, batch 1, head 2, row 3, column 0", maps, **options)
    with pytest.raises(NonFiniteError, match="layer 1, batch 1, head 2, row 3"):
        row_mass(maps)


def test_negative_entries(made: Any) -> None:
    bad = GOOD.copy()
    bad[0, 1, 2, 3] = -0.125
    refuse(InputError, "-0.125 in layer 0, batch 0, head 1, row 2, column 3", [made.array(bad), made.array(GOOD)])


def test_only_chosen_layers_are_read(made: Any) -> None:
    bad = made.array(np.full((2, 3, 4, 4), np.nan))
    result = attrace.rollout([bad, made.array(GOOD)], layers=[1])
    np.testing.assert_allclose(made.numpy(result).sum(-1), 1.0)


def test_mixed_frameworks() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; CI has it")
    refuse(InputError, "numpy float64.*layer 0.*torch float64 in layer 1", [GOOD, torch.tensor(GOOD)])


def test_weights_that_would_lose_their_gradient(made: Any) -> None:
    if made.name == "numpy":
        return
    maps = [made.array(GOOD)]
    refuse(InputError, "plain numbers.*tolist", maps, heads=made.array([1.0, 2.0, 3.0]))


def test_a_target_needs_a_sequence() -> None:
    refuse(InputError, "generator.*list", (layer for layer in [GOOD]), target=0)


def test_an_iterator_is_counted_from_the_start() -> None:
    refuse(InputError, "there are 2 maps. Received: 5", iter([GOOD, GOOD]), layers=[0, 5])
    refuse(InputError, "count from the end", iter([GOOD, GOOD]), layers=[-1])
