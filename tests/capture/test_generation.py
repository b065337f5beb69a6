"""One generation, assembled from its calls: against a full pass over prompt and new tokens."""

from __future__ import annotations

import pytest
import tiny
import torch
from generations import CACHES, DECODING, check_rows, decoder, encoder_decoder, full_pass, generated

import attrace
from attrace.errors import InputError

FAMILIES = [
    ("llama", "sdpa"), ("mistral", "sdpa"), ("mistral", "eager"), ("gpt2", "sdpa"), ("gemma2", "eager"),
    ("gemma3", "sdpa"), ("gpt_oss", "eager"), ("falcon", "sdpa"), ("bloom", "eager"), ("deepseek_v3", "sdpa"),
]  # fmt: skip


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize(("family", "backend"), FAMILIES)
def test_a_generation_is_the_full_pass(family: str, backend: str, decoding: str, cache: str) -> None:
    model = decoder(family, backend)
    trace, output = generated(model, tiny.inputs(), **DECODING[decoding], **CACHES[cache])
    whole, expected = trace.assembled(output), full_pass(model, output.sequences)
    assert whole.ops[0].shape[2] == 7 + 6 - 1
    check_rows(whole, expected)
    for question in ({"target": -1}, {"target": [6, 9]}, {"source": 2}, {"segments": [(0, 4), (4, 12)]}, {}):
        torch.testing.assert_close(whole.rollout(**question), expected.rollout(**question), atol=1e-5, rtol=0)
    assert not whole.rollout(target=7)[:, 8:].any()
    if decoding != "beams":
        assert torch.equal(trace.rollout(target=-1), whole.rollout(target=-1))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("family", "backend"), [("llama", "sdpa"), ("mistral", "eager"), ("gpt2", "sdpa")])
def test_left_padding_and_every_cache(family: str, backend: str, cache: str) -> None:
    model = decoder(family, backend)
    trace, output = generated(model, tiny.inputs(pad=2), do_sample=False, **CACHES[cache])
    expected = full_pass(model, output.sequences, pad=2)
    real = torch.ones(2, 12, dtype=torch.bool)
    real[-1, :2] = False
    check_rows(trace.assembled(output), expected, real)
    row = trace.rollout(target=-1)
    torch.testing.assert_close(row, expected.rollout(target=-1), atol=1e-5, rtol=0)
    assert not row[-1, :2].any()
    torch.testing.assert_close(row.sum(-1), torch.ones(2))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_window_keeps_its_place(cache: str) -> None:
    """Keys that the window has dropped are gone from the cache; those that are left stand where they were."""
    model = decoder("mistral")  # a window of three
    trace, _ = generated(model, tiny.inputs(), do_sample=False, **CACHES[cache])
    steps = [op for op in trace.ops if op.name == trace.ops[0].name]
    assert [op.shape[2:] for op in steps] == [(7, 7)] + [(1, 3)] * 5
    near = (torch.arange(12)[:, None] - torch.arange(12)).abs() < 3
    for op in trace.assembled().ops:
        weights = op.weights()
        assert torch.equal(weights > 0, (near & torch.ones(12, 12).tril().bool()).expand_as(weights))
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 12))


def test_a_prompt_of_four_and_three_new_tokens() -> None:
    model = decoder("llama")
    trace, output = generated(model, tiny.inputs(batch=1, length=4), do_sample=False, max_new_tokens=3)
    assert [op.shape[2:] for op in trace.ops[::2]] == [(4, 4), (1, 5), (1, 6)]
    whole = trace.assembled()
    assert {op.shape for op in whole.ops} == {(1, 4, 6, 6)}
    assert whole.assembled() is whole
    assert torch.equal(trace.assembled(output).rollout(), whole.rollout())
    with pytest.raises(InputError, match=r"target from -6 to 5\. Received: 6, the last token.*Row 5 is the one"):
        trace.rollout(target=6)
    with pytest.raises(InputError, match="the last token of the generation"):
        whole.rollout(source=6)
    with pytest.raises(InputError, match=r"query rows of .* from 0 to 5"):
        whole.ops[0].weights([6])
    torch.testing.assert_close(whole.ops[1].weights([-1, 2]), whole.ops[1].weights()[:, :, [-1, 2]])
    one, _ = generated(model, tiny.inputs(), do_sample=False, max_new_tokens=1)
    assert one.assembled() is one
    assert one.rollout(target=-1).shape == (2, 7)


