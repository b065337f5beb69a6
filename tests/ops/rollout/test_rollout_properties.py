"""What rollout must be whatever the maps: against the reference, exact fractions and its own laws."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attrace
from attrace.ops.rollout import naive, row_mass

few = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


def dirichlet(seed: int, layers: int, batch: int, heads: int, n: int) -> Any:
    return np.random.default_rng(seed).dirichlet(np.full(n, 0.5), (layers, batch, heads, n))


@st.composite
def some_maps(draw: st.DrawFn) -> Any:
    sizes = [draw(st.integers(1, top)) for top in (4, 3, 3, 6)]
    return dirichlet(draw(st.integers(0, 2**16)), *sizes)


@st.composite
def some_options(draw: st.DrawFn, heads: int) -> dict[str, Any]:
    weights = st.lists(st.sampled_from([0.25, 0.5, 1.0, 3.0]), min_size=heads, max_size=heads)
    return {
        "heads": draw(st.sampled_from(["mean", "max", "min", heads - 1]) | weights),
        "residual": draw(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])),
        "normalize": draw(st.booleans()),
        "discard": draw(st.sampled_from([0.0, 0.1, 0.5, 0.9])),
    }


@given(data=st.data())
@few
def test_equals_the_reference_with_any_options(made: Any, data: Any) -> None:
    maps = data.draw(some_maps())
    options = data.draw(some_options(maps.shape[2]))
    n = maps.shape[-1]
    options["layers"] = data.draw(st.none() | st.lists(st.integers(0, len(maps) - 1), min_size=1, unique=True))
    arrays = [made.array(layer) for layer in maps]
    full = naive.rollout(maps, **options)
    i = data.draw(st.integers(-n, n - 1))
    several = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=3))
    for choice, want in (
        ({}, full),
        ({"target": i}, full[:, i]),
        ({"target": several}, full[:, several]),
        ({"source": i}, full[:, :, i]),
        ({"source": several}, full[:, :, several]),
    ):
        got = attrace.rollout(arrays, **options, **choice)
        assert tuple(got.shape) == want.shape
        np.testing.assert_allclose(made.numpy(got), want, rtol=0, atol=1e-12)
        np.testing.assert_allclose(naive.rollout(maps, **options, **choice), want, rtol=0, atol=0)
    masses = made.numpy(row_mass(arrays, **options))
    np.testing.assert_allclose(masses[:, -1], full.sum(-1), atol=1e-12)


@given(data=st.data())
@few
def test_rows_sum_to_one_and_nothing_is_negative(made: Any, data: Any) -> None:
    maps = data.draw(some_maps())
    options = data.draw(some_options(maps.shape[2])) | {"normalize": True, "residual": 0.5}
    result = made.numpy(attrace.rollout(made.array(maps, "float32"), **options))
    assert result.min() >= 0.0
    np.testing.assert_allclose(result.sum(-1), 1.0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(made: Any, dtype: str, maps: Any) -> None:
    if made.name == "numpy" and dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="NumPy has bfloat16 only through ml_dtypes").bfloat16
    arrays = [made.array(layer, dtype) for layer in maps]
    rounded = np.stack([made.numpy(layer).astype(np.float64) for layer in arrays])
    for options in ({}, {"heads": "max"}, {"heads": 1}, {"heads": [1, 2, 3, 4]}, {"discard": 0.5}):
        result = attrace.rollout(arrays, **options)
        assert str(result.dtype).count("float64" if dtype == "float64" else "float32") == 1
        want = naive.rollout(rounded, **options)
        atol = 1e-12 if dtype == "float64" else 5e-7
        np.testing.assert_allclose(made.numpy(result), want, rtol=0, atol=atol)


def test_exact_fractions() -> None:
    """Against rational arithmetic written out here, sharing no code with the reference."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        count, n = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        numbers = rng.integers(0, 6, (count, n, n))
        exact = [[[Fraction(int(x), 8) for x in row] for row in layer] for layer in numbers]
        share = Fraction(int(rng.integers(1, 5)), 4)
        product = [[Fraction(int(i == j)) for j in range(n)] for i in range(n)]
        for layer in exact:
            rows = [[(1 - share) * layer[i][j] + share * (i == j) for j in range(n)] for i in range(n)]
            rows = [[x / sum(row) for x in row] for row in rows]
            product = [[sum(rows[i][k] * product[k][j] for k in range(n)) for j in range(n)] for i in range(n)]
        maps = [np.array([[float(x) for x in row] for row in layer])[None, None] for layer in exact]
        want = np.array([[float(x) for x in row] for row in product])
        np.testing.assert_allclose(attrace.rollout(maps, residual=float(share))[0], want, atol=1e-15)
        np.testing.assert_allclose(naive.rollout(maps, residual=float(share))[0], want, atol=1e-15)


