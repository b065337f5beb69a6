"""A recorded run of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrace.errors import CaptureError, InputError, ShapeError
from attrace.ops.heads import check_heads
from attrace.ops.namespace import Name, dtype_name, framework, framework_of
from attrace.ops.rollout.checks import (
    check_discard,
    check_index,
    check_positions,
    check_residual,
    check_tolerance,
)
from attrace.ops.rollout.streamed import Mixing, Scaling, is_pooling, source_columns, target_rows
from attrace.types import Array, AttentionOp, Heads

if TYPE_CHECKING:
    from attrace.capture.geometry import Geometry

FLOATS = ("float16", "bfloat16", "float32", "float64")


class RecordedOp(AttentionOp, Protocol):
    """One recorded attention call, whatever the seam that saw it."""

    vectors: Name
    """The framework of the vectors that it takes and gives."""
    layer: int
    """Place of the call in the order of the model's attention calls, from 0."""
    block: Any
    """The block around the call, where it was recorded (`attrace.capture.torch_blocks`)."""

    @property
    def causal(self) -> bool:
        """Whether the call itself says that no query sees a later key; a mask may say so too."""
        ...

    @property
    def device(self) -> Any: ...

    @property
    def dtype(self) -> Any:
        """Dtype of the weights: float32, or float64 where the model runs in it."""
        ...

    def first_bad_row(self) -> int | None:
        """The first query position with NaN or infinity in what was recorded, or None."""
        ...


