"""The seam at transformers' attention registry, with a stand-in kernel and with flex attention."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import stand_in
import tiny
import torch
from tiny import traced
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

import attrace
from attrace.capture.registered import RegisteredAttention, UnreadableError, read
from attrace.capture.registry import call_of
from attrace.errors import CaptureError

FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "bert", "gpt2")


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    with stand_in.registered():
        yield


def real_cells(trace: attrace.Trace, mask: Tensor) -> list[Tensor]:
    """The maps' rows at real tokens."""
    return [op.weights().transpose(1, 2)[mask.bool()] for op in trace.ops]


def against_eager(model: Any, family: str, given: dict[str, Tensor]) -> tuple[attrace.Trace, attrace.Trace]:
    """The model's trace and the eager model's; the model answers as ever, and the maps are the same."""
    with torch.no_grad():
        plain = model(**given)
    trace = traced(model, given)
    assert torch.equal(trace.output[0], plain[0])
    assert {type(op) for op in trace.ops} == {RegisteredAttention}
    expected = traced(tiny.model(family, "eager"), given)
    for map_, other in zip(
        real_cells(trace, given["attention_mask"]), real_cells(expected, given["attention_mask"]), strict=True
    ):
        torch.testing.assert_close(map_, other, atol=1e-5, rtol=0)
    return trace, expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad", [0, 2])
