"""What a family's configuration says of its tokens and the run itself does not show.  Loaded when asked for."""

from __future__ import annotations

from typing import Any

_WAVEFORM = (
    "data2vec-audio", "hubert", "moonshine", "sew", "sew-d", "unispeech", "unispeech-sat", "wav2vec2",
    "wav2vec2-conformer", "wavlm",
)  # fmt: skip
RATES: dict[str, float] = {
    **dict.fromkeys(_WAVEFORM, 16_000.0),
    "audio-spectrogram-transformer": 100.0,
    "speech_to_text": 100.0,
    "whisper": 100.0,
}
"""Input steps per second, by model_type, where the library's own feature extractor has only one: samples of a
waveform, or spectrogram columns of 10 ms.  The configurations do not name it."""

BLOCKS: dict[str, bool] = {
    "glm4v": False,
    "qwen2_vl": False,
    "qwen2_5_vl": True,
    "qwen3_vl": False,
    "qwen3_vl_moe": False,
}
"""Families that pack images into one sequence, block after block of merged patches; True: in windows of blocks."""


def rate_of(config: Any) -> float | None:
    """Input steps per second."""
    for part in (config, getattr(config, "audio_config", None), getattr(config, "encoder", None)):
        rate = getattr(part, "sampling_rate", None) or RATES.get(getattr(part, "model_type", ""))
        if rate:
            return float(rate)
    return None


def merge_factor(config: Any, height: int) -> int | None:
    """How many patches along each side become one token of the prompt; None where it does not come out even."""
    kind, vision = getattr(config, "model_type", ""), getattr(config, "vision_config", None)
    if kind in BLOCKS:
        return int(vision.spatial_merge_size)  # type: ignore[union-attr]
    if kind == "gemma3":
        side = round(config.mm_tokens_per_image**0.5)
        return height // side if side * side == config.mm_tokens_per_image and height % side == 0 else None
    if kind in ("idefics3", "smolvlm"):
        return int(config.scale_factor)
    if kind == "internvl":
        return int(1 / config.downsample_ratio + 0.5)
    return 1


def image_token(config: Any) -> int | None:
    """The id that stands for a piece of an image in the prompt."""
    found = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    return found if isinstance(found, int) else None
