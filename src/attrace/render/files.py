"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from attrace.errors import OutputError

PathLike = str | os.PathLike[str]


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _refusal(path: Path | str, why: str, remedy: str = "Name another file.") -> OutputError:
    return OutputError(f"Expected a file that can be written. Received: {path} ({why}). {remedy}")


def _is_stream(path: Path) -> bool:
    """A device, a pipe, or a file that a shell has opened: written to, never replaced."""
    shared_memory = path.parts[1:3] == ("dev", "shm")  # an ordinary folder for files
    if path.is_absolute() and path.parts[1:2] in (("dev",), ("proc",)) and not shared_memory:
        return path.exists() and not path.is_dir()
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _create_beside(target: Path) -> tuple[int, Path]:
    """Open a new file in the target's folder; its name begins with a dot and ends with .tmp."""
    temporary = target.with_name(f".{target.name[:64]}.{secrets.token_hex(8)}.tmp")
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), temporary


def _resolve(path: Path) -> Path:
    """The file that a link leads to, so that the link stays; raises where no file can be written."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise _refusal(path, "its links lead in a circle")
    if target.is_dir():
        raise _refusal(path, "it is a folder", "Name a file inside of it.")
    if not target.parent.is_dir():
        raise _refusal(path, f"there is no folder {target.parent}", "Create it first.")
    with suppress(FileNotFoundError):
        target.lstat()  # raises for a name that is too long
    if target.exists() and not os.access(target, os.W_OK):
        raise _refusal(path, "it is write-protected")
    return target


def check_writable(path: PathLike) -> None:
    """Raise OutputError where `write_text` could not write; call it before long work.

    A missing folder, a folder in place of the file, a protected file or folder, and a full or read-only disk
    are found.  Nothing is left behind and an existing file stays as it is.

    >>> check_writable(os.devnull)
    """
    place = Path(path)
    try:
        if _is_stream(place):
            if not os.access(place, os.W_OK):
                raise _refusal(place, "no permission")
            return
        handle, temporary = _create_beside(_resolve(place))
        os.close(handle)
        temporary.unlink()
    except OSError as error:
        raise _refusal(place, _reason(error)) from error
    except ValueError as error:
        raise _refusal(repr(str(path)), str(error)) from error


def write_text(path: PathLike, text: str) -> None:
    """Write `text` as UTF-8; the file appears whole or, on any failure, stays as it was.

    The text goes to a new file in the same folder, is brought to the disk, and takes the place of the old
    file in one step; an interrupt or a full disk leaves no half file and no temporary file.  Line ends are
    written as they are.  A link is followed and stays a link; permissions of an existing file are kept.
    Devices and pipes such as /dev/stdout are written directly, which no step can undo.

    Raises OutputError, which names the path and the reason.

    >>> write_text(os.devnull, "whole")
    """
    place = Path(path)
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise OutputError(
            f"Expected text that UTF-8 can hold, for {place}. Received: a lone surrogate at position "
            f"{error.start}. Escape it first."
        ) from error
    try:
        if _is_stream(place):
            _write_all(os.open(place, os.O_WRONLY | os.O_APPEND), data)
        else:
            _replace(_resolve(place), data)
    except OSError as error:
        raise _refusal(place, _reason(error)) from error
    except ValueError as error:
        raise _refusal(repr(str(path)), str(error)) from error


def _write_all(handle: int, data: bytes) -> None:
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _replace(target: Path, data: bytes) -> None:
    handle, temporary = _create_beside(target)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Bring the new name to the disk too, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
