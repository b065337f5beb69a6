"""From the noted convolutions to a grid: which of them make the tokens, and how far each token reaches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from attrace.capture.observed import Join, Observed, Strided, prefix_label


@dataclass(frozen=True)
class Stem:
    """The strided convolutions that make tokens of one of the model's inputs."""

    argument: str
    """The forward's argument that they read."""
    name: str
    """The module of the first."""
    at: int
    """How many attention calls came before."""
    batch: int
    sizes: tuple[int, ...]
    """Of the input, along the convolutions' axes."""
    counts: tuple[int, ...]
    """Of the tokens."""
    reach: tuple[int, ...]
    """Receptive field."""
    stride: tuple[int, ...]
    offset: tuple[int, ...]
    """Where the first token's field begins."""
    turned: bool
    """The input holds the two axes the other way round (time before frequency)."""
    flat: bool
    """The input has no axis of channels."""


def stems(seen: Observed) -> list[list[Stem]]:
    """For each input of the model that convolutions read, what may make its tokens, the longest chain first.

    A convolution behind the stem may belong to an attention layer that makes fewer keys: the token count decides.
    """
    found: dict[str, list[Stem]] = {}
    for index, step in enumerate(seen.steps):
        origin = _origin(step, seen)
        if origin is None or origin[0] in found:
            continue
        argument, sizes, turned = origin
        found[argument] = [
            Stem(
                argument,
                step.name,
                step.at,
                step.given[0],
                sizes,
                chain[-1].made[2:],
                *_fields(chain, len(sizes)),
                turned,
                flat=len(seen.shapes[argument]) == len(sizes) + 1,
            )
            for chain in _chains(step, seen.steps[index + 1 :])
        ]
    return list(found.values())


def _origin(step: Strided, seen: Observed) -> tuple[str, tuple[int, ...], bool] | None:
    """The argument that the convolution reads, perhaps with a margin less than its own kernel; its sizes along the
    convolution's axes; whether it holds them the other way round.
    """
    channels, read = step.given[1], step.given[2:]
    for name, shape in seen.shapes.items():
        for among, sizes, turned in _layouts(shape, len(read)):
            margins = [more - size for more, size in zip(read, sizes, strict=True)]
            if among == channels and all(0 <= m < k for m, k in zip(margins, step.kernel, strict=True)):
                return name, sizes, turned
    return None


def _layouts(shape: tuple[int, ...], axes: int) -> Iterator[tuple[int, tuple[int, ...], bool]]:
    """(channels, sizes, turned) that an input of this shape may hold: channels first, last, or none."""
    rank = len(shape)
    if rank >= axes + 2:
        yield shape[-axes - 1], shape[-axes:], False
        yield shape[-1], shape[-axes - 1 : -1], False
    if rank == axes + 1:
        yield 1, shape[1:], False
        if axes == 2:
            yield 1, (shape[2], shape[1]), True
    if axes == 3 and rank == 5:  # (B, T, C, H, W)
        yield shape[2], (shape[1], *shape[3:]), False


