"""Models with several token streams: which streams each call joins, and rollout over them.

The expected rollouts are written out here per model, in dense NumPy over the library's own eager weights.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_streams
import torch
from numpy.typing import NDArray
from tiny import traced
from torch import Tensor, nn

import attrace
from attrace.errors import CaptureError, InputError

Map = NDArray[np.float64]
every_case = pytest.mark.parametrize(("family", "backend"), tiny_streams.CASES)
encoder_decoders = pytest.mark.parametrize("family", tiny_streams.ENCODER_DECODERS)
KNOWN = {
    "clip": [("pixel_values", "pixel_values")] * 2 + [("input_ids", "input_ids")] * 2,
    "siglip": [("pixel_values", "pixel_values")] * 2
    + [("vision_model.head.attention", "pixel_values")]
    + [("input_ids", "input_ids")] * 2,
    "blip": [("pixel_values", "pixel_values")] * 2 + [("input_ids", "input_ids"), ("input_ids", "pixel_values")] * 2,
    "blip-2": [("pixel_values", "pixel_values")] * 2
    + [("qformer.encoder", "qformer.encoder"), ("qformer.encoder", "pixel_values")]
    + [("qformer.encoder", "qformer.encoder")]
    + [("input_ids", "input_ids")] * 2,
    "lxmert": [("input_ids", "input_ids"), ("visual_feats", "visual_feats")]
    + [
        ("input_ids", "visual_feats"),
        ("visual_feats", "input_ids"),
        ("input_ids", "input_ids"),
        ("visual_feats", "visual_feats"),
    ]
    * 2,
    "llava": [("pixel_values", "pixel_values")] * 2 + [("input_ids", "input_ids")] * 2,
    "vilt": [("input_ids+pixel_values", "input_ids+pixel_values")] * 2,
    "flava": [("pixel_values", "pixel_values")] * 2
    + [("input_ids", "input_ids")] * 2
    + [("multimodal_model+pixel_values+input_ids",) * 2],
    "idefics2": [("pixel_values", "pixel_values")] * 2
    + [("connector.perceiver_resampler", "pixel_values+connector.perceiver_resampler")] * 2
    + [("input_ids", "input_ids")] * 2,
    "detr": [("pixel_values", "pixel_values")] + [("decoder", "decoder"), ("decoder", "pixel_values")] * 2,
    "time-series": [("past_values[0:7]",) * 2] * 2
    + [("past_values[7:12]",) * 2, ("past_values[7:12]", "past_values[0:7]")] * 2,
    "perceiver": [("encoder.cross_attention.attention.self", "inputs")]
    + [("encoder.cross_attention.attention.self",) * 2] * 2,
}


def joined(trace: attrace.Trace) -> list[tuple[str, str]]:
    return [(op.queries, op.keys) for op in trace.ops]


def encoder_decoder_streams(family: str) -> list[tuple[str, str]]:
    source, target = ("input_features" if family == "whisper" else "input_ids"), "decoder_input_ids"
    return [(source, source)] * 2 + [(target, target), (target, source)] * 2


def dense(maps: tuple[Tensor, ...], item: int) -> list[Map]:
    """Head means of one item."""
    return [m[item].double().mean(0).numpy() for m in maps]


def two_streams(outputs: Any, item: int, share: float) -> tuple[Map, Map, Map]:
    """(E, D_enc, D_dec) of the library's own maps: the encoder's rollout, and what decoder rows draw on."""
    encoder, own, cross = (
        dense(maps, item) for maps in (outputs.encoder_attentions, outputs.decoder_attentions, outputs.cross_attentions)
    )
    source = np.eye(len(encoder[0]))
    for layer in encoder:
        source = share * source + (1 - share) * layer @ source
    from_decoder, from_source = np.eye(len(own[0])), np.zeros(cross[0].shape)
    for self_map, cross_map in zip(own, cross, strict=True):
        from_decoder = share * from_decoder + (1 - share) * self_map @ from_decoder
        from_source = share * from_source + (1 - share) * self_map @ from_source
        from_decoder = share * from_decoder
        from_source = share * from_source + (1 - share) * cross_map @ source
    return source, from_source, from_decoder


@every_case
def test_each_call_knows_its_streams_and_the_output_is_bit_identical(family: str, backend: str) -> None:
    model, given = tiny_streams.model(family, backend), tiny_streams.inputs(family)
    torch.manual_seed(0)  # ViLT draws the order of its patches
    with torch.no_grad():
        plain = model(**given)
    torch.manual_seed(0)
    trace = traced(model, given)
    assert torch.equal(trace.output[0], plain[0])
    assert joined(trace) == KNOWN.get(family, encoder_decoder_streams(family))
    assert [op.kind for op in trace.ops] == ["self" if a == b else "cross" for a, b in joined(trace)]
    for op in trace.ops:
        lengths = trace.streams
        assert op.shape[2:] == (lengths[op.queries], lengths[op.keys])


@encoder_decoders
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_encoder_decoders_equal_their_own_eager_weights(family: str, backend: str) -> None:
    model, given = tiny_streams.model(family, backend), tiny_streams.inputs(family)
    twin = tiny_streams.model(family, "eager")
    with torch.no_grad():
        own = twin(**given, output_attentions=True)
    trace = traced(model, given)
    layers = zip(own.decoder_attentions, own.cross_attentions, strict=True)
    expected = [*own.encoder_attentions, *(m for pair in layers for m in pair)]
    for op, map_ in zip(trace.ops, expected, strict=True):
        torch.testing.assert_close(op.weights(), map_, atol=1e-5, rtol=0)
    names = list(dict.fromkeys(s for pair in joined(trace) for s in pair))
    source_name, target_name = names
    for share in (0.5, 0.2):
        whole = trace.rollout(residual=share)
        row = trace.rollout(target=-1, residual=share)
        of_encoder = trace.rollout(target=(source_name, [0, 2]), residual=share)
        column = trace.rollout(source=1, residual=share)
        parts = trace.rollout(segments=(source_name, [(0, 3), (3, 7)]), residual=share)
        own_column = trace.rollout(source=(target_name, 2), residual=share)
        for item in range(2):
            source, from_source, from_decoder = two_streams(own, item, share)
            np.testing.assert_allclose(whole[source_name][item], from_source, atol=1e-5)
            np.testing.assert_allclose(whole[target_name][item], from_decoder, atol=1e-5)
            np.testing.assert_allclose(row[source_name][item], from_source[-1], atol=1e-5)
            np.testing.assert_allclose(row[target_name][item], from_decoder[-1], atol=1e-5)
            np.testing.assert_allclose(of_encoder[source_name][item], source[[0, 2]], atol=1e-5)
            np.testing.assert_allclose(column[target_name][item], from_source[:, 1], atol=1e-5)
            np.testing.assert_allclose(column[source_name][item], source[:, 1], atol=1e-5)
            np.testing.assert_allclose(parts[target_name][item][:, 0], from_source[:, :3].sum(1), atol=1e-5)
            np.testing.assert_allclose(parts[source_name][item][:, 1], source[:, 3:7].sum(1), atol=1e-5)
            np.testing.assert_allclose(own_column[target_name][item], from_decoder[:, 2], atol=1e-5)
        assert set(of_encoder) == {source_name}
        assert set(own_column) == {target_name}
        total = sum(block.sum(-1) for block in row.values())
        torch.testing.assert_close(total, torch.ones(2), atol=1e-5, rtol=0)


@every_case
def test_mass_is_kept_over_all_streams(family: str, backend: str) -> None:
    trace = traced(tiny_streams.model(family, backend), tiny_streams.inputs(family))
    for stream in dict.fromkeys(op.queries for op in trace.ops):
        for options in ({}, {"residual": 0.1}, {"heads": "max"}, {"discard": 0.2}, {"layers": [0, -1]}):
            row = trace.rollout(target=(stream, 0), **options)
            parts = row.values() if isinstance(row, dict) else [row]
            assert min(float(part.min()) for part in parts) >= 0
            torch.testing.assert_close(sum(part.sum(-1) for part in parts), torch.ones(2), atol=1e-5, rtol=0)
        dropped = trace.rollout(target=(stream, 0), tolerance=0.2)
        left = sum(part.sum(-1) for part in (dropped.values() if isinstance(dropped, dict) else [dropped]))
        assert 0.8 - 1e-5 <= float(left.min()) <= float(left.max()) <= 1 + 1e-5


def test_one_input_that_is_cut_for_an_encoder_and_a_decoder() -> None:
    model, given = tiny_streams.model("time-series", "eager"), tiny_streams.inputs("time-series")
    with torch.no_grad():
        own = model(**given, output_attentions=True)
    trace = traced(model, given)
    assert trace.streams == {"past_values[0:7]": 7, "past_values[7:12]": 5, "past_values": 12}
    _, from_source, from_decoder = two_streams(own, 1, 0.5)
    found = trace.rollout()
    assert list(found) == ["past_values"]
    np.testing.assert_allclose(found["past_values"][1], np.concatenate([from_source, from_decoder], 1), atol=1e-5)
    column = trace.rollout(source=("past_values", 9))
    np.testing.assert_allclose(column["past_values[7:12]"][1], from_decoder[:, 2], atol=1e-5)


class Packed(nn.Module):
    """Several images in one sequence, each attended by a call of its own, as in vision-language models."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.backend = backend

    def forward(self, images: Tensor, text: Tensor, sizes: tuple[int, ...]) -> Tensor:
        for layer in self.layers:
            packed = layer(images).reshape(len(images), 3, 2, 8).permute(1, 0, 2, 3)
            q, k, v = (part.transpose(0, 1)[None].split(sizes, dim=2) for part in packed)
            outs = [self.attend(*one).transpose(1, 2) for one in zip(q, k, v, strict=True)]
            images = images + torch.cat(outs, dim=1).reshape(len(images), 16)
        return text + self.attend(text[None, None], images[None, None], images[None, None])[0, 0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.backend == "sdpa":
            return nn.functional.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("sizes", [(3, 5), (2, 2, 4)])
def test_images_packed_in_one_sequence(backend: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    trace = traced_call(Packed(backend), torch.randn(8, 16), torch.randn(4, 16), sizes)
    count = len(sizes)
    assert joined(trace) == [("images", "images")] * 2 * count + [("text", "images")]
    assert trace.streams == {"images": 8, "text": 4}
    maps = [op.weights()[0].mean(0).double().numpy() for op in trace.ops]
    images = np.eye(8)
    for layer in (maps[:count], maps[count : 2 * count]):
        block = np.zeros((8, 8))
        for number, map_ in enumerate(layer):
            at = slice(sum(sizes[:number]), sum(sizes[: number + 1]))
            block[at, at] = map_
        images = 0.5 * images + 0.5 * block @ images
    found = trace.rollout(target=[0, 1, 2, 3])
    np.testing.assert_allclose(found["images"][0], 0.5 * maps[-1] @ images, atol=1e-6)
    np.testing.assert_allclose(found["text"][0], 0.5 * np.eye(4), atol=1e-6)
    last = trace.rollout(target=("images", [0, 7]))
    np.testing.assert_allclose(last["images"][0], images[[0, 7]], atol=1e-6)


def traced_call(model: nn.Module, *args: Any) -> attrace.Trace:
    with torch.no_grad():
        return attrace.trace(model, *args)


def test_windows_in_the_batch_axis_are_refused() -> None:
    class Windows(nn.Module):
        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            parts = image.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1).contiguous()
            parts = parts + (parts @ parts.mT).softmax(-1) @ parts
            image = image + parts.unflatten(0, (1, 2)).transpose(1, 2).flatten(2, 3)
            return text + (text @ image.mT).softmax(-1) @ image

    trace = attrace.trace(Windows(), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 4, 8))
    with pytest.raises(CaptureError, match="Received: 1 x 6 for 2 inputs; the batch was split or windows were made"):
        trace.rollout(target=("text", 0))


