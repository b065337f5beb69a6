#!/usr/bin/env python3
"""What a trace takes in memory over the model's own forward pass, beside the bytes of its queries and keys.

    python benchmarks/memory.py [--json FILE]

Each figure comes from a process of its own: the model is built and warmed up on a short input, the system's
high-water mark of resident memory is set back, and the model runs once, alone or traced.  The difference of the two
marks is what the trace took.  It should be what the trace holds: under a fused backend the queries and keys of all
layers and each mask or bias once (no log-sum-exp: it is computed anew with the weights), the maps where a model
computes them itself.  Exits with 1 where it is more by over 10 % and over 2 MiB, or where a fused model's trace holds
more than queries, keys and one mask of each kind of its layers.  Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLACK_SHARE, SLACK_BYTES = 0.1, 2 << 20
MIB = 1 << 20
LAYERS, HEADS, WIDTH = 8, 8, 256


def embedded(n: int) -> tuple[Any, dict[str, Any]]:
    from attrace.capture.huggingface import load

    model = load(None).model
    return model, tokens(n, model.config.vocab_size)


def tokens(n: int, vocabulary: int) -> dict[str, Any]:
    import torch

    ids = torch.randint(5, vocabulary, (1, n), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def bert(n: int, backend: str = "sdpa") -> tuple[Any, dict[str, Any]]:
    import transformers

    config = transformers.BertConfig(
        vocab_size=100, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, max_position_embeddings=4096,
    )  # fmt: skip
    return transformers.BertModel._from_config(config, attn_implementation=backend).eval(), tokens(n, 100)


def padded(n: int) -> tuple[Any, dict[str, Any]]:
    model, inputs = bert(n)
    inputs["attention_mask"][:, -n // 4 :] = 0
    return model, inputs


def window(n: int) -> tuple[Any, dict[str, Any]]:
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=100, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=WIDTH // HEADS, intermediate_size=4 * WIDTH, sliding_window=256,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2), use_cache=False,
    )  # fmt: skip
    return transformers.Gemma3TextModel(config).eval(), tokens(n, 100)


def t5(n: int) -> tuple[Any, dict[str, Any]]:
    import transformers

    config = transformers.T5Config(
        vocab_size=100, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=4 * WIDTH, num_layers=LAYERS, num_heads=HEADS
    )
    return transformers.T5EncoderModel._from_config(config, attn_implementation="sdpa").eval(), tokens(n, 100)


def gpt2(n: int) -> tuple[Any, dict[str, Any]]:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=100, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=4096, use_cache=False
    )
    return transformers.GPT2Model(config).eval(), tokens(n, 100)


def fast_path(n: int) -> tuple[Any, dict[str, Any]]:
    import torch

    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()
    return model, {"src": torch.randn(1, n, WIDTH)}


ROWS: dict[str, tuple[Callable[[int], tuple[Any, dict[str, Any]]], int]] = {
    "embedded classifier": (embedded, 512),
    "encoder, sdpa": (bert, 4096),
    "decoder, packed projection": (gpt2, 4096),
    "nn.TransformerEncoder, fast path": (fast_path, 2048),
    "encoder, padded batch": (padded, 2048),
    "decoder, windows and full": (window, 2048),
    "encoder, relative bias": (t5, 2048),
    "encoder, eager": (lambda n: bert(n, "eager"), 1024),
}


def high_water() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measure(name: str, *, traced: bool) -> dict[str, int]:
    """One run in this process: its high-water mark in bytes, over what was there before."""
    import torch

    import attrace

    build, n = ROWS[name]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.no_grad():
        model, short = build(16)
        attrace.trace(model, **short)
        inputs = build(n)[1]
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = high_water()
        found = attrace.trace(model, **inputs) if traced else model(**inputs)
        peak = high_water() - before
    if not traced:
        return {"peak": peak}
    held: dict[int, int] = {}
    masks: dict[int, int] = {}
    for op in found.ops:
        for tensor in (op.map,) if hasattr(op, "map") else (op.query, op.key):
            held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        if getattr(op, "bias", None) is not None:
            masks[op.bias.untyped_storage()._cdata] = op.bias.untyped_storage().nbytes()
    # A query and a key row take as much whatever the backend: what the maps of an eager model cost instead is seen.
    width = getattr(getattr(model, "config", None), "hidden_size", WIDTH)
    return {
        "peak": peak,
        "held": sum(held.values()) + sum(masks.values()),
        "masks": len(masks),
        "queries_and_keys": 2 * len(found.ops) * n * width * 4,
        "layers": len(found.ops),
        "tokens": n,
        "maps": sum(hasattr(op, "map") for op in found.ops),
    }


def in_a_process(name: str, *, traced: bool) -> dict[str, int]:
    # What the allocator frees goes back to the system at once, so that the mark follows what is alive.
    quiet = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
    quiet |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--row", name, *(["--traced"] if traced else [])]
    done = subprocess.run(command, env={**os.environ, **quiet}, check=True, capture_output=True, text=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.row, traced=args.traced)))
        return 0
    if not Path("/proc/self/clear_refs").exists():
        print("error: the high-water mark of memory can only be set back on Linux", file=sys.stderr)
        return 2
    rows, failed = [], False
    print(
        "| model | tokens | layers | forward, MiB | trace, MiB | more, MiB | Q and K, MiB | masks "
        "| held, MiB | more / held |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in ROWS:
        plain, traced = in_a_process(name, traced=False), in_a_process(name, traced=True)
        more = traced["peak"] - plain["peak"]
        failed |= traced["masks"] > 2  # one of windows, one of all
        failed |= more > traced["held"] * (1 + SLACK_SHARE) and more > traced["held"] + SLACK_BYTES
        rows.append({"model": name, **traced, "forward": plain["peak"], "more": more})
        sizes = (plain["peak"], traced["peak"], more, traced["queries_and_keys"])
        shown = " | ".join(f"{size / MIB:.1f}" for size in sizes)
        shown += f" | {traced['masks']} | {traced['held'] / MIB:.1f}"
        kept = " (maps)" if traced["maps"] else ""
        print(
            f"| {name}{kept} | {traced['tokens']} | {traced['layers']} | {shown} | {more / traced['held']:.2f} |",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
