"""Where tokens stand in a text, for tokenizers that give no offsets."""

from __future__ import annotations

import re
from collections.abc import Sequence


def align(text: str, pieces: Sequence[str]) -> tuple[list[tuple[int, int]], int]:
    """Where each piece stands in the text, (0, 0) where it stands for none; and how many are unknown.

    Pieces follow each other in the text.  Marks of the tokenizer (##, Ġ, ▁) and case are passed over; what the
    vocabulary does not know ([UNK]) stands for the word that is next.

    >>> align("The cats sat", ["[CLS]", "the", "cat", "##s", "[UNK]", "[SEP]"])
    ([(0, 0), (0, 3), (4, 7), (7, 8), (9, 12), (0, 0)], 1)
    """
    plain = _lower(text)
    places, cursor, unknown = [], 0, 0
    for piece in pieces:
        bare = piece.removeprefix("##").replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n").removesuffix("</w>")
        wanted = bare.strip() or bare
        low = _lower(wanted)
        at = plain.find(low, cursor) if low else -1
        if piece.strip("[]<>").lower() in ("unk", "oov") and at < 0:
            unknown += 1
            word = re.compile(r"\w+|[^\w\s]+").search(text, cursor)
            place = word.span() if word else (0, 0)
        else:
            place = (at, at + len(low)) if at >= 0 else (0, 0)
        places.append(place)
        cursor = max(cursor, place[1])
    return places, unknown


def _lower(text: str) -> str:
    """In lower case, of the same length: a few letters would become two."""
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
