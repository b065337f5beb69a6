"""Tiny random models that see and hear: what their tokens are, written down by hand, and how to look at them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torchvision_ops
import transformers
from torch import Tensor, nn

torchvision_ops.enable()

import timm  # noqa: E402
import torchvision  # noqa: E402

VISION = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
SMALL = {**VISION, "image_size": 32, "patch_size": 8, "initializer_range": 0.1}
TEXT = {**VISION, "vocab_size": 100, "max_position_embeddings": 700, "num_key_value_heads": 3,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 3}  # fmt: skip
SPEECH = {**VISION, "conv_dim": [24] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
          "vocab_size": 40, "feat_extract_norm": "layer", "do_stable_layer_norm": True}  # fmt: skip
TIMM = {"embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
REGISTERS = [f"register {i}" for i in (1, 2, 3, 4)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hugging(name: str, config: Any, attention: str | None = None) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, name)._from_config(config, attn_implementation=attention)


@dataclass(frozen=True)
class Case:
    """One model that sees."""

    make: Callable[[], nn.Module]
    height: int
    width: int
    """Of the image, in pixels."""
    grid: tuple[int, int]
    look: str
    """The module whose input are the tokens before any of them has seen another."""
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()
    parameters: dict[str, list[str]] = field(default_factory=dict)
    """Which tokens change with a parameter."""
    argument: str = "pixel_values"
    extra: dict[str, Any] = field(default_factory=dict)
    spectrogram: bool = False
    """The input is (B, time, frequency): `width` is time."""
    frames: int = 0
    """The input is (B, frames, 3, height, width)."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().eval()
        for name in self.parameters:
            model.get_parameter(name).data.normal_(generator=seeded(3))
        return model

    def images(self, batch: int = 1, seed: int = 1) -> Tensor:
        shape: tuple[int, ...] = (3, self.height, self.width)
        if self.frames:
            shape = (self.frames, *shape)
        if self.spectrogram:
            shape = (self.width, self.height)
        return torch.randn(batch, *shape, generator=seeded(seed))

    def run(self, model: nn.Module, images: Tensor) -> Any:
        extra = {name: value.expand(len(images), *value.shape[1:]) for name, value in self.extra.items()}
        if self.argument in ("x", "image"):
            return model(images, *extra.values())
        return model(**{self.argument: images}, **extra)


_IDS = {"input_ids": torch.arange(5, 12)[None]}
_CLASS = ("class",)
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [3, 3]}

