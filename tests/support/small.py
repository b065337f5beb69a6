"""Small random text models with real tokenizers, saved the way real ones are."""

from __future__ import annotations

from pathlib import Path

import tiny
import tiny_streams
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Claim your free prize now! Please see the agenda of our meeting on Thursday.",
    "A man is eating food in the old town. The stock market crashed today.",
]
TASKS = {
    "classifier": ("BertForSequenceClassification", "bert"),
    "masked": ("BertForMaskedLM", "bert"),
    "encoder": ("BertModel", "bert"),
    "causal": ("LlamaForCausalLM", "llama"),
    "causal-classifier": ("GPT2ForSequenceClassification", "gpt2-classifier"),
    "attentionless": ("MambaForCausalLM", "mamba"),
    "seq2seq": ("T5ForConditionalGeneration", "t5"),
    "seq2seq-bart": ("BartForConditionalGeneration", "bart"),
}


def word_pieces(vocabulary: int = 100) -> PreTrainedTokenizerFast:
    """BERT's kind: lower case, [CLS] and [SEP] around the text, pieces marked by ##."""
    names = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=list(names.values()))
    tokenizer.train_from_iterator(LINES, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **{f"{kind}_token": name for kind, name in names.items()}
    )


def byte_pairs(vocabulary: int = 300) -> PreTrainedTokenizerFast:
    """GPT-2's kind: bytes, a blank belongs to the word after it, nothing added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", model_max_length=64
    )


def save(task: str, folder: Path, **settings: object) -> Path:
    """Save a model and its tokenizer to the folder; `settings` go into the configuration."""
    name, family = TASKS[task]
    tokenizer = word_pieces() if family == "bert" else byte_pairs()
    known = {**tiny_streams.SETTINGS, **tiny.FAMILIES}
    base = known[family][1] if family in known else {"hidden_size": 32, "num_hidden_layers": 2}
    cls = getattr(transformers, name)
    config = cls.config_class(**{
        **base,
        "vocab_size": len(tokenizer),
        "bos_token_id": None if family == "bert" else 0,
        "eos_token_id": None if family == "bert" else 0,
        "pad_token_id": tokenizer.pad_token_id,
        "id2label": {0: "ham", 1: "spam", 2: "A~B"},
        "label2id": {"ham": 0, "spam": 1, "A~B": 2},
        **settings,
    })  # fmt: skip
    torch.manual_seed(0)
    model = cls(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(2.0 if family == "t5" else 6.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
