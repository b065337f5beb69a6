"""What models get that have no attention, or only here and there, or attention that cannot be shown as maps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import small
import tiny
import torch
import transformers
from tiny import traced
from torch import Tensor, nn

import attrace
from attrace.capture import memory
from attrace.capture.torch_ops import QueryKeyAttention
from attrace.errors import AttraceError, AttraceWarning, CaptureError, MemoryLimitError, NonFiniteError

_BASE = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 128,
}  # fmt: skip
_SHORT = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2}


def built(config: str, model: str, settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return made.eval()


def ids(length: int = 8) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(5, 95, (2, length), generator=torch.Generator().manual_seed(1))}


NONE: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], str]] = {
    "mamba": (
        lambda: built("MambaConfig", "MambaForCausalLM", _SHORT), ids(),
        r"2 layers backbone\.layers.*MambaMixer",
    ),
    "mamba2": (
        lambda: built(
            "Mamba2Config", "Mamba2ForCausalLM",
            {**_SHORT, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
        ),
        ids(), "Mamba2Mixer",
    ),
    "rwkv": (lambda: built("RwkvConfig", "RwkvForCausalLM", _SHORT), ids(), "RwkvBlock with RwkvSelfAttention"),
    "fnet": (
        lambda: built("FNetConfig", "FNetModel", {**_SHORT, "intermediate_size": 64}), ids(), "FNetFourierTransform",
    ),
    "reformer": (
        lambda: built(
            "ReformerConfig", "ReformerModel",
            {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "attention_head_size": 8,
             "feed_forward_size": 32, "attn_layers": ["local", "lsh"], "axial_pos_embds": False,
             "max_position_embeddings": 64, "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4,
             "num_buckets": 4, "is_decoder": False},
        ),
        ids(16), "LocalSelfAttention.*hashed layers",
    ),
    "lstm": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)), {"input": torch.randn(2, 5, 8)},
        "at its top: Linear, LSTM",
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU()), nn.Flatten()),
        {"input": torch.randn(1, 3, 9)}, "2 layers 0: Conv1d, ReLU",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The '.*' model is deprecated")
@pytest.mark.parametrize("name", NONE)
def test_a_model_without_attention_is_an_error_that_says_what_it_has(name: str) -> None:
    build, inputs, said = NONE[name]
    with pytest.raises(CaptureError, match=rf"(?s)Expected attention in .* Received: none.*{said}"):
        traced(build(), inputs)


def test_a_model_without_parts_is_an_error_too() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(-1)

    with pytest.raises(CaptureError, match=r"Received: none \(1 calls of the model.*multiplies values\)\. Call"):
        attrace.trace(Plain(), torch.randn(2, 3, 4))


_MAMBA = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
HYBRIDS: dict[str, tuple[str, str, dict[str, Any], list[int], int, str]] = {
    "jamba": (
        "JambaConfig", "JambaForCausalLM",
        {**_BASE, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False,
         "mamba_d_state": 4, "mamba_dt_rank": 4},
        [1, 3], 4, "JambaMamba",
    ),
    "bamba": ("BambaConfig", "BambaForCausalLM", {**_BASE, **_MAMBA, "attn_layer_indices": [1]}, [1], 4, "BambaMixer"),
    "qwen3-next": (
        "Qwen3NextConfig", "Qwen3NextForCausalLM",
        {**_BASE, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "linear_num_value_heads": 4,
         "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16},
        [3], 4, "Qwen3NextGatedDeltaNet",
    ),
    "recurrent-gemma": (
        "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM",
        {**_BASE, "num_hidden_layers": 3, "head_dim": 8, "lru_width": 32, "attention_window_size": 16},
        [2], 3, "RecurrentGemmaRecurrentBlock",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_says_how_much_of_its_depth_was_seen(name: str) -> None:
    config, model, settings, seen, depth, kind = HYBRIDS[name]
    with pytest.warns(AttraceWarning) as told:
        trace = traced(built(config, model, settings), ids())
    assert [int(op.name.split(".")[2]) for op in trace.ops] == seen
    assert trace.depth == depth
    others = [i for i in range(depth) if i not in seen]
    assert [name.split(" ")[0] for name in trace.without] == [f"model.layers.{i}" for i in others]
    assert all(kind in name for name in trace.without)
    assert trace.notes == trace.gaps
    assert [str(w.message) for w in told] == [f"{model}: {trace.gaps[0]}"]
    assert f"in {len(seen)} of {depth} layers" in trace.gaps[0]
    assert told[0].filename == tiny.__file__  # the line that called attrace.trace
    row = trace.rollout(target=-1)
    torch.testing.assert_close(row.sum(-1), torch.ones(2), atol=1e-5, rtol=0)


def test_an_explanation_of_a_hybrid_says_so_too() -> None:
    config, name, settings, *_ = HYBRIDS["jamba"]
    tokenizer = small.byte_pairs()
    model = built(config, name, {**settings, "vocab_size": len(tokenizer)})
    told = "Attention was seen in 2 of 4 layers"
    for method, expected in (("last-layer", True), ("leave-one-out", False)):  # the latter asks the whole model
        result = attrace.explain(model, "The capital of France is", processor=tokenizer, method=method)
        assert any(told in note for note in result.notes) is expected


def test_layers_that_were_not_run_are_no_gap() -> None:
    model = tiny.model("bert")
    encoder = model.bert.encoder
    dropped, encoder.layer = encoder.layer, nn.ModuleList([encoder.layer[0]])
    assert not traced(model, tiny.inputs()).gaps
    encoder.layer = dropped

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = dropped

        def forward(self, x: Tensor) -> Tensor:
            result = self.layers[0](x)
            return result[0] if isinstance(result, tuple) else result

    trace = traced(Half(), {"x": torch.randn(1, 5, 32)})
    assert [op.name for op in trace.ops] == ["layers.0.attention.self"]
    assert not trace.gaps


def test_a_stem_and_a_head_are_no_gaps_but_a_layer_between_is() -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]

    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.along = nn.Conv1d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.along(x.mT).mT

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attends()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = nn.Sequential(Mixes(), Wrapped(), nn.LayerNorm(8), Wrapped(), nn.Sequential(nn.Linear(8, 8)))
    assert not attrace.trace(model, torch.randn(1, 5, 8)).gaps
    model.insert(2, Mixes())
    with pytest.warns(AttraceWarning, match=r"2 of 3 layers.*: 2 \(Conv1d\)\."):
        attrace.trace(model, torch.randn(1, 5, 8))


SPARSE: dict[str, tuple[str, str, dict[str, Any], int, str]] = {
    "longformer": (
        "LongformerConfig", "LongformerModel", {**_BASE, "attention_window": [4] * 4}, 8,
        r"encoder\.layer\.0\.attention\.self \(a map of shape \(2, 8, 4, 5\), padded or joined before its values\)",
    ),
    "bigbird": (
        "BigBirdConfig", "BigBirdModel",
        {**_BASE, "attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}, 64,
        r"encoder\.layer\.0\.attention\.self \(a map of shape",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("name", SPARSE)
def test_attention_sparse_by_construction_is_an_error_with_a_reason(name: str) -> None:
    config, model, settings, length, said = SPARSE[name]
    with pytest.raises(CaptureError, match=said):
        traced(built(config, model, settings), ids(length))


def test_a_model_whose_encoder_is_sparse_is_refused() -> None:
    """Its decoder could be read, but a picture without the encoder's own mixing would mislead."""
    settings = {
        "vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "attention_window": 4,
    }  # fmt: skip
    with pytest.raises(CaptureError, match=r"encoder\.layers\.0\.self_attn\.longformer_self_attn \(.*padded or joined"):
        traced(built("LEDConfig", "LEDModel", settings), ids())


