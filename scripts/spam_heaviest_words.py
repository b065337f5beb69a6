#!/usr/bin/env python3
"""Find the heaviest words per class on the held-out mails and put them into the model card.

    python scripts/spam_heaviest_words.py --data DIR/spam/spam.jsonl --model src/attrace/assets/spam --seed 0

Two rankings.  Attention says how much of the class token's rollout a word gets, but not which way it pushes;
leaving a word out says which way, and by how much.
"""

from __future__ import annotations

import argparse
import os
import re
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

LABELS = ("ham", "spam")
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?|[^\w\s]|_")
MIN_THREADS = 6  # a word must stand in as many threads (subjects) to be ranked
TOKENS = 256  # mails are read this far here
STOP_AT = 20


def attribute(model: Any, tokenizer: Any, text: str) -> list[tuple[str, float]]:
    """(word, share) for the words of the text: attention rollout of the class token.  The one call to
    replace.
    """
    batch = tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt", return_offsets_mapping=True)
    offsets = batch.pop("offset_mapping")[0].tolist()
    with torch.no_grad():
        maps = model(**batch, output_attentions=True).attentions
    row = torch.zeros(len(offsets))
    row[0] = 1.0
    for layer in reversed(maps):
        row = 0.5 * row + 0.5 * row @ layer[0].mean(0)
    return by_word(text, offsets, row.tolist())


def by_word(text: str, offsets: Sequence[Sequence[int]], scores: Sequence[float]) -> list[tuple[str, float]]:
    """Sum token scores over the words of the text they lie in."""
    words = [(m.start(), m.end()) for m in WORD.finditer(text)]
    total = [0.0] * len(words)
    at = 0
    for (begin, end), score in zip(offsets, scores, strict=True):
        if begin == end:
            continue  # special tokens
        while at < len(words) and words[at][1] <= begin:
            at += 1
        if at < len(words) and words[at][0] <= begin:
            total[at] += score
    last = max((end for _, end in offsets), default=0)
    return [(text[b:e], s) for (b, e), s in zip(words, total, strict=True) if e <= last]


def is_word(word: str) -> bool:
    """Whether to rank it; a contraction is several tokens, whose sum would outweigh other words."""
    return len(word) > 1 and word.isalpha()


def rollout_table(model: Any, tokenizer: Any, mails: Iterable[Mail]) -> list[list[tuple[str, float, int]]]:
    """Per predicted class: (word, mean weight, threads), heaviest first; the average word weighs 1."""
    weight: list[dict[str, list[float]]] = [defaultdict(list), defaultdict(list)]
    spread: list[dict[str, set[int]]] = [defaultdict(set), defaultdict(set)]
    for mail in mails:
        pairs = attribute(model, tokenizer, mail.text)
        label = int(log_odds(model, tokenizer, [mail.text])[0] > 0)
        scale = len(pairs) / max(sum(s for _, s in pairs), 1e-12)
        for word, score in pairs:
            if is_word(word):
                weight[label][word.lower()].append(scale * score)
                spread[label][word.lower()].add(mail.side)
    return [ranked({w: float(np.mean(v)) for w, v in weight[y].items()}, spread[y]) for y in (0, 1)]


def ranked(score: Mapping[str, float], threads: Mapping[str, set[int]]) -> list[tuple[str, float, int]]:
    kept = [(w, s, len(threads[w])) for w, s in score.items() if len(threads[w]) >= MIN_THREADS]
    return sorted(kept, key=lambda r: (-r[1], r[0]))[:STOP_AT]


@torch.no_grad()
def log_odds(model: Any, tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    """Log P(spam) / P(ham) of each text."""
    out = []
    for at in range(0, len(texts), 64):
        batch = tokenizer(
            list(texts[at : at + 64]), truncation=True, max_length=TOKENS, padding=True, return_tensors="pt"
        )
        logits = model(**batch).logits
        out.append((logits[:, 1] - logits[:, 0]).numpy())
    return np.concatenate(out)


def head(tokenizer: Any, text: str, tokens: int) -> str:
    """The text up to its first `tokens` tokens."""
    offsets = tokenizer(text, truncation=True, max_length=tokens, return_offsets_mapping=True)["offset_mapping"]
    return text[: max(end for _, end in offsets)]


def removal_table(
    model: Any, tokenizer: Any, mails: Iterable[Mail], tokens: int = 96
) -> list[list[tuple[str, float, int]]]:
    """Per class: (word, mean fall of that class's log-odds when the word is left out of a mail, threads)."""
    fall: dict[str, list[float]] = defaultdict(list)
    spread: dict[str, set[int]] = defaultdict(set)
    for mail in mails:
        text = head(tokenizer, mail.text, tokens)
        words = sorted({m[0].lower() for m in WORD.finditer(text) if is_word(m[0])})
        without = [re.sub(rf"(?i)(?<!\w){re.escape(w)}(?!\w)", " ", text) for w in words]
        full, *rest = log_odds(model, tokenizer, [text, *without])
        for word, left in zip(words, rest, strict=True):
            fall[word].append(float(full - left))
            spread[word].add(mail.side)
    mean = {w: float(np.mean(v)) for w, v in fall.items()}
    return [ranked({w: -s for w, s in mean.items()}, spread), ranked(mean, spread)]


def section(
    rollout: Sequence[Sequence[tuple[str, float, int]]],
    removal: Sequence[Sequence[tuple[str, float, int]]],
    mails: int,
    few: int,
) -> str:
    """The card's section in Markdown."""
    intro = f"""On the {mails} held-out mails, words that stand in at least {MIN_THREADS} threads.
        *Attention* is the mean weight of the word in the rollout of the class token, over the mails called
        that class (1 = the mail's average word); it has no sign, so a word may rank in both classes. *Left
        out* is how much of the class's log-odds goes when the word is deleted from a mail, the mean over
        the heads of {few} of the mails (all spam, every fourth ham)."""
    lines = textwrap.fill(" ".join(intro.split()), 110).split("\n")
    for y, name in enumerate(LABELS):
        lines += [
            "",
            f"**{name}**",
            "",
            "| | attention | weight | threads | left out | log-odds | threads |",
            "| ---: | --- | ---: | ---: | --- | ---: | ---: |",
        ]
        for i in range(STOP_AT):
            a = rollout[y][i] if i < len(rollout[y]) else ("", 0.0, 0)
            b = removal[y][i] if i < len(removal[y]) else ("", 0.0, 0)
            lines.append(f"| {i + 1} | {a[0]} | {a[1]:.2f} | {a[2]} | {b[0]} | {b[1]:+.2f} | {b[2]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cache = Path(os.environ.get("ATTRACE_CACHE", Path.home() / ".cache" / "attrace"))
    parser.add_argument("--data", type=Path, default=cache / "real" / "spam" / "spam.jsonl")
    parser.add_argument("--model", type=Path, default=Path("src/attrace/assets/spam"))
    parser.add_argument("--seed", type=int, default=0, help="of the training run, for the same split")
    args = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    eager = AutoModelForSequenceClassification.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    fused = AutoModelForSequenceClassification.from_pretrained(args.model, dtype=torch.float32).eval()
    held = prepare(args.data, args.seed).held_out
    few = [*(m for m in held if m.label), *[m for m in held if not m.label][::4]]
    text = section(rollout_table(eager, tokenizer, held), removal_table(fused, tokenizer, few), len(held), len(few))
    card = args.model / "README.md"
    card.write_text(replace_heaviest(card.read_text(encoding="utf-8"), text), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
