"""Contributions of one attention block: the reference against a hand-written block, the row blocks against both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attrace.ops.contributions import rows as module
from attrace.ops.contributions.naive import Norm, contributions, transformed
from attrace.ops.contributions.rows import block_output, contribution_rows

B, N, E, H, D = 2, 7, 12, 4, 3
Case = tuple["Block", Tensor, Tensor, Tensor, Tensor]
"""A block, its input, its output, its weights and its values."""


class Block(nn.Module):
    """An attention block written out by hand, as an independent oracle: pre-norm or post-norm, grouped or not."""

    def __init__(self, groups: int, *, post: bool, causal: bool) -> None:
        super().__init__()
        self.groups, self.post, self.causal = groups, post, causal
        self.q, self.o, self.norm = nn.Linear(E, H * D), nn.Linear(H * D, E), nn.LayerNorm(E)
        self.k, self.v = nn.Linear(E, groups * D), nn.Linear(E, groups * D)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The block's output (B, N, E), and its weights (B, H, N, N) and values (B, K, N, D)."""
        source = x if self.post else self.norm(x)
        q, k, v = (
            f(source).unflatten(-1, (heads, D)).transpose(1, 2)
            for f, heads in ((self.q, H), (self.k, self.groups), (self.v, self.groups))
        )
        wide_k, wide_v = (t.repeat_interleave(H // self.groups, dim=1) for t in (k, v))
        scores = q @ wide_k.transpose(-1, -2) / D**0.5
        if self.causal:
            scores = scores.masked_fill(~torch.ones(N, N).tril().bool(), -torch.inf)
        weights = scores.softmax(-1)
        y = self.o((weights @ wide_v).transpose(1, 2).flatten(2)) + x
        return (self.norm(y) if self.post else y), weights, v

    def norm_after(self) -> Norm | None:
        return Norm(self.norm.weight, self.norm.bias, self.norm.eps) if self.post else None


CASES = [(groups, post, causal) for groups in (H, 2, 1) for post in (True, False) for causal in (True, False)]


@pytest.fixture(params=CASES, ids=lambda c: f"K{c[0]}-{'post' if c[1] else 'pre'}{'-causal' if c[2] else ''}")
def case(request: pytest.FixtureRequest) -> Case:
    groups, post, causal = request.param
    torch.manual_seed(groups)
    block = Block(groups, post=post, causal=causal).double()
    x = torch.randn(B, N, E, dtype=torch.float64)
    with torch.no_grad():
        return block.requires_grad_(False), x, *block(x)


def arguments(block: Block, x: Tensor) -> dict[str, object]:
    return {"residual": x, "bias": block.o.bias, "norm": block.norm_after()}


def as_numpy(kwargs: dict[str, object]) -> dict[str, object]:
    norm = kwargs["norm"]
    return {
        "residual": kwargs["residual"].numpy(),
        "bias": kwargs["bias"].numpy(),
        "norm": norm and Norm(norm.gain.numpy(), norm.shift.numpy(), norm.eps),
    }


def test_the_parts_and_the_biases_sum_to_the_blocks_own_output(case: Case) -> None:
    block, x, y, weights, value = case
    parts, output = transformed(weights, value, block.o.weight, **as_numpy(arguments(block, x)))
    np.testing.assert_allclose(output, y, atol=1e-12)
    unbiased = block.o.bias.numpy()
    if block.post:
        before = x + block.o((weights @ value.repeat_interleave(H // block.groups, 1)).transpose(1, 2).flatten(2))
        deviation = np.sqrt(before.numpy().var(-1) + block.norm.eps)[..., None]
        unbiased = block.norm.weight.numpy() * (unbiased - unbiased.mean()) / deviation + block.norm.bias.numpy()
    np.testing.assert_allclose(parts.sum(2) + unbiased, y, atol=1e-12)


def test_each_part_is_what_the_block_loses_without_that_token(case: Case) -> None:
    """With the weights and the deviation held fixed, taking value j away takes T_i(x_j) away."""
    block, x, _, weights, value = case
    parts, output = transformed(weights, value, block.o.weight, **as_numpy(arguments(block, x)))
    i, j = 5, 2
    fewer = value.clone()
    fewer[:, :, j] = 0
    wide = fewer.repeat_interleave(H // block.groups, 1)
    all_of_them = value.repeat_interleave(H // block.groups, 1)
    before = [block.o((weights @ v).transpose(1, 2).flatten(2)) + x for v in (all_of_them, wide)]
    change = before[0] - before[1]
    if block.post:
        deviation = before[0].var(-1, correction=0).add(block.norm.eps).sqrt()[..., None]
        change = block.norm.weight * (change - change.mean(-1, keepdim=True)) / deviation
    np.testing.assert_allclose(parts[:, i, j], change[:, i], atol=1e-12)
    assert output.shape == (B, N, E)


def test_row_blocks_equal_the_reference(case: Case) -> None:
    block, x, y, weights, value = case
    kwargs = arguments(block, x)
    expected = contributions(weights, value, block.o.weight, **as_numpy(kwargs))
    rows = torch.tensor([6, 0, 3])
    found = contribution_rows(weights[:, :, rows], value, block.o.weight, rows=rows, **kwargs)
    np.testing.assert_allclose(found, expected[:, rows], atol=1e-12)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-12)
    output = block_output(weights[:, :, rows], value, block.o.weight, rows=rows, **kwargs)
    np.testing.assert_allclose(output, y[:, rows], atol=1e-12)


def test_float32_is_within_1e_5(case: Case) -> None:
    block, x, _, weights, value = case
    expected = contributions(weights, value, block.o.weight, **as_numpy(arguments(block, x)))
    kwargs = arguments(block.float(), x.float())
    found = contribution_rows(weights.float(), value.float(), block.o.weight, rows=torch.arange(N), **kwargs)
    assert float(np.abs(found.numpy() - expected).sum(-1).max()) < 1e-5


@pytest.mark.parametrize("elements", [1, B * N * E * 2, B * N * E * 3])
def test_tiles_of_any_size_give_the_same(case: Case, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block, x, _, weights, value = case
    kwargs = {"rows": torch.arange(N), **arguments(block, x)}
    whole = contribution_rows(weights, value, block.o.weight, **kwargs)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", elements)
    tiled = contribution_rows(weights, value, block.o.weight, **kwargs)
    np.testing.assert_allclose(tiled, whole, atol=1e-14)


def test_the_vectors_of_all_pairs_are_never_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n, width = 64, 32
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 4 * n * width)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    torch.manual_seed(0)
    weights, value = torch.rand(1, 2, n, n), torch.randn(1, 2, n, 16)
    with Watch():
        contribution_rows(
            weights, value, torch.randn(width, 32), residual=torch.randn(1, n, width), rows=torch.arange(n)
        )
    assert largest <= 4 * n * width < n * n * width


def test_a_hand_computed_row() -> None:
    # y_0 = x_0 + 0.5 x_0 + 0.5 x_1 = (3, 2); T_0(x_0) = (3, 0), T_0(x_1) = (0, 2): shares 3 / 5 and 2 / 5.
    x = np.array([[[2.0, 0.0], [0.0, 4.0]]])
    shares = contributions(np.full((1, 1, 2, 2), 0.5), x[:, None], np.eye(2), residual=x)
    np.testing.assert_allclose(shares[0], [[3 / 5, 2 / 5], [1 / 7, 6 / 7]])


def test_a_token_that_points_away_gets_nothing() -> None:
    # y_0 = (2, 0) + 0.25 (-4, 0) = (1, 0); T_0(x_1) = (-1, 0) takes the output further from itself.
    x = np.array([[[2.0, 0.0], [-4.0, 0.0]]])
    weights = np.array([[[[0.0, 0.25], [0.0, 1.0]]]])
    np.testing.assert_array_equal(contributions(weights, x[:, None], np.eye(2), residual=x)[0, 0], [1, 0])


def test_a_row_that_nothing_brings_nearer_stays_with_its_own_token() -> None:
    # The bias alone makes the output (-5): every T_i(x_j) > 0 lies on the other side.
    x = torch.ones(1, 3, 1)
    weights = torch.full((1, 1, 3, 3), 1 / 3)
    arguments = {"residual": x, "bias": torch.tensor([-10.0])}
    expected = contributions(weights, x[:, None], np.eye(1), residual=x, bias=np.array([-10.0]))
    np.testing.assert_array_equal(expected[0], np.eye(3))
    np.testing.assert_array_equal(
        contribution_rows(weights, x[:, None], torch.eye(1), rows=torch.arange(3), **arguments), expected
    )


def test_what_is_not_attended_to_gets_exactly_nothing(case: Case) -> None:
    block, x, _, weights, value = case
    found = contribution_rows(
        weights.float(),
        value.float(),
        block.float().o.weight,
        rows=torch.arange(N),
        **arguments(block, x.float()),
    )
    if block.causal:
        assert torch.equal(found, found.tril())
    else:
        assert int((found.triu(1) > 0).sum()) > 0
