"""Tiny random models of every architecture that the installed transformers can build from a configuration alone.

A configuration is shrunk by the names of its settings, sub-configurations included; a table names the few types whose
settings must fit together in another way.  Where a shrunk one does not build, a gentler one is tried: fewer layers,
a small vocabulary, all widths as they are.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from tiny_models_table import CLASSES, GENTLE, OVERRIDES, WHOLE  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)


def enable_torchvision() -> None:
    """Let torchvision import beside a CPU build of torch: its operators are declared where they cannot be loaded.

    It may lie in a folder of its own in the environment (`make test` puts it there), out of the way of the rest.
    """
    folder = Path(sys.prefix) / "torchvision"
    if folder.is_dir():
        sys.path.append(str(folder))
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    text = (Path(found.origin).parent / "_meta_registrations.py").read_text()
    for name in sorted(set(re.findall(r'(?:register_fake|register_meta)\("(?:torchvision::)?(\w+)"', text))):
        try:
            _operators.define(f"{name}(Tensor x) -> Tensor")
        except RuntimeError:  # loaded after all
            return


_operators = torch.library.Library("torchvision", "FRAGMENT")
enable_torchvision()

import transformers  # noqa: E402
from transformers import PreTrainedConfig, PreTrainedModel  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES  # noqa: E402

transformers.logging.set_verbosity_error()

MAX_PARAMETERS = 100_000_000
"""A model that stays larger than this is not built."""


class NotBuildable(Exception):  # noqa: N818 (it is a result, not a fault)
    """No model of this type comes out of a configuration alone."""


# Which class stands for a type


def model_types() -> list[str]:
    return list(CONFIG_MAPPING_NAMES)


def class_name_of(model_type: str) -> str | None:
    """The class that the auto mappings name for a type, the base model first."""
    if model_type in CLASSES:
        return CLASSES[model_type]
    mappings = [n for n in dir(modeling_auto) if n.startswith("MODEL_") and n.endswith("MAPPING_NAMES")]
    for name in sorted(mappings, key=lambda n: n != "MODEL_MAPPING_NAMES"):
        found = getattr(modeling_auto, name).get(model_type)
        if found:
            return found if isinstance(found, str) else found[0]
    return None


def class_of(model_type: str, config_class: type) -> type[PreTrainedModel]:
    """The model class of a type: by the auto mappings, or the one whose configuration it is."""
    name = class_name_of(model_type)
    if name is not None:
        cls = getattr(transformers, name, None)
        if cls is None:
            module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
            cls = getattr(module, name)
        return cls
    package = importlib.import_module(config_class.__module__.rpartition(".")[0])
    files = sorted(Path(package.__path__[0]).glob("modeling_*.py"))
    modules = [importlib.import_module(f"{package.__name__}.{file.stem}") for file in files]
    if not modules:
        raise NotBuildable("no modelling file of its own")
    found = [
        c
        for module in modules
        for _, c in inspect.getmembers(module, inspect.isclass)
        if issubclass(c, PreTrainedModel) and c.__module__ == module.__name__ and c.config_class is config_class
        and "forward" in {k for m in c.__mro__ if m not in (nn.Module, PreTrainedModel) for k in vars(m)}
        and not c.__name__.endswith("PreTrainedModel")
    ]  # fmt: skip
    if not found:
        raise NotBuildable("the library has no model class for this configuration")
    return sorted(found, key=lambda c: (not c.__name__.endswith(("Model", "Encoder")), len(c.__name__)))[0]


# Shrinking

LAYERS = {
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth", "layers",
    "num_encoder_layers", "num_decoder_layers", "l_layers", "r_layers", "x_layers", "num_blocks", "resampler_depth",
    "decoder_num_hidden_layers", "conf_num_hidden_layers", "pred_num_hidden_layers", "text_encoder_num_layers",
    "num_self_attends_per_block", "memory_attention_num_layers", "decoder_num_layers", "encoder_num_hidden_layers",
    "num_layers_per_stack", "num_global_layers", "num_mel_attn_blocks", "speech_decoder_postnet_layers",
    "t2u_encoder_layers", "t2u_decoder_layers", "speech_encoder_layers", "num_pooler_layers",
}  # fmt: skip
WIDTHS = {
    "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "projection_dim", "out_hidden_size",
    "encoder_hidden_size", "decoder_hidden_size", "text_hidden_size", "output_dim", "output_hidden_size", "emb_dim",
    "project_dim", "pooler_hidden_size", "cross_hidden_size", "hidden_size_global", "backbone_hidden_size",
    "word_embed_proj_dim", "vision_hidden_size", "d_latents", "cross_attention_hidden_size", "input_embedding_size",
    "decoder_dim", "vision_output_dim", "projector_output_dim", "projector_input_dim", "pooler_output_size",
    "memory_attention_hidden_size", "memory_encoder_hidden_size", "memory_fuser_embed_dim", "text_encoder_width",
    "fpn_hidden_size", "thinker_hidden_size", "encoder_hidden_dim", "decoder_hidden_dim", "output_channels",
    "true_hidden_size", "lru_width", "visual_embedding_dim", "text_embed_dim", "embedding_dim", "audio_hidden_size",
    "pronunciation_embed_dim", "shape_embed_dim", "entity_emb_size", "token_size", "patch_embed_hidden_size",
    "output_embedding_size", "projection_size", "mask_downsampler_embed_dim", "task_encoder_hidden_dim",
    "class_embed_dim", "text_projection_in_dim", "text_projection_out_dim", "t2u_variance_predictor_embed_dim",
    "condition_dim", "speech_decoder_prenet_units", "descriptor_dim", "mask_feature_size", "fpn_feature_size",
    "mask_dim", "conv_dim_out", "adapter_in_dim", "adapter_out_dim", "projection_hidden_size", "pred_hidden_size",
    "mm_embed_dim", "output_proj_dims", "d_embed", "vocab_embed_dim", "image_token_embed_dim", "retrieval_vector_size",
}  # fmt: skip
INNER = {
    "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "mlp_dim", "moe_intermediate_size", "d_ff",
    "hidden_dim", "d_inner", "n_inner", "dim_feedforward", "shared_expert_intermediate_size", "ffn_hidden_size",
    "expert_ffn_hidden_size", "intermediate_size_mlp", "decoder_intermediate_size", "feed_forward_size",
    "memory_attention_feed_forward_hidden_size", "memory_fuser_intermediate_dim", "moe_shared_expert_intermediate_size",
    "shared_intermediate_size", "encoder_dim_feedforward", "decoder_dim_feedforward", "iou_head_hidden_dim",
    "encoder_feedforward_dim", "projector_hidden_size", "projection_intermediate_size", "projection_hidden_dim",
    "moe_hidden_size", "dense_intermediate_size", "shared_experts_intermediate_size", "merged_hidden_size",
    "projection_intermediate_dim", "classifier_proj_size", "t2u_encoder_ffn_dim", "t2u_decoder_ffn_dim",
    "speech_encoder_intermediate_size", "prompt_intermediate_size", "encoder_linear_units", "decoder_linear_units",
}  # fmt: skip
HEADS = {
    "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
    "attention_heads", "resampler_n_heads", "cross_num_attention_heads", "decoder_num_attention_heads",
    "num_encoder_attention_heads", "num_decoder_attention_heads", "encoder_num_attention_heads", "resampler_heads",
    "conf_num_attention_heads", "swa_num_attention_heads", "pred_num_attention_heads", "decoder_num_heads",
    "decoder_self_attention_heads", "decoder_cross_attention_heads", "prompt_num_attention_heads",
    "num_self_attention_heads", "num_cross_attention_heads", "n_mamba_heads", "t2u_encoder_attention_heads",
    "t2u_decoder_attention_heads", "speech_encoder_attention_heads", "attention_num_heads",
}  # fmt: skip
KEY_HEADS = {
    "num_key_value_heads", "cross_num_key_value_heads", "decoder_num_key_value_heads", "encoder_num_key_value_heads",
    "swa_num_key_value_heads", "num_kv_heads", "num_key_value_attention_heads",
}  # fmt: skip
HEAD_WIDTHS = {
    "head_dim", "d_kv", "attention_head_dim", "resampler_head_dim", "dim_head", "d_head", "attention_head_size",
    "cross_head_dim", "global_head_dim", "kv_channels", "query_pre_attn_scalar", "swa_head_dim", "resampler_dim_head",
    "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim", "linear_key_head_dim", "v_channels",
    "linear_value_head_dim", "linear_head_dim",
}  # fmt: skip
FIXED = {
    "vocab_size": 128, "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64, "n_ctx": 64,
    "max_target_positions": 64, "decoder_vocab_size": 128, "input_vocab_size": 128, "output_vocab_size": 128,
    "qk_head_dim": 32, "kv_lora_rank": 8, "q_lora_rank": 8, "o_lora_rank": 8, "index_n_heads": 2, "index_topk": 4,
    "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 2, "topk_group": 1, "zero_expert_num": 2,
    "top_k_experts": 2, "moe_top_k": 2, "num_expert_group": 2, "num_queries": 6, "num_query_tokens": 6,
    "num_latents": 6, "latent_query_num": 6,
    "resampler_n_latents": 6, "resampler_num_latents": 6, "sliding_window": 4, "first_k_dense_replace": 1,
    "num_bpe_labels": 50, "num_wordpiece_labels": 50, "entity_vocab_size": 50, "shape_vocab_size": 50,
    "pronunciation_vocab_size": 50, "text_encoder_vocab_size": 128, "codebook_size": 64, "num_labels": 2,
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "max_window_layers": 1, "char_vocab_size": 50,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_num_heads": 4, "mamba_head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4, "mamba_chunk_size": 4,
    "ssm_state_size": 8, "mamba_n_groups": 1, "audio_vocab_size": 64, "num_position_embeddings": 64,
    "unpadded_vocab_size": 100, "max_source_positions": 64, "image_size": 32, "patch_size": 8, "rotary_dim": 8,
    "local_attention": 4, "sliding_window_size": 4, "num_codebooks": 2, "num_quantizers": 2, "n_codebooks": 2,
    "num_pos_feats": 32, "n_groups": 1, "image_embedding_size": 4, "input_image_size": 32, "mask_input_channels": 4,
}  # fmt: skip
BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "attention_types", "no_rope_layers", "moe_layers",
            "full_attn_idxs", "layer_type_list", "attn_type_list", "num_attention_heads_per_layer", "mlp_only_layers",
            "num_key_value_heads_per_layer", "layers_types", "hybrid_override_pattern", "indexer_types",
            "compress_ratios", "hybrid_layer_ids", "attention_layers", "rope_scaling_layers", "kv_source_layers",
            "linear_attn_config", "sliding_windows", "moe_layer_freq", "compress_rates")  # fmt: skip
GENTLE_NAMES = LAYERS | {
    n for n in FIXED if "vocab" in n or "expert" in n or n in ("codebook_size", "entity_vocab_size")
}


SECTIONED = re.compile(r"qwen2_vl|qwen2_5_vl|qwen2_5_omni|qwen3_omni|glm4v|glm46v|glmga|glm_image|glm_ocr|ernie4_5_vl")
"""Types whose rotary sections have a default in the code, for their own head size."""

FILLED = {
    "head_dim": 16, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "top_k_experts": 2, "moe_top_k": 2, "vocab_size": 128, "prediction_length": 4, "context_length": 12,
    "expert_dim": 16, "initializer_range": 0.02, "kv_lora_rank": 8, "topk_method": "greedy",
}  # fmt: skip
"""What is left open and yet needed."""


def shrink(config: PreTrainedConfig, *, gentle: bool = False, filled: bool = False) -> dict[str, Any]:
    """The settings of a configuration that make it tiny, nested where it has sub-configurations."""
    small: dict[str, Any] = {}
    given = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    heads = next((v for k, v in given.items() if k in HEADS and isinstance(v, int)), None)
    for name, value in given.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = shrink(value, gentle=gentle, filled=filled)
            continue
        if value is None and filled and name in FILLED:
            small[name] = FILLED[name]
        if isinstance(value, bool) or value is None:
            continue
        new = value
        if isinstance(value, int):
            if name in LAYERS:
                new = min(value, 2)
            elif gentle and name not in GENTLE_NAMES:
                pass
            elif name in FIXED:
                new = min(value, FIXED[name])
            elif name in WIDTHS:
                new = min(value, 64)
            elif name in INNER:
                new = min(value, 96)
            elif name in HEADS:
                new = min(value, 4)
            elif name in KEY_HEADS:
                new = min(value, 4) if value in (heads, 1) else 2
            elif name in HEAD_WIDTHS:
                new = min(value, 16)
            if name.endswith(("_token_id", "_token_index", "_id", "_token")) and value >= 128:
                new = 100 + sum(map(ord, name)) % 25  # one of the upper tokens, the same for the same name
        elif isinstance(value, list | tuple) and name in BY_LAYER:
            new = type(value)(varied(value))
        if name.endswith("_token_id") and isinstance(value, list | tuple):
            new = [v if v < 128 else 101 for v in value]
        elif isinstance(value, dict) and not gentle and name == "rope_parameters":
            sectioned = "mrope_section" in str(value) or SECTIONED.search(config.model_type)
            new = with_sections(value) if sectioned else value
        if name == "embed_dim" and isinstance(given.get("num_heads"), list | tuple):
            new = value if gentle else 8 * given["num_heads"][0]
        if new != value or name in BY_LAYER:
            small[name] = new
    return small


def with_sections(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary sections for a head of 16: what they sum to is half of its rotated part."""
    if any(isinstance(v, dict) for v in rope.values()):
        return {k: with_sections(v) if isinstance(v, dict) else v for k, v in rope.items()}
    half = int(16 * (rope.get("partial_rotary_factor") or 1.0)) // 2
    quarter = max(1, half // 4)
    sections = [half - 2 * quarter, quarter, quarter] if half > 2 else [1, 1, 0]
    if len(rope.get("mrope_section", ())) == 4:
        sections = [half - 3 * quarter, quarter, quarter, quarter]
    return {**rope, "mrope_section": sections}


def varied(by_layer: Any) -> Any:
    """Two layers' entries, of different kinds where there are any, one with attention among them."""
    first = by_layer[0] if len(by_layer) else None
    others = [v for v in by_layer if v != first]
    other = next((v for v in others if "full" in str(v) or v == "attention"), others[0] if others else first)
    return [first, other][: len(by_layer)]


def merged(settings: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    out = dict(settings)
    for name, value in extra.items():
        nested = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = merged(out[name], value) if nested else value
    return out


def rebuilt(config: PreTrainedConfig, settings: dict[str, Any], *, whole: bool = False) -> PreTrainedConfig:
    """The configuration made anew with the given settings, so that what depends on them is derived again.

    `whole` keeps what a parent configuration has set otherwise than this one's own defaults.
    """
    derived = {"layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "moe_layers"}
    plain = {k: v for k, v in settings.items() if k not in derived}
    attempts = [settings, plain]
    if whole:
        kept_settings = {
            k: v for k, v in config.to_diff_dict().items()
            if k not in ("model_type", "transformers_version", "dtype", "architectures") and not isinstance(v, dict)
        }  # fmt: skip
        subs = {k: {} for k, v in vars(config).items() if isinstance(v, PreTrainedConfig)}
        attempts = [{**kept_settings, **subs, **a} for a in attempts] + attempts
    for attempt in attempts:
        try:
            return type(config)(**_filled(config, attempt, whole))
        except Exception as error:
            kept = error
    raise NotBuildable(f"no small configuration: {first_line(kept)}")


def _filled(config: PreTrainedConfig, settings: dict[str, Any], whole: bool) -> dict[str, Any]:
    out = {}
    for name, value in settings.items():
        sub = vars(config).get(name)
        if isinstance(sub, PreTrainedConfig) and isinstance(value, dict):
            made = rebuilt(sub, value, whole=whole)
            out[name] = made if not isinstance(sub, dict) else value
        else:
            out[name] = value
    return out


def configurations(model_type: str) -> Iterator[PreTrainedConfig]:
    """Small configurations of a type, the smallest first."""
    config_class = CONFIG_MAPPING[model_type]
    table = OVERRIDES.get(model_type, {})
    base = config_class(**table.get("__base__", {}))
    extra = {k: v for k, v in table.items() if k != "__base__"}
    steps = [{"gentle": True}] if model_type in GENTLE else [{}, {"filled": True}, {"gentle": True}]
    if model_type in WHOLE:
        steps = [{}]
    kept: Exception | None = None
    made = 0
    seen: list[dict[str, Any]] = []
    for step in steps:
        settings = merged(shrink(base, **step), extra)
        if settings in seen:
            continue
        seen.append(settings)
        try:
            for whole in (True,) if model_type in WHOLE else (False, True):
                if not whole or any(isinstance(v, PreTrainedConfig) for v in vars(base).values()):
                    yield rebuilt(base, settings, whole=whole)
                    made += 1
        except NotBuildable as error:
            kept = error
    if not made and kept:
        raise kept


# Building


def first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def built(cls: type[PreTrainedModel], config: PreTrainedConfig, backend: str, seed: int = 0) -> PreTrainedModel:
    """A model with weights drawn from the seed, in evaluation mode, its attention far from uniform."""
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise NotBuildable(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=backend, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            wide = 1.0 if "embed" in name else 1.5 * parameter.shape[1] ** -0.5
            parameter.data.normal_(generator=generator).mul_(wide)
        elif not parameter.numel():
            pass
        elif (
            not bool(parameter.isfinite().all())
            or float(parameter.detach().abs().max()) > 1e3
            or (parameter.ndim and not bool(parameter.any()) and parameter.ndim != 1)
        ):
            parameter.data.normal_(generator=generator).mul_(0.2)
    return model.eval()


def backends(cls: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[str, ...]:
    return ("sdpa", "eager")