def test_two_calls_in_one_recording_are_warned_of_once() -> None:
    model = built("LlamaConfig", "LlamaModel", {**_BASE, "attention_dropout": 0.1}).train()

    def twice() -> None:
        with attrace.record(model):
            for length in (8, 12):
                model(**ids(length))

    with pytest.warns(AttraceWarning, match="dropout was on") as told:
        twice()
    assert len(told) == 1
    assert told[0].filename == __file__


def test_heads_mixed_after_the_softmax_are_missing_and_named() -> None:
    class Talking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            weights = (x @ x.mT).softmax(-1)
            return self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous() @ x

    with pytest.raises(CaptureError, match=r"Talking \(a softmax of shape \(2, 2, 5, 5\)\).*heads are mixed"):
        attrace.trace(Talking(), torch.randn(2, 2, 5, 8))

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.talking = Talking()

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, self.talking(x))

    with pytest.warns(AttraceWarning, match=r"is missing: talking \(a softmax of shape \(2, 2, 5, 5\)\)"):
        attrace.trace(Partly(), torch.randn(2, 2, 5, 8))


# Training mode


@pytest.mark.parametrize(("family", "backend"), [("bert", "sdpa"), ("bert", "eager"), ("gpt2", "sdpa")])
def test_a_model_in_training_mode_is_warned_of_and_read_before_dropout(family: str, backend: str) -> None:
    model, inputs = tiny.model(family, backend), tiny.inputs(pad=2)
    expected = traced(model, inputs).ops[0].weights()
    model.train()
    before = model.bert.embeddings.dropout if family == "bert" else model.transformer.drop
    before.p = 0.0  # the first layer then reads what it reads in evaluation mode
    with pytest.warns(AttraceWarning, match=r"training mode: dropout was on.*weights are those before dropout"):
        trace = traced(model, inputs)
    assert trace.dropout
    assert model.training
    torch.testing.assert_close(trace.ops[0].weights(), expected, atol=1e-6, rtol=0)
    # rep-rollout-softmaxpoint-1: two calls agree, rows sum to one
    with pytest.warns(AttraceWarning):
        torch.testing.assert_close(traced(model, inputs).ops[0].weights(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(expected[0].sum(-1), torch.ones(expected.shape[1:-1]))  # the item without padding


def test_training_mode_without_dropout_needs_no_warning() -> None:
    model = tiny.model("llama").train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttraceWarning)
        assert not traced(model, tiny.inputs()).dropout


@pytest.mark.parametrize("how", ["inference", "no_grad", "grad"])
def test_dropout_as_a_number_is_seen_in_every_mode(how: str) -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    x = torch.randn(1, 2, 5, 8)
    modes = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}
    with modes[how](), pytest.warns(AttraceWarning, match="dropout was on"):
        trace = attrace.trace(Plain(), x)
    torch.testing.assert_close(trace.ops[0].weights(), (x @ x.mT * 8**-0.5).softmax(-1))


