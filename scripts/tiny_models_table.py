"""What the generic shrinking of `tiny_models` cannot know: the few types whose settings must fit together otherwise."""

from __future__ import annotations

from typing import Any

CLASSES: dict[str, str] = {
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}
"""Types whose own auto mapping names no runnable base model."""

GENTLE: set[str] = set()
"""Types that keep their widths."""

SERIES = {"prediction_length": 4, "context_length": 12, "num_time_features": 2}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}
ONE_STAGE = {**RESNET, "out_features": ["stage4"]}


SHIFTED = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
BY_KIND = {"full_attention": ROPE, "sliding_attention": ROPE}


def with_backbone(**settings: Any) -> dict[str, Any]:
    """A convolutional backbone of the library in the place of one that would be fetched."""
    return {"__base__": {"backbone_config": settings, "backbone": None, "use_timm_backbone": False}}


WHOLE: set[str] = set()
"""Types whose parts must keep what the whole configuration has set in them."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "autoformer": SERIES,
    "informer": SERIES,
    "time_series_transformer": SERIES,
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": {"num_expert_group": 2},
    "blt": {"encoder_hash_byte_group_vocab": 200},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "detr": with_backbone(**ONE_STAGE),
    "conditional_detr": with_backbone(**ONE_STAGE),
    "dab-detr": with_backbone(**ONE_STAGE),
    "deformable_detr": with_backbone(**RESNET),
    "table-transformer": with_backbone(**ONE_STAGE),
    "cohere_compass_text": {"rope_parameters": BY_KIND},
    "cohere_compass": {"text_config": {"rope_parameters": BY_KIND}},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "emu3": {"vocabulary_map": {"<image>": 100, "<|extra_200|>": 101}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "paligemma": {"text_config": {"num_key_value_heads": 4}},
    "glm5_next_text": {"index_kpool": 2},
    "glm5_next": {"text_config": {"index_kpool": 2}},
    "qwen4_exp_text": {"indexer_budget": 8, "indexer_compress_ratio": 2},
    "qwen4_exp": {"text_config": {"indexer_budget": 8, "indexer_compress_ratio": 2}},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "sam2": {"vision_config": {"backbone_config": {"hidden_size": 96}}},
    "sam2_video": {"vision_config": {"backbone_config": {"hidden_size": 96}}},
    "swin": SHIFTED,
    "swinv2": SHIFTED,
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 24},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 192},
    "ernie4_5_vl_moe_text": {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
    "blip-2": {"text_config": {"model_type": "opt"}},
    "chmv2": {"backbone_config": {"out_indices": [1, 1, 1, 1]}},
    "llama4_vision_model": {"projector_input_dim": 64, "vision_output_dim": 64, "intermediate_size": 256},
}  # fmt: skip
