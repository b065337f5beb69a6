"""Tiny random models with more than one stream of tokens, built from their configurations."""

from __future__ import annotations

from typing import Any

import tiny
import torch
import transformers
from torch import Tensor, nn

_ENCODER_DECODER = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_TEXT = {
    **tiny.BASE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}
_BERT_TEXT = {**_TEXT, "sep_token_id": 2}
IMAGE = 99
"""The id of image tokens in a prompt."""

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 100, "d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "d_ff": 64,
         "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
    ),
    "bart": ("BartForConditionalGeneration", {**_ENCODER_DECODER, "max_position_embeddings": 64}),
    "marian": ("MarianMTModel", {**_ENCODER_DECODER, "max_position_embeddings": 64}),
    "mbart": ("MBartForConditionalGeneration", {**_ENCODER_DECODER, "max_position_embeddings": 64}),
    "pegasus": ("PegasusForConditionalGeneration", {**_ENCODER_DECODER, "max_position_embeddings": 64}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**_ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16},
    ),
    "clip": ("CLIPModel", {"text_config": _TEXT, "vision_config": _VISION}),
    "siglip": ("SiglipModel", {"text_config": _TEXT, "vision_config": _VISION}),
    "blip": (
        "BlipForConditionalGeneration",
        {"text_config": {**_BERT_TEXT, "encoder_hidden_size": 32}, "vision_config": _VISION},
    ),
    "blip-2": (
        "Blip2ForConditionalGeneration",
        {
            "vision_config": _VISION,
            "qformer_config": {**_BERT_TEXT, "encoder_hidden_size": 32, "cross_attention_frequency": 2},
            "text_config": {"model_type": "opt", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2,
                            "num_attention_heads": 4, "ffn_dim": 64, "max_position_embeddings": 64,
                            "word_embed_proj_dim": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
            "num_query_tokens": 3,
            "image_token_index": IMAGE,
        },
    ),
    "lxmert": (
        "LxmertModel",
        {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "l_layers": 1,
         "x_layers": 2, "r_layers": 1, "visual_feat_dim": 8, "visual_pos_dim": 4},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {"text_config": {"model_type": "llama", **_TEXT, "num_key_value_heads": 2},
         "vision_config": {"model_type": "clip_vision_model", **_VISION}, "image_token_index": IMAGE},
    ),
    "vilt": ("ViltModel", {**_TEXT, **_VISION}),
    "flava": (
        "FlavaModel",
        {"text_config": _TEXT, "image_config": _VISION, "multimodal_config": {**_VISION, "num_hidden_layers": 1},
         "projection_dim": 16, "hidden_size": 32},
    ),
    "idefics2": (
        "Idefics2Model",
        {"text_config": {"model_type": "mistral", **_TEXT, "num_key_value_heads": 2}, "vision_config": _VISION,
         "perceiver_config": {"hidden_size": 32, "resampler_n_latents": 3, "resampler_depth": 2,
                              "resampler_n_heads": 4, "resampler_head_dim": 8, "num_key_value_heads": 2},
         "image_token_id": IMAGE},
    ),
    "detr": (
        "DetrModel",
        {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "d_model": 32,
         "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1],
                             "layer_type": "basic", "out_features": ["stage2"]},
         "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 5},
    ),
    "time-series": (
        "TimeSeriesTransformerModel",
        {"prediction_length": 5, "context_length": 7, "lags_sequence": [1, 2], "d_model": 32, "encoder_layers": 2,
         "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
         "decoder_ffn_dim": 64, "num_time_features": 1},
    ),
    "perceiver": (
        "PerceiverModel",
        {"num_latents": 4, "d_latents": 32, "d_model": 16, "num_blocks": 1, "num_self_attends_per_block": 2,
         "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
    ),
}  # fmt: skip
ENCODER_DECODERS = ("t5", "bart", "marian", "mbart", "pegasus", "whisper")
EAGER_ONLY = ("lxmert", "vilt", "perceiver", "blip", "flava", "detr", "time-series")
CASES = [(f, b) for f in SETTINGS for b in ("sdpa", "eager") if b == "eager" or f not in EAGER_ONLY]


def model(family: str, backend: str = "sdpa", *, seed: int = 0) -> nn.Module:
    """A model of the family with weights drawn from the seed, in evaluation mode."""
    name, settings = SETTINGS[family]
    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    built: nn.Module = cls._from_config(cls.config_class(**settings), attn_implementation=backend)
    for parameter in built.parameters():
        if parameter.ndim == 2:  # as drawn, attention is nearly uniform and a wrong map would pass
            parameter.data.mul_(2.0 if family == "t5" else 4.0)  # T5 does not scale its scores down
    return built.eval()


def inputs(family: str, *, batch: int = 2) -> dict[str, Tensor]:
    """Seven source tokens (or 20 frames, or a 16 x 16 image), five decoder tokens."""
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 95, (batch, 7), generator=drawn)
    if family in ("time-series", "perceiver"):
        return (
            _series(batch, drawn) if family == "time-series" else {"inputs": torch.randn(batch, 9, 16, generator=drawn)}
        )
    if family in ENCODER_DECODERS:
        given = {"decoder_input_ids": torch.randint(5, 95, (batch, 5), generator=drawn)}
        if family == "whisper":
            return {"input_features": torch.randn(batch, 8, 20, generator=drawn), **given}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}
    if family == "lxmert":
        regions = torch.randn(batch, 6, 8, generator=drawn)
        return {"input_ids": ids, "visual_feats": regions, "visual_pos": torch.rand(batch, 6, 4, generator=drawn)}
    side = 32 if family == "detr" else 16
    pixels = torch.randn(batch, 3, side, side, generator=drawn)
    if family == "detr":
        return {"pixel_values": pixels}
    count = {"blip-2": 3, "llava": 16, "idefics2": 3}.get(family, 0)
    ids = torch.cat([ids[:, :2], torch.full((batch, count), IMAGE), ids[:, 2:]], dim=1)
    return {"input_ids": ids, "pixel_values": pixels[:, None] if family == "idefics2" else pixels}


def _series(batch: int, drawn: torch.Generator) -> dict[str, Tensor]:
    """Nine past values, two of them for the lags, and five to come."""
    return {
        "past_values": torch.randn(batch, 9, generator=drawn),
        "past_observed_mask": torch.ones(batch, 9),
        "past_time_features": torch.randn(batch, 9, 1, generator=drawn),
        "future_values": torch.randn(batch, 5, generator=drawn),
        "future_time_features": torch.randn(batch, 5, 1, generator=drawn),
    }
