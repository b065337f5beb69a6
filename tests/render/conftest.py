"""Attributions to draw, each made by hand so that every number in a picture can be checked."""

from __future__ import annotations

import re

import numpy as np
import pytest

from attrace.types import Attribution, Prediction, Sink, Target, Token, Word

CANARIES = (
    "<script>alert(1)</script>",
    "</script>",
    "<!--",
    "__DATA__",
    "{{7*7}}",
    '"onmouseover=alert(2) x="',
    "<img src=x onerror=alert(3)>",
    "' & &amp; \\",
    "[bold]red[/bold]",
    "a\x1b[31mb\x07",
    "\u202eabc\u2066",
    "x\u200dy",
    "\ud800",
)


def attribution(text, scores, *, specials=(), words=None, **options):
    """An attribution with one token per run without blanks; `specials` are put in front as (name, score)."""
    spans = [match.span() for match in re.finditer(r"\S+", text)]
    tokens = [Token(name, 0, 0, True) for name, _ in specials]
    tokens += [Token(text[start:end], start, end) for start, end in spans]
    values = np.array([score for _, score in specials] + list(scores), dtype=np.float64)
    total = abs(values).sum() + options.get("lost_mass", 0.0) + options.get("sink_mass", 0.0)
    if words is None:
        words = tuple(
            Word(token.text, token.start, token.end, (index,), values[index], abs(values[index]) / total)
            for index, token in enumerate(tokens)
            if not token.special
        )
    options.setdefault("target", Target("class", "spam", 1, None, 0.998))
    options.setdefault("method", "rollout")
    return Attribution(text=text, tokens=tuple(tokens), scores=values, words=words, **options)


@pytest.fixture
def mail():
    """Shares: 30 % special, 68 % text, 2 % lost."""
    return attribution(
        "Dear friend,\n\n  claim your FREE prize now!\n",
        [0.02, 0.03, 0.16, 0.01, 0.25, 0.2, 0.01],
        specials=[("[CLS]", 0.2), ("[SEP]", 0.1)],
        lost_mass=0.02,
        model="spam classifier",
        predictions=(Prediction("spam", 0.998), Prediction("ham", 0.002)),
        settings={"residual": 0.5, "heads": "mean", "versions": {"attrace": "0.1.0"}},
        notes=("Read at [CLS], where the classifier reads.",),
    )


@pytest.fixture
def prompt():
    """Signed effects on the next token."""
    return attribution(
        "def f(x):\n    return x\nThe capital of France is",
        [0.0, 0.01, -0.05, 0.02, 0.1, 1.5, -0.3, 2.0, 0.4],
        signed=True,
        unit="log-probability",
        target=Target("next", " Paris", 3681, 8, 0.431, " London"),
        method="leave_one_out",
        model="tiny",
    )


@pytest.fixture
def sink():
    """A collapse onto the first token."""
    return attribution(
        "The capital of France is",
        [0.95, 0.02, 0.005, 0.015, 0.01],
        sink=Sink(0, 0.95),
        target=Target("next", " Paris", 3681, 4, 0.43),
        settings={"residual": 0.5},
    )


@pytest.fixture
def evil():
    """Text from outside that would like to be code, in every place where such text can stand."""
    text = " ".join(CANARIES)
    return attribution(
        text,
        [1.0 / len(text.split())] * len(text.split()),
        specials=[(canary, 0.0) for canary in CANARIES],
        target=Target("next", CANARIES[0] + CANARIES[9], contrast=CANARIES[5]),
        model=CANARIES[6] + CANARIES[4],
        unit=CANARIES[5],
        method=CANARIES[1],
        predictions=tuple(Prediction(canary, 0.1) for canary in CANARIES),
        notes=CANARIES,
        settings={canary: canary for canary in CANARIES},
    )
