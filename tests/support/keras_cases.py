"""Small random Keras and KerasHub models, and what their attention layers do by identity-value probing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras
import numpy as np
from keras_hub import models
from numpy.typing import NDArray

TOKENS = 6
REAL = 4
"""Tokens of the second row that are not padding."""

_BASE = {
    "vocabulary_size": 50,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 16,
}
_PLACED = {**_BASE, "max_sequence_length": 16}
_GROUPED = {
    "vocabulary_size": 50,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 32,
    "intermediate_dim": 16,
}
_EXPERTS = {**_GROUPED, "num_experts": 2}
_IMAGE = {"image_shape": (16, 16, 3), "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16}

# Family -> backbone, settings, kind of input.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertBackbone", _PLACED, "segments"),
    "distilbert": ("DistilBertBackbone", _PLACED, "text"),
    "roberta": ("RobertaBackbone", _PLACED, "text"),
    "albert": ("AlbertBackbone", {**_PLACED, "embedding_dim": 8}, "segments"),
    "electra": (
        "ElectraBackbone",
        {**{k: v for k, v in _PLACED.items() if k != "vocabulary_size"}, "vocab_size": 50, "embedding_dim": 16},
        "segments",
    ),
    "deberta-v3": ("DebertaV3Backbone", {**_PLACED, "bucket_size": 8}, "text"),
    "xlnet": ("XLNetBackbone", _BASE, "segments"),
    "gpt2": ("GPT2Backbone", _PLACED, "text"),
    "gpt-neox": ("GPTNeoXBackbone", _PLACED, "text"),
    "opt": ("OPTBackbone", _PLACED, "text"),
    "bloom": ("BloomBackbone", _BASE, "text"),
    "falcon": (
        "FalconBackbone",
        {**{k: v for k, v in _BASE.items() if k != "num_heads"}, "num_attention_heads": 2},
        "text",
    ),
    "llama": ("LlamaBackbone", _GROUPED, "text"),
    "llama3": ("Llama3Backbone", _GROUPED, "text"),
    "mistral": ("MistralBackbone", {**_GROUPED, "sliding_window": 3}, "text"),
    "mixtral": ("MixtralBackbone", {**_EXPERTS, "sliding_window": 3}, "text"),
    "gemma": ("GemmaBackbone", {**_GROUPED, "head_dim": 8}, "text"),
    "gemma2": (
        "GemmaBackbone",
        {**_GROUPED, "head_dim": 8, "attention_logit_soft_cap": 5.0, "use_sliding_window_attention": True,
         "sliding_window_size": 3},
        "text",
    ),
    "phi3": ("Phi3Backbone", _GROUPED, "text"),
    "qwen2": ("QwenBackbone", _GROUPED, "text"),
    "qwen3": ("Qwen3Backbone", {**_GROUPED, "head_dim": 8}, "text"),
    "qwen2-moe": (
        "QwenMoeBackbone",
        {**_EXPERTS, "moe_intermediate_dim": 8, "shared_expert_intermediate_dim": 8, "top_k": 1},
        "text",
    ),
    "gpt-oss": ("GptOssBackbone", {**_EXPERTS, "head_dim": 8, "top_k": 2, "sliding_window": 3}, "text"),
    "t5": ("T5Backbone", {**_BASE, "key_value_dim": 8}, "pair"),
    "bart": ("BartBackbone", _PLACED, "pair"),
    "whisper": (
        "WhisperBackbone",
        {**_BASE, "num_mels": 8, "max_encoder_sequence_length": 12, "max_decoder_sequence_length": 16},
        "speech",
    ),
    "vit": ("ViTBackbone", {**_IMAGE, "mlp_dim": 16}, "image"),
    "deit": ("DeiTBackbone", {**_IMAGE, "intermediate_dim": 16}, "image"),
    "dinov2": ("DINOV2Backbone", {**_IMAGE, "intermediate_dim": 16}, "images"),
    "swin": (
        "SwinTransformerBackbone",
        {"image_shape": (32, 32, 3), "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "patch_size": 4,
         "window_size": 2},
        "large image",
    ),
}  # fmt: skip
if keras.backend.backend() == "jax":  # compiles each operator for each shape: one family for each way to attend
    _JAX = ("bert", "albert", "deberta-v3", "gpt2", "llama", "gemma2", "gpt-oss", "t5", "whisper", "vit", "swin")
    FAMILIES = {family: FAMILIES[family] for family in _JAX}
SINKS = {"gpt-oss"}
TEXTS = [f for f, (_, _, kind) in FAMILIES.items() if kind in ("text", "segments")]
RIGHT_PADDED = [f for f in TEXTS if f != "xlnet"]
"""Families that answer the same for a text and for the text padded at its end."""


@cache
def backbone(family: str) -> Any:
    """A model of the family; weights drawn wider than by default, so that maps are not flat."""
    name, settings, _ = FAMILIES[family]
    keras.utils.set_random_seed(0)
    model = getattr(models, name)(**settings)
    for variable in model.trainable_variables:
        if len(variable.shape) > 1:
            variable.assign(variable * 4)
    return model


def inputs(family: str, *, item: int | None = None) -> Any:
    """Two inputs, the second padded where the family has a mask; or one of them alone, without its padding."""
    rng = np.random.default_rng(1)
    ids = rng.integers(2, 50, (2, TOKENS))
    mask = np.arange(TOKENS) < np.array([[TOKENS], [REAL]])
    ids = np.where(mask, ids, 0)
    images = rng.random((2, 32, 32, 3), np.float32)
    cut = slice(None) if item is None else slice(item, item + 1)
    length = REAL if item == 1 else TOKENS
    text = {"token_ids": ids[cut, :length], "padding_mask": mask[cut, :length].astype("int32")}
    kind = FAMILIES[family][2]
    return {
        "text": text,
        "segments": {**text, "segment_ids": np.zeros_like(text["token_ids"])},
        "pair": {
            "encoder_token_ids": ids,
            "encoder_padding_mask": mask.astype("int32"),
            "decoder_token_ids": ids[:, :5],
            "decoder_padding_mask": mask[:, :5].astype("int32"),
        },
        "speech": {
            "encoder_features": rng.random((2, 12, 8), np.float32),
            "decoder_token_ids": text["token_ids"],
            "decoder_padding_mask": text["padding_mask"],
        },
        "image": images[cut, :16, :16],
        "images": {"images": images[cut, :16, :16]},
        "large image": images[cut],
    }[kind]


def as_numpy(x: Any) -> NDArray[Any]:
    """A copy of one array (Keras' own conversion warns of NumPy 2 on PyTorch)."""
    return np.array(x.detach().numpy() if hasattr(x, "detach") else x)


def numbers(x: Any) -> list[NDArray[Any]]:
    """All arrays of a model's output, as NumPy."""
    return [as_numpy(part) for part in keras.tree.flatten(x)]


def layer_of(model: Any, name: str) -> Any:
    """The layer that a path of layer names leads to."""
    for part in name.split("/"):
        model = next(layer for layer in model._flatten_layers(include_self=False) if layer.name == part)
    return model


VALUES = ("_value_dense", "value_dense", "v_dense", "value_projector")
BOTH = ("_qkv_dense", "qkv")
OUTPUTS = ("_output_dense", "output_dense", "o_dense", "output_projector", "proj")


@contextmanager
def probe(layer: Any, heads: int) -> Iterator[list[NDArray[Any]]]:
    """Each token's value becomes its own unit vector: then the layer's context is its map.

    Yields a list that the contexts, (B, H, Q, T) cut to T by the caller, are added to while the layer runs.
    """
    contexts: list[NDArray[Any]] = []
    value = next((getattr(layer, n) for n in VALUES if hasattr(layer, n)), None)
    both = value is None
    value = next(getattr(layer, n) for n in BOTH if hasattr(layer, n)) if both else value
    output = next(getattr(layer, n) for n in OUTPUTS if hasattr(layer, n))
    make, project = value.call, output.call

    def units(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        found = as_numpy(made)
        part = found[..., -found.shape[-1] // 3 :] if both else found
        split = part.reshape(*part.shape[:2], -1, part.shape[-1] if part.ndim == 4 else part.shape[-1] // heads)
        assert split.shape[3] >= split.shape[1], "more tokens than the heads have room for"
        split[:] = np.eye(split.shape[1], split.shape[3])[None, :, None, :]
        part[:] = split.reshape(part.shape)
        return keras.ops.convert_to_tensor(found)

    def read(context: Any, *args: Any, **kwargs: Any) -> Any:
        found = as_numpy(context)
        contexts.append(found.reshape(*found.shape[:2], heads, -1).swapaxes(1, 2))
        return project(context, *args, **kwargs)

    value.call, output.call = units, read
    try:
        yield contexts
    finally:
        value.call, output.call = make, project


def returned(layer: Any, *args: Any, **kwargs: Any) -> NDArray[Any]:
    """The scores that one of Keras' own layers returns."""
    _, scores = layer(*args, **kwargs, return_attention_scores=True)
    return as_numpy(scores)
