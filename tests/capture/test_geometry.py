"""What the tokens of images and sounds are, against the model itself: a pixel is changed, and the tokens looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import seeing
import tiny
import torch
import transformers
from torch import nn

import attrace
from attrace.aggregate import pixel_map
from attrace.capture.windows import window_places
from attrace.errors import CaptureError, InputError
from attrace.layout import Grid

every_image = pytest.mark.parametrize("name", seeing.IMAGES)
every_sound = pytest.mark.parametrize("name", seeing.SOUNDS)


def grid_of(case: seeing.Case, model: nn.Module) -> tuple[Grid, attrace.Trace]:
    with torch.no_grad(), attrace.record(model) as trace:
        case.run(model, case.images(batch=2))
    return trace.geometry.grid, trace


@every_image
def test_grid_and_prefix_are_the_ones_written_down(name: str) -> None:
    case = seeing.IMAGES[name]
    grid, trace = grid_of(case, case.model())
    assert (grid.height, grid.width) == case.grid
    assert (grid.prefix, grid.suffix) == (case.prefix, case.suffix)
    assert grid.image == (case.height, case.width)
    assert grid.frames == max(1, case.frames // 2)
    assert grid.axes == (("frequency", "time") if case.spectrogram else ("height", "width"))
    assert not trace.geometry.refused


@every_image
def test_each_pixel_reaches_the_tokens_whose_box_holds_it(name: str) -> None:
    case = seeing.IMAGES[name]
    model = case.model()
    grid, _ = grid_of(case, model)
    plain = case.images()
    pixels = [(y, x) for y in range(case.height) for x in range(case.width)]
    probes = plain.repeat(len(pixels), *[1] * (plain.ndim - 1))
    at = torch.arange(len(pixels))
    rows, columns = torch.tensor(pixels).T
    if case.spectrogram:
        probes[at, columns, rows] += 4.0
    else:
        probes[(at, 2, 1, rows, columns) if case.frames else (at, 1, rows, columns)] += 4.0
    before = seeing.tokens_before(model, case.look, lambda: case.run(model, plain))
    after = torch.cat(
        [seeing.tokens_before(model, case.look, lambda part=part: case.run(model, part)) for part in probes.split(512)]
    )
    expected = torch.zeros(len(pixels), before.shape[1], dtype=torch.bool)
    for token in range(len(grid)):
        box, place = grid.box(token), grid.place(token)
        if box is not None and place is not None and place[0] == (1 if case.frames else 0):
            top, left, bottom, right = box
            inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
            expected[:, token] = inside
    assert before.shape[1] == len(grid)
    assert torch.equal(seeing.changed(after, before), expected)


@pytest.mark.parametrize("name", [name for name, case in seeing.IMAGES.items() if case.parameters])
def test_prefix_names_are_those_of_the_parameters_that_make_the_tokens(name: str) -> None:
    case = seeing.IMAGES[name]
    model = case.model()
    grid, _ = grid_of(case, model)
    images = case.images()
    before = seeing.tokens_before(model, case.look, lambda: case.run(model, images))
    for parameter, tokens in case.parameters.items():
        held = model.get_parameter(parameter)
        for index in range(len(tokens)):
            moved = held.detach().clone()
            moved.reshape(len(tokens), -1)[index, 0] += 3.0
            twin, held.data = held.data, moved
            after = seeing.tokens_before(model, case.look, lambda: case.run(model, images))
            held.data = twin
            where = seeing.changed(after, before)[0].nonzero().flatten().tolist()
            assert [grid.name(token) for token in where] == [tokens[index]]


@every_sound
def test_each_sample_reaches_the_frames_that_hold_it(name: str) -> None:
    case = seeing.SOUNDS[name]
    model = case.model()
    with torch.no_grad(), attrace.record(model) as trace:
        case.run(model, case.sounds(batch=2))
    frames = trace.geometry.frames
    assert (frames.count, frames.prefix) == (case.count, ())
    assert frames.seconds(3) == pytest.approx(case.seconds)
    length = case.shape[case.axis]
    edges = {edge + move for token in range(len(frames)) for edge in frames.steps(token) or () for move in (-1, 0)}
    times = sorted({time for time in edges | set(range(0, length, 7)) if 0 <= time < length})
    plain = case.sounds()
    probes = plain.repeat(len(times), *[1] * (plain.ndim - 1))
    for probe, time in zip(probes, times, strict=True):
        probe.movedim(case.axis, 0)[time] += 4.0
    before = seeing.tokens_before(model, case.look, lambda: case.run(model, plain))
    after = seeing.tokens_before(model, case.look, lambda: case.run(model, probes))
    expected = [[start <= time < stop for start, stop in map(frames.steps, range(len(frames)))] for time in times]  # type: ignore[misc]
    assert torch.equal(seeing.changed(after, before), torch.tensor(expected))


def test_a_norm_over_time_does_not_hide_the_frames() -> None:
    config = transformers.Wav2Vec2Config(**{**seeing.SPEECH, "feat_extract_norm": "group"})
    model = seeing.hugging("Wav2Vec2Model", config)().eval()
    trace = tiny.traced(model, {"input_values": torch.randn(1, 3000)})
    assert (trace.geometry.frames.stride, trace.geometry.frames.window) == (320, 400)


def test_a_spectrogram_patch_has_a_time() -> None:
    case = seeing.IMAGES["ast"]
    grid, _ = grid_of(case, case.model())
    assert grid.seconds(grid.token(0, 2)) == pytest.approx((0.2, 0.36))
    assert grid.seconds(0) is None


# Golden cases and reports

GOLDEN = Path(__file__).resolve().parents[1] / "cases" / "grid.json"
SHARED = [above / "shared" / "cases" / "golden.json" for above in Path(__file__).resolve().parents[3:5]]
CASES = {case["id"]: case for case in json.loads(GOLDEN.read_text(encoding="utf-8"))}


def test_the_copy_equals_the_shared_cases() -> None:
    assert len(CASES) == 12
    found = [path for path in SHARED if path.exists()]
    if not found:
        pytest.skip("no shared cases beside this clone; its own copy is what the tests use")
    shared = json.loads(found[0].read_text(encoding="utf-8"))
    assert {case["id"]: case for case in shared if case["area"] == "grid"} == CASES


def golden_model(given: dict[str, Any]) -> nn.Module:
    """A model with the prefix tokens of a case."""
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8,
            "image_size": (given["image_height"], given["image_width"]), "patch_size": given["patch_size"]}  # fmt: skip
    prefix = given["cls_tokens"], given["distillation_tokens"], given["register_tokens"]
    if prefix == (1, 0, 0):
        return seeing.hugging("ViTModel", transformers.ViTConfig(**size))().eval()
    if prefix == (1, 1, 0):
        return seeing.hugging("DeiTModel", transformers.DeiTConfig(**size))().eval()
    if prefix == (0, 0, 0):
        config = transformers.SiglipVisionConfig(**{**size, "image_size": given["image_height"]})
        return seeing.hugging("SiglipVisionModel", config)().eval()
    assert prefix[:2] == (1, 0)
    config = transformers.Dinov2WithRegistersConfig(
        **{**size, "image_size": 28}, mlp_ratio=1, num_register_tokens=prefix[2]
    )
    return seeing.hugging("Dinov2WithRegistersModel", config)().eval()


COUNTED = [name for name, case in CASES.items() if "total_tokens" in case["inputs"]]


@pytest.mark.parametrize("name", COUNTED)
def test_golden_grid(name: str) -> None:
    given, expected = CASES[name]["inputs"], CASES[name]["expected"]
    trace = tiny.traced(
        golden_model(given), {"pixel_values": torch.randn(1, 3, given["image_height"], given["image_width"])}
    )
    grid = trace.geometry.grid
    assert trace.ops[0].shape[2] == len(grid) == given["total_tokens"]
    assert [grid.height, grid.width] == expected["grid"]
    assert len(grid.prefix) == expected["prefix_tokens"]
    assert grid.patches == expected["patch_tokens"]
    assert grid.first == expected["first_patch_index"]


@pytest.mark.parametrize("name", ["grid-box-1", "grid-box-2"])
def test_golden_box(name: str) -> None:
    given, expected = CASES[name]["inputs"], CASES[name]["expected"]
    side = (given["patch_size"],) * 2
    grid = Grid(*given["grid"], prefix=("p",) * given["prefix_tokens"], patch=side, stride=side)
    assert grid.place(given["token"]) == (0, expected["row"], expected["col"])
    assert list(grid.box(given["token"]) or ()) == expected["box"]
    assert grid.token(expected["row"], expected["col"]) == given["token"]


@pytest.mark.parametrize("name", ["grid-swin-1", "grid-swin-2"])
def test_golden_windows(name: str) -> None:  # rep-rollout-window-1
    given, expected = CASES[name]["inputs"], CASES[name]["expected"]
    window, shift = given["window"], given["shift"]
    assert window_places(*given["grid"], (window,) * 2, (shift,) * 2).tolist() == expected["window_tokens"]
    assert window_places(*given["grid"], (window,) * 2).tolist() == expected["trap_no_shift"]


def llava(height: int, width: int, patch: int = 2) -> nn.Module:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    vision = transformers.SiglipVisionConfig(**small, image_size=max(height, width) * patch, patch_size=patch)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**{**seeing.TEXT, **small, "num_key_value_heads": 1}),
        vision_config=vision, image_token_index=7, vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    return seeing.hugging("LlavaForConditionalGeneration", config)().eval()


def sized_llava(height: int, width: int) -> nn.Module:
    """For images of height x width patches, square or not."""
    model = llava(height, width)
    embeddings = model.model.vision_tower.embeddings
    embeddings.position_embedding = nn.Embedding(height * width, 8)
    embeddings.position_ids = torch.arange(height * width)[None]
    return model


@pytest.mark.parametrize("name", ["grid-span-1", "grid-span-2"])
def test_golden_span(name: str) -> None:
    given, expected = CASES[name]["inputs"], CASES[name]["expected"]
    height, width = given["grid"]
    ids = [5] * given["text_tokens_with_one_placeholder"]
    ids[given["placeholder_position"] : given["placeholder_position"] + 1] = [7] * (height * width)
    model, size = sized_llava(height, width), (2 * height, 2 * width)
    trace = tiny.traced(model, {"input_ids": torch.tensor([ids]), "pixel_values": torch.randn(1, 3, *size)})
    (image,) = trace.geometry.prompt
    assert list(image.span) == expected["span"]
    assert trace.ops[-1].shape[2] == expected["total_tokens"]
    assert image.grid.token(*given["query_patch"]) == expected["token_of_query_patch"]


@pytest.mark.parametrize(("ids", "grid", "span"), [
    ([5, 6, *[7] * 9, 8, 9], (3, 3), (2, 11)),
    ([5, *[7] * 24, 8, 9], (4, 6), (1, 25)),
])  # fmt: skip
def test_reported_spans(ids: list[int], grid: tuple[int, int], span: tuple[int, int]) -> None:  # rep-vision-span-1, -2
    trace = tiny.traced(
        sized_llava(*grid),
        {"input_ids": torch.tensor([ids]), "pixel_values": torch.randn(1, 3, 2 * grid[0], 2 * grid[1])},
    )
    (image,) = trace.geometry.prompt
    assert (image.span, (image.grid.height, image.grid.width)) == (span, grid)


def test_reported_map_of_a_model_without_a_class_token() -> None:  # rep-rollout-readout-1
    case = seeing.IMAGES["siglip"]
    grid, _ = grid_of(case, case.model())
    with pytest.raises(InputError, match=r"none besides the patches\. Received: 'class'"):
        grid.named("class")


def test_a_second_run_has_its_own_grid() -> None:
    case = seeing.IMAGES["dinov2"]
    model = case.model()
    grids = []
    for size in ((45, 64), (24, 40)):
        with torch.no_grad(), attrace.record(model) as trace:
            model(pixel_values=torch.randn(1, 3, *size))
        grids.append((trace.geometry.grid.height, trace.geometry.grid.width))
    assert grids == [(5, 8), (3, 5)]


class Plain(nn.Module):
    """A user's own model: patches by a convolution, tokens of its own beside them, one attention."""

    def __init__(self, tokens: dict[str, int], order: list[str], *, computed: bool = False) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 8, (4, 2), (4, 2))
        for name, count in tokens.items():
            setattr(self, name, nn.Parameter(torch.randn(1, count, 8)))
        self.order, self.computed = order, computed

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        x = self.cut(picture).flatten(2).mT
        parts = []
        for name in self.order:
            part = x if name == "patches" else getattr(self, name).expand(len(x), -1, -1)
            parts.append(part * 1.0 if self.computed else part)
        x = torch.cat(parts, dim=1)[:, None]
        return nn.functional.scaled_dot_product_attention(x, x, x)


