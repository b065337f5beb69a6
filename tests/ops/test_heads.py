"""Head fusion on whole maps and on blocks of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attrace.errors import InputError, ShapeError
from attrace.ops.heads import check_heads, fuse_heads

BLOCK = np.random.default_rng(1).random((2, 3, 4, 5))  # B, H, Q, T: not square
WAYS: list[tuple[Any, Any]] = [
    ("mean", BLOCK.mean(1)),
    ("max", BLOCK.max(1)),
    ("min", BLOCK.min(1)),
    (1, BLOCK[:, 1]),
    (-1, BLOCK[:, 2]),
    ([1, 2, 1], (BLOCK[:, 0] + 2 * BLOCK[:, 1] + BLOCK[:, 2]) / 4),
]


@pytest.mark.parametrize(("heads", "want"), WAYS)
def test_fusing(heads: Any, want: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; CI has it")
    np.testing.assert_allclose(fuse_heads(BLOCK, heads), want, atol=1e-15)
    np.testing.assert_allclose(fuse_heads(torch.tensor(BLOCK), heads).numpy(), want, atol=1e-15)
    np.testing.assert_allclose(fuse_heads(BLOCK[0], heads), want[0], atol=1e-15)
    np.testing.assert_allclose(fuse_heads(BLOCK[None], heads), want[None], atol=1e-15)
    rows = np.concatenate([fuse_heads(BLOCK[:, :, i : i + 3], heads) for i in (0, 3)], axis=1)
    np.testing.assert_allclose(rows, want, atol=1e-15)


@pytest.mark.parametrize("heads", ["mean", "max", 0, [1, 2, 1]])
def test_half_precision_is_added_up_in_float32(heads: Any) -> None:
    half = np.full((64, 1, 1), 0.1, dtype=np.float16)
    fused = fuse_heads(half, heads if heads != [1, 2, 1] else [1.0] * 64)
    assert fused.dtype == np.float32
    np.testing.assert_allclose(fused, np.float32(half[0]), rtol=1e-6)


def test_gradients_flow() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; CI has it")
    block = torch.tensor(BLOCK, requires_grad=True)
    for heads, _ in WAYS:
        assert torch.autograd.gradcheck(lambda x, heads=heads: fuse_heads(x, heads), (block,))


def test_checked_heads() -> None:
    assert check_heads("max", 3) == "max"
    assert check_heads(-1, 3) == 2
    assert check_heads(np.int64(1), 3) == 1
    assert check_heads(np.array([2.0, 0.0, 6.0]), 3) == (0.25, 0.0, 0.75)


def test_refusals() -> None:
    with pytest.raises(InputError, match="Received: list"):
        fuse_heads([[[1.0]]])
    with pytest.raises(ShapeError, match=r"\(4, 5\)"):
        fuse_heads(BLOCK[0, 0])
    with pytest.raises(InputError, match=r"one weight per head, 3 in all\. Received: 2"):
        fuse_heads(BLOCK, [1, 1])
    with pytest.raises(InputError, match="Received: int32"):
        fuse_heads(BLOCK.astype("int32"))