def test_a_warning_made_an_error_leaves_nothing_and_a_failing_model_is_not_warned_of() -> None:
    from leftovers import leftovers

    model = tiny.model("bert").train()
    before = leftovers(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttraceWarning)
        with pytest.raises(AttraceWarning):
            traced(model, tiny.inputs())
        with pytest.raises(IndexError):
            traced(model, {"input_ids": torch.tensor([[1000]])})
    assert leftovers(model) == before


# Infinities and rows with nothing to attend to


class Logits(nn.Module):
    """Attention with the given bias on its logits, fused or as a plain softmax."""

    def __init__(self, bias: Tensor, *, fused: bool) -> None:
        super().__init__()
        self.bias, self.fused = bias, fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.bias)
        return (x @ x.mT * x.shape[-1] ** -0.5 + self.bias).softmax(-1) @ x


@pytest.mark.parametrize("fused", [True, False])
def test_an_infinite_logit_is_an_error_that_names_layer_and_token(fused: bool) -> None:
    bias = torch.zeros(5, 5)
    bias[3, 1] = torch.inf
    trace = attrace.trace(Logits(bias, fused=fused), torch.randn(1, 2, 5, 8))
    for read in (trace.ops[0].weights, trace.rollout, lambda: trace.ops[0].matvec(torch.ones(1, 5))):
        with pytest.raises(NonFiniteError, match=r"layer 0 \(Logits\), token 3, batch item 0"):
            read()
    assert trace.ops[0].weights([0, 4]).isfinite().all()


def test_an_infinite_query_is_an_error_too() -> None:
    x = torch.randn(1, 2, 5, 8)
    x[0, 1, 2, 0] = torch.inf
    trace = attrace.trace(Logits(torch.zeros(5, 5), fused=True), x)
    with pytest.raises(NonFiniteError, match="layer 0"):
        trace.ops[0].weights()


