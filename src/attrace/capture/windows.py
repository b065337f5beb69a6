"""Attention in windows or packed pieces, as one operator over the whole grid; mergings between stages.

Windowed models put their windows into the batch axis: (B * nW, H, w * w, w * w).  Here such a call becomes
(B, H, n, n) over the grid's n tokens, by an index of where each window position lies in the grid.  The windows
themselves stay as they were recorded: products gather, run in the windows and scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attrace.capture.torch_ops import TorchAttention
from attrace.types import Heads

Places = NDArray[np.int64]
PADDING = -1
"""A window position that lies beside the grid."""


def window_places(
    height: int,
    width: int,
    size: tuple[int, int],
    shift: tuple[int, int] = (0, 0),
    *,
    first: Literal["pad first", "roll first"] = "pad first",
) -> Places:
    """Where each window position lies in the grid, row by row: (windows, size[0] * size[1]), PADDING beside it.

    The grid is padded at the bottom and the right to full windows and rolled by -shift (Liu et al. 2021,
    arXiv 2103.14030, sec. 3.2 and fig. 4), in the order that `first` tells.

    >>> window_places(4, 4, (2, 2), (1, 1)).tolist()
    [[5, 6, 9, 10], [7, 4, 11, 8], [13, 14, 1, 2], [15, 12, 3, 0]]
    """
    grid = np.arange(height * width).reshape(height, width)
    margin = [(0, -side % step) for side, step in zip((height, width), size, strict=True)]
    if first == "pad first":
        grid = np.roll(np.pad(grid, margin, constant_values=PADDING), (-shift[0], -shift[1]), (0, 1))
    else:
        grid = np.pad(np.roll(grid, (-shift[0], -shift[1]), (0, 1)), margin, constant_values=PADDING)
    rows, columns = grid.shape[0] // size[0], grid.shape[1] // size[1]
    cut = grid.reshape(rows, size[0], columns, size[1]).transpose(0, 2, 1, 3)
    return cut.reshape(rows * columns, size[0] * size[1])


@dataclass(frozen=True, eq=False)
class Piece:
    """A recorded call and the places of its tokens: (G, q) for a call of batch B * G and q tokens."""

    op: TorchAttention
    places: Places


@dataclass(eq=False)
class GridAttention(TorchAttention):
    """Several windows or packed pieces as one map (B, H, n, n): a token sees the tokens of its own piece.

    Attention to padding beside the grid is not a share of any token: rows that a padded window gave some of it sum to
    less than one, as with a sink.  Queries at padding are left out, as the model leaves them out.
    """

    pieces: Sequence[Piece] = field(kw_only=True, repr=False)

    @property
    def causal(self) -> bool:
        return False  # the order of the places is not that of the pieces' own rows

    @property
    def device(self) -> torch.device:
        return self.pieces[0].op.device

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].op.dtype

    def first_bad_row(self) -> int | None:
        found = []
        for piece in self.pieces:
            row = piece.op.first_bad_row()
            if row is not None:
                found += [int(place) for place in piece.places[:, row] if place != PADDING]
        return min(found, default=None)

    def _rows(self, rows: Tensor) -> Tensor:
        wanted = rows.cpu().numpy()
        batch, heads, _, n = self.shape
        full = torch.zeros(batch, heads, len(wanted), n + 1, dtype=self.dtype, device=self.device)
        for piece in self.pieces:
            local = {int(place): where for where, place in np.ndenumerate(piece.places) if place != PADDING}
            mine = [(at, *local[int(row)]) for at, row in enumerate(wanted) if int(row) in local]
            if not mine:
                continue
            at, group, inner = (np.asarray(column) for column in zip(*mine, strict=True))
            used, back = np.unique(inner, return_inverse=True)
            index = torch.from_numpy(used).to(self.device)
            weights = piece.op._rows(index).unflatten(0, (batch, -1))  # (B, G, H, u, q)
            picked = weights[:, group, :, back]  # (rows, B, H, q)
            keys = np.where(piece.places[group] == PADDING, n, piece.places[group])  # (rows, q)
            full[:, :, at[:, None], keys] = picked.permute(1, 2, 0, 3).to(full.dtype)
        return full[..., :n]

    def matvec(self, x: Tensor, *, heads: Heads = "mean") -> Tensor:
        """Fused map times x: (B, n) -> (B, n), or (B, n, M) -> (B, n, M), in x's dtype."""
        self._columns(x, self.shape[3], "keys")
        return self._apply(x, heads, "matvec")

    def rmatvec(self, r: Tensor, *, heads: Heads = "mean") -> Tensor:
        """Transposed fused map times r: (B, n) -> (B, n), or (B, n, M) -> (B, n, M), in r's dtype."""
        self._columns(r, self.shape[2], "queries")
        return self._apply(r, heads, "rmatvec")

    def _apply(self, x: Tensor, heads: Heads, product: Literal["matvec", "rmatvec"]) -> Tensor:
        columns = x[..., None] if x.ndim == 2 else x
        batch, n, width = columns.shape
        zero = columns.new_zeros(batch, 1, width)
        extended = torch.cat([columns, zero], dim=1)
        out = torch.zeros_like(extended)
        for piece in self.pieces:
            groups, q = piece.places.shape
            at = torch.from_numpy(np.where(piece.places == PADDING, n, piece.places).reshape(-1)).to(x.device)
            inner = extended.index_select(1, at).reshape(batch * groups, q, width)
            made = getattr(piece.op, product)(inner, heads=heads)
            out = out.index_add(1, at, made.reshape(batch, groups * q, width))
        out = out[:, :n]
        return out[..., 0] if x.ndim == 2 else out


