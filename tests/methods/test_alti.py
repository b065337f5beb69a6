"""The method alti: the reference's product of contribution matrices, read at the target's row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from attrace import record
from attrace.errors import CaptureError
from attrace.methods.alti import alti
from attrace.methods.registry import METHODS
from attrace.methods.rollout import collapse
from attrace.ops.contributions.naive import Norm, contributions
from attrace.types import Options

N = 7


@dataclass
class Asked:
    """A subject without a text: what alti reads of one."""

    trace: Any
    readout: np.ndarray


def small(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 8}
    return small(BertModel(BertConfig(vocab_size=20, max_position_embeddings=9, **sizes)))


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 8}
    return small(LlamaModel(LlamaConfig(vocab_size=20, num_key_value_heads=2, **sizes)))


def asked(model: nn.Module, readout: list[float], *, values: bool = True) -> Asked:
    with record(model, values=values) as trace:
        model(input_ids=torch.arange(2, 2 + N)[None])
    return Asked(trace, np.array(readout))


def bert_matrices(model: nn.Module) -> list[np.ndarray]:
    """Each layer's contributions by the reference, from hidden states and parameters alone."""
    output = model(input_ids=torch.arange(2, 2 + N)[None], output_hidden_states=True)
    matrices = []
    for layer, x in zip(model.encoder.layer, output.hidden_states, strict=False):
        part, after = layer.attention.self, layer.attention.output
        q, k, v = (split(f(x), 3) for f in (part.query, part.key, part.value))
        weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        norm = Norm(after.LayerNorm.weight.numpy(), after.LayerNorm.bias.numpy(), after.LayerNorm.eps)
        kwargs = {"residual": x.numpy(), "bias": after.dense.bias.numpy(), "norm": norm}
        matrices.append(contributions(weights.numpy(), v.numpy(), after.dense.weight.numpy(), **kwargs)[0])
    return matrices


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def test_it_is_the_product_of_the_references_matrices() -> None:
    model, readout = bert(), [0, 0.25, 0, 0, 0.75, 0, 0]
    first, second, third = bert_matrices(model)
    found = alti(asked(model, readout), Options())
    np.testing.assert_allclose(found.values, np.array(readout) @ third @ second @ first, atol=1e-6)
    assert not found.signed
    assert found.unit == "share of mass"


@pytest.mark.parametrize("layers", [(0,), (1, 2), (-1,)])
def test_it_honours_layers(layers: tuple[int, ...]) -> None:
    model, readout = bert(), list(np.eye(N)[3])
    expected = np.eye(N)[3]
    for layer in sorted(layers, reverse=True):
        expected = expected @ bert_matrices(model)[layer]
    found = alti(asked(model, readout), Options(layers=layers)).values
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("model", [bert, llama])
def test_the_mass_is_one_and_causal_models_see_no_later_token(model: Any) -> None:
    found = alti(asked(model(), list(np.eye(N)[4])), Options())
    assert found.values.min() >= 0
    assert found.values.sum() + found.lost_mass + found.sink_mass == pytest.approx(1, abs=1e-6)
    assert (found.values[5:].max() == 0) == (model is llama)


def test_a_collapse_is_found() -> None:
    """Where the first token's value drowns every other, all positions end with it."""
    model = llama()
    weight = model.embed_tokens.weight
    weight.mul_(0.01)
    for layer in model.layers:
        layer.self_attn.q_proj.weight.zero_()  # uniform attention
        layer.self_attn.o_proj.weight.mul_(1000)
        layer.mlp.down_proj.weight.zero_()
    with record(model, values=True) as trace:
        model(input_ids=torch.arange(2, 2 + N)[None])
    for op in trace.ops:
        op.block.value[:, :, 1:] *= 0.001
        op.block._versions = op.block._now()
    found = alti(Asked(trace, np.eye(N)[-1]), Options())
    assert found.sink is not None
    assert found.sink.index == 0
    assert found.sink.share == pytest.approx(found.values[0])


def test_no_collapse_where_other_positions_keep_their_own() -> None:
    values = np.array([0.95, 0.02, 0.02, 0.01])
    assert collapse(values, lambda _: np.array([1.0, 0.1, 0.1, 0.95])) is None
    found = collapse(values, lambda _: np.array([1.0, 0.95, 0.92, 0.95]))
    assert found is not None
    assert found.index == 0


def test_a_subject_without_detail_is_an_error() -> None:
    with pytest.raises(CaptureError, match="values=True"):
        alti(asked(bert(), list(np.eye(N)[0]), values=False), Options())


def test_it_is_in_the_registry() -> None:
    assert METHODS["alti"].run is alti
    assert METHODS["alti"].uses == ("layers",)