IMAGES: dict[str, Case] = {
    "vit": Case(
        hugging("ViTModel", transformers.ViTConfig(**{**SMALL, "image_size": (24, 48)})), 24, 48, (3, 6),
        "layers.0.attention", _CLASS, (), {"embeddings.cls_token": ["class"]},
    ),
    "deit": Case(
        hugging("DeiTModel", transformers.DeiTConfig(**SMALL)), 32, 32, (4, 4), "layers.0.attention",
        ("class", "distillation"), (),
        {"embeddings.cls_token": ["class"], "embeddings.distillation_token": ["distillation"]},
    ),
    "beit": Case(
        hugging("BeitModel", transformers.BeitConfig(**SMALL, use_relative_position_bias=True)), 32, 32, (4, 4),
        "layers.0.attention", _CLASS, (), {"embeddings.cls_token": ["class"]},
    ),
    "dinov2": Case(  # 45 is no multiple of 8, and positions are interpolated
        hugging("Dinov2Model", transformers.Dinov2Config(**SMALL)), 45, 64, (5, 8), "encoder.layer.0.attention",
        _CLASS, (), {"embeddings.cls_token": ["class"]},
    ),
    "dinov2-registers": Case(
        hugging("Dinov2WithRegistersModel", transformers.Dinov2WithRegistersConfig(**SMALL)), 48, 32, (6, 4),
        "encoder.layer.0.attention", ("class", *REGISTERS), (),
        {"embeddings.cls_token": ["class"], "embeddings.register_tokens": REGISTERS},
    ),
    "dinov3": Case(
        hugging("DINOv3ViTModel", transformers.DINOv3ViTConfig(**SMALL, num_register_tokens=4)), 24, 32, (3, 4),
        "model.layer.0.attention", ("class", *REGISTERS), (),
        {"embeddings.cls_token": ["class"], "embeddings.register_tokens": REGISTERS},
    ),
    "siglip": Case(
        hugging("SiglipVisionModel", transformers.SiglipVisionConfig(**SMALL)), 32, 32, (4, 4),
        "encoder.layers.0.self_attn",
    ),
    "yolos": Case(
        hugging("YolosModel", transformers.YolosConfig(**{**SMALL, "image_size": [32, 32]}, num_detection_tokens=3)),
        32, 32, (4, 4), "encoder.layer.0.attention", _CLASS, ("detection 1", "detection 2", "detection 3"),
        {"embeddings.cls_token": ["class"],
         "embeddings.detection_tokens": ["detection 1", "detection 2", "detection 3"]},
    ),
    "videomae": Case(
        hugging("VideoMAEModel", transformers.VideoMAEConfig(**SMALL, num_frames=4, tubelet_size=2)), 32, 32, (4, 4),
        "encoder.layer.0.attention", frames=4,
    ),
    "ast": Case(
        hugging("ASTModel", transformers.ASTConfig(
            **VISION, patch_size=16, frequency_stride=10, time_stride=10, max_length=64, num_mel_bins=48)),
        48, 64, (4, 5), "layers.0.attention", ("class", "distillation"), (),
        {"embeddings.cls_token": ["class"], "embeddings.distillation_token": ["distillation"]},
        argument="input_values", spectrogram=True,
    ),
    "clip": Case(
        hugging("CLIPModel", transformers.CLIPConfig(text_config=TEXT, vision_config=SMALL, projection_dim=16)),
        32, 32, (4, 4), "vision_model.encoder.layers.0.self_attn", _CLASS, (),
        {"vision_model.embeddings.class_embedding": ["class"]}, extra=_IDS,
    ),
    "siglip-pair": Case(
        hugging("SiglipModel", transformers.SiglipConfig(text_config=TEXT, vision_config=SMALL)),
        32, 32, (4, 4), "vision_model.encoder.layers.0.self_attn", extra=_IDS,
    ),
    "blip": Case(
        hugging("BlipForImageTextRetrieval", transformers.BlipConfig(text_config=TEXT, vision_config=SMALL)),
        32, 32, (4, 4), "vision_model.encoder.layers.0.self_attn", _CLASS, (),
        {"vision_model.embeddings.class_embedding": ["class"]}, extra=_IDS,
    ),
    "swin": Case(
        hugging("SwinModel", transformers.SwinConfig(**_SWIN, window_size=3)), 30, 40, (8, 10),  # padded to 32 pixels
        "encoder.layers.0.blocks.0.layernorm_before",
    ),
    "swinv2": Case(
        hugging("Swinv2Model", transformers.Swinv2Config(**_SWIN, window_size=4)), 32, 32, (8, 8),
        "encoder.layers.0.blocks.0",
    ),
    "sam": Case(
        hugging("SamVisionModel", transformers.SamVisionConfig(
            **{**SMALL, "mlp_dim": 32}, window_size=3, global_attn_indexes=[1], output_channels=8)),
        32, 32, (4, 4), "vision_encoder.layers.0.layer_norm1",
    ),
    "segformer": Case(  # overlapping patches with a margin
        hugging("SegformerModel", transformers.SegformerConfig(
            hidden_sizes=[8, 16], depths=[1, 1], num_attention_heads=[1, 2], sr_ratios=[2, 1], patch_sizes=[7, 3],
            strides=[4, 2], mlp_ratios=[2, 2], num_encoder_blocks=2)),
        24, 32, (6, 8), "stages.0.blocks.0.layernorm_before",
    ),
    "timm-vit": Case(
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), patch_size=8, **TIMM), 32, 48, (4, 6),
        "blocks.0.attn", _CLASS, (), {"cls_token": ["class"]}, argument="x",
    ),
    "timm-registers": Case(
        lambda: timm.create_model("vit_small_patch14_reg4_dinov2", img_size=(28, 42), **TIMM), 28, 42, (2, 3),
        "blocks.0.attn", ("class", *REGISTERS), (), {"cls_token": ["class"], "reg_token": REGISTERS}, argument="x",
    ),
    "timm-deit": Case(
        lambda: timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, **TIMM),
        32, 32, (4, 4), "blocks.0.attn", ("class", "distillation"), (),
        {"cls_token": ["class"], "dist_token": ["distillation"]}, argument="x",
    ),
    "timm-swin": Case(
        lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=(32, 40), window_size=3, embed_dim=12,
                                  depths=(2, 2), num_heads=(3, 3)),
        32, 40, (8, 10), "layers.0.blocks.0.norm1", argument="x",
    ),
    "timm-levit": Case(  # four convolutions before the first token
        lambda: timm.create_model("levit_128s", img_size=(32, 48)), 32, 48, (2, 3), "stages.0.blocks.0", argument="x",
    ),
    "torchvision-vit": Case(
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 3, 24, 32), 32, 32, (4, 4),
        "encoder.layers.encoder_layer_0.self_attention", _CLASS, (), {"class_token": ["class"]}, argument="x",
    ),
    "torchvision-swin": Case(
        lambda: torchvision.models.SwinTransformer([4, 4], 12, [2, 2], [3, 3], [3, 3]), 32, 40, (8, 10),
        "features.1.0.norm1", argument="x",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sound:
    """One model that hears."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the input, without the batch."""
    axis: int
    """Of time, in that shape."""
    argument: str
    look: str
    count: int
    seconds: tuple[float, float]
    """Of the token at index 3, by hand."""
    extra: dict[str, Tensor] = field(default_factory=dict)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().eval()

    def sounds(self, batch: int = 1) -> Tensor:
        return torch.randn(batch, *self.shape, generator=seeded(1))

    def run(self, model: nn.Module, sounds: Tensor) -> Any:
        extra = {name: value.expand(len(sounds), -1) for name, value in self.extra.items()}
        return model(**{self.argument: sounds}, **extra)


_SEQ = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3, "vocab_size": 100,
        "decoder_attention_heads": 3, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_target_positions": 20,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
_START = {"decoder_input_ids": torch.tensor([[1, 4, 5]])}
# 7 convolutions of strides 5, 2, 2, 2, 2, 2, 2: a frame every 320 samples, made from 400, at 16 kHz.
_THIRD = (0.06, 0.085)

SOUNDS: dict[str, Sound] = {
    "wav2vec2": Sound(
        hugging("Wav2Vec2Model", transformers.Wav2Vec2Config(**SPEECH)), (3000,), 0, "input_values",
        "feature_projection", 9, _THIRD,
    ),
    "hubert": Sound(
        hugging("HubertModel", transformers.HubertConfig(**SPEECH)), (3000,), 0, "input_values",
        "feature_projection", 9, _THIRD,
    ),
    "whisper": Sound(  # columns of 10 ms; kernel 3, then kernel 3 and stride 2: from 4 columns on, 5 wide
        hugging("WhisperModel", transformers.WhisperConfig(**_SEQ, max_source_positions=20, num_mel_bins=16)),
        (16, 40), 1, "input_features", "encoder.layers.0.self_attn", 20, (0.04, 0.09), _START,
    ),
    "speech-to-text": Sound(
        hugging("Speech2TextModel", transformers.Speech2TextConfig(
            **_SEQ, conv_channels=16, input_feat_per_channel=16, max_source_positions=100)),
        (40, 16), 0, "input_features", "encoder.layers.0.self_attn", 10, (0.06, 0.19), _START,
    ),
}  # fmt: skip


class StopError(Exception):
    """Enough was seen."""


def tokens_before(model: nn.Module, look: str, run: Callable[[], Any]) -> Tensor:
    """The tokens that enter a module, (B, n, C); the run ends there."""
    seen: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = next(value for value in [*args, *kwargs.values()] if isinstance(value, Tensor))
        seen.append(tensor.flatten(1, 2) if tensor.ndim == 4 else tensor)
        raise StopError

    handle = model.get_submodule(look).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    except StopError:
        return seen[0]
    finally:
        handle.remove()
    raise AssertionError(f"{look} did not run")


def changed(tokens: Tensor, plain: Tensor) -> Tensor:
    """(B, n), True where a token is another one than in the plain run (1, n, C)."""
    return (tokens - plain).abs().amax(-1) > 1e-4
