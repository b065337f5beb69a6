"""The text that a command is given: as the argument, in a file (@file) or on standard input (-)."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from attrace.errors import InputError

LIMIT = 10_000_000
"""Bytes of a text file; no model's context comes near."""
_WIDE = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def read(argument: str) -> str:
    """The text that an INPUT argument stands for; "@@x" is the text "@x".

    One line feed at the end of a file or of standard input is dropped, as a shell does: `echo text | attrace
    explain -` explains "text".  Raises InputError for what is no text.
    """
    if argument == "-":
        return _decode(_read_stdin(), "standard input")
    if argument.startswith("@@"):
        return _checked(argument[1:])
    if argument.startswith("@"):
        return _decode(_read_file(Path(argument[1:])), repr(argument[1:]))
    return _checked(argument)


def file_of(argument: str) -> Path | None:
    """The file that an INPUT argument names, if it names one."""
    if argument.startswith("@") and not argument.startswith("@@"):
        return Path(argument[1:])
    return None


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # bytes that are no UTF-8 arrive as lone surrogates
        raise InputError(
            f"Expected a text in UTF-8. Received: bytes that are none, at character {error.start}. "
            "Put the text in a file and give @FILE."
        ) from None
    return _not_empty(text, "the argument")


def _not_empty(text: str, where: str) -> str:
    if not text.strip():
        raise InputError(f"Expected a text. Received: nothing but white space in {where}. Give at least one word.")
    return text


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise InputError(
            "Expected a text on standard input. Received: standard input is closed. Give the text or @FILE."
        )
    return _limited(sys.stdin.buffer, "standard input")


def _read_file(path: Path) -> bytes:
    if not path.name:
        raise InputError("Expected a file's name after @. Received: none. Write @@ for a text that starts with @.")
    try:
        with path.open("rb") as file:
            if stat.S_ISDIR(os.fstat(file.fileno()).st_mode):  # not on Unix, where opening one fails
                raise IsADirectoryError
            return _limited(file, repr(str(path)))
    except IsADirectoryError:
        raise InputError(
            f"Expected a text file. Received: {str(path)!r}, which is a folder. Name a file in it."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"Expected a text file that can be read. Received: {str(path)!r} ({reason}). Check name and permissions."
        ) from None


def _limited(file: BinaryIO, where: str) -> bytes:
    data = file.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise InputError(f"Expected at most {LIMIT:,} bytes of text. Received: more in {where}. Give a part of it.")
    return data


def _decode(data: bytes, where: str) -> str:
    if data[:2] in _WIDE:
        raise InputError(f"Expected a text in UTF-8. Received: {_WIDE[data[:2]]} in {where}. Convert it to UTF-8.")
    if b"\0" in data:
        raise InputError(
            f"Expected a text. Received: binary data in {where} (a zero byte at offset {data.index(0)}). "
            "Extract its text first."
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"Expected a text in UTF-8. Received: in {where} the byte 0x{data[error.start]:02x} at offset "
            f"{error.start}, which is none. Convert it to UTF-8."
        ) from None
    text = text.removeprefix("\ufeff")
    return _not_empty(text.removesuffix("\n").removesuffix("\r"), where)
