"""The promises on real, trained models: MiniLM, SmolLM2, rxnmapper's ALBERT and the embedded classifier."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attrace
from attrace.capture.encoding import Encoding, encode
from attrace.capture.huggingface import Loaded, load
from attrace.ops.attention import naive
from attrace.types import Floats

SAMPLES = Path(attrace.__file__).parent / "assets" / "samples"
TEXTS = {
    "minilm": "A man is eating food in the old town of Nürnberg. 😀 The stock market crashed today.",
    "smollm2": "The capital of France is Paris, and the capital of Italy is",
    "rxnmapper": "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1[MASK]",
    "embedded": (SAMPLES / "prize.txt").read_text(encoding="utf-8"),
}
MODELS = [
    "embedded",
    pytest.param("minilm"),
    pytest.param("rxnmapper"),
    pytest.param("smollm2", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def models(real: Callable[[str], Path]) -> Callable[[str], Loaded]:
    kept: dict[str, Loaded] = {}

    def get(name: str) -> Loaded:
        if name not in kept:
            kept[name] = load(None if name == "embedded" else real(name))
        return kept[name]

    return get


def run(loaded: Loaded, encoding: Encoding) -> tuple[Any, attrace.Trace]:
    with torch.no_grad():
        return loaded.model(**encoding.inputs), attrace.trace(loaded.model, **encoding.inputs)


def reference_maps(trace: attrace.Trace) -> list[Floats]:
    """Each layer's maps in float64 from the recorded queries and keys."""
    return [
        naive.attention_weights(
            op.query.double().numpy(),
            op.key.double().numpy(),
            scale=op.scale,
            bias=None if op.bias is None else op.bias.double().numpy(),
            causal=op.causal,
        )
        for op in trace.ops
    ]


@pytest.mark.parametrize("name", MODELS)
def test_capture_changes_nothing_and_streams_exactly(name: str, models: Callable[[str], Loaded]) -> None:
    loaded = models(name)
    encoding = encode(loaded, TEXTS[name])
    plain, trace = run(loaded, encoding)
    assert torch.equal(plain[0], trace.output[0])
    maps = reference_maps(trace)
    whole = attrace.rollout(maps)
    for target in (0, len(encoding) // 2, len(encoding) - 1):
        row = trace.rollout(target=target)[0].double().numpy()
        assert np.abs(row - whole[0, target]).sum() <= 1e-5
        column = trace.rollout(source=target)[0].double().numpy()
        assert np.abs(column - whole[0, :, target]).max() <= 1e-5
    assert np.abs(trace.rollout()[0].double().numpy() - whole[0]).sum(-1).max() <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_the_librarys_own(name: str, models: Callable[[str], Loaded]) -> None:
    loaded = models(name)
    encoding = encode(loaded, TEXTS[name])
    _, trace = run(loaded, encoding)
    backend = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            own = loaded.model(**encoding.inputs, output_attentions=True).attentions
    finally:
        loaded.model.set_attn_implementation(backend)
    assert len(own) == len(trace.ops)
    for op, weights in zip(trace.ops, own, strict=True):
        torch.testing.assert_close(op.weights(), weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["auto", "rollout", "last-layer", "alti", "leave-one-out"])
def test_every_method_explains_it(name: str, method: str, models: Callable[[str], Loaded]) -> None:
    loaded = models(name)
    result = attrace.explain(loaded.model, TEXTS[name], processor=loaded.tokenizer, method=method)
    assert np.isfinite(result.scores).all()
    assert result.scores.any()
    for token in result.tokens:
        if not token.special:
            assert token.text == TEXTS[name][token.start : token.end]
    if not result.signed:
        assert result.scores.sum() + result.lost_mass + result.sink_mass == pytest.approx(1, abs=1e-5)
    assert json.loads(json.dumps(result.to_dict()))["schema"] == "attrace.attribution/1"


@pytest.mark.slow
def test_smollm2_collapses_under_rollout_and_says_so(models: Callable[[str], Loaded]) -> None:
    loaded = models("smollm2")
    text = "The capital of France is"
    result = attrace.explain(loaded.model, text, processor=loaded.tokenizer)
    assert result.target.label == " Paris"
    assert result.method == "leave-one-out"
    assert any("rollout collapses here" in note for note in result.notes)
    assert result.sink is not None
    assert (result.sink.index, round(result.sink.share, 2)) == (0, 1.0)
    assert {word.text for word in result.words if word.score > 5} >= {"capital", "France"}
    collapsed = attrace.explain(loaded.model, text, processor=loaded.tokenizer, method="rollout")
    assert collapsed.sink is not None
    assert (collapsed.sink.index, round(collapsed.sink.share, 2)) == (0, 1.0)
    alti = attrace.explain(loaded.model, text, processor=loaded.tokenizer, method="alti")
    np.testing.assert_allclose(alti.scores, [0.43, 0.28, 0.08, 0.14, 0.08], atol=0.01)


def test_rxnmapper_completes_the_reaction(models: Callable[[str], Loaded]) -> None:
    loaded = models("rxnmapper")
    result = attrace.explain(loaded.model, TEXTS["rxnmapper"], processor=loaded.tokenizer)
    assert result.target.label == "F"
    assert (result.target.probability or 0) > 0.9


def test_words_of_real_tokenizers(models: Callable[[str], Loaded]) -> None:
    loaded = models("minilm")
    result = attrace.explain(loaded.model, "Unbelievable 😀 in 東京!", processor=loaded.tokenizer)
    assert [word.text for word in result.words] == ["Unbelievable", "😀", "in", "東", "京", "!"]
