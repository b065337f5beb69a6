"""Faults that others met when they asked models for their attention, each by the number of its report.

The rest of the area is tested where its subject is: rep-capture-nomaps-3 and -4 with torch's fused layers,
rep-capture-nomaps-5 with the kernels of other libraries, rep-capture-flash-1 and -2 with the registry of attention
functions, rep-capture-shape-1 and -2 with generation.
"""

from __future__ import annotations

import copy
import gc
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import generations
import pytest
import small
import tiny
import torch
import transformers
from tiny import traced
from torch import Tensor, nn

import attrace
from attrace.capture import encoding, huggingface
from attrace.capture.torch_ops import QueryKeyAttention, SoftmaxAttention, TorchAttention
from attrace.errors import CaptureError, ShapeError


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def vit(backend: str = "sdpa") -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8
    )
    model: nn.Module = transformers.ViTModel._from_config(config, attn_implementation=backend)
    return model.eval()


def test_a_vit_on_the_fused_backend_gives_its_maps() -> None:  # rep-capture-nomaps-1
    trace = traced(vit(), {"pixel_values": torch.randn(1, 3, 16, 16)})
    assert [op.shape for op in trace.ops] == [(1, 2, 5, 5)] * 2
    for op in trace.ops:
        assert isinstance(op, QueryKeyAttention)
        torch.testing.assert_close(op.weights().sum(-1), torch.ones(1, 2, 5), atol=1e-5, rtol=0)


def test_timm_is_read_with_its_fused_attention_on() -> None:  # rep-capture-nomaps-2
    import torchvision_ops

    torchvision_ops.enable()
    timm = pytest.importorskip("timm", reason="timm is not installed (make test installs it); CI has it")
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=3
    ).eval()
    assert all(block.attn.fused_attn for block in model.blocks)
    trace = traced(model, {"x": torch.randn(1, 3, 16, 16)})
    assert [op.name for op in trace.ops] == ["blocks.0.attn", "blocks.1.attn"]
    assert all(block.attn.fused_attn for block in model.blocks)
    # Nothing captured: the error names the layers that were looked at.
    plain = timm.create_model("mixer_s32_224", img_size=64).eval()
    with pytest.raises(CaptureError, match=r"Expected attention in MlpMixer.*8 layers blocks: MixerBlock with Mlp"):
        traced(plain, {"x": torch.randn(1, 3, 64, 64)})


def test_the_maps_belong_to_the_logits_of_the_same_backend() -> None:  # rep-capture-samebackend-1
    for backend, kind in (("sdpa", QueryKeyAttention), ("eager", SoftmaxAttention)):
        model, inputs = tiny.model("llama", backend), tiny.inputs(length=5)
        with torch.no_grad():
            plain = model(**inputs).logits
        trace = traced(model, inputs)
        assert torch.equal(trace.output.logits, plain)  # bit by bit, whatever the backend
        assert all(isinstance(op, kind) for op in trace.ops)
        assert trace.config._attn_implementation == backend  # which path was used
    tokenizer = small.byte_pairs()
    model = tiny.model("llama")
    model.resize_token_embeddings(len(tokenizer))
    result = attrace.explain(model, "The capital", processor=tokenizer, method="last-layer")
    assert result.settings["backend"] == "sdpa"


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_generated_tokens_are_the_same_with_capture_on(backend: str) -> None:  # rep-capture-samebackend-2
    config = transformers.Qwen2Config(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    model: Any = transformers.Qwen2ForCausalLM._from_config(config, attn_implementation=backend, dtype=torch.bfloat16)
    model.eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        plain = model.generate(**tiny.inputs(pad=2), **options)
        with attrace.record(model) as trace:
            recorded = model.generate(**tiny.inputs(pad=2), **options)
    assert torch.equal(plain, recorded)
    assert trace.ops
    assert model.config._attn_implementation == backend


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_weight_above_the_diagonal(family: str, pad: int, backend: str) -> None:  # rep-capture-causalkept-1
    inputs = tiny.inputs(length=4, pad=pad)
    trace = traced(tiny.model(family, backend), inputs)
    real = inputs["attention_mask"].bool()
    for op in trace.ops:
        for item in range(2):  # a padded query has nothing to attend to: eager models spread it over all keys
            rows = op.weights().triu(1)[item][:, real[item]]
            assert (rows == 0).all()
            assert (op.weights()[item].diagonal(dim1=-2, dim2=-1)[:, real[item]] > 0).all()


def test_cross_maps_have_targets_in_rows_and_sources_in_columns() -> None:  # rep-capture-shape-3
    config = transformers.BartConfig(
        vocab_size=100, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
    )  # fmt: skip
    model: Any = transformers.BartModel._from_config(config, attn_implementation="sdpa")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "decoder_input_ids": torch.tensor([[2, 8]])}
    trace = traced(model.eval(), inputs)
    cross = [op for op in trace.ops if op.kind == "cross"]
    assert [op.shape for op in cross] == [(1, 4, 2, 3)]
    twin: Any = transformers.BartModel._from_config(copy.deepcopy(config), attn_implementation="eager")
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        own = twin.eval()(**inputs, output_attentions=True).cross_attentions[0]
    torch.testing.assert_close(cross[0].weights(), own, atol=1e-5, rtol=0)
    # A change of one source token changes its column's weight and moves no target's row into another.
    changed = traced(model, {**inputs, "input_ids": torch.tensor([[5, 6, 90]])}).ops[-1].weights()
    assert (changed - cross[0].weights()).abs().amax((0, 1, 2))[2] > 1e-5


