"""What is explained: a class, the next token, the token at a position, a sentence vector."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from attrace.errors import InputError, TargetError
from attrace.types import Prediction, Target

if TYPE_CHECKING:
    from torch import Tensor

    from attrace.capture.encoding import Encoding
    from attrace.capture.huggingface import Loaded

TOP = 5
"""How many of the model's likeliest answers are told."""


@dataclass(frozen=True)
class Question:
    """A target made exact for one input."""

    target: Target
    rival: int | None
    """Class or vocabulary id of B in "why A rather than B"."""
    length: int
    """How many of the input's tokens the model is shown: all, or those before a causal model's target."""
    predictions: tuple[Prediction, ...]


def parse(target: str) -> tuple[str, str]:
    """Kind and name: ("class", "spam") of "class:spam", ("auto", "") of "auto"."""
    if not isinstance(target, str):
        raise TargetError(f"Expected a target as a string, such as auto or class:LABEL. Received: {target!r}.")
    kind, colon, rest = target.partition(":")
    if target == "auto":
        return "auto", ""
    if not colon or kind not in ("class", "next", "token") or not rest:
        raise TargetError(
            "Expected a target: auto, class:LABEL, class:INDEX, next:TEXT, token:POSITION, or a contrast A~B. "
            f"Received: {target!r}."
        )
    return kind, rest


def position(text: str, n: int) -> int:
    """A token position, negative ones from the end."""
    if not re.fullmatch(r"[+-]?\d{1,9}", text.strip()):
        raise TargetError(f"Expected token:POSITION with a whole number. Received: {text!r}.")
    at = int(text)
    if not -n <= at < n:
        raise InputError(f"Expected a token position from 0 to {n - 1} (or -{n} to -1). Received: {at}.")
    return at % n


def shown(loaded: Loaded, index: int) -> str:
    """A vocabulary entry as text."""
    text: str = loaded.tokenizer.decode([index])
    return text if text and "\ufffd" not in text else str(loaded.tokenizer.convert_ids_to_tokens(index))


def class_question(loaded: Loaded, logits: Tensor, target: str, n: int) -> Question:
    """Logits (C,)."""
    config = loaded.model.config
    labels = [str(config.id2label.get(i, i)) for i in range(len(logits))]
    probabilities = _class_probabilities(loaded, logits)
    known = None if probabilities is None else probabilities.cpu().numpy()
    return one_of_classes(labels, known, int(logits.argmax()), target, n)


def one_of_classes(labels: list[str], probabilities: NDArray[Any] | None, best: int, target: str, n: int) -> Question:
    """A class of a classifier, by default its answer; probabilities (C,), None for a regression."""
    kind, text = parse(target)
    if kind not in ("auto", "class"):
        raise TargetError(f"Expected class:LABEL of a classifier: {listed(labels)}. Received: {target!r}.")
    index, rival = best, None
    if kind == "class":
        index, rival = contrast_of(text, lambda name: class_index(name, labels))
    return Question(
        Target(
            "class",
            labels[index],
            index=index,
            probability=None if probabilities is None or rival is not None else float(probabilities[index]),
            contrast=None if rival is None else labels[rival],
        ),
        rival,
        n,
        () if probabilities is None else likeliest(probabilities, labels.__getitem__),
    )


def likeliest(probabilities: NDArray[Any], show: Callable[[int], str]) -> tuple[Prediction, ...]:
    """The TOP answers with the largest probability, the first of equals first."""
    order = np.argsort(-probabilities, kind="stable")[:TOP]
    return tuple(Prediction(show(int(i)), float(probabilities[i])) for i in order)


def causal_target(target: str, n: int) -> tuple[str, str, int]:
    """For a causal model and n tokens: kind, text, and how many tokens come before the one that is explained."""
    kind, text = parse(target)
    if kind == "class":
        raise TargetError(f"Expected auto, next:TEXT or token:POSITION of a language model. Received: {target!r}.")
    before = position(text, n) if kind == "token" else n
    if before == 0:
        raise TargetError("Expected a position with tokens before it, 1 or more. Received: 0, the first token.")
    return kind, text, before


def token_question(loaded: Loaded, logits: Tensor, encoding: Encoding, target: str) -> Question:
    """For a causal model, logits (n, V): the next token, or the token at a position given those before it."""
    kind, text, before = causal_target(target, len(encoding))
    probabilities = logits[before - 1].float().softmax(-1)
    rival = None
    if kind == "next":
        index, rival = contrast_of(text, lambda name: _token_index(loaded, name, probabilities))
    else:
        index = int(encoding.ids[before]) if kind == "token" else int(probabilities.argmax())
    return _token_question(loaded, probabilities, index=index, at=before - 1, rival=rival, length=before)


def first_token_question(loaded: Loaded, logits: Tensor, encoding: Encoding, target: str) -> Question:
    """For an encoder-decoder, logits (m, V) of its decoder: the first token that it writes."""
    kind, text = parse(target)
    if kind not in ("auto", "next"):
        raise TargetError(f"Expected auto or next:TEXT of an encoder-decoder. Received: {target!r}.")
    probabilities = logits[-1].float().softmax(-1)
    index, rival = int(probabilities.argmax()), None
    if kind == "next":
        index, rival = contrast_of(text, lambda name: _token_index(loaded, name, probabilities))
    return _token_question(loaded, probabilities, index=index, at=None, rival=rival, length=encoding.length)


