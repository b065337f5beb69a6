"""Windowed attention over the whole grid, against loops over windows and against the blocks themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import seeing
import timm
import torch
import torchvision
import transformers
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from seeing import hugging
from torch import Tensor, nn

import attrace
from attrace.capture.windows import PADDING, GridAttention, Merging, window_places
from attrace.errors import CaptureError, ShapeError

Swin = torchvision.models.SwinTransformer
swin = torchvision.models.swin_transformer
HF = {"patch_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [3, 3], "image_size": 32}
TIMM = {"embed_dim": 12, "depths": (2, 2), "num_heads": (3, 3)}


@dataclass(frozen=True)
class Windowed:
    make: Callable[[], nn.Module]
    image: tuple[int, int]
    window: tuple[int, int]
    stages: tuple[tuple[int, int], ...]
    """The grid of each block."""
    shifts: tuple[int | tuple[int, int], ...]
    """By hand, for each block; one for both sides, or two."""
    block: Callable[[nn.Module, str, Tensor], Tensor]
    """Runs the block around a call on its own, (B, h, w, C) -> (B, h, w, C)."""
    pads_first: bool = True

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.data.mul_(4.0)
            elif "norm" in name and name.endswith("weight"):  # timm's blocks begin as the identity
                parameter.data.fill_(1.0)
        return model

    def traced(self, model: nn.Module, batch: int = 2) -> attrace.Trace:
        images = torch.randn(batch, 3, *self.image, generator=seeing.seeded(5)).to(next(model.parameters()).dtype)
        with torch.no_grad():
            return attrace.trace(model, images)


def hugging_block(model: nn.Module, name: str, x: Tensor) -> Tensor:
    block = model.get_submodule(name.split(".attention", maxsplit=1)[0])
    made: Any = block(x.flatten(1, 2), x.shape[1:3])
    return made[0].unflatten(1, x.shape[1:3])


def plain_block(model: nn.Module, name: str, x: Tensor) -> Tensor:
    made: Tensor = model.get_submodule(name.split(".attn", maxsplit=1)[0])(x)
    return made


FIRST, SECOND = ((8, 10),) * 2, ((4, 5),) * 2
MODELS: dict[str, Windowed] = {
    # 3 divides neither 8 nor 10: windows reach over the edge.
    "swin": Windowed(hugging("SwinModel", transformers.SwinConfig(**HF, window_size=3)), (32, 40), (3, 3),
                     FIRST + SECOND, (0, 1, 0, 1), hugging_block),
    "swin-whole": Windowed(hugging("SwinModel", transformers.SwinConfig(**HF, window_size=4)), (32, 32), (4, 4),
                           ((8, 8),) * 2 + ((4, 4),) * 2, (0, 2, 0, 0), hugging_block),
    # The report: 4 x 4, windows of 2 x 2, shifted by 1, then merged.
    "swin-small": Windowed(hugging("SwinModel", transformers.SwinConfig(**HF, window_size=2)), (16, 16), (2, 2),
                           ((4, 4),) * 2 + ((2, 2),) * 2, (0, 1, 0, 0), hugging_block),
    "swinv2": Windowed(hugging("Swinv2Model", transformers.Swinv2Config(**HF, window_size=4)), (32, 64), (4, 4),
                       ((8, 16),) * 2 + ((4, 8),) * 2, (0, 2, 0, 0), hugging_block),
    "timm-swin": Windowed(
        lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=(32, 40), window_size=3, **TIMM),
        (32, 40), (3, 3), FIRST + SECOND, (0, 1, 0, 1), plain_block, pads_first=False),
    "timm-swinv2": Windowed(
        lambda: timm.create_model("swinv2_tiny_window8_256", img_size=(48, 48), window_size=4, **TIMM),
        (48, 48), (4, 4), ((12, 12),) * 2 + ((6, 6),) * 2, (0, 2, 0, 2), plain_block, pads_first=False),
    "torchvision-swin": Windowed(lambda: Swin([4, 4], 12, [2, 2], [3, 3], [3, 3]), (32, 40), (3, 3), FIRST + SECOND,
                                 (0, 1, 0, 1), plain_block),
    # One window covers the height, so that windows shift to the side alone; then one covers all.
    "torchvision-flat": Windowed(lambda: Swin([4, 4], 12, [2, 2], [3, 3], [4, 4]), (16, 32), (4, 4),
                                 ((4, 8),) * 2 + ((2, 4),) * 2, (0, (0, 2), 0, 0), plain_block),
    "torchvision-swinv2": Windowed(
        lambda: Swin([4, 4], 12, [2, 2], [3, 3], [4, 4], block=swin.SwinTransformerBlockV2,
                     downsample_layer=swin.PatchMergingV2),
        (36, 48), (4, 4), ((9, 12),) * 2 + ((5, 6),) * 2, (0, 2, 0, 2), plain_block),
}  # fmt: skip
every_model = pytest.mark.parametrize("name", MODELS)


def naive_places(case: Windowed, grid: tuple[int, int], shift: int | tuple[int, int]) -> list[list[int | None]]:
    """Where each window position lies in the grid, position by position; None beside it."""
    height, width = grid
    down, right = (shift, shift) if isinstance(shift, int) else shift
    tall, wide = (side + -side % step for side, step in zip(grid, case.window, strict=True))
    windows = []
    for top in range(0, tall, case.window[0]):
        for left in range(0, wide, case.window[1]):
            places: list[int | None] = []
            for y in range(top, top + case.window[0]):
                for x in range(left, left + case.window[1]):
                    if case.pads_first:
                        row, column = (y + down) % tall, (x + right) % wide
                        inside = row < height and column < width
                    else:
                        inside = y < height and x < width
                        row, column = (y + down) % height, (x + right) % width
                    places.append(row * width + column if inside else None)
            windows.append(places)
    return windows


def dense(case: Windowed, op: Any, grid: tuple[int, int], shift: int | tuple[int, int]) -> NDArray[np.float64]:
    """The recorded windows as one map, written cell by cell: (B, H, n, n)."""
    maps = op.weights().double().numpy()
    n, places = grid[0] * grid[1], naive_places(case, grid, shift)
    batch = len(maps) // len(places)
    full = np.zeros((batch, op.heads, n, n))
    for item in range(batch):
        for window, tokens in enumerate(places):
            for i, query in enumerate(tokens):
                for j, key in enumerate(tokens):
                    if query is not None and key is not None:
                        full[item, :, query, key] = maps[item * len(places) + window, :, i, j]
    return full


def merging(grid: tuple[int, int], onto: tuple[int, int]) -> NDArray[np.float64]:
    full = np.zeros((onto[0] * onto[1], grid[0] * grid[1]))
    for y in range(grid[0]):
        for x in range(grid[1]):
            full[(y // 2) * onto[1] + x // 2, y * grid[1] + x] = 1.0
    return full / full.sum(1, keepdims=True)


@every_model
def test_a_call_over_the_grid_is_its_windows_put_in_their_places(name: str) -> None:
    case = MODELS[name]
    trace = case.traced(case.model())
    joined = [op for op in trace.joined().ops if not isinstance(op, Merging)]
    assert len(joined) == len(trace.ops) == 4
    for op, recorded, grid, shift in zip(joined, trace.ops, case.stages, case.shifts, strict=True):
        expected = dense(case, recorded, grid, shift)
        n = grid[0] * grid[1]
        assert op.shape == expected.shape == (2, 3, n, n)
        np.testing.assert_allclose(op.weights().numpy(), expected, atol=1e-7)
        rows = [n - 1, 0, n // 2, 0]
        np.testing.assert_allclose(op.weights(rows).numpy(), expected[:, :, rows], atol=1e-7)
        x = torch.randn(2, n, 3, generator=seeing.seeded(2), dtype=torch.float64)
        for heads, fused in (("mean", expected.mean(1)), ("max", expected.max(1)), (1, expected[:, 1])):
            np.testing.assert_allclose(op.fused(heads).numpy(), fused, atol=1e-6)
            np.testing.assert_allclose(op.matvec(x, heads=heads).numpy(), fused @ x.numpy(), atol=1e-5)
            np.testing.assert_allclose(op.rmatvec(x, heads=heads), fused.swapaxes(1, 2) @ x.numpy(), atol=1e-5)
        np.testing.assert_allclose(op.rmatvec(x[..., 0])[..., None], op.rmatvec(x[..., :1]), atol=1e-12)


@every_model
def test_a_token_changes_the_block_exactly_where_the_map_says_that_it_is_read(name: str) -> None:
    case = MODELS[name]
    model = case.model().double()
    trace = case.traced(model, batch=1)
    ops = [op for op in trace.joined().ops if not isinstance(op, Merging)]
    for op, grid, width in zip(ops, case.stages, (12, 12, 24, 24), strict=True):
        n = grid[0] * grid[1]
        plain = torch.randn(1, *grid, width, generator=seeing.seeded(3), dtype=torch.float64)
        probes = plain.repeat(n, 1, 1, 1)
        probes.flatten(1, 2)[torch.arange(n), torch.arange(n), 0] += 6.0
        with torch.no_grad():
            before, after = case.block(model, op.name, plain), case.block(model, op.name, probes)
        moved = (after - before).abs().amax(-1).flatten(1) > 1e-12  # (source, position)
        # Other vectors, other weights; but a masked weight is below exp(-50) for all of them.
        read = (op.weights()[0] > 1e-22).any(0).mT | torch.eye(n, dtype=torch.bool)
        assert torch.equal(moved, read)


@every_model
def test_rollout_goes_through_windows_and_mergings(name: str) -> None:
    case = MODELS[name]
    trace = case.traced(case.model())
    chain = [
        0.5 * dense(case, op, grid, shift).mean(1) + 0.5 * np.eye(grid[0] * grid[1])
        for op, grid, shift in zip(trace.ops, case.stages, case.shifts, strict=True)
    ]
    expected = chain[3] @ chain[2] @ merging(case.stages[1], case.stages[2]) @ chain[1] @ chain[0]
    last, first = expected.shape[1:]
    np.testing.assert_allclose(trace.rollout().numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(trace.rollout(target=[0, last - 1]), expected[:, [0, -1]], atol=1e-6)
    np.testing.assert_allclose(trace.rollout(source=first - 1), expected[:, :, -1], atol=1e-6)
    np.testing.assert_allclose(
        trace.rollout(segments=[(0, 5), (5, first)]),
        np.stack([expected[..., :5].sum(-1), expected[..., 5:].sum(-1)], -1), atol=1e-6,
    )  # fmt: skip
    pooled = torch.full((last,), 1 / last)
    np.testing.assert_allclose(trace.rollout(target=pooled), expected.mean(1), atol=1e-6)
    covered = all(side % step == 0 for grid in case.stages for side, step in zip(grid, case.window, strict=True))
    sums = trace.rollout().sum(-1)
    if covered:
        torch.testing.assert_close(sums, torch.ones_like(sums))
    else:  # padded windows: what the model gave to padding is no share of any patch
        assert bool((sums < 1 - 1e-4).any())
    rows = trace.rollout(target=[0], normalize=True).sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))
    only = trace.rollout(target=[0], layers=[0, 1])
    merge = merging(case.stages[1], case.stages[2])
    np.testing.assert_allclose(only, (merge @ chain[1] @ chain[0])[:, [0]], atol=1e-6)


@every_model
def test_a_batch_equals_its_images_one_by_one(name: str) -> None:
    case = MODELS[name]
    model = case.model()
    images = torch.randn(2, 3, *case.image, generator=seeing.seeded(6))
    with torch.no_grad():
        together = attrace.trace(model, images).rollout(target=[1])
        for item in range(2):
            alone = attrace.trace(model, images[item : item + 1]).rollout(target=[1])
            torch.testing.assert_close(together[item : item + 1], alone, atol=1e-6, rtol=0)


def test_recorded_windows_are_the_models_own() -> None:
    for name, config in (
        ("SwinModel", transformers.SwinConfig(**HF, window_size=3)),
        ("Swinv2Model", transformers.Swinv2Config(**HF, window_size=4)),
    ):
        torch.manual_seed(0)
        model = hugging(name, config, "eager")().eval()
        images = torch.randn(2, 3, 32, 32, generator=seeing.seeded(5))
        with torch.no_grad():
            own = model(images, output_attentions=True).attentions
            trace = attrace.trace(model, images)
        shapes = [tuple(maps.shape) for maps in own]
        last_of_stage = [trace.ops[i] for i in (1, 3)] if len(own) == 2 else trace.ops
        assert shapes == [op.shape for op in last_of_stage]
        for op, maps in zip(last_of_stage, own, strict=True):
            torch.testing.assert_close(op.weights(), maps, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [(32, 32), (40, 24)])
def test_windows_beside_global_layers(size: tuple[int, int]) -> None:
    """SAM pads windows without a shift, and every few layers see the whole image."""
    config = transformers.SamVisionConfig(
        **{**seeing.SMALL, "image_size": size[0]}, mlp_dim=32, window_size=3, global_attn_indexes=[1],
        output_channels=8, use_abs_pos=False, use_rel_pos=False,
    )  # fmt: skip
    model = hugging("SamVisionModel", config)().eval()
    model.vision_encoder.patch_embed.image_size = size
    trace = seeing_trace(model, size)
    grid = size[0] // 8, size[1] // 8
    case = Windowed(lambda: model, size, (3, 3), (grid,), (0,), plain_block)
    windowed, whole = trace.joined().ops
    assert isinstance(windowed, GridAttention)
    assert whole is trace.ops[1]
    expected = dense(case, trace.ops[0], grid, 0)
    np.testing.assert_allclose(windowed.weights().numpy(), expected, atol=1e-7)
    n = grid[0] * grid[1]
    mixed = [0.5 * maps.mean(1) + 0.5 * np.eye(n) for maps in (expected, whole.weights().numpy())]
    np.testing.assert_allclose(trace.rollout().numpy(), mixed[1] @ mixed[0], atol=1e-6)


def seeing_trace(model: nn.Module, size: tuple[int, int]) -> attrace.Trace:
    with torch.no_grad():
        return attrace.trace(model, pixel_values=torch.randn(2, 3, *size, generator=seeing.seeded(5)))


@given(
    height=st.integers(1, 9), width=st.integers(1, 9), tall=st.integers(1, 4), wide=st.integers(1, 4),
    down=st.integers(0, 3), right=st.integers(0, 3), roll=st.booleans(),
)  # fmt: skip
def test_windows_hold_each_token_once(
    height: int, width: int, tall: int, wide: int, down: int, right: int, roll: bool
) -> None:
    first = "roll first" if roll else "pad first"
    places = window_places(height, width, (tall, wide), (down, right), first=first)
    assert sorted(places[places != PADDING]) == list(range(height * width))
    assert places.shape[1] == tall * wide


# What cannot be told


class Unknown(nn.Module):
    """A user's own windows, which shift and pad in an order that nobody knows."""

    window_size, shift_size = 3, 1

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.attn = nn.Module()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT  # (B, n, C)
        x = torch.cat([x, x.new_zeros(len(x), 81 - x.shape[1], 8)], 1).reshape(-1, 1, 9, 8)
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_windows_of_an_unknown_order_are_refused_not_taken_for_a_batch() -> None:
    model = Unknown().eval()
    with torch.no_grad():
        trace = attrace.trace(model, torch.randn(2, 3, 32, 32))
    assert trace.ops[0].shape == (18, 1, 9, 9)
    with pytest.raises(CaptureError, match="pads before it shifts is not known"):
        trace.rollout(target=0)
    assert trace.joined().ops == trace.ops


