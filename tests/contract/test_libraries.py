"""The contracts of capture for every library, wrapper and way of running that models come in.

Each row builds a small random model.  Held for each: the output is bit-identical, the maps are those that
`probe.own_maps` finds without the recorder, a second run gives the same, nothing is left on the model or in the
process, also after an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torchvision_ops
from leftovers import Failing, leftovers, operators
from probe import own_maps
from torch import Tensor, nn

import attrace

torchvision_ops.enable()
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing(_enable)?` is deprecated:FutureWarning"),
]


@dataclass
class Row:
    """One model with its input, and what its attention is."""

    build: Callable[[], nn.Module]
    shapes: list[tuple[int, int, int, int]]
    """(B, H, Q, T) of each call, in order."""
    args: tuple[Any, ...] = ()
    given: dict[str, Any] = field(default_factory=dict)
    softmax: bool = False
    """Whether the model computes a softmax of its own."""
    plain: Callable[[nn.Module], nn.Module] | None = None
    """Another form of the same model, for the maps to compare with; the model itself by default."""
    kind: str | None = None
    """Of every call; by default "self" where there are as many keys as queries."""
    names: tuple[str, ...] = ()
    """Names of the first calls, where they are of interest."""


def needed(library: str) -> Any:
    """The library; where it is missing the test is skipped, and test_project_files fails in CI."""
    return pytest.importorskip(library, reason=f"{library} is not installed (make test installs it); CI has it")


def images(side: int = 32) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))


def tokens(width: int = 16, length: int = 5) -> Tensor:
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(0))


def timm(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    """A small model of timm's, its fused attention left on."""

    def build() -> nn.Module:
        timm = needed("timm")
        model: nn.Module = timm.create_model(kind, num_classes=5, **settings)
        for name, parameter in model.named_parameters():  # drawn so small that all maps would be nearly uniform
            if name.endswith("relative_position_bias_table"):
                nn.init.normal_(parameter)
            elif parameter.ndim == 2:
                parameter.data.mul_(6.0)
        return model

    return build


def unfused(model: nn.Module) -> nn.Module:
    """The same weights under timm's plain attention."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return twin


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
_WINDOWS = [(8, 2, 16, 16)] * 2 + [(2, 4, 16, 16)] * 2


def torchvision_model(kind: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        models = needed("torchvision").models
        if kind == "vit":
            vit: nn.Module = models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5)
            nn.init.normal_(vit.heads.head.weight)
            return vit
        swin = models.swin_transformer
        newer = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
        built: nn.Module = models.SwinTransformer(
            [4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=5, **(newer if kind == "swin-v2" else {})
        )
        return built

    return build


def clip(**vision: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        open_clip = needed("open_clip")
        sizes = {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8}
        text = {"context_length": 8, "vocab_size": 100, "width": 32, "heads": 4, "layers": 2}
        built: nn.Module = open_clip.model.CLIP(32, {**sizes, **vision}, text)
        return built

    return build


CAPTION = torch.randint(1, 99, (2, 8), generator=torch.Generator().manual_seed(0))
_TOWERS = [(2, 4, 17, 17)] * 2 + [(2, 4, 8, 8)] * 2


class Own(nn.Module):
    """A user's attention, fused or as a plain softmax."""

    def __init__(self, *, fused: bool, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(layers))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
            if self.fused:
                mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                mixed = torch.softmax(q @ k.transpose(-2, -1) / 2.0, dim=-1) @ v
            x = x + mixed.transpose(1, 2).flatten(2)
        return x


