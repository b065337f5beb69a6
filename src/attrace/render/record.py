"""Attributions as JSON, schema attrace.attribution/1 (docs/json.md, assets/attribution.schema.json)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np

from attrace.errors import AttraceError, InputError
from attrace.render.check import check
from attrace.types import Attribution, Prediction, Sink, Target, TargetKind, Token, Word

SCHEMA = "attrace.attribution/1"
_DEEPEST = 32
_LARGEST = 2**53
_MEND = "Mend it there, or save the explanation again."
_SAVED = "Give what Explanation.save or attrace explain --json wrote."
_KINDS = ("class", "next", "token", "embedding")
T = TypeVar("T")


def to_dict(attribution: Attribution) -> dict[str, Any]:
    """The attribution as JSON values, schema attrace.attribution/1; `from_dict` gives it back bit by bit.

    Raises ShapeError and NonFiniteError for scores that do not fit or are not finite, InputError for spans
    outside of the text and for settings that are no JSON values.

    >>> token = Token("hi", 0, 2)
    >>> target = Target("class", "greeting", index=1, probability=0.9)
    >>> record = to_dict(Attribution(text="hi", tokens=(token,), scores=np.array([1.0]), words=(),
    ...                              target=target, method="rollout"))
    >>> record["schema"], record["tokens"]
    ('attrace.attribution/1', [{'text': 'hi', 'start': 0, 'end': 2, 'special': False, 'score': 1.0}])
    """
    check(attribution)
    target, sink = attribution.target, attribution.sink
    return {
        "schema": SCHEMA,
        "text": attribution.text,
        "target": {
            "kind": target.kind,
            "label": target.label,
            "index": _plain_int(target.index),
            "position": _plain_int(target.position),
            "probability": _plain_float(target.probability),
            "contrast": target.contrast,
        },
        "predictions": [
            {"label": item.label, "probability": float(item.probability)} for item in attribution.predictions
        ],
        "method": attribution.method,
        "model": attribution.model,
        "signed": bool(attribution.signed),
        "unit": attribution.unit,
        "tokens": [
            {
                "text": token.text,
                "start": int(token.start),
                "end": int(token.end),
                "special": bool(token.special),
                "score": float(score),
            }
            for token, score in zip(attribution.tokens, attribution.scores, strict=True)
        ],
        "words": [
            {
                "text": word.text,
                "start": int(word.start),
                "end": int(word.end),
                "tokens": [int(index) for index in word.tokens],
                "score": float(word.score),
                "share": float(word.share),
            }
            for word in attribution.words
        ],
        "lost_mass": float(attribution.lost_mass),
        "sink_mass": float(attribution.sink_mass),
        "sink": None if sink is None else {"index": int(sink.index), "share": float(sink.share)},
        "notes": list(attribution.notes),
        "settings": _json_value(attribution.settings, "settings"),
    }


def _plain_int(value: int | None) -> int | None:
    return None if value is None else int(value)


def _plain_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _json_value(value: Any, path: str, depth: int = 0) -> Any:
    """A deep copy in lists and dicts; NumPy's numbers become Python's."""
    if depth > _DEEPEST:
        raise InputError(
            f"Expected at most {_DEEPEST} levels. Received: {path} is nested deeper. Leave the inner ones out."
        )
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(
                f"Expected a finite number, as JSON holds no other. Received: {path} is {value}. "
                "Leave it out, or write it as a string."
            )
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"Expected strings as keys. Received: {path} has the key {key!r}. Make it a string.")
        return {key: _json_value(part, f"{path}.{key}", depth + 1) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(part, f"{path}[{at}]", depth + 1) for at, part in enumerate(value)]
    raise InputError(
        f"Expected a JSON value. Received: {path} is of type {type(value).__name__}. "
        "Convert it to numbers, strings, lists and dicts."
    )


def _shown(value: Any) -> str:
    """A short, harmless name for a value that did not fit."""
    if isinstance(value, str):
        return ascii(value if len(value) <= 40 else value[:39] + "…")
    if value is None or isinstance(value, (bool, float)):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "a huge number"
    return {"list": "an array", "dict": "an object"}.get(type(value).__name__, type(value).__name__)


def _misfit(expected: str, path: str, value: Any) -> InputError:
    return InputError(f"Expected {expected} as {path}. Received: {_shown(value)}. {_MEND}")


class _Reader:
    """Takes values out of one JSON object and says where a wrong one stands."""

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise _misfit("an object", path, value)
        self.value, self.path = value, path

    def wrong(self, key: str, expected: str) -> InputError:
        name = f"{self.path}.{key}"
        if key not in self.value:
            return InputError(f"Expected {expected} as {name}. Received: it is missing. {_MEND}")
        return _misfit(expected, name, self.value[key])

    def text(self, key: str) -> str:
        value = self.value.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def flag(self, key: str) -> bool:
        value = self.value.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def count(self, key: str) -> int:
        value = self.value.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
            raise self.wrong(key, "a whole number of 0 or more")
        return value

    def number(self, key: str) -> float:
        value = self.value.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, "a number")
        if (isinstance(value, int) and abs(value) > _LARGEST) or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(value)

    def maybe(self, key: str, read: Callable[[str], T]) -> T | None:
        if key not in self.value:
            raise self.wrong(key, "a value or null")
        return None if self.value[key] is None else read(key)

    def array(self, key: str) -> list[Any]:
        value = self.value.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "an array")
        return value

    def objects(self, key: str) -> list[_Reader]:
        return [_Reader(item, f"{self.path}.{key}[{at}]") for at, item in enumerate(self.array(key))]

    def object(self, key: str) -> _Reader:
        if key not in self.value:
            raise self.wrong(key, "an object")
        return _Reader(self.value[key], f"{self.path}.{key}")


def from_dict(record: Any) -> Attribution:
    """The attribution that `to_dict` has written; `record` may come from anywhere.

    Keys that are not known are passed over, so that version 1 can grow.  Raises InputError, which names the
    place, for another schema or version, a wrong type, a number that is not finite or out of range, a span
    outside of the text, and an index of a token that does not exist.
    """
    top = _Reader(record, "record")
    schema = top.text("schema")
    if schema != SCHEMA:
        name, _, version = SCHEMA.partition("/")
        hint = (
            "It was written by another version of attrace: read it with that one"
            if schema.startswith(f"{name}/")
            else f"It is no attribution of attrace: give one of version {version}"
        )
        raise InputError(f"Expected {SCHEMA!r} as record.schema. Received: {_shown(schema)}. {hint}.")
    tokens = top.objects("tokens")
    attribution = Attribution(
        text=top.text("text"),
        tokens=tuple(
            Token(item.text("text"), item.count("start"), item.count("end"), item.flag("special")) for item in tokens
        ),
        scores=np.array([item.number("score") for item in tokens], dtype=np.float64),
        words=tuple(_word(item) for item in top.objects("words")),
        target=_target(top.object("target")),
        method=top.text("method"),
        signed=top.flag("signed"),
        unit=top.text("unit"),
        lost_mass=top.number("lost_mass"),
        sink_mass=top.number("sink_mass"),
        sink=top.maybe("sink", lambda key: _sink(top.object(key))),
        predictions=tuple(
            Prediction(item.text("label"), item.number("probability")) for item in top.objects("predictions")
        ),
        model=top.text("model"),
        notes=tuple(_strings(top, "notes")),
        settings=_json_value(top.object("settings").value, "record.settings"),
    )
    try:
        check(attribution)
    except InputError:
        raise
    except AttraceError as error:
        raise InputError(str(error)) from error
    return attribution


def _strings(reader: _Reader, key: str) -> list[str]:
    values = reader.array(key)
    for at, value in enumerate(values):
        if not isinstance(value, str):
            raise _misfit("a string", f"{reader.path}.{key}[{at}]", value)
    return values


def _word(item: _Reader) -> Word:
    indices = item.array("tokens")
    for at, index in enumerate(indices):
        if isinstance(index, bool) or not isinstance(index, int):
            raise _misfit("a whole number", f"{item.path}.tokens[{at}]", index)
    return Word(
        item.text("text"),
        item.count("start"),
        item.count("end"),
        tuple(indices),
        item.number("score"),
        item.number("share"),
    )


def _sink(item: _Reader) -> Sink:
    return Sink(item.count("index"), item.number("share"))


def _target(item: _Reader) -> Target:
    kind = item.text("kind")
    if kind not in _KINDS:
        raise item.wrong("kind", "one of " + ", ".join(_KINDS))
    return Target(
        cast(TargetKind, kind),
        item.text("label"),
        item.maybe("index", item.count),
        item.maybe("position", item.count),
        item.maybe("probability", item.number),
        item.maybe("contrast", item.text),
    )


def to_json(attribution: Attribution, *, indent: int | None = 2) -> str:
    """`to_dict` as text: ASCII only, one object, a line end last."""
    return json.dumps(to_dict(attribution), indent=indent, allow_nan=False) + "\n"


def from_json(text: str) -> Attribution:
    """The attribution in a text that `to_json` has written; raises InputError for anything else."""
    try:
        record = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise InputError(
            f"Expected JSON of the schema {SCHEMA!r}. Received: JSON that is nested too deep. {_SAVED}"
        ) from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"Expected JSON of the schema {SCHEMA!r}. Received: other text ({error}). {_SAVED}") from error
    return from_dict(record)


def _no_constant(name: str) -> float:
    raise InputError(f"Expected finite numbers. Received: JSON that holds {name}. {_SAVED}")
