"""Images inside a language model's prompt, and several of them in one sequence, against the models themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import seeing
import tiny
import torch
import transformers
from seeing import hugging
from torch import Tensor, nn

import attrace
from attrace.capture.packed import block_order
from attrace.capture.windows import GridAttention
from attrace.errors import CaptureError

TEXT, SMALL = {**seeing.TEXT, "model_type": "llama"}, seeing.SMALL
SIGLIP = {**SMALL, "model_type": "siglip_vision_model"}
QWEN_TEXT = {**seeing.VISION, "vocab_size": 100, "num_key_value_heads": 3,
             "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}  # fmt: skip
QWEN = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
QWEN_VISION = {"depth": 2, "num_heads": 3, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}


def qwen2() -> nn.Module:
    vision = {**QWEN_VISION, "embed_dim": 24, "hidden_size": 24}
    config = transformers.Qwen2VLConfig(text_config=QWEN_TEXT, vision_config=vision, **QWEN)
    return hugging("Qwen2VLForConditionalGeneration", config)()


def qwen25() -> nn.Module:
    vision = {**QWEN_VISION, "hidden_size": 24, "out_hidden_size": 24, "intermediate_size": 32,
              "window_size": 16, "fullatt_block_indexes": [1]}  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(text_config=QWEN_TEXT, vision_config=vision, **QWEN)
    return hugging("Qwen2_5_VLForConditionalGeneration", config)()


def qwen3() -> nn.Module:
    vision = {**QWEN_VISION, "hidden_size": 24, "out_hidden_size": 24, "intermediate_size": 32,
              "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
    config = transformers.Qwen3VLConfig(text_config={**QWEN_TEXT, "head_dim": 8}, vision_config=vision, **QWEN)
    return hugging("Qwen3VLForConditionalGeneration", config)()


def llava(**settings: Any) -> nn.Module:
    config = transformers.LlavaConfig(
        text_config=TEXT, vision_config={**SMALL, "model_type": "clip_vision_model"}, image_token_index=7,
        vision_feature_layer=-1, **settings,
    )  # fmt: skip
    return hugging("LlavaForConditionalGeneration", config)()


def paligemma() -> nn.Module:
    text = {**TEXT, "model_type": "gemma", "head_dim": 8}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=SIGLIP, image_token_index=7, projection_dim=24
    )
    return hugging("PaliGemmaForConditionalGeneration", config)()


def gemma3() -> nn.Module:
    text = {**TEXT, "model_type": "gemma3_text", "head_dim": 8}
    config = transformers.Gemma3Config(text_config=text, vision_config=SIGLIP, image_token_id=7, mm_tokens_per_image=4)
    return hugging("Gemma3ForConditionalGeneration", config)()


def idefics3() -> nn.Module:
    config = transformers.Idefics3Config(
        text_config=TEXT, vision_config={**SMALL, "image_size": 48}, image_token_id=7, scale_factor=2
    )
    return hugging("Idefics3ForConditionalGeneration", config)()


def internvl() -> nn.Module:
    config = transformers.InternVLConfig(text_config=TEXT, vision_config=dict(SMALL), image_token_id=7)
    return hugging("InternVLForConditionalGeneration", config)()


def prompt(*lengths: int, image: int = 7) -> Tensor:
    """Text and images in turn, each image's tokens by number."""
    ids = [5]
    for length in lengths:
        ids += [image] * length + [8, 9]
    return torch.tensor([ids])


def pictures(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=seeing.seeded(1))


PLAIN: dict[str, tuple[Any, dict[str, Tensor], list[tuple[int, int]], int]] = {
    # the model, its inputs, the grid of each image, the pixels of a token along a side
    "llava": (llava, {"input_ids": prompt(16, 16), "pixel_values": pictures(2, 3, 32, 32)}, [(4, 4)] * 2, 8),
    "paligemma": (
        paligemma,
        {"input_ids": prompt(16)[:, 1:], "pixel_values": pictures(1, 3, 32, 32),
         "token_type_ids": torch.tensor([[0] * 16 + [0, 1]])},
        [(4, 4)], 8,
    ),
    "gemma3": (
        gemma3,
        {"input_ids": prompt(4), "pixel_values": pictures(1, 3, 32, 32),
         "token_type_ids": torch.tensor([[0, 1, 1, 1, 1, 0, 0]])},
        [(2, 2)], 16,
    ),
    "idefics3": (
        idefics3, {"input_ids": prompt(9, 9), "pixel_values": pictures(1, 2, 3, 48, 48)}, [(3, 3)] * 2, 16,
    ),
    "internvl": (internvl, {"input_ids": prompt(4), "pixel_values": pictures(1, 3, 32, 32)}, [(2, 2)], 16),
}  # fmt: skip