def mask_question(loaded: Loaded, logits: Tensor, encoding: Encoding, target: str) -> Question:
    """For a masked model, logits (n, V): the answer at its mask, or the token at a position."""
    kind, text = parse(target)
    mask = loaded.tokenizer.mask_token
    masks = np.flatnonzero((encoding.ids == loaded.tokenizer.mask_token_id).cpu().numpy())
    if kind == "class" or (kind == "next" and len(masks) != 1) or (kind == "auto" and len(masks) != 1):
        raise TargetError(
            f"Expected a text with one {mask} to fill, or token:POSITION, of a masked language model. "
            f"Received: target {target!r} and {len(masks)} {mask} in the text, which has the positions 0 to "
            f"{len(encoding) - 1}."
        )
    at = position(text, len(encoding)) if kind == "token" else int(masks[0])
    probabilities = logits[at].float().softmax(-1)
    rival = None
    if kind == "next":
        index, rival = contrast_of(text, lambda name: _token_index(loaded, name, probabilities))
    else:
        index = int(probabilities.argmax()) if at in masks else int(encoding.ids[at])
    return _token_question(loaded, probabilities, index=index, at=at, rival=rival, length=len(encoding))


def vector_question(encoding: Encoding, target: str) -> Question:
    """For an encoder without a head: its mean vector, or the vector at a position."""
    kind, text = parse(target)
    if kind in ("class", "next"):
        raise TargetError(f"Expected auto or token:POSITION of a model without a head. Received: {target!r}.")
    n = len(encoding)
    if kind == "auto":
        return Question(Target("embedding", "sentence vector"), None, n, ())
    at = position(text, n)
    return Question(Target("embedding", f"vector of token {at}", position=at), None, n, ())


def _token_question(
    loaded: Loaded, probabilities: Tensor, *, index: int, at: int | None, rival: int | None, length: int
) -> Question:
    kind: Literal["next", "token"] = "next" if loaded.task in ("causal", "seq2seq") else "token"
    values = probabilities.cpu().numpy()
    return one_of_tokens(kind, values, lambda i: shown(loaded, i), index=index, at=at, rival=rival, length=length)


def one_of_tokens(
    kind: Literal["next", "token"],
    probabilities: NDArray[Any],
    show: Callable[[int], str],
    *,
    index: int,
    at: int | None,
    rival: int | None,
    length: int,
) -> Question:
    """An entry of the vocabulary; probabilities (V,), `show` gives an entry as text."""
    return Question(
        Target(
            kind,
            show(index),
            index=index,
            position=at,
            probability=float(probabilities[index]) if rival is None else None,
            contrast=None if rival is None else show(rival),
        ),
        rival,
        length,
        likeliest(probabilities, show),
    )


def _class_probabilities(loaded: Loaded, logits: Tensor) -> Tensor | None:
    kind = getattr(loaded.model.config, "problem_type", None)
    if kind == "regression" or len(logits) == 1:
        return None
    return logits.float().sigmoid() if kind == "multi_label_classification" else logits.float().softmax(-1)


def contrast_of(text: str, find: Any) -> tuple[int, int | None]:
    """The index of A in "A", of both in "A~B"; a name that itself holds a ~ is tried whole first."""
    if "~" not in text.strip("~"):
        return find(text), None
    try:
        return find(text), None
    except TargetError:
        first, _, second = text.partition("~")
        index, rival = find(first), find(second)
        if index == rival:
            raise TargetError(f"Expected two different targets in A~B. Received: {text!r}.") from None
        return index, rival


def class_index(name: str, labels: list[str]) -> int:
    for candidates, wanted in ((labels, name), ([label.casefold() for label in labels], name.casefold())):
        if candidates.count(wanted) == 1:
            return candidates.index(wanted)
    if re.fullmatch(r"\d{1,9}", name) and int(name) < len(labels):
        return int(name)
    raise TargetError(f"Expected a class of the model: {listed(labels)}. Received: {name!r}.")


def _token_index(loaded: Loaded, text: str, probabilities: Tensor) -> int:
    """The vocabulary id of one token's text, with or without a blank before it, whichever is likelier."""
    found = []
    for form in (text, " " + text):
        ids = loaded.tokenizer(form, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and ids[0] != loaded.tokenizer.unk_token_id and ids[0] < len(probabilities):
            found.append(int(ids[0]))
    if not found:
        likely = [shown(loaded, int(i)) for i in probabilities.topk(min(10, len(probabilities))).indices.tolist()]
        pieces = loaded.tokenizer.tokenize(text)
        raise TargetError(
            f"Expected the text of one token; the likeliest here are {listed(likely)}. Received: {text!r}, which is "
            f"{len(pieces)} tokens or unknown to the model."
        )
    return max(found, key=lambda i: float(probabilities[i]))


def listed(names: list[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(repr(n) for n in names[:20]) + more
