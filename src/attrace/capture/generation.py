"""The calls of one generation, assembled: one operator per layer, a row for each token that the model was given.

A cached call has the rows of its own tokens alone, and in a windowed or static cache its keys do not begin at the
first token.  Here each row is read from the call that computed it and put where it stands in the sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attrace.capture.steps import Call, extent
from attrace.capture.torch_ops import TorchAttention
from attrace.capture.torch_streams import stack_of
from attrace.capture.trace import Trace
from attrace.errors import CaptureError, InputError, ShapeError
from attrace.types import Heads

BEAMS = "generate(..., return_dict_in_generate=True, output_scores=True)"


@dataclass(frozen=True, eq=False)
class Step:
    """What one call gives to the assembled map: rows `start` to `stop` of the sequence."""

    op: TorchAttention
    start: int
    stop: int
    skip: int
    """Rows of the call before the one at `start`."""
    column: int
    """Where the call's first key stands."""
    keys: int
    """How many of the call's keys are tokens."""
    items: Tensor | None = None
    """(B,) row of the call's batch for each sequence, -1 where the sequence had ended; None: as they are."""


@dataclass(eq=False)
class AssembledAttention(TorchAttention):
    """One layer over a whole generation, (B, H, n, n), or (B, H, n, T) for cross attention; n = tokens given.

    The last generated token was never given to the model: it has no row.  Keys after a row's own token, and those that
    a window had dropped, have weight zero because the model gave them none.  A row that no call computed (of a
    sequence that ended before the others, or of tokens cached before the recording) is `missing`: NaN in
    `weights`, a CaptureError where a rollout needs it.
    """

    steps: list[Step] = field(kw_only=True, repr=False)
    missing: Tensor = field(kw_only=True, repr=False)
    """(B, n), True at rows that no call computed."""

    def __post_init__(self) -> None:
        self.missing = self.missing.to(self.device)
        self._any_missing = bool(self.missing.any())
        self._step_of = torch.full((self.shape[2],), -1, dtype=torch.long)
        for number, step in enumerate(self.steps):
            self._step_of[step.start : step.stop] = number

    @property
    def causal(self) -> bool:
        return self.kind == "self" and all(step.op.causal or step.op.shape[2] == 1 for step in self.steps)

    @property
    def device(self) -> torch.device:
        return self.steps[0].op.device

    @property
    def dtype(self) -> torch.dtype:
        return self.steps[0].op.dtype

    def first_bad_row(self) -> int | None:
        for step in self.steps:
            if (row := step.op.first_bad_row()) is not None:
                return step.start + max(row - step.skip, 0)
        return None

    def weights(self, rows: int | Sequence[int] | Tensor | None = None) -> Tensor:
        """As for every operator; NaN in rows that are `missing`."""
        found = super().weights(rows)
        if self._any_missing:
            gone = self.missing if rows is None else self.missing[:, torch.atleast_1d(torch.as_tensor(rows))]
            found.masked_fill_(gone[:, None, :, None], torch.nan)
        return found

    def matvec(self, x: Tensor, *, heads: Heads = "mean") -> Tensor:
        """As for every operator; what stands at missing rows of x counts nothing, and is NaN in the product."""
        if not self._any_missing:
            return super().matvec(x, heads=heads)
        gone = (self.missing if x.ndim == 2 else self.missing[..., None]).to(x.device)
        known = x.masked_fill(gone, 0.0) if self.kind == "self" else x
        return super().matvec(known, heads=heads).masked_fill(gone, torch.nan)

    def rmatvec(self, r: Tensor, *, heads: Heads = "mean") -> Tensor:
        """As for every operator; CaptureError where r has mass at a missing row."""
        if self._any_missing and r.shape[:2] == self.missing.shape:
            lost = self.missing.to(r.device) & (r != 0).reshape(*r.shape[:2], -1).any(-1)
            if bool(lost.any()):
                item, row = (int(i) for i in lost.nonzero()[0])
                raise CaptureError(
                    f"Expected rows that the model computed while it was recorded. Received: token {row} of batch item "
                    f"{item} in {self.name}, which no call of the generation computed: the sequence had ended, or the "
                    "token was in the cache before. Ask for an earlier token, or record the first call as well."
                )
        return super().rmatvec(r, heads=heads)

    def fused(self, heads: Heads = "mean") -> Tensor:
        if self._any_missing:
            raise CaptureError(
                f"Expected a map with all of its rows, for fused maps and discard. Received: {self.name}, in which "
                f"{int(self.missing.sum())} rows were not computed. Use weights(), where they are NaN."
            )
        return super().fused(heads)

    def _rows(self, rows: Tensor) -> Tensor:
        batch, heads, _, keys = self.shape
        whole = torch.zeros(batch, heads, len(rows), keys, dtype=self.dtype, device=self.device)
        for number, where in self._by_step(rows):
            step = self.steps[number]
            local = rows[where] - step.start + step.skip
            found = self._on_tokens(step.op._rows(local), step.keys)
            if step.items is not None:
                items = step.items.to(found.device)
                found = found.index_select(0, items.clamp(min=0)) * (items >= 0)[:, None, None, None]
            whole[:, :, where, step.column : step.column + step.keys] = found[..., : keys - step.column]
        return whole

    def _on_tokens(self, weights: Tensor, keys: int) -> Tensor:
        """Without the keys that stand for room in a static cache, which the model must not have attended to."""
        if weights.shape[3] == keys:
            return weights
        beyond = weights[..., keys:].any(-1, keepdim=True)
        if bool(beyond.any()):
            # Where everything is masked, as at padding, an eager softmax spreads evenly over the room as well.
            level = weights.amax(-1, keepdim=True) == weights.amin(-1, keepdim=True)
            if not bool(level[beyond].all()):
                raise CaptureError(
                    f"Expected attention to the tokens of the sequence alone. Received: {self.name}, which attended to "
                    "places of its cache that no token had filled yet. Give generate an attention mask, or another "
                    "cache."
                )
            weights = weights.masked_fill(beyond, 0.0)
        return weights[..., :keys]

    def _by_step(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Number of each step that has some of the rows, and where among them they are."""
        number = self._step_of[rows.cpu()]
        for step in number.unique().tolist():
            if step >= 0:
                yield step, (number == step).nonzero().squeeze(1).to(rows.device)


@dataclass(frozen=True, eq=False)
class Sequences:
    """What `generate` returned: which tokens, and for each of them which row of the batch it came from."""

    ids: Tensor
    """(N, L)"""
    beams: Tensor | None
    """(N, steps), -1 after the end; None where rows of the batch kept their places."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Which rows of the sequences each call of a generation gives."""

    calls: list[Call]
    queries: list[int]
    """How many tokens each call was given."""
    spans: list[tuple[int, int, int]]
    """(start, stop, rows skipped) of each call: the rows of the sequence that are read from it."""
    items: list[Tensor | None]
    """For each call, the row of its batch that became each sequence; None where rows kept their places."""
    batch: int
    missing: Tensor
    """(N, n), True at rows that no call computed."""

    @property
    def length(self) -> int:
        return self.missing.shape[1]

    def layer(self, name: str, steps: list[tuple[int, TorchAttention]]) -> TorchAttention:
        """One layer's operators, with the numbers of their calls, as one."""
        first = steps[0][1]
        once = len(steps) == 1 and len(self.calls) > 1
        if once or (first.kind == "self" and first.shape[2] != self.queries[steps[0][0]]):
            return self.repeated(first, self.items[steps[0][0]])  # an encoder inside the first call
        parts = []
        for number, op in steps:
            if op.shape[2] != self.queries[number] or (first.kind == "cross" and op.shape[3] != first.shape[3]):
                raise CaptureError(
                    f"Expected {self.queries[number]} rows of {name} in call {number} of the generation, and other "
                    f"streams of one length. Received: (B, H, Q, T) = {op.shape}, after {first.shape}. Such a layer is "
                    "not assembled yet; the maps of each call are in trace.ops."
                )
            (start, stop, skip), past = self.spans[number], self.calls[number].past
            column, keys = extent(past, op.shape[2], op.shape[3]) if first.kind == "self" else (0, op.shape[3])
            if start < min(stop, self.length):
                parts.append(Step(op, start, min(stop, self.length), skip, column, keys, self.items[number]))
        keys = self.length if first.kind == "self" else first.shape[3]
        shape = (len(self.missing), first.heads, self.length, keys)
        return AssembledAttention(
            name=name, layer=first.layer, shape=shape, kind=first.kind, queries=first.queries, keys=first.keys,
            steps=parts, missing=self.missing,
        )  # fmt: skip

    def repeated(self, op: TorchAttention, items: Tensor | None) -> TorchAttention:
        """An operator that is not one of tokens given in turn, for each sequence that came of it."""
        if (items is None and op.shape[0] == self.batch) or self.batch % op.shape[0]:
            return op  # batches that do not divide: images, not sequences
        chosen = torch.arange(self.batch, device=op.device) if items is None else items.clamp(min=0)
        count, (_, heads, length, keys) = len(chosen), op.shape
        step = Step(op, 0, length, 0, 0, keys, chosen // (self.batch // op.shape[0]))
        missing = torch.zeros(count, length, dtype=torch.bool, device=op.device)
        shape = (count, heads, length, keys)
        return Repeated(
            name=op.name, layer=op.layer, shape=shape, kind=op.kind, queries=op.queries, keys=op.keys, steps=[step],
            missing=missing,
        )  # fmt: skip


def assembled(trace: Trace, output: Any = None) -> Trace:
    """The trace of one generation with one operator per layer: see `Trace.assembled`."""
    trace.check()
    given = _sequences(output)
    _check_one_generation(trace, given)
    plan = _plan(trace, given)
    whole = [plan.repeated(op, plan.items[0]) for op in trace.ops[: trace.starts[0]]]
    whole += [plan.layer(name, steps) for (name, _), steps in _by_layer(trace).items()]
    ops = []
    for layer, op in enumerate(whole):
        queries, keys = _streams(trace, op, plan.length)
        ops.append(replace(op, layer=layer, step=None, queries=queries, keys=keys))
    valid, generated = _valid(trace, plan), len(trace.calls) > 1 or bool(trace.calls[0].decoding)
    return replace(trace, ops=ops, starts=[0], calls=trace.calls[-1:], valid=valid, flow=None, generated=generated)


def _streams(trace: Trace, op: TorchAttention, length: int) -> tuple[str, str]:
    """The streams that an operator joins, by name.

    A cache hands its keys on, which is not followed: what a decoder reads besides itself is its encoder's stream.
    Images that were encoded before the first call are tokens of their own.
    """
    in_turn = isinstance(op, AssembledAttention) and not isinstance(op, Repeated)
    if getattr(trace.config, "is_encoder_decoder", False):
        own = "decoder_input_ids" if in_turn else trace.main
        return own, own if op.kind == "self" else trace.main
    if in_turn or op.queries != trace.main or op.shape[2] == length:
        return op.queries, op.keys
    return (stack_of(op.name),) * 2


def _plan(trace: Trace, given: Sequences | None) -> Plan:
    queries = [_queries(trace, number) for number in range(len(trace.calls))]
    beams = given is not None and given.beams is not None
    spans, batch = _spans(trace.calls, queries, first=beams), int(trace.ops[-1].shape[0])
    length, items = _length(trace.calls, spans, given), _items(trace.calls, spans, given, batch)
    count = batch if given is None else len(given.ids)
    missing = torch.ones(count, length, dtype=torch.bool, device=trace.ops[-1].device)
    for (start, stop, _), chosen in zip(spans, items, strict=True):
        missing[:, start : min(stop, length)] = False if chosen is None else (chosen < 0)[:, None]
    return Plan(trace.calls, queries, spans, items, batch, missing)


@dataclass(eq=False)
class Repeated(AssembledAttention):
    """One call's operator, its items repeated for the sequences that were generated from them."""

    @property
    def causal(self) -> bool:
        return self.steps[0].op.causal


def _by_layer(trace: Trace) -> dict[tuple[str, int], list[tuple[int, TorchAttention]]]:
    """(name, which of the module's calls) -> the number of the model's call and the operator."""
    found: dict[tuple[str, int], list[tuple[int, TorchAttention]]] = {}
    ends = [*trace.starts[1:], len(trace.ops)]
    for number, (start, end) in enumerate(zip(trace.starts, ends, strict=True)):
        seen: Counter[str] = Counter()
        for op in trace.ops[start:end]:
            found.setdefault((op.name, seen[op.name]), []).append((number, op))
            seen[op.name] += 1
    return found


def _queries(trace: Trace, number: int) -> int:
    """How many tokens a call was given: what its last self-attention asked with (a decoder's comes last)."""
    end = [*trace.starts[1:], len(trace.ops)][number]
    call: Call = trace.calls[number]
    if call.ids is not None:
        return call.ids.shape[1]
    ops: list[TorchAttention] = trace.ops[trace.starts[number] : end]
    return next((op.shape[2] for op in reversed(ops) if op.kind == "self"), 0)


def _check_one_generation(trace: Trace, given: Sequences | None) -> None:
    calls = trace.calls
    if not calls:
        raise CaptureError(
            f"Expected one call of {trace.model} in the trace. Received: 0. Call the model inside the block."
        )
    for number, (before, call) in enumerate(pairwise(calls), start=1):
        end = before.past + _queries(trace, number - 1)
        grows = call.past == before.past == 0 and _goes_on(call, before)
        if not grows and not (0 < call.past <= end and call.continues):
            raise CaptureError(
                f"Expected one call of {trace.model} in the trace, or the calls of one generation. Received: "
                f"{len(calls)} calls; call {number} does not go on from the one before it. Trace each call, or each "
                "generation, alone."
            )
    beams = any(c.decoding == "_beam_search" or c.reordered for c in calls)
    if beams and (given is None or given.beams is None):
        raise CaptureError(
            "Expected the beam that each token was taken from. Received: calls in which rows of the batch changed "
            f"places (beam search). Generate with {BEAMS} and give its output: trace.assembled(output)."
        )
    if beams and not calls[-1].past and not _causal(trace):
        raise CaptureError(
            f"Expected causal attention, for beam search without a cache. Received: {trace.model}, whose tokens look "
            "at later ones. Generate without beams."
        )
    back = any(0 < c.past < b.past + _queries(trace, i) for i, (b, c) in enumerate(pairwise(calls)))
    if given is None and (back or any(c.decoding == "_assisted_decoding" for c in calls)):
        raise CaptureError(
            "Expected to know which tokens were kept. Received: calls in which tokens were proposed and taken back "
            "(assisted decoding). Give what generate returned: trace.assembled(output)."
        )


def _causal(trace: Trace) -> bool:
    """Whether no token of the first call looks at a later one, in the layers of the sequence."""
    end = trace.starts[1] if len(trace.starts) > 1 else len(trace.ops)
    ops: list[TorchAttention] = trace.ops[trace.starts[0] : end]
    queries = _queries(trace, 0)
    return not any(op.kind == "self" and op.shape[2] == queries and bool(op.weights([0])[..., 1:].any()) for op in ops)


def _goes_on(call: Call, before: Call) -> bool:
    """Whether a call was given all tokens anew and some more; among beams the earlier ones change."""
    if call.ids is None or before.ids is None or call.ids.shape[0] != before.ids.shape[0]:
        return False
    kept = before.ids.shape[1]
    same = call.decoding == "_beam_search" or torch.equal(call.ids[:, :kept], before.ids)
    return call.ids.shape[1] > kept and same


def _spans(calls: list[Call], queries: list[int], *, first: bool) -> list[tuple[int, int, int]]:
    """(start, stop, rows skipped) of each call: the rows of the sequence that are read from it.

    A row that several calls computed is read from the last of them, or from the `first`: after beam search without a
    cache the last calls may be those of other sequences.
    """
    spans: list[tuple[int, int, int]] = []
    for call, count in zip(calls, queries, strict=True):
        start = max(call.past, spans[-1][1]) if first and spans and not call.past else call.past
        # Tokens that were taken back are another call's now.
        spans = [(a, min(b, start), skip) for a, b, skip in spans]
        spans.append((start, call.past + count, start - call.past))
    return spans


def _length(calls: list[Call], spans: list[tuple[int, int, int]], given: Sequences | None) -> int:
    """How many tokens have a row: all but the last."""
    end = spans[-1][1]
    if given is None:
        return end
    count = given.ids.shape[1]
    if all(call.ids is None for call in calls[:1]):  # the prompt was given as embeddings: ids are the new tokens alone
        count += spans[0][1]
    if not 0 < count - 1 <= end:
        raise ShapeError(
            f"Expected the sequences of this generation, at most {end + 1} tokens. Received: {count}. Give what "
            "generate returned inside the block."
        )
    return count - 1


def _items(
    calls: list[Call], spans: list[tuple[int, int, int]], given: Sequences | None, batch: int
) -> list[Tensor | None]:
    """For each call, the row of its batch that became each sequence; None where rows kept their places."""
    if given is None or given.beams is None:
        if given is not None and len(given.ids) != batch:
            raise ShapeError(
                f"Expected {batch} sequences, one for each row of the batch. Received: {len(given.ids)}. Give what "
                f"generate returned; after beam search with {BEAMS}."
            )
        return [None] * len(calls)
    prompt = next(stop for (_, stop, _), call in zip(spans, calls, strict=True) if not _fills_prompt(call, calls))
    chosen: list[Tensor | None] = []
    for _, stop, _ in spans:
        step = max(stop - prompt, 0)
        if step < given.beams.shape[1]:
            chosen.append(given.beams[:, step].long())
        else:
            chosen.append(torch.full((len(given.beams),), -1, device=given.beams.device))
    return chosen


def _fills_prompt(call: Call, calls: list[Call]) -> bool:
    """Whether a call is a chunk of the prompt that another chunk follows."""
    at = calls.index(call)
    following = calls[at + 1] if at + 1 < len(calls) else None
    return following is not None and following.past > 0 and following.ids is not None and following.ids.shape[1] > 1


def _valid(trace: Trace, plan: Plan) -> Any:
    valid = trace.valid
    if valid is None or valid.shape[1] < plan.length:
        return None
    valid, first = valid[:, : plan.length], plan.items[0]
    return valid if first is None else valid[first.clamp(min=0)]


def _sequences(output: Any) -> Sequences | None:
    if output is None:
        return None
    ids = getattr(output, "sequences", output)
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise InputError(
            "Expected what generate returned: sequences of shape (N, L), or an output that has them. Received: "
            f"{type(output).__name__}."
        )
    beams = getattr(output, "beam_indices", None)
    return Sequences(ids, beams if isinstance(beams, Tensor) else None)
