"""What `rollout` accepts: each check returns the plain form of an argument or says what is wrong with it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from attrace.errors import InputError, NonFiniteError, ShapeError
from attrace.ops.namespace import Framework, dtype_name, framework_of, wide_dtype


def check_residual(residual: Any) -> float:
    return _check_share("residual", residual, "from 0 to 1", lambda share: 0.0 <= share <= 1.0)


def check_discard(discard: Any) -> float:
    return _check_share("discard", discard, "from 0 to below 1", lambda share: 0.0 <= share < 1.0)


def check_tolerance(tolerance: Any) -> float:
    return _check_share("tolerance", tolerance, "from 0 to below 1", lambda share: 0.0 <= share < 1.0)


def _check_share(name: str, value: Any, bounds: str, fits: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not fits(float(value)):
        raise InputError(
            f"Expected {name} to be a number {bounds}. Received: {value!r}. Give a share, not a percentage."
        )
    return float(value)


def check_switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"Expected {name} to be True or False. Received: {value!r}. Give one of the two.")
    return value


def check_positions(name: str, positions: Any, n: int) -> tuple[list[int], bool]:
    """Token positions as indices from 0, and whether a single one was given."""
    # A plain integer comes first: torch.compile may carry it as a symbol, which has no attributes to ask for.
    single = isinstance(positions, int) or (hasattr(positions, "__index__") and not _has_axis(positions))
    wanted = [positions] if single else positions
    if isinstance(wanted, (str, bytes, set, frozenset, dict)) or not isinstance(wanted, Iterable):
        raise InputError(f"Expected {name} to be a token position or several. Received: {positions!r}. Give integers.")
    found = [check_index(name, position, n, f"the maps have n = {n} tokens") for position in wanted]
    if not found:
        raise InputError(
            f"Expected {name} to name at least one position. Received: none. Leave {name} out for the whole map."
        )
    return found, single


def check_index(name: str, value: Any, count: int, why: str) -> int:
    index = check_integer(name, value)
    if not -count <= index < count:
        raise InputError(
            f"Expected {name} from 0 to {count - 1} (or -{count} to -1, from the end). Received: {index}. "
            f"Choose one within: {why}."
        )
    return index + count if index < 0 else index


def check_integer(name: str, value: Any) -> int:
    """A plain integer; flags are none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # first, as above: a symbol has no attributes to ask for
    flag = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        index = None if flag else operator.index(value)
    except TypeError:
        index = None
    if index is None:
        raise InputError(f"Expected {name} to be given by integers. Received: {value!r}. Give integers.")
    return index


def check_integers(name: str, values: Any) -> list[int]:
    """Several integers, of which it is not known yet how many there are to choose from."""
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise InputError(
            f"Expected {name} to be a sequence of integers. Received: {values!r}. Write {name}=[11] for one, "
            f"{name}=range(6, 12) for a run of them."
        )
    return [check_integer(name, value) for value in values]


def _has_axis(value: Any) -> bool:
    return len(getattr(value, "shape", ())) > 0


