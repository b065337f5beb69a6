#!/usr/bin/env python3
"""What a trace and its rollout cost over the model's own forward pass, and how exact streamed rows are.

    python benchmarks/overhead.py [--real FOLDER] [--json FILE]

Ratios of medians over interleaved runs in one process, on the embedded classifier (a sample mail) and, where
prepared, on MiniLM and SmolLM2 (real text).  The streamed row is checked first against the float64 reference
over the same queries and keys; no time is printed where that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

import attrace
from attrace.capture.encoding import Encoding, encode
from attrace.capture.huggingface import Loaded, load
from attrace.ops.attention import naive

ROUNDS = 31
EXACT = 1e-5


def reference_row(trace: attrace.Trace, target: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The target's row in float64 over dense maps: (n,)."""
    row = np.eye(trace.ops[0].shape[2])[target]
    for op in reversed(trace.ops):
        bias = None if op.bias is None else op.bias.double().numpy()
        weights = naive.attention_weights(
            op.query.double().numpy(), op.key.double().numpy(), scale=op.scale, bias=bias, causal=op.causal
        )
        row = 0.5 * row + 0.5 * row @ weights[0].mean(0)
    return row


def medians(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each task, the tasks taking turns."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(rounds + 3):
        for name, task in tasks.items():
            begin = time.perf_counter()
            task()
            if number >= 3:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(loaded: Loaded, encoding: Encoding, rounds: int) -> dict[str, Any]:
    model, inputs, target = loaded.model, encoding.inputs, len(encoding) - 1 if loaded.task == "causal" else 0
    with torch.no_grad():
        trace = attrace.trace(model, **inputs)
        error = float(np.abs(trace.rollout(target=target)[0].double().numpy() - reference_row(trace, target)).sum())
        row = {"model": loaded.name, "tokens": len(encoding), "layers": len(trace.ops), "l1_error": error}
        if error > EXACT:
            return row
        seconds = medians(
            {
                "forward": lambda: model(**inputs),
                "trace": lambda: attrace.trace(model, **inputs),
                "trace_and_rollout": lambda: attrace.trace(model, **inputs).rollout(target=target),
            },
            rounds,
        )
    row["forward_ms"] = seconds["forward"] * 1000
    row["trace_ratio"] = seconds["trace"] / seconds["forward"]
    row["trace_and_rollout_ratio"] = seconds["trace_and_rollout"] / seconds["forward"]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("ATTRACE_CACHE") or Path.home() / ".cache" / "attrace")
    parser.add_argument("--real", type=Path, default=cache / "real", help="folder of scripts/real_models.py's results")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    samples = Path(attrace.__file__).parent / "assets" / "samples"
    mail = " ".join(p.read_text(encoding="utf-8") for p in sorted(samples.glob("*.txt")))
    rows = []
    for name, lengths in ((None, (64, 160, 512)), ("minilm", (128, 512)), ("smollm2", (128, 512))):
        if name is not None and not (args.real / name).is_dir():
            print(f"note: {name} is not prepared; see scripts/real_models.py", file=sys.stderr)
            continue
        loaded = load(None if name is None else args.real / name)
        whole = encode(loaded, mail, truncate=True)
        for length in lengths:
            stop = whole.offsets[min(length, len(whole)) - 2][1] or None
            encoding = encode(loaded, mail[:stop], truncate=True)
            rows.append(measure(loaded, encoding, ROUNDS if name is None else ROUNDS // 4))
    print("| model | tokens | layers | L1 error | forward, ms | trace / forward | trace + rollout / forward |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    failed = False
    for row in rows:
        failed |= row["l1_error"] > EXACT
        times = "not exact: no times | |"
        if row["l1_error"] <= EXACT:
            times = f"{row['forward_ms']:.1f} | {row['trace_ratio']:.2f} | {row['trace_and_rollout_ratio']:.2f} |"
        print(f"| {row['model']} | {row['tokens']} | {row['layers']} | {row['l1_error']:.1e} | {times}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