def test_co_attention_reads_both_states_before_either_changes() -> None:
    model, given = tiny_streams.model("lxmert", "eager"), tiny_streams.inputs("lxmert")
    trace = traced(model, given)
    maps = [op.weights()[0].double().mean(0).numpy() for op in trace.ops]
    text, image = (np.eye(13)[:7], np.eye(13)[7:])  # rows over both inputs: 7 words, 6 regions
    text, image = 0.5 * text + 0.5 * maps[0] @ text, 0.5 * image + 0.5 * maps[1] @ image
    for layer in (maps[2:6], maps[6:10]):
        text, image = 0.5 * text + 0.5 * layer[0] @ image, 0.5 * image + 0.5 * layer[1] @ text
        text, image = 0.5 * text + 0.5 * layer[2] @ text, 0.5 * image + 0.5 * layer[3] @ image
    found = trace.rollout()  # of the last call's queries: the regions
    np.testing.assert_allclose(found["input_ids"][0], image[:, :7], atol=1e-5)
    np.testing.assert_allclose(found["visual_feats"][0], image[:, 7:], atol=1e-5)
    found = trace.rollout(target=("input_ids", 3))
    np.testing.assert_allclose(found["visual_feats"][0], text[3, 7:], atol=1e-5)
    column = trace.rollout(source=("visual_feats", 2))
    np.testing.assert_allclose(column["input_ids"][0], text[:, 9], atol=1e-5)
    np.testing.assert_allclose(column["visual_feats"][0], image[:, 9], atol=1e-5)