class MapReader:
    """Hands out the maps of the chosen layers one by one, in forward order or from the top.

    It never keeps a map: a generator can make each one when it is asked for, and nothing refers to the last
    one while the next is made.  (No `enumerate`, no loop variable: both hold on to what they gave.)
    """

    def __init__(self, maps: Any, layers: Any, *, top_first: bool) -> None:
        self.layer = -1
        """The layer of the map that `take` hands out next."""
        self._count = _length(maps)
        self._maps = maps
        self._iterator: Iterator[Any] | None = None
        if self._count is None:
            if top_first:
                raise InputError(
                    "Expected a sequence of maps for a target, as its chain starts at the last layer. "
                    f"Received: {type(maps).__name__}. Use list(maps), or rollout(maps)[:, target], "
                    "which holds one layer at a time."
                )
            self._iterator = iter(maps)
        elif self._count == 0:
            raise InputError(_NO_MAPS)
        self._position = 0
        """How many maps the iterator has given."""
        self._order = self._chosen(layers, top_first)
        self._next = 0

    def _chosen(self, layers: Any, top_first: bool) -> Sequence[int] | None:
        chosen: Sequence[int] | None = None
        if layers is not None:
            chosen = self._check_layers(layers)
        elif self._count is not None:
            chosen = range(self._count)
        return chosen[::-1] if top_first and chosen is not None else chosen

    def _check_layers(self, layers: Any) -> list[int]:
        given = check_integers("layers", layers)
        if not given:
            raise InputError(
                "Expected at least one layer. Received: an empty list, which never means all. "
                "Leave layers out to use all of them."
            )
        if self._count is None:
            # The length is not known yet: from the end nothing can be counted.
            chosen = [check_index("layers", layer, _ANY, "layers of a model") for layer in given]
            if any(layer < 0 for layer in given):
                raise InputError(
                    f"Expected layers from 0 where maps come from an iterator. Received: {given}. "
                    "Use list(maps) to count from the end."
                )
        else:
            why = f"there are {self._count} layers"
            chosen = [check_index("layers", layer, self._count, why) for layer in given]
        if len(set(chosen)) != len(chosen):
            raise InputError(f"Expected each layer once. Received: {given}. Leave the repeated ones out.")
        return sorted(chosen)

    def advance(self) -> bool:
        """Move to the next chosen layer; False when there is none left."""
        if self._order is None:
            return self._skip_to(self._position)
        if self._next == len(self._order):
            return False
        wanted = self._order[self._next]
        self._next += 1
        if self._iterator is None:
            self.layer = wanted
            return True
        if not self._skip_to(wanted):
            raise InputError(
                f"Expected layers from 0 to {self._position - 1}: there are {self._position} maps. "
                f"Received: {wanted}. Choose one within."
            )
        return True

    def take(self) -> Any:
        """The map of the layer that `advance` moved to; to be called once."""
        if self._iterator is None:
            return self._maps[self.layer]
        return self._held.pop()

    def _skip_to(self, layer: int) -> bool:
        assert self._iterator is not None
        while self._position < layer:
            if next(self._iterator, _END) is _END:
                return self._ended()
            self._position += 1
        self._held = [next(self._iterator, _END)]
        if self._held[0] is _END:
            return self._ended()
        self.layer = self._position
        self._position += 1
        return True

    def _ended(self) -> bool:
        if self._position == 0:
            raise InputError(_NO_MAPS)
        return False


_END = object()
_ANY = 1 << 40
_NO_MAPS = (
    "Expected at least one map of shape (B, H, n, n). Received: none. "
    "Check that the model returned its attention weights (in transformers: output_attentions=True, eager attention)."
)


def _length(maps: Any) -> int | None:
    """The number of layers, or None for an iterator."""
    shape = getattr(maps, "shape", None)
    if shape is not None and framework_of(maps) is not None:
        if len(shape) != 5 or shape[0] is None:
            raise ShapeError(
                f"Expected maps of all layers: a sequence of (B, H, n, n), or one array (L, B, H, n, n). "
                f"Received: one array of shape {_shape(maps)}. Write [maps] for a single layer."
            )
        return int(shape[0])
    indexed = hasattr(maps, "__len__") and hasattr(maps, "__getitem__")
    if isinstance(maps, (str, bytes, set, frozenset, dict)) or not (indexed or isinstance(maps, Iterable)):
        raise InputError(
            f"Expected a sequence of maps, first layer first. Received: {type(maps).__name__}. "
            "Give a list of arrays (B, H, n, n)."
        )
    return len(maps) if indexed else None


@dataclass(frozen=True, slots=True)
class MapKind:
    """What all maps of one call have in common, and the layer it was read from."""

    framework: Framework
    dtype: str
    batch: int | None
    n: int
    layer: int


