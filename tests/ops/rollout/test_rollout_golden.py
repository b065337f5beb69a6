"""Every golden rollout case in every framework, the traps included.

The golden area "rollout" also has the cases of attention flow, flow-*: tests/ops/flow/test_flow.py has those.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call, vector

import attrace
from attrace.ops.rollout import naive, row_mass
from attrace.ops.rollout.streamed import Mixing
from attrace.ops.rollout.streams import in_order, source_shares, target_shares

HERE = Path(__file__).resolve().parents[2] / "cases" / "golden.json"
SHARED = [above / "shared" / "cases" / "golden.json" for above in Path(__file__).resolve().parents[4:6]]
AREA = {case["id"]: case for case in json.loads(HERE.read_text(encoding="utf-8"))}
CASES = {name: case for name, case in AREA.items() if name.startswith("rollout-")}
IDS = sorted(CASES)
TESTED_IN_FLOW = ["flow-1", "flow-2", "flow-3"]
TWO_STREAMS = [name for name in IDS if name.startswith("rollout-encdec")]
GRADIENTS = [name for name in IDS if name.startswith("rollout-gradient")]
PLAIN = [name for name in IDS if name not in TWO_STREAMS + GRADIENTS]


def layers_of(matrices: Any) -> list[Any]:
    """N x n matrices, one per layer, as maps (1, 1, n, n)."""
    return [np.asarray(matrix, dtype=np.float64)[None, None] for matrix in matrices]


def runs(case: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any], Any]]:  # noqa: PLR0911
    """The (maps, options, expected) of a case: what is asked and what must come."""
    given, expected = case["inputs"], case["expected"]
    kind = case["id"].removeprefix("rollout-").rsplit("-", 1)[0]
    if kind == "keepdim":
        return [(layers_of([given["M"]]), {}, expected["R"])]
    if kind == "discard":
        return [(layers_of([given["fused"]]), {"discard": given["discard_ratio"]}, expected["R"])]
    if kind == "fusion":
        maps = [np.asarray(given["A (head, query, key)"])[None]]
        return [(maps, {"heads": how}, expected[f"R_{how}"]) for how in ("mean", "max", "min")]
    if kind == "unnormalised":
        return [(layers_of([given["A"]]), {"target": given["row"]}, expected["row"])]
    maps = layers_of(given["A"])
    if kind == "residual":
        found = []
        for share in given["residuals"]:
            want = expected[f"R_residual_{share}"]
            found += [(maps, {"residual": float(share), "normalize": norm}, want) for norm in (True, False)]
        return found
    if kind == "column":
        j = given["source_token"]
        return [(maps, {"source": j}, expected["column"]), (maps, {}, expected["R"])]
    if kind in ("startlayer", "layersubset"):
        return [(maps, {"layers": given["layers"]}, expected["R"])]
    if kind == "sink":
        return [(maps, {"normalize": False}, expected["R"])]
    return [(maps, {}, expected["R"])]


def traps(case: dict[str, Any]) -> list[Any]:
    names = [name for name in case["expected"] if name.startswith("trap_") and not name.endswith("_exact")]
    return [case["expected"][name] for name in names if not name.endswith("row_sums")]


def test_the_copy_equals_the_shared_cases() -> None:
    assert len(AREA) == 36
    found = [path for path in SHARED if path.exists()]
    if not found:
        pytest.skip("no shared cases beside this clone; its own copy is what the tests use")
    shared = json.loads(found[0].read_text(encoding="utf-8"))
    wanted = {case["id"]: case for case in shared if case["area"] == "rollout"}
    assert wanted == AREA


def test_every_case_of_the_area_is_tested_here_or_with_the_flow() -> None:
    assert {case["area"] for case in AREA.values()} == {"rollout"}
    assert sorted(PLAIN + TWO_STREAMS + GRADIENTS + TESTED_IN_FLOW) == sorted(AREA)


@pytest.mark.parametrize("name", PLAIN)
def test_case(name: str, made: Any) -> None:
    case = CASES[name]
    for maps, options, expected in runs(case):
        want = np.asarray(expected)
        plain = naive.rollout(maps, **options)[0]
        result = attrace.rollout([made.array(layer) for layer in maps], **options)
        assert isinstance(result, made.kind)
        got = made.numpy(result)[0]
        for found in (plain, got):
            np.testing.assert_allclose(found, want, rtol=0, atol=case["tol"])
            for trap in traps(case):
                assert np.abs(found - np.asarray(trap)).max() > 1e-3


def test_every_trap_is_met() -> None:
    assert sum(len(traps(case)) for case in CASES.values()) >= 13


@pytest.mark.parametrize("name", [name for name in IDS if name.startswith(("rollout-keepdim", "rollout-disc"))])
def test_rows_sum_to_one_where_the_missing_keepdim_does_not(name: str) -> None:
    ((maps, options, _),) = runs(CASES[name])
    sums = attrace.rollout(maps, **options)[0].sum(-1)
    np.testing.assert_allclose(sums, 1.0, atol=1e-12)
    trap = [
        float(np.divide(*map(float, str(s).split("/")))) if "/" in str(s) else float(s)
        for s in CASES[name]["expected"]["trap_no_keepdim_row_sums"]
    ]
    assert np.abs(sums - trap).max() > 1e-3


@pytest.mark.parametrize("name", [name for name in IDS if name.startswith("rollout-sink")])
def test_sink_mass_is_reported_not_spread(name: str, made: Any) -> None:
    case = CASES[name]
    maps = [made.array(layer) for layer in layers_of(case["inputs"]["A"])]
    result = made.numpy(attrace.rollout(maps, normalize=False))
    masses = made.numpy(row_mass(maps, normalize=False))
    np.testing.assert_allclose(1.0 - result.sum(-1)[0], case["expected"]["sink_mass"], atol=1e-9)
    np.testing.assert_allclose(1.0 - masses[0, -1], case["expected"]["sink_mass"], atol=1e-9)


@pytest.mark.parametrize("name", [name for name in IDS if name.startswith("rollout-padding")])
def test_padding_leaves_the_real_block_alone(name: str, made: Any) -> None:
    case = CASES[name]
    real = np.flatnonzero(case["inputs"]["is_real_token"])
    block = np.ix_(real, real)
    padded = layers_of(case["inputs"]["A"])
    alone = [layer[:, :, real][:, :, :, real] for layer in padded]
    result = made.numpy(attrace.rollout([made.array(layer) for layer in padded]))[0]
    np.testing.assert_allclose(result[block], case["expected"]["R_real_block"], atol=1e-9)
    np.testing.assert_allclose(result[block], naive.rollout(alone)[0], atol=1e-12)
    np.testing.assert_array_equal(np.delete(result[real], real, axis=1), 0.0)


@pytest.mark.parametrize("name", [name for name in IDS if name.startswith("rollout-causal")])
def test_causal_maps_stay_exactly_causal(name: str, made: Any) -> None:
    maps = [made.array(layer) for layer in layers_of(CASES[name]["inputs"]["A"])]
    result = made.numpy(attrace.rollout(maps))[0]
    np.testing.assert_array_equal(result[np.triu_indices(len(result), 1)], 0.0)


def test_discard_drops_the_named_cells() -> None:
    for name in ("rollout-discard-1", "rollout-discard-2"):
        case = CASES[name]
        kept = naive.drop_smallest(np.asarray(case["inputs"]["fused"]), case["inputs"]["discard_ratio"])
        np.testing.assert_array_equal(kept, case["expected"]["kept"])
        np.testing.assert_array_equal(np.flatnonzero(kept == 0.0), case["expected"]["dropped_flat_indices"])


@pytest.mark.parametrize("name", TWO_STREAMS)
def test_encoder_and_decoder_are_two_streams(name: str) -> None:
    case = CASES[name]
    blocks = case["inputs"]["decoder_layers (self, cross)"]
    encoder = layers_of(case["inputs"]["encoder_self"])
    own, other = layers_of(block[0] for block in blocks), layers_of(block[1] for block in blocks)
    from_decoder, from_encoder = naive.encoder_decoder(encoder, own, other)
    np.testing.assert_allclose(naive.rollout(encoder)[0], case["expected"]["E"], atol=case["tol"])
    np.testing.assert_allclose(from_decoder[0], case["expected"]["D_dec"], atol=case["tol"])
    np.testing.assert_allclose(from_encoder[0], case["expected"]["D_enc"], atol=case["tol"])
    np.testing.assert_allclose(from_decoder.sum(-1) + from_encoder.sum(-1), 1.0, atol=1e-12)


@pytest.mark.parametrize("name", TWO_STREAMS)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_streams_streamed(name: str, framework: str) -> None:
    case = CASES[name]
    calls = [Call("source", "source", np.array(m)[None, None]) for m in case["inputs"]["encoder_self"]]
    for own, other in case["inputs"]["decoder_layers (self, cross)"]:
        calls.append(Call("decoder", "decoder", np.array(own)[None, None]))
        calls.append(Call("decoder", "source", np.array(other)[None, None]))
    calls = [call.on(framework) for call in calls]
    graph, steps = in_order(calls)
    ops = dict(zip(steps, calls, strict=True))
    last = graph.newest("decoder")
    eye = vector(np.eye(2)[None], framework)
    found = target_shares(graph, ops, last, eye, Mixing(scaling="one"))
    np.testing.assert_allclose(np.asarray(found["decoder"])[0].T, case["expected"]["D_dec"], atol=case["tol"])
    np.testing.assert_allclose(np.asarray(found["source"])[0].T, case["expected"]["D_enc"], atol=case["tol"])
    tokens = len(case["expected"]["E"])
    columns = source_shares(graph, ops, 0, vector(np.eye(tokens)[None], framework), Mixing(scaling="one"))
    np.testing.assert_allclose(np.asarray(columns[last])[0], case["expected"]["D_enc"], atol=case["tol"])
    at = graph.newest("source")
    np.testing.assert_allclose(np.asarray(columns[at])[0], case["expected"]["E"], atol=case["tol"])


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_paired_with_their_own_layer(name: str) -> None:
    case = CASES[name]
    maps = [np.asarray(layer)[None] for layer in case["inputs"]["A (layer, head, query, key)"]]
    gradients = [np.asarray(layer)[None] for layer in case["inputs"]["grad (same shape, forward layer order)"]]
    found = naive.gradient_rollout(maps, gradients)[0]
    np.testing.assert_allclose(found, case["expected"]["R"], atol=case["tol"])
    turned = naive.gradient_rollout(maps, gradients[::-1])[0]
    np.testing.assert_allclose(turned, case["expected"]["trap_reversed_gradients"], atol=case["tol"])
    assert np.abs(found - turned).max() > 1e-3
