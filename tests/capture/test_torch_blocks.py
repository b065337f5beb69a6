"""Attention blocks of tiny random models of each known family, against the models' own outputs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from attrace import record
from attrace.capture.families import FAMILIES, path_from
from attrace.capture.trace import Trace
from attrace.errors import CaptureError

WIDTH = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 24}
BERT = {**WIDTH, "vocab_size": 40, "max_position_embeddings": 40, "type_vocab_size": 2, "pad_token_id": 0}
LLAMA = {**WIDTH, "vocab_size": 40, "num_key_value_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "albert": {**BERT, "embedding_size": 12},
    "bert": BERT,
    "camembert": BERT,
    "distilbert": {"dim": 16, "n_heads": 4, "n_layers": 3, "hidden_dim": 24, "vocab_size": 40},
    "electra": {**BERT, "embedding_size": 12},
    "gpt2": {"n_embd": 16, "n_head": 4, "n_layer": 3, "vocab_size": 40, "n_positions": 40},
    "llama": {**LLAMA, "attention_bias": True},
    "mistral": LLAMA,
    "mpnet": BERT,
    "qwen2": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 8},
    "roberta": BERT,
    "xlm-roberta": BERT,
}
# The module whose output is the block's, or in pre-norm families the one whose input is, from the attention
# module.
READS = {
    "albert": ("out", ".LayerNorm"),
    "distilbert": ("out", "..sa_layer_norm"),
    "gpt2": ("in", "..ln_2"),
    "mpnet": ("out", "..LayerNorm"),
    **dict.fromkeys(("bert", "camembert", "electra", "roberta", "xlm-roberta"), ("out", "..output")),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("in", "..post_attention_layernorm")),
}


def make(family: str, backend: str = "sdpa", **more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES[family], **more})
    if family == "mpnet":  # has one attention implementation of its own
        backend = "eager"
    model = AutoModel.from_config(config, attn_implementation=backend).eval()
    # As made, biases are zero and norms are one: nothing would be tested.
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.requires_grad_(False)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 40, shape, generator=torch.Generator().manual_seed(seed))


def traced(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Trace:
    with record(model, values=True) as trace:
        model(input_ids=ids, attention_mask=mask)
    return trace


def outputs_of(model: nn.Module, family: str, ids: Tensor, names: list[str]) -> list[Tensor]:
    """What the model itself computed as each attention block's output, in order."""
    where, path = READS[family]
    found: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found.append(args[0] if where == "in" else output)

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(keep) for name in {path_from(n, path) for n in names}]
    model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return found


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_the_recorded_parts_give_the_blocks_own_output(family: str, backend: str) -> None:
    model, ids = make(family, backend), tokens(2, 9)
    trace = traced(model, ids).contributions()
    expected = outputs_of(model, family, ids, [op.name for op in trace.ops])
    assert len(expected) == len(trace.ops) == 3
    for op, output in zip(trace.ops, expected, strict=True):
        found = op.output(torch.arange(9))
        assert float((found - output).abs().max()) < 1e-5 * max(1.0, float(output.abs().max()))


def test_rows_are_shares_of_one_and_differ_from_attention(family: str) -> None:
    trace = traced(make(family), tokens(2, 9))
    for op, plain in zip(trace.contributions().ops, trace.ops, strict=True):
        weights = op.weights()
        assert weights.shape == (2, 1, 9, 9)
        assert float(weights.min()) >= 0
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1, 9), atol=1e-6, rtol=0)
        assert float((weights - plain.fused()[:, None]).abs().max()) > 0.01


def test_eager_and_sdpa_give_the_same(family: str) -> None:
    if family == "mpnet":
        pytest.skip("mpnet has one attention implementation")
    ids = tokens(1, 9)
    first, second = (traced(make(family, b), ids).contributions() for b in ("sdpa", "eager"))
    for a, b in zip(first.ops, second.ops, strict=True):
        assert float((a.weights() - b.weights()).abs().sum(-1).max()) < 1e-5


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_no_real_row(family: str, side: str) -> None:
    if side == "left" and family not in ("llama", "mistral", "qwen2", "qwen3"):
        pytest.skip("positions are absolute: left padding moves the tokens")
    model, ids = make(family), tokens(1, 6)
    filler = torch.zeros(1, 3, dtype=torch.long)
    real, pad = torch.ones(1, 6, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)
    padded = torch.cat([ids, filler] if side == "right" else [filler, ids], 1)
    mask = torch.cat([real, pad] if side == "right" else [pad, real], 1)
    at = slice(0, 6) if side == "right" else slice(3, 9)
    alone = traced(model, ids).contributions()
    beside = traced(model, padded, mask).contributions()
    others = [i for i in range(9) if not at.start <= i < at.stop]
    for a, b in zip(alone.ops, beside.ops, strict=True):
        rows = b.weights()[:, :, at]
        assert float((rows[..., at] - a.weights()).abs().sum(-1).max()) < 1e-5
        assert float(rows[..., others].abs().max()) == 0
    row = beside.rollout(target=at.stop - 1, residual=0.0)[:, at]
    torch.testing.assert_close(row, alone.rollout(target=5, residual=0.0), atol=1e-5, rtol=0)


