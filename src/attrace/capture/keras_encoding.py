"""Text -> what a Keras model reads, each token with its place in the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from attrace.capture.alignment import align
from attrace.capture.keras_ops import to_numpy
from attrace.errors import InputError, ModelError

IDS = ("token_ids", "input_ids", "encoder_token_ids", "tokens", "ids")
MASKS = ("padding_mask", "attention_mask", "mask")
NAMED = re.compile(r"\[[^\[\]\s]+\]|<[^<>\s]+>")
"""Tokens that stand for no text, by their look: [CLS], <s>, <|endoftext|>."""
EXPECTED = (
    "Expected as processor= what maps texts to the model's inputs and gives tokens back: a KerasHub preprocessor or "
    "tokenizer, a TextVectorization layer, or a pair (function, vocabulary)."
)


@dataclass(frozen=True)
class Reader:
    """A processor in plain form."""

    encode: Callable[[list[str]], Any]
    piece: Callable[[int], str]
    vocabulary: tuple[str, ...] | None
    special: frozenset[int] = frozenset()
    labels: tuple[str, ...] | None = None


@dataclass(frozen=True)
class KerasEncoding:
    """One encoded text of n tokens."""

    text: str
    inputs: Any
    """The model's argument: NumPy arrays in the structure that the processor gave, batch of one."""
    ids: NDArray[np.int64]
    """(n,)"""
    pieces: tuple[str, ...]
    offsets: tuple[tuple[int, int], ...]
    special: NDArray[np.bool_]
    """(n,) True at padding and at tokens that the processor added."""
    unknown: int
    """How many tokens the vocabulary does not know."""
    hidden: NDArray[np.bool_]
    """(n,) True at padding."""
    note: str | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def aligned(self, x: NDArray[Any]) -> bool:
        """Whether an input has one entry per token."""
        return x.ndim > 1 and x.shape[:2] == (1, len(self))


def reader(processor: Any) -> Reader:
    """Any of the processors that are taken; InputError for another."""
    if isinstance(processor, tuple) and len(processor) == 2 and callable(processor[0]):
        encode, words = processor
        if callable(words):
            return Reader(encode, lambda index: str(words(index)), None)
        names = tuple(str(word) for word in words)
        return Reader(encode, lambda index: _named(names, index), names)
    tokenizer = getattr(processor, "tokenizer", processor)
    if not callable(processor) or not hasattr(tokenizer, "get_vocabulary"):
        raise InputError(f"{EXPECTED} Received: {type(processor).__name__}.")
    encode = getattr(processor, "generate_preprocess", processor)  # for a prompt: no end token, no labels
    names = tuple(str(word) for word in tokenizer.get_vocabulary())
    special = getattr(tokenizer, "special_token_ids", None) or ()
    labels = getattr(processor, "labels", None)
    piece = getattr(tokenizer, "id_to_token", None) or (lambda index: _named(names, index))
    return Reader(
        encode,
        lambda index: str(piece(index)),
        names,
        frozenset(int(i) for i in special if i is not None),
        None if labels is None else tuple(str(label) for label in labels),
    )


def _named(names: tuple[str, ...], index: int) -> str:
    if not 0 <= index < len(names):
        raise ModelError(
            f"Expected token ids below {len(names)}, the processor's vocabulary. Received: {index}. "
            "Processor and vocabulary do not belong together."
        )
    return names[index]