def with_adapter(family: str, targets: list[str]) -> nn.Module:
    peft = needed("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny.model(family), peft.LoraConfig(r=2, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # starts at zero
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def offloaded(how: str, folder: Path) -> nn.Module:
    accelerate = needed("accelerate")
    model = tiny.model("llama")
    if how == "disk":
        accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def quantised() -> nn.Module:
    built: nn.Module = torch.ao.quantization.quantize_dynamic(tiny.model("bert"), {nn.Linear}, dtype=torch.qint8)
    return built


def quantised_weights(family: str) -> nn.Module:
    quantization = needed("torchao.quantization")
    model = tiny.model(family)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def attention(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(16, 4, **settings)


def compiled(how: str, backend: str = "aot_eager") -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.compiler.reset()
        model = tiny.model("bert")
        if how == "whole":
            return torch.compile(model, backend=backend)  # type: ignore[return-value]
        if how == "in place":
            model.compile(backend=backend)
        else:
            layers = model.bert.encoder.layer
            for i, layer in enumerate(layers):
                layers[i] = torch.compile(layer, backend=backend)
        return model

    return build


def uncompiled(_model: nn.Module) -> nn.Module:
    return tiny.model("bert")


def encoder(**settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=settings.pop("batch_first", True), **settings)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    return build


_SELF, _PAIR = [(2, 4, 5, 5)] * 2, [(2, 4, 7, 7)] * 2
PADDED = tiny.inputs(pad=2)
ROWS: dict[str, Row] = {
    "timm-vit": Row(
        timm("vit_tiny_patch16_224", **_VIT), [(2, 4, 17, 17)] * 2, (images(),), softmax=True, plain=unfused,
        names=("blocks.0.attn",),
    ),
    "timm-deit3": Row(timm("deit3_small_patch16_224", **_VIT), [(2, 4, 17, 17)] * 2, (images(),)),
    "timm-deit-distilled": Row(timm("deit_tiny_distilled_patch16_224", **_VIT), [(2, 4, 18, 18)] * 2, (images(),)),
    "timm-eva": Row(timm("eva02_tiny_patch14_224", **_VIT), [(2, 4, 17, 17)] * 2, (images(),)),
    "timm-beit": Row(timm("beit_base_patch16_224", **_VIT), [(2, 4, 17, 17)] * 2, (images(),), softmax=True,
                     plain=unfused),
    "timm-dinov2-registers": Row(timm("vit_small_patch14_reg4_dinov2", **_VIT), [(2, 4, 21, 21)] * 2, (images(),)),
    "timm-siglip": Row(
        timm("vit_base_patch16_siglip_224", **_VIT), [(2, 4, 16, 16)] * 2 + [(2, 4, 1, 16)], (images(),), softmax=True,
        plain=unfused
    ),
    "timm-swin": Row(timm("swin_tiny_patch4_window7_224", **_SWIN), _WINDOWS, (images(),), softmax=True),
    "timm-swin-v2": Row(timm("swinv2_tiny_window8_256", **_SWIN), _WINDOWS, (images(),), softmax=True),
    "timm-vit-unfused": Row(
        lambda: unfused(timm("vit_tiny_patch16_224", **_VIT)()), [(2, 4, 17, 17)] * 2, (images(),), softmax=True
    ),
    "torchvision-vit": Row(
        torchvision_model("vit"), [(2, 4, 17, 17)] * 2, (images(),),
        names=("encoder.layers.encoder_layer_0.self_attention",),
    ),
    "torchvision-swin": Row(torchvision_model("swin"), _WINDOWS, (images(),), softmax=True),
    "torchvision-swin-v2": Row(torchvision_model("swin-v2"), _WINDOWS, (images(),), softmax=True),
    "open-clip": Row(
        clip(), _TOWERS, (images(), CAPTION),
        names=("visual.transformer.resblocks.0.attn", "visual.transformer.resblocks.1.attn",
               "transformer.resblocks.0.attn"),
    ),
    "open-clip-pooled": Row(
        clip(attentional_pool=True, attn_pooler_queries=3, attn_pooler_heads=4),
        [*_TOWERS[:2], (2, 4, 3, 17), *_TOWERS[2:]], (images(), CAPTION),
    ),
    "attention-module": Row(attention(batch_first=True), _SELF[:1], (tokens(),) * 3),
    "attention-module-sequence-first": Row(attention(), [(5, 4, 2, 2)], (tokens(),) * 3),
    "attention-module-cross": Row(
        attention(batch_first=True, kdim=8, vdim=8), [(2, 4, 5, 3)], (tokens(), tokens(8, 3), tokens(8, 3))
    ),
    "attention-module-more-keys": Row(
        attention(batch_first=True, add_bias_kv=True, add_zero_attn=True), [(2, 4, 5, 7)], (tokens(),) * 3, kind="self"
    ),
    "attention-module-odd-heads": Row(
        lambda: nn.MultiheadAttention(15, 3, batch_first=True), [(2, 3, 5, 5)], (tokens(15),) * 3
    ),
    "torch-encoder": Row(encoder(), _SELF, (tokens(),), names=("layers.0.self_attn", "layers.1.self_attn")),
    "torch-encoder-norm-first": Row(encoder(norm_first=True), _SELF, (tokens(),)),
    "torch-encoder-sequence-first": Row(encoder(batch_first=False), [(5, 4, 2, 2)] * 2, (tokens(),)),
    "torch-decoder": Row(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 2),
        [(2, 4, 5, 5), (2, 4, 5, 3)] * 2, (tokens(), tokens(length=3)),
    ),
    "torch-transformer": Row(
        lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True), [(2, 4, 3, 3), (2, 4, 5, 5), (2, 4, 5, 3)],
        (tokens(length=3), tokens()),
    ),
    "own-fused": Row(lambda: Own(fused=True), _SELF, (tokens(),), names=("Own", "Own")),
    "own-eager": Row(lambda: Own(fused=False), _SELF, (tokens(),), softmax=True),
    "lora-llama": Row(lambda: with_adapter("llama", ["q_proj", "v_proj"]), _PAIR, (), PADDED),
    "lora-bert": Row(
        lambda: with_adapter("bert", ["query", "value"]), _PAIR, (), PADDED,
        names=("base_model.model.bert.encoder.layer.0.attention.self",),
    ),
    "quantised-bert": Row(quantised, _PAIR, (), PADDED),
    "torchao-bert": Row(lambda: quantised_weights("bert"), _PAIR, (), PADDED),
    "torchao-llama": Row(lambda: quantised_weights("llama"), _PAIR, (), PADDED),
    "shared-layers-albert": Row(
        lambda: tiny.model("albert"), _PAIR, (), PADDED,
        names=("albert.encoder.albert_layer_groups.0.albert_layers.0.attention",) * 2,
    ),
    "compiled-whole": Row(compiled("whole"), _PAIR, (), PADDED, plain=uncompiled),
    "compiled-in-place": Row(compiled("in place"), _PAIR, (), PADDED, plain=uncompiled),
    "compiled-layers": Row(
        compiled("layers"), _PAIR, (), PADDED, plain=uncompiled,
        names=("bert.encoder.layer.0._orig_mod", "bert.encoder.layer.1._orig_mod"),
    ),
    "bfloat16": Row(lambda: tiny.model("llama", dtype=torch.bfloat16), _PAIR, (), PADDED),
    "float16": Row(lambda: tiny.model("llama", dtype=torch.float16), _PAIR, (), PADDED),
    "float64": Row(lambda: tiny.model("bert", dtype=torch.float64), _PAIR, (), PADDED),
    "offloaded-cpu": Row(lambda: offloaded("cpu", Path()), _PAIR, (), PADDED),
    "offloaded-disk": Row(lambda: tiny.model("llama"), _PAIR, (), PADDED),  # its folder comes with the fixture
}  # fmt: skip