def test_a_half_precision_softmax_that_overflowed_is_read_as_it_was() -> None:
    x = torch.full((1, 2, 5, 64), 60.0, dtype=torch.float16)  # logits of 230,400 / 8
    trace = attrace.trace(Logits(torch.zeros(5, 5, dtype=torch.float16), fused=True), x)
    torch.testing.assert_close(trace.ops[0].weights(), torch.full((1, 2, 5, 5), 0.2))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_row_with_nothing_to_attend_to_is_zero(dtype: torch.dtype) -> None:
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    hidden[3] = True
    bias = ~hidden if dtype == torch.bool else torch.zeros(5, 5).masked_fill(hidden, -torch.inf)
    trace = attrace.trace(Logits(bias, fused=True), torch.randn(1, 2, 5, 8))
    assert (trace.ops[0].weights()[..., 3, :] == 0).all()
    assert (trace.output[..., 3, :] == 0).all()
    assert trace.rollout().isfinite().all()


def test_a_row_that_the_model_cleaned_is_what_the_values_saw() -> None:  # rep-masks-emptyrow-3
    class Cleaned(Logits):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nan_to_num((x @ x.mT + self.bias).softmax(-1)) @ x

    bias = torch.zeros(5, 5)
    bias[3] = -torch.inf
    trace = attrace.trace(Cleaned(bias, fused=False), torch.randn(1, 2, 5, 8))
    assert (trace.ops[0].weights()[..., 3, :] == 0).all()
    torch.testing.assert_close(trace.ops[0].weights()[..., 0, :].sum(-1), torch.ones(1, 2))
    left = attrace.trace(Logits(bias, fused=False), torch.randn(1, 2, 5, 8))  # NaN went into the model's output
    with pytest.raises(NonFiniteError, match="token 3"):
        left.ops[0].weights()


# Maps larger than memory


def long_op(length: int) -> QueryKeyAttention:
    """A call over so many tokens, whose tensors take no memory."""
    row = torch.randn(1, 8, 1, 4).expand(1, 8, length, 4)
    return QueryKeyAttention(name="attn", layer=0, shape=(1, 8, length, length), kind="self", query=row, key=row)


def test_a_map_larger_than_memory_is_refused_before_it_is_made() -> None:
    op = long_op(1 << 21)  # 128 TiB
    for read in (op.weights, lambda: op.weights(range(1 << 20)), op.fused):
        with pytest.raises(
            MemoryLimitError, match=r"Expected at most 50% of the available memory \(.* for the map of attn"
        ):
            read()
    trace = attrace.Trace("Long", ops=[op], starts=[0])
    with pytest.raises(MemoryLimitError, match=r"whole rollout.*TiB for the shape \(1, 2097152, 2097152\).*target="):
        trace.rollout()
    row = long_op(1 << 16).weights([5])
    torch.testing.assert_close(row.sum(-1), torch.ones(1, 8, 1))


def test_the_limit_is_half_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (memory.available() or 1) > 1 << 20
    monkeypatch.setattr(memory, "SMALL", 0)
    op = long_op(100)
    needed = 8 * 100 * 100 * 4
    monkeypatch.setattr(memory, "available", lambda: 2 * needed)
    assert op.weights().shape == (1, 8, 100, 100)
    monkeypatch.setattr(memory, "available", lambda: 2 * needed - 2)
    with pytest.raises(MemoryLimitError, match=r"312\.5 KiB for the shape \(1, 8, 100, 100\).*weights\(rows="):
        op.weights()
    assert op.weights(range(99)).shape == (1, 8, 99, 100)
    monkeypatch.setattr(memory, "available", lambda: None)  # a system that does not tell
    assert op.weights().shape == (1, 8, 100, 100)


@pytest.mark.parametrize(
    ("meminfo", "limit", "used", "expected"),
    [
        ("MemTotal: 9 kB\nMemAvailable:    2048 kB\n", None, None, 2048 * 1024),
        ("MemAvailable: 2048 kB\n", "max", "5", 2048 * 1024),
        ("MemAvailable: 2048 kB\n", "3000", "1000", 2000),
        ("MemAvailable: 2048 kB\n", "3000", "4000", 0),
    ],
)
def test_a_containers_limit_counts_as_well(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, meminfo: str, limit: str | None, used: str | None, expected: int
) -> None:
    (tmp_path / "meminfo").write_text(meminfo)
    if limit and used:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(used + "\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "GROUP", tmp_path)
    assert memory.available() == expected


def test_the_kinds_of_these_errors() -> None:
    assert issubclass(MemoryLimitError, AttraceError)
    assert issubclass(MemoryLimitError, MemoryError)
    assert issubclass(AttraceWarning, UserWarning)
    assert not issubclass(AttraceWarning, AttraceError)  # a warning is no error until the caller makes it one
