"""Attention that is among something else than tokens: it is told of, and never shown as a map of tokens."""

from __future__ import annotations

from collections.abc import Sequence


def beside_tokens(
    given: Sequence[int],
    shape: tuple[int, int, int, int],
    width: int,
    *,
    heads: int | None,
    tokens: int | None,
    convolves: bool = False,
) -> str:
    """What a call attends among where that is not tokens: "channels", "layers", or "" for tokens.

    `given` is the shape of what its module was given, `shape` that of its map, (B, H, Q, T), `width` that of a value,
    `heads` how many the module says it has, `tokens` how many the model was given; None where that is not known.
    A module that `convolves` may be given its channels first, (B, C, N).

    Attention among channels (cross-covariance: El-Nouby et al. 2021, arXiv 2106.09681) has the tokens along its
    values, and its heads times its keys are the channels of what it was given.  Attention among layers (each token
    reads what earlier layers made of it) has the tokens in the place of heads.

    >>> beside_tokens((1, 196, 128), (1, 4, 32, 32), 196, heads=4, tokens=None)
    'channels'
    >>> beside_tokens((1, 196, 128), (1, 4, 196, 196), 32, heads=4, tokens=None)
    ''
    """
    _, lead, queries, keys = shape
    own = len(given) == 4 and lead == given[1] == tokens and width == given[3]
    if own and lead != heads and tokens not in (queries, keys):
        return "layers"
    if len(given) == 3:
        layouts = [(given[1], given[2]), *([(given[2], given[1])] if convolves else [])]
    elif len(given) == 4 and (given[1], given[2]) != (lead, queries):  # an image; not queries in heads
        layouts = [(given[1] * given[2], given[3]), (given[2] * given[3], given[1])]
    else:
        return ""
    among = any(width == count and lead * keys == channels for count, channels in layouts)
    return "channels" if among and queries == keys and all(keys != count for count, _ in layouts) else ""