@pytest.fixture(params=ROWS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Row, nn.Module]]:
    row = ROWS[request.param]
    torch.manual_seed(0)
    model = offloaded("disk", tmp_path) if request.param == "offloaded-disk" else row.build()
    yield row, model.eval()
    if request.param.startswith("compiled"):
        torch.compiler.reset()


def flat(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if hasattr(output, "values") else output
    return [tensor for part in parts if part is not None for tensor in flat(part)]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(flat(a), flat(b), strict=True))


def test_maps_and_output_are_the_models_own(case: tuple[Row, nn.Module]) -> None:
    row, model = case
    with torch.no_grad():
        plain = model(*row.args, **row.given)
        before = leftovers(model)
        trace = attrace.trace(model, *row.args, **row.given)
        assert same(trace.output, plain)
        assert leftovers(model) == before
        again = attrace.trace(model, *row.args, **row.given)
    assert [op.shape for op in trace.ops] == row.shapes
    assert tuple(op.name for op in trace.ops)[: len(row.names)] == row.names
    assert not trace.notes
    twin = row.plain(model) if row.plain else model
    own = own_maps(lambda: twin(*row.args, **row.given), softmax=row.softmax)
    wide = torch.float64 if flat(plain)[0].dtype == torch.float64 else torch.float32
    for op, expected, second in zip(trace.ops, own, again.ops, strict=True):
        weights = op.weights()
        assert weights.dtype == wide
        torch.testing.assert_close(weights, expected.to(wide), atol=1e-5, rtol=0)
        assert torch.equal(weights, second.weights())
        for product, fused in ((op.rmatvec, weights.mean(1)), (op.matvec, weights.mean(1).mT)):
            vector = torch.rand(fused.shape[:2], dtype=wide)
            torch.testing.assert_close(product(vector), torch.einsum("bqt,bq->bt", fused, vector), atol=1e-5, rtol=0)
        assert weights.std() > 1e-3  # maps that are all the same would hide a mistake
        assert op.kind == (row.kind or ("self" if op.shape[2] == op.shape[3] else "cross"))


