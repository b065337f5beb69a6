"""What the generic shrinking of `tiny_models` cannot know: the few types whose settings must fit together otherwise."""

from __future__ import annotations

from typing import Any

CLASSES: dict[str, str] = {}
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


def with_backbone(**settings: Any) -> dict[str, Any]:
    """A convolutional backbone of the library in the place of one that would be fetched."""
    return {"__base__": {"backbone_config": settings, "backbone": None, "use_timm_backbone": False}}


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
}