def test_products_of_an_assembled_operator() -> None:
    model = decoder("mistral")
    trace, _ = generated(model, tiny.inputs(), do_sample=False)
    op = trace.assembled().ops[1]
    dense = op.weights()
    x = torch.randn(2, 12, 3)
    for heads in ("mean", "max", 1, [0.1, 0.2, 0.3, 0.4]):
        fused = {"mean": dense.mean(1), "max": dense.amax(1), "1": dense[:, 1]}.get(
            str(heads), (dense * torch.tensor([0.1, 0.2, 0.3, 0.4])[:, None, None]).sum(1)
        )
        torch.testing.assert_close(op.fused(heads), fused)
        torch.testing.assert_close(op.matvec(x, heads=heads), fused @ x, atol=1e-5, rtol=0)
        torch.testing.assert_close(op.rmatvec(x, heads=heads), fused.mT @ x, atol=1e-5, rtol=0)
    assert op.first_bad_row() is None
    assert trace.assembled().is_causal()


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_and_decoder(name: str, backend: str, decoding: str, cache: str) -> None:  # rep-capture-shape-2
    model, given = encoder_decoder(name, backend)
    settings = {**DECODING[decoding], **CACHES[cache]}
    if name != "whisper":
        settings["forced_eos_token_id"] = None
    trace, output = generated(model, given, **settings)
    whole = trace.assembled(output)
    each = len(output.sequences) // 2
    inputs = {key: value.repeat_interleave(each, 0) for key, value in given.items()}
    with torch.no_grad():
        expected = attrace.trace(model, **inputs, decoder_input_ids=output.sequences[:, :-1], use_cache=False)
    check_rows(whole, expected)
    n, source = output.sequences.shape[1] - 1, 7 if name != "whisper" else 10
    kinds = [(op.kind, op.shape[2:]) for op in whole.ops]
    assert kinds == [("self", (source, source))] * 2 + [("self", (n, n)), ("cross", (n, source))] * 2
    assert whole.streams == expected.streams
    for question in ({"target": -1}, {"target": [1, 3]}, {"source": 2}, {"target": (next(iter(expected.streams)), 3)}):
        ours, theirs = whole.rollout(**question), expected.rollout(**question)
        assert ours.keys() == theirs.keys()
        for stream, found in ours.items():
            torch.testing.assert_close(found, theirs[stream], atol=1e-5, rtol=0)
    shares = whole.rollout(target=-1)
    assert len(shares) == 2
    torch.testing.assert_close(sum(part.sum(-1) for part in shares.values()), torch.ones(len(output.sequences)))


def test_an_encoder_alone_is_recorded_and_other_models_are_not() -> None:
    model, given = encoder_decoder("bart", "sdpa")
    other, _ = encoder_decoder("bart", "sdpa")
    with torch.no_grad(), attrace.record(model) as trace:
        model.get_encoder()(**given)
        other.get_encoder()(**given)
        other(**given, decoder_input_ids=given["input_ids"])
    assert [op.name for op in trace.ops] == [f"model.encoder.layers.{i}.self_attn" for i in (0, 1)]
    eager = encoder_decoder("bart", "eager")
    with torch.no_grad(), attrace.record(eager[0]) as again:
        eager[0].get_encoder()(**given)
    for op, same in zip(trace.ops, again.ops, strict=True):
        torch.testing.assert_close(op.weights()[0], same.weights()[0], atol=1e-5, rtol=0)
