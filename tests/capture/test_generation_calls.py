"""Generations whose calls are not plain steps, and what a recording of them holds and leaves."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import tiny
import torch
import transformers
from generations import CACHES, DECODING, SETTINGS, check_rows, decoder, encoder_decoder, full_pass, generated
from tiny import traced
from torch import Tensor, nn

import attrace
from attrace.errors import CaptureError, InputError, ShapeError


def test_a_model_that_looks_ahead() -> None:
    """Without a cache a bidirectional model makes a full pass for each token: the last is what the last one drew on."""
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, is_decoder=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(config).eval()
    trace, output = generated(model, tiny.inputs(), do_sample=False, use_cache=False)
    with torch.no_grad():
        expected = attrace.trace(model, input_ids=output.sequences[:, :-1])
    check_rows(trace.assembled(output), expected)
    assert not trace.assembled().is_causal()
    trace, output = generated(model, tiny.inputs(), do_sample=False, num_beams=2, use_cache=False)
    with pytest.raises(CaptureError, match=r"BertLMHeadModel, whose tokens look at later ones"):
        trace.assembled(output)


def test_self_and_cross_attention_in_one_call_are_refused() -> None:
    """T5Gemma 2 lays the encoder's keys beside the decoder's, which grow."""

    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, input_ids: Tensor, memory: Tensor, cache: Any) -> Tensor:
            own = self.embed(input_ids)
            keys, _ = cache.update(own[:, None], own[:, None], 0)
            both = torch.cat([keys[:, 0], memory], 1)
            found: Tensor = self.attention(own, both, both, need_weights=False)[0]
            return found

    model, memory, cache = Merged().eval(), torch.randn(1, 4, 8), transformers.DynamicCache()
    with torch.no_grad(), attrace.record(model) as trace:
        for token in range(3):
            model(torch.tensor([[token]]), memory, cache)
    with pytest.raises(
        CaptureError, match=r"attention in call 1 of the generation.*\(1, 2, 1, 6\), after \(1, 2, 1, 5\)"
    ):
        trace.assembled()


def test_models_that_make_nothing_of_their_cache() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    torch.manual_seed(0)
    model = transformers.OpenAIGPTLMHeadModel(config).eval()
    trace, output = generated(model, tiny.inputs(), do_sample=False)
    assert [op.shape[2] for op in trace.ops[::2]] == [7, 8, 9, 10, 11, 12]
    with torch.no_grad():
        check_rows(trace.assembled(output), attrace.trace(model, input_ids=output.sequences[:, :-1]))
    states = transformers.MambaConfig(
        vocab_size=100,
        hidden_size=16,
        num_hidden_layers=1,
        state_size=4,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    trace, _ = generated(transformers.MambaForCausalLM(states).eval(), tiny.inputs(), do_sample=False)
    with pytest.raises(CaptureError, match=r"Expected attention in MambaForCausalLM\. Received: none"):
        trace.rollout()


def test_a_prompt_of_embeddings() -> None:
    model = decoder("llama")
    given = tiny.inputs()
    ids = given.pop("input_ids")
    given["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
    for options in (DECODING["greedy"], DECODING["beams"]):
        trace, output = generated(model, given, **options)
        assert output.sequences.shape[1] == 6  # the new tokens alone
        prompt = ids.repeat_interleave(len(output.sequences) // 2, 0)
        expected = full_pass(model, torch.cat([prompt, output.sequences], 1))
        check_rows(trace.assembled(output), expected)


def test_images_that_are_encoded_before_the_first_call() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8, projection_dim=32),
        text_config=transformers.LlamaConfig(**sizes, vocab_size=100, num_key_value_heads=2),
        image_token_index=99, image_seq_length=4, vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[5, 99, 99, 99, 99, 7, 8]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 16, 16)}
    for options in (DECODING["greedy"], DECODING["sampled"], {**DECODING["greedy"], "max_new_tokens": 1}):
        trace, output = generated(model, given, **options, suppress_tokens=[99])
        copies = len(output.sequences)
        with torch.no_grad():
            pixels = given["pixel_values"].repeat(copies, 1, 1, 1)
            expected = attrace.trace(model, input_ids=output.sequences[:, :-1], pixel_values=pixels, use_cache=False)
        check_rows(trace.assembled(output), expected)
        row, other = (t.rollout(target=-1) for t in (trace, expected))
        torch.testing.assert_close(row["input_ids"], other["input_ids"], atol=1e-5, rtol=0)


def test_a_quantised_cache() -> None:
    """Keys that come back from eight bits differ from step to step: each step keeps those that it used."""
    traces = []
    for backend in ("sdpa", "eager"):
        model = decoder("llama", backend)
        cache = transformers.QuantizedCache(backend="fp8", config=model.config)
        with attrace.record(model) as trace:
            model.generate(**tiny.inputs(), **SETTINGS, do_sample=False, cache=cache)
        traces.append(trace.assembled())
    for op, other in zip(traces[0].ops, traces[1].ops, strict=True):
        torch.testing.assert_close(op.weights(), other.weights(), atol=1e-5, rtol=0)
    plain, _ = generated(decoder("llama"), tiny.inputs(), do_sample=False)
    assert not torch.allclose(traces[0].ops[0].weights(), plain.assembled().ops[0].weights(), atol=1e-4)


ENDS = {"eos_token_id": list(range(0, 100, 3)), "pad_token_id": 0}


def test_rows_of_a_sequence_that_has_ended_are_marked() -> None:
    model = decoder("gpt2", "eager")
    trace, output = generated(model, tiny.inputs(), num_beams=3, do_sample=False, **ENDS)
    whole, expected = trace.assembled(output), full_pass(model, output.sequences)
    op = whole.ops[1]
    assert op.missing.any()
    item, row = (int(i) for i in op.missing.nonzero()[0])
    alive = 1 - item
    assert not op.missing[alive].any()
    check_rows(whole, expected)
    assert op.weights([row])[item].isnan().all()
    assert not op.weights([row - 1]).isnan().any()
    torch.testing.assert_close(whole.rollout(target=row - 1), expected.rollout(target=row - 1), atol=1e-5, rtol=0)
    with pytest.raises(CaptureError, match=rf"token {row} of batch item {item} in .*which no call of the generation"):
        whole.rollout(target=row)
    for found, true in ((whole.rollout(source=2), expected.rollout(source=2)), (whole.rollout(), expected.rollout())):
        assert torch.equal(found.isnan().reshape(2, 12, -1).any(-1), op.missing)
        torch.testing.assert_close(found[~op.missing], true[~op.missing], atol=1e-5, rtol=0)
    with pytest.raises(CaptureError, match=r"all of its rows.*not computed"):
        whole.rollout(target=row - 1, discard=0.2)


def test_a_sequence_that_ended_goes_on_as_padding_without_beams() -> None:
    model = decoder("mistral")
    _, free = generated(model, tiny.inputs(), do_sample=False)
    end = next(int(token) for token in free.sequences[0, 7:-1] if token not in free.sequences[1, 7:])
    trace, output = generated(model, tiny.inputs(), do_sample=False, eos_token_id=end)
    assert (output.sequences[0, 8:] == 0).any()
    check_rows(trace.assembled(output), full_pass(model, output.sequences))


def test_tokens_that_were_cached_before_the_recording_are_missing() -> None:
    model = decoder("llama")
    ids = tiny.inputs(batch=1)["input_ids"]
    with torch.no_grad():
        first = model(input_ids=ids[:, :3], use_cache=True)
        cache = first.cache
        with attrace.record(model) as trace:
            model(input_ids=ids[:, 3:5], cache=cache)
            model(input_ids=ids[:, 5:6], cache=cache)
    whole = trace.assembled()
    assert whole.ops[0].missing.tolist() == [[True] * 3 + [False] * 3]
    weights, expected = whole.ops[0].weights(), traced(model, {"input_ids": ids[:, :6]})
    assert weights[:, :, :3].isnan().all()
    torch.testing.assert_close(weights[:, :, 3:], expected.ops[0].weights()[:, :, 3:], atol=1e-5, rtol=0)
    with pytest.raises(CaptureError, match=r"token 0 of batch item 0.*in the cache before.*record the first call"):
        trace.rollout(target=-1)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_tokens_that_were_proposed_and_taken_back(family: str) -> None:
    model = decoder(family)
    ids = tiny.inputs(batch=1)["input_ids"].repeat(1, 2)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    trace, output = generated(model, given, prompt_lookup_num_tokens=3, do_sample=False)
    before = [call.past for call in trace.calls]
    assert any(op.shape[2] > 1 for op in trace.ops[2:])
    check_rows(trace.assembled(output), full_pass(model, output.sequences))
    assert before == [call.past for call in trace.calls]
    with pytest.raises(CaptureError, match=r"which tokens were kept.*trace\.assembled\(output\)"):
        trace.rollout(target=-1)


def test_beams_need_what_generate_returned() -> None:
    model = decoder("llama")
    trace, output = generated(model, tiny.inputs(), num_beams=3, do_sample=False)
    for call in (lambda: trace.rollout(target=-1), lambda: trace.assembled(output.sequences)):
        with pytest.raises(CaptureError, match=r"beam search.*return_dict_in_generate=True, output_scores=True"):
            call()


def test_a_loop_of_ones_own() -> None:
    """Decoding without generate(): the calls of one cache are one generation; rows that change places are not."""
    model = decoder("llama")
    ids = tiny.inputs()["input_ids"]
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode(), attrace.record(model) as trace:
        for start, stop in ((0, 4), (4, 6), (6, 7)):
            model(input_ids=ids[:, start:stop], cache=cache)
    torch.testing.assert_close(trace.rollout(), traced(model, {"input_ids": ids}).rollout(), atol=1e-5, rtol=0)

    with torch.no_grad(), attrace.record(model) as trace:  # a cache that the model begins itself
        first = model(input_ids=ids[:, :6], use_cache=True)
        model(input_ids=ids[:, 6:], cache=first.cache)
    torch.testing.assert_close(trace.rollout(), traced(model, {"input_ids": ids}).rollout(), atol=1e-5, rtol=0)

    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad(), attrace.record(model) as trace:
        model(input_ids=ids[:, :4], cache=cache)
        model(input_ids=ids[:, 4:6], cache=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        model(input_ids=ids[:, 6:7], cache=cache)
    with pytest.raises(CaptureError, match="rows of the batch changed places"):
        trace.rollout()


def test_calls_that_do_not_belong_together() -> None:
    model = decoder("llama")
    given = tiny.inputs()
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad(), attrace.record(model) as trace:
        for cache in caches:
            model(**given, cache=cache)
    with pytest.raises(CaptureError, match=r"one call.*Received: 2 calls; call 1 does not go on"):
        trace.rollout()
    with attrace.record(model) as trace:
        for _ in range(2):
            model.generate(**given, **SETTINGS, do_sample=False)
    with pytest.raises(CaptureError, match=r"Received: 12 calls; call 6 does not go on"):
        trace.rollout()
    trace, output = generated(model, given, do_sample=False)
    for wrong, error in ((output.sequences[:1], ShapeError), (torch.zeros(2, 40, dtype=torch.long), ShapeError),
                         ("text", InputError), (torch.zeros(3), InputError)):  # fmt: skip
        with pytest.raises(error, match=r"Expected .*Received"):
            trace.assembled(wrong)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_each_key_is_held_once(cache: str) -> None:
    """What a recording holds grows with the tokens, not with their square."""
    model = decoder("llama")
    for count in (8, 32):
        trace, _ = generated(model, tiny.inputs(), do_sample=False, max_new_tokens=count, **CACHES[cache])
        stores = {
            op.key.untyped_storage()._cdata: op.key.untyped_storage().nbytes() for op in trace.ops if op.shape[2] == 1
        }
        one = 2 * 2 * 8 * 4  # bytes of one token's keys in a layer: B, K, D, float32
        assert sum(stores.values()) <= len(model.model.layers) * 4 * (7 + count) * one


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_an_error_in_the_middle_leaves_nothing(backend: str) -> None:
    model = decoder("llama", backend)

    class Stop(transformers.LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            if ids.shape[1] > 9:
                raise RuntimeError("enough")
            return scores

    with pytest.raises(RuntimeError, match="enough"), attrace.record(model) as trace:
        model.generate(**tiny.inputs(), **SETTINGS, do_sample=False, logits_processor=[Stop()])
    assert not model._forward_hooks
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert trace.rollout(target=-1).shape == (2, 10)  # what was seen before is there


def test_the_token_is_explained_without_another_pass() -> None:
    model = decoder("llama")
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    with attrace.record(model) as trace:
        model.generate(**tiny.inputs(), max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    gc.collect()  # the cache is gone, too
    handle = model.register_forward_hook(count)
    rows = [trace.rollout(target=position) for position in range(7, 12)]
    handle.remove()
    assert runs == 0
    for position, row in enumerate(rows, start=7):
        torch.testing.assert_close(row.sum(-1), torch.ones(2))
        assert (row[:, : position + 1] > 0).all()


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_compiled_generation_gives_the_same_ids(name: str) -> None:
    model, given = (decoder("llama"), tiny.inputs()) if name == "llama" else encoder_decoder("t5", "sdpa")
    compiled = transformers.CompileConfig(backend="aot_eager", fullgraph=False)
    compiled._compile_all_devices = True
    settings = {**SETTINGS, "do_sample": False, "cache_implementation": "static", "compile_config": compiled}
    plain = model.generate(**given, **settings)
    for _ in range(2):  # the second time the model has its compiled call already
        with attrace.record(model) as trace:
            output = model.generate(**given, **settings)
        assert torch.equal(output.sequences, plain.sequences)
        ids = output.sequences[:, :-1]
        with torch.no_grad():
            full = {"input_ids": ids} if name == "llama" else {**given, "decoder_input_ids": ids}
            check_rows(trace.assembled(output), attrace.trace(model, **full, use_cache=False))


def test_contributions_of_a_generation_are_refused() -> None:
    model = decoder("gpt2")
    with attrace.record(model, values=True) as trace:
        model.generate(**tiny.inputs(), **SETTINGS, do_sample=False)
    with pytest.raises(CaptureError, match=r"contributions.*one call.*trace\.rollout"):
        trace.contributions()
    with pytest.raises(CaptureError, match=r"contributions.*one call.*trace\.rollout"):
        trace.assembled().contributions()
