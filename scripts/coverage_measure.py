"""One model type: built, run with and without the recorder, and its maps held against the evidence."""

from __future__ import annotations

import itertools
import time
from typing import Any

import coverage_oracle as oracle
import tiny_inputs
import tiny_models
import torch
from torch import Tensor, nn

import attrace
from attrace.errors import CaptureError

TOLERANCE = 1e-5


# One type


def measure(model_type: str) -> dict[str, Any]:
    """What attrace makes of one type: a record of plain values."""
    config_class = tiny_models.CONFIG_MAPPING[model_type]
    record: dict[str, Any] = {"type": model_type, "class": "", "status": "not buildable", "reason": ""}
    try:
        cls = tiny_models.class_of(model_type, config_class)
        record["class"] = cls.__name__
        configurations = list(tiny_models.configurations(model_type))
    except Exception as error:
        record["reason"] = tiny_models.first_line(error)
        return record
    reasons: list[str] = []
    for config, backend in itertools.product(configurations, ("sdpa", "eager")):
        try:
            model = tiny_models.built(cls, config, backend)
        except Exception as error:
            reasons.append(tiny_models.first_line(error))
            continue
        batch, why = first_inputs(model_type, model)
        if batch is None:
            if record["status"] == "not buildable":
                record.update(status="no inputs", reason=why)
            reasons.append(why)
            continue
        record.update(
            reason="", backend=backend, inputs=sorted(batch), parameters=sum(p.numel() for p in model.parameters())
        )
        return {**record, **judged(model_type, cls, config, model, batch)}
    if record["status"] == "not buildable":
        record["reason"] = reasons[0]
    record["reasons"] = reasons
    return record


def first_inputs(model_type: str, model: nn.Module) -> tuple[dict[str, Any] | None, str]:
    """The first inputs that the model runs on; or why the first ones failed."""
    why: list[str] = []
    start = time.process_time()
    for tried, batch in enumerate(tiny_inputs.candidates(model_type, model)):
        if tried > 60 or time.process_time() - start > 15:
            break
        attempts = [batch]
        while attempts:
            attempt = attempts.pop(0)
            try:
                with torch.no_grad():
                    out = model(**attempt)
                if any(not bool(t.isfinite().any()) for t in tensors(out) if t.is_floating_point() and t.numel()):
                    raise ValueError("the output is not finite")
                return attempt, ""
            except Exception as error:
                why.append(tiny_models.first_line(error))
                if attempt is batch:
                    attempts = tiny_inputs.with_placeholders(batch, model, why[-1])
    return None, why[0] if why else "no inputs known"


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors(item)]
    return []


def identical(a: Any, b: Any) -> bool:
    left, right = tensors(a), tensors(b)
    return len(left) == len(right) and all(
        x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(left, right, strict=True)
    )


