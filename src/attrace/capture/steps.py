"""The recording side of generation: what each call of the model adds to a cache, and each key kept once."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attrace.capture.torch_ops import QueryKeyAttention

GENERATE = "transformers.generation.utils"
"""The module whose frames tell how a call is decoded."""


@dataclass(eq=False)
class Call:
    """One call of the model: where its tokens stand in the sequence, and who asked for it."""

    past: int = 0
    """How many tokens the cache held before the call."""
    ids: Tensor | None = None
    """(B, q) token ids, where the model was given ids."""
    tokens: int | None = None
    """How many tokens the model was given, where it was given ids or embeddings."""
    cache: weakref.ref[Any] | None = None
    running: bool = False
    """Whether the model runs, from the call's begin to its end."""
    cached: bool = False
    """Whether the call was given a cache (also an empty one)."""
    in_place: bool = False
    """Whether that cache is written to in place."""
    decoding: str = ""
    """The decoding loop above the call: "_sample", "_beam_search", "_assisted_decoding", or none of them."""
    continues: bool = False
    """Whether the call before was given the same cache, or none as well."""
    reordered: bool = False
    """Whether rows of the batch changed places since the call before."""

    def made(self, output: Any) -> None:
        """Note the cache that the model itself began in this call and gave back."""
        if self.cache is None:
            found = (getattr(output, name, None) for name in ("cache", "past_key_values"))
            cache = next((value for value in found if callable(getattr(value, "get_seq_length", None))), None)
            self.cache = None if cache is None else weakref.ref(cache)


def call_of(given: Mapping[str, Any], before: Call) -> Call:
    """What the arguments of the model's forward say of a call."""
    cache = next((value for value in given.values() if callable(getattr(value, "get_seq_length", None))), None)
    ids = given.get("decoder_input_ids", given.get("input_ids"))
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        ids = None
    embeds = given.get("decoder_inputs_embeds", given.get("inputs_embeds"))
    tokens = next((t.shape[1] for t in (ids, embeds) if isinstance(t, Tensor) and t.ndim > 1), None)
    call = Call(ids=None if ids is None else ids.detach().clone(), tokens=tokens, decoding=_decoding())
    if cache is not None:
        call.past, call.cached, call.cache = _length(cache), True, weakref.ref(cache)
        call.in_place = is_in_place(cache)
        call.continues = before.cache is not None and before.cache() is cache
    elif isinstance(legacy := given.get("past_key_values"), tuple | list) and legacy:
        first = legacy[0][0] if isinstance(legacy[0], tuple | list) and legacy[0] else None
        if isinstance(first, Tensor) and first.ndim > 2:
            call.past, call.cached = first.shape[-2], True
    else:
        call.continues = not before.cached
    return call


def _length(cache: Any) -> int:
    try:
        return int(cache.get_seq_length())
    except Exception:  # of state-space layers alone, or not transformers' own: the model's run must not end here
        return 0


