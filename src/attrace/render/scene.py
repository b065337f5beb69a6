"""Attribution -> one scene that is neither terminal nor HTML.

What is shown, in which words and with which numbers, is decided here once; renderers only draw it.  All text
in a scene is harmless to a terminal (see `escapes`); HTML still has to escape its own markup.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attrace.errors import InputError
from attrace.escapes import visible, visible_characters, visible_label
from attrace.render.check import check
from attrace.types import Attribution, Target

Units = Literal["words", "tokens"]
Kind = Literal["word", "blank", "special", "sink"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A word or a token with its score."""

    label: str
    kind: Kind
    score: float
    share: float
    """|score| of the whole, 0 to 1."""
    weight: float
    """Colour, -1 to 1; 0 for special tokens and the sink."""
    amount: str
    """The score as text: a share ("12.4 %") or a signed effect ("+0.42")."""
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of one line of the text."""

    text: str
    unit: int | None = None
    """Index into the scene's units; None between them."""
    sign: bool = False
    """Stands for something that is not in the text itself: a line end, a token without text."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token in the full table."""

    index: int
    label: str
    span: str
    score: str
    share: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that a picture of an attribution says."""

    label: str
    """The output that is explained."""
    amount: str
    """Its probability as text, or nothing."""
    question: str
    """What kind of output it is, "next token"; nothing for a class."""
    details: tuple[str, ...]
    predictions: tuple[tuple[str, str], ...]
    unit_name: Literal["word", "token"]
    units: tuple[Unit, ...]
    lines: tuple[tuple[Segment, ...], ...]
    top: tuple[int, ...]
    """The strongest units, strongest first."""
    rest: tuple[int, str] | None
    """How many more there are and what they hold together."""
    specials: tuple[tuple[str, int, str], ...]
    """Special tokens by name: (name, count, amount)."""
    ledger: tuple[tuple[str, str], ...]
    """Where all the mass went; the rows add up to 100 %."""
    sink: str
    notes: tuple[str, ...]
    method: str
    settings: tuple[tuple[str, str], ...]
    rows: tuple[TokenRow, ...]
    signed: bool
    unit: str
    scale: float
    """The |score| that has the full colour."""
    legend: tuple[tuple[float, str], ...]
    """(weight, amount) from weak or negative to strong."""


def percent(share: float, digits: int = 1) -> str:
    """A share as text.

    >>> percent(0.1244), percent(0.0), percent(0.0004), percent(1.0)
    ('12.4 %', '0.0 %', '<0.1 %', '100.0 %')
    """
    if 0 < share < 0.5 * 10 ** -(digits + 2):
        return f"<{10**-digits:.{digits}f} %"
    if 0.5 < share < 1 and round(share * 100, digits) >= 100:
        return f">{100 - 10**-digits:.{digits}f} %"
    return f"{share * 100:.{digits}f} %"


def _share_digits(largest: float) -> int:
    """Decimals that tell the shares of a list apart whose largest is `largest`."""
    return 1 if largest >= 0.01 else 2 if largest >= 0.001 else 3


def _effect(score: float, scale: float) -> str:
    """A signed effect with three digits at the size of `scale`."""
    if scale and not 1e-4 <= scale < 1e6:
        return f"{score:+.2e}"
    digits = 2 if not scale else max(0, 2 - math.floor(math.log10(scale)))
    text = f"{score:+.{digits}f}"
    return text if float(text) else text.lstrip("+-")


def _is_run(values: list[Any]) -> bool:
    """Whole numbers that go up by one."""
    return all(type(v) is int for v in values) and values == list(range(values[0], values[0] + len(values)))


def _setting(value: Any) -> str:
    if isinstance(value, str):
        text = value
    elif isinstance(value, bool) or value is None:
        text = {True: "yes", False: "no", None: "none"}[value]
    elif isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{key} {_setting(part)}" for key, part in value.items())
    elif isinstance(value, list) and len(value) > 2 and _is_run(value):
        text = f"{value[0]}-{value[-1]}"  # a run of layers
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    return visible(text if len(text) <= 200 else text[:199] + "…")


def _headline(target: Target) -> tuple[str, str]:
    if target.kind in ("next", "token"):
        quote = "“{}”" if not target.label.isspace() else "{}"
        label = quote.format(visible(target.label) if not target.label.isspace() else visible_label(target.label))
        other = f"“{visible(target.contrast)}”" if target.contrast is not None else ""
    else:
        label = visible_label(target.label)
        other = visible_label(target.contrast) if target.contrast is not None else ""
    question = {"class": "", "next": "next token", "token": "token", "embedding": "embedding"}[target.kind]
    if target.kind == "token" and target.position is not None:
        question = f"token at position {target.position}"
    return (f"{label} rather than {other}" if other else label), question


class _Builder:
    """Works out the units of one attribution; short-lived."""

    def __init__(self, attribution: Attribution, units: Units, scale: float | None) -> None:
        self.attribution = attribution
        self.scores = [float(score) for score in attribution.scores]
        self.apart = attribution.sink.index if attribution.sink is not None and not attribution.signed else None
        total = math.fsum(map(abs, self.scores))
        if not attribution.signed:
            total += attribution.lost_mass + attribution.sink_mass
        self.total = total
        groups = self.word_groups() if units == "words" and attribution.words else self.token_groups()
        self.spans: list[tuple[int, int]] = []
        raw: list[tuple[str, Kind, tuple[int, ...]]] = []
        for start, end, label, members in groups:
            self.spans.append((start, end))
            raw.append((label, self.kind(label, members), members))
        sums = [self.sum(members, kind) for _, kind, members in raw]
        colourful = [abs(value) for value, (_, kind, _) in zip(sums, raw, strict=True) if kind in ("word", "blank")]
        self.largest = max(colourful, default=0.0)
        self.scale = self.largest if scale is None else scale
        self.digits = _share_digits(self.share(self.largest))
        self.units = tuple(
            Unit(
                label=visible_label(label),
                kind=kind,
                score=value,
                share=self.share(value),
                weight=self.weight(value) if kind in ("word", "blank") else 0.0,
                amount=self.amount(value),
                tokens=members,
            )
            for value, (label, kind, members) in zip(sums, raw, strict=True)
        )

    def share(self, score: float) -> float:
        return abs(score) / self.total if self.total else 0.0

    def weight(self, score: float) -> float:
        return max(-1.0, min(1.0, score / self.scale)) if self.scale else 0.0

    def amount(self, score: float) -> str:
        if self.attribution.signed:
            return _effect(score, self.scale or self.largest)
        return percent(self.share(score), self.digits)

    def kind(self, label: str, members: tuple[int, ...]) -> Kind:
        if self.attribution.tokens[members[0]].special:
            return "special"
        if members == (self.apart,):
            return "sink"
        return "blank" if label.isspace() else "word"

    def sum(self, members: Iterable[int], kind: Kind) -> float:
        return math.fsum(self.scores[index] for index in members if kind == "sink" or index != self.apart)

    def special_groups(self) -> list[tuple[int, int, str, tuple[int, ...]]]:
        tokens = self.attribution.tokens
        return [(t.start, t.end, t.text, (i,)) for i, t in enumerate(tokens) if t.special]

    def word_groups(self) -> list[tuple[int, int, str, tuple[int, ...]]]:
        tokens = self.attribution.tokens
        groups = self.special_groups()
        seen: set[int] = set()
        for word in self.attribution.words:
            members = tuple(i for i in word.tokens if not tokens[i].special and i not in seen)
            seen.update(members)
            if members:
                groups.append((word.start, word.end, word.text, members))
        rest = [i for i, token in enumerate(tokens) if not token.special and i not in seen]
        return sorted(groups + self.joined(rest), key=lambda group: (group[0], group[3]))

    def token_groups(self) -> list[tuple[int, int, str, tuple[int, ...]]]:
        plain = [i for i, token in enumerate(self.attribution.tokens) if not token.special]
        return sorted(self.special_groups() + self.joined(plain), key=lambda group: (group[0], group[3]))

    def joined(self, indices: Sequence[int]) -> list[tuple[int, int, str, tuple[int, ...]]]:
        """Tokens as units, those that share a character together, blanks around them left out."""
        text, tokens = self.attribution.text, self.attribution.tokens
        groups: list[tuple[int, int, str, tuple[int, ...]]] = []
        spans: list[tuple[int, int, int]] = []
        for index in indices:
            start, end = tokens[index].start, tokens[index].end
            if start == end:
                groups.append((start, end, tokens[index].text, (index,)))
                continue
            part = text[start:end]
            if not part.isspace():
                start, end = start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip())
            spans.append((start, end, index))
        merged: list[tuple[int, int, tuple[int, ...]]] = []
        for start, end, index in sorted(spans):
            if merged and start < merged[-1][1]:
                before = merged[-1]
                merged[-1] = (before[0], max(before[1], end), tuple(sorted((*before[2], index))))
            else:
                merged.append((start, end, (index,)))
        return groups + [(start, end, text[start:end], members) for start, end, members in merged]

    def pieces(self) -> Iterator[tuple[str, int | None, bool]]:
        """The text, cut at the borders of units: (what to show, unit, whether it is a sign)."""
        text = self.attribution.text
        shown = visible_characters(text)
        for at, char in enumerate(text):
            if char in "\n\t":
                shown[at] = char
            elif char == "\r" and text[at + 1 : at + 2] == "\n":
                shown[at] = ""
        cursor = 0
        for number, (start, end) in enumerate(self.spans):
            empty = start == end
            if empty and self.units[number].kind == "special":
                continue
            yield "".join(shown[cursor:start]), None, False
            if empty:
                yield self.units[number].label, number, True
            else:
                yield "".join(shown[max(cursor, start) : end]), number, False
            cursor = max(cursor, end)
        yield "".join(shown[cursor:]), None, False

    def lines(self) -> tuple[tuple[Segment, ...], ...]:
        """The text, cut at line ends and at the borders of units; empty lines at the end are left out."""
        lines: list[list[Segment]] = [[]]
        for piece, owner, sign in self.pieces():
            for at, part in enumerate(piece.split("\n")):
                if at:
                    if owner is not None and self.units[owner].kind != "special":
                        lines[-1].append(Segment("⏎", owner, True))
                    lines.append([])
                if part:
                    lines[-1].append(Segment(part, owner, sign))
        while len(lines) > 1 and not lines[-1]:
            lines.pop()
        return tuple(tuple(line) for line in lines)

    def ledger(self) -> tuple[tuple[str, str], ...]:
        """Where a mass of one went."""
        if self.attribution.signed or not self.total:
            return ()
        sums: dict[str, float] = dict.fromkeys(("word", "blank", "special", "sink"), 0.0)
        for unit in self.units:
            sums[unit.kind] += abs(unit.score)
        if self.apart is not None and not any(unit.kind == "sink" for unit in self.units):
            place = "special" if self.attribution.tokens[self.apart].special else "sink"
            sums[place] += abs(self.scores[self.apart])
        rows = (
            ("text", sums["word"] + sums["blank"]),
            ("special tokens", sums["special"]),
            ("sink", sums["sink"]),
            ("model's own sinks", self.attribution.sink_mass),
            ("lost to approximation", self.attribution.lost_mass),
        )
        kept = [(name, mass) for name, mass in rows if mass]
        return tuple((name, percent(mass / self.total)) for name, mass in kept) if len(kept) > 1 else ()

    def specials(self) -> tuple[tuple[str, int, str], ...]:
        sums: dict[str, tuple[int, float]] = {}
        for index, token in enumerate(self.attribution.tokens):
            if token.special:
                count, score = sums.get(token.text, (0, 0.0))
                sums[token.text] = (count + 1, score + self.scores[index])
        return tuple(
            (
                visible_label(name),
                count,
                self.amount(score) if self.attribution.signed else percent(self.share(score)),
            )
            for name, (count, score) in sums.items()
        )

    def sink(self) -> str:
        sink = self.attribution.sink
        if sink is None:
            return ""
        token = self.attribution.tokens[sink.index]
        place = "The first token" if sink.index == 0 else f"Token {sink.index}"
        name = visible_label(token.text) if token.special else f"“{visible_label(token.text)}”"
        if self.attribution.signed:
            place = place[0].lower() + place[1:]
            return f"In plain rollout {place}, {name}, takes {percent(sink.share)} of the mass whatever the target."
        said = f"{place}, {name}, takes {percent(sink.share)} of the attention mass whatever the target."
        return f"{said} This is a collapse, not an explanation: it is left out of the colours and of the list."

    def rows(self) -> tuple[TokenRow, ...]:
        kinds: dict[int, Kind] = {index: unit.kind for unit in self.units for index in unit.tokens}
        if self.apart is not None:
            kinds[self.apart] = "sink"
        digits = max(2, _share_digits(self.share(self.largest)))
        return tuple(
            TokenRow(
                index=index,
                label=visible_label(token.text),
                span=f"{token.start}–{token.end}" if token.end > token.start else "",
                score=f"{self.scores[index]:+.6g}" if self.attribution.signed else f"{self.scores[index]:.6g}",
                share=percent(self.share(self.scores[index]), digits),
                kind=kinds.get(index, "special"),
            )
            for index, token in enumerate(self.attribution.tokens)
        )


def build_scene(
    attribution: Attribution, *, top: int = 10, units: Units = "words", scale: float | None = None
) -> Scene:
    """Everything that a picture of an attribution says, for `top` words at most.

    `units="tokens"` shows tokens instead of words; tokens that share a character stay together.  Colours run
    up to the largest |score| of a word, special tokens and the sink left out; give `scale`, a |score|, to
    colour several attributions alike.

    Raises ShapeError and NonFiniteError for scores that do not fit or are not finite, InputError for an
    option that cannot be used.
    """
    check(attribution)
    if units not in ("words", "tokens"):
        raise InputError(f"Expected units 'words' or 'tokens'. Received: {units!r}. Give one of the two.")
    if top < 0:
        raise InputError(f"Expected top of 0 or more. Received: {top}. Give 0 to list nothing.")
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise InputError(
            f"Expected a finite scale above 0. Received: {scale}. Leave it out to scale by the largest score."
        )
    built = _Builder(attribution, units, scale)
    ranked = [number for number, unit in enumerate(built.units) if unit.kind in ("word", "blank") and unit.score]
    ranked.sort(key=lambda number: (-abs(built.units[number].score), number))
    others = [built.units[number].score for number in ranked[top:]]
    label, question = _headline(attribution.target)
    probability = attribution.target.probability
    count = len(attribution.tokens)
    details = [visible_label(attribution.model)] if attribution.model else []
    details.append(f"{count:,} token{'s' if count != 1 else ''}")
    weights = (-1.0, -0.5, 0.0, 0.5, 1.0) if attribution.signed else (0.0, 0.25, 0.5, 0.75, 1.0)
    return Scene(
        label=label,
        amount="" if probability is None else percent(probability),
        question=question,
        details=tuple(details),
        predictions=tuple((visible_label(p.label), percent(p.probability)) for p in attribution.predictions),
        unit_name="word" if units == "words" and attribution.words else "token",
        units=built.units,
        lines=built.lines(),
        top=tuple(ranked[:top]),
        rest=(len(others), built.amount(math.fsum(others))) if others else None,
        specials=built.specials(),
        ledger=built.ledger(),
        sink=built.sink(),
        notes=tuple(visible_label(note) for note in attribution.notes),
        method=visible_label(attribution.method),
        settings=tuple((visible_label(str(key)), _setting(value)) for key, value in attribution.settings.items()),
        rows=built.rows(),
        signed=attribution.signed,
        unit=visible_label(attribution.unit),
        scale=built.scale,
        legend=tuple((weight, built.amount(weight * built.scale)) for weight in weights),
    )
