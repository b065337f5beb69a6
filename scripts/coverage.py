#!/usr/bin/env python3
"""Which architectures of the installed transformers attrace reads, each measured on a tiny random model.

    python scripts/coverage.py                                # all of them, two at a time
    python scripts/coverage.py --only bert swin --json out.json
    python scripts/coverage.py --json out.json --markdown docs/coverage.md

A type is *covered* where the model's output is bit-identical with the recorder on, every map read equals independent
evidence (see coverage_oracle.py) to 1e-5, and no attention call that the evidence shows is missing.  It is *refused*
where attrace raises a CaptureError, with its reason; *wrong* where a map, a call or the output differs.  With
--json a run that was cut off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import torchvision_ops

torchvision_ops.enable()  # before transformers looks whether timm imports
import tiny_models  # noqa: E402
from coverage_measure import measure  # noqa: E402
from coverage_table import markdown  # noqa: E402

SECONDS = 90
MEMORY = 10 << 30


# All of them


def in_child(model_type: str) -> tuple[int, int]:
    """Measure in a process of its own, forked after the imports; its record comes back through a pipe."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    code = 0
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        start = time.monotonic()
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        record = measure(model_type)
        record["seconds"] = round(time.monotonic() - start, 1)
        with os.fdopen(writing, "w") as pipe:
            json.dump(record, pipe)
    except BaseException as error:
        code = 1
        full = isinstance(error, MemoryError) or "allocate memory" in str(error)
        crash = {
            "type": model_type,
            "class": "",
            "status": "wrong",
            "reason": f"crash: {tiny_models.first_line(error)}",
        }
        if full:
            crash.update(status="no inputs", reason=f"takes more than {MEMORY >> 30} GB")
        with contextlib.suppress(OSError):
            os.write(writing, json.dumps(crash).encode())
    os._exit(code)


def run_all(types: list[str], results: dict[str, Any], path: Path | None, jobs: int) -> None:
    waiting, running = list(types), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            pid, reading = in_child(name)
            running[reading] = [pid, name, time.monotonic(), b""]
        ready = select.select(list(running), [], [], 1.0)[0]
        for reading in list(running):
            pid, name, start, data = running[reading]
            ended = False
            if reading in ready:
                chunk = os.read(reading, 1 << 16)
                running[reading][3] = data + chunk
                ended = not chunk
            if not ended and time.monotonic() - start > SECONDS:
                os.kill(pid, signal.SIGKILL)
                running[reading][3] = json.dumps(
                    {"type": name, "class": "", "status": "no inputs", "reason": f"no result in {SECONDS} s"}
                ).encode()
                ended = True
            if ended:
                data = running.pop(reading)[3]
                os.close(reading)
                os.waitpid(pid, 0)
                crash = {"type": name, "class": "", "status": "wrong", "reason": "the process ended"}
                results[name] = json.loads(data) if data else crash
                r = results[name]
                print(f"{name:36s} {r['status']:14s} {r.get('seconds', 0):5} {r['reason'][:200]}", flush=True)
                if path:
                    path.write_text(json.dumps(results, indent=1))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types, measured anew")
    parser.add_argument("--json", type=Path, help="results file; what it holds is not measured again")
    parser.add_argument("--again", nargs="+", metavar="STATUS", default=[], help="measure types of this status again")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    again = {t for t, r in results.items() if r["status"] in options.again}
    types = options.only or [t for t in tiny_models.model_types() if t not in results or t in again]
    unknown = [t for t in types if t not in tiny_models.CONFIG_MAPPING_NAMES]
    if unknown:
        parser.error(f"Expected model types of transformers. Received: {', '.join(unknown)}.")
    run_all(types, results, options.json, options.jobs)
    counts: dict[str, int] = {}
    for r in results.values():
        counts[r["status"]] = counts.get(r["status"], 0) + 1
    print(", ".join(f"{n} {status}" for status, n in sorted(counts.items(), key=lambda c: -c[1])))
    if options.markdown:
        options.markdown.write_text(markdown(results))
    return 1 if counts.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
