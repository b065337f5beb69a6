"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading

import pytest

from attrace.errors import OutputError
from attrace.render import files
from attrace.render.files import check_writable, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_text_is_written_as_utf8_with_its_line_ends(tmp_path):
    path = tmp_path / "out.html"
    write_text(path, "東京\r\né\n")
    assert path.read_bytes() == "東京\r\né\n".encode()
    assert names(tmp_path) == ["out.html"]


def test_a_name_as_a_string_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_writable("out")
    write_text("out", "x")
    assert names(tmp_path) == ["out"]


def test_an_existing_file_is_replaced_and_keeps_its_permissions(tmp_path):
    path = tmp_path / "out"
    path.write_text("old, and longer than the new text")
    path.chmod(0o640)
    write_text(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_new_file_has_the_usual_permissions(tmp_path):
    write_text(tmp_path / "out", "x")
    (tmp_path / "usual").write_text("x")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), SystemExit(1)])
@pytest.mark.parametrize("place", ["fsync", "chmod", "replace"])
def test_a_failure_leaves_everything_as_it_was(tmp_path, monkeypatch, error, place):
    path = tmp_path / "out"
    path.write_text("old")

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(*((os, "fsync") if place == "fsync" else (files.Path, place)), fail)
    with pytest.raises(OutputError if isinstance(error, OSError) else type(error)):
        write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_a_lone_surrogate_is_refused_before_anything_is_touched(tmp_path):
    with pytest.raises(OutputError, match="position 1"):
        write_text(tmp_path / "out", "a\ud800")
    assert names(tmp_path) == []


@pytest.mark.parametrize("call", [check_writable, lambda path: write_text(path, "x")])
@pytest.mark.parametrize("case", ["no folder", "folder", "file as folder", "circle", "null", "long"])
def test_what_cannot_be_written_is_said(tmp_path, call, case):
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    path = {
        "no folder": tmp_path / "missing" / "out",
        "folder": tmp_path,
        "file as folder": tmp_path / "file" / "out",
        "circle": tmp_path / "circle",
        "null": str(tmp_path / "a\0b"),
        "long": tmp_path / ("x" * 300),
    }[case]
    with pytest.raises(OutputError, match=r"^Expected a file that can be written\. Received: .*\)\. [A-Z].*\.$"):
        call(path)
    assert names(tmp_path) == ["circle", "file"]


@pytest.mark.parametrize("call", [check_writable, lambda path: write_text(path, "x")])
def test_a_protected_folder_or_file_is_said(tmp_path, monkeypatch, call):
    path = tmp_path / "out"
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(OutputError, match="write-protected"):
        call(path)
    monkeypatch.undo()

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OutputError, match="Permission denied"):
        call(path)
    assert path.read_text() == "old"


def test_check_writable_leaves_nothing_behind(tmp_path):
    check_writable(tmp_path / "new")
    assert names(tmp_path) == []
    path = tmp_path / "out"
    path.write_text("old")
    before = path.stat()
    check_writable(path)
    assert (names(tmp_path), path.read_text(), path.stat().st_mtime_ns) == (
        ["out"],
        "old",
        before.st_mtime_ns,
    )


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "data").mkdir()
    link = tmp_path / "link"
    link.symlink_to("data/out")
    write_text(link, "through a dangling link")
    write_text(link, "again")
    assert link.is_symlink()
    assert (tmp_path / "data" / "out").read_text() == "again"
    assert names(tmp_path / "data") == ["out"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX devices")
class TestStreams:
    def test_the_null_device(self):
        check_writable("/dev/null")
        write_text("/dev/null", "x" * 100_000)
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)

    def test_a_pipe_by_name(self, tmp_path):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        received = []
        reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
        reader.start()
        check_writable(pipe)
        write_text(pipe, "x" * 100_000)
        reader.join(10)
        assert received == ["x" * 100_000]
        assert names(tmp_path) == ["pipe"]

    @pytest.mark.parametrize("into", ["pipe", "file"])
    def test_standard_output(self, tmp_path, into):
        code = (
            "from attrace.render.files import check_writable, write_text;"
            "out = '/dev/stdout'; check_writable(out); write_text(out, 'one'); write_text(out, 'two')"
        )
        if into == "pipe":
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
            assert (done.stdout, done.stderr) == ("onetwo", "")
        else:
            with (tmp_path / "out").open("w") as file:
                subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
            assert (tmp_path / "out").read_text() == "onetwo"
            assert names(tmp_path) == ["out"]