def without_mixing(model: nn.Module, trace: attrace.Trace) -> None:
    """Take attention away from what sees, so that what a token holds stays in its place."""
    for op in trace.ops:
        if not is_text(op.name):
            for module in model.get_submodule(op.name).modules():
                if isinstance(module, nn.Linear):
                    module.weight.data.zero_()
                    if module.bias is not None:
                        module.bias.data.zero_()


def is_text(name: str) -> bool:
    return "language_model" in name or "text_model" in name


def first_of_text(trace: attrace.Trace) -> str:
    return next(op.name for op in trace.ops if is_text(op.name))


@pytest.mark.parametrize("name", PLAIN)
def test_an_image_is_where_its_pixels_change_the_prompt(name: str) -> None:
    make, given, grids, side = PLAIN[name]
    torch.manual_seed(0)
    model = make().eval()
    trace = tiny.traced(model, given)
    spans = trace.geometry.prompt
    assert not trace.geometry.refused
    assert [(span.grid.height, span.grid.width) for span in spans] == grids
    assert [span.image for span in spans] == list(range(len(grids)))
    without_mixing(model, trace)
    for parameter_name, parameter in model.named_parameters():
        if "projector" in parameter_name and not bool(parameter.any()):  # as Gemma's begins
            parameter.data.normal_(generator=seeing.seeded(4))
    look = first_of_text(trace)
    before = seeing.tokens_before(model, look, lambda: model(**given))
    for span in spans:
        assert span.grid.stride == (side, side)
        for row in range(span.grid.height):
            for column in range(span.grid.width):
                pixels = given["pixel_values"].clone()
                flat = pixels.view(-1, *pixels.shape[-3:])
                flat[span.image, :, side * row + side // 2, side * column + side // 2] += 9.0
                after = seeing.tokens_before(model, look, lambda p=pixels: model(**{**given, "pixel_values": p}))
                where = seeing.changed(after, before)[0].nonzero().flatten().tolist()
                assert where == [span.grid.token(row, column)]


def test_five_text_tokens_with_an_image_at_the_third() -> None:  # rep-vision-span-2
    vision = {**SMALL, "model_type": "clip_vision_model", "image_size": 24}
    config = transformers.LlavaConfig(
        text_config=TEXT, vision_config=vision, image_token_index=7, vision_feature_layer=-1
    )
    model = hugging("LlavaForConditionalGeneration", config)().eval()
    ids = torch.tensor([[5, 6, *[7] * 9, 8, 9]])
    (span,) = tiny.traced(model, {"input_ids": ids, "pixel_values": pictures(1, 3, 24, 24)}).geometry.prompt
    assert (span.span, span.grid.height, span.grid.width) == ((2, 11), 3, 3)
    assert [span.grid.token(row, column) for row in range(3) for column in range(3)] == list(range(2, 11))


def test_a_class_token_kept_in_the_prompt_is_told_apart() -> None:
    model = llava(vision_feature_select_strategy="full").eval()
    trace = tiny.traced(model, {"input_ids": prompt(17), "pixel_values": pictures(1, 3, 32, 32)})
    (span,) = trace.geometry.prompt
    assert span.span == (1, 18)
    assert (span.grid.prefix, span.grid.first, span.grid.name(1)) == (("class",), 2, "class")


def test_prompts_of_a_batch_have_their_own_images() -> None:
    model = llava().eval()
    ids = torch.cat([prompt(16, 16), torch.cat([torch.full((1, 18), 6), prompt(16)], 1)])
    trace = tiny.traced(model, {"input_ids": ids, "pixel_values": pictures(3, 3, 32, 32)})
    assert [(span.item, span.image, span.span) for span in trace.geometry.prompt] == [
        (0, 0, (1, 17)), (0, 1, (19, 35)), (1, 2, (19, 35)),
    ]  # fmt: skip


# Packed images

THW = [[1, 4, 6], [1, 2, 4]]
PACKED = {"qwen2": qwen2, "qwen2.5": qwen25, "qwen3": qwen3}


def packed_rows(image: Tensor) -> Tensor:
    """An image (3, height, width) in the rows that the family's processor makes of it, with the patches of 4 pixels in
    blocks of 2 x 2, shown twice in time: (patches, 3 * 2 * 4 * 4).
    """
    rows = []
    for top in range(0, image.shape[1], 8):
        for left in range(0, image.shape[2], 8):
            for y in (top, top + 4):
                for x in (left, left + 4):
                    patch = image[:, y : y + 4, x : x + 4]
                    rows.append(torch.stack([patch, patch], 1).flatten())
    return torch.stack(rows)


def qwen_inputs(images: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.tensor([[5, 92] + [90] * 6 + [93, 6, 92] + [90] * 2 + [93, 7]])
    return {
        "input_ids": ids,
        "pixel_values": torch.cat([packed_rows(image) for image in images]),
        "image_grid_thw": torch.tensor(THW),
        "mm_token_type_ids": (ids == 90).long(),
    }


@pytest.mark.parametrize("processor", ["Qwen2VLImageProcessor", "Glm4vImageProcessor"])
def test_rows_are_those_of_the_processor(processor: str) -> None:
    made_by = getattr(transformers, processor)(
        do_resize=False, do_rescale=False, do_normalize=False, patch_size=4, merge_size=2, temporal_patch_size=2
    )
    image = pictures(3, 16, 24)
    made = made_by(images=image, return_tensors="pt", do_convert_rgb=False, input_data_format="channels_first")
    torch.testing.assert_close(made["pixel_values"].float(), packed_rows(image))
    assert made["image_grid_thw"].tolist() == THW[:1]


@pytest.mark.parametrize("name", PACKED)
def test_packed_images_are_where_their_pixels_change_the_tower_and_the_prompt(name: str) -> None:
    torch.manual_seed(0)
    model = PACKED[name]().eval()
    images = [pictures(3, 4 * height, 4 * width) for _, height, width in THW]
    given = qwen_inputs(images)
    trace = tiny.traced(model, given)
    grids, spans = trace.geometry.images["pixel_values"], trace.geometry.prompt
    assert [(grid.height, grid.width, grid.start) for grid in grids] == [(4, 6, 0), (2, 4, 24)]
    assert [(span.grid.height, span.grid.width, span.span) for span in spans] == [(2, 3, (2, 8)), (1, 2, (11, 13))]
    without_mixing(model, trace)
    looks = "model.visual.blocks.0", first_of_text(trace)

    def look(images: list[Tensor]) -> list[Tensor]:
        inputs = qwen_inputs(images)
        found = [seeing.tokens_before(model, name, lambda: model(**inputs)) for name in looks]
        return [found[0][None], found[1]]

    before = look(images)
    for index, (grid, span) in enumerate(zip(grids, spans, strict=True)):
        for row in range(grid.height):
            for column in range(grid.width):
                moved = [image.clone() for image in images]
                moved[index][:, 4 * row + 1, 4 * column + 2] += 9.0
                tower, text = (
                    seeing.changed(*pair)[0].nonzero().flatten().tolist()
                    for pair in zip(look(moved), before, strict=True)
                )
                assert tower == [grid.token(row, column)]
                assert text == [span.grid.token(row // 2, column // 2)]
                top, left, bottom, right = grid.box(tower[0]) or (0, 0, 0, 0)
                assert top <= 4 * row + 1 < bottom
                assert left <= 4 * column + 2 < right


@pytest.mark.parametrize("name", PACKED)
def test_packed_calls_make_one_map_of_blocks(name: str) -> None:
    model = PACKED[name]().eval()
    trace = tiny.traced(model, qwen_inputs([pictures(3, 16, 24), pictures(3, 8, 16)]))
    tower = [op for op in trace.ops if not is_text(op.name)]
    joined = [op for op in trace.joined().ops if not is_text(op.name)]
    assert [op.shape for op in joined] == [(1, 3, 32, 32)] * 2
    assert len(tower) > 2
    start = 0
    at = iter(tower)
    for op in joined:
        assert isinstance(op, GridAttention)
        expected, start = np.zeros((1, 3, 32, 32)), 0
        while start < 32:
            piece = next(at).weights().numpy()
            stop = start + piece.shape[2]
            expected[:, :, start:stop, start:stop] = piece
            start = stop
        np.testing.assert_allclose(op.weights().numpy(), expected, atol=1e-7)
    assert next(at, None) is None


def test_frames_of_a_video_are_grids_one_after_the_other() -> None:
    assert block_order(2, 2, 2, 2) == tuple(range(8))
    ids = torch.tensor([[5, 92, *[91] * 4, 93, 6]])
    frames = [packed_rows(pictures(3, 8, 16)) for _ in range(2)]
    trace = tiny.traced(qwen2().eval(), {
        "input_ids": ids, "pixel_values_videos": torch.cat(frames), "video_grid_thw": torch.tensor([[2, 2, 4]]),
        "mm_token_type_ids": 2 * (ids == 91).long(),
    })  # fmt: skip
    (grid,) = trace.geometry.images["pixel_values_videos"]
    assert (grid.frames, grid.height, grid.width) == (2, 2, 4)
    assert grid.place(8 + 2) == (1, 1, 0)


def test_images_cut_to_their_sizes_in_one_sequence() -> None:
    config = transformers.PixtralVisionConfig(
        **{**seeing.SMALL, "head_dim": 8}, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    model = hugging("PixtralVisionModel", config)().eval()
    given = {"pixel_values": pictures(2, 3, 32, 32), "image_sizes": torch.tensor([[16, 32], [32, 24]])}
    trace = tiny.traced(model, given)
    grids = trace.geometry.images["pixel_values"]
    assert [(grid.height, grid.width, grid.span) for grid in grids] == [(2, 4, (0, 8)), (4, 3, (8, 20))]
    look = trace.ops[0].name
    before = seeing.tokens_before(model, look, lambda: model(**given))
    for index, grid in enumerate(grids):
        for token in range(*grid.span):
            top, left, bottom, right = grid.box(token) or (0, 0, 0, 0)
            pixels = given["pixel_values"].clone()
            pixels[index, 0, bottom - 1, left] += 9.0
            after = seeing.tokens_before(model, look, lambda p=pixels: model(**{**given, "pixel_values": p}))
            assert seeing.changed(after, before)[0].nonzero().flatten().tolist() == [token]
            assert (bottom - top, right - left) == (8, 8)


@pytest.mark.parametrize("name", ["qwen2", "qwen2.5"])
def test_a_vision_tower_alone(name: str) -> None:
    tower = PACKED[name]().eval().model.visual
    inputs = qwen_inputs([pictures(3, 16, 24), pictures(3, 8, 16)])
    with torch.no_grad():
        trace = attrace.trace(tower, inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    grids = trace.geometry.images["hidden_states"]
    assert [(grid.height, grid.width, grid.start) for grid in grids] == [(4, 6, 0), (2, 4, 24)]
    full = np.eye(32)
    for op in trace.joined().ops:
        full = (0.5 * op.weights()[0].double().numpy().mean(0) + 0.5 * np.eye(32)) @ full
    found = trace.rollout(target=[0, 30])
    np.testing.assert_allclose(found[0], full[[0, 30]], atol=1e-6)
    assert not found[0, 0, 24:].any()  # one image does not read the other


def test_images_of_a_padded_batch_have_a_grid_each() -> None:
    config = transformers.Siglip2VisionConfig(**seeing.VISION, num_patches=16, patch_size=8)
    model = hugging("Siglip2VisionModel", config)().eval()
    trace = tiny.traced(model, {
        "pixel_values": pictures(2, 16, 192), "spatial_shapes": torch.tensor([[2, 8], [4, 3]]),
        "pixel_attention_mask": torch.tensor([[1] * 16, [1] * 12 + [0] * 4]),
    })  # fmt: skip
    wide, padded = trace.geometry.images["pixel_values"]
    assert (wide.height, wide.width, len(wide), wide.suffix) == (2, 8, 16, ())
    assert (padded.height, padded.width, len(padded), padded.suffix) == (4, 3, 16, ("padding",) * 4)
    assert padded.box(4) == (8, 8, 16, 16)
    with pytest.raises(CaptureError, match="2 of them"):
        _ = trace.geometry.grid


# What cannot be told

REFUSED: dict[str, tuple[Any, str]] = {
    "text joined": (
        lambda: (hugging("ViltModel", transformers.ViltConfig(**TEXT, image_size=32, patch_size=8))(),
                 {"input_ids": torch.arange(5, 12)[None], "pixel_values": pictures(1, 3, 32, 32)}),
        r"24 tokens for 16 patches.*cls_token \(1\)",
    ),
    "patches hidden": (
        lambda: (hugging("ViTMAEModel", transformers.ViTMAEConfig(**SMALL))(),
                 {"pixel_values": pictures(1, 3, 32, 32)}),
        "5 tokens for 16 patches",
    ),
    "no image": (lambda: (tiny.model("bert"), tiny.inputs()), "neither an image nor a sound"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_add_up_is_refused_with_the_counts(name: str) -> None:
    make, why = REFUSED[name]
    model, given = make()
    trace = tiny.traced(model.eval(), given)
    assert not trace.geometry.images
    with pytest.raises(CaptureError, match=why):
        _ = trace.geometry.grid
    with pytest.raises(CaptureError, match=why):
        _ = trace.geometry.frames


def test_sizes_of_an_unknown_packing_are_refused() -> None:
    model = qwen2().eval()
    trace = tiny.traced(model, qwen_inputs([pictures(3, 16, 24), pictures(3, 8, 16)]))
    model.config.model_type = "something"
    assert trace.geometry.images == {}
    assert "'something' packs its patches is not known" in trace.geometry.refused[0]


@pytest.mark.parametrize(("change", "why"), [
    ({"num_query_tokens": 4}, "learned queries"),
    ({"image_token_index": 8, "image_token_id": 8}, "not 16 in a row"),
    ({"image_token_index": 99, "image_token_id": 99}, "image tokens of 0 images, and 1 images"),
])  # fmt: skip
def test_prompts_that_do_not_hold_the_patches_are_refused(change: dict[str, int], why: str) -> None:
    model = llava().eval()
    trace = tiny.traced(model, {"input_ids": prompt(16), "pixel_values": pictures(1, 3, 32, 32)})
    for name, value in change.items():
        setattr(model.config, name, value)
    assert trace.geometry.prompt == ()
    assert any(why in reason for reason in trace.geometry.refused)


def test_more_tokens_than_images() -> None:
    config = transformers.LlavaNextConfig(
        text_config=TEXT, vision_config={**SMALL, "model_type": "clip_vision_model"}, image_token_index=7,
        vision_feature_layer=-1, image_grid_pinpoints=[[32, 64]],
    )  # fmt: skip
    model = hugging("LlavaNextForConditionalGeneration", config)().eval()
    trace = tiny.traced(model, {
        "input_ids": prompt(52), "pixel_values": pictures(1, 3, 3, 32, 32), "image_sizes": torch.tensor([[32, 64]]),
    })  # fmt: skip
    assert trace.geometry.prompt == ()
    assert trace.geometry.refused == ("prompt 0: more image tokens than the 48 of 3 images",)


def test_a_prompt_buffer_may_be_used_again() -> None:
    given = {"input_ids": prompt(16), "pixel_values": pictures(1, 3, 32, 32)}
    trace = tiny.traced(llava().eval(), given)
    given["input_ids"].zero_()
    assert [span.span for span in trace.geometry.prompt] == [(1, 17)]


def test_a_prompt_without_ids_is_refused() -> None:
    model = llava().eval()
    given = {"input_ids": prompt(16), "pixel_values": pictures(1, 3, 32, 32)}
    embedded = model.get_input_embeddings()(given["input_ids"]).detach()
    trace = tiny.traced(model, {"inputs_embeds": embedded, "pixel_values": given["pixel_values"]})
    assert trace.geometry.prompt == ()
    assert "no input_ids" in trace.geometry.refused[0]
