"""Inputs for the models of `tiny_models`: what a forward's arguments ask for, several shapes of it tried in turn."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from tiny_inputs_table import INPUTS
from torch import Tensor, nn

Batch = dict[str, Any]
BATCH, LENGTH, TARGET = 2, 7, 5


def setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of the settings that the configuration or one of its parts has."""
    parts = [config, *(v for k, v in vars(config).items() if k.endswith(("config", "encoder", "decoder")))]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if value is not None and not isinstance(value, dict):
                return value
    return default


def vision_of(config: Any) -> Any:
    for name in ("vision_config", "image_config", "backbone_config", "visual_config", "image_encoder_config"):
        found = getattr(config, name, None)
        if found is not None and not isinstance(found, dict) and found is not config:
            return vision_of(found) if type(found) is not type(config) else found
    return config


def audio_of(config: Any) -> Any:
    for name in ("audio_config", "speech_config", "audio_encoder_config", "encoder_config"):
        found = getattr(config, name, None)
        if found is not None and not isinstance(found, dict) and found is not config:
            return audio_of(found) if type(found) is not type(config) else found
    return config


def tokens(generator: torch.Generator, vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(min(5, vocabulary - 2), max(6, min(90, vocabulary)), shape, generator=generator)


def sides(value: Any) -> tuple[int, int]:
    if isinstance(value, list | tuple) and isinstance(value[0], list | tuple):
        value = value[0]
    if isinstance(value, int):
        return value, value
    if isinstance(value, dict):
        return value["height"], value["width"]
    return (value[0], value[0]) if len(value) == 1 else (value[-2], value[-1])


def parameters_of(model: nn.Module) -> dict[str, inspect.Parameter]:
    return {p.name: p for p in inspect.signature(model.forward).parameters.values() if p.name not in ("args", "kwargs")}


def candidates(model_type: str, model: Any) -> Iterator[Batch]:
    """Inputs to try, the fullest first."""
    g = torch.Generator().manual_seed(7)
    config = model.config
    if model_type in INPUTS:
        yield from INPUTS[model_type](model, config, g)
    names = parameters_of(model)
    needed = {n for n, p in names.items() if p.default is inspect.Parameter.empty and p.kind == p.POSITIONAL_OR_KEYWORD}
    text = _text(names, config, g)
    others = list(_others(names, needed, config, g, model))
    both = [{**words, **other} for other in others for words in text]
    yield from both[:24]
    yield from (dict(other) for other in others[:16])
    yield from (dict(words) for words in text)
    yield from both[24:]
    yield from others[16:]


def _text(names: Any, config: Any, g: torch.Generator) -> list[Batch]:
    vocabulary = setting(config, "vocab_size", default=100)
    vocabulary = vocabulary if isinstance(vocabulary, int) else 100
    plain: Batch = {}
    if "input_ids" in names:
        plain["input_ids"] = tokens(g, vocabulary, BATCH, LENGTH)
    elif "inputs_embeds" in names and "pixel_values" not in names and "input_features" not in names:
        plain["inputs_embeds"] = torch.randn(BATCH, LENGTH, setting(config, "hidden_size", "d_model"), generator=g)
    elif "hidden_states" in names:
        width = setting(config, "hidden_size", "d_model", "embed_dim", default=32)
        width = width[0] if isinstance(width, list | tuple) else width
        plain["hidden_states"] = torch.randn(BATCH, LENGTH, width, generator=g)
    if "bbox" in names:
        plain["bbox"] = torch.randint(0, 30, (BATCH, LENGTH, 2), generator=g).repeat(1, 1, 2) + torch.tensor(
            [0, 0, 9, 9]
        )
    if "decoder_input_ids" in names and "input_ids" in names:
        plain["decoder_input_ids"] = tokens(g, vocabulary, BATCH, TARGET)
    if "encoder_hidden_states" in names and names["encoder_hidden_states"].default is inspect.Parameter.empty:
        width = setting(config, "encoder_hidden_size", "cross_hidden_size", "hidden_size", "d_model")
        plain["encoder_hidden_states"] = torch.randn(BATCH, 6, width, generator=g)
    out = [plain]
    if "attention_mask" in names and plain:
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[1, -2:] = 0
        out = [{**plain, "attention_mask": mask}, {**plain, "attention_mask": torch.ones_like(mask)}, plain]
    return out


def _images(names: Any, config: Any, g: torch.Generator) -> Iterator[Batch]:
    vision = vision_of(config)
    size = setting(vision, "image_size", "img_size", "input_size", "size", default=None)
    if size is None:
        size = setting(config, "image_size", default=32)
    channels = setting(vision, "num_channels", "in_channels", "in_chans", "input_channels", default=3)
    channels = channels if isinstance(channels, int) else channels[0] if isinstance(channels[0], int) else 3
    tries = [sides(size)] + [(s, s) for s in (32, 64, 112, 128, 224, 256)]
    for height, width in dict.fromkeys(tries):
        if height * width <= 512 * 512:
            yield {"pixel_values": torch.randn(BATCH, channels, height, width, generator=g)}
    for frames in (2, 4, 8, 16):
        height, width = sides(size)
        yield {"pixel_values": torch.randn(BATCH, frames, channels, height, width, generator=g)}


def _packed(names: Any, config: Any, g: torch.Generator) -> Iterator[Batch]:
    """Patches of two images in one sequence, as the Qwen-VL family wants them."""
    vision = vision_of(config)
    patch = setting(vision, "patch_size", default=8)
    frames = setting(vision, "temporal_patch_size", default=1)
    channels = setting(vision, "in_channels", "num_channels", "in_chans", default=3)
    merge = setting(vision, "spatial_merge_size", default=2)
    merge = merge if isinstance(merge, int) else 2
    patch = patch if isinstance(patch, int) else patch[-1]
    for t in [frames, 1] if frames != 1 else [1]:
        heights = [2 * merge, 2 * merge] if "input_ids" in names else [2 * merge, 4 * merge]
        grid = torch.tensor([[1, heights[0], 2 * merge], [1, heights[1], 2 * merge]])
        count = int(grid.prod(1).sum())
        flat = torch.randn(count, channels * t * patch * patch, generator=g)
        for name in ("pixel_values", "hidden_states"):
            if name in names:
                for grid_name in ("grid_thw", "image_grid_thw", "grid_hws", "image_grid_hws", "image_grid_hw"):
                    if grid_name in names:
                        value = grid[:, 1:] if "hw" in grid_name and "thw" not in grid_name else grid
                        extra = {"merge_sizes": torch.tensor([1, 1])} if "merge_sizes" in names else {}
                        yield {name: flat, grid_name: value, **extra}
                        yield {name: flat.view(count, channels, patch, patch) if t == 1 else flat, grid_name: value}


def _audio(names: Any, needed: set[str], config: Any, g: torch.Generator) -> Iterator[Batch]:
    audio = audio_of(config)
    mels = setting(audio, "num_mel_bins", "n_mels", "feature_size", "input_dim", "input_feat_per_channel",
                   "feature_projection_input_dim", "input_feat_size", "mel_bins", "n_mel_bins", default=80)  # fmt: skip
    mels = mels if isinstance(mels, int) else 80
    if "input_features" in names:
        lengths = [2 * setting(audio, "max_source_positions", default=32), 64, 40, 100, 128]
        for steps in dict.fromkeys(lengths):
            masks: list[Batch] = [{}]
            for name in ("input_features_mask", "feature_attention_mask", "attention_mask"):
                if name in names and not (name == "attention_mask" and "input_ids" in names):
                    masks.insert(0, {name: torch.ones(BATCH, steps, dtype=torch.long)})
            for mask in masks:
                yield {"input_features": torch.randn(BATCH, mels, steps, generator=g), **mask}
                yield {"input_features": torch.randn(BATCH, steps, mels, generator=g), **mask}
                yield {"input_features": torch.randn(BATCH, 1, steps, mels, generator=g), **mask}
    if "input_values" in names:
        for shape in ((BATCH, 2000), (BATCH, 1, 2000), (BATCH, 8000), (BATCH, 1, 8000), (BATCH, 64, mels),
                      (BATCH, setting(audio, "max_length", default=64), mels), (BATCH, 16000)):  # fmt: skip
            yield {"input_values": torch.randn(*shape, generator=g) * 0.5}


def _others(names: Any, needed: set[str], config: Any, g: torch.Generator, model: Any) -> Iterator[Batch]:
    """What is not text: images, videos, sounds, series."""
    found = False
    if any(n in names for n in ("grid_thw", "image_grid_thw", "grid_hws", "image_grid_hws", "image_grid_hw")):
        yield from _packed(names, config, g)
    if "pixel_values" in names:
        found = True
        for image in _images(names, config, g):
            yield image
    if "pixel_values_videos" in names and ("pixel_values" not in names or "pixel_values_videos" in needed):
        found = True
        size = sides(setting(vision_of(config), "image_size", "crop_size", default=32))
        for frames in (setting(vision_of(config), "num_frames", "frames_per_clip", default=4), 2, 4, 8):
            yield {"pixel_values_videos": torch.randn(BATCH, frames, 3, *size, generator=g)}
    for name in ("image", "sample"):
        if name in needed:
            found = True
            for image in _images(names, config, g):
                yield {name: image["pixel_values"]}
    for batch in _audio(names, needed, config, g):
        found = True
        if "decoder_input_ids" in names and "input_ids" not in names:
            batch["decoder_input_ids"] = tokens(g, 100, BATCH, TARGET)
        yield batch
    if "flattened_patches" in names:
        width = vision_of(config).patch_size ** 2 * 3 + 2 if hasattr(vision_of(config), "patch_size") else 770
        for w in (width, 770, 194):
            flat = torch.randn(BATCH, 6, w, generator=g)
            flat[..., :2] = (
                torch.stack(torch.meshgrid(torch.arange(1, 3), torch.arange(1, 4), indexing="ij"), -1)
                .reshape(6, 2)
                .float()
            )
            yield {"flattened_patches": flat}
            yield {"flattened_patches": flat, "decoder_input_ids": tokens(g, 100, BATCH, TARGET)}
    if "past_values" in names:
        yield from _series(names, config, g)
    if not found and "flattened_patches" not in names and "past_values" not in names:
        yield {}


def _series(names: Any, config: Any, g: torch.Generator) -> Iterator[Batch]:
    context = setting(config, "context_length", default=16)
    lags = max(setting(config, "lags_sequence", default=[0]) or [0])
    prediction = setting(config, "prediction_length", default=4)
    past = context + lags
    channels = setting(config, "num_input_channels", default=1)
    features = setting(config, "num_time_features", default=0)
    if "past_time_features" in names:
        yield {
            "past_values": torch.randn(BATCH, past, generator=g),
            "past_time_features": torch.randn(BATCH, past, features, generator=g),
            "past_observed_mask": torch.ones(BATCH, past),
            "future_values": torch.randn(BATCH, prediction, generator=g),
            "future_time_features": torch.randn(BATCH, prediction, features, generator=g),
        }
    yield {"past_values": torch.randn(BATCH, context, channels, generator=g)}
    yield {"past_values": torch.randn(BATCH, 64, generator=g), "past_values_padding": torch.zeros(BATCH, 64),
           "freq": torch.zeros(BATCH, 1, dtype=torch.long)}  # fmt: skip
    yield {"past_values": [torch.randn(64, generator=g) for _ in range(BATCH)]}


PLACEHOLDERS = re.compile(r"tokens?:? *=? *\D{0,12}(\d+).{0,40}?features?:? *=? *\D{0,12}(\d+)", re.S)


def with_placeholders(batch: Batch, model: Any, message: str) -> list[Batch]:
    """The batch with as many placeholder tokens as the model says that it has image (or sound) features.

    Some models count the features' entries: then there are as many tokens as that by the width.
    """
    config, names = model.config, parameters_of(model)
    numbers = re.search(r"features?[^\d]*(\d+)", message)
    both = PLACEHOLDERS.search(message)
    if "input_ids" not in batch or not (numbers or both):
        return []
    count = int(both.group(2)) if both else int(numbers.group(1))  # type: ignore[union-attr]
    marker = None
    for name in ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "video_token_id"):
        sort = name.split("_")[0]
        wanted = {"image": "pixel_values", "audio": "input_features", "video": "pixel_values_videos"}[sort]
        value = setting(config, name)
        if isinstance(value, int) and any(k.startswith(wanted) or k == "input_values" for k in batch):
            marker = value
            break
    if marker is None:
        return []
    width = setting(config, "hidden_size", "d_model", default=64)
    counts = [count // width] if isinstance(width, int) and count >= 8 * width and count % width == 0 else []
    return [_placed(batch, marker, c // BATCH, names) for c in (*counts, count) if c % BATCH == 0 and c <= 2000]


def _placed(batch: Batch, marker: int, each: int, names: Any) -> Batch:
    words = tokens(torch.Generator().manual_seed(3), 90, BATCH, 5)
    ids = torch.cat([words[:, :2], torch.full((BATCH, each), marker), words[:, 2:]], 1)
    out = {**batch, "input_ids": ids}
    if "attention_mask" in out:
        out["attention_mask"] = torch.ones_like(ids)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in names:
            out[name] = (ids == marker).long()
    return out