def _decoding() -> str:
    """The name of the innermost decoding loop on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("_sample", "_beam_search", "_assisted_decoding") and frame.f_globals.get("__name__") == GENERATE:
            return name
        frame = frame.f_back
    return ""


def extent(past: int, queries: int, keys: int) -> tuple[int, int]:
    """Position of the first key, and how many of the keys there are tokens: the rest is room in a static cache."""
    end = past + queries
    return (0, end) if keys >= end else (end - keys, keys)


@dataclass(eq=False)
class Keys:
    """The keys of one layer over the calls: (B, K, positions, D), each position once.

    A cache hands out all of its keys in each call, made anew or written to in place; held as they come they would
    take the square of the length.  A step whose earlier keys are those that are held adds only its own.
    """

    held: Tensor | None = None
    first: int = 0
    """Position of the first key held."""
    end: int = 0
    before: tuple[QueryKeyAttention, int] | None = field(default=None, repr=False)
    """The operator of the first call, and the position of its first key, until there is a second call."""

    def keep(self, op: QueryKeyAttention, call: Call) -> None:
        """Give a step's operator its keys out of what is held; room that a static cache leaves is cut off."""
        start, filled = extent(call.past, op.shape[2], op.shape[3])
        if filled < op.shape[3] and not op.leaves_room(filled):
            if call.in_place:
                op.hold(op.key.clone())
            return
        if not call.in_place and (call.past == 0 or (self.held is None and self.before is None)):
            self.held, self.before = None, (op, start)  # they stay where they are until a second call comes
            return
        with torch.inference_mode(False), torch.no_grad():
            if self.before is not None:
                earlier, at = self.before
                self._take(earlier.key, at, at + earlier.shape[3])
                self._hand(earlier, at, earlier.shape[3])
                self.before = None
            self._add(op.key[:, :, :filled], start, call)
            self._hand(op, start, filled)

    def _hand(self, op: QueryKeyAttention, start: int, count: int) -> None:
        assert self.held is not None
        op.hold(self.held[:, :, start - self.first : start - self.first + count])

    def _add(self, key: Tensor, start: int, call: Call) -> None:
        """Add the keys from `call.past` on, where those before it are the ones that are held."""
        held, past, end = self.held, call.past, start + key.shape[2]
        if held is not None and held.shape[1] > key.shape[1] and held.shape[1] % key.shape[1] == 0:
            held = self.held = held[:, :: held.shape[1] // key.shape[1]]  # its heads were repeated for each query head
        if held is None or held.shape[:2] != key.shape[:2] or start < self.first or past > self.end or past < start:
            self._take(key, start, end)
            return
        old, known = key[:, :, : past - start], held[:, :, start - self.first : past - self.first]
        if not torch.equal(old, known):
            call.reordered = _changed_places(old, known)
            self._take(key, start, end)
            return
        if end - self.first > held.shape[2] or past < self.end:  # no room, or other keys stand there since
            self._take(held[:, :, : past - self.first], self.first, past, room=2 * (end - self.first))
        assert self.held is not None
        self.held[:, :, past - self.first : end - self.first] = key[:, :, past - start :]
        self.end = end

    def _take(self, key: Tensor, start: int, end: int, *, room: int = 0) -> None:
        held = key.new_empty(*key.shape[:2], max(room, end - start), key.shape[3])
        held[:, :, : end - start] = key[:, :, : end - start]
        self.held, self.first, self.end = held, start, end


class KeyStore:
    """The keys of all layers of a recording."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, int], Keys] = {}
        self._placed: Counter[str] = Counter()
        self._call: Call | None = None
        self._shared: object = None

    def share(self, ops: list[Any], call: Call) -> None:
        """Hold the keys of the operator that has just been recorded with those of its layer's other steps."""
        op: Any = ops[-1] if ops else None
        if not call.running or not call.cached or op is self._shared or not hasattr(op, "leaves_room"):
            return
        if op.kind != "self":
            return
        if call is not self._call:
            self._call = call
            self._placed.clear()
        self._shared, place = op, (op.name, self._placed[op.name])
        self._placed[op.name] += 1
        self._keys.setdefault(place, Keys()).keep(op, call)


def _changed_places(now: Tensor, before: Tensor) -> bool:
    """Whether each item's last key is an earlier item's, for some item not its own."""
    if now.shape[0] < 2 or not now.shape[2]:
        return False
    same = (now[:, None, :, -1] == before[None, :, :, -1]).flatten(2).all(2)
    return bool(same.any(1).all()) and not bool(same.diagonal().all())


def joins_cache(shape: tuple[int, int, int, int], call: Call) -> bool:
    """Whether keys that are more than the queries are those of the cache, not of another stream."""
    queries, keys = shape[2:]
    if not call.cached or keys <= queries:
        return False
    if keys == call.past + queries:
        return True
    layers = _layers(call.cache() if call.cache is not None else None)
    if keys > call.past + queries:
        return any(getattr(layer, "max_cache_len", None) == keys for layer in layers)
    return any(getattr(layer, "is_sliding", False) for layer in layers)


def is_in_place(cache: Any) -> bool:
    """Whether a cache's tensors are written to in place, so that the keys it gave will not be what they were."""
    return any(hasattr(layer, "max_cache_len") for layer in _layers(cache))


def _layers(cache: Any) -> list[Any]:
    return list(getattr(getattr(cache, "self_attention_cache", cache), "layers", None) or ())


def below_compiler() -> bool:
    """Whether torch.compile looks at every function that is called in this thread now."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return False
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() not in {None, False}
