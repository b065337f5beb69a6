"""Contracts 1 and 2 for every family: the output is bit-identical, the weights are the library's own or probed ones.

Each model is tiny and random, built from its configuration by the coverage script; the evidence is the library's own
eager weights, identity-value probing of the fused calls, and the softmaxes of a run (scripts/coverage_oracle.py).
"""

from __future__ import annotations

import pytest
from measured import measure

FAMILIES = {
    "encoders": "bert roberta albert distilbert deberta deberta-v2 modernbert electra mpnet xlm-roberta",
    "decoders": (
        "gpt2 gpt_neox llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 falcon bloom olmo gpt_oss deepseek_v3 "
        "mixtral qwen3_moe"
    ),
    "encoder-decoders": "t5 bart marian mbart pegasus whisper",
    "vision": "vit deit beit dinov2 dinov2_with_registers siglip_vision_model swin swinv2",
    "audio": "wav2vec2 hubert audio-spectrogram-transformer",
    "pairs": "clip siglip blip llava qwen2_vl qwen2_5_vl qwen3_vl",
    "time series": "patchtst informer time_series_transformer",
    "blocks and windows": "longt5 hiera gemma4_audio prophetnet sew-d",
}
CASES = [(kind, family) for kind, families in FAMILIES.items() for family in families.split()]
ALL_KINDS = {"t5", "bart", "marian", "mbart", "pegasus", "whisper"}
"""Families that must show encoder, decoder and cross attention."""
PAIRED = {"clip", "siglip", "blip", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
"""Families that must have been given text and images together."""


@pytest.mark.filterwarnings("ignore")  # the library's own, of all its models
@pytest.mark.parametrize(("kind", "family"), CASES)
def test_a_family_is_read(kind: str, family: str) -> None:
    found = measure(family)
    assert (found["status"], found["reason"]) == ("covered", "")
    assert found["ops"] == sum(found["evidence"].values()) > 0
    if family in ALL_KINDS:
        assert (found["ops"], found["kinds"]) == (6, ["cross", "self"])
    if family in PAIRED:
        assert {"input_ids", "pixel_values"} <= set(found["inputs"])
        assert found["ops"] >= 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("deformable_detr", "that each query spends on values of its own"),
        ("pegasus_x", "of which only 32 columns met these values"),
        ("longformer", "padded or joined before its values"),
        ("led", "padded or joined before its values"),
        ("autoformer", "weighs time delays"),
        ("reformer", "Received: none"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_reason(family: str, why: str) -> None:
    found = measure(family)
    assert found["status"] == "refused"
    assert why in found["reason"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["mamba", "convnext", "fnet"])
def test_what_has_no_attention_says_so(family: str) -> None:
    assert measure(family)["status"] == "no attention"
