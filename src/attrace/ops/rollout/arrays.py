"""Rollout of maps that the user holds, in the maps' own framework, one layer at a time.

A layer's operator is never formed where a product with it will do.  With F the fused map (B, n, n), p the
residual and s the row sums of (1 - p) F + p I, the operator is diag(1 / s) ((1 - p) F + p I), so

    rows     r (B, k, n):  r / s, then (1 - p) r F + p r
    columns  x (B, n, k):  ((1 - p) F x + p x) / s

The whole map is the second with x the running product.  Beside the state only one layer's map is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attrace.errors import InputError
from attrace.ops.heads import fuse_heads
from attrace.ops.namespace import Framework
from attrace.ops.rollout.checks import (
    MapKind,
    MapReader,
    check_discard,
    check_map,
    check_positions,
    check_residual,
    check_switch,
)
from attrace.ops.rollout.discard import drop_smallest
from attrace.types import Heads


def rollout(
    maps: Iterable[Any],
    *,
    heads: Heads = "mean",
    residual: float = 0.5,
    normalize: bool = True,
    discard: float = 0.0,
    layers: Sequence[int] | None = None,
    target: int | Sequence[int] | None = None,
    source: int | Sequence[int] | None = None,
) -> Any:
    """Roll out attention: how much each output draws on each input, through all layers.

    Each layer's heads are fused to A, its smallest cells are discarded, the residual is mixed in,
    `(1 - residual) * A + residual * I`, each row is divided by its own sum (`normalize`), and the layers are
    multiplied, last layer leftmost: row i of the result is output i, column j input j.

    Shapes: maps of L layers, each (B, H, n, n) with query rows and key columns -> (B, n, n).

    maps
        A sequence over layers in forward order, or one array (L, B, H, n, n): NumPy, PyTorch, JAX or
        TensorFlow, all of one framework and dtype.  Any iterable will do unless a target is asked for: each
        map is let go before the next is taken.  (n, n) is the same in all layers; H may differ.
    heads
        "mean", "max", "min", one head's index, or a weight per head; weights are divided by their sum.
    residual
        Share of the layer's input that bypasses attention, from 0 to 1.
    normalize
        Divide each row by its own sum.  A row of zeros becomes that of the identity, or with residual 0
        stays zero. Without it rows stay short where a sink took mass: `1 - result.sum(-1)` is what is
        missing, and `attrace.ops.rollout.row_mass` tells it layer by layer.  `residual=0.0, normalize=False`
        is the plain product of the fused maps.
    discard
        From 0 to below 1: the `floor(discard * n * n)` smallest cells of each fused map become zero, over
        the whole map; of equal cells those first in reading order.
    layers
        Indices of the layers to use, negative ones from the end; always multiplied in forward order.
    target, source
        Output or input position, negative ones from the end.  `target=i` gives row i, (B, n), by a chain of
        vector-matrix products from the last layer down; `source=j` gives column j, (B, n), by a chain from
        the first layer up; neither forms an n x n product.  Several positions give what indexing the whole
        map would: `target=[..]` rows (B, k, n), `source=[..]` columns (B, n, k).

    Returns an array of the maps' framework, on their device: float64 for float64, else float32; half
    precision is computed in float32.  The maps are not changed.  Gradients flow in PyTorch, JAX and
    TensorFlow (which cells are discarded counts as constant), and it works under `jax.jit`, `jax.grad`,
    `tf.function` (H and n known) and `torch.compile`, where values cannot be checked.  With TensorFlow on a
    GPU that offers it, products are in TensorFloat-32 unless
    `tf.config.experimental.enable_tensor_float_32_execution(False)` is called.

    Raises ShapeError for maps that are not (B, H, n, n) or do not fit each other; NonFiniteError for NaN or
    infinity, naming layer, batch, head and row; InputError for negative entries, integer or boolean maps,
    mixed frameworks or dtypes, and for options that do not exist.

    Source: Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", arXiv 2005.00928, section 4.

    >>> import numpy as np
    >>> first = np.array([[[[0.5, 0.5], [0.0, 1.0]]]])  # 1 item, 1 head, 2 tokens
    >>> last = np.array([[[[1.0, 0.0], [0.5, 0.5]]]])
    >>> rollout([first, last])
    array([[[0.75  , 0.25  ],
            [0.1875, 0.8125]]])
    >>> rollout([first, last], target=-1)
    array([[0.1875, 0.8125]])
    """
    recipe = _Recipe(heads, check_residual(residual), check_switch("normalize", normalize), check_discard(discard))
    if target is not None and source is not None:
        raise InputError(
            f"Expected a target or a source. Received: target={target!r} and source={source!r}. "
            "For one cell take rollout(maps, target=i)[:, j]."
        )
    chain = _Chain(recipe, MapReader(maps, layers, top_first=target is not None))
    if target is not None:
        return chain.rows(target)
    if source is not None:
        return chain.columns(source)
    return chain.whole()


def row_mass(
    maps: Iterable[Any],
    *,
    heads: Heads = "mean",
    residual: float = 0.5,
    normalize: bool = True,
    discard: float = 0.0,
    layers: Sequence[int] | None = None,
) -> Any:
    """Total of every row of the rollout after each layer, without forming it: L maps (B, H, n, n) -> (B, L,
    n).

    With `normalize=True` all are one (zero for a row of zeros at residual 0).  With `normalize=False` what
    is missing from one has gone to the model's sinks or was discarded; `1 - row_mass(...)[:, -1]` is what
    the result lacks. Arguments, dtypes and errors are those of `rollout`.

    >>> import numpy as np
    >>> short = np.array([[[[0.5, 0.25], [0.0, 1.0]]]])  # a sink took a quarter of row 0
    >>> row_mass([short, short], normalize=False)
    array([[[0.875  , 1.     ],
            [0.78125, 1.     ]]])
    """
    recipe = _Recipe(heads, check_residual(residual), check_switch("normalize", normalize), check_discard(discard))
    return _Chain(recipe, MapReader(maps, layers, top_first=False)).masses()


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a layer's map becomes its operator."""

    heads: Heads
    residual: float
    normalize: bool
    discard: float

    def fused(self, framework: Framework, attention: Any) -> Any:
        return drop_smallest(framework, fuse_heads(attention, self.heads), self.discard)

    def mixed(self, product: Any, state: Any) -> Any:
        return (1.0 - self.residual) * product + self.residual * state

    def row_sums(self, framework: Framework, fused: Any) -> Any:
        """(B, n, n) -> (B, n, 1): what each row is divided by; one for a row of zeros, which stays one."""
        xp = framework.xp
        sums = (1.0 - self.residual) * xp.sum(fused, axis=-1, keepdims=True) + self.residual
        return xp.where(sums == 0.0, xp.ones_like(sums), sums)

    def apply_right(self, framework: Framework, fused: Any, rows: Any) -> Any:
        """Rows (B or 1, k, n) times the operator."""
        if self.normalize:
            rows = rows / framework.xp.matrix_transpose(self.row_sums(framework, fused))
        return self.mixed(framework.matmul(rows, fused), rows)

    def apply_left(self, framework: Framework, fused: Any, columns: Any) -> Any:
        """The operator times columns (B or 1, n, k)."""
        product = self.mixed(framework.matmul(fused, columns), columns)
        return product / self.row_sums(framework, fused) if self.normalize else product

    def dense(self, framework: Framework, fused: Any) -> Any:
        """The operator itself, (B, n, n)."""
        mixed = self.mixed(fused, framework.eye(fused.shape[-1], fused))
        return mixed / self.row_sums(framework, fused) if self.normalize else mixed


