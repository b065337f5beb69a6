"""The `attrace` command: the process around it.  Commands are in app.py, and imported only inside main().

Exit codes: 0 done, 2 usage, 3 bad input or model, 70 a fault of attrace itself, 130 interrupted.
Results go to standard output, messages and progress to standard error.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

FAULT = 70
"""EX_SOFTWARE of sysexits.h; 1 is kept for a quality gate that failed."""
INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    try:
        _prepare_process()
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before or after the commands, which turn it into 130 themselves
        code = INTERRUPTED
    code = _flushed(code)
    # All is done and told; only the interpreter takes its time to go, and an interruption then would change the answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; every error has been told on standard error."""
    from attrace.apps.app import app
    from attrace.apps.terminal import tell
    from attrace.errors import AttraceError

    try:
        code = app(arguments, prog_name="attrace", standalone_mode=False)
    except AttraceError as error:
        tell("error", str(error))
        return 3
    except SystemExit as stop:  # typer's own way out where the reader of a help page has gone
        return stop.code if isinstance(stop.code, int) else 2
    except Exception as error:  # the outermost frame: nothing above could tell a fault from a usage error
        if _is_usage_error(error):
            _tell_usage(error)
            return 2
        import traceback

        traceback.print_exc()
        tell("error", "this is a fault of attrace, not of your input; please report it with the lines above")
        return FAULT
    if code == INTERRUPTED:
        tell("interrupted", "nothing more was written")
    return code if isinstance(code, int) else 0


def _is_usage_error(error: Exception) -> bool:
    # typer raises click's classes in some releases and its own copies in others; both have these.
    return getattr(error, "exit_code", None) == 2 and hasattr(error, "format_message")


def _tell_usage(error: Exception) -> None:
    from attrace.apps.terminal import tell

    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "attrace"
    message = error.format_message()  # type: ignore[attr-defined]  # checked by _is_usage_error
    tell("error", f"{message}\nsee {path} --help")


def _prepare_process() -> None:
    # A standard stream that the caller closed leaves its number free, and the next file opened would get it.
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if not sys.warnoptions:  # `python -W` and PYTHONWARNINGS still show what libraries warn of
        import warnings

        warnings.simplefilter("ignore")


def _flushed(code: int) -> int:
    """Flush standard output, so that Python's own flush at exit cannot fail, and return the exit code."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # Only a help page can be left: results were flushed where they were written.
        from attrace.apps.terminal import drop_stdout

        drop_stdout()
    return code
