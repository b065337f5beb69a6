"""Labels of tokens, with real tokenizers trained here on a few lines."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from attrace.aggregate import label_tokens, words
from attrace.errors import InputError, ShapeError

CORPUS = [
    "new cats and new dogs, the cats are new",
    "unbelievable unbelief believable able",
    "def f(x):\n    return x\n\n    return y\n",
] * 4


@pytest.fixture(scope="module")
def byte_level():
    """Like GPT-2: bytes, blanks in front of words, no normaliser."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def word_piece():
    """Like BERT: ## pieces, lower case without accents, class token and separator."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=70, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def read(tokenizer, text):
    encoding = tokenizer.encode(text)
    return encoding, label_tokens(text, encoding.offsets, encoding.tokens, encoding.special_tokens_mask)


def grouped(tokenizer, text):
    _, tokens = read(tokenizer, text)
    scores = [1.0 / len(tokens)] * len(tokens)
    result = words(text, tokens, scores)
    covered = sum(w.score for w in result) + sum(s for s, t in zip(scores, tokens, strict=True) if t.special)
    assert covered == pytest.approx(1.0)
    return [w.text for w in result]


@pytest.mark.parametrize("fixture", ["byte_level", "word_piece"])
def test_new_cats_are_two_words(fixture, request):
    assert grouped(request.getfixturevalue(fixture), "new cats") == ["new", "cats"]


def test_word_pieces_and_unknown_show_the_source(word_piece):
    text = "unbelievable 😀"
    encoding, tokens = read(word_piece, text)
    assert "[UNK]" in encoding.tokens
    assert any(piece.startswith("##") for piece in encoding.tokens)
    assert [t.text for t in tokens if t.special] == ["[CLS]", "[SEP]"]
    assert "".join(t.text for t in tokens if not t.special) == "unbelievable😀"
    assert all(t.text == text[t.start : t.end] for t in tokens if not t.special)
    assert grouped(word_piece, text) == ["unbelievable", "😀"]


def test_case_and_accents_come_from_the_source(word_piece):
    text = "New ÀBLE"
    assert "".join(t.text for t in read(word_piece, text)[1] if not t.special) == "NewÀBLE"


def test_bytes_of_an_emoji_show_the_emoji(byte_level):
    text = "unbelievable 😀"
    encoding, tokens = read(byte_level, text)
    assert any("ð" in piece for piece in encoding.tokens)
    assert {t.text.strip() for t in tokens if t.end == len(text)} == {"😀"}
    assert sum(t.end == len(text) for t in tokens) > 1
    assert grouped(byte_level, text) == ["unbelievable", "😀"]


def test_ideographs_show_themselves(byte_level):
    text = "东京"
    encoding, tokens = read(byte_level, text)
    assert len(encoding.tokens) == 6
    assert [t.text for t in tokens] == ["东"] * 3 + ["京"] * 3
    assert grouped(byte_level, text) == ["东", "京"]


@pytest.mark.parametrize("fixture", ["byte_level", "word_piece"])
def test_arabic_with_a_latin_word_keeps_the_order(fixture, request):
    assert grouped(request.getfixturevalue(fixture), "هذا هاتف iPhone جديد") == [
        "هذا",
        "هاتف",
        "iPhone",
        "جديد",
    ]


def test_indentation_of_code_keeps_its_mass(byte_level):
    text = "def f(x):\n    return x"
    result = grouped(byte_level, text)
    assert [word for word in result if word.strip()] == ["def", "f", "(", "x", "):", "return", "x"]
    assert any(not word.strip() for word in result)


def test_a_family_of_joined_emoji_is_one_label(byte_level):
    text = "a 👩‍👧!"
    _, tokens = read(byte_level, text)
    assert {t.text.strip() for t in tokens} - {""} == {"a", "👩‍👧", "!"}
    assert grouped(byte_level, text) == ["a", "👩‍👧", "!"]


def test_a_separate_accent_carries_the_whole_letter():
    tokens = label_tokens("cafe\u0301", [(0, 4), (4, 5)], ["cafe", "x"], [0, 0])
    assert [(t.text, t.start, t.end) for t in tokens] == [("cafe\u0301", 0, 5), ("e\u0301", 3, 5)]


def test_tokens_without_text_are_named_by_their_piece():
    tokens = label_tokens("hi", [(0, 0), (0, 0), (0, 2)], ["<s>", "▁", "hi"], [1, 0, 0])
    assert [(t.text, t.special) for t in tokens] == [("<s>", True), ("␣", False), ("hi", False)]


@pytest.mark.parametrize("offset", [(0, 3), (-1, 1), (2, 1)])
def test_offsets_outside_of_the_text(offset):
    with pytest.raises(InputError, match=r"token 0 \('x'\)"):
        label_tokens("hi", [offset], ["x"], [0])


def test_lengths_must_fit():
    with pytest.raises(ShapeError, match="2 offsets, 1 pieces and 1 flags"):
        label_tokens("hi", [(0, 1), (1, 2)], ["x"], [0])


def test_a_blank_without_a_span_is_shown_as_a_blank() -> None:
    tokens = label_tokens("a  b", [(0, 1), (1, 1), (3, 4), (0, 0)], ["a", "Ġ", "Ġb", "</s>"], [0, 0, 0, 1])
    assert [token.text for token in tokens] == ["a", "␣", "b", "</s>"]
