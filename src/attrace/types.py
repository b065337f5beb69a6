"""Plain records and protocols that the rooms share.  Imports no framework.

Shape letters, here and everywhere: B batch, L layers, H heads, Q query length, T key length,
n tokens of one input, M columns treated at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Array = Any
"""An array of one framework, the same in arguments and result: a PyTorch tensor, a NumPy array."""
Heads = str | int | Sequence[float]
"""How heads are fused: "mean", "max", "min", one head's index, or a weight per head."""
Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total); total is 0 where it is not known."""
TargetKind = Literal["class", "next", "token", "embedding"]


@runtime_checkable
class AttentionOp(Protocol):
    """One attention call of a model, as a linear operator on tokens."""

    @property
    def name(self) -> str:
        """Dotted name of the module that made the call."""
        ...

    @property
    def kind(self) -> Literal["self", "cross"]: ...

    @property
    def queries(self) -> str:
        """The token stream of the queries, by name: "decoder_input_ids"."""
        ...

    @property
    def keys(self) -> str:
        """The token stream of keys and values; that of the queries in self-attention."""
        ...

    @property
    def heads(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q, T)."""
        ...

    def weights(self, rows: Any = None) -> Any:
        """The map, (B, H, Q, T), or only the given query rows of it, (B, H, len(rows), T)."""
        ...

    def matvec(self, x: Any, *, heads: Heads = "mean") -> Any:
        """Fused map times x: (B, T) -> (B, Q), or (B, T, M) -> (B, Q, M)."""
        ...

    def rmatvec(self, r: Any, *, heads: Heads = "mean") -> Any:
        """Transposed fused map times r: (B, Q) -> (B, T), or (B, Q, M) -> (B, T, M)."""
        ...

    def fused(self, heads: Heads = "mean") -> Any:
        """The head-fused map, (B, Q, T)."""
        ...


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the input.  `text[start:end]` of the source text is what it stands for."""

    text: str
    """What to show: the slice of the source text, or the token's own name where it has none."""
    start: int
    end: int
    special: bool = False
    """Added by the tokenizer (class token, separator, padding), not part of the text."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Word:
    """A run of tokens that form one word of the source text."""

    text: str
    start: int
    end: int
    tokens: tuple[int, ...]
    """Indices into the attribution's tokens."""
    score: float
    """Sum of the tokens' scores."""
    share: float
    """|score| over the sum of all tokens' |scores|, special tokens and lost mass included."""


@dataclass(frozen=True, slots=True)
class Target:
    """The output that is explained."""

    kind: TargetKind
    label: str
    """The class's name or the token's text; "sentence vector" for an embedding."""
    index: int | None = None
    """Class index or vocabulary id."""
    position: int | None = None
    """The token position whose output is read; None where the whole input is pooled."""
    probability: float | None = None
    contrast: str | None = None
    """Label of B where the target is "why A rather than B"."""


@dataclass(frozen=True, slots=True)
class Sink:
    """One position that takes nearly all the mass whatever the target: a collapse, not an explanation."""

    index: int
    share: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """One of the model's likeliest answers."""

    label: str
    probability: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Attribution:
    """How much an output drew on each input token.

    `scores` has one number per token.  Where `signed` is False they are shares of a mass of one:
    `scores.sum() + lost_mass + sink_mass == 1`.  Where it is True they are effects, in the unit that
    `unit` names.
    """

    text: str
    tokens: tuple[Token, ...]
    scores: Floats
    words: tuple[Word, ...]
    target: Target
    method: str
    """The method's registry name."""
    signed: bool = False
    unit: str = "share of mass"
    lost_mass: float = 0.0
    """Mass given up by an approximation (its exact L1 error)."""
    sink_mass: float = 0.0
    """Mass that left through the model's own attention sinks."""
    sink: Sink | None = None
    predictions: tuple[Prediction, ...] = ()
    model: str = ""
    notes: tuple[str, ...] = ()
    """What the reader must know: a method chosen for a reason, a collapse, a truncated text."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was made: residual, heads, layers, seed, versions; JSON values only."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a method may be told."""

    heads: Heads = "mean"
    residual: float = 0.5
    discard: float = 0.0
    layers: tuple[int, ...] | None = None


class Subject(Protocol):
    """A model with one input and one target: all that a method may ask of them."""

    trace: Any
    """The recorded run (`attrace.capture.trace.Trace`), batch of one."""
    readout: Floats
    """(n,) weights that sum to one: how the target reads the last layer's positions."""
    protected: NDArray[np.bool_]
    """(n,) True at tokens that removal must leave: special tokens and the target's own position."""

    @property
    def unit(self) -> str:
        """What `score` gives: "log-probability", "cosine similarity", "output"."""
        ...

    def score(self, keep: NDArray[np.bool_], *, operator: str = "delete", progress: Progress | None = None) -> Floats:
        """The target's log-probability with only the kept tokens: (m, n) -> (m,).

        `operator` "delete" takes removed tokens out of the sequence; "hide" leaves them in place and masks them
        from attention.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a method found, before it is joined to text."""

    values: Floats
    """(n,)"""
    signed: bool = False
    unit: str = "share of mass"
    lost_mass: float = 0.0
    sink_mass: float = 0.0
    sink: Sink | None = None