def test_the_backend_is_read_off_the_loaded_model(tmp_path: Path) -> None:  # rep-capture-custom-1
    tiny.model("llama").save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for asked in ("eager", "sdpa"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, config=copy.deepcopy(config), attn_implementation=asked
        )
        trace = traced(model.eval(), tiny.inputs())
        seen = {SoftmaxAttention: "eager", QueryKeyAttention: "sdpa"}[type(trace.ops[0])]
        assert seen == trace.config._attn_implementation == asked


def test_two_towers_are_told_apart_by_their_names() -> None:  # rep-capture-custom-2
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 100, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    model: Any = transformers.CLIPModel(config).eval()
    inputs = {"input_ids": tiny.inputs()["input_ids"], "pixel_values": torch.randn(2, 3, 16, 16)}
    trace = traced(model, inputs)
    found = {op.name: op.shape for op in trace.ops}
    assert found == {
        **{f"vision_model.encoder.layers.{i}.self_attn": (2, 4, 5, 5) for i in range(2)},
        **{f"text_model.encoder.layers.{i}.self_attn": (2, 4, 7, 7) for i in range(2)},
    }
    for op in trace.ops:
        assert (op.weights().triu(1) == 0).all() == op.name.startswith("text")


def test_code_that_never_fills_its_weights_is_read_all_the_same() -> None:  # rep-capture-custom-3
    class Attention(nn.Module):
        """A model's own code, whose forward promises weights and returns none."""

        def __init__(self) -> None:
            super().__init__()
            self.pack = nn.Linear(16, 48)

        def forward(self, x: Tensor, output_attentions: bool = False) -> tuple[Tensor, Tensor | None]:
            weights = None
            q, k, v = self.pack(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            return mixed.transpose(1, 2).flatten(2), weights

    class Remote(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention() for _ in range(2))

        def forward(self, x: Tensor, output_attentions: bool = False) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, output_attentions)[0]
            return x

    model, x = Remote(), torch.randn(1, 5, 16)
    trace = attrace.trace(model, x, output_attentions=True)
    assert [op.name for op in trace.ops] == ["layers.0", "layers.1"]
    q, k, _ = model.layers[0].pack(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(trace.ops[0].weights(), (q @ k.mT * 8**-0.5).softmax(-1), atol=1e-5, rtol=0)


# Memory


class Long(nn.Module):
    """Layers of attention over n tokens, and nothing else that takes memory."""

    def __init__(self, layers: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(heads * 4, heads * 12) for _ in range(layers))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, self.heads, 4)).permute(2, 0, 3, 1, 4)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that is made, and the most that is alive at once, in bytes."""

    def __init__(self, *held: Tensor) -> None:
        super().__init__()
        self.largest = self.alive = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in held}

    def _gone(self, storage: int, size: int) -> None:
        self.alive -= size
        self._seen.discard(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                address, size = storage._cdata, storage.nbytes()
                if address not in self._seen:
                    self._seen.add(address)
                    self.alive += size
                    weakref.finalize(storage, self._gone, address, size)
                self.largest = max(self.largest, size)
                self.peak = max(self.peak, self.alive)
        return out


def held_by(trace: attrace.Trace) -> list[Tensor]:
    return [tensor for op in trace.ops for tensor in (op.query, op.key)]


def test_a_streamed_rollout_makes_no_map_of_a_layer() -> None:  # rep-memory-peak-1
    n, layers, heads = 2048, 8, 8
    model = Long(layers, heads)
    with torch.no_grad():
        trace = attrace.trace(model, torch.randn(1, n, heads * 4))
        with Largest(*held_by(trace)) as row:
            found = trace.rollout(target=0)
        with Largest(*held_by(trace)) as whole:
            trace.rollout()
    torch.testing.assert_close(found.sum(-1), torch.ones(1), atol=1e-5, rtol=0)
    one_map, one_layer = n * n * 4, heads * n * n * 4
    assert row.largest < one_layer / 2  # blocks of rows, never the layer's map
    assert whole.largest < one_layer
    assert row.peak < one_layer / 3
    assert whole.peak < one_layer + one_map  # all eight layers would be eight times as much


@pytest.mark.parametrize("question", [{"target": 0}, {"source": 3}, {}])
def test_memory_does_not_grow_with_the_layers(question: dict[str, Any]) -> None:  # rep-memory-peak-2
    n, heads = 512, 4
    peaks = []
    for layers in (2, 8):
        with torch.no_grad():
            trace = attrace.trace(Long(layers, heads), torch.randn(1, n, heads * 4))
            with Largest(*held_by(trace)) as seen:
                trace.rollout(**question)
        peaks.append(seen.peak)
    assert peaks[1] == peaks[0]


def test_only_the_chosen_layers_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:  # rep-memory-peak-3
    with torch.no_grad():
        trace = attrace.trace(Long(12, 2), torch.randn(1, 16, 8))
    computed, made = [], []
    rows = QueryKeyAttention._rows

    def watched(self: TorchAttention, *given: Any, **options: Any) -> Tensor:
        computed.append(self.layer)
        out = rows(self, *given, **options)
        made.append(weakref.ref(out))
        return out

    monkeypatch.setattr(QueryKeyAttention, "_rows", watched)
    trace.rollout(layers=[11])
    gc.collect()
    assert set(computed) == {11}
    assert all(reference() is None for reference in made)


def test_a_trace_holds_queries_and_keys_and_no_map() -> None:
    n, heads, layers = 512, 4, 6
    model, x = Long(layers, heads), torch.randn(1, n, heads * 4)
    with torch.no_grad():
        with Largest() as plain:
            model(x)
        gc.collect()
        with Largest() as recorded:
            trace = attrace.trace(model, x)
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held_by(trace)}
    assert sum(held.values()) == layers * n * heads * 8 * 4  # the values, from the same projection, are let go
    assert recorded.peak <= plain.peak + sum(held.values()) + n * heads * 4  # one call's log-sum-exp
    assert recorded.largest == plain.largest
    tracemalloc.start()
    for op in trace.ops:
        op.rmatvec(torch.ones(1, n))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20  # nothing of it in Python either
    tracemalloc.stop()


def test_a_generation_gives_all_rows_or_an_error() -> None:  # rep-rollout-degenerate-1
    model, given = generations.decoder("llama"), tiny.inputs(batch=1, length=3)
    trace, output = generations.generated(model, given, do_sample=False, max_new_tokens=3)
    assert output.sequences.shape == (1, 6)
    whole, ids = trace.assembled(), output.sequences[:, :5]
    assert {op.shape for op in whole.ops} == {(1, 4, 5, 5)}
    torch.testing.assert_close(trace.rollout(), traced(model, {"input_ids": ids}).rollout(), atol=1e-5, rtol=0)
    new_rows = [op.weights([3, 4]) for op in whole.ops]
    with pytest.raises(ShapeError, match=r"2 rows, 5 columns\. Missing rows are not filled in"):
        attrace.rollout(new_rows)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :3], use_cache=True).cache
        with attrace.record(model) as late:
            model(input_ids=ids[:, 3:], cache=cache)
    assert [op.shape for op in late.ops] == [(1, 4, 2, 5)] * 2
    with pytest.raises(CaptureError, match=r"Received: 5; .* a cache that was filled before the recording"):
        late.rollout(target=-1)


def test_a_stock_class_is_read_as_it_is() -> None:  # rep-rollout-stockmodel-1
    model = vit()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    methods = {name: module.forward.__func__ for name, module in model.named_modules()}
    answer = traced(model, {"pixel_values": torch.randn(1, 3, 16, 16)}).rollout(target=0)
    torch.testing.assert_close(answer.sum(-1), torch.ones(1), atol=1e-5, rtol=0)
    assert type(model) is transformers.ViTModel
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert {name: module.forward.__func__ for name, module in model.named_modules()} == methods


def test_inputs_are_placed_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:  # rep-devices-inputs-1
    loaded, asked, tensor = huggingface.load(None), [], torch.tensor

    def placed(data: Any, *, device: torch.device) -> Tensor:
        asked.append(device.type)
        return tensor(data)

    loaded.model.to("meta")  # it has no values: what is asked for is kept, the inputs themselves stay readable
    monkeypatch.setattr(torch, "tensor", placed)
    found = encoding.encode(loaded, "free prize")
    assert asked == ["meta"] * len(found.inputs) != []