def test_a_batch_equals_its_items_one_by_one(made: Any, maps: Any) -> None:
    options = {"discard": 0.3, "heads": "max"}
    together = made.numpy(attrace.rollout([made.array(layer) for layer in maps], **options))
    for k in range(maps.shape[1]):
        alone = made.numpy(attrace.rollout([made.array(layer[k : k + 1]) for layer in maps], **options))
        np.testing.assert_allclose(together[k], alone[0], rtol=0, atol=1e-15)


def test_renaming_tokens_renames_the_result(maps: Any) -> None:
    order = np.array([3, 0, 4, 1, 2])
    renamed = maps[:, :, :, order][:, :, :, :, order]
    want = attrace.rollout(maps)[:, order][:, :, order]
    np.testing.assert_allclose(attrace.rollout(renamed), want, atol=1e-15)


def test_layers_are_a_subset_in_forward_order(made: Any, maps: Any) -> None:
    arrays = [made.array(layer) for layer in maps]
    want = made.numpy(attrace.rollout([arrays[0], arrays[2]]))
    for layers in ([0, 2], [2, 0], (0, -1), np.array([0, 2]), range(0, 3, 2)):
        np.testing.assert_array_equal(made.numpy(attrace.rollout(arrays, layers=layers)), want)
    last = made.numpy(attrace.rollout(arrays, layers=[2], residual=0.0))
    np.testing.assert_allclose(last, maps[2].mean(1), atol=1e-15)


def test_order_of_layers_matters(made: Any, maps: Any) -> None:
    arrays = [made.array(layer) for layer in maps]
    turned = made.numpy(attrace.rollout(arrays[::-1]))
    assert np.abs(turned - made.numpy(attrace.rollout(arrays))).max() > 0.01


def test_residual_one_is_the_identity(made: Any, maps: Any) -> None:
    for normalize in (True, False):
        result = attrace.rollout(made.array(maps, "float32"), residual=1.0, normalize=normalize)
        np.testing.assert_array_equal(made.numpy(result), np.broadcast_to(np.eye(5), (2, 5, 5)))


def test_residual_zero_unnormalised_is_the_product_of_head_means(made: Any, maps: Any) -> None:
    plain = maps[2].mean(1) @ maps[1].mean(1) @ maps[0].mean(1)
    result = made.numpy(attrace.rollout(made.array(maps), residual=0.0, normalize=False))
    np.testing.assert_allclose(result, plain, atol=1e-15)


@pytest.mark.parametrize(("n", "count"), [(4, 2), (3, 5), (7, 12)])
def test_uniform_maps_have_a_closed_form(made: Any, n: int, count: int) -> None:
    uniform = made.array(np.full((count, 1, 2, n, n), 1.0 / n))
    left = 0.5**count
    want = left * np.eye(n) + (1.0 - left) / n
    np.testing.assert_allclose(made.numpy(attrace.rollout(uniform))[0], want, atol=1e-12)
    np.testing.assert_allclose(made.numpy(attrace.rollout(uniform, residual=0.0))[0], 1.0 / n, atol=1e-12)


def test_two_uniform_layers_over_four_tokens() -> None:
    result = attrace.rollout(np.full((2, 1, 1, 4, 4), 0.25))[0]
    np.testing.assert_allclose(result, np.where(np.eye(4) == 1, 7 / 16, 3 / 16), atol=1e-15)