def test_a_joint_stream_is_told_apart_again() -> None:
    trace = traced(tiny_streams.model("vilt", "eager"), tiny_streams.inputs("vilt"))
    product = np.eye(24)
    for op in trace.ops:
        product = 0.5 * product + 0.5 * op.weights()[1].double().mean(0).numpy() @ product
    found = trace.rollout(target=0)
    assert list(found) == ["input_ids", "pixel_values"]
    np.testing.assert_allclose(found["input_ids"][1], product[0, :7], atol=1e-5)
    np.testing.assert_allclose(found["pixel_values"][1], product[0, 7:], atol=1e-5)
    column = trace.rollout(source=("pixel_values", 4))
    np.testing.assert_allclose(column["input_ids+pixel_values"][1], product[:, 11], atol=1e-5)


def test_learned_queries_are_a_stream_of_their_own() -> None:
    trace = traced(tiny_streams.model("blip-2"), tiny_streams.inputs("blip-2"))
    maps = [op.weights()[0].double().mean(0).numpy() for op in trace.ops[:5]]
    image = np.eye(17)
    for layer in maps[:2]:
        image = 0.5 * image + 0.5 * layer @ image
    own, seen = 0.5 * np.eye(3) + 0.5 * maps[2], np.zeros((3, 17))
    own, seen = 0.5 * own, 0.5 * seen + 0.5 * maps[3] @ image
    own, seen = 0.5 * own + 0.5 * maps[4] @ own, 0.5 * seen + 0.5 * maps[4] @ seen
    found = trace.rollout(target=("qformer.encoder", [0, 1, 2]))
    np.testing.assert_allclose(found["pixel_values"][0], seen, atol=1e-5)
    np.testing.assert_allclose(found["qformer.encoder"][0], own, atol=1e-5)


