"""What is particular to a framework: tracing, compiling, gradients, devices, what gets imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import attrace
from attrace.ops.rollout import naive

OPTIONS: list[dict[str, Any]] = [
    {},
    {"heads": "max", "target": -1},
    {"heads": [1, 2, 3, 4], "source": [0, 2], "normalize": False},
    {"discard": 0.5, "layers": [0, 2]},
]


def slopes(maps: Any, options: dict[str, Any], seed: Any) -> Any:
    """Gradient of (seed * rollout).sum() by central differences on the reference."""
    gradient, step = np.zeros_like(maps), 1e-6
    for index in np.ndindex(maps.shape):
        up, down = maps.copy(), maps.copy()
        up[index] += step
        down[index] -= step
        difference = naive.rollout(up, **options) - naive.rollout(down, **options)
        gradient[index] = (seed * difference).sum() / (2 * step)
    return gradient


def small() -> Any:
    return np.random.default_rng(4).dirichlet(np.ones(3), (3, 1, 4, 3)) * 0.9 + 0.02


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_equal_the_references_differences(made: Any, options: dict[str, Any]) -> None:
    maps = small()
    seed = np.random.default_rng(5).random(naive.rollout(maps, **options).shape)
    want = slopes(maps, options, seed)
    if made.name == "torch":
        leaf = made.array(maps).requires_grad_()
        (made.array(seed) * attrace.rollout(leaf, **options)).sum().backward()
        got = leaf.grad
    elif made.name == "jax":
        import jax

        got = jax.grad(lambda x: (seed * attrace.rollout(x, **options)).sum())(made.array(maps))
    elif made.name == "tensorflow":
        import tensorflow as tf

        leaf = tf.Variable(made.array(maps))
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(seed * attrace.rollout(leaf, **options))
        got = tf.convert_to_tensor(tape.gradient(total, leaf))
    else:
        return  # NumPy has no gradients
    np.testing.assert_allclose(made.numpy(got), want, atol=1e-7)


@pytest.mark.parametrize("options", OPTIONS)
def test_traced_and_compiled_give_the_same(made: Any, options: dict[str, Any], maps: Any) -> None:
    want = naive.rollout(maps, **options)
    arrays = [made.array(layer) for layer in maps]
    if made.name == "jax":
        import jax

        got = jax.jit(lambda layers: attrace.rollout(layers, **options))(arrays)
        # A map that is a constant inside the traced function.
        half = jax.jit(lambda layer: attrace.rollout([layer, *arrays[1:]], **options))(arrays[0])
        np.testing.assert_allclose(made.numpy(half), want, atol=1e-12)
    elif made.name == "tensorflow":
        import tensorflow as tf

        open_batch = tf.TensorSpec([3, None, 4, 5, 5], tf.float64)
        traced = tf.function(lambda x: attrace.rollout(x, **options), input_signature=[open_batch])
        got = traced(tf.stack(arrays))
        listed = tf.function(lambda x: attrace.rollout(x, **options))(arrays)
        np.testing.assert_allclose(made.numpy(listed), want, atol=1e-12)
    elif made.name == "torch":
        import torch

        got = torch.compile(lambda x: attrace.rollout(x, **options), fullgraph=True, backend="aot_eager")(arrays)
    else:
        return  # nothing to compile
    np.testing.assert_allclose(made.numpy(got), want, atol=1e-12)


def test_tensorflow_names_an_open_length(made: Any) -> None:
    if made.name != "tensorflow":
        return
    import tensorflow as tf

    spec = tf.TensorSpec([2, 1, 4, None, None], tf.float64)
    # Inside tf.function TensorFlow wraps what is raised in an error of its own.
    with pytest.raises(Exception, match="ShapeError: Expected a map with known H and n"):
        tf.function(attrace.rollout, input_signature=[spec]).get_concrete_function()


def test_jax_stays_in_float32_without_x64(made: Any, maps: Any) -> None:
    if made.name != "jax":
        return
    import jax

    jax.config.update("jax_enable_x64", False)
    result = attrace.rollout([jax.numpy.asarray(layer) for layer in maps], discard=0.4, target=[0, 1])
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, naive.rollout(maps, discard=0.4, target=[0, 1]), atol=1e-6)


def test_layers_on_several_devices(made: Any, maps: Any) -> None:
    if made.name != "torch":
        return
    import torch

    # The meta device stands for a second one: it has shapes and refuses to mix with another device.
    arrays = [torch.tensor(layer) for layer in maps]
    arrays[2] = arrays[2].to("meta")
    for options, shape in (({}, (2, 5, 5)), ({"source": 1}, (2, 5))):
        result = attrace.rollout(arrays, **options)
        assert (tuple(result.shape), result.device.type) == (shape, "meta")


def test_jax_layers_on_several_devices() -> None:
    pytest.importorskip("jax", reason="jax is not installed; CI has it")
    code = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np, attrace
maps = np.full((2, 1, 2, 3, 3), 1 / 3, dtype=np.float32)
arrays = [jax.device_put(layer, device) for layer, device in zip(maps, jax.devices(), strict=True)]
result = attrace.rollout(arrays)
assert result.devices() == {jax.devices()[1]}, result.devices()
np.testing.assert_allclose(result, attrace.rollout(maps), atol=1e-6)
mass = attrace.ops.rollout.row_mass(arrays)
np.testing.assert_allclose(mass, 1.0, atol=1e-6)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_frameworks_agree(made: Any, maps: Any) -> None:
    for options in OPTIONS:
        result = attrace.rollout(made.array(maps, "float32"), **options)
        np.testing.assert_allclose(made.numpy(result), attrace.rollout(maps, **options), atol=1e-5)


def test_no_framework_is_imported_for_another_ones_maps() -> None:
    code = """
import sys, attrace
loaded = {"numpy", "torch", "jax", "tensorflow", "array_api_compat"} & set(sys.modules)
assert not loaded, loaded
import numpy as np
attrace.rollout(np.full((2, 1, 2, 3, 3), 1 / 3), discard=0.3)
loaded = {"torch", "jax", "tensorflow", "scipy"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