def test_pieces_in_the_batch_axis_without_a_window_are_refused() -> None:
    config = transformers.TimesformerConfig(**seeing.SMALL, num_frames=4)
    model = hugging("TimesformerModel", config)().eval()
    with torch.no_grad():
        trace = attrace.trace(model, pixel_values=torch.randn(1, 4, 3, 32, 32))
    with pytest.raises(CaptureError, match="pieces in the batch axis"):
        trace.rollout(target=0)
    with pytest.raises(CaptureError, match="16 patches"):
        _ = trace.geometry.grid


def test_a_vector_of_another_length_is_an_error() -> None:
    case = MODELS["swin"]
    op = case.traced(case.model()).joined().ops[0]
    with pytest.raises(ShapeError, match="n=80"):
        op.rmatvec(torch.ones(2, 9))
    with pytest.raises(ShapeError, match="n=80"):
        op.matvec(torch.ones(2, 81))


def test_gradients_go_through_windows_and_mergings() -> None:
    case = MODELS["swin"]
    chain = case.traced(case.model()).joined().ops[:3]
    assert isinstance(chain[2], Merging)
    x = torch.randn(2, 80, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 20, 2, dtype=torch.float64)
    made = chain[2].matvec(chain[0].matvec(x))
    (gradient,) = torch.autograd.grad((made * y).sum(), x)
    torch.testing.assert_close(gradient, chain[0].rmatvec(chain[2].rmatvec(y)), atol=1e-6, rtol=1e-5)


def test_joined_windows_answer_as_the_run_itself() -> None:
    config = transformers.SwinConfig(
        image_size=56, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=7
    )
    torch.manual_seed(0)
    trace = attrace.trace(transformers.SwinModel(config).eval(), pixel_values=torch.randn(2, 3, 56, 56))
    whole = trace.joined()
    assert whole.geometry == trace.geometry
    assert whole.joined() is whole
    assert trace.streams == {"pixel_values": 196}
    for question in ({"target": 3}, {"source": 195}, {"segments": [(0, 10)]}, {}):
        torch.testing.assert_close(whole.rollout(**question), trace.rollout(**question), atol=0, rtol=0)