def test_learned_queries_beside_the_image_in_one_sequence_of_keys() -> None:
    trace = traced(tiny_streams.model("idefics2"), tiny_streams.inputs("idefics2"))
    maps = [op.weights()[0].double().mean(0).numpy() for op in trace.ops[:4]]
    image = np.eye(19)[:16]
    for layer in maps[:2]:
        image = 0.5 * image + 0.5 * layer @ image
    latents = np.eye(19)[16:]
    for layer in maps[2:]:
        latents = 0.5 * latents + 0.5 * layer @ np.concatenate([image, latents])
    found = trace.rollout(target=("connector.perceiver_resampler", [0, 1, 2]))
    np.testing.assert_allclose(found["pixel_values"][0], latents[:, :16], atol=1e-5)
    np.testing.assert_allclose(found["connector.perceiver_resampler"][0], latents[:, 16:], atol=1e-5)


@pytest.mark.parametrize("family", ["t5", "bart", "marian", "mbart", "pegasus"])
def test_a_decoder_input_that_the_model_makes_of_its_own_is_a_stream(family: str) -> None:
    model, given = tiny_streams.model(family), tiny_streams.inputs(family)
    decoder = given.pop("decoder_input_ids")
    body = model.model if hasattr(model, "model") else model
    asked = [(model, {**given, "labels": decoder})]
    if family in ("bart", "mbart", "pegasus"):
        asked.append((model, {**given, "decoder_input_ids": given["input_ids"]}))  # one tensor for both
    if family in ("bart", "mbart"):
        asked.append((body, given))  # shifted by the model
    for built, inputs in asked:
        assert joined(traced(built, inputs)) == encoder_decoder_streams(family)


