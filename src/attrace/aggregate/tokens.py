"""Labels for tokens: what the reader sees is the source text, never the tokenizer's alphabet."""

from __future__ import annotations

from collections.abc import Sequence

from attrace.aggregate.graphemes import boundaries, widen
from attrace.errors import InputError, ShapeError
from attrace.types import Token


def label_tokens(
    text: str,
    offsets: Sequence[tuple[int, int]],
    pieces: Sequence[str],
    special_mask: Sequence[bool | int],
) -> tuple[Token, ...]:
    """Name each of n tokens by the slice of `text` that it stands for.

    `offsets` has n pairs (start, end) of code point positions in `text`, as a fast tokenizer gives them;
    `pieces` the n tokens in the tokenizer's own alphabet ("Ġcats", "##able", "[CLS]"); `special_mask` n
    flags, true for what the tokenizer added (class token, separator, padding).

    The n tokens that come back hold `token.text == text[token.start:token.end]`, a leading blank included
    where the tokenizer counts it to the token.  A span that begins or ends inside a character (one byte of an
    emoji, a letter without its accent) is widened, so that all tokens of one character carry the whole of it
    and overlap.  Special tokens, and tokens that stand for no text, are named by their piece and keep their
    offsets.

    Raises ShapeError where the three sequences differ in length, InputError for an offset outside the text.

    >>> [token.text for token in label_tokens("a 😀", [(0, 1), (1, 3), (2, 3)], ["a", "ĠðŁ", "ĺĢ"], [0] * 3)]
    ['a', ' 😀', '😀']
    """
    if not len(offsets) == len(pieces) == len(special_mask):
        raise ShapeError(
            f"Expected one offset, one piece and one flag per token. Received: {len(offsets)} offsets, "
            f"{len(pieces)} pieces and {len(special_mask)} flags. Take all three from one encoding."
        )
    bounds = boundaries(text)
    tokens = []
    for index, ((start, end), piece, special) in enumerate(zip(offsets, pieces, special_mask, strict=True)):
        start, end = int(start), int(end)  # noqa: PLW2901
        if not 0 <= start <= end <= len(text):
            raise InputError(
                f"Expected code point positions 0 <= start <= end <= {len(text)}. Received: token {index} ({piece!r}) "
                f"with the offsets ({start}, {end}). Convert offsets that count bytes first."
            )
        if special or start == end:
            # A byte-level blank whose offsets were trimmed away is shown as one, not as the tokenizer's sign for it.
            blank = not special and piece and not piece.strip("Ġ▁ ")
            tokens.append(Token("␣" * len(piece) if blank else piece, start, end, bool(special)))
        else:
            start, end = widen(bounds, start, end)  # noqa: PLW2901
            tokens.append(Token(text[start:end], start, end))
    return tuple(tokens)