def judged(model_type: str, cls: Any, config: Any, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Run with and without the recorder, gather the evidence, compare."""
    plain = []
    for _ in range(2):
        torch.manual_seed(11)
        with torch.no_grad():
            plain.append(model(**batch))
    refusal = ""
    torch.manual_seed(11)
    with torch.no_grad(), attrace.record(model) as trace:
        trace.output = model(**batch)
    if not identical(*plain):  # nothing can be said of its output then
        return {"status": "no inputs", "reason": "two plain runs from one seed differ"}
    if not identical(plain[0], trace.output):
        return {"status": "wrong", "reason": "the output differs with the recorder on"}
    try:
        trace.check()
    except CaptureError as error:
        refusal = " ".join(str(error).split())
    here = oracle.run(model, batch)
    there, own = None, []
    try:
        twin = tiny_models.built(cls, config, "eager")
        twin.load_state_dict(model.state_dict())
        there = oracle.run(twin, batch, output_attentions=True)
        own = oracle.own_maps(there.output)
    except Exception:  # no eager attention, or no weights returned: the other evidence stands
        try:
            there = oracle.run(twin, batch)
        except Exception:
            there = None
    return compared(model_type, trace, refusal, here, there, own)


# Comparing


WITHOUT_SOFTMAX = {
    "autoformer": "weighs time delays found by autocorrelation, not tokens",
    "longformer": "is a band of neighbours beside global tokens, multiplied in chunks that overlap",
    "led": "is a band of neighbours beside global tokens, multiplied in chunks that overlap",
    "mra": "is approximated at several resolutions, without a softmax",
    "reformer": "is among tokens of one hash bucket, without a softmax",
    "yoso": "is estimated by hashing, without a softmax",
}
"""Types whose attention is no softmax that multiplies values, in words for the table."""


def compared(
    model_type: str, trace: Any, refusal: str, here: oracle.Evidence, there: Any, own: list[Tensor]
) -> dict[str, Any]:
    seen_products = [m for i, m in enumerate(here.softmaxes) if i in here.multiplied]
    calls = len(here.probed) + len(here.modules) + len(seen_products)
    other = WITHOUT_SOFTMAX.get(model_type)
    if refusal and other:
        return {"status": "refused", "reason": f"{refusal} (Its attention {other}.)", "ops": 0}
    if refusal and not calls and not own and not trace.unread:
        return {"status": "no attention", "reason": "no softmax that multiplies values in this model"}
    sources: list[tuple[str, list[Tensor]]] = [
        ("own weights", own),
        ("probing", here.probed),
        ("own weights", here.modules),
        ("softmax", seen_products),
        ("softmax", [m for i, m in enumerate(here.softmaxes) if i not in here.multiplied]),
        ("softmax of the eager run", there.softmaxes if there else []),
    ]
    used: set[tuple[int, int]] = set()
    maps_read: list[Tensor] = []
    found: dict[str, int] = {}
    wrong: list[str] = []
    for op in trace.ops:
        try:
            weights = op.weights()
        except Exception as error:
            wrong.append(f"{op.name}: {tiny_models.first_line(error)}")
            continue
        maps_read.append(weights)
        label = ""
        closest = float("inf")
        for s, (name, maps) in enumerate(sources):
            for m, reference in enumerate(maps):
                if (s, m) in used:
                    continue
                gap = difference(weights, reference)
                closest = min(closest, gap)
                if gap <= TOLERANCE:
                    used.add((s, m))
                    label = label or name
                    break
        if label:
            found[label] = found.get(label, 0) + 1
        else:
            wrong.append(f"{op.name} {op.shape}: differs by {closest:.2g}")
    beside = {shape for _, shape in trace.beside.values()} - {op.shape for op in trace.ops}
    missed = [
        f"{name} {tuple(maps[m].shape)}"
        for s, (name, maps) in enumerate(sources)
        if s in (1, 2, 3)
        for m in range(len(maps))
        if (s, m) not in used and tuple(maps[m].shape) not in beside
    ]
    # An own map that differs from what runs here is the library's affair; one that is part of no map here is missing.
    missed += [
        f"own weights {tuple(o.shape)}"
        for m, o in enumerate(own)
        if (0, m) not in used
        and tuple(o.shape) not in beside
        and not any(difference(w, o) < float("inf") or is_part(w, o) or is_part(o, w) for w in maps_read)
    ]
    result: dict[str, Any] = {"ops": len(trace.ops), "evidence": found, "own": len(own)}
    if wrong:
        return {**result, "status": "wrong", "reason": "; ".join(wrong[:3]), "refusal": refusal}
    if refusal:
        return {**result, "status": "refused", "reason": refusal, "missed": missed[:4]}
    if missed:
        return {**result, "status": "wrong", "reason": "missed " + "; ".join(missed[:4])}
    return {**result, "status": "covered", "kinds": sorted({op.kind for op in trace.ops}), "gaps": trace.gaps}


def difference(weights: Tensor, reference: Tensor) -> float:
    """The largest difference in rows that attend to anything; infinite where the two cannot be one map.

    A row of zeros is a row masked whole: the reference then holds NaN there, or the same weight everywhere.
    """
    batch, heads, queries, keys = weights.shape
    live = weights.sum(-1) != 0
    best = float("inf")
    for cut in (slice(None), slice(0, keys), slice(1, None)):  # a sink's column comes first or last
        ref = reference[..., cut]
        if ref.shape[-1] != keys or ref.numel() != weights.numel():
            continue
        for laid in layouts(ref, (batch, heads, queries, keys)):
            empty = laid.isnan().any(-1) | (laid.amax(-1) - laid.amin(-1) <= TOLERANCE)
            if bool((~live & ~empty).any()):
                continue
            gap = (weights - laid.to(weights.dtype)).abs().amax(-1)
            best = min(best, float(gap[live].max()) if bool(live.any()) else 0.0)
            if best <= TOLERANCE:
                return best
    return best


def is_part(weights: Tensor, reference: Tensor) -> bool:
    """Whether one is the last or the first rows and columns of the other.

    The library returns a map without a prompt of its own, or one map of images that attend apart from each other.
    """
    queries, keys = reference.shape[-2:]
    if reference.shape[:-2] != weights.shape[:-2] or queries > weights.shape[-2] or keys > weights.shape[-1]:
        return False
    parts = (weights[..., -queries:, -keys:], weights[..., :queries, :keys])
    return any(float((part - reference).abs().max()) <= TOLERANCE for part in parts)


def layouts(ref: Tensor, shape: tuple[int, int, int, int]) -> Any:
    """The ways in which a map may lie in (B, H, Q, T): as it is, or with blocks or windows among its leading axes."""
    if tuple(ref.shape) == shape:
        yield ref
    elif ref.ndim == 3 and ref.shape[1:] == shape[2:]:
        yield ref.reshape(shape)
    elif ref.ndim >= 4 and ref.shape[-2:] == shape[2:] and ref.ndim > 4:
        for order in itertools.permutations(range(ref.ndim - 2)):
            yield ref.permute(*order, -2, -1).reshape(shape)
    elif ref.ndim >= 5:
        for order in itertools.permutations(range(ref.ndim - 1)):
            yield ref.permute(*order, -1).reshape(shape)
