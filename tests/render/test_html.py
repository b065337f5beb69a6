"""The HTML report, read by a parser: escapes, policy, colours, structure."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from attrace.errors import NonFiniteError
from attrace.escapes import visible, visible_label
from attrace.render.files import write_text
from attrace.render.html import direction, to_html
from attrace.render.palette import INK, STEPS, Palette, contrast
from attrace.types import Token, Word

from .conftest import CANARIES, attribution

VOID = {"meta", "rect"}


class Page(HTMLParser):
    """Elements with their attributes and own text; fails on anything that is not closed in order."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.comments = [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert len(attributes) == len(dict(attributes)), f"an attribute twice on {tag}"
        element = {"tag": tag, "text": "", "inside": [e["tag"] for e in self.open], **dict(attributes)}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.elements.append({"tag": tag, "text": "", "inside": [], **dict(attributes)})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def handle_comment(self, data):
        self.comments.append(data)

    def all(self, tag=None, css=None):
        return [
            e
            for e in self.elements
            if (tag is None or e["tag"] == tag) and (css is None or css in (e.get("class") or "").split())
        ]

    def one(self, tag=None, css=None):
        (element,) = self.all(tag, css)
        return element


def units(page):
    return page.all("span", "w")


def test_the_text_the_words_and_the_numbers(mail):
    page = Page(to_html(mail))
    assert page.one("title")["text"] == "spam 99.8 %"
    assert page.one("h1")["text"] == "spam99.8 %"
    assert page.one("div", "text")["text"].strip("\n") == mail.text.rstrip("\n")
    rows = [e["text"] for e in page.all("tr") if "all" not in e["text"]]
    assert rows[0] == "FREE25.0 %"
    free = next(e for e in units(page) if e["text"] == "FREE")
    assert free["data-tip"] == "\u2068FREE\u2069 · 25.0 % · token 6"
    assert free["tabindex"] == "0"
    assert "p32" in free["class"].split()
    text = page.one("main")["text"]
    for part in ("[CLS]", "20.0 %", "text\n", "68.0 %", "lost to approximation", "attrace 0.1.0", "residual"):
        assert part.strip() in text
    assert "Read at [CLS]" in page.one("ul", "notes")["text"]


def test_every_token_is_in_the_table(mail):
    page = Page(to_html(mail))
    rows = [e for e in page.all("tr") if "tbody" in e["inside"] and "details" in e["inside"]]
    assert len(rows) == len(mail.tokens)
    assert rows[0]["text"] == "0[CLS]0.220.00 %special"
    assert rows[6]["text"] == "6FREE27–310.2525.00 %"


@pytest.mark.parametrize("canary", CANARIES)
def test_text_from_outside_is_text_everywhere(evil, canary):
    page = Page(to_html(evil, title=canary, units="tokens"))
    shown = visible_label(canary)
    assert page.one("title")["text"] == visible(canary)
    assert shown in page.one("div", "text")["text"]
    assert shown in [e["text"] for e in page.all("bdi") if "li" in e["inside"]]
    assert shown in [e["text"] for e in page.all("li") if "dir" in e]
    assert shown in [e["text"] for e in page.all("dd")]
    assert [e["text"] for e in page.all("dt")].count(shown) == 2
    assert shown in [e["text"] for e in page.all("bdi") if "details" in e["inside"]]


