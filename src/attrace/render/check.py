"""What every renderer needs of an attribution; nothing is drawn or written before it holds."""

from __future__ import annotations

import math

import numpy as np

from attrace.errors import InputError, NonFiniteError, ShapeError
from attrace.types import Attribution

_MEND = "Mend this value where the attribution is made."
_TOLERANCE = 1e-3
"""How far rounding may carry a mass or a probability out of [0, 1]."""


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise NonFiniteError(f"Expected a finite number. Received: {name} is {value}. {_MEND}")


def _mass(name: str, value: float) -> None:
    _finite(name, value)
    if not -_TOLERANCE <= value <= 1 + _TOLERANCE:
        raise InputError(f"Expected a number from 0 to 1. Received: {name} is {value}. {_MEND}")


def _span(name: str, start: int, end: int, length: int) -> None:
    if not 0 <= start <= end <= length:
        raise InputError(
            f"Expected a span 0 <= start <= end <= {length}, code points of the text. Received: {name} spans "
            f"({start}, {end}). Give the tokens and words of this text."
        )


def check(attribution: Attribution) -> None:
    """Raise where an attribution does not fit together.

    Raises ShapeError unless there is one score per token, NonFiniteError for NaN or infinity (with the index
    and the token), InputError for spans outside of the text, for masses and probabilities outside of [0, 1],
    and for indices of tokens that do not exist.
    """
    tokens, count = attribution.tokens, len(attribution.tokens)
    scores = np.asarray(attribution.scores)
    if scores.shape != (count,):
        raise ShapeError(
            f"Expected one score per token, shape ({count},). Received: shape {scores.shape}. "
            "Give scores and tokens of one encoding."
        )
    for index, token in enumerate(tokens):
        _finite(f"the score of token {index} ({token.text!r})", float(scores[index]))
        _span(f"token {index} ({token.text!r})", token.start, token.end, len(attribution.text))
    for number, word in enumerate(attribution.words):
        name = f"word {number} ({word.text!r})"
        _span(name, word.start, word.end, len(attribution.text))
        _finite(f"the score of {name}", word.score)
        _finite(f"the share of {name}", word.share)
        for index in word.tokens:
            if not 0 <= index < count:
                raise InputError(
                    f"Expected the index of a token, 0 to {count - 1}. Received: {name} names token {index}. {_MEND}"
                )
    _mass("lost_mass", attribution.lost_mass)
    _mass("sink_mass", attribution.sink_mass)
    if attribution.target.probability is not None:
        _mass("the target's probability", attribution.target.probability)
    for prediction in attribution.predictions:
        _mass(f"the probability of {prediction.label!r}", prediction.probability)
    if attribution.sink is not None:
        _mass("the sink's share", attribution.sink.share)
        if not 0 <= attribution.sink.index < count:
            raise InputError(
                f"Expected the index of a token, 0 to {count - 1}. Received: the sink is token "
                f"{attribution.sink.index}. {_MEND}"
            )
