"""A recorded run of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attrace.capture.memory import check_fits
from attrace.errors import CaptureError, InputError, ShapeError
from attrace.ops.heads import check_heads
from attrace.ops.rollout.checks import (
    check_discard,
    check_index,
    check_positions,
    check_residual,
    check_tolerance,
)
from attrace.ops.rollout.streamed import Mixing, Scaling, source_columns, target_rows
from attrace.types import Heads

if TYPE_CHECKING:
    from attrace.capture.torch_ops import TorchAttention

DROPOUT = (
    "The model is in training mode: dropout was on, the output was drawn at random. The weights are those before "
    "dropout. Call model.eval() for its true answer."
)
UNCOMPILED = "Trace it under torch.compiler.set_stance('force_eager'), which runs the model's own code."


@dataclass(eq=False)
class Trace:
    """What the model returned, and its attention calls in order."""

    model: str
    """The model's class, for messages."""
    config: Any = field(default=None, repr=False)
    """The model's configuration, where it has one."""
    output: Any = field(default=None, repr=False)
    ops: list[TorchAttention] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    """Attention that was seen but cannot be read as (B, H, Q, T) maps."""
    loose: dict[str, str] = field(default_factory=dict)
    """Modules whose softmaxes have the form of maps and reach their values otherwise than by one product: not read."""
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
    valid: Tensor | None = field(default=None, repr=False)
    """(B, n), True at real tokens, where the call had an attention mask of that shape."""

    values: bool = False
    """Recorded with values, and with the attention blocks where the family is known."""
    family: str = ""
    """The model's configured type, for messages."""

    def begin(self, attention_mask: Any) -> None:
        """Note that the model is called (the recorder does)."""
        self.starts.append(len(self.ops))
        self.see_tokens(attention_mask)

    def see_tokens(self, attention_mask: Any) -> None:
        """Note which tokens are real, where a mask of shape (B, n) tells."""
        two_d = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
        self.valid = attention_mask.detach().bool() if two_d else None

    def check(self) -> None:
        """CaptureError unless attention was seen and all of it can be read."""
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
        if self.precompiled:
            raise CaptureError(
                f"Expected fused attention in the compiled parts of {self.model}. Received: none; compiled code does "
                f"not show a softmax that it fused with its surroundings. {UNCOMPILED}"
            )
        raise CaptureError(
            f"Expected attention in {self.model}. Received: none ({len(self.starts)} calls of the model, no fused "
            f"attention call and no softmax that multiplies values{self.parts and '; ' + self.parts}). Call the model "
            "inside the block, and give a Transformer whose attention runs in PyTorch: state-space, recurrent, "
            "convolutional and hashed layers have no such maps."
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
        if self.loose:
            notes.append(
                f"Some attention cannot be read as maps of tokens and is missing: {_listed(self.loose.values())}."
            )
        return notes

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

    def is_causal(self) -> bool:
        """Whether no position looks at a later one: seen on the first row of every layer."""
        return all(op.causal or not bool(op.weights([0])[..., 1:].any()) for op in self.ops)

    def rollout(
        self,
        *,
        target: int | Sequence[int] | Tensor | NDArray[Any] | None = None,
        source: int | Sequence[int] | None = None,
        segments: Sequence[tuple[int, int]] | None = None,
        residual: float = 0.5,
        heads: Heads = "mean",
        discard: float = 0.0,
        layers: Sequence[int] | None = None,
        normalize: bool | None = None,
        tolerance: float = 0.0,
    ) -> Tensor:
        """Rollout of the recorded layers, streamed over blocks of rows (Abnar and Zuidema 2020, sec. 4).

        One question at a time: `target` is a token position -> its row (B, n), several positions -> (B, k, n), or
        a row to start from, (n,) or (B, n), as a float array -> (B, n).  `source` is a position -> its column
        (B, n), or several -> (B, k, n).  `segments` are (start, stop) token ranges -> (B, n, M), the share of
        each in every position.  None of them: the whole map (B, n, n).

        `normalize` divides each row of a layer by its own sum.  By default rows keep the sums that the model gave
        them, so that those which its own sinks left short stay short; where the fusion of heads or `discard` changed
        a sum it is set back.  `tolerance` is the mass that may be dropped on the way to a target row; where the
        model has no sinks the result falls short of one by what was dropped, which is its L1 error exactly.

        Raises InputError for an option out of range, CaptureError where the layers do not form one chain,
        MemoryLimitError for a whole map larger than half of the available memory.
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
            check_heads(heads, op.heads)
        changed = discard > 0 or heads in ("max", "min")
        scaling: Scaling = "own" if changed else "none"
        if normalize is not None:
            scaling = "one" if normalize else "none"
        if target is None and source is None and segments is None:
            n = ops[-1].shape[2]
            advice = "Ask for rows of it: rollout(target=...)."
            check_fits((ops[-1].shape[0], n, n), 4, name="a whole rollout", advice=advice)
        mixing = Mixing(heads, residual, scaling, discard, self.valid)
        start, ask, single = self._question(ops[-1], target, source, segments)
        if ask == "target":
            answer = target_rows(ops, start, mixing, tolerance=tolerance)
        else:
            answer = source_columns(ops, start, mixing)
        answer = answer.to(ops[-1].dtype)
        if single:
            return answer.squeeze(-1)
        return answer.transpose(1, 2) if ask in ("target", "source") else answer

    def _question(
        self, op: TorchAttention, target: Any, source: Any, segments: Any
    ) -> tuple[Tensor, Literal["target", "source", "segments", "map"], bool]:
        """The vectors to start from, (B, n, M), which question they ask, and whether M is to be dropped.

        What is carried from layer to layer is float64 where the device has it, for vectors; a whole map is float32.
        """
        batch, _, n, _ = op.shape
        whole = target is None and source is None and segments is None
        wide = op.dtype if whole or op.device.type == "mps" else torch.float64
        eye = torch.eye(n, dtype=wide, device=op.device).expand(batch, n, n)
        if whole:
            return eye, "map", False
        if segments is not None:
            return _indicators(segments, eye), "segments", False
        if isinstance(target, Tensor | np.ndarray) and torch.as_tensor(target).is_floating_point():
            row = _start_row(torch.as_tensor(target), batch, n).to(op.device, wide)
            return row[..., None], "target", True
        ask: Literal["target", "source"] = "target" if source is None else "source"
        at, single = check_positions(ask, target if source is None else source, n)
        return eye[..., at], ask, single

    def contributions(self) -> Trace:
        """The run with each attention block's contributions in the place of its maps: one head, rows sum to one.

        c_ij is the share of token j in row i of the block's output, residual, output projection and layer norm
        included (Ferrando, Gállego and Costa-jussà 2022, arXiv 2203.04212, eq. 8 to 12).  The residual is inside:
        roll out with residual=0.0.  Needs `record(model, values=True)` and a known family; CaptureError
        otherwise.  Nothing is computed until it is asked for.
        """
        from attrace.capture.torch_blocks import contributions_of

        self.check()
        ops: list[TorchAttention] = [contributions_of(op, self.family, values=self.values) for op in self.ops]
        return replace(self, ops=ops, unread=[], starts=list(self.starts))

    def _chain(self, layers: Sequence[int] | None) -> list[TorchAttention]:
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
        first = self.ops[0]
        for op in self.ops:
            if op.kind != "self" or op.shape[0] != first.shape[0] or op.shape[2] != first.shape[2]:
                raise CaptureError(
                    f"Expected self-attention over the same {first.shape[2]} tokens in every layer of {self.model}. "
                    f"Received: {op.name} with (B, H, Q, T) = {op.shape}. Models with two streams or changing "
                    "lengths are not supported yet."
                )
        return [self.ops[i] for i in layer_indices(layers, len(self.ops))]


def _listed(names: Iterable[str]) -> str:
    """The first names and how many more there are."""
    named = list(names)
    more = len(named) - 3
    return ", ".join(named[:3]) + (f" and {more} more" if more > 0 else "")


def layer_indices(layers: Sequence[int] | None, count: int) -> list[int]:
    """Layer numbers, negative ones from the end, in forward order; InputError where one does not exist."""
    if layers is None:
        return list(range(count))
    chosen = {check_index("layers", layer, count, f"the model has {count} layers") for layer in layers}
    if not chosen or len(chosen) < len(layers):
        raise InputError(f"Expected at least one layer, each once. Received: {list(layers)!r}.")
    return sorted(chosen)


def _start_row(row: Tensor, batch: int, n: int) -> Tensor:
    if row.shape not in ((n,), (batch, n)):
        raise ShapeError(f"Expected a row of shape ({n},) or ({batch}, {n}). Received: {tuple(row.shape)}.")
    return row.expand(batch, n)


def _indicators(segments: Sequence[tuple[int, int]], eye: Tensor) -> Tensor:
    """One column per segment, 1 at its tokens: (B, n, M)."""
    n = eye.shape[-1]
    for start, stop in segments:
        if not 0 <= start < stop <= n:
            raise InputError(
                f"Expected segments (start, stop) with 0 <= start < stop <= {n}. Received: {(start, stop)}."
            )
    if not segments:
        raise InputError("Expected at least one segment. Received: none.")
    return torch.stack([eye[..., a:b].sum(-1) for a, b in segments], dim=-1)
