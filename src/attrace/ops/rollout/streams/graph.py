"""Which states of which token streams a model's attention calls read and make.

A *state* is what one stream's positions hold at one moment.  An attention call reads the state of its queries and
that of its keys and makes a new state of the queries' stream; so calls that run side by side on the same states
(co-attention) are told from calls that follow each other.  Two states may also meet without attention: laid side by
side as one longer sequence, or added to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from attrace.errors import CaptureError
from attrace.types import Array


class PositionMap(Protocol):
    """How the positions of one state lie in those of another, n_from -> n_to; rows of the map sum to at most one."""

    def matvec(self, x: Array) -> Array:
        """(B, n_from, M) -> (B, n_to, M)."""
        ...

    def rmatvec(self, r: Array) -> Array:
        """(B, n_to, M) -> (B, n_from, M)."""
        ...

    def dense(self) -> Array | None:
        """The map itself, (n_to, n_from), in NumPy; None where positions stay."""
        ...


@dataclass(frozen=True, slots=True)
class Stay:
    """Positions are the same."""

    def matvec(self, x: Array) -> Array:
        return x

    def rmatvec(self, r: Array) -> Array:
        return r

    def dense(self) -> Array | None:
        return None


@dataclass(frozen=True, slots=True)
class Run:
    """All positions, as positions `start` to `start + count` of `total`."""

    start: int
    count: int
    total: int

    def matvec(self, x: Array) -> Array:
        from attrace.ops.namespace import framework_of

        found = framework_of(x)
        assert found is not None
        sizes = (self.start, self.total - self.start - self.count)
        empty = found.xp.zeros_like(x[:, :1])
        before, after = (found.xp.broadcast_to(empty, (x.shape[0], size, x.shape[2])) for size in sizes)
        return found.xp.concat([before, x, after], axis=1)

    def rmatvec(self, r: Array) -> Array:
        return r[:, self.start : self.start + self.count]

    def dense(self) -> Array:
        import numpy as np

        return np.eye(self.total)[:, self.start : self.start + self.count]


@dataclass(frozen=True, slots=True)
class Cut:
    """Positions `start` to `start + count` of `total` alone."""

    start: int
    count: int
    total: int

    def matvec(self, x: Array) -> Array:
        return x[:, self.start : self.start + self.count]

    def rmatvec(self, r: Array) -> Array:
        return Run(self.start, self.count, self.total).matvec(r)

    def dense(self) -> Array | None:
        return Run(self.start, self.count, self.total).dense().T


@dataclass(frozen=True, slots=True)
class Unknown:
    """The number of positions changed in a way that is not known (pooling, merging, slicing)."""

    reason: str

    def matvec(self, x: Array) -> Array:
        raise CaptureError(self.reason)

    def rmatvec(self, r: Array) -> Array:
        raise CaptureError(self.reason)

    def dense(self) -> Array | None:
        raise CaptureError(self.reason)


@dataclass(frozen=True, slots=True)
class Attend:
    """makes = residual * queries + (1 - residual) * A keys"""

    queries: int
    keys: int
    makes: int


@dataclass(frozen=True, slots=True)
class Part:
    """One of the states that another is put together of, and its share in each position that it reaches."""

    state: int
    moves: PositionMap
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Gather:
    """makes = sum of share * moves(state)"""

    parts: tuple[Part, ...]
    makes: int


@dataclass(slots=True)
class State:
    """What a stream's positions hold at one moment."""

    stream: str
    length: int | None = None
    """None until an attention call reads it."""
    batch: int | None = None
    made: Attend | Gather | None = None
    """None: the stream's input."""


