#!/usr/bin/env python3
"""Do the marked tokens matter?  Remove them, and random ones, and compare how far the model's output falls.

    python benchmarks/faithfulness.py [--json FILE] [--out docs/faithfulness-small.md]

Four models: SmolLM2-135M on 25 short factual prompts (target: its own next token), attrace's embedded spam
classifier on held-out mails (the class it predicts), MiniLM on sentences (their vector) and rxnmapper's ALBERT
on reactions (the answer at a mask).  Two ways to remove: `delete` takes
tokens out of the sequence, `hide` leaves them in place and masks them from attention.  The table goes to
standard output, progress to standard error.  Exit code 1 where a model or its data is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from attrace.evaluate.removal import FRACTIONS, bootstrap_interval, random_values, removal_drops
from attrace.methods.registry import method
from attrace.types import Options, Subject

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ROOT / "src" / "attrace" / "assets" / "spam"
OPERATORS = ("delete", "hide")
DRAWS = 8
MAILS = 100
SENTENCES = 25
MODELS = ("smollm2", "spam", "minilm", "rxnmapper")
MAIL_TOKENS = 128
PROMPTS = (
    "The capital of France is",
    "The capital of Japan is",
    "The largest planet in our solar system is",
    "Water is made of hydrogen and",
    "The opposite of hot is",
    "The first president of the United States was George",
    "The author of Romeo and Juliet is William",
    "A triangle has three sides and a square has",
    "The Great Wall is a landmark in",
    "The currency used in Japan is the",
    "In the northern hemisphere, the month after June is",
    "Bees make a sweet food called",
    "The language spoken in Brazil is",
    "The Eiffel Tower stands in the city of",
    "The chemical symbol for gold is",
    "Cows give milk and hens lay",
    "The Earth moves around the",
    "The day that follows Monday is",
    "The longest river in Africa is the",
    "Albert Einstein developed the theory of",
    "The heart pumps blood through the",
    "Two plus two equals",
    "The pyramids of Giza were built by the ancient",
    "A baby dog is called a",
    "Ice melts when its temperature rises above zero degrees",
)


@dataclass
class Counted:
    """A subject that counts its forward passes; `operator` replaces the one that a method asks for."""

    subject: Subject
    operator: str | None = None
    passes: int = 0
    trace: Any = field(init=False)
    readout: Any = field(init=False)
    protected: Any = field(init=False)
    unit: Any = field(init=False)

    def __post_init__(self) -> None:
        self.trace, self.readout = self.subject.trace, self.subject.readout
        self.protected, self.unit = self.subject.protected, self.subject.unit

    def score(self, keep: Any, *, operator: str = "delete", progress: Any = None) -> Any:
        self.passes += len(keep)
        return self.subject.score(keep, operator=self.operator or operator, progress=progress)


@dataclass(frozen=True)
class Way:
    """One row of the table: a method, and for leave-one-out the operator that it leaves out by."""

    name: str
    method: str
    operator: str | None = None


WAYS = (
    Way("rollout", "rollout"),
    Way("last layer", "last-layer"),
    Way("ALTI", "alti"),
    Way("leave-one-out by delete", "leave-one-out", "delete"),
    Way("leave-one-out by hide", "leave-one-out", "hide"),
)


@dataclass
class Row:
    """What one way reached on one model: one number per input in each list."""

    name: str
    drops: dict[str, list[float]] = field(default_factory=lambda: {o: [] for o in OPERATORS})
    passes: int = 0
    seconds: float = 0.0
    operator: str | None = None


@dataclass
class Result:
    """One model's table."""

    model: str
    about: str
    tokens: list[int]
    rows: list[Row]
    random: dict[str, list[float]]
    seconds: float


