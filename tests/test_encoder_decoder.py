"""Texts that an encoder-decoder reads: the first token that it writes, and what of the text it drew on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
import transformers

import attrace
from attrace import api, errors

TEXT = "The capital of France is Paris"
KINDS = ("seq2seq", "seq2seq-bart")


def plain(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def whole(result: api.Explanation) -> float:
    return float(result.scores.sum()) + result.lost_mass + result.sink_mass


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_is_the_first_token_that_the_model_writes(models: dict[str, Path], kind: str) -> None:
    result = attrace.explain(models[kind], TEXT)
    model, tokenizer = plain(models[kind])
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=1, do_sample=False, num_beams=1)
    assert (result.target.kind, result.target.index) == ("next", int(written[0, 1]))
    assert (result.method, result.signed) == ("leave-one-out", True)
    assert result.tokens[-1].special
    assert result.tokens[-1].text.startswith("decoder ")
    assert [w.text for w in result.words] == TEXT.split()


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_is_the_decoders_row_over_both_streams(models: dict[str, Path], kind: str) -> None:
    model, tokenizer = plain(models[kind])
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    start = torch.tensor([[model.config.decoder_start_token_id]])
    with torch.no_grad():
        own = model(input_ids=ids, decoder_input_ids=start, output_attentions=True)
    n = ids.shape[1]
    encoder = np.eye(n)
    for layer in own.encoder_attentions:
        encoder = 0.5 * encoder + 0.5 * layer[0].mean(0).double().numpy() @ encoder
    kept, text = 1.0, np.zeros(n)  # a decoder of one token: its own attention changes nothing
    for layer in own.cross_attentions:
        kept, text = 0.5 * kept, 0.5 * text + 0.5 * layer[0].mean(0).double().numpy()[0] @ encoder
    result = attrace.explain(models[kind], TEXT, method="rollout")
    np.testing.assert_allclose(result.scores, [*text, kept], atol=1e-5)
    assert whole(result) == pytest.approx(1, abs=1e-5)
    assert any("25.0 % of the mass stays with the decoder's own tokens" in note for note in result.notes)
    last = attrace.explain(models[kind], TEXT, method="last-layer")
    np.testing.assert_allclose(last.scores[:n], own.cross_attentions[-1][0].mean(0)[0], atol=1e-5)
    assert last.scores[n] == 0
    assert not any("stays with" in note for note in last.notes)


@pytest.mark.parametrize("kind", KINDS)
def test_leave_one_out_runs_the_model_on_the_rest(models: dict[str, Path], kind: str) -> None:
    result = attrace.explain(models[kind], TEXT, method="leave-one-out")
    model, tokenizer = plain(models[kind])
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    start = torch.tensor([[model.config.decoder_start_token_id]])

    def score(given: torch.Tensor) -> float:
        with torch.no_grad():
            logits = model(input_ids=given, decoder_input_ids=start).logits[0, -1]
        return float(logits.log_softmax(-1)[result.target.index])

    for token in (0, 3):
        rest = torch.cat([ids[:, :token], ids[:, token + 1 :]], dim=1)
        assert result.scores[token] == pytest.approx(score(ids) - score(rest), abs=1e-5)
    assert result.scores[-1] == 0


def test_targets_and_options(models: dict[str, Path], tmp_path: Path) -> None:
    folder = models["seq2seq-bart"]
    contrast = attrace.explain(folder, TEXT, target="next:a~of")
    assert (contrast.target.label.strip(), contrast.target.contrast.strip()) == ("a", "of")
    assert contrast.unit == "drop in log-odds"
    for target in ("class:spam", "token:1"):
        with pytest.raises(errors.TargetError, match=r"auto or next:TEXT of an encoder-decoder"):
            attrace.explain(folder, TEXT, target=target)
    shown = attrace.explain(folder, TEXT, residual=0.2)
    assert shown.method == "rollout"
    assert any("does not heed residual" in note for note in shown.notes)
    with pytest.raises(errors.CaptureError, match="family bart"):
        attrace.explain(folder, TEXT, method="alti")
    shown.save(tmp_path / "a.json")
    np.testing.assert_allclose(attrace.load(tmp_path / "a.json").scores, shown.scores)


def test_a_first_token_that_is_forced_is_not_the_answer(models: dict[str, Path]) -> None:
    model, tokenizer = plain(models["seq2seq-bart"])
    model.generation_config.forced_bos_token_id = 4
    result = attrace.explain(model, TEXT, processor=tokenizer, method="rollout")
    written = model.generate(tokenizer(TEXT, return_tensors="pt").input_ids, max_new_tokens=2, num_beams=1)
    assert written[0, 1] == 4
    assert result.target.index == int(written[0, 2])
    assert [t.text.startswith("decoder ") for t in result.tokens][-2:] == [True, True]
    assert whole(result) == pytest.approx(1, abs=1e-5)


def test_objects_and_what_is_no_text_model(models: dict[str, Path]) -> None:
    model, tokenizer = plain(models["seq2seq"])
    result = attrace.explain(model, TEXT, processor=tokenizer, method="rollout")
    np.testing.assert_allclose(
        result.scores, attrace.explain(models["seq2seq"], TEXT, method="rollout").scores, atol=1e-5
    )
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    with pytest.raises(errors.ModelError, match="the token that its decoder starts with"):
        attrace.explain(model, TEXT, processor=tokenizer)
    import tiny_streams

    for family, says in (("whisper", "reads text alone"), ("llava", "reads text alone")):
        with pytest.raises(errors.ModelError, match=says):
            attrace.explain(tiny_streams.model(family), TEXT, processor=tokenizer)
    body = transformers.BartModel(tiny_streams.model("bart").config)
    with pytest.raises(errors.ModelError, match="an encoder and a decoder with another head"):
        attrace.explain(body, TEXT, processor=tokenizer)


def test_a_sick_decoder_is_named(tmp_path: Path) -> None:
    folder = small.save("seq2seq", tmp_path)
    model, tokenizer = plain(folder)
    model.decoder.block[1].layer[1].EncDecAttention.q.weight.data[0, 0] = float("nan")
    with pytest.raises(errors.NonFiniteError, match=r"EncDecAttention\), token \d+ \('decoder .*EncDecAttention\.q"):
        attrace.explain(model, TEXT, processor=tokenizer)
