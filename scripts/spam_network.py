"""The embedded spam classifier's recipe: tokenizer, windows of mails, network, training loop."""

from __future__ import annotations

import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import numpy as np
import torch
from spam_data import Mail
from spam_extra import Written, written_address, written_mails
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
POSITIONS = 512


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes the model, besides data and seed."""

    vocabulary: int = 6000
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    inner: int = 512
    dropout: float = 0.1
    epochs: int = 24
    masked_epochs: int = 13  # of these, the first ones mask words and learn to fill them in
    masked_share: float = 0.15
    masked_weight: float = 0.5
    word_dropout: float = 0.1
    smoothing: float = 0.05
    teacher_weight: float = 0.4
    rate: float = 1.0e-3
    warmup: float = 0.06
    decay: float = 0.02
    average: float = 0.998
    batch_tokens: int = 4096
    written: int = 500  # project-written mails drawn anew each epoch


# --- tokenizer -------------------------------------------------------------------------------------------


def train_tokenizer(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """Lower-casing WordPiece; offsets point into the text as given."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=60))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, min_frequency=3, special_tokens=SPECIAL, limit_alphabet=120, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=POSITIONS,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "attention_mask"],
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids without the special tokens, not truncated."""
    return [e.ids for e in tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)]


# --- examples --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """Token ids of one text, its line starts (token positions a window may begin at), its soft target."""

    ids: list[int]
    starts: list[int]
    spam: float  # target probability of spam


def examples_of(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], spam: Sequence[float]) -> list[Example]:
    made = []
    for text, target in zip(texts, spam, strict=True):
        pieces = encode(tokenizer, [line for line in text.split("\n") if line.strip()])
        starts = np.cumsum([0, *(len(p) for p in pieces[:-1])]).tolist()
        made.append(Example([i for p in pieces for i in p], starts, target))
    return made


def window(example: Example, addresses: Sequence[list[int]], rng: random.Random) -> list[int]:
    """Part of the text, now and then with addresses in it: cleaning took them out, plain text has them."""
    ids = part(example, rng)
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 3)):
            at = rng.randint(0, len(ids))
            ids = [*ids[:at], *rng.choice(addresses), *ids[at:]]
    return ids[: POSITIONS - 2]


def part(example: Example, rng: random.Random) -> list[int]:
    """A view of the text: its head, a run of lines, or a short crop; now and then a long one."""
    n, kind = len(example.ids), rng.random()
    if kind < 0.50 or n < 24:
        begin, length = 0, 254
    elif kind < 0.70:
        begin, length = rng.choice(example.starts), rng.randint(40, 254)
    elif kind < 0.88:  # short inputs, as people type them
        begin, length = rng.choice(example.starts) if rng.random() < 0.7 else 0, rng.randint(12, 60)
    else:  # trains the late positions
        begin, length = 0, POSITIONS - 2
    begin = min(begin, max(0, n - 12))
    return example.ids[begin : begin + length]


def batches(views: list[tuple[list[int], float]], tokens: int, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Padded batches of about equal token count; views of like length go together, in random order."""
    views = sorted(views, key=lambda v: (len(v[0]), rng.random()))
    packs: list[list[tuple[list[int], float]]] = [[]]
    for view in views:
        if (packs[-1] and (len(packs[-1]) + 1) * (len(view[0]) + 2) > tokens) or len(packs[-1]) >= 64:
            packs.append([])
        packs[-1].append(view)
    rng.shuffle(packs)
    for pack in packs:
        width = max(len(v[0]) for v in pack) + 2
        rows = [[CLS, *ids, SEP, *[PAD] * (width - 2 - len(ids))] for ids, _ in pack]
        yield torch.tensor(rows), torch.tensor([target for _, target in pack])


# --- training --------------------------------------------------------------------------------------------


def new_model(recipe: Recipe, vocabulary: int) -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=recipe.hidden,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            intermediate_size=recipe.inner,
            max_position_embeddings=POSITIONS,
            type_vocab_size=1,
            pad_token_id=PAD,
            hidden_dropout_prob=recipe.dropout,
            attention_probs_dropout_prob=0.0,  # would keep torch from its fused attention
            id2label={0: "ham", 1: "spam"},
            label2id={"ham": 0, "spam": 1},
        )
    )


class WordHead(nn.Module):
    """Fills in masked words from the hidden states; the embedding matrix is its output (training only)."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, states: Tensor, embedding: Tensor) -> Tensor:
        return nn.functional.linear(self.mix(states), embedding, self.bias)


def hide(ids: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Replace a share of the words by [MASK]; returns the new ids and where they changed."""
    chosen = (torch.rand(ids.shape, generator=generator) < share) & (ids > MASK)
    return ids.masked_fill(chosen, MASK), chosen


def rate_at(step: int, steps: int, recipe: Recipe) -> float:
    """Linear warm-up, then half a cosine down to 2 %."""
    warm = recipe.warmup * steps
    if step < warm:
        return step / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def soft_loss(logits: Tensor, spam: Tensor, recipe: Recipe) -> Tensor:
    """Cross-entropy with the smoothed targets."""
    target = torch.stack([1 - spam, spam], 1) * (1 - recipe.smoothing) + recipe.smoothing / 2
    return -(target * logits.log_softmax(1)).sum(1).mean()