def plain_grid(tokens: dict[str, int], order: str, *, computed: bool = False) -> Grid:
    with torch.no_grad():
        trace = attrace.trace(Plain(tokens, order.split(), computed=computed), torch.randn(2, 3, 12, 8))
    return trace.geometry.grid


def test_a_users_own_tokens_are_named_after_their_parameter() -> None:
    grid = plain_grid({"query": 2}, "query patches")
    assert (grid.prefix, grid.height, grid.width, grid.patch) == (("query 1", "query 2"), 3, 4, (4, 2))
    assert (grid.box(2), grid.box(13)) == ((0, 0, 4, 2), (8, 6, 12, 8))


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize(("order", "prefix", "suffix"), [
    ("cls_token register_tokens patches", ("class", "register 1", "register 2"), ()),
    ("register_tokens cls_token patches", ("register 1", "register 2", "class"), ()),
    ("cls_token patches register_tokens", ("class",), ("register 1", "register 2")),
    ("patches register_tokens cls_token", (), ("register 1", "register 2", "class")),
])  # fmt: skip
def test_tokens_are_where_the_model_puts_them(
    order: str, prefix: tuple[str, ...], suffix: tuple[str, ...], computed: bool
) -> None:
    grid = plain_grid({"register_tokens": 2, "cls_token": 1}, order, computed=computed)
    assert (grid.prefix, grid.suffix) == (prefix, suffix)


