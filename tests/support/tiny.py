"""Tiny random models built from their configurations: one of each family, no weights to load."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import attrace

BASE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_GROUPED = {**BASE, "num_key_value_heads": 2}
_LATENT = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", BASE),
    "roberta": ("RobertaForMaskedLM", BASE),
    "albert": ("AlbertForMaskedLM", {**BASE, "embedding_size": 16}),
    "xlm-roberta": ("XLMRobertaForMaskedLM", BASE),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    "electra": ("ElectraForSequenceClassification", {**BASE, "embedding_size": 16}),
    "mpnet": ("MPNetForMaskedLM", BASE),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        {**BASE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**BASE, "pad_token_id": 0, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2,
         "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "gpt2-classifier": (
        "GPT2ForSequenceClassification",
        {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0,
         "pad_token_id": 0},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", BASE),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 3}),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "phi3": ("Phi3ForCausalLM", {**_GROUPED, "pad_token_id": 0}),
    "olmo": ("OlmoForCausalLM", _GROUPED),
    "gemma3": ("Gemma3ForCausalLM", {**_GROUPED, "head_dim": 8, "sliding_window": 4}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**_GROUPED, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 5.0},
    ),
    "falcon": (
        "FalconForCausalLM",
        {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gpt_oss": ("GptOssForCausalLM", {**_GROUPED, "num_local_experts": 4, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**BASE, **_LATENT}),
    "xglm": (
        "XGLMForCausalLM",
        {"vocab_size": 100, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
    ),
}  # fmt: skip
EAGER_ONLY = {"mpnet", "deberta-v2", "gemma2", "bloom", "gpt_oss", "xglm"}
SINKS = {"gpt_oss"}
POSITIONED = {"bert", "albert", "electra", "gpt2", "gpt2-classifier"}
"""Families with learned positions that take position_ids."""
COUNTED = {"roberta", "xlm-roberta", "distilbert", "mpnet", "deberta-v2", "xglm"}
"""Families whose positions start at the padding or take no position_ids: padded on the left they answer otherwise."""
CASES = [(f, b) for f in FAMILIES for b in ("sdpa", "eager") if b == "eager" or f not in EAGER_ONLY]


def model(family: str, backend: str = "sdpa", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of the family with weights drawn from the seed, in evaluation mode."""
    name, settings = FAMILIES[family]
    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    built: nn.Module = cls._from_config(cls.config_class(**settings), attn_implementation=backend, dtype=dtype)
    # Weights as drawn are so small that attention is nearly uniform and a wrong map would pass.
    for parameter in built.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(4.0)
    return built.eval()


def inputs(*, batch: int = 2, length: int = 7, pad: int = 0, side: str = "left", seed: int = 1) -> dict[str, Tensor]:
    """Random tokens; the last row of the batch is padded by `pad` tokens on the given side."""
    ids = torch.randint(5, 95, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if pad:
        mask[-1, slice(0, pad) if side == "left" else slice(length - pad, length)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def row(batch: dict[str, Tensor], item: int) -> dict[str, Tensor]:
    """One row of a batch by itself, without its padding."""
    real = batch["attention_mask"][item].bool()
    return {"input_ids": batch["input_ids"][item : item + 1, real],
            "attention_mask": batch["attention_mask"][item : item + 1, real]}  # fmt: skip


def traced(built: nn.Module, given: dict[str, Tensor]) -> attrace.Trace:
    """One recorded run without gradients."""
    with torch.no_grad():
        return attrace.trace(built, **given)
