"""The results of the coverage run as a page of the documentation."""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from typing import Any

INTRO = """# Coverage of transformers

Every model type of the installed transformers, built tiny and random from its configuration alone and measured
under its default attention backend. Written by

```
OMP_NUM_THREADS=1 python scripts/coverage.py --json coverage.json --markdown docs/coverage.md
```

with {versions}.

| | model types | classes |
| --- | ---: | ---: |
{counts}

* **covered**: with the recorder on the model's output is bit-identical; every map that was read equals independent
  evidence to 1e-5; no attention that the evidence shows is missing. *own weights*: the library's own under its eager
  attention. *probing*: each `scaled_dot_product_attention` or eager function called again with unit vectors for values.
  *softmax*: what a softmax of the run gave, for models whose library returns no weights and that call neither.
  That last one is the weakest: it does not come from a run of its own and cannot show that axes were told apart
  rightly. {weak} of the covered types rest on it for some of their maps, {only} of them for all.
* **refused**: `attrace.trace` raises a `CaptureError`; the reasons are below. Nothing is shown for such a model, also
  where only some of its layers cannot be read.
* **wrong**: a map, a call or the output differs.
* **no attention**: nothing in the model multiplies a softmax with values (convolutions, state spaces, codecs);
  `attrace.trace` says so in a `CaptureError`.
* **no inputs**: it builds, but the script knows no inputs for it, it takes too long, or two plain
  runs differ. **not buildable**: no model comes out of its configuration alone, or none that is small.
  Neither says anything about attrace.

What was given is in the last column: a language model with images that could not be given any was measured on text
alone, so its vision part was not seen there (most such parts have a row of their own). Inputs are short: sparse
schemes that fall back to dense attention on short inputs (BigBird, Nystromformer) were measured in their dense form,
and are refused in their sparse one. What mixes tokens beside attention is not in the maps: recurrent and convolutional
layers of hybrids (listed below, as `attrace.trace` names them), the dynamic convolutions of ConvBERT.
"""

IN_PART = """## Covered, with layers that have no maps

These are among the covered types: all of their attention is read, and some of their layers work without it.
"""
ORDER = ("covered", "refused", "wrong", "no attention", "no inputs", "not buildable")
NOISE = re.compile(r"^Expected attention as maps of \(batch, heads, queries, keys\)\. Received from \w+: ")


def markdown(results: dict[str, Any]) -> str:
    names = ("transformers", "torch", "attrace")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    types = Counter(r["status"] for r in results.values())
    lines = []
    for status in ORDER:
        classes = {r["class"] for r in results.values() if r["status"] == status and r["class"]}
        lines.append(f"| {status} | {types[status]} | {len(classes)} |")
    built = [r for r in results.values() if r["status"] in ORDER[:4]]
    lines.append(f"| **measured** | **{len(built)}** | **{len({r['class'] for r in built})}** |")
    lines.append(f"| all | {len(results)} | |")
    shown = [set(r["evidence"]) for r in results.values() if r["status"] == "covered"]
    weak, only = sum("softmax" in e for e in shown), sum(e == {"softmax"} for e in shown)
    page = [INTRO.format(versions=versions, counts="\n".join(lines), weak=weak, only=only)]
    for status, title in (("wrong", "Wrong"), ("refused", "Refused"), ("no attention", "No attention")):
        rows = [(t, r) for t, r in sorted(results.items()) if r["status"] == status]
        if rows and status == "no attention":
            page.append(f"## {title}\n\n{', '.join(f'`{t}`' for t, _ in rows)}.\n")
        elif rows:
            table = [f"| `{t}` | {r['class']} | {reason(r)} |" for t, r in rows]
            page.append("\n".join([f"## {title}\n", "| type | class | reason |", "| --- | --- | --- |", *table, ""]))
    table = [
        f"| `{t}` | {r['class']} | {r['backend']} | {r['ops']} | {evidence(r)} | {', '.join(r['inputs'])} |"
        for t, r in sorted(results.items())
        if r["status"] == "covered"
    ]
    head = ["| type | class | backend | maps | evidence | inputs |", "| --- | --- | --- | ---: | --- | --- |"]
    page.append("\n".join(["## Covered\n", *head, *table, ""]))
    table = [
        f"| `{t}` | {' '.join(r['gaps']).replace('|', ' ')} |"
        for t, r in sorted(results.items())
        if r["status"] == "covered" and r.get("gaps")
    ]
    page.append("\n".join([IN_PART, "| type | what `attrace.trace` warns of |", "| --- | --- |", *table, ""]))
    for status, title in (("no inputs", "No inputs"), ("not buildable", "Not buildable")):
        rows = [(t, r) for t, r in sorted(results.items()) if r["status"] == status]
        table = [f"| `{t}` | {reason(r)} |" for t, r in rows]
        page.append("\n".join([f"## {title}\n", "| type | reason |", "| --- | --- |", *table, ""]))
    return "\n".join(page)


def reason(record: dict[str, Any]) -> str:
    """In one cell: the first layer of several, no bars, no line ends."""
    text = NOISE.sub("", record["reason"]).split("; ")[0]
    text = text.replace(" Such a layer is not supported yet.", "").replace("NotBuildable: ", "")
    text = re.sub(r" Call the model inside the block.*?PyTorch\.", "", text)
    text = re.sub(r"\s*You can install it.*", "", text)
    return text.replace("|", "\\|").replace("<", "&lt;")[:260].rstrip()


def evidence(record: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {count}" if len(record["evidence"]) > 1 else name for name, count in record["evidence"].items()
    )