def encode(found: Reader, model: Any, text: str) -> KerasEncoding:
    """Encode one text.  Padding that a mask hides is left out where the model takes any length."""
    if not isinstance(text, str):
        raise InputError(f"Expected one text as a string. Received: {type(text).__name__}. Explain texts one by one.")
    if not text.strip():
        raise InputError("Expected a text with at least one word. Received: an empty one.")
    given = found.encode([text])
    given = given[0] if isinstance(given, tuple) else given
    inputs = keras.tree.map_structure(to_numpy, given)
    ids = _ids(inputs)
    length = ids.shape[1]
    hidden = _hidden(inputs, ids)
    full = not hidden.any()
    if any_length(model) and hidden.any() and _mask_of(inputs) is not None:
        keep = np.flatnonzero(~hidden)
        inputs = keras.tree.map_structure(lambda x: x[:, keep] if x.ndim > 1 and x.shape[1] == length else x, inputs)
        ids, hidden = ids[:, keep], hidden[keep]
    pieces = tuple(found.piece(int(i)) or "[PAD]" for i in ids[0])
    offsets, unknown = align(text, pieces)
    none = np.array([start == stop for start, stop in offsets])
    named = np.array([bool(NAMED.fullmatch(piece)) for piece in pieces]) & none
    listed = np.isin(ids[0], list(found.special)) if found.special else np.zeros(len(pieces), bool)
    special = hidden | named | (listed & none)
    if special.all():
        raise InputError("Expected a text with at least one token. Received: none but special tokens.")
    end = max(stop for _, stop in offsets)
    note = None
    if full and re.search(r"\w", text[end:]):
        note = f"The processor gave {len(pieces)} tokens, up to {text[:end][-20:]!r}: what follows was not read."
    return KerasEncoding(
        text=text,
        inputs=inputs,
        ids=ids[0].astype(np.int64),
        pieces=pieces,
        offsets=tuple((0, 0) if flag else place for flag, place in zip(special, offsets, strict=True)),
        special=special,
        unknown=unknown,
        hidden=hidden,
        note=note,
    )


def _ids(inputs: Any) -> NDArray[Any]:
    """The token ids among the inputs, (1, n)."""
    if isinstance(inputs, dict):
        named = [inputs[k] for k in IDS if k in inputs]
        candidates = named or list(inputs.values())
    else:
        candidates = keras.tree.flatten(inputs)
    found = [x for x in candidates if x.ndim == 2 and x.shape[0] == 1 and x.dtype.kind in "iu"]
    if not found:
        shapes = [f"{x.dtype} {x.shape}" for x in keras.tree.flatten(inputs)]
        raise InputError(f"{EXPECTED} Received: one that gives no token ids of shape (1, n) but {', '.join(shapes)}.")
    ids: NDArray[Any] = found[0]
    return ids


def _mask_of(inputs: Any) -> NDArray[Any] | None:
    """The padding mask among the inputs, (1, n)."""
    return next((inputs[k] for k in MASKS if k in inputs), None) if isinstance(inputs, dict) else None


def _hidden(inputs: Any, ids: NDArray[Any]) -> NDArray[np.bool_]:
    """(n,) True at padding: by the mask, or, without one, zeros at the end."""
    mask = _mask_of(inputs)
    if mask is not None:
        hidden: NDArray[np.bool_] = ~mask[0].astype(bool)
        return hidden
    used = np.flatnonzero(ids[0])
    return np.arange(ids.shape[1]) > (used[-1] if len(used) else -1)


def any_length(model: Any) -> bool:
    """Whether the model says that it takes texts of any length."""
    shapes = [x.shape for x in getattr(model, "inputs", None) or ()]
    return bool(shapes) and all(len(shape) < 2 or shape[1] is None for shape in shapes)


def without(encoding: KerasEncoding, kept: NDArray[np.bool_], *, pad: bool) -> Any:
    """The inputs with only the kept tokens, (m, n) rows that keep equally many; `pad` fills up to n at the end."""
    rows, n = kept.shape
    index = np.nonzero(kept)[1].reshape(rows, -1)

    def cut(x: NDArray[Any]) -> NDArray[Any]:
        if not encoding.aligned(x):
            return np.repeat(x, rows, axis=0)
        shorter: NDArray[Any] = x[0][index]
        if not pad or index.shape[1] == n:
            return shorter
        fill = np.zeros((rows, n - index.shape[1], *x.shape[2:]), x.dtype)
        if encoding.hidden.any():
            fill += x[0, np.flatnonzero(encoding.hidden)[-1]]
        return np.concatenate([shorter, fill], axis=1)

    return keras.tree.map_structure(cut, encoding.inputs)


def masked(encoding: KerasEncoding, kept: NDArray[np.bool_]) -> Any:
    """The inputs with all tokens in place, those that are not kept hidden by the padding mask; (m, n) rows."""
    if _mask_of(encoding.inputs) is None:
        raise InputError(
            f"Expected a model with a padding mask among its inputs ({', '.join(MASKS)}), to hide tokens. Received: "
            "none. Remove tokens by the operator delete."
        )
    whole = keras.tree.map_structure(lambda x: np.repeat(x, len(kept), axis=0), encoding.inputs)
    return {k: kept.astype(v.dtype) & v if k in MASKS else v for k, v in whole.items()}