@dataclass(eq=False)
class StreamGraph:
    """States and steps in the order of the model's run; every step makes a state that is newer than those it reads."""

    states: list[State] = field(default_factory=list)
    steps: list[Attend | Gather] = field(default_factory=list)

    def start(self, stream: str, length: int | None = None) -> int:
        """A stream's input; `length` where it is known already."""
        self.states.append(State(stream, length))
        return len(self.states) - 1

    def attend(self, queries: int, keys: int, shape: Sequence[int], name: str) -> tuple[int, int]:
        """Note an attention call of shape (B, H, Q, T) -> the number of its step, and the state that it makes."""
        queries, keys = (self._read(at, shape[0], n, name) for at, n in ((queries, shape[2]), (keys, shape[3])))
        made = self._make(State(self.states[queries].stream, shape[2], shape[0]), lambda at: Attend(queries, keys, at))
        return len(self.steps) - 1, made

    def join(self, states: Sequence[int], sizes: Sequence[int]) -> int:
        """States laid side by side as one sequence."""
        if (whole := self._whole_of(states)) is not None:
            return whole
        total, parts, start = sum(sizes), [], 0
        for state, size in zip(states, sizes, strict=True):
            if self.states[state].length is None:
                self.states[state].length = size
            parts.append(Part(state, Run(start, size, total)))
            start += size
        names = dict.fromkeys(name for state in states for name in self.states[state].stream.split("+"))
        return self._make(
            State("+".join(names), total, self.states[states[0]].batch), lambda at: Gather(tuple(parts), at)
        )

    def cut(self, state: int, start: int, count: int, *, named: bool = False) -> int:
        """A run of a state's positions; `named`: as a stream of its own, where one input is given to two stacks."""
        found = self.states[state]
        assert found.length is not None
        moves = Cut(start, count, found.length)
        name = f"{found.stream}[{start}:{start + count}]" if named else found.stream
        return self._make(State(name, count, found.batch), lambda at: Gather((Part(state, moves),), at))

    def average(self, one: int, other: int) -> int:
        """Two states of one stream added to each other: calls that ran side by side on the same input."""
        parts = tuple(Part(state, Stay(), 0.5) for state in (one, other))
        length = self.states[one].length
        for state in (one, other):
            if self.states[state].length != length:
                reason = (
                    f"Expected two states of the stream {self.states[one].stream} with as many tokens each. Received: "
                    f"{self.states[one].length} and {self.states[other].length}, added to each other after pooling or "
                    "merging, which is not supported yet."
                )
                parts = tuple(Part(part.state, Unknown(reason), 0.5) for part in parts)
        return self._make(State(self.states[one].stream, length, self.states[one].batch), lambda at: Gather(parts, at))

    def descends(self, state: int, from_: int) -> bool:
        """Whether a state holds another one further: its residual stream leads back to it."""
        while state > from_:
            made = self.states[state].made
            if made is None:
                return False
            if isinstance(made, Gather):
                return any(part.state == from_ or self.descends(part.state, from_) for part in made.parts)
            state = made.queries
        return state == from_

    def attended_since(self, state: int) -> bool:
        """Whether attention has made a newer state of the state's stream."""
        stream = self.states[state].stream
        return any(isinstance(newer.made, Attend) and newer.stream == stream for newer in self.states[state + 1 :])

    def is_attended(self, state: int) -> bool:
        """Whether attention took part in making a state."""
        made = self.states[state].made
        return isinstance(made, Attend) or (
            isinstance(made, Gather) and any(self.is_attended(part.state) for part in made.parts)
        )

    def parts_of(self, state: int) -> set[int]:
        """A state, and those that it is put together of without attention."""
        found, todo = set[int](), [state]
        while todo:
            at = todo.pop()
            made = self.states[at].made
            if at not in found and isinstance(made, Gather):
                todo += [part.state for part in made.parts]
            found.add(at)
        return found

    def read_inputs(self) -> list[int]:
        """Inputs that some attention call reads, straight or as parts of something."""
        steps = [step for step in self.steps if isinstance(step, Attend)]
        seen = {at for step in steps for read in {step.queries, step.keys} for at in self.parts_of(read)}
        return sorted(at for at in seen if self.states[at].made is None)

    def latest(self, stream: str) -> int | None:
        """The newest state of a stream."""
        found = (at for at in range(len(self.states) - 1, -1, -1) if self.states[at].stream == stream)
        return next(found, None)

    def newest(self, stream: str) -> int | None:
        """The newest state that attention made of a stream; None where it made none."""
        for at in range(len(self.states) - 1, -1, -1):
            made = self.states[at].made if self.states[at].stream == stream else None
            whole = isinstance(made, Gather) and all(isinstance(part.moves, Stay | Run) for part in made.parts)
            if isinstance(made, Attend) or whole:  # calls side by side, put together, are the newest
                return at
        return None

    def _whole_of(self, states: Sequence[int]) -> int | None:
        """The state that these are all consecutive parts of."""
        parents, stop = set(), 0
        for state in states:
            made = self.states[state].made
            cut = made.parts[0].moves if isinstance(made, Gather) else None
            if not isinstance(made, Gather) or not isinstance(cut, Cut) or cut.start != stop:
                return None
            parents.add(made.parts[0].state)
            stop = cut.start + cut.count
        parent = parents.pop()
        return parent if not parents and stop == self.states[parent].length else None

    def _read(self, state: int, batch: int, length: int, name: str) -> int:
        """The state as it is read, at `length` positions of each of `batch` items."""
        found = self.states[state]
        found.length = length if found.length is None else found.length
        found.batch = batch if found.batch is None else found.batch
        if (found.batch, found.length) == (batch, length):
            return state
        what = f"{length}; they were pooled, merged or cut on the way"
        if found.length is not None and length > found.length:
            what = f"{length}; some were added on the way, or lie in a cache that was filled before the recording"
        if found.length == length or found.batch != batch:
            what = f"{batch} x {length} for {found.batch} inputs; the batch was split or windows were made of it"
        reason = (
            f"Expected the {found.length} tokens of the stream {found.stream} in {name}. Received: {what}, which is "
            "not supported yet. Record the run that filled a cache, too, or ask for a target below it; the maps of "
            "each op are in trace.ops."
        )
        parts = (Part(state, Unknown(reason)),)
        return self._make(State(found.stream, length, batch), lambda at: Gather(parts, at))

    def _make(self, state: State, step_of: Callable[[int], Attend | Gather]) -> int:
        self.states.append(state)
        state.made = made = step_of(len(self.states) - 1)
        self.steps.append(made)
        return len(self.states) - 1


def joined_by(op: Any) -> tuple[str, str]:
    """The streams of a call's queries and keys; one and the same where its seam tells none."""
    return getattr(op, "queries", "tokens"), getattr(op, "keys", "tokens")


def in_order(ops: Iterable[Any]) -> tuple[StreamGraph, list[int]]:
    """The graph of calls of which only the streams are known, and the step of each: every call reads the newest states.

    Right for calls that follow each other; calls side by side need a graph of their own.
    """
    graph, steps = StreamGraph(), []
    for op in ops:
        read = []
        for stream in joined_by(op):
            at = graph.latest(stream)
            read.append(graph.start(stream) if at is None else at)
        step, _ = graph.attend(read[0], read[1], op.shape, op.name)
        steps.append(step)
    return graph, steps
