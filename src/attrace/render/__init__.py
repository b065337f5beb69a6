"""Attribution -> terminal, HTML, JSON.  Imports no framework."""

from __future__ import annotations

from attrace.render.files import check_writable, write_text
from attrace.render.html import to_html
from attrace.render.palette import Palette
from attrace.render.record import from_dict, from_json, to_dict, to_json
from attrace.render.scene import Scene, build_scene
from attrace.render.terminal import TerminalView, to_text

__all__ = [
    "Palette",
    "Scene",
    "TerminalView",
    "build_scene",
    "check_writable",
    "from_dict",
    "from_json",
    "to_dict",
    "to_html",
    "to_json",
    "to_text",
    "write_text",
]
