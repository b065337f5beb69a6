#!/usr/bin/env python3
"""How much longer `attrace --help` takes than `python -c pass`: medians of runs taken in turn, on this machine.

    python benchmarks/startup.py [RUNS]

Exits with 1 where the difference passes the promise of 0.3 s.  That is judged by processor time, which is the wall
time on a quiet machine and which other work on a busy one hardly stretches.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

PROMISE = 0.3
EMPTY = [sys.executable, "-c", "pass"]
START = "import sys; from attrace.apps.cli import main; sys.argv[0] = 'attrace'; main()"
COMMANDS = {
    "python -c pass": EMPTY,
    "attrace --help": [sys.executable, "-c", START, "--help"],
    "attrace explain --help": [sys.executable, "-c", START, "explain", "--help"],
    "attrace --version": [sys.executable, "-c", START, "--version"],
}


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall-clock and processor seconds of one run."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{command} failed with {child.returncode}")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime


def measure(runs: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each command; the commands take turns, so a busy moment meets them all."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(runs + 1):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    # the first run warms the disk's cache
    return {
        name: (statistics.median(t[0] for t in pairs[1:]), statistics.median(t[1] for t in pairs[1:]))
        for name, pairs in times.items()
    }


def main() -> int:
    """Print the table; 1 where the promise is broken."""
    medians = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
    wall, processor = medians["python -c pass"]
    print(f"{'medians':<24}{'wall':>9}{'more':>9}{'ratio':>7}{'processor':>12}{'more':>9}")
    for name, (seen, used) in medians.items():
        print(
            f"{name:<24}{seen:>7.3f} s{seen - wall:>7.3f} s{seen / wall:>7.1f}{used:>10.3f} s{used - processor:>7.3f} s"
        )
    return int(medians["attrace --help"][1] - processor > PROMISE)


if __name__ == "__main__":
    sys.exit(main())