def test_an_error_inside_leaves_nothing(case: tuple[Row, nn.Module]) -> None:
    row, model = case

    def run() -> Any:
        return attrace.trace(model, *row.args, **row.given)

    with torch.no_grad():
        expected = [op.weights() for op in run().ops]
        before = leftovers(model)
        count = len(operators(run))
        for number in (0, count // 2, count - 1):
            with Failing(number), pytest.raises(KeyError, match="in the model"):
                run()
            assert leftovers(model)[:7] == before[:7]
            model(*row.args, **row.given)  # what accelerate had loaded when it was interrupted goes with the next run
            assert leftovers(model) == before
        after = [op.weights() for op in run().ops]
    for got, first in zip(after, expected, strict=True):
        assert torch.equal(got, first)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_gradient_checkpointing_records_no_layer_twice(family: str, reentrant: bool) -> None:
    model, inputs = tiny.model(family), tiny.inputs(pad=2)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    expected = [op.weights() for op in tiny.traced(model, inputs).ops]
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def gradients(output: Any) -> list[Tensor]:
        model.zero_grad()
        output[0].square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    before = leftovers(model)
    plain = model(**inputs)
    wanted = gradients(plain)
    with attrace.record(model) as trace:
        output = model(**inputs)
        got = gradients(output)  # runs each layer's forward again
    assert leftovers(model) == before
    assert same(output, plain)
    assert len(got) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert [op.shape for op in trace.ops] == [(2, 4, 7, 7)] * 2
    assert not trace.notes
    for op, own in zip(trace.ops, expected, strict=True):
        torch.testing.assert_close(op.weights(), own, atol=1e-6, rtol=0)


def test_a_shared_layer_called_twice_is_two_maps() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.layer(x, x, x, need_weights=False)[0]
            return x + self.layer(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    model = Twice().eval()
    model.layer.in_proj_weight.data.mul_(2)
    own = own_maps(lambda: model(tokens()))
    trace = tiny.traced(model, {"x": tokens()})
    assert [(op.name, op.layer) for op in trace.ops] == [("layer", 0), ("layer", 1)]
    for op, expected in zip(trace.ops, own, strict=True):
        torch.testing.assert_close(op.weights(), expected, atol=1e-5, rtol=0)
    assert (trace.ops[0].weights() - trace.ops[1].weights()).abs().max() > 0.01


@pytest.mark.parametrize("how", ["cpu", "disk"])
def test_offloaded_weights_are_never_moved_or_loaded_for_a_trace(how: str, tmp_path: Path) -> None:
    # rep-devices-devicemap-1
    model, inputs = offloaded(how, tmp_path), tiny.inputs()
    with torch.no_grad():
        model(**inputs)
        trace = attrace.trace(model, **inputs)
    assert any(p.device.type == "meta" for p in model.parameters())
    before = leftovers(model)
    for op in trace.ops:
        op.weights()
    trace.rollout(target=-1)
    assert leftovers(model) == before
    expected = tiny.traced(tiny.model("llama"), inputs)
    assert torch.equal(trace.rollout(), expected.rollout())


@pytest.mark.parametrize("name", ["timm-vit", "torchvision-vit", "open-clip", "lora-llama", "own-eager"])
def test_a_batch_equals_its_rows_one_by_one(name: str) -> None:
    row = ROWS[name]
    torch.manual_seed(0)
    model = row.build().eval()
    given = tiny.inputs() if row.given else {}
    with torch.no_grad():
        together = attrace.trace(model, *row.args, **given)
        for item in range(2):
            alone = attrace.trace(
                model, *(a[item : item + 1] for a in row.args), **{k: v[item : item + 1] for k, v in given.items()}
            )
            for op, single in zip(together.ops, alone.ops, strict=True):
                torch.testing.assert_close(op.weights()[item], single.weights()[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["timm-vit", "timm-eva", "torchvision-vit", "torch-encoder", "lora-bert", "own-fused"])
def test_a_rollout_row_keeps_its_mass(name: str) -> None:
    row = ROWS[name]
    torch.manual_seed(0)
    with torch.no_grad():
        trace = attrace.trace(row.build().eval(), *row.args, **row.given)
    mass = trace.rollout(target=0)
    assert (mass >= 0).all()
    torch.testing.assert_close(mass.sum(-1), torch.ones(2), atol=1e-5, rtol=0)
    whole = attrace.rollout([op.weights() for op in trace.ops])
    torch.testing.assert_close(mass, whole[:, 0], atol=1e-5, rtol=0)
