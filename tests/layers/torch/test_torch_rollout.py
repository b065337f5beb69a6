"""The torch module: same results, differentiable, compilable, without state."""

from __future__ import annotations

import doctest
import importlib
import inspect
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (pip install attrace[torch]); CI has it")


import attrace  # noqa: E402
from attrace.errors import InputError, NonFiniteError  # noqa: E402
from attrace.ops.rollout import naive  # noqa: E402

OPTIONS: list[dict[str, Any]] = [
    {},
    {"heads": "max", "residual": 0.2},
    {"heads": "min", "normalize": False},
    {"heads": 1, "layers": [0, 2]},
    {"heads": [1, 2, 3, 4], "discard": 0.5},
]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch.compiler.reset()


def some(layers: int = 3, batch: int = 2, heads: int = 4, n: int = 5) -> Any:
    maps = np.random.default_rng(9).dirichlet(np.ones(n), (layers, batch, heads, n))
    return maps * 0.9 + 0.1 / n


def tensors(maps: Any, **options: Any) -> list[Any]:
    return [torch.tensor(layer, **options) for layer in maps]


@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_reference(options: dict[str, Any]) -> None:
    maps = some()
    module = attrace.torch.AttentionRollout(**options)
    for choice in ({}, {"target": -1}, {"target": [0, 3]}, {"source": 2}, {"source": [1]}):
        want = naive.rollout(maps, **options, **choice)
        for given in (tensors(maps), tuple(tensors(maps)), torch.tensor(maps)):
            np.testing.assert_allclose(module(given, **choice).numpy(), want, atol=1e-14)
    np.testing.assert_allclose(module(iter(tensors(maps))).numpy(), naive.rollout(maps, **options), atol=1e-14)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("choice", [{}, {"target": 1}, {"source": [0, 2]}])
def test_gradients(options: dict[str, Any], choice: dict[str, Any]) -> None:
    module = attrace.torch.AttentionRollout(**options)
    maps = tensors(some(batch=1, n=3), requires_grad=True)
    used = maps if "layers" not in options else [maps[i] for i in options["layers"]]

    def run(*layers: Any) -> Any:
        given = list(maps)
        for layer, new in zip(options.get("layers", range(3)), layers, strict=True):
            given[layer] = new
        return module(given, **choice)

    assert torch.autograd.gradcheck(run, tuple(used))
    assert torch.autograd.gradgradcheck(run, tuple(used))


def test_a_row_of_zeros_has_finite_gradients() -> None:
    maps = torch.zeros(2, 1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    for residual in (0.0, 0.5):
        (gradient,) = torch.autograd.grad(attrace.torch.AttentionRollout(residual=residual)(maps).sum(), maps)
        assert torch.isfinite(gradient).all()


def test_an_entropy_regulariser_trains() -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 2, 4, 5, 5, requires_grad=True)
    module = attrace.torch.AttentionRollout()
    optimizer = torch.optim.Adam([scores], lr=0.1)
    entropies = []
    for _ in range(20):
        rows = module(scores.softmax(-1))
        entropy = -(rows * rows.log()).sum(-1).mean()
        entropies.append(entropy.item())
        optimizer.zero_grad()
        entropy.backward()
        optimizer.step()
    assert entropies[-1] < 0.9 * entropies[0]


@pytest.mark.parametrize("options", OPTIONS)
def test_compiles_as_one_graph(options: dict[str, Any]) -> None:
    module = attrace.torch.AttentionRollout(**options)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    maps = tensors(some(), requires_grad=True)
    for choice in ({}, {"target": 1}, {"source": [0, 2]}):
        want, got = module(maps, **choice), compiled(maps, **choice)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got.square().sum(), maps[0]),
            torch.autograd.grad(want.square().sum(), maps[0]),
        )


def test_one_graph_serves_all_positions() -> None:
    module = attrace.torch.AttentionRollout()
    counter = importlib.import_module("torch._dynamo.testing").CompileCounter()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    maps = tensors(some(n=12))
    for position in range(-12, 12):
        torch.testing.assert_close(compiled(maps, target=position), module(maps, target=position))
    # 0, positive, negative and what torch treats apart by itself; never one for each position.
    assert counter.frame_count <= 4


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiles_with_the_default_backend() -> None:
    module = attrace.torch.AttentionRollout(discard=0.3)
    maps = tensors(some(), dtype=torch.float32)
    torch.testing.assert_close(torch.compile(module, fullgraph=True)(maps), module(maps))


def test_autocast_does_not_lower_the_precision() -> None:
    maps = tensors(some(), dtype=torch.float32)
    module = attrace.torch.AttentionRollout()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = module(maps), module(maps, target=0), module(maps, source=0)
    for got, want in zip(inside, (module(maps), module(maps, target=0), module(maps, source=0)), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0, atol=1e-7)


def test_nothing_is_kept() -> None:
    module = attrace.torch.AttentionRollout()
    first, second = tensors(some()), tensors(some()[::-1].copy())
    module(first)
    torch.testing.assert_close(module(second), attrace.torch.AttentionRollout()(second), rtol=0, atol=0)
    assert not list(module.parameters())
    assert not module.state_dict()
    assert module.to(torch.float16)(first).dtype == torch.float64


def test_refusals() -> None:
    with pytest.raises(InputError, match="Expected residual"):
        attrace.torch.AttentionRollout(residual=2.0)
    with pytest.raises(InputError, match="Expected discard"):
        attrace.torch.AttentionRollout(discard=1.0)
    with pytest.raises(InputError, match="Expected normalize"):
        attrace.torch.AttentionRollout(normalize=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="never means all"):
        attrace.torch.AttentionRollout(layers=[])(tensors(some()))
    bad = some()
    bad[1, 0, 2, 3, 4] = np.nan
    with pytest.raises(NonFiniteError, match="layer 1, batch 0, head 2, row 3"):
        attrace.torch.AttentionRollout()(tensors(bad))


def test_it_says_what_it_does() -> None:
    module = attrace.torch.AttentionRollout(heads="max", layers=[1])
    wanted = "AttentionRollout(heads='max', residual=0.5, normalize=True, discard=0.0, layers=[1])"
    assert repr(module) == wanted


def test_same_options_as_the_function() -> None:
    function = inspect.signature(attrace.rollout).parameters
    module = inspect.signature(attrace.torch.AttentionRollout).parameters
    forward = inspect.signature(attrace.torch.AttentionRollout.forward).parameters
    assert {"maps", "self", *module} | {"target", "source"} == {"self", *function}
    assert list(forward) == ["self", "maps", "target", "source"]
    for name, parameter in module.items():
        assert parameter.default == function[name].default


def test_the_example_runs() -> None:
    import attrace.layers.torch.rollout as documented

    found = doctest.testmod(documented)
    assert found.attempted > 0
    assert found.failed == 0