@pytest.mark.parametrize("tokens", [{"query": 2}, {"cls_token": 1, "dist_token": 1}])
def test_tokens_that_cannot_be_told_apart_are_refused_not_guessed(tokens: dict[str, int]) -> None:
    with pytest.raises(CaptureError, match=r"3 x 4 patches of \(12, 8\) by cut; 14 tokens for 12 patches"):
        plain_grid(tokens, " ".join([*tokens, "patches"]), computed=True)


def test_gradients_and_inference_mode_show_the_same_grid() -> None:
    case = seeing.IMAGES["deit"]
    model = case.model()
    grids = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), attrace.record(model) as trace:
            case.run(model, case.images())
        grids.append(trace.geometry.grid)
    assert grids[0] == grids[1] == grids[2]


def test_from_a_row_to_a_picture() -> None:
    case = seeing.IMAGES["deit"]
    grid, trace = grid_of(case, case.model())
    row = trace.rollout(target=grid.named("class"))[0].numpy()
    picture = pixel_map(row, grid)
    assert picture.shape == (32, 32)
    beside = sum(row[grid.named(name)] for name in grid.prefix)
    assert picture.sum() / 64 + beside == pytest.approx(1.0)
    assert picture[9, 17] == pytest.approx(row[grid.token(1, 2)])
    swin = seeing.IMAGES["swin"]
    grid, trace = grid_of(swin, swin.model())
    row = trace.rollout(target=torch.full((20,), 1 / 20))[0].numpy()
    assert pixel_map(row, grid).shape == (30, 40)
    assert pixel_map(row, grid)[29, 39] == pytest.approx(row[79])


