"""`attrace explain`: options to the api, results to standard output, messages to standard error."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attrace.api import method_names
from attrace.apps import cli, inputs, options

Run = Callable[..., tuple[int, str, str]]
Calls = list[dict[str, Any]]


def test_the_result_goes_to_standard_output_and_nothing_else(attrace_run: Run) -> None:
    assert attrace_run("explain", "a text") == (0, "0 a text [bold]top 10 words\n", "")


def test_defaults(attrace_run: Run, api: Calls) -> None:
    attrace_run("explain", "a text")
    assert api == [
        {
            "model": None,
            "inputs": "a text",
            "target": "auto",
            "method": "auto",
            "layers": None,
            "heads": "mean",
            "residual": 0.5,
            "discard": 0.0,
            "truncate": False,
            "device": None,
            "seed": 0,
        }
    ]


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--model", "org/name"], "model", "org/name"),
        (["--target", "next:A~B"], "target", "next:A~B"),
        (["--method", "rollout"], "method", "rollout"),
        (["--layers", "0,2,5-7"], "layers", [0, 2, 5, 6, 7]),
        (["--layers", "-1"], "layers", [-1]),
        (["--layers=-3--1"], "layers", [-3, -2, -1]),
        (["--layers", " 4 "], "layers", [4]),
        (["--heads", "max"], "heads", "max"),
        (["--heads", "3"], "heads", 3),
        (["--heads", "0.5,0,0.5"], "heads", [0.5, 0.0, 0.5]),
        (["--residual", "0"], "residual", 0.0),
        (["--discard", "0.9"], "discard", 0.9),
        (["--truncate"], "truncate", True),
        (["--device", "cpu"], "device", "cpu"),
        (["--seed", "7"], "seed", 7),
    ],
)
def test_an_option_reaches_the_api(
    attrace_run: Run, api: Calls, arguments: list[str], name: str, value: object
) -> None:
    code, _, err = attrace_run("explain", "x", *arguments)
    assert (code, err) == (0, "")
    assert api[0][name] == value


@pytest.mark.parametrize(("arguments", "terminal", "report"), [([], 10, 20), (["--top", "3"], 3, 3)])
@pytest.mark.parametrize("command", [["explain", "x"], ["demo"]], ids=lambda command: command[0])
def test_units_and_number_reach_both_renderers(
    attrace_run: Run, tmp_path: Path, command: list[str], arguments: list[str], terminal: int, report: int
) -> None:
    page = tmp_path / "report.html"
    out = attrace_run(*command, "--tokens", "--html", str(page), *arguments)[1]
    assert out.endswith(f"[bold]top {terminal} tokens\n")
    assert page.read_text().endswith(f", top {report} tokens")


def test_json_is_all_there_is_on_standard_output(attrace_run: Run) -> None:
    code, out, err = attrace_run("explain", "h\u00e9 \u4e2d", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["text"] == "h\u00e9 \u4e2d"
    assert "\u4e2d" in out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["explain"],
        ["explain", "a", "b"],
        ["explain", "x", "--nonsense"],
        ["explain", "x", "--model"],
        ["explain", "x", "--layers", "7-5"],
        ["explain", "x", "--layers", "-1-2"],
        ["explain", "x", "--layers", "1,,2"],
        ["explain", "x", "--layers", ""],
        ["explain", "x", "--heads", "median"],
        ["explain", "x", "--heads", "0.5,nan"],
        ["explain", "x", "--residual", "half"],
        ["explain", "x", "--discard", ""],
        ["explain", "x", "--top", "0"],
        ["explain", "x", "--seed", "one"],
    ],
    ids=" ".join,
)
def test_usage_errors_exit_with_2_and_ask_nothing_of_the_api(
    attrace_run: Run, api: Calls, arguments: list[str]
) -> None:
    code, out, err = attrace_run(*arguments)
    assert code == 2
    assert api == []
    assert "Traceback" not in err
    if arguments:
        assert out == ""
        assert err.startswith("error: ")
        assert "--help" in err


@pytest.mark.parametrize(
    ("option", "value"), [("--residual", "1.5"), ("--residual", "nan"), ("--discard", "-0.1"), ("--discard", "1")]
)
def test_a_share_out_of_range_is_refused_by_the_real_api(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert cli.run(["explain", "x", option, value]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: Expected {option[2:]} to be a number from 0 to")


def test_the_help_page_names_the_methods(attrace_run: Run) -> None:
    assert options.METHODS[0] == "auto"
    assert sorted(options.METHODS[1:]) == sorted(method_names())
    shown = "".join(attrace_run("explain", "--help")[1].split())  # lines break within names too
    assert f"Howtoscore:{','.join(options.METHODS)};" in shown


def test_control_characters_of_arguments_are_shown_as_escapes(attrace_run: Run) -> None:
    assert "\x1b" not in attrace_run("nonsense\x1b[31m")[2]


@pytest.mark.parametrize(
    "kind", ["InputError", "TargetError", "TextTooLongError", "UnsafeWeightsError", "NonFiniteError"]
)
def test_an_error_is_one_message_without_traceback(
    attrace_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setenv("FAKE_API", kind)
    report = tmp_path / "report.html"
    code, out, err = attrace_run("explain", "x", "--html", str(report))
    assert (code, out) == (3, "")
    assert err == "error: Expected a label.\n       Received: 'a\\x1b[31mb\\u202e'.\n"
    assert list(tmp_path.iterdir()) == []


def test_a_fault_keeps_its_traceback_and_has_its_own_code(attrace_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_API", "fault")
    code, out, err = attrace_run("explain", "x")
    assert (code, out) == (70, "")
    assert "Traceback" in err
    assert "RuntimeError: a bug" in err


# The input


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"one\ntwo\n", "one\ntwo"),
        (b"one\r\n", "one"),
        (b"one\n\n", "one\n"),
        (b"\xef\xbb\xbfbom", "bom"),
        ("z\u00fcrich \U0001f600".encode(), "z\u00fcrich \U0001f600"),
    ],
)
def test_files_and_standard_input(
    attrace_run: Run, api: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes, text: str
) -> None:
    file = tmp_path / "mail.txt"
    file.write_bytes(data)
    stdin(monkeypatch, data)
    assert attrace_run("explain", f"@{file}")[0] == 0
    assert attrace_run("explain", "-")[0] == 0
    assert [call["inputs"] for call in api] == [text, text]


def test_a_text_that_starts_with_an_at_sign(attrace_run: Run, api: Calls) -> None:
    attrace_run("explain", "@@home")
    assert api[0]["inputs"] == "@home"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "nothing but white space"),
        (b" \n\t\n", "nothing but white space"),
        (b"abc\xff\xfe", "byte 0xff at offset 3"),
        (b"PK\x03\x04\x00\x01", "binary data"),
        ("text".encode("utf-16"), "UTF-16"),
        (b"x" * (inputs.LIMIT + 1), "10,000,000 bytes"),
    ],
    ids=["empty", "blank", "latin", "binary", "utf16", "large"],
)
@pytest.mark.parametrize("way", ["file", "stdin"])
def test_what_is_no_text(
    attrace_run: Run,
    api: Calls,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    data: bytes,
    says: str,
    way: str,
) -> None:
    file = tmp_path / "mail.txt"
    file.write_bytes(data)
    stdin(monkeypatch, data)
    code, out, err = attrace_run("explain", f"@{file}" if way == "file" else "-")
    assert (code, out, api) == (3, "", [])
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("", "white space"),
        ("  \n", "white space"),
        ("@", "@@"),
        ("@/nowhere/mail.txt", "No such file"),
        ("@.", "none"),
        ("@..", "folder"),
        ("@a\0b", "null byte"),
        ("caf\udce9", "UTF-8"),
    ],
)
def test_arguments_that_are_no_text(attrace_run: Run, api: Calls, argument: str, says: str) -> None:
    code, out, err = attrace_run("explain", argument)
    assert (code, out, api) == (3, "", [])
    assert says in err


def test_a_file_without_permission(attrace_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read any file, so the mode alone would not do
    code, _, err = attrace_run("explain", f"@{tmp_path / 'mail.txt'}")
    assert code == 3
    assert "Permission denied" in err


# Output files


def test_html_is_written_and_told_on_standard_error(attrace_run: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    code, out, err = attrace_run("explain", "x", "--html", str(report))
    assert code == 0
    assert out
    assert err == f"written: {report}\n"
    assert report.read_text() == "<p>x, top 20 words"
    assert attrace_run("explain", "x", "--html", str(report), "--quiet")[2] == ""


def test_an_unwritable_path_is_refused_before_the_model_is_asked(attrace_run: Run, api: Calls) -> None:
    code, out, err = attrace_run("explain", "x", "--html", "/nowhere/report.html")
    assert (code, out, api) == (3, "", [])
    assert "/nowhere" in err


@pytest.mark.parametrize("link", [None, os.link, os.symlink])
def test_the_input_is_not_written_over(
    attrace_run: Run, api: Calls, tmp_path: Path, link: Callable[[Path, Path], None] | None
) -> None:
    file = tmp_path / "mail.txt"
    file.write_text("a text")
    report = file if link is None else tmp_path / "other.html"
    if link is not None:
        link(file, report)
    code, _, err = attrace_run("explain", f"@{file}", "--html", str(report))
    assert (code, api) == (3, [])
    assert "two files" in err
    assert file.read_text() == "a text"


# The network


def test_only_a_hub_name_may_use_the_network(attrace_run: Run, tmp_path: Path) -> None:
    attrace_run("explain", "x", "--model", "org/name")
    assert "HF_HUB_OFFLINE" not in os.environ
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    attrace_run("explain", "x", "--model", str(tmp_path))
    assert os.environ.pop("HF_HUB_OFFLINE") == "1"
    attrace_run("explain", "x")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
