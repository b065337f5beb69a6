"""Public faults of masks, precision, sizes and devices (the ids are those of the project's list of reports)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import seeing
import tiny
import torch
import transformers
from tiny import traced
from torch import Tensor, nn

import attrace


class Fused(nn.Module):
    """One head or several on (B, H, n, D), with a mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("asked", [True, False])
def test_a_head_in_which_all_is_masked(asked: bool) -> None:  # rep-masks-emptyrow-1
    """The module itself gives NaN where weights are asked for; the record is of what it does, or says so."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x, attn_mask=mask, need_weights=asked)[0]
            return out

    torch.manual_seed(0)
    model, x = Module(), torch.randn(1, 3, 8)
    mask = torch.zeros(2, 3, 3, dtype=torch.bool)
    mask[1] = True
    with torch.no_grad():
        plain = model(x, mask)
        trace = attrace.trace(model, x, mask)
    assert torch.equal(trace.output.nan_to_num(7.0), plain.nan_to_num(7.0))
    if plain.isnan().any():  # the model's own fault is named, not drawn
        with pytest.raises(attrace.errors.NonFiniteError, match=r"NaN in layer 0 \(attention\), token 0"):
            trace.rollout()
    else:
        weights = trace.ops[0].weights()
        assert (weights[0, 1] == 0).all()
        torch.testing.assert_close(weights[0, 0].sum(-1), torch.ones(3))
        assert trace.rollout().isfinite().all()


@pytest.mark.parametrize("asked", [True, False])
def test_a_long_band_that_hides_old_keys(asked: bool) -> None:  # rep-masks-emptyrow-2
    n, width = 600, 50
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    ahead = torch.arange(n)[:, None] - torch.arange(n)[None]
    hidden = (ahead < 0) | (ahead >= width)
    x = torch.randn(1, n, 8, generator=torch.Generator().manual_seed(0))

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x, attn_mask=hidden, need_weights=asked)[0]
            return out

    weights = traced(Module(), {"x": x}).ops[0].weights()
    assert (weights[:, :, hidden] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, n))


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_padded_batch_in_half_precision(backend: str) -> None:  # rep-masks-padding-1
    model = tiny.model("bert", backend, dtype=torch.bfloat16)
    ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    together = traced(model, {"input_ids": ids, "attention_mask": mask})
    for item, count in ((0, 3), (1, 1)):
        alone = traced(
            model, {"input_ids": ids[item : item + 1, :count], "attention_mask": mask[item : item + 1, :count]}
        )
        for op, single in zip(together.ops, alone.ops, strict=True):
            found = op.weights()[item]
            torch.testing.assert_close(found[:, :count, :count], single.weights()[0], atol=2e-2, rtol=0)
            assert (found[:, :count, count:] == 0).all()
        row = together.rollout(target=0)[item]
        assert row.isfinite().all()
        assert (row[count:] == 0).all()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [2, 3])
def test_a_window_is_as_wide_as_the_models(window: int, backend: str) -> None:  # rep-masks-window-1, attn-window-1
    config = transformers.MistralConfig(**tiny.BASE, num_key_value_heads=2, sliding_window=window)
    torch.manual_seed(0)
    model = transformers.MistralModel._from_config(config, attn_implementation=backend).eval()
    model.layers[0].self_attn.q_proj.weight.data.zero_()  # equal scores: uniform over what is visible
    weights = traced(model, {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}).ops[0].weights()
    back = torch.arange(5)[:, None] - torch.arange(5)[None]
    visible = ((back >= 0) & (back < window)).float()
    torch.testing.assert_close(weights, (visible / visible.sum(-1, keepdim=True)).expand_as(weights))


def test_sinks_keep_what_they_take() -> None:  # rep-masks-window-2, norm-sink-1
    class Sink(nn.Module):
        num_heads = 1

        def forward(self, scores: Tensor, sink: Tensor) -> Tensor:
            weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
            return weights @ torch.eye(3)[None, None]

    scores = torch.tensor([1.0, 2.0, 3.0]).expand(1, 1, 3, 3)
    trace = traced(Sink(), {"scores": scores, "sink": torch.full((1, 1, 3, 1), 2.0)})
    expected = torch.tensor([0.072329488129, 0.196611933241, 0.534446645389])
    torch.testing.assert_close(trace.ops[0].weights()[0, 0, 0], expected, atol=1e-6, rtol=0)
    for normalize, mass in ((None, 1 - 0.196611933241), (True, 1.0)):
        found = trace.rollout(target=0, residual=0.0, normalize=normalize)
        assert float(found.sum()) == pytest.approx(mass, abs=1e-6)


@pytest.mark.parametrize(
    ("pixels", "patch", "registers", "grid", "tokens"),
    [
        ((96, 128), 16, 0, (6, 8), 49),  # rep-vision-rect-1
        ((416, 416), 14, 4, (29, 29), 846),  # rep-vision-prefix-1: 841 patches, a class token, four registers
        ((64, 64), 4, 0, (16, 16), 257),  # rep-vision-rect-2: not the 14 x 14 that others assume
        ((224, 224), 32, 0, (7, 7), 50),  # rep-vision-rect-3
    ],
)
def test_grids_come_from_the_run(
    pixels: tuple[int, int], patch: int, registers: int, grid: tuple[int, int], tokens: int
) -> None:
    size: dict[str, Any] = {
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8,
        "image_size": pixels, "patch_size": patch,
    }  # fmt: skip
    if registers:
        config = transformers.Dinov2WithRegistersConfig(
            **{**size, "image_size": 14 * patch}, mlp_ratio=1, num_register_tokens=registers
        )
        model = seeing.hugging("Dinov2WithRegistersModel", config)().eval()
    else:
        model = seeing.hugging("ViTModel", transformers.ViTConfig(**size))().eval()
    trace = traced(model, {"pixel_values": torch.randn(1, 3, *pixels)})
    found = trace.geometry.grid
    assert ((found.height, found.width), len(found), len(found.prefix)) == (grid, tokens, 1 + registers)
    assert trace.ops[0].shape[2] == tokens


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_the_users(training: bool) -> None:  # rep-devices-mode-1
    model, given = tiny.model("bert").train(training), tiny.inputs()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    modes = [part.training for part in model.modules()]
    first, second = (attrace.trace(model, **given) for _ in range(2))
    assert torch.equal(first.rollout(), second.rollout())
    broken = copy.deepcopy(model)
    broken.bert.encoder.layer[1].forward = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        attrace.trace(broken, **given)
    assert [part.training for part in model.modules()] == modes == [part.training for part in broken.modules()]
