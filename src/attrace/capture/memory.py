"""Whether a map fits in memory, asked before it is made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from attrace.errors import MemoryLimitError

SHARE = 0.5
"""Share of the available memory that one result may take: making it needs room of its own."""
SMALL = 1 << 26
"""Bytes below which nobody looks: 64 MiB."""
MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")


def check_fits(shape: Sequence[int], itemsize: int, *, name: str, advice: str, free: int | None = None) -> None:
    """MemoryLimitError where an array would take more than SHARE of the memory that is available.

    `free` is what a device has left; by default the host's memory is looked up.  Where nothing can be found out,
    nothing is refused.
    """
    size = itemsize
    for length in shape:
        size *= length
    if size <= SMALL:
        return
    left = available() if free is None else free
    if left is not None and size > SHARE * left:
        raise MemoryLimitError(
            f"Expected at most {SHARE:.0%} of the available memory ({_shown(left)}) for {name}. "
            f"Received: {_shown(size)} for the shape {tuple(shape)}. {advice}"
        )


def available() -> int | None:
    """Bytes of memory that this process could still take, or None where the system does not tell."""
    found = [bytes_ for bytes_ in (_system(), _group()) if bytes_ is not None]
    return min(found, default=None)


def _system() -> int | None:
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    try:  # macOS: no figure of what is free, the machine's whole memory then
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _group() -> int | None:
    """What a container's limit leaves."""
    try:
        limit, used = ((GROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        return None if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return None


def _shown(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
