"""Axes of a map, from the product with the values; no framework needed."""

from __future__ import annotations

import pytest

from attrace.capture.keras_forms import Form, einsum_form, matmul_form

A, V = (2, 4, 5, 6), (2, 6, 4, 3)


@pytest.mark.parametrize(
    ("equation", "which", "used", "other", "shape"),
    [
        ("acbe,aecd->abcd", 0, A, V, (2, 4, 5, 6)),
        ("aecd, acbe -> abcd", 1, A, V, (2, 4, 5, 6)),
        ("bkgts,bskh->btkgh", 0, (2, 2, 3, 5, 6), (2, 6, 2, 3), (2, 6, 5, 6)),
        ("bhts,bsd->bthd", 0, A, (2, 6, 3), (2, 4, 5, 6)),
        ("...qk,...kd->...qd", 0, A, (2, 4, 6, 3), (2, 4, 5, 6)),
        ("bqk,bkd->bqd", 0, (2, 5, 6), (2, 6, 3), (2, 1, 5, 6)),
        ("afbcde,adefg->abcfg", 0, (2, 4, 3, 5, 3, 2), (2, 3, 2, 4, 7), (2, 4, 15, 6)),
    ],
)
def test_einsum(
    equation: str, which: int, used: tuple[int, ...], other: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    form = einsum_form(equation, which, used, other)
    assert isinstance(form, Form)
    assert form.shape(used, 2, 4) == shape


@pytest.mark.parametrize(
    ("equation", "why"),
    [
        ("bqk,bqd->bkd", "summed over its queries"),
        ("bqk,bkd->bd", r"a map of shape (2, 5, 6) in the product"),
    ],
)
def test_products_that_are_no_attention(equation: str, why: str) -> None:
    found = einsum_form(equation, 0, (2, 5, 6), (2, 5, 3) if "bqd" in equation else (2, 6, 3))
    assert isinstance(found, str)
    assert found.startswith(why)


def test_a_router_of_experts_is_no_attention() -> None:
    assert einsum_form("bqe,bqed->bqd", 0, (2, 5, 6), (2, 5, 6, 3)) is None


@pytest.mark.parametrize(
    ("used", "other", "batch", "heads", "shape"),
    [
        ((2, 4, 5, 6), (2, 4, 6, 3), 2, None, (2, 4, 5, 6)),
        ((32, 2, 4, 4), (32, 2, 4, 3), 2, 2, (32, 2, 4, 4)),  # windows in the batch axis, as many heads as items
        ((8, 5, 6), (8, 6, 3), 2, 4, (2, 4, 5, 6)),
        ((8, 5, 6), (8, 6, 3), 2, None, (2, 4, 5, 6)),
        ((8, 5, 6), (8, 6, 3), 8, 4, (8, 1, 5, 6)),
        ((2, 2, 3, 5, 6), (2, 2, 1, 6, 3), 2, 6, (2, 6, 5, 6)),
        ((4, 2, 5, 6), (4, 2, 6, 3), 2, None, None),  # heads first
        ((2, 2, 3, 5, 6), (2, 2, 3, 6, 3), 2, 2, None),
        ((7, 5, 6), (7, 6, 3), 2, 4, None),
    ],
)
def test_matmul(
    used: tuple[int, ...],
    other: tuple[int, ...],
    batch: int,
    heads: int | None,
    shape: tuple[int, ...] | None,
) -> None:
    form = matmul_form(used, other)
    assert isinstance(form, Form)
    assert form.shape(used, batch, heads) == (f"a map of shape {used}" if shape is None else shape)