def test_one_layer_normalised_and_not() -> None:
    one = np.array([[[[0.5, 0.5], [0.0, 1.0]]]])
    np.testing.assert_array_equal(attrace.rollout([one])[0], [[0.75, 0.25], [0.0, 1.0]])
    np.testing.assert_array_equal(attrace.rollout([2.0 * one], normalize=False)[0], [[1.0, 0.5], [0.0, 1.5]])


def test_causal_maps_stay_exactly_causal(made: Any) -> None:
    rng = np.random.default_rng(5)
    maps = np.tril(rng.random((6, 2, 3, 9, 9)))
    maps /= maps.sum(-1, keepdims=True)
    for options in ({}, {"discard": 0.6}, {"heads": "max", "residual": 0.0}):
        result = made.numpy(attrace.rollout(made.array(maps, "float32"), **options))
        np.testing.assert_array_equal(np.triu(result, 1), 0.0)


def test_a_row_of_zeros_is_never_nan_and_never_uniform(made: Any) -> None:
    maps = np.array([[[[[0.0, 0.0], [0.5, 0.5]]]]] * 2)
    for residual, want in ((0.0, [[0.0, 0.0], [0.25, 0.25]]), (0.5, [[1.0, 0.0], [0.4375, 0.5625]])):
        result = made.numpy(attrace.rollout(made.array(maps), residual=residual))[0]
        np.testing.assert_allclose(result, naive.rollout(maps, residual=residual)[0], atol=1e-15)
        np.testing.assert_array_equal(result[0], want[0])
        for i in range(2):
            row = made.numpy(attrace.rollout(made.array(maps), residual=residual, target=i))[0]
            np.testing.assert_allclose(row, result[i], atol=1e-15)
    np.testing.assert_array_equal(made.numpy(row_mass(made.array(maps), residual=0.0))[0], [[0.0, 1.0], [0.0, 0.5]])


def test_a_head_masked_as_a_whole(made: Any) -> None:
    maps = np.stack([np.full((3, 3), 1 / 3), np.zeros((3, 3))])[None, None]
    for how in ("mean", "max", "min", 0, 1):
        result = made.numpy(attrace.rollout(made.array(maps), heads=how))
        assert np.isfinite(result).all()
        np.testing.assert_allclose(result.sum(-1), 1.0, atol=1e-12)


def test_mass_is_conserved_in_every_layer(made: Any) -> None:
    maps = dirichlet(11, 12, 1, 3, 17)
    masses = made.numpy(row_mass(made.array(maps, "float32")))
    assert masses.shape == (1, 12, 17)
    np.testing.assert_allclose(masses, 1.0, atol=1e-6)