def test_encoder_outputs_that_are_given_are_a_stream() -> None:
    model, given = tiny_streams.model("bart"), tiny_streams.inputs("bart")
    with torch.no_grad():
        encoded = model.model.encoder(given["input_ids"], attention_mask=given["attention_mask"])
    trace = traced(model, {"encoder_outputs": encoded, "decoder_input_ids": given["decoder_input_ids"]})
    whole = traced(model, given)
    target = ("decoder_input_ids", "decoder_input_ids")
    assert joined(trace) == [target, ("decoder_input_ids", "encoder_outputs")] * 2
    row, full = trace.rollout(target=-1), whole.rollout(target=-1)
    torch.testing.assert_close(row["decoder_input_ids"], full["decoder_input_ids"])
    torch.testing.assert_close(row["encoder_outputs"].sum(-1), full["input_ids"].sum(-1))


def test_padding_is_not_counted_when_cells_are_discarded() -> None:
    model, given = tiny_streams.model("bart"), tiny_streams.inputs("bart")
    given["attention_mask"][1, 5:] = 0
    given["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    padded = traced(model, given).rollout(target=2, discard=0.3)
    alone = {name: value[1:, :5] if "decoder" not in name else value[1:, :3] for name, value in given.items()}
    single = traced(model, alone).rollout(target=2, discard=0.3)
    torch.testing.assert_close(padded["input_ids"][1:, :5], single["input_ids"], atol=1e-5, rtol=0)
    torch.testing.assert_close(padded["decoder_input_ids"][1:, :3], single["decoder_input_ids"], atol=1e-5, rtol=0)


class TwoInputs(nn.Module):
    """A user's own co-attention, without a stack of layers."""

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a = left + (left @ right.mT).softmax(-1) @ right
        b = right + (right @ left.mT).softmax(-1) @ left
        return a, b


def test_a_users_own_two_inputs() -> None:
    trace = attrace.trace(TwoInputs(), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 3, 8))
    assert joined(trace) == [("left", "right"), ("right", "left")]
    assert trace.streams == {"left": 4, "right": 3}
    found = trace.rollout(residual=0.0)
    assert set(found) == {"left", "right"}  # both could be reached
    np.testing.assert_allclose(found["left"][0], trace.ops[1].weights()[0].mean(0), atol=1e-6)
    assert not found["right"].any()


def test_calls_side_by_side_in_one_stream_share_the_mass() -> None:
    class Parallel(nn.Module):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            own = (x @ x.mT).softmax(-1) @ x
            other = (x @ memory.mT).softmax(-1) @ memory
            return x + own + other

    trace = attrace.trace(Parallel(), torch.randn(1, 1, 4, 8), torch.randn(1, 1, 3, 8))
    a, b = (op.weights()[0].mean(0).double().numpy() for op in trace.ops)
    found = trace.rollout(target=[0, 1, 2, 3])
    np.testing.assert_allclose(found["x"][0], 0.5 * np.eye(4) + 0.25 * a, atol=1e-6)
    np.testing.assert_allclose(found["memory"][0], 0.25 * b, atol=1e-6)


@pytest.mark.parametrize("grad", [False, True])
def test_inference_mode_and_gradients_change_nothing(grad: bool) -> None:
    for family in ("t5", "lxmert", "vilt"):
        model, given = tiny_streams.model(family, "eager"), tiny_streams.inputs(family)
        torch.manual_seed(0)  # ViLT draws the order of its patches
        expected = traced(model, given)
        torch.manual_seed(0)
        with torch.enable_grad() if grad else torch.inference_mode():
            trace = attrace.trace(model, **given)
            assert joined(trace) == joined(expected)
            for stream, block in trace.rollout(target=0).items():
                torch.testing.assert_close(block.detach(), expected.rollout(target=0)[stream])


