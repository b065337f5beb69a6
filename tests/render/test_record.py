"""JSON: the documented schema, bit-exact round trips, hostile input."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from attrace.errors import InputError, NonFiniteError, ShapeError
from attrace.render.record import SCHEMA, from_dict, from_json, to_dict, to_json
from attrace.types import Attribution, Prediction, Sink, Target, Token, Word

NAMED = json.loads(files("attrace").joinpath("assets/attribution.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(NAMED)
DOCUMENT = Path(__file__).parents[2] / "docs" / "json.md"


def same(one, other):
    """Equal in every field, scores bit by bit."""
    assert one.scores.dtype == other.scores.dtype == np.float64
    assert one.scores.tobytes() == other.scores.tobytes()
    return all(getattr(one, f.name) == getattr(other, f.name) for f in fields(Attribution) if f.name != "scores")


def test_the_schema_is_one():
    Draft202012Validator.check_schema(NAMED)
    assert NAMED["properties"]["schema"]["const"] == SCHEMA


@pytest.mark.parametrize("name", ["mail", "prompt", "sink", "evil"])
def test_records_follow_the_schema_and_come_back(name, request):
    case = request.getfixturevalue(name)
    record = to_dict(case)
    VALIDATOR.validate(record)
    assert set(record) == set(NAMED["properties"])
    assert same(from_dict(record), case)
    assert same(from_json(to_json(case)), case)


def test_every_part_is_described(mail):
    def walk(value, schema):
        if isinstance(value, dict) and schema.get("properties"):
            assert set(value) == set(schema["properties"]) == set(schema["required"])
            for key, part in value.items():
                walk(part, schema["properties"][key])
        elif isinstance(value, list):
            for part in value:
                walk(part, schema["items"])

    walk(to_dict(mail), NAMED)


def test_the_documented_example_is_true():
    (example,) = re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    VALIDATOR.validate(json.loads(example))
    case = from_json(example)
    assert to_dict(case) == json.loads(example)
    assert case.scores.sum() == pytest.approx(1.0)
    assert all(case.text[t.start : t.end] == t.text for t in case.tokens if not t.special)


def test_the_text_is_ascii(evil):
    assert to_json(evil).isascii()
    assert to_json(evil, indent=None).count("\n") == 1


def test_numbers_of_numpy_become_plain(mail):
    case = replace(
        mail,
        scores=mail.scores.astype(np.float32),
        lost_mass=np.float32(0.0),
        sink=Sink(np.int64(1), np.float32(0.5)),
        target=Target("class", "x", np.int64(3), np.int64(1), np.float64(0.5)),
        settings={"a": np.int64(1), "b": (np.float32(0.5), np.bool_(True)), "c": {"d": None}},
    )
    record = json.loads(json.dumps(to_dict(case)))
    VALIDATOR.validate(record)
    assert record["settings"] == {"a": 1, "b": [0.5, True], "c": {"d": None}}
    assert from_dict(record).scores.tolist() == [float(x) for x in case.scores]


@pytest.mark.parametrize("setting", [math.nan, math.inf, object(), {1: 2}, {"a": {3}}, b"x", np.zeros(2)])
def test_settings_that_json_cannot_hold_are_named(mail, setting):
    with pytest.raises(InputError, match=r"settings\.odd"):
        to_dict(replace(mail, settings={"odd": setting}))


def test_what_does_not_fit_is_not_written(mail):
    with pytest.raises(ShapeError):
        to_dict(replace(mail, scores=np.zeros(2)))
    with pytest.raises(NonFiniteError, match="token 0"):
        to_dict(replace(mail, scores=np.full(9, np.nan)))


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
MASS = st.floats(0, 1)
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=8)


@st.composite
def attributions(draw):
    text = draw(ANY_TEXT)
    spans = st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(sorted)
    tokens = tuple(
        Token(name, start, end, special)
        for name, (start, end), special in draw(
            st.lists(st.tuples(ANY_TEXT, spans, st.booleans()), min_size=1, max_size=5)
        )
    )
    indices = st.lists(st.integers(0, len(tokens) - 1), max_size=3).map(tuple)
    words = tuple(
        Word(name, start, end, members, score, share)
        for name, (start, end), members, score, share in draw(
            st.lists(st.tuples(ANY_TEXT, spans, indices, FLOATS, MASS), max_size=3)
        )
    )
    maybe = st.none() | st.integers(0, 2**53 - 1)
    json_values = st.recursive(
        st.none() | st.booleans() | FLOATS | ANY_TEXT | st.integers(-(2**53), 2**53),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(ANY_TEXT, inner, max_size=2),
        max_leaves=5,
    )
    return Attribution(
        text=text,
        tokens=tokens,
        scores=np.array(draw(st.lists(FLOATS, min_size=len(tokens), max_size=len(tokens)))),
        words=words,
        target=Target(
            draw(st.sampled_from(["class", "next", "token", "embedding"])),
            draw(ANY_TEXT),
            draw(maybe),
            draw(maybe),
            draw(st.none() | MASS),
            draw(st.none() | ANY_TEXT),
        ),
        method=draw(ANY_TEXT),
        signed=draw(st.booleans()),
        unit=draw(ANY_TEXT),
        lost_mass=draw(MASS),
        sink_mass=draw(MASS),
        sink=draw(st.none() | st.builds(Sink, st.integers(0, len(tokens) - 1), MASS)),
        predictions=tuple(draw(st.lists(st.builds(Prediction, ANY_TEXT, MASS), max_size=2))),
        model=draw(ANY_TEXT),
        notes=tuple(draw(st.lists(ANY_TEXT, max_size=2))),
        settings=draw(st.dictionaries(ANY_TEXT, json_values, max_size=3)),
    )


@given(attributions())
def test_any_attribution_comes_back_bit_by_bit(case):
    VALIDATOR.validate(to_dict(case))
    assert same(from_json(to_json(case)), case)


DELETE = object()


def changed(record, path, value):
    record = copy.deepcopy(record)
    *parents, last = path
    place = record
    for part in parents:
        place = place[part]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], "attrace.attribution/2", "another version"),
        (["schema"], "attrace.attribution/1 ", "another version|no attribution"),
        (["schema"], "shap/1", "no attribution of attrace"),
        (["schema"], DELETE, r"record\.schema\. Received: it is missing"),
        (["text"], 5, r"Expected a string as record\.text\. Received: 5"),
        (["text"], "", "token 2"),
        (["tokens"], {}, r"Expected an array as record\.tokens\. Received: an object"),
        (["tokens"], "abc", "Expected an array"),
        (["tokens", 0], None, r"Expected an object as record\.tokens\[0\]\. Received: null"),
        (
            ["tokens", 3, "start"],
            -1,
            r"Expected a whole number of 0 or more as record\.tokens\[3\]\.start\. Received: -1",
        ),
        (["tokens", 3, "start"], 10**400, "a huge number"),
        (["tokens", 3, "start"], 1.0, "whole number"),
        (["tokens", 3, "start"], True, "whole number"),
        (["tokens", 3, "end"], 10**9, "token 3"),
        (["tokens", 3, "special"], 1, "true or false"),
        (["tokens", 3, "score"], math.nan, "finite"),
        (["tokens", 3, "score"], -math.inf, "finite"),
        (["tokens", 3, "score"], 10**400, "finite"),
        (["tokens", 3, "score"], "0.5", r"a number as .*Received: '0.5'"),
        (["tokens", 3, "score"], True, "a number"),
        (["tokens", 3, "score"], DELETE, r"tokens\[3\]\.score\. Received: it is missing"),
        (["words", 0, "tokens"], [99], "token 99"),
        (["words", 0, "tokens"], [-1], "token -1"),
        (["words", 0, "tokens"], [0.5], r"words\[0\]\.tokens\[0\]"),
        (["words", 0, "tokens"], [False], r"words\[0\]\.tokens\[0\]"),
        (["words", 0, "share"], None, r"a number as .*Received: null"),
        (["words", 0, "end"], 99, "word 0"),
        (["target"], [], r"Expected an object as record\.target\. Received: an array"),
        (["target", "kind"], "pixel", "one of class, next"),
        (["target", "probability"], "high", "a number"),
        (["target", "probability"], 7, "from 0 to 1"),
        (["target", "index"], -5, "whole number"),
        (["target", "contrast"], 3, "a string"),
        (["target", "contrast"], DELETE, "is missing"),
        (["predictions", 0, "probability"], math.inf, "finite"),
        (["predictions", 0], "spam", "an object"),
        (["lost_mass"], 2, "lost_mass is 2.0"),
        (["sink_mass"], None, "a number"),
        (["sink"], {"index": 99, "share": 0.9}, "token 99"),
        (["sink"], {"index": 0}, r"sink\.share\. Received: it is missing"),
        (["sink"], DELETE, r"record\.sink\. Received: it is missing"),
        (["notes"], [1], r"Expected a string as record\.notes\[0\]"),
        (["notes"], "note", "an array"),
        (["settings"], [], "an object"),
        (["settings", "x"], math.nan, r"settings\.x"),
        (["signed"], "no", "true or false"),
        (["method"], None, r"a string as .*Received: null"),
        (["unit"], "\x1b" * 100, None),
    ],
)
def test_hostile_records_are_refused_by_name(mail, path, value, message):
    record = changed(to_dict(mail), path, value)
    if message is None:
        from_dict(record)
        return
    with pytest.raises(InputError, match=message):
        from_dict(record)


@pytest.mark.parametrize("record", [None, [], "x", 5, {}, {"schema": None}])
def test_records_that_are_none(record):
    with pytest.raises(InputError, match="record"):
        from_dict(record)


def test_an_error_shows_no_raw_text(mail):
    with pytest.raises(InputError) as caught:
        from_dict(changed(to_dict(mail), ["signed"], "\x1b[31m" + "x" * 1000))
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_unknown_fields_are_passed_over(mail):
    record = changed(to_dict(mail), ["later"], {"x": 1})
    VALIDATOR.validate(record)
    assert same(from_dict(record), mail)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema": "attrace.attribution/1", "lost_mass": NaN}',
        '{"schema": -Infinity}',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"schema": ' + "9" * 5000 + "}",
        "\x80\x04\x95",
    ],
)
def test_hostile_texts_are_refused(text):
    with pytest.raises(InputError):
        from_json(text)


def test_settings_may_not_be_bottomless(mail):
    bottomless = []
    for _ in range(100):
        bottomless = [bottomless]
    with pytest.raises(InputError, match="nested"):
        from_dict(changed(to_dict(mail), ["settings", "x"], bottomless))