def test_the_sink_takes_mass_layer_by_layer(made: Any) -> None:
    scores = np.array([1.0, 2.0, 3.0, 2.0])
    weights = np.exp(scores) / np.exp(scores).sum()
    short = np.broadcast_to(weights[:3], (2, 1, 1, 3, 3))  # the last column was the sink
    masses = made.numpy(row_mass(made.array(short), normalize=False))
    first = 1.0 - 0.5 * weights[3]
    np.testing.assert_allclose(masses[0], [[first] * 3, [first**2] * 3], atol=1e-12)
    result = made.numpy(attrace.rollout(made.array(short), normalize=False))
    np.testing.assert_allclose(result.sum(-1), first**2, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_discard_counts_exactly_with_ties_too(made: Any, dtype: str) -> None:
    rng = np.random.default_rng(2)
    for n, share in itertools.product((3, 6), (0.2, 0.5, 0.77, 0.99)):
        maps = rng.integers(1, 4, (1, 2, 1, n, n)) / 4.0  # many equal cells, none zero
        options = {"discard": share, "residual": 0.0, "normalize": False}
        result = made.numpy(attrace.rollout(made.array(maps, dtype), **options))
        assert [(item == 0.0).sum() for item in result] == [int(share * n * n)] * 2
        np.testing.assert_array_equal(result, naive.rollout(maps, **options))
    equal = made.array(np.full((1, 1, 1, 3, 3), 0.5), dtype)
    result = made.numpy(attrace.rollout(equal, discard=0.5, residual=0.0, normalize=False))
    np.testing.assert_array_equal(np.flatnonzero(result == 0.0), [0, 1, 2, 3])


def test_discard_on_a_map_beyond_the_limit_of_quantiles(made: Any) -> None:
    n = 4200
    one = np.random.default_rng(0).random((1, 1, 1, n, n), dtype=np.float32) + np.float32(0.5)
    if made.name == "torch":
        import torch

        array = torch.from_numpy(one)
    else:
        array = made.array(one, "float32")
    result = attrace.rollout(array, discard=0.9, residual=0.0, normalize=False)
    kept = np.count_nonzero(np.asarray(result))
    assert n * n - kept == int(0.9 * 4200 * 4200) == 15_876_000


def test_equal_weights_are_the_mean_whatever_their_size(made: Any, maps: Any) -> None:
    want = made.numpy(attrace.rollout(made.array(maps)))
    for weights in ([1, 1, 1, 1], [0.25] * 4, np.full(4, 7.0), (2.0,) * 4):
        result = made.numpy(attrace.rollout(made.array(maps), heads=weights))
        np.testing.assert_allclose(result, want, atol=1e-15)
    one = made.numpy(attrace.rollout(made.array(maps), heads=[0, 0, 5, 0]))
    np.testing.assert_array_equal(one, made.numpy(attrace.rollout(made.array(maps), heads=2)))
    np.testing.assert_array_equal(one, made.numpy(attrace.rollout(made.array(maps), heads=-2)))


def test_the_maps_are_not_changed_and_a_second_call_is_the_same(made: Any, maps: Any) -> None:
    arrays = [made.array(layer) for layer in maps]
    for options in ({"discard": 0.5, "heads": 0}, {"target": 1}, {"residual": 0.0, "normalize": False}):
        first = made.numpy(attrace.rollout(arrays, **options))
        np.testing.assert_array_equal(first, made.numpy(attrace.rollout(arrays, **options)))
    for array, layer in zip(arrays, maps, strict=True):
        np.testing.assert_array_equal(made.numpy(array), layer)


def test_layers_may_have_different_heads(made: Any, maps: Any) -> None:
    arrays = [made.array(maps[0]), made.array(maps[1][:, :2])]
    want = naive.rollout([maps[0], maps[1][:, :2]])
    np.testing.assert_allclose(made.numpy(attrace.rollout(arrays)), want, atol=1e-15)


def test_encoder_decoder_conserves_mass_with_heads_batch_and_short_rows() -> None:
    encoder = dirichlet(1, 3, 2, 4, 6)
    own = dirichlet(2, 2, 2, 4, 5)
    other = np.random.default_rng(3).dirichlet(np.ones(6), (2, 2, 4, 5))
    for heads, residual in itertools.product(["mean", "max", 1, [1, 0, 2, 1]], [0.0, 0.3, 1.0]):
        parts = naive.encoder_decoder(encoder, own, other, heads=heads, residual=residual)
        np.testing.assert_allclose(parts[0].sum(-1) + parts[1].sum(-1), 1.0, atol=1e-12)
    from_decoder, from_encoder = naive.encoder_decoder(encoder, own, 0.5 * other, normalize=False)
    assert (from_decoder.sum(-1) + from_encoder.sum(-1)).max() < 0.9
    with pytest.raises(attrace.errors.ShapeError, match="2 self maps, 1 cross maps"):
        naive.encoder_decoder(encoder, own, other[:1])


def test_gradient_rollout_refuses_lists_that_do_not_pair(maps: Any) -> None:
    with pytest.raises(attrace.errors.ShapeError, match="3 maps, 2 gradients"):
        naive.gradient_rollout(maps, maps[:2])
    with pytest.raises(attrace.errors.ShapeError, match="layer 0"):
        naive.gradient_rollout(maps, maps[:, :1])
