"""Which axes of a map are batch, heads, queries and keys: read off the product that it meets the values in."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from string import ascii_letters

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """The map's axes in the order (batch..., heads..., queries..., keys...)."""

    axes: tuple[int, ...]
    lead: int
    """How many of them are batch and heads."""
    queries: int
    """How many are queries."""
    grouped: bool = False
    """All after the first of the lead are heads: groups that share a key head."""

    def shape(self, sizes: Shape, batch: int | None, heads: int | None) -> tuple[int, int, int, int] | str:
        """(B, H, Q, T) of a map of these sizes, or why it has none.  `batch` and `heads` as far as they are known."""
        ordered = [sizes[axis] for axis in self.axes]
        lead, rest = ordered[: self.lead], ordered[self.lead :]
        grouped = self.grouped and len(lead) > 1
        found = (lead[0], prod(lead[1:])) if grouped else batch_and_heads(lead, batch, heads)
        if found is None:
            return f"a map of shape {sizes}"
        return *found, prod(rest[: self.queries]), prod(rest[self.queries :])


def batch_and_heads(lead: list[int], batch: int | None, heads: int | None) -> tuple[int, int] | None:
    """B and H of the axes before queries and keys: (B, H), (B,), or (B * H,); None where it is something else."""
    if len(lead) == 2:
        swapped = batch is not None and lead[0] != batch and lead[1] == batch and lead[1] != heads
        return None if swapped else (lead[0], lead[1])
    if len(lead) != 1:
        return None
    if lead[0] == batch:
        return lead[0], 1
    if heads and lead[0] % heads == 0 and (batch is None or batch * heads == lead[0]):
        return lead[0] // heads, heads
    if batch and lead[0] % batch == 0:
        return batch, lead[0] // batch
    return None


def matmul_form(used: Shape, other: Shape) -> Form | str:
    """A V with A (..., Q, T) and V (..., T, D)."""
    count = len(used)
    shared = len(other) == count == 5 and other[2] == 1 < used[2]  # (B, K, G, Q, T) with (B, K, 1, T, D)
    return Form(tuple(range(count)), count - 2, 1, grouped=shared)


def einsum_form(equation: str, which: int, used: Shape, other: Shape) -> Form | str | None:
    """The form of operand number `which`; `used` and `other` are the sizes of the map and of the other operand.

    None where the product is no attention: no axis of queries shares the values (experts weighted by a router).
    """
    sizes = (used, other) if which == 0 else (other, used)
    operands, result = _letters(equation, sizes)
    mine, its = operands[which], operands[1 - which]
    shared = [c for c in mine if c in its and c in result]
    keys = [c for c in mine if c in its and c not in result]
    free = [c for c in mine if c not in its and c in result]
    if not keys or mine[-1] not in keys:
        return "summed over its queries"
    if not free and len(shared) + len(keys) == len(mine):
        return None
    extra = len(free) - len(keys)
    if not free or extra not in (0, 1) or len(shared) + len(keys) + len(free) != len(mine):
        return f"a map of shape {used} in the product {equation}"
    lead = [*shared, *free[:extra]]
    order = [*lead, *free[extra:], *keys]
    return Form(tuple(mine.index(c) for c in order), len(lead), len(keys), grouped=extra == 1)


def _letters(equation: str, sizes: tuple[Shape, Shape]) -> tuple[list[str], str]:
    """The subscripts of both operands and of the result, "..." written out."""
    left, _, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    unused = [c for c in ascii_letters if c not in equation]
    for at, term in enumerate(terms):
        if "..." in term:
            letters = "".join(unused[: len(sizes[at]) - len(term) + 3])
            terms[at], result = term.replace("...", letters), result.replace("...", letters)
    return terms, result
