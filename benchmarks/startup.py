#!/usr/bin/env python3
"""How long the commands take that a newcomer tries first: medians of runs taken in turn, on this machine.

    python benchmarks/startup.py [RUNS] [DEMO_RUNS]

Help pages are compared with `python -c pass` (15 runs), the demo also with importing its two libraries (5 runs).  The
first round of each warms the disk's cache and does not count.  Exits with 1 where a promise is broken: 0.3 s more than
the empty program for `attrace --help`, judged by processor time, which is the wall time on a quiet machine and which
other work on a busy one hardly stretches; 10 s of wall time for a warm `attrace demo`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

HELP_PROMISE = 0.3
DEMO_PROMISE = 10.0
START = "import sys; from attrace.apps.cli import main; sys.argv[0] = 'attrace'; main()"
PASS, LIBRARIES = "python -c pass", "python -c 'import torch, transformers'"
HELP, DEMO = "attrace --help", "attrace demo --quiet"
EMPTY = [sys.executable, "-c", "pass"]
HELP_PAGES = {
    PASS: EMPTY,
    HELP: [sys.executable, "-c", START, "--help"],
    "attrace explain --help": [sys.executable, "-c", START, "explain", "--help"],
    "attrace --version": [sys.executable, "-c", START, "--version"],
}
DEMOS = {
    PASS: EMPTY,
    LIBRARIES: [sys.executable, "-c", "import torch, transformers"],
    DEMO: [sys.executable, "-c", START, "demo", "--quiet"],
}
Times = dict[str, tuple[float, float]]
"""Wall-clock and processor seconds of each command."""


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall-clock and processor seconds of one run."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{command} failed with {child.returncode}")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime


def measure(commands: dict[str, list[str]], runs: int) -> Times:
    """Median seconds of each command; the commands take turns, so a busy moment meets them all."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(runs + 1):
        for name, command in commands.items():
            times[name].append(seconds(command))
    # the first run warms the disk's cache
    return {
        name: (statistics.median(t[0] for t in pairs[1:]), statistics.median(t[1] for t in pairs[1:]))
        for name, pairs in times.items()
    }


def table(title: str, medians: Times, *references: str) -> None:
    """Print the medians, each with its ratio to the references' wall time."""
    print(f"{title:<40}{'wall':>10}{'processor':>12}" + "".join(f"   wall / {name}" for name in references))
    for name, (wall, processor) in medians.items():
        ratios = "".join(f"{wall / medians[reference][0]:>{len(reference) + 10}.2f}" for reference in references)
        print(f"{name:<40}{wall:>8.3f} s{processor:>10.3f} s{ratios}")


def main() -> int:
    """Print both tables; 1 where a promise is broken."""
    counts = [int(argument) for argument in sys.argv[1:]]
    runs = counts[0] if counts else 15
    demo_runs = counts[1] if len(counts) > 1 else 5
    pages = measure(HELP_PAGES, runs)
    table(f"medians of {runs}", pages, PASS)
    demos = measure(DEMOS, demo_runs)
    print()
    table(f"medians of {demo_runs}, warm", demos, PASS, LIBRARIES)
    more = pages[HELP][1] - pages[PASS][1]
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"\n{os.cpu_count()} processors{load}: what else runs counts in the wall times")
    print(f"{HELP}: {more:.3f} s of processor time more than {PASS}; promised {HELP_PROMISE} s")
    print(f"{DEMO}: {demos[DEMO][0]:.2f} s; promised {DEMO_PROMISE:.0f} s")
    return int(more > HELP_PROMISE or demos[DEMO][0] > DEMO_PROMISE)


if __name__ == "__main__":
    sys.exit(main())