def test_a_batch_equals_its_rows(family: str) -> None:
    model, ids = make(family), tokens(3, 7)
    together = traced(model, ids).contributions()
    for i in range(3):
        alone = traced(model, ids[i : i + 1]).contributions()
        for a, b in zip(together.ops, alone.ops, strict=True):
            assert float((a.weights()[i] - b.weights()[0]).abs().sum(-1).max()) < 1e-5


def test_the_output_is_bit_identical_and_nothing_stays(family: str) -> None:
    model, ids = make(family), tokens(2, 9)
    before = model(input_ids=ids)[0]
    with record(model, values=True) as trace:
        during = model(input_ids=ids)[0]
    assert torch.equal(before, during)
    assert torch.equal(before, model(input_ids=ids)[0])
    assert trace.family == family
    assert hooks(model) == []


def hooks(model: nn.Module) -> list[str]:
    return [
        name
        for name, m in model.named_modules()
        if m._forward_pre_hooks or m._forward_hooks or m._forward_pre_hooks_with_kwargs
    ]


def test_half_precision_is_computed_in_float32(family: str) -> None:
    model, ids = make(family).to(torch.bfloat16), tokens(1, 9)
    trace = traced(model, ids).contributions()
    assert {op.weights().dtype for op in trace.ops} == {torch.float32}
    expected = outputs_of(model, family, ids, [op.name for op in trace.ops])
    for op, output in zip(trace.ops, expected, strict=True):
        found = op.output(torch.arange(9))
        assert float((found - output.float()).abs().max()) < 0.05 * float(output.abs().max())
    row = trace.rollout(target=8, residual=0.0)
    torch.testing.assert_close(row.sum(), torch.tensor(1.0), atol=1e-5, rtol=0)


def test_grouped_heads_are_recorded_as_they_are() -> None:
    assert {op.value.shape for op in traced(make("llama"), tokens(1, 9)).ops} == {(1, 2, 9, 4)}


def test_a_shared_layer_has_its_own_input_at_every_call() -> None:
    ops = traced(make("albert"), tokens(1, 9)).ops
    assert len({op.name for op in ops}) == 1
    assert not torch.equal(ops[0].block.residual, ops[1].block.residual)


def test_a_wrapped_model_is_known_by_its_parts() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make("bert")

        def forward(self, ids: Tensor) -> Any:
            return self.inner(ids)

    model = Wrapper()
    with record(model, values=True) as trace:
        model(tokens(1, 5))
    assert trace.contributions().ops[0].weights().shape == (1, 1, 5, 5)


def test_an_input_given_by_keyword_is_seen() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = make("bert")

        def forward(self, x: Tensor) -> Any:
            return self.bert.encoder.layer[0].attention(hidden_states=x)[0]

    model, x = Caller(), torch.randn(1, 5, 16)
    with record(model, values=True) as trace:
        expected = model(x)
    (op,) = trace.contributions().ops
    torch.testing.assert_close(op.output(torch.arange(5)), expected, atol=1e-5, rtol=0)


def test_a_block_whose_input_a_hook_changes_is_seen_as_changed() -> None:
    model, ids = make("llama"), tokens(1, 9)
    handle = model.layers[1].register_forward_pre_hook(lambda _module, args: (args[0] + 1, *args[1:]))
    trace = traced(model, ids).contributions()
    expected = outputs_of(model, "llama", ids, [op.name for op in trace.ops])
    handle.remove()
    for op, output in zip(trace.ops, expected, strict=True):
        torch.testing.assert_close(op.output(torch.arange(9)), output, atol=1e-4, rtol=1e-5)