_Step = Callable[[Framework, Any, Any], Any]


class _Chain:
    """Products of the operators with a state that starts small and is all that is kept."""

    def __init__(self, recipe: _Recipe, reader: MapReader) -> None:
        self._recipe = recipe
        self._reader = reader
        self._kind: MapKind | None = None
        self._known: MapKind

    def rows(self, target: Any) -> Any:
        picked: list[bool] = []

        def start(framework: Framework, fused: Any, state: Any) -> Any:
            positions, single = check_positions("target", target, self._known.n)
            picked.append(single)
            return self._recipe.apply_right(framework, fused, framework.one_hot(positions, fused))

        state = self._run(start, self._recipe.apply_right)
        return state[:, 0, :] if picked[0] else state

    def columns(self, source: Any) -> Any:
        picked: list[bool] = []

        def start(framework: Framework, fused: Any, state: Any) -> Any:
            positions, single = check_positions("source", source, self._known.n)
            picked.append(single)
            columns = framework.xp.matrix_transpose(framework.one_hot(positions, fused))
            return self._recipe.apply_left(framework, fused, columns)

        state = self._run(start, self._recipe.apply_left)
        return state[:, :, 0] if picked[0] else state

    def whole(self) -> Any:
        def start(framework: Framework, fused: Any, state: Any) -> Any:
            return self._recipe.dense(framework, fused)

        return self._run(start, self._recipe.apply_left)

    def masses(self) -> Any:
        totals: list[Any] = []

        def start(framework: Framework, fused: Any, state: Any) -> Any:
            return step(framework, fused, framework.xp.ones_like(fused[:1, :, :1]))

        def step(framework: Framework, fused: Any, state: Any) -> Any:
            state = self._recipe.apply_left(framework, fused, state)
            totals.append(state[:, :, 0])
            return state

        framework_state = self._run(start, step)
        framework = self._known.framework
        return framework.xp.stack([framework.follow(total, framework_state) for total in totals], axis=1)

    def _run(self, start: _Step, step: _Step) -> Any:
        state = None
        while self._reader.advance():
            # The map is handed on unnamed, so that nothing here holds it when the next one is made.
            state = self._layer(self._reader.take(), start if state is None else step, state)
        return state

    def _layer(self, attention: Any, step: _Step, state: Any) -> Any:
        self._kind = self._known = check_map(attention, self._reader.layer, self._kind)
        framework = self._known.framework
        fused = self._recipe.fused(framework, attention)
        return step(framework, fused, None if state is None else framework.follow(state, fused))
