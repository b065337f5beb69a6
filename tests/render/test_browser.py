"""The HTML report in a real browser: no request, no script, no policy error; readable, light and dark."""

from __future__ import annotations

import pytest

from attrace.render.files import write_text
from attrace.render.html import to_html

from .conftest import CANARIES, attribution

CONTRASTS = """() => {
  const parse = css => {
    const n = css.match(/-?[\\d.]+(e-?\\d+)?/g).map(Number);
    const c = css.startsWith('color(') ? n.slice(0, 3) : n.slice(0, 3).map(v => v / 255);
    return {rgb: c, alpha: n.length > 3 ? n[3] : 1};
  };
  const luminance = c => c.map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const back = parse(getComputedStyle(e).backgroundColor);
      if (back.alpha > 0) return back.rgb;
    }
    return [1, 1, 1];
  };
  document.querySelectorAll('details').forEach(e => e.open = true);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    if (!walker.currentNode.data.trim()) continue;
    const e = walker.currentNode.parentElement;
    const [a, b] = [parse(getComputedStyle(e).color).rgb, behind(e)].map(luminance).sort((x, y) => x - y);
    found.push([(b + 0.05) / (a + 0.05), walker.currentNode.data]);
  }
  return found;
}"""


@pytest.fixture
def visit(browser, tmp_path):
    """Open a page with all network blocked; `visit.seen` collects requests, dialogs, messages and errors."""
    contexts, seen = [], []

    def open_page(source, **options):
        path = tmp_path / f"{len(contexts)}.html"
        write_text(path, source)
        context = browser.new_context(offline=True, viewport={"width": 900, "height": 700}, **options)
        contexts.append(context)
        page = context.new_page()

        def route(found):
            if found.request.url == path.as_uri():
                found.continue_()
            else:
                seen.append(("request", found.request.url))
                found.abort()

        page.route("**/*", route)
        page.on("dialog", lambda found: (seen.append(("dialog", found.message)), found.dismiss()))
        page.on("console", lambda found: seen.append(("console", found.text)))
        page.on("pageerror", lambda found: seen.append(("error", str(found))))
        page.goto(path.as_uri(), wait_until="load")
        return page

    open_page.seen = seen
    yield open_page
    for context in contexts:
        context.close()


def test_the_watch_sees_what_it_should(visit):
    """Requests, dialogs and policy errors are seen where there are some; the tests below rest on it."""
    policy = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; script-src 'unsafe-inline'\">"
    page = visit(f"<!doctype html>{policy}<p style='color:red'>x<script>alert(1)</script>")
    page.wait_for_timeout(100)
    assert {kind for kind, _ in visit.seen} == {"dialog", "console"}
    visit.seen.clear()
    visit("<!doctype html><img src='http://example.invalid/x.png'>").wait_for_timeout(100)
    assert ("request", "http://example.invalid/x.png") in visit.seen


@pytest.mark.parametrize("name", ["mail", "prompt", "sink", "evil"])
def test_nothing_is_asked_for_run_or_refused(name, request, visit):
    page = visit(to_html(request.getfixturevalue(name), title=CANARIES[0]))
    for element in page.locator(".w[tabindex]").all()[:8]:
        element.hover()
        element.focus()
    page.locator("summary").click()
    page.wait_for_timeout(100)
    assert visit.seen == []
    assert page.locator("script, img, iframe, link, form").count() == 0
    assert page.title() == CANARIES[0]


def test_the_text_is_on_the_page(evil, visit):
    text = visit(to_html(evil)).locator(".text").inner_text()
    for canary in CANARIES[:9]:
        assert canary in text


def test_the_style_is_applied(mail, visit):
    page = visit(to_html(mail))
    colours = [
        page.locator(".w", has_text=word).first.evaluate("e => getComputedStyle(e).backgroundColor")
        for word in ("FREE", "claim", "Dear")
    ]
    assert len(set(colours)) == 3
    assert page.locator(".bar svg").first.evaluate("e => e.getBoundingClientRect().width") > 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["mail", "prompt", "sink"])
def test_all_text_can_be_read(name, scheme, request, visit):
    page = visit(to_html(request.getfixturevalue(name)), color_scheme=scheme)
    found = page.evaluate(CONTRASTS)
    assert len(found) > 20
    assert [pair for pair in found if pair[0] < 4.5] == []
    dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (dark == "rgb(21, 23, 27)") == (scheme == "dark")


def test_words_are_reached_by_keyboard_and_say_their_share(mail, visit):
    page = visit(to_html(mail))
    tips = []
    for _ in range(7):
        page.keyboard.press("Tab")
        tips.append(page.evaluate("getComputedStyle(document.activeElement, '::after').content"))
    assert any("25.0 %" in tip and "FREE" in tip for tip in tips)
    assert all("token" in tip for tip in tips)


@pytest.mark.parametrize("width", [320, 900])
@pytest.mark.parametrize("name", ["mail", "prompt", "evil"])
def test_the_page_never_scrolls_sideways(name, width, request, visit):
    page = visit(to_html(request.getfixturevalue(name)))
    page.set_viewport_size({"width": width, "height": 700})
    for element in page.locator(".w[tabindex]").all()[:5]:
        element.focus()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_right_to_left_words_stand_in_reading_order(visit):
    text = "هذا هاتف Apple Watch Ultra رخيص"
    page = visit(to_html(attribution(text, [1 / 6] * 6)))
    left = {
        e.inner_text(): e.bounding_box()["x"] for e in page.locator(".w").all()
    }  # the Arabic words run leftwards, the Latin ones rightwards
    assert left["هذا"] > left["هاتف"] > left["Ultra"] > left["Watch"] > left["Apple"] > left["رخيص"]


def test_forced_colours_keep_the_marks(mail, visit):
    page = visit(to_html(mail), forced_colors="active")
    line = page.locator(".w", has_text="FREE").evaluate("e => getComputedStyle(e).textDecorationLine")
    assert line == "underline"