def test_hooks_go_after_an_error_too() -> None:
    model = make("llama")
    with pytest.raises(IndexError), record(model, values=True):
        model(input_ids=torch.tensor([[99]]))
    assert hooks(model) == []


@pytest.fixture
def busy() -> Iterator[tuple[nn.Module, threading.Event, threading.Event, list[Any]]]:
    """A model that another thread runs in the middle of a recording."""
    model = make("bert")
    start, done, results = threading.Event(), threading.Event(), []

    def work() -> None:
        start.wait(10)
        results.append(model(input_ids=tokens(1, 9, seed=5))[0])
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    yield model, start, done, results
    start.set()
    thread.join()


def test_another_threads_inputs_are_not_mixed_in(busy: Any) -> None:
    model, start, done, results = busy
    ids = tokens(1, 9)
    expected = [op.weights() for op in traced(model, ids).contributions().ops]

    def let_it_run(*_args: Any) -> None:  # between the block's entry and its attention
        if not done.is_set() and threading.current_thread() is threading.main_thread():
            start.set()
            assert done.wait(10)

    handle = model.encoder.layer[1].attention.self.query.register_forward_hook(let_it_run)
    trace = traced(model, ids)
    handle.remove()
    assert len(results) == 1
    for op, weights in zip(trace.contributions().ops, expected, strict=True):
        assert torch.equal(op.weights(), weights)


def test_an_unknown_family_is_an_error_that_says_what_to_do() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_neox", **{**WIDTH, "vocab_size": 40})
    trace = traced(AutoModel.from_config(config).eval(), tokens(1, 5))
    with pytest.raises(CaptureError) as caught:
        trace.contributions()
    for part in ("gpt_neox", "bert", "llama", "leave-one-out", "families.py"):
        assert part in str(caught.value)


def test_a_trace_without_values_is_an_error_that_says_what_to_do() -> None:
    model = make("bert")
    with record(model) as trace:
        model(input_ids=tokens(1, 5))
    with pytest.raises(CaptureError, match="values=True"):
        trace.contributions()


def test_a_projection_that_is_not_plain_is_refused() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.weight, self.bias = base, base.weight, base.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 1

    model = make("llama")
    model.layers[1].self_attn.o_proj = Adapter(model.layers[1].self_attn.o_proj)
    with pytest.raises(CaptureError, match=r"layers\.1\.self_attn"):
        traced(model, tokens(1, 5)).contributions()


def test_weights_that_were_written_to_since_are_an_error() -> None:
    model = make("bert")
    trace = traced(model, tokens(1, 5)).contributions()
    model.encoder.layer[0].attention.output.dense.weight.mul_(2)
    with pytest.raises(CaptureError, match="written to since"):
        trace.ops[0].weights()


def test_long_inputs_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from attrace.ops.attention import rows
    from attrace.ops.contributions import rows as tiles

    trace = traced(make("llama"), tokens(2, 33)).contributions()
    whole = [op.weights() for op in trace.ops]
    monkeypatch.setattr(rows, "BLOCK_ELEMENTS", 1000)
    monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", 1000)
    for op, weights in zip(trace.ops, whole, strict=True):
        torch.testing.assert_close(op.weights(), weights, atol=1e-6, rtol=0)
        torch.testing.assert_close(op.matvec(torch.eye(33).expand(2, 33, 33)), weights[:, 0], atol=1e-6, rtol=0)


def test_the_table_is_tested_whole() -> None:
    assert set(SIZES) == set(READS) == set(FAMILIES)


def test_what_was_written_to_between_the_run_and_the_question_is_an_error_too() -> None:
    model = make("bert")
    trace = traced(model, tokens(1, 5))
    model.encoder.layer[0].attention.output.dense.weight.mul_(2)
    with pytest.raises(CaptureError, match="written to since"):
        trace.contributions().ops[0].weights()


@pytest.mark.parametrize("part", ["query", "key"])
def test_a_query_or_key_that_was_written_to_since_is_an_error(part: str) -> None:
    class Overwriting(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            q, k = q * 1, k * 1
            out = nn.functional.scaled_dot_product_attention(q, k, k)
            (q if part == "query" else k).add_(1)
            return out

    model = Overwriting()
    with record(model) as trace:
        model(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4))
    with pytest.raises(CaptureError, match="written to since"):
        trace.ops[0].weights()