@dataclass(eq=False)
class Trace:
    """What the model returned, and its attention calls in order.  Knows no framework: the calls do."""

    model: str
    """The model's class, for messages."""
    config: Any = field(default=None, repr=False)
    """The model's configuration, where it has one."""
    output: Any = field(default=None, repr=False)
    ops: list[Any] = field(default_factory=list)
    """Each a `RecordedOp`."""
    unread: list[str] = field(default_factory=list)
    """Attention that was seen but cannot be read as (B, H, Q, T) maps."""
    starts: list[int] = field(default_factory=list, repr=False)
    """For each call of the model, how many operators there were before it."""
    valid: Array | None = field(default=None, repr=False)
    """(B, n), True at real tokens, where the call had an attention mask of that shape."""

    values: bool = False
    """Recorded with values, and with the attention blocks where the family is known."""
    family: str = ""
    """The model's configured type, for messages."""
    seen: Any = field(default=None, repr=False)
    """What the run showed of where its tokens come from (`attrace.capture.observed.Observed`)."""

    def begin(self, attention_mask: Any) -> None:
        """Note that the model is called (the recorder does)."""
        self.starts.append(len(self.ops))
        self.valid = attention_mask != 0 if getattr(attention_mask, "ndim", None) == 2 else None

    def check(self) -> None:
        """CaptureError unless attention was seen and all of it can be read."""
        if self.unread:
            raise CaptureError(
                f"Expected attention as maps of (batch, heads, queries, keys). Received from {self.model}: "
                f"{'; '.join(self.unread[:3])}. Such a layer is not supported yet."
            )
        if not self.ops:
            raise CaptureError(
                f"Expected attention in {self.model}. Received: none ({len(self.starts)} calls of the model, no "
                "fused attention call and no softmax that multiplies values). Call the model inside the block, and "
                "give a Transformer whose attention runs in PyTorch."
            )

    @property
    def depth(self) -> int | None:
        """How many layers the model's configuration names; more than `ops` where some mix tokens without attention."""
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        count = getattr(text, "num_hidden_layers", None)
        return count if isinstance(count, int) else None

    @property
    def geometry(self) -> Geometry:
        """What the tokens of images and sounds are: patch grids, seconds, places in the prompt.

        Read off the run, checked against the token counts; what could not be told is in `.refused`, with the reason.
        """
        from attrace.capture.geometry import geometry_of

        return geometry_of(self)

    def joined(self) -> Trace:
        """The run with windows and packed pieces joined into maps over whole grids, (B, H, n, n).

        Where a model merges its tokens between stages, an operator of that merging stands between: each merged token
        reads its tokens evenly.  `rollout` goes this way by itself where it has to.
        """
        from attrace.capture.joined import joined

        return replace(self, ops=joined(self), unread=list(self.unread), starts=list(self.starts))

    def is_causal(self) -> bool:
        """Whether no position looks at a later one: seen on the first row of every layer."""
        return all(op.causal or not bool(op.weights([0])[..., 1:].any()) for op in self.ops)

    def rollout(
        self,
        *,
        target: int | Sequence[int] | Array | None = None,
        source: int | Sequence[int] | None = None,
        segments: Sequence[tuple[int, int]] | None = None,
        residual: float = 0.5,
        heads: Heads = "mean",
        discard: float = 0.0,
        layers: Sequence[int] | None = None,
        normalize: bool | None = None,
        tolerance: float = 0.0,
    ) -> Array:
        """Rollout of the recorded layers, streamed over blocks of rows (Abnar and Zuidema 2020, sec. 4).

        One question at a time: `target` is a token position -> its row (B, n), several positions -> (B, k, n), or
        a row to start from, (n,) or (B, n), as a float array -> (B, n).  `source` is a position -> its column
        (B, n), or several -> (B, k, n).  `segments` are (start, stop) token ranges -> (B, n, M), the share of
        each in every position.  None of them: the whole map (B, n, n).  Where a model merges its tokens between
        stages, targets are tokens of its last grid, sources tokens of its first.

        `normalize` divides each row of a layer by its own sum.  By default rows keep the sums that the model gave
        them, so that those which its own sinks left short stay short; where the fusion of heads or `discard` changed
        a sum it is set back.  `tolerance` is the mass that may be dropped on the way to a target row; where the
        model has no sinks the result falls short of one by what was dropped, which is its L1 error exactly.

        Raises InputError for an option out of range, CaptureError where the layers do not form one chain.
        """
        ops = self._chain(layers)
        residual, discard, tolerance = (
            check_residual(residual),
            check_discard(discard),
            check_tolerance(tolerance),
        )
        if sum(q is not None for q in (target, source, segments)) > 1:
            raise InputError("Expected one of target, source and segments. Received: more than one. Ask one by one.")
        for op in ops:
            if not is_pooling(op):
                check_heads(heads, op.heads)
        changed = discard > 0 or heads in ("max", "min")
        scaling: Scaling = "own" if changed else "none"
        if normalize is not None:
            scaling = "one" if normalize else "none"
        mixing = Mixing(heads, residual, scaling, discard, self.valid)
        start, ask, single = self._question(ops[0] if target is None else ops[-1], target, source, segments)
        if ask == "target":
            answer = target_rows(ops, start, mixing, tolerance=tolerance)
        else:
            answer = source_columns(ops, start, mixing)
        answer = framework(ops[-1].vectors).xp.astype(answer, ops[-1].dtype, copy=False)
        if single:
            return answer[..., 0]
        return answer.swapaxes(1, 2) if ask in ("target", "source") else answer

    def _question(
        self, op: RecordedOp, target: Any, source: Any, segments: Any
    ) -> tuple[Array, Literal["target", "source", "segments", "map"], bool]:
        """The vectors to start from, (B, n, M), which question they ask, and whether M is to be dropped.

        What is carried from layer to layer is float64 where the device has it, for vectors; a whole map is float32.
        """
        batch, _, rows, columns = op.shape
        n = columns if target is None else rows
        arrays = framework(op.vectors)
        wide = arrays.double(op.device)

        def ones_at(places: Sequence[Any]) -> Array:
            start = arrays.xp.zeros((batch, n, len(places)), dtype=wide, device=op.device)
            for column, place in enumerate(places):
                start[:, place, column] = 1.0
            return start

        if target is None and source is None and segments is None:
            eye = arrays.xp.eye(n, dtype=op.dtype, device=op.device)
            return arrays.xp.broadcast_to(eye, (batch, n, n)), "map", False
        if segments is not None:
            return ones_at(_slices(segments, n)), "segments", False
        if getattr(target, "ndim", 0) and framework_of(target) and dtype_name(target) in FLOATS:
            row = _start_row(arrays.convert(target, wide, op.device), batch, n)
            return arrays.xp.broadcast_to(row, (batch, n))[..., None], "target", True
        ask: Literal["target", "source"] = "target" if source is None else "source"
        at, single = check_positions(ask, target if source is None else source, n)
        return ones_at(at), ask, single

    def contributions(self) -> Trace:
        """The run with each attention block's contributions in the place of its maps: one head, rows sum to one.

        c_ij is the share of token j in row i of the block's output, residual, output projection and layer norm
        included (Ferrando, Gállego and Costa-jussà 2022, arXiv 2203.04212, eq. 8 to 12).  The residual is inside:
        roll out with residual=0.0.  Needs `record(model, values=True)` and a known family; CaptureError
        otherwise.  Nothing is computed until it is asked for.
        """
        self.check()
        if self.ops[0].vectors != "torch":
            raise CaptureError(
                f"Expected a PyTorch model, for contributions. Received: {self.model}. Use the method rollout, "
                "last-layer or leave-one-out."
            )
        from attrace.capture.torch_blocks import contributions_of

        ops = [contributions_of(op, self.family, values=self.values) for op in self.ops]
        return replace(self, ops=ops, unread=[], starts=list(self.starts))

    def _chain(self, layers: Sequence[int] | None) -> list[RecordedOp]:
        self.check()
        if len(self.starts) != 1:
            raise CaptureError(
                f"Expected one call of {self.model} in the trace. Received: {len(self.starts)}. Trace each call alone."
            )
        if getattr(self.config, "is_encoder_decoder", False):
            raise CaptureError(
                f"Expected a model with one stream of tokens. Received: {self.model}, an encoder and a decoder. "
                "Rollout over two streams is not supported yet; the maps of each op are in trace.ops."
            )
        chosen = layer_indices(layers, len(self.ops))
        if self.seen is not None and (self.seen.windows or self.seen.steps):
            from attrace.capture.joined import chain_over_grids

            if (ops := chain_over_grids(self)) is not None:
                wanted = {self.ops[i].layer for i in chosen}
                return [op for op in ops if is_pooling(op) or op.layer in wanted]
        first = self.ops[0]
        for op in self.ops:
            if op.kind != "self" or op.shape[0] != first.shape[0] or op.shape[2] != first.shape[2]:
                raise CaptureError(
                    f"Expected self-attention over the same {first.shape[2]} tokens in every layer of {self.model}. "
                    f"Received: {op.name} with (B, H, Q, T) = {op.shape}. Models with two streams or changing "
                    "lengths are not supported yet."
                )
        return [self.ops[i] for i in chosen]


def layer_indices(layers: Sequence[int] | None, count: int) -> list[int]:
    """Layer numbers, negative ones from the end, in forward order; InputError where one does not exist."""
    if layers is None:
        return list(range(count))
    chosen = {check_index("layers", layer, count, f"the model has {count} layers") for layer in layers}
    if not chosen or len(chosen) < len(layers):
        raise InputError(f"Expected at least one layer, each once. Received: {list(layers)!r}.")
    return sorted(chosen)


def _start_row(row: Array, batch: int, n: int) -> Array:
    if tuple(row.shape) not in ((n,), (batch, n)):
        raise ShapeError(f"Expected a row of shape ({n},) or ({batch}, {n}). Received: {tuple(row.shape)}.")
    return row


def _slices(segments: Sequence[tuple[int, int]], n: int) -> list[slice]:
    for start, stop in segments:
        if not 0 <= start < stop <= n:
            raise InputError(
                f"Expected segments (start, stop) with 0 <= start < stop <= {n}. Received: {(start, stop)}."
            )
    if not segments:
        raise InputError("Expected at least one segment. Received: none.")
    return [slice(start, stop) for start, stop in segments]
