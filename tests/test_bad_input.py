"""What bad input gets: one typed error that says what was expected, what came, and what to do."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import small
import torch
import transformers
from safetensors.torch import load_file, save_file

import attrace
from attrace import errors

TEXT = "The capital of France is Paris"


def test_bad_texts(models: dict[str, Path]) -> None:
    for text in ("", "  \n\t", "\u200b" * 3):
        with pytest.raises(errors.InputError, match="Expected a text"):
            attrace.explain(models["causal" if text.strip() == "" else "classifier"], text)
    with pytest.raises(errors.InputError, match=r"one text as a string.*list"):
        attrace.explain(models["classifier"], [TEXT])


@pytest.mark.parametrize("task", ["classifier", "causal"])
def test_a_text_longer_than_the_context(models: dict[str, Path], task: str) -> None:
    long = "free " * 200 + "prize"
    n = len(transformers.AutoTokenizer.from_pretrained(models[task])(long)["input_ids"])
    with pytest.raises(errors.TextTooLongError, match=rf"at most 64 tokens.*Received: {n} tokens.*--truncate"):
        attrace.explain(models[task], long)
    result = attrace.explain(models[task], long, truncate=True)
    assert len(result.tokens) == 64
    assert str(n) in result.notes[0]
    assert len(result.text) < len(long)  # what was not read is not shown
    assert long.endswith(result.text) == (task == "causal")
    assert max(t.end for t in result.tokens) == len(result.text)
    assert all(t.special or result.text[t.start : t.end] == t.text for t in result.tokens)


def test_roberta_counts_its_positions_from_the_padding_on(tmp_path: Path) -> None:
    from attrace.capture.encoding import context_length
    from attrace.capture.huggingface import Loaded

    config = transformers.RobertaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=66
    )
    tokenizer = small.byte_pairs()
    tokenizer.model_max_length = 10**30
    loaded = Loaded(transformers.RobertaModel(config).eval(), tokenizer, "encoder", "roberta")
    assert context_length(loaded) == 64


def test_bad_targets(models: dict[str, Path]) -> None:
    for task, target, says in (
        ("classifier", "class:eggs", r"'ham', 'spam', 'A~B'.*'eggs'"),
        ("classifier", "class:3", r"'ham', 'spam'"),
        ("classifier", "class:spam~spam", "different"),
        ("classifier", "class:spam~eggs", "'ham', 'spam'"),
        ("classifier", "next:x", r"class:LABEL.*'ham'"),
        ("classifier", "token:1", "class:LABEL"),
        ("causal", "class:spam", "next:TEXT or token:POSITION"),
        ("causal", "token:0", "tokens before it"),
        ("causal", "token:x", "whole number"),
        ("masked", "next:Rome", "one .MASK. to fill"),
        ("encoder", "class:spam", "without a head"),
        ("classifier", "spam", "auto, class:LABEL"),
        ("classifier", "class:", "auto, class:LABEL"),
        ("classifier", "", "auto, class:LABEL"),
    ):
        with pytest.raises(errors.TargetError, match=says):
            attrace.explain(models[task], TEXT, target=target)
    for task in ("causal", "masked", "encoder"):
        for at in (99, -99):
            with pytest.raises(errors.InputError, match=rf"position from 0 to \d+ .*Received: {at}"):
                attrace.explain(models[task], TEXT, target=f"token:{at}")


def test_bad_options(models: dict[str, Path]) -> None:
    for options, says in (
        ({"method": "magic"}, "rollout, .*leave-one-out.*'magic'"),
        ({"layers": [2]}, "layers from 0 to 1"),
        ({"layers": []}, "layer"),
        ({"heads": 4}, "head from 0 to 3"),
        ({"heads": "sum"}, '"mean", "max", "min"'),
        ({"residual": 2}, "residual"),
        ({"discard": 1.0}, "discard"),
        ({"device": "cuda:77"}, "device of this machine: cpu"),
        ({"residual": "0.5"}, "residual"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "a"}, "seed"),
        ({"target": None}, "target as a string"),
    ):
        with pytest.raises(errors.InputError, match=says):
            attrace.explain(models["classifier"], TEXT, **options)


def test_bad_models(models: dict[str, Path], tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        shutil.copytree(models["classifier"], tmp_path / name)
        return tmp_path / name

    def broken_json(name: str, file: str, content: str) -> Path:
        (broken(name) / file).write_text(content)
        return tmp_path / name

    piped = broken("piped")
    os.mkfifo(piped / "z.safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    no_json = broken("no-json")
    (no_json / "config.json").write_text("{")
    no_type = broken("no-type")
    (no_type / "config.json").write_text("[]")
    strange = broken("strange")
    (strange / "config.json").write_text('{"model_type": "unheard-of", "architectures": ["XModel"]}')
    code = broken("code")
    (code / "config.json").write_text('{"model_type": "bert", "auto_map": {"AutoModel": "m.M"}}')
    pickled = broken("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    none = broken("none")
    (none / "model.safetensors").unlink()
    cut = broken("cut")
    (cut / "model.safetensors").write_bytes((models["classifier"] / "model.safetensors").read_bytes()[:-100])
    bomb = broken("bomb")
    (bomb / "model.safetensors").write_bytes((90 * 2**20).to_bytes(8, "little") + b"{" * 100)
    untokenized = broken("untokenized")
    for path in untokenized.glob("tokenizer*"):
        path.unlink()
    headless = broken("headless")
    weights = load_file(headless / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "classifier" not in k}, headless / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    streams = broken("streams")
    settings = json.loads((streams / "config.json").read_text())
    (streams / "config.json").write_text(
        json.dumps({**settings, "architectures": ["BartForSequenceClassification"], "model_type": "bart"})
    )
    questions = broken("questions")
    config = json.loads((questions / "config.json").read_text())
    (questions / "config.json").write_text(json.dumps({**config, "architectures": ["BertForQuestionAnswering"]}))
    file = tmp_path / "file.safetensors"
    file.write_bytes(b"")
    for model, kind, says in (
        (empty, errors.ModelError, "no config.json"),
        (no_json, errors.ModelError, "to be JSON"),
        (no_type, errors.ModelError, "model_type"),
        (strange, errors.ModelError, "unheard-of"),
        (code, errors.UnsafeWeightsError, "auto_map"),
        (pickled, errors.UnsafeWeightsError, r"pytorch_model\.bin.*refuses"),
        (none, errors.ModelError, "no weight file"),
        (cut, errors.ModelError, "transformers can load"),
        (bomb, errors.ModelError, "header length"),
        (untokenized, errors.ModelError, "tokenizer"),
        (headless, errors.ModelError, "would be random"),
        (streams, errors.ModelError, "an encoder and a decoder"),
        (
            broken_json("tokens", "tokenizer.json", '{"model": {"type": "unheard-of"}}'),
            errors.ModelError,
            "Received for",
        ),
        (
            broken_json("type", "config.json", '{"model_type": "bert", "vocab_size": "abc"}'),
            errors.ModelError,
            "vocab_size",
        ),
        (broken_json("deep", "config.json", "[" * 100_000), errors.ModelError, "to be JSON"),
        (
            broken_json("kernel", "config.json", '{"model_type": "bert", "_attn_implementation": "evil/kernel"}'),
            errors.UnsafeWeightsError,
            "evil/kernel",
        ),
        (
            broken_json("shards", "model.safetensors.index.json", '{"weight_map": {"a": "../a.safetensors"}}'),
            errors.UnsafeWeightsError,
            "lies outside",
        ),
        (
            broken_json("listed", "model.safetensors.index.json", '{"weight_map": []}'),
            errors.ModelError,
            "to map weights to files",
        ),
        (piped, errors.ModelError, "to be a file"),
        ("~nobody-of-that-name/x", errors.ModelError, "folder or a hub name"),
        ("x" * 300, errors.ModelError, "folder or a hub name"),
        (questions, errors.ModelError, "BertForQuestionAnswering"),
        (models["attentionless"], errors.CaptureError, "Expected attention in MambaForCausalLM"),
        (tmp_path / "absent", errors.ModelError, "nothing there"),
        (str(tmp_path / "absent"), errors.ModelError, "nothing there"),
        ("./absent", errors.ModelError, "nothing there"),
        (file, errors.ModelError, "a file"),
        ("", errors.ModelError, "folder or a hub name"),
    ):
        with pytest.raises(kind, match=says):
            pytest.fail(f"{model} was explained: {attrace.explain(model, TEXT)}")


@pytest.mark.parametrize("task", ["classifier", "causal", "encoder", "masked"])
def test_nan_in_the_weights_names_layer_and_token(models: dict[str, Path], tmp_path: Path, task: str) -> None:
    folder = tmp_path / task
    shutil.copytree(models[task], folder)
    weights = load_file(folder / "model.safetensors")
    name = next(k for k in weights if ".1." in k and k.endswith(("query.weight", "q_proj.weight")))
    weights[name][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(errors.NonFiniteError, match=rf"layer 1 \(.*\), token 0 \('.*'\).*{name}"):
        attrace.explain(folder, "The capital of [MASK] is Rome")
    weights = load_file(models[task] / "model.safetensors")
    table = next(k for k in weights if k.endswith(("word_embeddings.weight", "embed_tokens.weight")))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT)["input_ids"]
    weights[table][ids[3]] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(errors.NonFiniteError, match=rf"layer 0 \(.*\), token {ids.index(ids[3])} "):
        attrace.explain(folder, TEXT, target="token:3" if task == "masked" else "auto")


@pytest.mark.parametrize("task", ["classifier", "causal", "encoder", "masked"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "part", [("value.weight", "v_proj.weight"), ("intermediate.dense.weight", "mlp.up_proj.weight")]
)
def test_nan_beside_the_attention_names_layer_and_token_too(
    models: dict[str, Path], tmp_path: Path, task: str, layer: int, part: tuple[str, str]
) -> None:
    folder = tmp_path / task
    shutil.copytree(models[task], folder)
    weights = load_file(folder / "model.safetensors")
    name = next(k for k in weights if f".{layer}." in k and k.endswith(part))
    weights[name][:] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(errors.NonFiniteError, match=rf"layer \d.*token 0 \('.*'\).*{name}"):
        attrace.explain(folder, "The capital of [MASK] is Rome")


def test_nan_in_the_head_is_told(models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(models["classifier"], folder)
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(errors.NonFiniteError, match=r"the head, after the last layer.*classifier\.weight"):
        attrace.explain(folder, TEXT)


def test_the_caller_is_told_of_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(errors.MissingDependencyError, match=r"pip install 'attrace\[hf\]'"):
        attrace.explain(None, TEXT)