def measure(model: str, about: str, subjects: Iterable[Subject], seed: int) -> Result:
    """Score every subject by every way, remove by every operator."""
    start = time.perf_counter()
    rows = [Row(way.name, operator=way.operator) for way in WAYS]
    chance: dict[str, list[float]] = {o: [] for o in OPERATORS}
    tokens = []
    for number, subject in enumerate(subjects):
        tokens.append(int((~subject.protected).sum()))
        ranked = []
        for way, row in zip(WAYS, rows, strict=True):
            counted = Counted(subject, way.operator)
            begin = time.perf_counter()
            ranked.append(method(way.method).run(counted, Options(), None).values)
            row.seconds += time.perf_counter() - begin
            row.passes += counted.passes
        orders = random_values(len(subject.protected), draws=DRAWS, seed=seed + number)
        for operator in OPERATORS:  # one batch: sets that two ways share are scored once
            drops = removal_drops(subject, [*ranked, *orders], operator=operator)
            chance[operator].append(float(drops[len(rows) :].mean()))
            for row, drop in zip(rows, drops, strict=False):
                row.drops[operator].append(float(drop))
        if sys.stderr.isatty():
            print(f"\r{model}: {number + 1} inputs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return Result(model, about, tokens, rows, chance, time.perf_counter() - start)


# --- inputs


def prompts(folder: Path) -> Iterator[Subject]:
    """One subject per prompt; the target is the model's own next token."""
    from attrace.capture import huggingface
    from attrace.capture.encoding import encode
    from attrace.capture.text import ask

    loaded = huggingface.load(folder)
    for text in PROMPTS:
        yield ask(loaded, encode(loaded, text), "auto", detail=True)


def mails(model: Path, data: Path, seed: int) -> Iterator[Subject]:
    """One subject per held-out mail, cut to MAIL_TOKENS; the target is the predicted class."""
    from attrace.capture import huggingface
    from attrace.capture.encoding import encode
    from attrace.capture.text import ask

    sys.path.insert(0, str(ROOT / "scripts"))
    from spam_data import prepare  # type: ignore[import-not-found]  # the seeded split that the model was trained with

    loaded = huggingface.load(model)
    held_out = prepare(data, 1).held_out
    for mail in random.Random(seed).sample(held_out, min(MAILS, len(held_out))):
        text = cut(loaded.tokenizer, mail.text)
        yield ask(loaded, encode(loaded, text), "auto", detail=True)


def sentences(folder: Path, samples: Path) -> Iterator[Subject]:
    """One subject per paragraph of the sample mails; the target is the mean vector, the drop one of its cosine."""
    from attrace.capture import huggingface
    from attrace.capture.encoding import encode
    from attrace.capture.text import ask

    loaded = huggingface.load(folder)
    mails = [path.read_text(encoding="utf-8") for path in sorted(samples.glob("*.txt"))]
    for text in [part for mail in mails for part in mail.split("\n\n") if len(part.split()) >= 8][:SENTENCES]:
        yield ask(loaded, encode(loaded, text), "auto", detail=True)


def reactions(folder: Path, data: Path) -> Iterator[Subject]:
    """One subject per reaction; its atom in the middle is masked, and the target is the model's answer there."""
    from attrace.capture import huggingface
    from attrace.capture.encoding import encode
    from attrace.capture.text import ask

    loaded = huggingface.load(folder)
    for line in data.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["reaction"]
        whole = encode(loaded, text, truncate=True)
        begin, end = whole.offsets[len(whole) * 3 // 4]
        masked = text[:begin] + loaded.tokenizer.mask_token + text[end:]
        yield ask(loaded, encode(loaded, masked, truncate=True), "auto", detail=True)


def cut(tokenizer: Any, text: str) -> str:
    """The start of a text that makes at most MAIL_TOKENS tokens, special ones included."""
    encoded = tokenizer(text, truncation=True, max_length=MAIL_TOKENS, return_offsets_mapping=True)
    return text[: max(end for _, end in encoded["offset_mapping"])]


# --- output


def interval(values: Sequence[float], seed: int) -> dict[str, float]:
    low, high = bootstrap_interval(values, seed=seed)
    return {"mean": float(np.mean(values)), "low": low, "high": high}


def summary(result: Result, seed: int) -> dict[str, Any]:
    """JSON values: means with 95 % intervals, and each way's paired difference from random."""
    inputs = len(result.tokens)
    rows: list[dict[str, Any]] = []
    for row in result.rows:
        judged = {}
        for operator in OPERATORS:
            gain = np.subtract(row.drops[operator], result.random[operator]).tolist()
            judged[operator] = {
                "drop": interval(row.drops[operator], seed),
                "over_random": interval(gain, seed),
                "own_operator": row.operator == operator,
                "per_input": row.drops[operator],
            }
        rows.append(
            {
                "method": row.name,
                **judged,
                "passes_per_input": row.passes / inputs,
                "seconds_per_input": row.seconds / inputs,
            }
        )
    return {
        "model": result.model,
        "about": result.about,
        "inputs": inputs,
        "free_tokens": {"median": float(np.median(result.tokens)), "max": max(result.tokens)},
        "seconds": result.seconds,
        "random": {o: {"drop": interval(v, seed), "per_input": v} for o, v in result.random.items()},
        "methods": rows,
    }


def shown(numbers: dict[str, float], *, signed: bool = False) -> str:
    form = "{:+.2f}" if signed else "{:.2f}"
    mean, low, high = (form.format(numbers[k]) for k in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def table(found: dict[str, Any]) -> str:
    """One model's Markdown table."""
    head = ["method"]
    for operator in OPERATORS:
        head += [f"drop by {operator}", "over random"]
    lines = [[*head, "passes", "seconds"]]
    for row in found["methods"]:
        cells = [row["method"]]
        for operator in OPERATORS:
            star = "\\*" if row[operator]["own_operator"] else ""
            cells += [
                shown(row[operator]["drop"]) + star,
                shown(row[operator]["over_random"], signed=True) + star,
            ]
        lines.append([*cells, f"{row['passes_per_input']:.0f}", f"{row['seconds_per_input']:.4f}"])
    chance = [shown(found["random"][o]["drop"]) for o in OPERATORS]
    lines.append([f"random, {DRAWS} orders", chance[0], "", chance[1], "", "", ""])
    texts = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([texts[0], "| --- |" + " ---: |" * (len(head) + 1), *texts[1:]])


def verdict(found: dict[str, Any]) -> str:
    """What the intervals say, in a sentence each."""
    sides: dict[str, list[str]] = {"above": [], "below": [], "mixed": []}
    for row in found["methods"]:
        judged = [row[o]["over_random"] for o in OPERATORS if not row[o]["own_operator"]]
        if all(j["low"] > 0 for j in judged):
            sides["above"].append(row["method"])
        elif all(j["high"] < 0 for j in judged):
            sides["below"].append(row["method"])
        else:
            sides["mixed"].append(row["method"])
    parts = [
        ("above", "Better than random, interval above zero by every operator but a method's own"),
        ("below", "Worse than random, interval below zero"),
        ("mixed", "Not told apart from random by every operator"),
    ]
    return " ".join(f"{text}: {', '.join(sides[side])}." for side, text in parts if sides[side])


def report(record: dict[str, Any]) -> str:
    """The page docs/faithfulness-small.md."""
    shares = ", ".join(f"{100 * f:.0f}" for f in FRACTIONS)
    made = record["made_with"]
    parts = [
        "# Do the marked tokens matter?",
        "",
        f"Each method ranks an input's tokens; the top {shares} % of them are removed, and the fall of the "
        "target's log-probability is averaged over these shares (nats; larger is better). `delete` takes "
        "the tokens out of the sequence, `hide` leaves them in place and masks them from attention. Special "
        f"tokens stay. Random removes as many tokens in {DRAWS} random orders. Brackets hold 95 % bootstrap "
        'intervals over inputs; "over random" is the paired difference, input by input. Passes and seconds '
        "are those of the method per input, beyond the one recorded run that all share.",
        "",
        "\\* Leave-one-out judged by the operator that it leaves out by is flattered: it has measured, token "
        "by token, the very thing that it is judged by. Compare it by the other operator. Removal makes inputs "
        "that no model was trained on; that is why there are two operators.",
        "",
    ]
    for found in record["models"]:
        size = found["free_tokens"]
        parts += [
            f"## {found['model']}",
            "",
            f"{found['about']} {found['inputs']} inputs, {size['median']:.0f} free tokens in the median, "
            f"at most {size['max']}.",
            "",
            table(found),
            "",
            verdict(found),
            "",
        ]
    parts += [
        "## How it was made",
        "",
        f"`python benchmarks/faithfulness.py --seed {record['seed']}`, "
        f"{sum(f['seconds'] for f in record['models']):.0f} seconds on {made['threads']} threads "
        f"({made['machine']}), Python {made['python']}, torch {made['torch']}, transformers "
        f"{made['transformers']}, numpy {made['numpy']}, float32. Random orders and the bootstrap are "
        "seeded: on the same versions the drops come out the same.",
        "",
    ]
    return "\n".join(parts)


def made_with() -> dict[str, Any]:
    import torch

    packages = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        **packages,
    }


def main(argv: Sequence[str] | None = None) -> int:
    cache = Path(os.environ.get("ATTRACE_CACHE") or Path.home() / ".cache" / "attrace") / "real"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--smollm2", type=Path, default=cache / "smollm2", metavar="DIR")
    parser.add_argument("--spam", type=Path, default=EMBEDDED, metavar="DIR")
    parser.add_argument("--minilm", type=Path, default=cache / "minilm", metavar="DIR")
    parser.add_argument("--rxnmapper", type=Path, default=cache / "rxnmapper", metavar="DIR")
    parser.add_argument("--reactions", type=Path, default=cache / "rxn" / "reactions.jsonl", metavar="FILE")
    parser.add_argument("--mails", type=Path, default=cache / "spam" / "spam.jsonl", metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables as a Markdown page")
    args = parser.parse_args(argv)
    plans: dict[str, tuple[str, str, tuple[Path, ...], Callable[[], Iterator[Subject]]]] = {
        "smollm2": (
            "SmolLM2-135M, causal",
            "Short factual prompts; the target is the model's own next token, read at the last token that stays.",
            (args.smollm2 / "config.json",),
            lambda: prompts(args.smollm2),
        ),
        "spam": (
            "The embedded spam classifier, encoder",
            f"Held-out mails, cut to {MAIL_TOKENS} tokens; the target is the class that the model predicts.",
            (args.spam / "config.json", args.mails),
            lambda: mails(args.spam, args.mails, args.seed),
        ),
        "minilm": (
            "MiniLM, encoder without a head",
            "Paragraphs of the sample mails; the target is the mean vector, and the drop one of its cosine with "
            "the whole text's.",
            (args.minilm / "config.json",),
            lambda: sentences(args.minilm, EMBEDDED.parent / "samples"),
        ),
        "rxnmapper": (
            "rxnmapper's ALBERT, masked",
            "Chemical reactions with one token masked, three quarters of the way in; the target is the model's "
            "answer at the mask.",
            (args.rxnmapper / "config.json", args.reactions),
            lambda: reactions(args.rxnmapper, args.reactions),
        ),
    }
    found, missing = [], False
    for name in args.models:
        title, about, needed, subjects = plans[name]
        absent = [path for path in needed if not path.is_file()]
        if absent:
            print(f"{name} is left out: {absent[0]} is not there. Run `make real-models`.", file=sys.stderr)
            missing = True
        else:
            result = measure(title, about, subjects(), args.seed)
            found.append(summary(result, args.seed))
            print(
                f"## {title}\n\n{table(found[-1])}\n\n{verdict(found[-1])}\n\n{result.seconds:.0f} s\n",
                flush=True,
            )
    record = {
        "seed": args.seed,
        "fractions": FRACTIONS,
        "draws": DRAWS,
        "made_with": made_with(),
        "models": found,
    }
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.out:
        args.out.write_text(report(record), encoding="utf-8")
    return int(missing)


if __name__ == "__main__":
    sys.exit(main())
