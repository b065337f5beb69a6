"""Text -> what the model reads, each token with its place in the text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attrace.capture.huggingface import Loaded, clear_errors, quiet
from attrace.errors import InputError, ModelError, TextTooLongError


@dataclass(frozen=True)
class Encoding:
    """One encoded text of n tokens."""

    text: str
    inputs: dict[str, Tensor]
    """The model's keyword arguments, each (1, n), on the model's device."""
    pieces: tuple[str, ...]
    offsets: tuple[tuple[int, int], ...]
    special: NDArray[np.bool_]
    """(n,) True at tokens that the tokenizer added."""
    note: str | None = None
    """What was left out, where the text was truncated."""
    begun: Tensor | None = None
    """(1, m), what an encoder-decoder's decoder begins with; these stand after the text's own tokens, as special
    ones, and are no part of `inputs`."""

    @property
    def ids(self) -> Tensor:
        """(n,)"""
        return self.inputs["input_ids"][0]

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def length(self) -> int:
        """How many of the tokens the text itself has: n, or fewer where a decoder's stand after them."""
        return len(self.pieces) - (0 if self.begun is None else self.begun.shape[1])


def encode(loaded: Loaded, text: str, *, truncate: bool = False) -> Encoding:
    """Tokenize one text.

    Raises InputError for an empty text, ModelError for a tokenizer that gives no offsets, TextTooLongError where
    the text does not fit the model's context; with `truncate` the beginning is kept (for a causal model, whose
    answer comes after the end, the end).
    """
    if not isinstance(text, str):
        raise InputError(f"Expected one text as a string. Received: {type(text).__name__}. Explain texts one by one.")
    if not text.strip():
        raise InputError("Expected a text with at least one word. Received: an empty one.")
    tokenizer = loaded.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"Expected a tokenizer with character offsets (tokenizer.json, a fast tokenizer). Received: "
            f"{type(tokenizer).__name__}. Convert it with AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"Expected a text of whole characters. Received: {error}.") from None
    with quiet(), clear_errors(loaded.name):
        batch = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    n, context, note = len(batch["input_ids"]), context_length(loaded), None
    keep = np.arange(n)
    if context is not None and n > context:
        if not truncate:
            raise TextTooLongError(
                f"Expected at most {context} tokens, the context of {loaded.name}. Received: {n} tokens. "
                "Shorten the text, or go on with the part that fits: --truncate (truncate=True)."
            )
        keep = _fitting(np.array(batch["special_tokens_mask"], bool), context, end=loaded.task == "causal")
        side = "end" if loaded.task == "causal" else "beginning"
        note = f"The text has {n} tokens and the model's context holds {context}: only its {side} was read."
    device = next(loaded.model.parameters()).device
    wanted = [k for k in tokenizer.model_input_names if k in batch]
    inputs = {k: torch.tensor(np.array(batch[k])[keep], device=device)[None] for k in wanted}
    if "input_ids" not in inputs:
        raise ModelError(f"Expected a tokenizer that gives input_ids. Received: {', '.join(wanted) or 'nothing'}.")
    special = np.array(batch["special_tokens_mask"], bool)[keep]
    if special.all():
        raise InputError("Expected a text with at least one token. Received: none but special tokens.")
    _check_vocabulary(loaded, inputs["input_ids"])
    offsets = np.array(batch["offset_mapping"])[keep]
    if note is not None:  # what was not read is not shown either
        begin, stop = int(offsets[~special, 0].min()), int(offsets[:, 1].max())
        text, offsets = text[begin:stop], np.where(special[:, None], 0, offsets - begin)
    encoding = Encoding(
        text=text,
        inputs=inputs,
        pieces=tuple(tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())),
        offsets=tuple((int(a), int(b)) for a, b in offsets),
        special=special,
        note=note,
    )
    return with_decoder(loaded, encoding) if loaded.task == "seq2seq" else encoding


def with_decoder(loaded: Loaded, encoding: Encoding) -> Encoding:
    """The encoding with what the decoder begins with: its start token, and the first token where that is forced."""
    writing = getattr(loaded.model, "generation_config", None) or loaded.model.config
    start = getattr(writing, "decoder_start_token_id", None)
    if start is None:
        start = getattr(loaded.model.config, "decoder_start_token_id", None)
    forced = getattr(writing, "forced_bos_token_id", None)
    if start is None:
        raise ModelError(
            f"Expected {loaded.name} to name the token that its decoder starts with. Received: no "
            "decoder_start_token_id. Set it in the model's configuration."
        )
    ids = [token for token in (start, forced) if token is not None]
    pieces = tuple(f"decoder {piece}" for piece in loaded.tokenizer.convert_ids_to_tokens(ids))
    return replace(
        encoding,
        pieces=encoding.pieces + pieces,
        offsets=encoding.offsets + ((0, 0),) * len(ids),
        special=np.append(encoding.special, [True] * len(ids)),
        begun=torch.tensor([ids], device=encoding.ids.device),
    )


def context_length(loaded: Loaded) -> int | None:
    """How many tokens the model reads at most; None where its positions have no end."""
    config: Any = loaded.model.config
    names = ("max_position_embeddings", "n_positions", "max_sequence_length")
    limits = [limit for name in names if isinstance(limit := getattr(config, name, None), int) and limit > 0]
    table = getattr(loaded.model.base_model, "embeddings", None)
    positions = getattr(table, "position_embeddings", None)
    padding: int | None = getattr(positions, "padding_idx", None)
    if limits and padding is not None:  # RoBERTa counts positions from padding_idx + 1
        limits.append(min(limits) - padding - 1)
    limit = getattr(loaded.tokenizer, "model_max_length", None)
    if isinstance(limit, int) and 0 < limit < 10**9:
        limits.append(limit)
    return min(limits) if limits else None


def _fitting(special: NDArray[np.bool_], context: int, *, end: bool) -> NDArray[np.intp]:
    """Indices of all special tokens and of as many others, from the beginning or the end, as fit."""
    free = np.flatnonzero(~special)
    room = max(0, context - int(special.sum()))
    chosen = free[len(free) - room :] if end else free[:room]
    return np.sort(np.concatenate([np.flatnonzero(special), chosen]))


def _check_vocabulary(loaded: Loaded, ids: Tensor) -> None:
    size = loaded.model.get_input_embeddings().num_embeddings
    if int(ids.max()) >= size:
        raise ModelError(
            f"Expected token ids below {size}, the embeddings of {loaded.name}. Received: {int(ids.max())}. "
            "Tokenizer and model do not belong together."
        )
