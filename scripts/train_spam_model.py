#!/usr/bin/env python3
"""Train attrace's embedded spam classifier from the SpamAssassin mails, on two CPU cores in under 30 minutes.

    python scripts/train_spam_model.py --data DIR/spam/spam.jsonl --out src/attrace/assets/spam --seed 0

The data file is item `spam` of scripts/real_models.py.  A small BERT is trained from nothing on random
windows of the cleaned mails, with a masked-word loss beside the class loss; the weights kept are an average
over the last steps, rounded to float16, and the figures are measured on those.  Nothing is chosen on the
held-out part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# read when the libraries load; threads that wait without spinning leave a shared machine's cores to others
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from spam_card import write_card
from spam_data import CONTAINMENT, JACCARD, Mail, Split, assert_disjoint, first_of_cluster, prepare
from spam_extra import written_mails
from spam_network import Recipe, accuracy, confusion, probabilities, train, train_tokenizer
from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

# --- baseline --------------------------------------------------------------------------------------------


def linear_model(texts: Sequence[str], labels: Sequence[int]) -> tuple[TfidfVectorizer, LogisticRegression]:
    """The baseline: TF-IDF of words and word pairs, logistic regression."""
    vectors = TfidfVectorizer(sublinear_tf=True, min_df=2, ngram_range=(1, 2))
    return vectors, LogisticRegression(C=30.0, max_iter=1000).fit(vectors.fit_transform(texts), labels)


def teacher_model(texts: Sequence[str], labels: Sequence[int]) -> tuple[TfidfVectorizer, LogisticRegression]:
    """A stronger linear model, on runs of characters: it sees spellings that words hide."""
    vectors = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True, min_df=3, max_features=200_000)
    return vectors, LogisticRegression(C=50.0, max_iter=300, solver="liblinear").fit(
        vectors.fit_transform(texts), labels
    )


def teacher_of(mails: Sequence[Mail], seed: int, folds: int = 5) -> list[float]:
    """P(spam) from linear models that have not seen the mail's side group: softens the targets of odd mails."""
    sides = sorted({m.side for m in mails})
    random.Random(seed).shuffle(sides)
    fold = {s: i % folds for i, s in enumerate(sides)}
    out = [0.0] * len(mails)
    for f in range(folds):
        seen = [m for m in mails if fold[m.side] != f]
        vectors, model = teacher_model([m.text for m in seen], [m.label for m in seen])
        rest = [i for i, m in enumerate(mails) if fold[m.side] == f]
        for i, p in zip(rest, model.predict_proba(vectors.transform([mails[i].text for i in rest]))[:, 1], strict=True):
            out[i] = float(p)
    return out


# --- output ----------------------------------------------------------------------------------------------


def save(folder: Path, model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast) -> None:
    """Stock transformers folder, weights in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = torch.float16
    model.config.architectures = ["BertForSequenceClassification"]
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # the class's name since transformers 4; version 5 writes one that older releases do not know
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("backend", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    weights = {k: v.half().contiguous() for k, v in model.state_dict().items() if v.is_floating_point()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def load(folder: Path) -> tuple[BertForSequenceClassification, PreTrainedTokenizerFast]:
    """The saved model in float32, with its tokenizer."""
    model = BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(folder)


def judge_samples(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> list[dict[str, object]]:
    """The sample inputs of the package with what the model says; looked at after training only."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    spam = probabilities(model, tokenizer, [(folder / s["file"]).read_text(encoding="utf-8") for s in index])
    return [{**s, "spam": float(p), "said": "spam" if p > 0.5 else "ham"} for s, p in zip(index, spam, strict=True)]


def zipped_size(folder: Path) -> int:
    """Bytes of the folder's files in a zip, as a wheel packs them."""
    with tempfile.TemporaryFile() as out:
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as pack:
            for file in sorted(folder.iterdir()):
                pack.write(file, file.name)
        return out.tell()


def measure(folder: Path, samples: Path, data: Split, seed: int, recipe: Recipe) -> dict[str, object]:
    """All figures of the card but the time, from the files as saved."""
    model, tokenizer = load(folder)
    held = data.held_out
    cleaned = probabilities(model, tokenizer, [m.text for m in held])
    raw = probabilities(model, tokenizer, [m.raw for m in held])
    vectors, linear = linear_model([m.text for m in data.train], [m.label for m in data.train])
    base = linear.predict_proba(vectors.transform([m.text for m in held]))[:, 1]
    hard = [i for i, m in enumerate(held) if m.source == "hard-ham-1"]
    return {
        "seed": seed,
        "recipe": asdict(recipe),
        "counts": data.counts,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parts": {
            name: [sum(m.label == y for m in part) for y in (0, 1)]
            for name, part in (("training", data.train), ("validation", data.validation), ("held-out", held))
        },
        "training_clusters": len(first_of_cluster(data.train)),
        "jaccard": JACCARD,
        "containment": CONTAINMENT,
        "highest_jaccard": assert_disjoint([*data.train, *data.validation], held),
        "validation": accuracy(probabilities(model, tokenizer, [m.text for m in data.validation]), data.validation),
        "held_out": accuracy(cleaned, held),
        "confusion": confusion(cleaned, held),
        "raw": accuracy(raw, held),
        "raw_confusion": confusion(raw, held),
        "baseline": accuracy(base, held),
        "baseline_confusion": confusion(base, held),
        "hard_ham": accuracy(cleaned[hard], [held[i] for i in hard]),
        "hard_ham_mails": len(hard),
        "samples": judge_samples(model, tokenizer, samples),
        "sizes": {f.name: f.stat().st_size for f in sorted(folder.iterdir()) if f.name != "README.md"},
        "zipped": zipped_size(folder),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cache = Path(os.environ.get("ATTRACE_CACHE", Path.home() / ".cache" / "attrace"))
    parser.add_argument("--data", type=Path, default=cache / "real" / "spam" / "spam.jsonl")
    parser.add_argument("--out", type=Path, default=Path("src/attrace/assets/spam"))
    parser.add_argument("--samples", type=Path, default=Path("src/attrace/assets/samples"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    # The trainer of vocabularies draws the order of its ties anew in each process: it has no seed.
    parser.add_argument("--tokenizer", type=Path, help="take this folder's vocabulary instead of learning one")
    args = parser.parse_args()

    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    random.seed(args.seed)
    torch.use_deterministic_algorithms(True)
    begin = time.monotonic()
    recipe = Recipe(epochs=args.epochs, masked_epochs=min(Recipe.masked_epochs, round(0.6 * args.epochs)))
    data = prepare(args.data, args.seed)
    print(json.dumps(data.counts), len(data.train), len(data.validation), len(data.held_out), flush=True)
    assert_disjoint([*data.train, *data.validation], data.held_out)
    written = written_mails(1500, random.Random(args.seed))
    if args.tokenizer:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
    else:
        tokenizer = train_tokenizer([*(m.text for m in data.train), *(w.text for w in written)], recipe.vocabulary)
    teacher = teacher_of(data.train, args.seed)
    for model in train(data.train, teacher, data.validation, tokenizer, recipe, args.seed):
        save(args.out, model, tokenizer)  # after each epoch: a run cut short leaves a usable model
    figures = measure(args.out, args.samples, data, args.seed, recipe)
    figures["minutes"] = (time.monotonic() - begin) / 60
    figures["cpu_minutes"] = time.process_time() / 60
    write_card(args.out, figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
