#!/usr/bin/env python3
"""Make the README's pictures: what `attrace demo` prints, and the report that `--html` writes.

    python scripts/pictures.py [--out docs/pictures]

Needs playwright and Chromium (ATTRACE_CHROMIUM, or the first of chromium and google-chrome on the path).
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

import attrace

SAMPLES = Path(attrace.__file__).parent / "assets" / "samples"


def terminal(result: attrace.api.Explanation, path: Path) -> None:
    """The terminal's picture as SVG, in any monospaced font that the reader has."""
    console = Console(record=True, width=84, force_terminal=True, color_system="truecolor", file=io.StringIO())
    result.show(console, top=8)
    svg = console.export_svg(title="attrace demo prize")
    # rich names a web font; a picture in a README asks no other host for anything.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    path.write_text(svg.replace("Fira Code", "DejaVu Sans Mono"), encoding="utf-8")


def report(result: attrace.api.Explanation, path: Path) -> None:
    """A picture of the report, in light and in dark."""
    page_file = path.with_suffix(".html")
    result.to_html(page_file)
    chromium = os.environ.get("ATTRACE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 900, "height": 820}, color_scheme=scheme)
            page.goto(page_file.resolve().as_uri())
            page.screenshot(path=path.with_stem(f"{path.stem}-{scheme}"))
        browser.close()
    page_file.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    text = (SAMPLES / "prize.txt").read_text(encoding="utf-8").strip()
    result = attrace.explain(None, text)
    terminal(result, args.out / "terminal.svg")
    report(result, args.out / "report.png")


if __name__ == "__main__":
    main()
