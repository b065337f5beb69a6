#!/usr/bin/env python3
"""Find the heaviest words per class on the held-out mails and put them into the model card.

    python scripts/spam_heaviest_words.py --data DIR/spam/spam.jsonl --model src/attrace/assets/spam --seed 0

Two rankings, both by attrace itself: the default method says how much a word counted, but not which way it pushes;
leaving a word out says which way, and by how much.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import numpy as np
import torch
from spam_card import replace_heaviest
from spam_data import Mail, prepare
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import attrace

LABELS = ("ham", "spam")
MIN_THREADS = 6  # a word must stand in as many threads (subjects) to be ranked
TOKENS = 256  # mails are read this far here
REMOVAL_TOKENS = 96
STOP_AT = 20


def attribute(model: Any, tokenizer: Any, text: str, **asked: str) -> attrace.Explanation:
    """The tool itself, on the part of the text that is read here."""
    return attrace.explain(model, text, processor=tokenizer, truncate=True, **asked)


def is_word(word: str) -> bool:
    """Whether to rank it; a contraction is several tokens, whose sum would outweigh other words."""
    return len(word) > 1 and word.isalpha()


def share_table(model: Any, tokenizer: Any, mails: Iterable[Mail]) -> list[list[tuple[str, float, int]]]:
    """Per predicted class: (word, mean weight, threads), heaviest first; the average word weighs 1."""
    weight: list[dict[str, list[float]]] = [defaultdict(list), defaultdict(list)]
    spread: list[dict[str, set[int]]] = [defaultdict(set), defaultdict(set)]
    for mail in mails:
        found = attribute(model, tokenizer, head(tokenizer, mail.text, TOKENS))
        label = LABELS.index(found.target.label)
        scale = len(found.words) / max(sum(word.share for word in found.words), 1e-12)
        for word in found.words:
            if is_word(word.text):
                weight[label][word.text.lower()].append(scale * word.share)
                spread[label][word.text.lower()].add(mail.side)
    return [ranked({w: float(np.mean(v)) for w, v in weight[y].items()}, spread[y]) for y in (0, 1)]


def ranked(score: Mapping[str, float], threads: Mapping[str, set[int]]) -> list[tuple[str, float, int]]:
    kept = [(w, s, len(threads[w])) for w, s in score.items() if len(threads[w]) >= MIN_THREADS]
    return sorted(kept, key=lambda r: (-r[1], r[0]))[:STOP_AT]


def head(tokenizer: Any, text: str, tokens: int) -> str:
    """The text up to its first `tokens` tokens."""
    offsets = tokenizer(text, truncation=True, max_length=tokens, return_offsets_mapping=True)["offset_mapping"]
    return text[: max(end for _, end in offsets)]


def removal_table(model: Any, tokenizer: Any, mails: Iterable[Mail]) -> list[list[tuple[str, float, int]]]:
    """Per class: (word, mean fall of that class's log-odds when the word is left out of a mail, threads)."""
    fall: dict[str, list[float]] = defaultdict(list)
    spread: dict[str, set[int]] = defaultdict(set)
    for mail in mails:
        text = head(tokenizer, mail.text, REMOVAL_TOKENS)
        found = attribute(model, tokenizer, text, target="class:spam~ham", method="leave-one-out")
        for word in found.words:
            if is_word(word.text):
                fall[word.text.lower()].append(word.score)
                spread[word.text.lower()].add(mail.side)
    mean = {w: float(np.mean(v)) for w, v in fall.items()}
    return [ranked({w: -s for w, s in mean.items()}, spread), ranked(mean, spread)]


def section(
    shares: Sequence[Sequence[tuple[str, float, int]]],
    removal: Sequence[Sequence[tuple[str, float, int]]],
    mails: int,
    few: int,
) -> str:
    """The card's section in Markdown."""
    intro = f"""On the {mails} held-out mails, words that stand in at least {MIN_THREADS} threads, found with
        attrace itself. *Share* is the mean weight of the word in `attrace.explain` with its default method, over the
        mails called that class (1 = the mail's average word); it has no sign, so a word may rank in both classes.
        *Left out* is how much of the class's log-odds goes when the word's tokens are left out one by one (`--method
        leave-one-out --target class:spam~ham`), the mean over the heads of {few} of the mails (all spam, every fourth
        ham)."""
    lines = textwrap.fill(" ".join(intro.split()), 110).split("\n")
    for y, name in enumerate(LABELS):
        lines += [
            "",
            f"**{name}**",
            "",
            "| | share | weight | threads | left out | log-odds | threads |",
            "| ---: | --- | ---: | ---: | --- | ---: | ---: |",
        ]
        for i in range(STOP_AT):
            a = shares[y][i] if i < len(shares[y]) else ("", 0.0, 0)
            b = removal[y][i] if i < len(removal[y]) else ("", 0.0, 0)
            lines.append(f"| {i + 1} | {a[0]} | {a[1]:.2f} | {a[2]} | {b[0]} | {b[1]:+.2f} | {b[2]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cache = Path(os.environ.get("ATTRACE_CACHE", Path.home() / ".cache" / "attrace"))
    parser.add_argument("--data", type=Path, default=cache / "real" / "spam" / "spam.jsonl")
    parser.add_argument("--model", type=Path, default=Path("src/attrace/assets/spam"))
    parser.add_argument("--seed", type=int, default=1, help="of the training run, for the same split")
    args = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, dtype=torch.float32).eval()
    held = prepare(args.data, args.seed).held_out
    few = [*(m for m in held if m.label), *[m for m in held if not m.label][::4]]
    text = section(share_table(model, tokenizer, held), removal_table(model, tokenizer, few), len(held), len(few))
    card = args.model / "README.md"
    card.write_text(replace_heaviest(card.read_text(encoding="utf-8"), text), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
