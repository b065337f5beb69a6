"""A recorded run of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from attrace.capture.questions import Question, Start, check_item, check_layers, check_one, starting_vectors
from attrace.capture.recorded import RecordedOp
from attrace.capture.streams import rollout_over_streams, streams_of
from attrace.errors import CaptureError, InputError
from attrace.ops.heads import check_heads
from attrace.ops.namespace import framework
from attrace.ops.rollout.checks import (
    check_discard,
    check_residual,
    check_switch,
    check_tolerance,
)
from attrace.ops.rollout.streamed import Mixing, Scaling, is_pooling, source_columns, target_rows
from attrace.ops.rollout.streams import StreamGraph, joined_by
from attrace.types import Array, Heads

if TYPE_CHECKING:
    from attrace.capture.geometry import Geometry

DROPOUT = (
    "The model is in training mode: dropout was on, the output was drawn at random. The weights are those before "
    "dropout. Set it to inference (model.eval(), training=False) for its true answer."
)
UNCOMPILED = "Trace it under torch.compiler.set_stance('force_eager'), which runs the model's own code."


@dataclass(eq=False)
class Trace:
    """What the model returned, and its attention calls in order.  Knows no framework: the calls do."""

    model: str
    """The model's class, for messages."""
    config: Any = field(default=None, repr=False)
    """The model's configuration, where it has one."""
    output: Any = field(default=None, repr=False)
    ops: list[Any] = field(default_factory=list)
    """Each a `RecordedOp`, in the order of the calls."""
    unread: list[str] = field(default_factory=list)
    """Attention that was seen but cannot be read as (B, H, Q, T) maps."""
    compiled: bool = field(default=False, repr=False)
    """Attention was seen while a function was compiled, as symbols without values."""
    loose: dict[str, str] = field(default_factory=dict)
    """Modules whose softmaxes have the form of maps and reach their values otherwise than by one product: not read."""
    beside: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Modules whose attention is among "channels", or for each token among "layers", and the shape of what they
    computed: it has no maps of tokens."""
    stack: int = 0
    """How many layers the stacks have of which some made no attention call, and ..."""
    without: list[str] = field(default_factory=list)
    """... which those are."""
    parts: str = ""
    """What a model without attention is made of."""
    precompiled: bool = False
    """Whether parts of the model ran as compiled code, where an unfused softmax is not seen."""
    dropout: bool = False
    """Whether random numbers were drawn while the model ran, as in training mode."""
    starts: list[int] = field(default_factory=list, repr=False)
    """For each call of the model, how many operators there were before it."""
    calls: list[Any] = field(default_factory=list, repr=False)
    """For each call of a PyTorch model, where its tokens stand in the sequence (`attrace.capture.steps.Call`)."""
    valid: Array | None = field(default=None, repr=False)
    """(B, n), True at real tokens, where the call had an attention mask of that shape."""
    masks: dict[str, Array] = field(default_factory=dict, repr=False)
    """The same for streams besides the main one."""

    generated: bool = False
    """Assembled from the calls of one generation: the last token has no row."""
    main: str = "tokens"
    """The name of the main stream of tokens."""
    flow: StreamGraph | None = field(default=None, repr=False)
    """Which states of which streams the calls read and make, where the model may have several streams."""
    values: bool = False
    """Recorded with values, and with the attention blocks where the family is known."""
    family: str = ""
    """The model's configured type, for messages."""
    seen: Any = field(default=None, repr=False)
    """What the run showed of where its tokens come from (`attrace.capture.observed.Observed`)."""
    known: Geometry | None = field(default=None, repr=False)
    """The geometry of the run whose windows were joined here."""

    def begin(self, attention_mask: Any, call: Any = None) -> None:
        """Note that the model is called (the recorder does)."""
        self.starts.append(len(self.ops))
        if call is not None:
            self.calls.append(call)
        self.see_tokens(attention_mask)

    def see_tokens(self, attention_mask: Any) -> None:
        """Note which tokens are real, where a mask of shape (B, n) tells."""
        self.valid = attention_mask != 0 if getattr(attention_mask, "ndim", None) == 2 else None

    def check(self) -> None:
        """CaptureError unless attention was seen and all of it can be read."""
        if self.compiled:
            raise CaptureError(
                f"Expected a call of {self.model} that computes values. Received: symbols of a function that is being "
                "compiled (predict, fit, generate, tf.function, jax.jit). Call the model itself: "
                "attrace.trace(model, inputs)."
            )
        if self.unread:
            raise CaptureError(
                f"Expected attention as maps of (batch, heads, queries, keys). Received from {self.model}: "
                f"{'; '.join(self.unread[:3])}. Such a layer is not supported yet."
            )
        if self.ops:
            return
        if self.loose:
            raise CaptureError(
                f"Expected attention as maps of (batch, heads, queries, keys). Received from {self.model}: softmaxes "
                f"that do not multiply their values as such maps, {_listed(self.loose.values())}. Attention that is "
                "sparse by construction, or whose heads are mixed, cannot be shown token to token; use a variant of "
                "the model with full attention."
            )
        if self.beside:
            raise CaptureError(
                f"Expected attention among tokens in {self.model}. Received: {self._beside()}. Such attention has no "
                "map from token to token; give a model whose tokens attend to each other."
            )
        if self.precompiled:
            raise CaptureError(
                f"Expected fused attention in the compiled parts of {self.model}. Received: none; compiled code does "
                f"not show a softmax that it fused with its surroundings. {UNCOMPILED}"
            )
        raise CaptureError(
            f"Expected attention in {self.model}. Received: none ({len(self.starts)} calls of the model, no fused "
            f"attention call and no softmax that multiplies values{self.parts and '; ' + self.parts}). Call the model "
            "itself inside the block (what is already compiled, as Keras' predict, shows nothing), and give a "
            "Transformer whose attention runs in PyTorch or Keras: state-space, recurrent, convolutional and hashed "
            "layers have no such maps."
        )

    @property
    def gaps(self) -> list[str]:
        """What of the model's mixing of tokens the maps do not hold, in sentences."""
        notes = []
        if self.without:
            notes.append(
                f"Attention was seen in {self.stack - len(self.without)} of {self.stack} layers; the others work "
                f"without it, and a picture knows nothing of them: {_listed(self.without)}."
            )
        if self.precompiled and not self.without and len(self.ops) < (self.depth or 0):
            notes.append(
                f"Attention was seen in {len(self.ops)} of {self.depth} layers: compiled code does not show a softmax "
                f"that it fused with its surroundings. {UNCOMPILED}"
            )
        if self.beside:
            seen = len(self.ops)
            notes.append(
                f"Attention among tokens is {seen} of {seen + len(self.beside)} layers of attention; a picture knows "
                f"nothing of the others: {self._beside()}."
            )
        if self.loose:
            notes.append(
                f"Some attention cannot be read as maps of tokens and is missing: {_listed(self.loose.values())}."
            )
        return notes

    def _beside(self) -> str:
        kinds: dict[str, list[str]] = {}
        for name, (what, _) in self.beside.items():
            kinds.setdefault(what, []).append(name)
        return "; ".join(f"attention among {what} ({_listed(names)})" for what, names in kinds.items())

    @property
    def notes(self) -> list[str]:
        """What a reader of the maps must know; nothing for a model that was read in full, as it answers in use."""
        return [*self.gaps, DROPOUT] if self.dropout else self.gaps

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
        if self.known is not None:
            return self.known
        from attrace.capture.geometry import geometry_of

        return geometry_of(self)

    def joined(self) -> Trace:
        """The run with windows and packed pieces joined into maps over whole grids, (B, H, n, n).

        Where a model merges its tokens between stages, an operator of that merging stands between: each merged token
        reads its tokens evenly.  `rollout` goes this way by itself where it has to.
        """
        if self.known is not None:
            return self
        from attrace.capture.joined import joined

        return replace(self, ops=joined(self), unread=list(self.unread), starts=list(self.starts), known=self.geometry)

    def is_causal(self) -> bool:
        """Whether no position looks at a later one: seen on the first row of every layer."""
        return all(op.causal or not bool(op.weights([0])[..., 1:].any()) for op in self.ops)

    def rollout(
        self,
        *,
        target: Question | Array | None = None,
        source: Question | None = None,
        segments: Sequence[tuple[int, int]] | tuple[str, Sequence[tuple[int, int]]] | None = None,
        residual: float = 0.5,
        heads: Heads = "mean",
        discard: float = 0.0,
        layers: Sequence[int] | None = None,
        normalize: bool | None = None,
        tolerance: float = 0.0,
        item: int | None = None,
    ) -> Array | dict[str, Array]:
        """Rollout of the recorded layers, streamed over blocks of rows (Abnar and Zuidema 2020, sec. 4).

        One question at a time: `target` is a token position -> its row (B, n), several positions -> (B, k, n), or
        a row to start from, (n,) or (B, n), as a float array -> (B, n).  `source` is a position -> its column
        (B, n), or several -> (B, k, n).  `segments` are (start, stop) token ranges -> (B, n, M), the share of
        each in every position.  None of them: the whole map (B, n, n).  Where a model merges its tokens between
        stages, targets are tokens of its last grid, sources tokens of its first.

        Where attention joins several streams of tokens (an encoder and a decoder, images and text) the answer is
        {stream: array}: of a target, where in each stream its mass ends; of a source, which positions of each
        stream's last state hold some of it.  Name the stream in the question, target=("decoder_input_ids", 3);
        otherwise it is that of the last call's queries for a target, of the first call's keys for a source.  A
        cross-attention call keeps the share `residual` with its queries' stream and takes the rest from its keys'.
        Over all streams a target's shares sum to one, less what sinks took.

        `normalize` divides each row of a layer by its own sum.  By default rows keep the sums that the model gave
        them, so that those which its own sinks left short stay short; where the fusion of heads or `discard` changed
        a sum it is set back.  `tolerance` is the mass that may be dropped on the way to a target row; where the
        model has no sinks the result falls short of one by what was dropped, which is its L1 error exactly.

        `item` is one item of the batch, by its index: the answer is then its own, without the axis B.

        Raises InputError for an option out of range, CaptureError where the layers do not form one chain,
        MemoryLimitError for a whole map larger than half of the available memory.
        """
        whole = self.assembled()
        if whole is not self:
            return whole.rollout(
                target=target, source=source, segments=segments, residual=residual, heads=heads, discard=discard,
                layers=layers, normalize=normalize, tolerance=tolerance, item=item,
            )  # fmt: skip
        check_one(target, source, segments)
        ops = self._chosen(layers)
        over_grids = self._over_grids(ops)
        ops = ops if over_grids is None else over_grids
        mixing = self._mixing(ops, heads, residual, discard, normalize)
        tolerance = check_tolerance(tolerance)

        def start_of(op: RecordedOp, n: int, *asked: Any) -> Start:
            if item is not None:
                check_item(item, op.shape[0])
            return starting_vectors(op, n, *asked, generated=self.generated)

        if over_grids is None and not self._is_chain():
            answers, ask, single = rollout_over_streams(
                self, ops, replace(mixing, valid=None, valid_keys=None), start_of,
                target=target, source=source, segments=segments, tolerance=tolerance,
            )  # fmt: skip
            found = {name: _finished(answer, ops[-1], ask, single, item) for name, answer in answers.items()}
            return next(iter(found.values())) if len(self.streams) == 1 else found
        asked_of, n = (ops[0], ops[0].shape[3]) if target is None else (ops[-1], ops[-1].shape[2])
        start, ask, single = start_of(asked_of, n, *map(self._of_only_stream, (target, source, segments)))
        if ask == "target":
            answer = target_rows(ops, start, mixing, tolerance=tolerance)
        else:
            answer = source_columns(ops, start, mixing)
        return _finished(answer, ops[-1], ask, single, item)

    def _mixing(
        self, ops: Sequence[RecordedOp], heads: Heads, residual: float, discard: float, normalize: bool | None
    ) -> Mixing:
        """How each layer becomes a matrix, checked against the chosen calls."""
        residual, discard = check_residual(residual), check_discard(discard)
        for op in ops:
            if not is_pooling(op):
                check_heads(heads, op.heads)
        changed = discard > 0 or (isinstance(heads, str) and heads != "mean")
        scaling: Scaling = "own" if changed else "none"
        if normalize is not None:
            scaling = "one" if check_switch("normalize", normalize) else "none"
        return Mixing(heads, residual, scaling, discard, self.valid, self.valid)

    def assembled(self, output: Any = None) -> Trace:
        """The calls of one `generate()` as one run: one operator per layer, (B, H, n, n), n the tokens it was given.

        Prompt rows come first, then one row for each new token but the last, which was never given to the model: the
        row that predicted token p is p - 1.  Cross attention is (B, H, n, T).  Rows that no call computed are NaN in
        `op.weights()`.  `output`, what generate returned, is needed after beam search (with
        return_dict_in_generate=True, output_scores=True) and after assisted decoding; a trace of one call
        is returned as it is.  CaptureError where the calls are not those of one generation.
        """
        if output is None and (not self.calls or self.starts == [0] or self.generated):
            return self  # one call, and nothing that ran before it
        from attrace.capture.generation import assembled

        return assembled(self, output)

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
        if self.generated or len(self.calls) > 1:
            raise CaptureError(
                "Expected contributions of one call of the model. Received: those of a generation, which are not "
                "supported yet. Use trace.rollout, or trace one pass over prompt and new tokens."
            )
        from attrace.capture.torch_blocks import contributions_of

        ops = [contributions_of(op, self.family, values=self.values) for op in self.ops]
        return replace(self, ops=ops, unread=[], starts=list(self.starts))

    @property
    def streams(self) -> dict[str, int]:
        """The token streams that attention reads, by name, with the number of tokens of each."""
        self.check()
        lengths = streams_of(self).lengths()
        if self.seen is not None and self.seen.windows and len(lengths) == 1 and (levels := self.geometry.levels):
            return {name: len(levels[min(levels)]) for name in lengths}  # a call has the tokens of one window
        return lengths

    def _chosen(self, layers: Sequence[int] | None) -> list[RecordedOp]:
        self.check()
        if len(self.starts) != 1:
            raise CaptureError(
                f"Expected one call of {self.model} in the trace. Received: {len(self.starts)}. Trace each call alone."
            )
        return [self.ops[i] for i in check_layers(layers, len(self.ops))]

    def _over_grids(self, ops: Sequence[RecordedOp]) -> list[RecordedOp] | None:
        """The chosen calls over whole grids of patches, with the mergings between; None where they are so already."""
        if self.seen is None or not (self.seen.windows or (self.seen.steps and len(self._names()) == 1)):
            return None
        from attrace.capture.joined import chain_over_grids

        chain, wanted = chain_over_grids(self), {op.layer for op in ops if not is_pooling(op)}
        return None if chain is None else [op for op in chain if is_pooling(op) or op.layer in wanted]

    def _names(self) -> set[str]:
        return {name for op in self.ops for name in joined_by(op)}

    def _is_chain(self) -> bool:
        """Whether all calls mix one stream with itself, at the same positions."""
        names = self._names()
        batch, _, n, _ = self.ops[0].shape
        return (
            len(names) == 1
            and "+" not in next(iter(names))
            and all(op.kind == "self" and (op.shape[0], *op.shape[2:]) == (batch, n, n) for op in self.ops)
        )

    def _of_only_stream(self, question: Any) -> Any:
        """A question without the name of the model's one stream."""
        if isinstance(question, tuple) and len(question) == 2 and isinstance(question[0], str):
            if question[0] != (only := joined_by(self.ops[0])[0]):
                raise InputError(
                    f"Expected the one stream of {self.model}, {only!r}. Received: {question[0]!r}. "
                    "Give the position alone."
                )
            return question[1]
        return question


def _finished(answer: Array, op: RecordedOp, ask: str, single: bool, item: int | None) -> Array:
    """Vectors (B, n, M) in the form that was asked for."""
    answer = framework(op.vectors).xp.astype(answer, op.dtype, copy=False)
    if single:
        answer = answer[..., 0]
    elif ask in ("target", "source"):
        answer = answer.swapaxes(1, 2)
    return answer if item is None else answer[check_item(item, answer.shape[0])]


def _listed(names: Iterable[str]) -> str:
    """The first names and how many more there are."""
    named = list(names)
    more = len(named) - 3
    return ", ".join(named[:3]) + (f" and {more} more" if more > 0 else "")
