"""Refuse every connection that leaves the machine, in this process, for good.

An audit hook sees what any library does through Python's sockets and costs no import, so the same
few lines serve the test process and, through sitecustomize.py, each Python process that a test starts.
"""

from __future__ import annotations

import sys
from typing import Any

LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")
ATTEMPTS: list[str] = []
"""What was refused, for tests that count connections."""


class NetworkRefusedError(RuntimeError):
    """Not an OSError: code that retries or falls back on network errors must not hide it."""


def leaves_the_machine(event: str, args: tuple[Any, ...]) -> str | None:
    """Return the host that the audited call would reach, or None where it stays here."""
    if event in {"socket.connect", "socket.sendto", "socket.sendmsg"}:
        address = args[1]
        host = address[0] if isinstance(address, tuple) and address else None  # a Unix socket has a path
    elif event in {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}:
        host = args[0]
    else:
        return None
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if not host or str(host).startswith(LOOPBACK):
        return None
    return str(host)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event.startswith("socket."):
        host = leaves_the_machine(event, args)
        if host is not None:
            ATTEMPTS.append(host)
            raise NetworkRefusedError(f"a test tried to reach {host!r} ({event}); tests run offline")


def refuse_network() -> None:
    """Install the hook once; Python offers no way to take an audit hook away again."""
    if not getattr(sys, "_attrace_offline", False):
        sys._attrace_offline = True  # type: ignore[attr-defined]
        sys.addaudithook(_hook)
