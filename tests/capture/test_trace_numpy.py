"""A trace of operators on NumPy arrays: the same answers as the dense rollout, and no other framework needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import attrace
from attrace.capture.trace import Trace
from attrace.errors import CaptureError, ShapeError
from attrace.ops.heads import fuse_heads

B, H, N, LAYERS = 2, 3, 6, 4


@dataclass(eq=False)
class Dense:
    """A recorded call that simply holds its map."""

    map: NDArray[np.float32]
    vectors: ClassVar[str] = "numpy"
    kind: ClassVar[str] = "self"
    causal: ClassVar[bool] = False
    block: ClassVar[None] = None
    device: ClassVar[str] = "cpu"
    name: str = "layer"
    layer: int = 0

    @property
    def dtype(self) -> Any:
        return self.map.dtype

    @property
    def heads(self) -> int:
        return self.map.shape[1]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.map.shape

    def weights(self, rows: Any = None) -> NDArray[np.float32]:
        return self.map if rows is None else self.map[:, :, rows]

    def fused(self, heads: Any = "mean") -> Any:
        return fuse_heads(self.map, heads)

    def matvec(self, x: NDArray[Any], *, heads: Any = "mean") -> NDArray[Any]:
        return self.fused(heads).astype(x.dtype) @ x

    def rmatvec(self, r: NDArray[Any], *, heads: Any = "mean") -> NDArray[Any]:
        return self.fused(heads).astype(r.dtype).swapaxes(1, 2) @ r


def maps() -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    return [rng.dirichlet(np.full(N, 0.4), (B, H, N)).astype(np.float32) for _ in range(LAYERS)]


def trace() -> Trace:
    return Trace("Model", ops=[Dense(m) for m in maps()], starts=[0])


@pytest.mark.parametrize(
    "options",
    [{}, {"residual": 0.2}, {"heads": "max"}, {"heads": [1, 2, 1], "layers": [0, 2]}, {"discard": 0.4}],
    ids=str,
)
def test_every_question_equals_the_dense_rollout(options: dict[str, Any]) -> None:
    dense = attrace.rollout([m.astype(np.float64) for m in maps()], **options)
    run = trace()
    for answer, expected in (
        (run.rollout(**options), dense),
        (run.rollout(target=-2, **options), dense[:, -2]),
        (run.rollout(target=[0, 3], **options), dense[:, [0, 3]]),
        (run.rollout(source=1, **options), dense[..., 1]),
        (run.rollout(source=[1, 4], **options), dense[..., [1, 4]].swapaxes(1, 2)),
        (run.rollout(segments=[(0, 2), (2, 6)], **options), np.add.reduceat(dense, [0, 2], axis=2)),
        (run.rollout(target=np.full(N, 1 / N), **options), dense.mean(1)),
    ):
        assert isinstance(answer, np.ndarray)
        assert answer.dtype == np.float32
        np.testing.assert_allclose(answer, expected, atol=2e-6, rtol=0)


def test_padding_is_not_counted_as_small_cells() -> None:
    real = np.arange(N) < np.array([[N], [N - 2]])
    padded = [np.where(real[:, None, None, :] | ~real[:, None, :, None], m, 0).astype(np.float32) for m in maps()]
    run = Trace("Model", ops=[Dense(m) for m in padded])
    run.begin(real.astype(np.int32))
    alone = Trace("Model", ops=[Dense(m[1:, :, : N - 2, : N - 2]) for m in maps()], starts=[0])
    options: dict[str, Any] = {"discard": 0.5, "normalize": True, "target": 1}
    np.testing.assert_allclose(run.rollout(**options)[1, : N - 2], alone.rollout(**options)[0], atol=1e-6)


def test_what_is_dropped_on_the_way_is_what_the_row_lacks() -> None:
    exact, short = trace().rollout(target=0), trace().rollout(target=0, tolerance=0.2)
    lacking = 1 - short.sum(1)
    assert ((lacking > 0.01) & (lacking <= 0.2 + 1e-6)).all()
    np.testing.assert_allclose(np.abs(exact - short).sum(1), lacking, atol=1e-6)


def test_wrong_rows_and_contributions_are_errors() -> None:
    with pytest.raises(ShapeError, match=r"a row of shape \(6,\) or \(2, 6\)\. Received: \(3,\)"):
        trace().rollout(target=np.ones(3))
    with pytest.raises(CaptureError, match=r"Expected a PyTorch model, for contributions\. Received: Model"):
        trace().contributions()
