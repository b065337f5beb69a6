"""What a picture says, before anything draws it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attrace.errors import InputError, NonFiniteError, ShapeError
from attrace.render.scene import build_scene, percent
from attrace.types import Sink, Target, Token, Word

from .conftest import attribution


def text_of(scene, signs=False):
    return "\n".join("".join(segment.text for segment in line if signs or not segment.sign) for line in scene.lines)


def amount_of(text):
    return float(text.rstrip(" %"))


def test_headline_and_tables(mail):
    scene = build_scene(mail, top=3)
    assert (scene.label, scene.amount, scene.question) == ("spam", "99.8 %", "")
    assert scene.details == ("spam classifier", "9 tokens")
    assert [(scene.units[n].label, scene.units[n].amount) for n in scene.top] == [
        ("FREE", "25.0 %"),
        ("prize", "20.0 %"),
        ("claim", "16.0 %"),
    ]
    assert scene.rest == (4, "7.0 %")
    assert scene.specials == (("[CLS]", 1, "20.0 %"), ("[SEP]", 1, "10.0 %"))
    assert scene.ledger == (
        ("text", "68.0 %"),
        ("special tokens", "30.0 %"),
        ("lost to approximation", "2.0 %"),
    )
    assert ("versions", "attrace 0.1.0") in scene.settings


def test_the_text_is_kept(mail):
    assert text_of(build_scene(mail)) == mail.text.rstrip("\n")


def test_weights_run_up_to_the_largest_word(mail):
    scene = build_scene(mail)
    weights = {unit.label: unit.weight for unit in scene.units}
    assert (weights["FREE"], weights["claim"], weights["[CLS]"]) == (1.0, pytest.approx(0.64), 0.0)


def test_a_shared_scale_colours_alike(mail):
    scene = build_scene(mail, scale=0.5)
    assert next(unit.weight for unit in scene.units if unit.label == "FREE") == 0.5
    assert scene.legend[-1] == (1.0, "50.0 %")


def test_signed_scores_are_symmetric(prompt):
    scene = build_scene(prompt)
    assert scene.label == "“ Paris” rather than “ London”"
    assert scene.question == "next token"
    weights = {unit.label: unit.weight for unit in scene.units}
    assert weights["France"] == 1.0
    assert weights["of"] == pytest.approx(-0.15)
    assert [scene.units[n].amount for n in scene.top][:4] == ["+2.00", "+1.50", "+0.40", "-0.30"]
    assert scene.ledger == ()
    assert [weight for weight, _ in scene.legend] == [-1.0, -0.5, 0.0, 0.5, 1.0]


def test_the_sink_stands_apart(sink):
    scene = build_scene(sink)
    assert "“The”, takes 95.0 %" in scene.sink
    assert [scene.units[n].label for n in scene.top] == ["capital", "France", "is", "of"]
    assert {u.label: (u.kind, u.weight) for u in scene.units}["The"] == ("sink", 0.0)
    assert {u.label: u.weight for u in scene.units}["capital"] == 1.0
    assert scene.ledger == (("text", "5.0 %"), ("sink", "95.0 %"))


def test_a_sink_inside_of_a_word_is_taken_out_of_it():
    case = attribution("unbelievable", [1.0])
    case = replace(
        case,
        tokens=(Token("un", 0, 2), Token("believable", 2, 12)),
        scores=np.array([0.9, 0.1]),
        words=(Word("unbelievable", 0, 12, (0, 1), 1.0, 1.0),),
        sink=Sink(0, 0.9),
    )
    scene = build_scene(case)
    assert [(u.label, u.kind, u.amount) for u in scene.units] == [("unbelievable", "word", "10.0 %")]
    assert scene.ledger == (("text", "10.0 %"), ("sink", "90.0 %"))


def test_a_special_sink_is_named_without_quotes():
    case = attribution("a b", [0.05, 0.05], specials=[("<s>", 0.9)], sink=Sink(0, 0.9))
    scene = build_scene(case)
    assert "The first token, <s>, takes 90.0 %" in scene.sink
    assert scene.ledger == (("text", "10.0 %"), ("special tokens", "90.0 %"))


def test_a_sink_beside_signed_effects_is_only_said(prompt):
    scene = build_scene(replace(prompt, sink=Sink(7, 0.97)))
    assert scene.sink.endswith("whatever the target.")
    assert next(u.weight for u in scene.units if u.label == "France") == 1.0


def test_many_special_tokens_are_counted():
    scene = build_scene(attribution("a", [0.5], specials=[("[PAD]", 0.25), ("[PAD]", 0.25)]))
    assert scene.specials == (("[PAD]", 2, "50.0 %"),)


def test_special_tokens_of_the_text_stay_in_place():
    case = attribution("<s> hi", [0.5, 0.5])
    tokens = (Token("<s>", 0, 3, True), Token(" hi", 3, 6))
    scene = build_scene(replace(case, tokens=tokens, words=(Word("hi", 4, 6, (1,), 0.5, 0.5),)))
    assert text_of(scene) == "<s> hi"
    assert [unit.kind for unit in scene.units] == ["special", "word"]


def test_blank_tokens_are_seen_and_kept():
    text = "a:\n    b"
    tokens = (Token("a:", 0, 2), Token("\n", 2, 3), Token("    ", 3, 7), Token("b", 7, 8))
    base = attribution("x", [1.0])
    case = replace(base, text=text, tokens=tokens, scores=np.array([0.1, 0.4, 0.3, 0.2]), words=())
    scene = build_scene(case, units="tokens")
    assert [scene.units[n].label for n in scene.top] == ["⏎", "␣×4", "b", "a:"]
    assert text_of(scene) == text
    assert text_of(scene, signs=True) == "a:⏎\n    b"


def test_tokens_of_one_character_are_one_unit():
    base = attribution("x", [1.0])
    tokens = (Token(" 😀", 1, 3), Token("😀", 2, 3), Token("😀", 2, 3), Token("a", 0, 1))
    case = replace(base, text="a 😀", tokens=tokens, scores=np.array([0.1, 0.2, 0.3, 0.4]), words=())
    scene = build_scene(case, units="tokens")
    assert [(u.label, u.tokens, u.amount) for u in scene.units] == [
        ("a", (3,), "40.0 %"),
        ("😀", (0, 1, 2), "60.0 %"),
    ]
    assert text_of(scene) == "a 😀"
    assert len(scene.rows) == 4


def test_tokens_without_text_are_signs_in_place():
    base = attribution("x", [1.0])
    tokens = (Token("<image>", 0, 0), Token("hi", 0, 2))
    scene = build_scene(replace(base, text="hi", tokens=tokens, scores=np.array([0.7, 0.3]), words=()))
    assert text_of(scene, signs=True) == "<image>hi"
    assert text_of(scene) == "hi"


def test_tokens_that_no_word_holds_are_still_shown(mail):
    scene = build_scene(replace(mail, words=mail.words[2:]))
    assert scene.ledger[0] == ("text", "68.0 %")


def test_windows_line_ends_become_lines():
    scene = build_scene(attribution("a\r\nb\rc", [0.5, 0.25, 0.25]))
    assert text_of(scene) == "a\nb\\x0dc"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_named(bad):
    case = attribution("x", [1.0])
    tokens = tuple(Token(name, 0, 1) for name in "abc")
    with pytest.raises(NonFiniteError, match=r"token 1 \('b'\)"):
        build_scene(replace(case, tokens=tokens, scores=np.array([0.1, bad, 0.3])))


def test_lengths_must_fit(mail):
    with pytest.raises(ShapeError, match=r"\(9,\)\. Received: shape \(3,\)"):
        build_scene(replace(mail, scores=np.array([0.1, 0.2, 0.3])))
    with pytest.raises(ShapeError):
        build_scene(replace(mail, scores=np.zeros((9, 1))))


@pytest.mark.parametrize(
    "change",
    [
        {"text": "short"},
        {"words": (Word("x", 0, 1, (99,), 0.1, 0.1),)},
        {"sink": Sink(99, 0.9)},
        {"sink": Sink(0, 9.0)},
        {"lost_mass": 2.0},
        {"target": Target("class", "x", probability=-1.0)},
    ],
)
def test_what_does_not_fit_together_is_refused(mail, change):
    with pytest.raises(InputError):
        build_scene(replace(mail, **change))


@pytest.mark.parametrize("options", [{"units": "pixels"}, {"top": -1}, {"scale": 0.0}, {"scale": math.nan}])
def test_wrong_options_are_refused(mail, options):
    with pytest.raises(InputError):
        build_scene(mail, **options)


def test_no_top_and_no_score(mail):
    assert build_scene(mail, top=0).top == ()
    scene = build_scene(replace(mail, scores=np.zeros(9), lost_mass=0.0))
    assert (scene.top, scene.rest, scene.ledger) == ((), None, ())
    assert {unit.weight for unit in scene.units} == {0.0}


def test_an_empty_text_can_be_drawn():
    scene = build_scene(attribution("", [], specials=[("[CLS]", 1.0)]))
    assert (scene.lines, scene.top) == (((),), ())


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [
        (0.5, 1, "50.0 %"),
        (0.0004, 1, "<0.1 %"),
        (0.0006, 1, "0.1 %"),
        (0.0004, 2, "0.04 %"),
        (0.9999, 1, ">99.9 %"),
        (1.0, 1, "100.0 %"),
        (0.0, 1, "0.0 %"),
    ],
)
def test_percent(share, digits, text):
    assert percent(share, digits) == text


@pytest.mark.parametrize(("size", "text"), [(2.0, "+2.00"), (0.012, "+0.0120"), (431.0, "+431"), (2e-9, "+2.00e-09")])
def test_effects_keep_three_digits(size, text):
    scene = build_scene(attribution("a b", [size, -size / 2], signed=True))
    assert scene.units[0].amount == text


TEXT = st.text(alphabet="ab \n\t東😀\u0301\x1b<\r", max_size=20)


@given(st.data())
def test_any_tokens_keep_text_and_mass(data):
    text = data.draw(TEXT)
    count = data.draw(st.integers(1, 8))
    tokens = []
    for index in range(count):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, len(text)))
        tokens.append(Token(text[start:end] or f"p{index}", start, end, data.draw(st.booleans())))
    masses = data.draw(st.lists(st.floats(0.01, 1), min_size=count + 2, max_size=count + 2))
    masses = np.array(masses) / math.fsum(masses)
    sink = data.draw(st.none() | st.integers(0, count - 1))
    case = replace(
        attribution("x", [1.0]),
        text=text,
        tokens=tuple(tokens),
        scores=masses[:count],
        words=(),
        lost_mass=masses[-1],
        sink_mass=masses[-2],
        sink=None if sink is None else Sink(sink, 0.95),
    )
    scene = build_scene(case)
    expected = text.replace("\r\n", "\n").replace("\r", "\\x0d").replace("\x1b", "\\x1b")
    assert text_of(scene).rstrip("\n") == expected.rstrip("\n")
    assert sum(amount_of(amount) for _, amount in scene.ledger) == pytest.approx(100.0, abs=0.3)
    members = [index for unit in scene.units for index in unit.tokens]
    assert sorted(members) == list(range(count))
    assert all(-1 <= unit.weight <= 1 for unit in scene.units)