def test_hostile_text_adds_no_element_and_no_attribute(evil):
    harmless = replace(
        evil,
        text=re.sub(r"\S", "x", evil.text),
        target=replace(evil.target, label="x", contrast="x"),
        model="x",
        unit="x",
        method="x",
        tokens=tuple(replace(token, text=f"x{i}") for i, token in enumerate(evil.tokens)),
        words=tuple(replace(word, text="x") for word in evil.words),
        predictions=tuple(replace(item, label="x") for item in evil.predictions),
        notes=("x",) * len(evil.notes),
        settings={f"x{i}": "x" for i in range(len(evil.settings))},
    )

    def shape(case):
        page = Page(to_html(case, title=case.method))
        assert page.comments == []
        return Counter((e["tag"], *sorted(set(e) - {"inside", "text", "dir"})) for e in page.elements)

    bad, good = shape(evil), shape(harmless)
    assert set(bad) == set(good)
    assert {tag for tag, *_ in bad}.isdisjoint({"script", "img", "iframe", "object", "base", "link", "form"})
    assert not any(name.startswith("on") or name in ("href", "src", "style") for tag, *names in bad for name in names)
    for tag in ("span", "tr", "td", "th", "li", "dt", "dd"):
        assert sum(n for k, n in bad.items() if k[0] == tag) == sum(n for k, n in good.items() if k[0] == tag)


@pytest.mark.parametrize("token", ["<script>alert(1)</script>", "<!--", "</script>", "__QUERY__", "{{7*7}}"])
def test_as_many_elements_as_tokens(token):
    page = Page(to_html(attribution(f"a {token} b", [0.2, 0.5, 0.3]), units="tokens"))
    assert [e["text"] for e in units(page)] == ["a", token, "b"]


@pytest.mark.parametrize("title", ["__DATA__", "{{ scene }}", "{% raw %}", "<title>", "a\x1bb"])
def test_the_title_is_exactly_the_title(mail, title):
    assert Page(to_html(mail, title=title)).one("title")["text"] == visible(title)


def test_no_control_character_is_left(evil):
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066\u2067\ud800-\udfff]", to_html(evil))