def test_weights_are_those_of_the_eager_model(family: str, pad: int) -> None:
    given = tiny.inputs(pad=pad, side="right" if family == "bert" else "left")
    model = tiny.model(family, stand_in.NAME)
    trace, _ = against_eager(model, family, given)
    short = {round(float(s), 3) for op in trace.ops for s in op.weights().sum(-1).flatten()}
    assert (short <= {0.0, 1.0}) == (family != "gpt_oss")  # sinks take mass; padded queries have none


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_what_the_kernel_does_to_unit_vectors(family: str) -> None:
    """Each row of the map is what comes out where V is the identity."""
    seen: list[Tensor] = []

    def probing(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        unit = torch.eye(key.shape[2], dtype=query.dtype).expand(*key.shape[:2], -1, -1)
        seen.append(stand_in.attend(module, query, key, unit, *args, **kwargs)[0].transpose(1, 2))
        return stand_in.attend(module, query, key, value, *args, **kwargs)

    given = tiny.inputs(pad=2)
    with stand_in.registered(probing):
        trace = traced(tiny.model(family, stand_in.NAME), given)
    for op, expected in zip(trace.ops, seen, strict=True):
        torch.testing.assert_close(op.weights(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(op.weights([1, -1]), expected[:, :, [1, -1]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("how", ["positions", "lengths"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packed_sequences_attend_within_themselves(family: str, how: str) -> None:
    ids = tiny.inputs(batch=1, length=9)["input_ids"]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    if how == "lengths":
        ends = torch.tensor([0, 4, 9], dtype=torch.int32)
        packed |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    model = tiny.model(family, stand_in.NAME)
    trace = traced(model, packed)
    alone = [traced(model, {"input_ids": part}) for part in (ids[:, :4], ids[:, 4:])]
    for op, first, second in zip(trace.ops, *(t.ops for t in alone), strict=True):
        weights = op.weights()
        torch.testing.assert_close(weights[:, :, :4, :4], first.weights(), atol=1e-5, rtol=0)
        torch.testing.assert_close(weights[:, :, 4:, 4:], second.weights(), atol=1e-5, rtol=0)
        assert not weights[:, :, :4, 4:].any()
        assert not weights[:, :, 4:, :4].any()
    assert not trace.rollout(target=8)[:, :4].any()


def test_half_precision_is_recomputed_in_float32() -> None:
    model = tiny.model("mistral", stand_in.NAME, dtype=torch.bfloat16)
    trace = traced(model, tiny.inputs())
    for op in trace.ops:
        assert op.weights().dtype == torch.float32
        torch.testing.assert_close(op.weights().sum(-1), torch.ones(2, 4, 7))


def test_cross_attention_of_an_encoder_decoder() -> None:  # rep-capture-flash-2
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=100, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=6, num_mel_bins=8,
        decoder_start_token_id=2, pad_token_id=0, bos_token_id=1, eos_token_id=99,
    )  # fmt: skip
    given = {"input_features": torch.randn(1, 8, 12), "decoder_input_ids": torch.tensor([[2, 5, 7]])}
    torch.manual_seed(0)
    models = [
        transformers.WhisperForConditionalGeneration._from_config(config, attn_implementation=name).eval()
        for name in (stand_in.NAME, "eager")
    ]
    models[1].load_state_dict(models[0].state_dict())
    kernel, eager = (traced(model, given) for model in models)
    assert [(op.kind, op.shape) for op in kernel.ops] == [
        ("self", (1, 4, 6, 6)), ("self", (1, 4, 3, 3)), ("cross", (1, 4, 3, 6)),
    ]  # fmt: skip
    for op, other in zip(kernel.ops, eager.ops, strict=True):
        torch.testing.assert_close(op.weights(), other.weights(), atol=1e-5, rtol=0)
        torch.testing.assert_close(op.weights().sum(-1), torch.ones(op.shape[:3]))


@pytest.mark.parametrize(("pad", "cache"), [(0, None), (2, None), (2, "static")])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_generation_under_the_kernel(family: str, pad: int, cache: str | None) -> None:
    # Without padding transformers gives a mask to a static cache for functions alone that are named flash.
    options = {"cache_implementation": cache} if cache else {}
    given = tiny.inputs(pad=pad)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    model = tiny.model(family, stand_in.NAME)
    plain = model.generate(**given, **settings)
    with attrace.record(model) as trace:
        ids = model.generate(**given, **settings)
    assert torch.equal(ids, plain)
    with attrace.record(eager := tiny.model(family, "eager")) as expected:
        eager.generate(**given, **settings)
    row = trace.rollout(target=-1)
    torch.testing.assert_close(row, expected.rollout(target=-1), atol=1e-5, rtol=0)
    assert not row[-1, :pad].any()


def test_a_function_that_its_arguments_do_not_explain_is_refused() -> None:
    def biased(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return stand_in.attend(module, query, key.flip(2), value, *args, **kwargs)

    with stand_in.registered(biased), pytest.raises(CaptureError, match=r"layers\.0\.self_attn.*'stand_in'.*its out"):
        traced(tiny.model("llama", stand_in.NAME), tiny.inputs())


def test_what_is_seen_inside_a_function_comes_first() -> None:
    """A user's function around sdpa, which does more than its arguments say."""

    def sharper(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, 3 * query, *args, **kwargs)

    with stand_in.registered(sharper):
        trace = traced(model := tiny.model("llama", stand_in.NAME), tiny.inputs())
        assert len(trace.ops) == 2
        plain = traced(tiny.model("llama", "sdpa"), tiny.inputs())
        assert not torch.allclose(trace.ops[0].weights(), plain.ops[0].weights(), atol=1e-2)
        with torch.no_grad():
            assert torch.equal(trace.output[0], model(**tiny.inputs())[0])


def exponentials(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **rest: Any) -> Any:
    """A user's function that takes four-axis masks and calls no softmax."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * rest["scaling"]
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.pow(torch.e, scores - scores.amax(-1, keepdim=True))
    return ((weights / weights.sum(-1, keepdim=True)).nan_to_num() @ value).transpose(1, 2), None


@pytest.mark.parametrize("mask_of", [sdpa_mask, eager_mask], ids=["booleans", "added"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_masks_of_four_axes(family: str, mask_of: Any) -> None:
    def always(*args: Any, **kwargs: Any) -> Any:
        return mask_of(*args, **{**kwargs, "allow_is_causal_skip": False})

    given = tiny.inputs(pad=2)
    with stand_in.registered(exponentials, masks=always):
        trace = traced(tiny.model(family, stand_in.NAME), given)
    assert {type(op) for op in trace.ops} == {RegisteredAttention}
    expected = traced(tiny.model(family, "eager"), given)
    for map_, other in zip(
        real_cells(trace, given["attention_mask"]), real_cells(expected, given["attention_mask"]), strict=True
    ):
        torch.testing.assert_close(map_, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_table": torch.zeros(1, 1)}, "pages"),
        ({"attention_mask": torch.ones(1, 4, 4)}, r"a mask of Tensor \(1, 4, 4\)"),
        ({"key": torch.randn(1, 3, 4, 8)}, r"query \(2, 4, 4, 8\) and key \(1, 3, 4, 8\)"),
        (dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 4])), "packed sequences in a batch of 2"),
    ],
)
def test_arguments_that_do_not_tell(change: dict[str, Any], reason: str) -> None:
    part = torch.randn(2, 4, 4, 8)
    given = {"query": part, "key": part, "value": part, "is_causal": True, **change}
    call = call_of("some", stand_in.attend, (torch.nn.Module(),), given)
    assert call_of("some", stand_in.attend, (call.module, part, part, part, None, 0.5), {}).dropout == 0.5
    with pytest.raises(UnreadableError, match=reason):
        read(call, name="attention", layer=0, kind="self", values=False)


def test_the_registry_is_put_back() -> None:
    model = tiny.model("llama", stand_in.NAME)
    mapping = AttentionInterface._global_mapping
    before = dict(mapping)
    with attrace.record(model), attrace.record(tiny.model("llama", stand_in.NAME)):
        assert mapping[stand_in.NAME] is not stand_in.attend
        assert {name: f for name, f in mapping.items() if name != stand_in.NAME} == {
            name: f for name, f in before.items() if name != stand_in.NAME
        }
    assert dict(mapping) == before

    def failing(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("the kernel's own")

    with stand_in.registered(failing):
        with pytest.raises(RuntimeError, match="the kernel's own"), attrace.record(model):
            model(**tiny.inputs())
        assert mapping[stand_in.NAME] is failing
        with attrace.record(model):
            mapping[stand_in.NAME] = stand_in.attend  # registered anew meanwhile: that stays
        assert mapping[stand_in.NAME] is stand_in.attend


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_nothing_is_wrapped_where_the_recorder_sees_by_itself(backend: str) -> None:
    before = dict(AttentionInterface._global_mapping)
    with attrace.record(tiny.model("llama", backend)):
        assert dict(AttentionInterface._global_mapping) == before


def test_two_recordings_at_once_and_one_within_the_other() -> None:
    models = [tiny.model("llama", stand_in.NAME, seed=seed) for seed in (0, 1)]
    given = [tiny.inputs(seed=seed) for seed in (1, 2)]
    expected = [traced(model, batch).rollout() for model, batch in zip(models, given, strict=True)]
    with torch.no_grad(), attrace.record(models[0]) as outer:
        with attrace.record(models[1]) as inner:
            models[0](**given[0])
            models[1](**given[1])
        with attrace.record(models[0]) as again:
            pass
    assert (len(outer.ops), len(inner.ops), len(again.ops)) == (2, 2, 0)
    assert torch.equal(outer.rollout(), expected[0])
    assert torch.equal(inner.rollout(), expected[1])

    found: dict[int, Tensor] = {}
    together = threading.Barrier(2, timeout=60)

    def work(number: int) -> None:
        with torch.no_grad(), attrace.record(models[number]) as trace:
            together.wait()
            models[number](**given[number])
            together.wait()
        found[number] = trace.rollout()

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert AttentionInterface._global_mapping[stand_in.NAME] is stand_in.attend


def test_another_thread_is_not_recorded() -> None:
    model = tiny.model("llama", stand_in.NAME)
    with torch.no_grad(), attrace.record(model) as trace:
        thread = threading.Thread(target=lambda: model(**tiny.inputs()))
        thread.start()
        thread.join(timeout=60)
    assert not trace.ops


FLEX = ("llama", "mistral", "gemma2", "bert")
OF_TORCH = [
    "ignore:\\nflex_attention called|flex_attention called:UserWarning",
    "ignore:_compile flag:DeprecationWarning",
    "ignore:`torch.jit.script_method`:DeprecationWarning",
]
"""Warnings of torch and transformers about each other."""


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Flex attention as torch runs it where it cannot compile: slow, and the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings(*OF_TORCH)
@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize("family", FLEX)
def test_flex_attention(family: str, pad: int) -> None:
    given = tiny.inputs(pad=pad, side="right" if family == "bert" else "left")
    model = tiny.model(family, "flex_attention")
    assert isinstance(model, PreTrainedModel)
    trace, expected = against_eager(model, family, given)
    torch.testing.assert_close(trace.rollout(target=3), expected.rollout(target=3), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings(*OF_TORCH)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_generation_under_flex_attention(family: str) -> None:
    given = tiny.inputs(pad=2)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with attrace.record(model := tiny.model(family, "flex_attention")) as trace:
        ids = model.generate(**given, **settings)
    assert torch.equal(ids, model.generate(**given, **settings))
    with attrace.record(eager := tiny.model(family, "eager")) as expected:
        eager.generate(**given, **settings)
    torch.testing.assert_close(trace.rollout(target=-1), expected.rollout(target=-1), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings(*OF_TORCH)
def test_places_that_no_token_has_filled_are_refused() -> None:
    """Uncompiled flex attention reads its place in a static cache after the cache has moved on: a fault of its own."""
    given, model = tiny.inputs(), tiny.model("llama", "flex_attention")
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with attrace.record(model) as trace:
        model.generate(**given, **settings, cache_implementation="static")
    with pytest.raises(CaptureError, match="places of its cache that no token had filled"):
        trace.rollout(target=-1)


@pytest.mark.filterwarnings(*OF_TORCH)
def test_a_direct_call_of_flex_attention_says_why_not() -> None:
    from torch import nn
    from torch.nn.attention.flex_attention import flex_attention

    class Direct(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = flex_attention(x, x, x)
            return found

    with pytest.raises(CaptureError, match=r"direct call of torch's flex_attention in Direct.*AttentionInterface"):
        attrace.trace(Direct(), torch.randn(1, 2, 8, 16))
