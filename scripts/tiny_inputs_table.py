"""Inputs of the few types whose arguments do not tell what they want."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Maker = Callable[[Any, Any, torch.Generator], Iterator[dict[str, Any]]]


def _ids(g: torch.Generator, *shape: int, below: int = 90) -> torch.Tensor:
    return torch.randint(5, below, shape, generator=g)


def codebooks(count: str, extra: int = 0) -> Maker:
    """Token ids of several codebooks at each step."""

    def make(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
        yield {"input_ids": _ids(g, 2, 7, getattr(config, count) + extra, below=60)}

    return make


def dia(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    yield {"input_ids": _ids(g, 2, 7), "decoder_input_ids": _ids(g, 2, 5, config.decoder_config.num_channels)}


def dia_decoder(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    yield {
        "input_ids": _ids(g, 2, 5, config.num_channels),
        "encoder_hidden_states": torch.randn(2, 6, config.cross_hidden_size, generator=g),
    }


def decision(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    yield {
        "states": torch.randn(2, 4, config.state_dim, generator=g),
        "actions": torch.randn(2, 4, config.act_dim, generator=g),
        "rewards": torch.randn(2, 4, 1, generator=g),
        "returns_to_go": torch.randn(2, 4, 1, generator=g),
        "timesteps": torch.arange(4).expand(2, 4),
        "attention_mask": torch.ones(2, 4),
    }


def query_tokens(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    images = torch.randn(2, 6, config.encoder_hidden_size, generator=g)
    yield {"query_embeds": torch.randn(2, 5, config.hidden_size, generator=g), "encoder_hidden_states": images}


def asked_images(frames: int = 0) -> Maker:
    """An image, the prompt with its placeholders, and the prompt again for the query transformer."""

    def make(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
        size = config.vision_config.image_size
        count = config.num_query_tokens * max(1, frames)
        for marker in (getattr(config, "image_token_index", None), getattr(config, "video_token_index", None), 1):
            if marker is None:
                continue
            ids = torch.cat([torch.full((2, count), marker), _ids(g, 2, 5)], 1)
            shape = (2, frames, 3, size, size) if frames else (2, 3, size, size)
            batch = {"pixel_values": torch.randn(*shape, generator=g), "input_ids": ids}
            batch["attention_mask"] = torch.ones_like(ids)
            yield {**batch, "qformer_input_ids": _ids(g, 2, 5)}
            yield {**batch, "decoder_input_ids": _ids(g, 2, 4)}
            yield batch

    return make


def random(**shapes: Any) -> Maker:
    """Tensors by shape: a name of a setting in a shape stands for its value; "long 5" draws integers below five."""

    def made(spec: Any, config: Any, g: torch.Generator) -> Any:
        if isinstance(spec, str):
            kind, _, rest = spec.partition(" ")
            below, *shape = rest.split()
            size = [int(n) if n.isdigit() else _setting(config, n) for n in shape]
            if kind == "long":
                return torch.randint(0, int(below), size, generator=g)
            return torch.full(size, kind != "false", dtype=torch.long if kind == "ones" else torch.bool)
        if isinstance(spec, tuple):
            return torch.randn(*(_setting(config, n) if isinstance(n, str) else n for n in spec), generator=g)
        return spec

    def make(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
        yield {name: made(spec, config, g) for name, spec in shapes.items()}

    return make


def _setting(config: Any, path: str) -> int:
    for name in path.split("."):
        config = getattr(config, name)
    return config[0] if isinstance(config, list | tuple) else config  # type: ignore[return-value]


def packed_patches(name: str, hidden: str = "") -> Maker:
    """Patches of images of 16 places each, with their places' mask and the shape of their grids (SigLIP 2)."""

    def make(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
        vision = getattr(config, "vision_config", config)
        mask = torch.ones(2, 16, dtype=torch.long)
        mask[1, 12:] = 0
        batch = {
            "pixel_values": torch.randn(2, 16, 3 * vision.patch_size**2, generator=g),
            name: mask,
            "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
        }
        if hasattr(config, "text_config"):
            batch["input_ids"] = _ids(g, 2, 7)
        yield batch

    return make


def mllama_vision(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    yield {
        "pixel_values": torch.randn(2, 1, config.max_num_tiles, 3, config.image_size, config.image_size, generator=g),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 1, config.max_num_tiles, dtype=torch.long),
    }


def speecht5(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    width = config.hidden_size
    yield {
        "input_values": torch.randn(2, 7, width, generator=g),
        "decoder_input_values": torch.randn(2, 5, width, generator=g),
    }


def xmod(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    yield {"input_ids": _ids(g, 2, 7), "attention_mask": mask, "lang_ids": torch.zeros(2, dtype=torch.long)}


def joined_sounds(mels: str) -> Maker:
    """Two sounds beside each other, (mels, steps), with their lengths (Qwen Omni)."""

    def make(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
        steps = 2 * config.n_window
        lengths = torch.tensor([steps, steps])
        yield {"input_features": torch.randn(getattr(config, mels), 2 * steps, generator=g), "feature_lens": lengths}
        yield {
            "input_features": torch.randn(getattr(config, mels), 2 * steps, generator=g),
            "feature_lens": lengths,
            "aftercnn_lens": lengths // 2,
        }

    return make


def kosmos2(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    count, size = config.latent_query_num, config.vision_config.image_size
    mask = torch.zeros(2, count + 6, dtype=torch.long)
    mask[:, 1 : count + 1] = 1
    yield {
        "pixel_values": torch.randn(2, 3, size, size, generator=g),
        "input_ids": _ids(g, 2, count + 6),
        "image_embeds_position_mask": mask,
        "attention_mask": torch.ones_like(mask),
    }


def musicgen(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    codes = config.decoder.num_codebooks
    mask = torch.ones(2, 7, dtype=torch.long)
    yield {
        "input_ids": _ids(g, 2, 7),
        "attention_mask": mask,
        "decoder_input_ids": _ids(g, 2 * codes, 5, below=60),
    }


def sam3_encoder(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    width = config.hidden_size
    images = [torch.randn(2, width, 4, 4, generator=g)]
    yield {
        "vision_features": images,
        "text_features": torch.randn(2, 5, width, generator=g),
        "vision_pos_embeds": [torch.randn(2, width, 4, 4, generator=g)],
    }


def sam3_decoder(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    width = config.hidden_size
    yield {
        "vision_features": torch.randn(2, 16, width, generator=g),
        "text_features": torch.randn(2, 5, width, generator=g),
        "vision_pos_encoding": torch.randn(2, 16, width, generator=g),
        "spatial_shapes": torch.tensor([[4, 4]]),
    }


def perceiver(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    yield {"inputs": torch.randn(2, 7, config.d_model, generator=g)}


def seggpt(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    height, width = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
    images = [torch.randn(2, 3, height // 2, width, generator=g) for _ in range(3)]
    yield dict(zip(("pixel_values", "prompt_pixel_values", "prompt_masks"), images, strict=True))


def oneformer(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    for size in (64, 128, 256):
        yield {
            "pixel_values": torch.randn(1, 3, size, size, generator=g),
            "task_inputs": _ids(g, 1, config.task_seq_len),
        }


def tasks(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    yield {"inputs_embeds": torch.randn(2, 7, config.hidden_size, generator=g)}


def positioned_patches(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    side = 2 * (config.pooling_kernel_size or 1)
    place = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(-1, 2)
    patches = torch.rand(2, side * side, 3 * config.patch_size**2, generator=g)
    yield {"pixel_values": patches, "pixel_position_ids": place.expand(2, -1, -1)}


def idefics(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    size = config.vision_config.image_size
    yield {
        "input_ids": _ids(g, 2, 7),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "pixel_values": torch.randn(2, 1, 3, size, size, generator=g),
        "image_attention_mask": torch.ones(2, 7, 1, dtype=torch.long),
    }


def tiny_paddle(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    patch = config.patch_size
    yield {
        "pixel_values": torch.randn(1, 16, 3, patch, patch, generator=g),
        "grid_thw": torch.tensor([[1, 4, 4]]),
    }


def target_patches(model: Any, config: Any, g: torch.Generator) -> Iterator[dict[str, Any]]:
    patch = config.patch_size
    for shape in ((1, 3, patch, 32 * patch), (2, 3, patch, 16 * patch)):
        sizes = torch.tensor([[4, 4], [4, 4]])
        yield {"pixel_values": torch.randn(*shape, generator=g), "target_sizes": sizes}


INPUTS: dict[str, Maker] = {
    "kyutai_speech_to_text": codebooks("num_codebooks", 1),
    "dia": dia,
    "dia_decoder": dia_decoder,
    "decision_transformer": decision,
    "blip_2_qformer": query_tokens,
    "blip-2": asked_images(),
    "instructblip": asked_images(),
    "instructblipvideo": asked_images(frames=2),
    "siglip2": packed_patches("pixel_attention_mask"),
    "siglip2_vision_model": packed_patches("pixel_attention_mask"),
    "mllama_vision_model": mllama_vision,
    "speecht5": speecht5,
    "xmod": xmod,
    "qwen2_5_omni_audio_encoder": joined_sounds("num_mel_bins"),
    "qwen3_omni_moe_audio_encoder": joined_sounds("num_mel_bins"),
    "kosmos-2": kosmos2,
    "musicgen": musicgen,
    "musicgen_melody": musicgen,
    "sam3_detr_encoder": sam3_encoder,
    "sam3_lite_text_detr_encoder": sam3_encoder,
    "sam3_detr_decoder": sam3_decoder,
    "sam3_lite_text_detr_decoder": sam3_decoder,
    "perceiver": perceiver,
    "seggpt": seggpt,
    "oneformer": oneformer,
    "qwen3_omni_moe_talker_code_predictor": tasks,
    "gemma4_vision": positioned_patches,
    "idefics": idefics,
    "paddleocr_vl_vision": tiny_paddle,
    "minicpm_ocr_vision": target_patches,
    "minicpmv4_6_vision": target_patches,
    "minicpmv4_7_vision": target_patches,
    "lxmert": random(
        input_ids="long 90 2 7",
        visual_feats=(2, 4, "visual_feat_dim"),
        visual_pos=(2, 4, "visual_pos_dim"),
    ),
    "florence_vision": random(hidden_states=(2, 3, 64, 64)),
    "gemma3n_audio": random(audio_mel=(2, 64, "input_feat_size"), audio_mel_mask="false 1 2 64"),
    "idefics2_perceiver": random(context=(2, 6, "hidden_size"), attention_mask="ones 1 2 6"),
    "phi4_multimodal_audio": random(hidden_states=(2, 64, "input_size"), mask="true 1 2 64"),
    "moshi_depth": random(input_ids="long 60 2 2", last_hidden_state=(2, 1, "input_size")),
    "blt_local_encoder": random(
        input_ids="long 90 2 7", patch_embeds=(2, 3, "hidden_size_global"), patch_ids="long 3 2 7", num_patches=3
    ),
    "sam3_mask_decoder": random(
        decoder_queries=(2, 5, "hidden_size"), backbone_features=None, encoder_hidden_states=(2, 16, "hidden_size")
    ),
}