def test_a_trace_of_another_framework_says_so() -> None:
    with pytest.raises(CaptureError, match="Model was not recorded in PyTorch"):
        _ = attrace.Trace("Model").geometry.grid


class Wrapper(nn.Module):
    """Passes everything on, as wrappers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_wrapped_model_shows_the_grid_by_position_and_by_name() -> None:
    case = seeing.IMAGES["vit"]
    model = Wrapper(case.model()).eval()
    with torch.no_grad():
        placed, named = attrace.trace(model, case.images()), attrace.trace(model, pixel_values=case.images())
    assert placed.geometry.grid == named.geometry.grid
    assert placed.geometry.grid.prefix == ("class",)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_shows_the_grid(dtype: torch.dtype) -> None:
    case = seeing.IMAGES["dinov2-registers"]
    grid, _ = grid_of(case, case.model())
    model = case.model().to(dtype)
    with torch.no_grad(), attrace.record(model) as trace:
        case.run(model, case.images().to(dtype))
    assert trace.geometry.grid == grid


def test_geometry_leaves_nothing_on_the_model_and_outputs_as_they_are() -> None:
    case = seeing.IMAGES["swin"]
    model, images = case.model(), case.images()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad():
        plain = case.run(model, images).last_hidden_state
        with attrace.record(model) as trace:
            recorded = case.run(model, images).last_hidden_state
    assert torch.equal(plain, recorded)
    assert trace.geometry.grid.patches == 80
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