@dataclass(eq=False)
class Merging(TorchAttention):
    """A layer that makes one token of several, as a map (B, 1, Q, T): each row the mean of its tokens.

    The layer puts the tokens' vectors beside each other and mixes them by one matrix; how much each of them weighs in
    the result depends on that matrix.  An even share is a choice, and it keeps the mass.
    """

    parent: Places = field(kw_only=True, repr=False)
    """(T,) the merged token that each token goes into."""
    place: torch.device = field(kw_only=True)
    kept: torch.dtype = field(kw_only=True)

    pooling = True
    """No residual goes around it."""

    @classmethod
    def of(cls, height: int, width: int, factor: int, like: TorchAttention) -> Merging:
        """The merging of factor x factor tokens of a grid into one, row by row; an odd rest forms smaller groups."""
        rows, columns = np.indices((height, width)) // factor
        merged = -(-height // factor), -(-width // factor)
        return cls(
            name=f"{like.name} (merging before it)",
            layer=like.layer,
            queries=like.queries,
            keys=like.keys,
            shape=(like.shape[0], 1, merged[0] * merged[1], height * width),
            kind="self",
            parent=(rows * merged[1] + columns).reshape(-1),
            place=like.device,
            kept=like.dtype,
        )

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def dtype(self) -> torch.dtype:
        return self.kept

    def first_bad_row(self) -> int | None:
        return None

    def _shares(self) -> tuple[Tensor, Tensor]:
        """Where each token goes, and the share that it has there: both (T,)."""
        share = 1 / np.bincount(self.parent, minlength=self.shape[2])[self.parent]
        return (
            torch.from_numpy(self.parent).to(self.place),
            torch.from_numpy(share).to(self.place, self.kept),
        )

    def _rows(self, rows: Tensor) -> Tensor:
        parent, share = self._shares()
        dense = (parent[None, :] == rows[:, None]) * share
        return dense.expand(self.shape[0], 1, -1, -1)

    def matvec(self, x: Tensor, *, heads: Heads = "mean") -> Tensor:
        """Means of the tokens that were merged: (B, T) -> (B, Q), or (B, T, M) -> (B, Q, M), in x's dtype."""
        self._columns(x, self.shape[3], "keys")
        parent, share = self._shares()
        weighted = x * share.to(x).reshape(-1, *[1] * (x.ndim - 2))
        made = x.new_zeros(x.shape[0], self.shape[2], *x.shape[2:])
        return made.index_add(1, parent.to(x.device), weighted)

    def rmatvec(self, r: Tensor, *, heads: Heads = "mean") -> Tensor:
        """Each merged token's mass spread over its tokens: (B, Q) -> (B, T), or (B, Q, M) -> (B, T, M)."""
        self._columns(r, self.shape[2], "queries")
        parent, share = self._shares()
        return r.index_select(1, parent.to(r.device)) * share.to(r).reshape(-1, *[1] * (r.ndim - 2))