def test_threads_do_not_mix() -> None:
    families = ("t5", "lxmert", "clip")
    models = [tiny_streams.model(f, "eager") for f in families]
    start, results = threading.Barrier(3), {}

    def work(i: int) -> None:
        start.wait()
        results[i] = [joined(traced(models[i], tiny_streams.inputs(families[i]))) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, family in enumerate(families):
        assert results[i] == [KNOWN.get(family, encoder_decoder_streams(family))] * 5


def test_two_recorders_at_once_do_not_mix() -> None:
    a, b = tiny_streams.model("t5", "eager"), tiny_streams.model("lxmert", "eager")
    with torch.no_grad(), attrace.record(a) as first, attrace.record(b) as second:
        b(**tiny_streams.inputs("lxmert"))
        a(**tiny_streams.inputs("t5"))
    assert joined(first) == encoder_decoder_streams("t5")
    assert joined(second) == KNOWN["lxmert"]
    for trace, model, family in ((first, a, "t5"), (second, b, "lxmert")):
        expected = traced(model, tiny_streams.inputs(family)).rollout(target=0)
        assert all(torch.equal(block, expected[name]) for name, block in trace.rollout(target=0).items())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_compiled_model_is_followed_where_it_runs_uncompiled() -> None:
    model, given = tiny_streams.model("bart"), tiny_streams.inputs("bart")
    compiled = torch.compile(model)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        trace = attrace.trace(compiled, **given)
    assert joined(trace) == encoder_decoder_streams("bart")


def test_two_calls_in_one_block_and_a_failed_one_in_between() -> None:
    model, given = tiny_streams.model("bart"), tiny_streams.inputs("bart")
    with torch.no_grad(), attrace.record(model) as trace:
        model(**given)
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[5, 1000]]), decoder_input_ids=given["decoder_input_ids"][:1])
        trace.ops.clear()
        trace.starts.clear()
        model(**given)
    assert joined(trace) == encoder_decoder_streams("bart")
    expected = traced(model, given).rollout(target=-1)
    assert all(torch.equal(block, expected[name]) for name, block in trace.rollout(target=-1).items())


def test_a_stream_that_is_not_there() -> None:
    trace = traced(tiny_streams.model("t5"), tiny_streams.inputs("t5"))
    with pytest.raises(InputError, match=r"'input_ids' \(7 tokens\), 'decoder_input_ids' \(5 tokens\)\. Received: 'x'"):
        trace.rollout(target=("x", 1))
    with pytest.raises(InputError, match=r"Expected segments to name a stream .* Received: 'x'"):
        trace.rollout(segments=("x", [(0, 1)]))
    with pytest.raises(InputError, match="from 0 to 4"):
        trace.rollout(target=5)
    with pytest.raises(InputError, match="from 0 to 6"):
        trace.rollout(target=("input_ids", 7))
    given = tiny_streams.inputs("t5")
    model = tiny_streams.model("t5")
    with torch.no_grad():
        encoded = model.encoder(given["input_ids"])
    trace = traced(model, {"encoder_outputs": encoded, "decoder_input_ids": given["decoder_input_ids"]})
    with pytest.raises(InputError, match=r"Received: 'encoder_outputs', to which no attention leads"):
        trace.rollout(target=("encoder_outputs", 1))


def test_tokens_that_are_pooled_on_the_way_are_refused() -> None:
    class Pooled(nn.Module):
        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            image = image + (image @ image.mT).softmax(-1) @ image
            small = image.unflatten(2, (-1, 2)).mean(3)
            return text + (text @ small.mT).softmax(-1) @ small

    trace = attrace.trace(Pooled(), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 4, 8))
    assert trace.rollout(target=("image", 0))["image"].shape == (1, 6)
    with pytest.raises(CaptureError, match=r"Expected the 6 tokens of the stream image in Pooled\. Received: 3"):
        trace.rollout(target=("text", 0))


def test_cross_attention_of_unknown_streams_is_refused() -> None:
    trace = traced(tiny.model("bert"), tiny.inputs())
    trace.ops[1].kind = "cross"
    with pytest.raises(CaptureError, match="Expected to know which streams"):
        trace.rollout(target=0)


def test_an_encoder_that_ran_before_the_model_is_its_first_stream() -> None:
    """As `generate` does: the encoder by itself, then the model with what it gave."""
    model, given = tiny_streams.model("bart"), tiny_streams.inputs("bart")
    whole = traced(model, given)
    encoder = traced(model.model.encoder, {name: given[name] for name in ("input_ids", "attention_mask")})
    with torch.no_grad(), attrace.record(model) as trace:
        trace.ops += [dataclasses.replace(op, step=None) for op in encoder.ops]
        model(encoder_outputs=encoder.output, decoder_input_ids=given["decoder_input_ids"])
    assert joined(trace) == encoder_decoder_streams("bart")
    row, expected = trace.rollout(target=-1), whole.rollout(target=-1)
    assert all(torch.equal(row[name], block) for name, block in expected.items())
