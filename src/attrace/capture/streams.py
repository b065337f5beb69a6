"""Rollout of a trace whose attention joins several token streams: the questions, and where they start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attrace.capture.questions import Ask, Start
from attrace.errors import CaptureError, InputError
from attrace.ops.rollout.streamed import Mixing
from attrace.ops.rollout.streams import Attend, StreamGraph, in_order, joined_by, source_shares, target_shares
from attrace.types import Array

if TYPE_CHECKING:
    from attrace.capture.recorded import RecordedOp
    from attrace.capture.trace import Trace


@dataclass(frozen=True)
class Streams:
    """The stream graph of a trace with its calls."""

    model: str
    graph: StreamGraph
    ops: dict[int, RecordedOp]
    """The call of each step."""
    valid: dict[str, Array]

    def lengths(self) -> dict[str, int]:
        """Every stream that attention reads, and its number of tokens."""
        found: dict[str, int] = {}
        for number in sorted(self.ops):
            step = self.graph.steps[number]
            assert isinstance(step, Attend)
            for at, length in zip((step.queries, step.keys), self.ops[number].shape[2:], strict=True):
                found.setdefault(self.graph.states[at].stream, length)
        for at in self.graph.read_inputs():  # parts of a joint stream, and what was cut before it was read
            state = self.graph.states[at]
            found[state.stream] = state.length or 0
        return found

    def op_of(self, stream: str) -> RecordedOp:
        """A call that reads the stream, alone or as a part: for its batch, its device, its dtype."""
        graph = self.graph
        for number, op in self.ops.items():
            step = graph.steps[number]
            assert isinstance(step, Attend)
            parts = graph.parts_of(step.queries) | graph.parts_of(step.keys)
            if any(graph.states[at].stream == stream for at in parts):
                return op
        raise AssertionError(f"no call reads {stream}")

    def last(self, stream: str) -> int | None:
        """The last state that attention made of a stream."""
        return self.graph.newest(stream)

    def first(self, stream: str) -> int | None:
        """A stream's input."""
        return next((at for at in self.graph.read_inputs() if self.graph.states[at].stream == stream), None)


def streams_of(trace: Trace) -> Streams:
    """The graph that the recorder found, else that of calls which follow each other."""
    graph, steps = trace.flow, [step for op in trace.ops if (step := getattr(op, "step", None)) is not None]
    if graph is None or len(steps) < len(trace.ops):
        graph, steps = in_order(trace.ops)
    by_step = dict(zip(steps, trace.ops, strict=True))
    valid = {**({} if trace.valid is None else {trace.main: trace.valid}), **trace.masks}
    return Streams(trace.model, graph, by_step, valid)


def rollout_over_streams(
    trace: Trace,
    ops: Sequence[RecordedOp],
    mixing: Mixing,
    start_of: Callable[[RecordedOp, int, Any, Any, Any], Start],
    *,
    target: Any,
    source: Any,
    segments: Any,
    tolerance: float,
) -> tuple[dict[str, Array], Ask, bool]:
    """The answer as vectors per stream, (B, n_stream, M).  `start_of` is the trace's own way to read a question."""
    check_names(trace)
    streams = streams_of(trace)
    wanted = {id(op) for op in ops}
    chosen = {step: op for step, op in streams.ops.items() if id(op) in wanted}
    numbers = sorted(chosen)
    downwards = source is None and segments is None
    if downwards:
        stream, target = _named(target, streams.graph.states[_step(streams, numbers[-1]).queries].stream)
        state = streams.last(stream)
        if state is None:
            raise _unknown(streams, "target", stream, {name for name in streams.lengths() if streams.last(name)})
    else:
        stream, what = _named(
            source if segments is None else segments, streams.graph.states[_step(streams, numbers[0]).keys].stream
        )
        source, segments = (what, None) if segments is None else (None, what)
        found = streams.first(stream)
        if found is None:
            names = {name for name in streams.lengths() if streams.first(name) is not None}
            raise _unknown(streams, "source" if segments is None else "segments", stream, names)
        state = found
    length = streams.graph.states[state].length
    assert length is not None
    start, ask, single = start_of(streams.op_of(stream), length, target, source, segments)
    if downwards:
        answer = target_shares(
            streams.graph, chosen, state, start, mixing, valid=_fitting(streams), tolerance=tolerance
        )
        return answer, "target", single  # a whole map has a row for each target as well
    shares = source_shares(streams.graph, chosen, state, start, mixing, valid=_fitting(streams))
    last = {name: streams.last(name) for name in streams.lengths()}
    return {name: shares[at] for name, at in last.items() if at in shares}, ask, single


def check_names(trace: Trace) -> None:
    """CaptureError where a call is known to read another stream, and not which."""
    for op in trace.ops:
        if op.kind == "cross" and len(set(joined_by(op))) == 1 and op.shape[2] == op.shape[3]:
            raise CaptureError(
                f"Expected to know which streams {op.name} of {trace.model} joins. Received: cross attention over "
                f"{op.shape[2]} queries and as many keys of unknown streams. The maps of each op are in trace.ops."
            )


def _step(streams: Streams, number: int) -> Attend:
    step = streams.graph.steps[number]
    assert isinstance(step, Attend)
    return step


def _named(question: Any, default: str) -> tuple[str, Any]:
    """("input_ids", 3) -> its two parts; anything else is about the default stream."""
    if isinstance(question, tuple) and len(question) == 2 and isinstance(question[0], str):
        return question
    return default, question


def _unknown(streams: Streams, name: str, stream: str, known: set[str]) -> InputError:
    there = ", ".join(f"{s!r} ({n} tokens)" for s, n in streams.lengths().items() if s in known)
    why = ""
    if stream in streams.lengths():
        why = ", to which no attention leads" if name == "target" else ", which is put together of others"
    return InputError(
        f"Expected {name} to name a stream of {streams.model}: {there}. Received: {stream!r}{why}. Write "
        f"{name}=(stream, position); positions alone mean the stream of the last call's queries for a target, of the "
        "first call's keys for a source."
    )


def _fitting(streams: Streams) -> dict[str, Array]:
    """Masks that are as long as their streams."""
    lengths = streams.lengths()
    return {name: mask for name, mask in streams.valid.items() if lengths.get(name) == mask.shape[-1]}
