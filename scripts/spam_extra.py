"""Short mails in today's manner, put together from spam_extra.txt; they join the training part only.

The real set is lists, newsletters and bulk mail from 2002 to 2005; office and family mail is missing.  A mail
takes a subject, a greeting, one to five sentences of one theme and a closing, any of which may be missing, so
that neither a greeting nor a link tells the class.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HOSTS = ("example.com", "example.org", "example.net", "shop.example.com", "mail.example.org")
PATHS = ("", "/track", "/login", "/news", "/offer", "/account", "/a/{n}", "/docs", "/claim", "/photos")


@dataclass(frozen=True)
class Written:
    """One project-written mail; label 1 = spam."""

    text: str
    label: int


@dataclass
class Theme:
    label: int
    name: str
    parts: dict[str, list[str]] = field(default_factory=dict)  # S, G, C
    body: list[str] = field(default_factory=list)


@cache
def source() -> tuple[str, ...]:
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line.strip() and not line.startswith("#"))


@cache
def values(kind: str) -> tuple[str, ...]:
    """The listed values of one {slot}."""
    return tuple(v for line in source() if line.startswith(f"@ {kind} ") for v in line.split(" ", 2)[2].split("|"))


@cache
def themes() -> tuple[Theme, ...]:
    found: list[Theme] = []
    for line in source():
        if line.startswith("== "):
            _, label, name = line.split(" ", 2)
            found.append(Theme(int(label == "spam"), name))
        elif re.match(r"[SGC]: ", line):
            found[-1].parts[line[0]] = [c.replace("\\n", "\n").removeprefix("-") for c in line[3:].split("|")]
        elif not line.startswith("@ "):
            found[-1].body.append(line)
    return tuple(found)


def slot(kind: str, rng: random.Random) -> str:
    """A value for one {slot}; the same values for both classes."""
    if kind == "url":
        return rng.choice(("https://", "http://", "www.")) + rng.choice(HOSTS) + fill(rng.choice(PATHS), rng)
    if kind == "amount":
        value = rng.choice((rng.randint(2, 99), rng.randint(1, 90) * 100, rng.randint(1, 9) * 1000))
        cents = rng.choice(("", ".00", f".{rng.randint(10, 99)}"))
        return rng.choice((f"${value:,}{cents}", f"\u20ac{value}{cents}", f"{value} euros", f"\u00a3{value}{cents}"))
    if kind == "time":
        clock = f"{rng.randint(8, 19)}:{rng.choice(('00', '15', '30'))}"
        return rng.choice((clock, f"{rng.randint(1, 11)} pm", f"{rng.randint(7, 11)} am", "noon"))
    if kind == "n":
        return str(rng.choice((rng.randint(2, 12), rng.randint(13, 99), rng.randint(1000, 99999))))
    if kind == "phone":
        return f"{rng.randint(200, 999)}-555-{rng.randint(100, 199):04d}"
    if kind == "code":
        return "".join(rng.choices("abcdefghkmnpqrstuvwxyz23456789", k=26))
    return rng.choice(values(kind))


def written_address(rng: random.Random) -> str:
    """A made-up link or mail address, the same kind for both classes."""

    def name() -> str:
        return "".join(rng.choice("bcdfghklmnprstvw") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))

    host = f"{name()}.{rng.choice(('com', 'net', 'org', 'co.uk', 'de', 'info'))}"
    path = rng.choice(("", "/", f"/{name()}", f"/{name()}/{rng.randint(1, 99999)}", f"/{name()}.html?{name()}=1"))
    return rng.choice(
        (
            f"http://www.{host}{path}",
            f"<http://{host}{path}>",
            f"https://{host}{path}",
            f"{name()}@{host}",
            f"www.{host}",
        )
    )


def fill(text: str, rng: random.Random) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: slot(m[1], rng), text)


def written_mail(theme: Theme, rng: random.Random) -> Written:
    sentences = rng.sample(range(len(theme.body)), min(len(theme.body), rng.choice((1, 1, 2, 2, 3, 4, 5))))
    body = rng.choice((" ", " ", "\n", "\n\n")).join(theme.body[i] for i in sorted(sentences))
    subject, greeting, closing = (
        rng.choice(theme.parts[k]) if rng.random() < keep else "" for k, keep in (("S", 0.7), ("G", 0.7), ("C", 0.7))
    )
    text = fill("\n\n".join(p for p in (subject, greeting, body, closing) if p), rng)
    return Written(text, theme.label)


def written_mails(count: int, rng: random.Random) -> list[Written]:
    """`count` mails, both classes about equally often, themes of a class equally often."""
    by_label = [[t for t in themes() if t.label == y] for y in (0, 1)]
    return [written_mail(rng.choice(by_label[i % 2]), rng) for i in range(count)]