def _chains(first: Strided, later: Sequence[Strided]) -> list[list[Strided]]:
    """Convolutions that follow each on what the last one made, each time up to one that has a stride.

    Those behind the last stride keep every token where it is: position encodings, for one.
    """
    chains, waiting = [[first]], [first]
    for step in takewhile(lambda step: step.at == first.at, later):
        made = waiting[-1].made
        # A gated activation in between halves the channels.
        if step.given[2:] == made[2:] and step.given[1] in (made[1], made[1] // 2):
            waiting.append(step)
            if max(step.stride) > 1:
                chains.append(list(waiting))
    return chains[::-1]


def _fields(chain: Sequence[Strided], axes: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(receptive field, stride, start), each along every axis."""
    fields = [_field([(s.kernel[a], s.stride[a], s.padding[a], s.dilation[a]) for s in chain]) for a in range(axes)]
    reach, stride, offset = zip(*fields, strict=True)
    return reach, stride, offset


def _field(steps: Sequence[tuple[int, int, int, int]]) -> tuple[int, int, int]:
    """(receptive field, stride, start) along one axis of (kernel, stride, padding, dilation) in turn."""
    reach, jump, start = 1, 1, 0
    for kernel, stride, padding, dilation in steps:
        reach += (kernel - 1) * dilation * jump
        start -= padding * jump
        jump *= stride
    return reach, jump, start


def around(patches: int, tokens: int, stem: Stem, seen: Observed) -> tuple[list[str], list[str]] | str:
    """Names of the tokens before and after the patches, or why they cannot be told.

    By the parameters that the run put beside them; where those were changed first, by the usual names of parameters.
    """
    before: list[str | None] = []
    after: list[str | None] = []
    for join in seen.joins:
        if join.at == stem.at:
            before, after = _joined(join, before, patches, after)
    if len(before) + patches + len(after) == tokens and None not in (*before, *after):
        return _names(before), _names(after)
    usual = {name: count for name, count in seen.parameters.items() if _near(name, stem.name, seen.parameters)}
    found = _by_length(usual, patches, tokens, stem, seen)
    if found is not None:
        return found
    parameters = ", ".join(f"{name} ({count})" for name, count in usual.items()) or "none"
    return f"{tokens} tokens for {patches} patches, and parameters that are tokens: {parameters}"


def _by_length(
    usual: dict[str, int], patches: int, tokens: int, stem: Stem, seen: Observed
) -> tuple[list[str], list[str]] | None:
    """Names of tokens that were computed from parameters before they were joined: by how many there are of each.

    None where two of them are equally many, or no join has these lengths.
    """
    if len(set(usual.values())) < len(usual):
        return None
    by_count = {count: name for name, count in usual.items()}
    for join in seen.joins:
        lengths = [count for _, count in join.parts]
        others = [count for count in lengths if count != patches]
        alone = lengths.count(patches) == 1 and sum(lengths) == tokens
        if join.at == stem.at and alone and sorted(others) == sorted(by_count):
            at = lengths.index(patches)
            head, tail = ([by_count[n] for n in part for _ in range(n)] for part in (lengths[:at], lengths[at + 1 :]))
            return _names(head), _names(tail)
    return None


def _joined(
    join: Join, before: list[str | None], patches: int, after: list[str | None]
) -> tuple[list[str | None], list[str | None]]:
    """The tokens around the patches after a join; unchanged where the join is about something else."""
    held = len(before) + patches + len(after)
    computed = [i for i, (name, _) in enumerate(join.parts) if name is None]
    if sum(join.parts[i][1] for i in computed) != held:
        return before, after
    flow: list[str | None] = [*before, *[""] * patches, *after]
    made: list[str | None] = []
    for name, count in join.parts:
        if name is None:
            made += flow[:count]
            flow = flow[count:]
        else:
            made += [name] * count
    first = made.index("")
    return made[:first], made[first + patches :]


def _near(name: str, stem: str, parameters: dict[str, int]) -> bool:
    """Whether a token parameter belongs to the stem's own tower: no other has more of its path in common."""

    def common(one: str) -> int:
        pairs = zip(one.split("."), stem.split("."), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    return common(name) == max(common(other) for other in parameters)


def _names(tokens: Sequence[str | None]) -> list[str]:
    """Parameter names as labels, numbered where a parameter is several tokens."""
    counts = {name: list(tokens).count(name) for name in tokens}
    used: dict[str | None, int] = {}
    named = []
    for name in tokens:
        used[name] = used.get(name, 0) + 1
        # A table of embeddings holds its tokens as its weight.
        label = prefix_label(name or "") or (name or "").removesuffix(".weight").rpartition(".")[2]
        several = counts[name] > 1 or label in ("register", "detection")
        named.append(f"{label} {used[name]}" if several else label)
    return named
