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


INPUTS: dict[str, Maker] = {
    "kyutai_speech_to_text": codebooks("num_codebooks", 1),
    "dia": dia,
    "dia_decoder": dia_decoder,
    "decision_transformer": decision,
    "blip_2_qformer": query_tokens,
    "blip-2": asked_images(),
    "instructblip": asked_images(),
    "instructblipvideo": asked_images(frames=2),
}