def test_the_policy_allows_the_style_and_nothing_else(mail):
    page = Page(to_html(mail))
    policy = next(e["content"] for e in page.all("meta") if e.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    style = page.one("style")["text"]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert rules == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert "url(" not in style
    assert "@import" not in style
    source = to_html(mail)
    assert source.index("Content-Security-Policy") < source.index("<title>")
    assert not re.search(r"https?:|style=|<script|src=|href=", source)


def test_the_document_says_its_encoding_and_language(mail):
    source = to_html(mail)
    assert source.startswith("<!doctype html>\n")
    assert source.index('<meta charset="utf-8">') < 100
    assert Page(source).one("html")["lang"] == "en"


def test_it_is_written_as_utf8(tmp_path):
    write_text(tmp_path / "out.html", to_html(attribution("東京 です", [0.5, 0.5])))
    assert "東京" in (tmp_path / "out.html").read_bytes().decode("utf-8")


@pytest.mark.parametrize("palette", [Palette(), Palette(145, 330)])
def test_text_can_be_read_on_every_colour(prompt, palette):
    style = Page(to_html(prompt, palette=palette)).one("style")["text"]
    light, dark = style.split("@media (prefers-color-scheme:dark){", 1)
    dark = dark.split("\n", 1)[0]
    for scheme, rules in (("light", light), ("dark", dark)):
        found = re.findall(r"\.([pn]\d+)\{background:(#[0-9a-f]{6})\}", rules)
        assert len(found) == 2 * STEPS
        assert min(contrast(colour, INK[scheme]) for _, colour in found) >= 4.5
        assert f"--ink:{INK[scheme]};" in rules


def test_the_palette_can_be_set(prompt):
    assert to_html(prompt) != to_html(prompt, palette=Palette(145, 330))


def test_the_shared_scale_is_in_the_legend(mail):
    page = Page(to_html(mail, scale=0.5))
    assert page.one("p", "legend")["text"] == "0.0 %50.0 %share of mass per word"
    assert "p16" in next(e for e in units(page) if e["text"] == "FREE")["class"].split()


def test_signed_bars_leave_from_an_axis(prompt):
    page = Page(to_html(prompt))
    rows = [e for e in page.all("rect") if e.get("class") != "axis"]
    assert Counter(e["class"] for e in rows) == {"more": 6, "less": 2}
    for bar in rows:
        assert float(bar["x"]) >= 0
        assert float(bar["x"]) + float(bar["width"]) <= 100.01
    ends = {round(float(e["x"]) + float(e["width"]) * (e["class"] == "less"), 1) for e in rows}
    assert len(ends) == 1


def test_the_sink_has_its_banner(sink, mail):
    page = Page(to_html(sink))
    assert page.one("p", "banner")["text"].startswith("Sink. The first token, “The”, takes 95.0 %")
    assert [e["text"] for e in page.all("span", "sink")] == ["The"]
    assert Page(to_html(mail)).all("p", "banner") == []


def test_ids_are_not_repeated(mail):
    counted = Counter(e["id"] for e in Page(to_html(mail)).elements if "id" in e)
    assert max(counted.values()) == 1


def test_line_ends_and_indentation_are_kept(prompt):
    assert "def f(x):\n    return x\n" in Page(to_html(prompt)).one("div", "text")["text"]


def test_right_to_left_text():
    text = "هذا هاتف Apple Watch Ultra رخيص\nHello مرحبا بكم x\n123"
    count = len(text.split())
    page = Page(to_html(attribution(text, [1 / count] * count)))
    lines = [e for e in page.all("p") if "div" in e["inside"] and "dir" in e]
    assert [line["dir"] for line in lines] == ["rtl", "ltr", "auto"]
    assert [line["text"] for line in lines] == text.split("\n")
    isolated = [(e["text"], e["dir"]) for e in page.all("bdi") if "dir" in e and " " in e["text"]]
    assert isolated == [("Apple Watch Ultra", "ltr"), ("مرحبا بكم", "rtl")]
    assert all("bdi" in e["inside"] for e in units(page))


def test_joined_letters_stay_together_when_tokens_split_a_word():
    base = attribution("x", [1.0])
    tokens = (Token("مر", 0, 2), Token("حبا", 2, 5))
    case = replace(base, text="مرحبا", tokens=tokens, scores=np.array([0.5, 0.5]), words=())
    page = Page(to_html(case, units="tokens"))
    assert [e["text"] for e in page.all("bdi") if "div" in e["inside"] and "p" in e["inside"]] == ["مرحبا"]
    assert [e["text"] for e in units(page)] == ["مر", "حبا"]


@pytest.mark.parametrize(("text", "expected"), [("שלום x", "rtl"), ("1 a", "ltr"), ("12 !", None), ("", None)])
def test_direction(text, expected):
    assert direction(text) == expected


def test_bad_scores_never_become_a_colour():
    with pytest.raises(NonFiniteError, match=r"token 1 \('b'\)"):
        to_html(attribution("a b c", [0.1, float("nan"), 0.3], words=()))


def test_blank_words_are_seen():
    base = attribution("x", [1.0])
    case = replace(
        base,
        text="a\n\n  b",
        tokens=(Token("a", 0, 1), Token("\n\n", 1, 3), Token("  ", 3, 5), Token("b", 5, 6)),
        scores=np.array([0.1, 0.5, 0.3, 0.1]),
        words=(
            Word("a", 0, 1, (0,), 0.1, 0.1),
            Word("\n\n", 1, 3, (1,), 0.5, 0.5),
            Word("  ", 3, 5, (2,), 0.3, 0.3),
            Word("b", 5, 6, (3,), 0.1, 0.1),
        ),
    )
    page = Page(to_html(case))
    assert [e["text"] for e in units(page)] == ["a", "⏎", "⏎", "  ", "b"]
    assert [e["text"] for e in page.all("th") if e.get("scope") == "row"][:2] == ["⏎×2", "␣×2"]


def test_the_same_attribution_gives_the_same_page(mail):
    assert to_html(mail) == to_html(mail)


def test_two_thousand_tokens_are_drawn():
    case = attribution("\n".join("word " * 20 for _ in range(100)), [1 / 2000] * 2000)
    page = Page(to_html(case))
    assert len(units(page)) == 2000
