"""Recorded generations of tiny models, and the full pass that they must equal."""

from __future__ import annotations

from typing import Any

import tiny
import torch
import transformers
from torch import Tensor

import attrace
from attrace.capture.generation import AssembledAttention

SETTINGS: dict[str, Any] = {
    "max_new_tokens": 6,
    "pad_token_id": 0,
    "eos_token_id": None,
    "return_dict_in_generate": True,
    "output_scores": True,
}
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
    "chunks": {"prefill_chunk_size": 3},
}


def decoder(family: str, backend: str = "sdpa") -> Any:
    if family != "gemma3":
        return tiny.model(family, backend)
    config = transformers.Gemma3TextConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, head_dim=8, sliding_window=4, max_position_embeddings=64, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation=backend)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(4.0)
    return model.eval()


def generated(model: Any, given: dict[str, Tensor], **settings: Any) -> tuple[attrace.Trace, Any]:
    """A recorded generation, checked to give what an unrecorded one does."""
    settings = {**SETTINGS, **settings}
    torch.manual_seed(3)
    plain = model.generate(**given, **settings)
    torch.manual_seed(3)
    with attrace.record(model) as trace:
        output = model.generate(**given, **settings)
    assert torch.equal(output.sequences, plain.sequences)
    for ours, theirs in zip(output.scores, plain.scores, strict=True):
        assert torch.equal(ours, theirs)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    return trace, output


def full_pass(model: Any, ids: Tensor, pad: int = 0) -> attrace.Trace:
    mask = torch.ones_like(ids[:, :-1])
    if pad:
        mask[-1, :pad] = 0
    with torch.no_grad():
        given = {"input_ids": ids[:, :-1], "attention_mask": mask, "use_cache": False}
        if pad:
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return attrace.trace(model, **given)


def check_rows(whole: attrace.Trace, expected: attrace.Trace, real: Tensor | None = None) -> None:
    """Every computed row of every layer is that of the full pass; causal rows end at the diagonal."""
    assert len(whole.ops) == len(expected.ops)
    for op, other in zip(whole.ops, expected.ops, strict=True):
        assert (op.name, op.kind, op.shape) == (other.name, other.kind, other.shape)
        rows = op.weights().transpose(1, 2)
        known = ~rows.isnan().flatten(2).any(2)
        if isinstance(op, AssembledAttention):
            assert torch.equal(known, ~op.missing)
        if real is not None:
            known &= real
        torch.testing.assert_close(rows[known], other.weights().transpose(1, 2)[known], atol=1e-5, rtol=0)


def encoder_decoder(name: str, backend: str) -> tuple[Any, dict[str, Tensor]]:
    sizes = {
        "vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 2,
        "pad_token_id": 0, "bos_token_id": 1,
    }  # fmt: skip
    given = tiny.inputs(pad=2, side="right")
    cls: Any
    if name == "t5":
        cls = transformers.T5ForConditionalGeneration
        config = transformers.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                       decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    elif name == "bart":
        cls, config = transformers.BartForConditionalGeneration, transformers.BartConfig(**sizes, eos_token_id=3)
    else:
        cls = transformers.WhisperForConditionalGeneration
        config = transformers.WhisperConfig(**sizes, eos_token_id=99, max_source_positions=10, num_mel_bins=8,
                                            suppress_tokens=None, begin_suppress_tokens=None)  # fmt: skip
        given = {"input_features": torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))}
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=backend)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(2.0)
    return model.eval(), given