def class_weights(mails: Sequence[Mail]) -> list[float]:
    """How often a mail is seen in an epoch: a cluster of k near-duplicates counts like sqrt(k) mails."""
    size = Counter(m.cluster for m in mails)
    return [size[m.cluster] ** -0.5 for m in mails]


def train(
    mails: Sequence[Mail],
    teacher: Sequence[float],
    validation: Sequence[Mail],
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    seed: int,
) -> Iterator[BertForSequenceClassification]:
    """The model (float32, averaged weights) after each epoch; the last one is the result."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    targets = [
        (1 - recipe.teacher_weight) * m.label + recipe.teacher_weight * t for m, t in zip(mails, teacher, strict=True)
    ]
    examples = examples_of(tokenizer, [m.text for m in mails], targets)
    weights = class_weights(mails)
    model = new_model(recipe, len(tokenizer))
    words = WordHead(recipe.hidden, len(tokenizer))
    embedding = model.bert.embeddings.word_embeddings.weight
    parameters = [*model.parameters(), *words.parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe.decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=recipe.rate,
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    averaged = {k: v.detach().clone() for k, v in model.state_dict().items()}
    addresses = encode(tokenizer, [written_address(rng) for _ in range(500)])
    plan = [epoch_batches(examples, weights, addresses, tokenizer, recipe, rng) for _ in range(recipe.epochs)]
    steps, step, begin = sum(map(len, plan)), 0, time.monotonic()
    for epoch, packs in enumerate(plan):
        model.train()
        masked = epoch < recipe.masked_epochs
        losses = []
        for ids, spam in packs:
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * rate_at(step + 1, steps, recipe)
            shown, chosen = hide(ids, recipe.masked_share if masked else recipe.word_dropout, generator)
            states = model.bert(input_ids=shown, attention_mask=(ids != PAD).long())
            loss = soft_loss(model.classifier(model.dropout(states.pooler_output)), spam, recipe)
            losses.append(float(loss.detach()))
            if masked and chosen.any():
                guess = words(states.last_hidden_state[chosen], embedding)
                loss = loss + recipe.masked_weight * nn.functional.cross_entropy(guess, ids[chosen])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            step += 1
            # early averages would hold the random start: let the window grow with the steps done
            keep = min(recipe.average, step / (step + 10))
            for k, v in model.state_dict().items():
                averaged[k].lerp_(v, 1 - keep) if v.is_floating_point() else averaged[k].copy_(v)
        check = with_weights(recipe, tokenizer, averaged)
        right = accuracy(probabilities(check, tokenizer, [m.text for m in validation]), validation)
        print(
            f"epoch {epoch + 1:2d}/{recipe.epochs}  loss {np.mean(losses):.4f}  validation {right:.4f}  "
            f"{time.monotonic() - begin:.0f} s",
            flush=True,
        )
        yield check


def epoch_batches(
    examples: Sequence[Example],
    weights: Sequence[float],
    addresses: Sequence[list[int]],
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    rng: random.Random,
) -> list[tuple[Tensor, Tensor]]:
    """One epoch: the mails, thinned by weight, and a fresh draw of project-written mails."""
    chosen = [e for e, w in zip(examples, weights, strict=True) if rng.random() < w]
    views = [(window(e, addresses, rng), e.spam) for e in chosen]
    written: list[Written] = written_mails(recipe.written, rng)
    extra = examples_of(tokenizer, [w.text for w in written], [float(w.label) for w in written])
    views += [(e.ids[: POSITIONS - 2], e.spam) for e in extra]
    return list(batches(views, recipe.batch_tokens, rng))


def with_weights(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, state: dict[str, Tensor]
) -> BertForSequenceClassification:
    model = new_model(recipe, len(tokenizer))
    model.load_state_dict(state)
    return model.eval()


# --- measuring -------------------------------------------------------------------------------------------


@torch.no_grad()
def probabilities(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> np.ndarray:
    """P(spam) of each text, read up to the model's context."""
    out = np.zeros(len(texts))
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for at in range(0, len(order), 32):
        pack = order[at : at + 32]
        batch = tokenizer([texts[i] for i in pack], truncation=True, padding=True, return_tensors="pt")
        out[pack] = model(**batch).logits.softmax(1)[:, 1].double().numpy()
    return out


def accuracy(spam: np.ndarray, mails: Sequence[Mail]) -> float:
    return float(np.mean((spam > 0.5) == np.array([m.label for m in mails])))


def confusion(spam: np.ndarray, mails: Sequence[Mail]) -> list[list[int]]:
    """Rows: true ham, true spam.  Columns: called ham, called spam."""
    table = np.zeros((2, 2), int)
    for p, m in zip(spam, mails, strict=True):
        table[m.label, int(p > 0.5)] += 1
    return table.tolist()