def check_map(attention: Any, layer: int, kind: MapKind | None) -> MapKind:
    """Refuse a map that is not (B, H, n, n) with finite, non-negative entries, like the ones before it.

    The values are read only where they are known: not under `jax.jit`, `jax.grad`, `tf.function`,
    `torch.compile`.
    """
    framework = framework_of(attention)
    if framework is None:
        hint = (
            "The attention backend in use returns no weights: choose one that does (eager)"
            if attention is None
            else "Convert it first, for instance with numpy.asarray"
        )
        raise InputError(
            f"Expected a NumPy, PyTorch, JAX or TensorFlow array in layer {layer}. "
            f"Received: {type(attention).__name__}. {hint}."
        )
    shape = _check_shape(attention, layer)
    name = dtype_name(attention)
    wide_dtype(name)
    batch, n = shape[0], shape[3]
    if kind is None:
        kind = MapKind(framework, name, batch, n, layer)
    elif framework.name != kind.framework.name or name != kind.dtype:
        raise InputError(
            f"Expected {kind.framework.name} {kind.dtype} maps in all layers, as in layer {kind.layer}. "
            f"Received: {framework.name} {name} in layer {layer}. Convert all maps to one kind."
        )
    elif n != kind.n or (batch is not None and kind.batch is not None and batch != kind.batch):
        raise ShapeError(
            f"Expected maps of one batch and one length in all layers: B = {kind.batch}, n = {kind.n}, "
            f"as in layer {kind.layer}. Received: B = {batch}, n = {n} in layer {layer}. Models that merge "
            "tokens or attend in windows need their maps expanded to one set of tokens first."
        )
    if framework.known(attention):
        _check_values(framework, attention, layer)
    return kind


def _check_shape(attention: Any, layer: int) -> tuple[Any, ...]:
    shape = tuple(attention.shape)
    if len(shape) == 3:
        raise ShapeError(
            f"Expected a map of shape (B, H, n, n) in layer {layer}. Received: {_shape(attention)}, three axes. "
            "Add the batch axis with maps[None], or the head axis with maps[:, None]."
        )
    if len(shape) != 4:
        raise ShapeError(
            f"Expected a map of shape (B, H, n, n) in layer {layer}. Received: {_shape(attention)}. "
            "Give one map per layer with four axes."
        )
    if shape[1] is None or shape[2] is None or shape[3] is None:
        raise ShapeError(
            f"Expected a map with known H and n in layer {layer}. Received: {_shape(attention)}. "
            "State them in the input signature of the tf.function; the batch may stay open."
        )
    if shape[2] != shape[3]:
        raise ShapeError(
            f"Expected a square map (B, H, n, n) in layer {layer}. Received: {_shape(attention)}: "
            f"{shape[2]} rows, {shape[3]} columns. Missing rows are not filled in: run the whole text through the "
            "model at once; for cross attention use the encoder-decoder form."
        )
    if 0 in shape:
        raise ShapeError(
            f"Expected a map with no empty axis in layer {layer}. Received: {_shape(attention)}. Leave it out."
        )
    return shape


def _shape(x: Any) -> str:
    return str(tuple(x.shape))


def _check_values(framework: Framework, attention: Any, layer: int) -> None:
    values = framework.constant(attention)
    # Two reductions and no array of booleans; a NaN fails both comparisons.
    lowest, highest = framework.extremes(values)
    if not framework.known(lowest):
        return  # a constant inside a function that JAX traces
    if float(lowest) >= 0.0 and float(highest) < float("inf"):
        return
    import numpy as np

    array = framework.to_numpy(values)
    bad = ~np.isfinite(array)
    if bad.any():
        batch, head, row, column = (int(index) for index in np.argwhere(bad)[0])
        value = array[batch, head, row, column]
        raise NonFiniteError(
            f"Expected finite maps. Received: {value} in layer {layer}, batch {batch}, head {head}, row {row}, "
            f"column {column}. A row that was masked as a whole often gives NaN: set such rows to zero."
        )
    batch, head, row, column = (int(index) for index in np.argwhere(array < 0.0)[0])
    raise InputError(
        f"Expected maps without negative entries. Received: {array[batch, head, row, column]} in layer {layer}, "
        f"batch {batch}, head {head}, row {row}, column {column}. Give the weights after the softmax, "
        "not scores or gradients."
    )
