"""What a call of a registered attention function attended to, recomputed from its arguments."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from attrace.capture.registry import RegisteredCall
from attrace.capture.torch_ops import QueryKeyAttention
from attrace.ops.attention.rows import empty_rows, score_rows
from attrace.ops.namespace import without_autocast

if TYPE_CHECKING:
    from attrace.capture.torch_recorder import Recorder

NEAR = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""How far a recomputed output row may be from the function's, as a share of the largest value."""


class UnreadableError(Exception):
    """Why a call's weights cannot be recomputed from its arguments."""


class Visible(Protocol):
    """Which keys a query may attend to."""

    def rows(self, rows: Tensor) -> Tensor:
        """(R,) -> (B, H, R, T) booleans, B and H perhaps 1."""
        ...

    def first(self, keys: int) -> Visible:
        """The same for the first keys alone."""
        ...


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of tokens that attend within themselves: one a row, or several packed into it.  What flash kernels take."""

    query_run: Tensor
    """(B, Q) number of the run; -1 at padding."""
    key_run: Tensor
    """(B, T) number of the run; -2 at padding, so that nothing attends to it."""
    query_at: Tensor
    """(B, Q) place in the run, counted so that the last query stands at the last key (bottom-right)."""
    key_at: Tensor
    """(B, T)"""
    causal: bool
    window: int | None = None
    """Keys at a distance of `window` or more are not attended to."""

    def rows(self, rows: Tensor) -> Tensor:
        run, at = self.query_run[:, rows, None], self.query_at[:, rows, None]
        seen = run == self.key_run[:, None]
        back = at - self.key_at[:, None]
        if self.causal:
            seen &= back >= 0
        if self.window is not None:
            seen &= back.abs() < self.window
        return seen[:, None]

    def first(self, keys: int) -> Runs:
        return replace(self, key_run=self.key_run[:, :keys], key_at=self.key_at[:, :keys])


@dataclass(frozen=True, eq=False)
class Blocks:
    """A flex attention BlockMask: its function, within the blocks that it keeps."""

    mask: Any
    keys: int

    def rows(self, rows: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_mask

        mask, at = self.mask, rows
        batch, heads = mask.shape[:2]
        seen: Tensor = create_mask(
            lambda b, h, q, k: mask.mask_mod(b, h, at[q], k), batch, heads, len(rows), self.keys, rows.device.type
        )
        high, wide = mask.BLOCK_SIZE
        kept: Tensor = mask.to_dense().bool().to(rows.device)
        blocks = torch.arange(self.keys, device=rows.device) // wide
        return seen & kept[:, :, rows // high][..., blocks]

    def first(self, keys: int) -> Blocks:
        return replace(self, keys=keys)


@dataclass(frozen=True, eq=False)
class Seen:
    """A mask as it was when the call was made: its function may read what a static cache changes later."""

    seen: Tensor
    """(B, H, Q, T) booleans"""

    def rows(self, rows: Tensor) -> Tensor:
        return self.seen.index_select(2, rows)

    def first(self, keys: int) -> Seen:
        return Seen(self.seen[..., :keys])


@dataclass(eq=False)
class RegisteredAttention(QueryKeyAttention):
    """A registered function's call: softcap(scale Q K^T) + bias, masked, with sinks in the softmax's sum."""

    visible: Visible | None = field(default=None, kw_only=True, repr=False)
    softcap: float | None = field(default=None, kw_only=True)
    sinks: Tensor | None = field(default=None, kw_only=True, repr=False)
    """(H,) logits that take mass and give no value."""

    def hold(self, key: Tensor) -> None:
        super().hold(key)
        self.visible = None if self.visible is None else self.visible.first(key.shape[2])

    def leaves_room(self, filled: int) -> bool:
        if self.visible is None:
            return super().leaves_room(filled)
        rows = torch.arange(self.shape[2], device=self.device)
        return not bool(self.visible.rows(rows)[..., filled:].any())

    def _recomputed(self, rows: Tensor | None) -> Tensor:
        self._check_versions()
        rows = torch.arange(self.shape[2], device=self.device) if rows is None else rows
        with without_autocast(self.query):
            scores = score_rows(self.query, self.key, rows=rows, scale=self.scale)
            if self.softcap is not None:
                scores = self.softcap * (scores / self.softcap).tanh_()
            if self.bias is not None:
                bias = self.bias if self.bias.shape[-2] == 1 else self.bias.index_select(-2, rows)
                if bias.dtype == torch.bool:
                    scores = scores.masked_fill(~bias, -torch.inf)
                else:
                    scores = scores + bias.to(scores.dtype)
            if self.visible is not None:
                scores = scores.masked_fill(~self.visible.rows(rows), -torch.inf)
            if self.sinks is None:
                return scores.softmax(-1).masked_fill_(empty_rows(scores), 0.0)
            sinks = self.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]


def read(
    call: RegisteredCall, *, name: str, layer: int, kind: Any, values: bool, in_place: bool = False
) -> RegisteredAttention:
    """The operator of a call; `UnreadableError` where its arguments do not tell what it attended to.

    `in_place` is for a cache that is written to in place: nothing that it may change is put off.
    """
    query, key = call.query, call.key
    if query.ndim != 4 or key.ndim != 4 or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise UnreadableError(f"query {tuple(query.shape)} and key {tuple(key.shape)}")
    if any(call.others.get(name) is not None for name in ("block_table", "k_cache", "read_index", "write_index")):
        raise UnreadableError("keys in pages that only the kernel puts together")
    mask, length = call.attention_mask, key.shape[2]
    bias: Tensor | None = None
    visible: Visible | None = None
    if hasattr(mask, "mask_mod"):
        visible = Blocks(mask, length)
        if in_place:
            visible = Seen(visible.rows(torch.arange(query.shape[2], device=query.device)))
    elif isinstance(mask, Tensor) and mask.ndim == 4:
        bias = mask.detach()[..., :length]
    elif mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        if mask is not None and mask.shape[1] < length:  # a static cache beyond what is filled
            length = mask.shape[1]
            key = key[:, :, :length]
        visible = runs_of(call, mask, length)
    else:
        raise UnreadableError(f"a mask of {type(mask).__name__} {tuple(getattr(mask, 'shape', ()))}")
    if call.position_bias is not None:
        bias = _added(bias, call.position_bias.detach()[..., :length])
    return RegisteredAttention(
        name=name,
        layer=layer,
        shape=(query.shape[0], query.shape[1], query.shape[2], length),
        kind=kind,
        value=call.value.detach()[:, :, :length] if values else None,
        query=query.detach(),
        key=key.detach(),
        bias=bias,
        scale=call.scaling,
        visible=visible,
        softcap=call.softcap,
        sinks=None if call.s_aux is None else call.s_aux.detach(),
    )


def _added(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask + bias


def runs_of(call: RegisteredCall, mask: Tensor | None, length: int) -> Runs | None:
    """Runs by the first that there is: the padding mask, the lengths of packed sequences, positions that restart.

    None where each query sees each key.
    """
    queries, device = call.query.shape[2], call.query.device
    window = call.sliding_window
    window = window if window is not None and call.key.shape[2] > window else None
    lengths = [call.others.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    if mask is not None:
        real = mask.to(device) != 0
        asking = real if queries == length else real[:, -queries:] if queries > 1 else torch.ones_like(real[:, -1:])
        query_run, key_run = asking.long() - 1, real.long() * 2 - 2  # 0 at tokens, -1 and -2 at padding
    elif all(isinstance(one, Tensor) for one in lengths):
        query_run, key_run = (
            _packed(one, n, call.query.shape[0]) for one, n in zip(lengths, (queries, length), strict=True)
        )
    elif queries == length and (positions := _restarting(call)) is not None:
        query_run = key_run = (positions == positions.min()).cumsum(1).to(device)
    elif not call.causal and window is None:
        return None
    else:
        query_run, key_run = (torch.zeros(1, n, dtype=torch.long, device=device) for n in (queries, length))
    query_at, key_at = _places(query_run, key_run)
    return Runs(query_run, key_run, query_at, key_at, call.causal, window)


def _restarting(call: RegisteredCall) -> Tensor | None:
    """Positions of one row, (1, n), that begin anew within it; None where they go up one by one."""
    positions = call.others.get("position_ids")
    if not isinstance(positions, Tensor) or call.query.shape[0] != 1 or positions.ndim != 2 or positions.shape[0] != 1:
        return None
    return positions if bool((positions.diff(dim=1) != 1).any()) else None


def _packed(starts: Any, count: int, batch: int) -> Tensor:
    """Number of the run of each token, (1, n), from the cumulative lengths (R + 1,)."""
    if batch != 1:
        raise UnreadableError(f"packed sequences in a batch of {batch} rows")
    at = torch.arange(count, device=starts.device)
    run = torch.bucketize(at, starts[1:].to(at.dtype), right=True)
    return torch.where(at < starts[-1], run, -1)[None]


def _places(query_run: Tensor, key_run: Tensor) -> tuple[Tensor, Tensor]:
    """Place of each query and key in its run, the last query of a run at its last key."""
    many = int(max(query_run.max(), key_run.max())) + 1
    numbers = torch.arange(max(many, 1), device=query_run.device)
    query_in, key_in = (run[..., None] == numbers for run in (query_run, key_run))  # (B, n, runs)
    query_at, key_at = ((is_in.cumsum(1) * is_in).sum(-1) - 1 for is_in in (query_in, key_in))
    more = key_in.sum(1) - query_in.sum(1)  # (B, runs)
    return query_at + (query_in * more[:, None]).sum(-1), key_at


def explains(op: RegisteredAttention, call: RegisteredCall, output: Any) -> bool:
    """Whether a few rows of the operator, times the values, are the function's own output."""
    found = output[0] if isinstance(output, tuple) else output
    batch, heads, queries, keys = op.shape
    value = call.value.detach()[:, :, :keys]
    if not isinstance(found, Tensor) or found.numel() != batch * heads * queries * value.shape[-1]:
        return False
    rows = torch.tensor(sorted({0, queries // 2, queries - 1}), device=op.device)
    weights = op._rows(rows)
    values = value.to(weights.dtype).repeat_interleave(heads // value.shape[1], dim=1)
    expected = (weights @ values).transpose(1, 2)
    actual = found.detach().reshape(batch, queries, heads, -1)[:, rows].to(weights.dtype)
    counted = (weights.sum(-1) > 0).transpose(1, 2)[..., None]  # what stands at padded queries is nobody's
    limit = NEAR.get(call.query.dtype, NEAR[torch.bfloat16]) * max(float(values.abs().amax()), 1e-6)
    return bool((torch.where(counted, expected - actual, 0.0).abs() <= limit).all())


class RegistryObserver:
    """Records the calls that the registry seam reports, for a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._thread = threading.get_ident()
        self._explained: set[tuple[str, bool]] = set()
        """Modules whose output was compared with their arguments: at one query, and at several."""

    def owns(self, module: Any) -> bool:
        return threading.get_ident() == self._thread and id(module) in self._recorder._names

    def mark(self) -> tuple[int, int]:
        return len(self._recorder._trace.ops), len(self._recorder._trace.unread)

    def called(self, call: RegisteredCall, output: Any, mark: tuple[int, int]) -> None:
        """Record a registered function's call, unless one attention was seen inside: that is nearer to the truth."""
        recorder = self._recorder
        caller, ops, unread = recorder._caller(), recorder._trace.ops, recorder._trace.unread
        shape = (*call.query.shape[:3], call.key.shape[2])
        seen = len(ops) == mark[0] + 1 and len(unread) == mark[1] and ops[-1].shape[:3] == shape[:3]
        if seen or not caller.name:
            return
        del ops[mark[0] :], unread[mark[1] :]
        if recorder.is_beside(caller, shape, call.value.shape[-1]):
            return
        kind, values, at = recorder._kind_of(caller, shape), recorder._values, recorder._call
        try:
            op = read(call, name=caller.name, layer=len(ops), kind=kind, values=values, in_place=at.in_place)
            self._compare(op, call, output)
        except UnreadableError as reason:
            unread.append(f"{caller.name} (attention implementation {call.name!r}: {reason})")
            return
        recorder._record(op)
        recorder.joined([op], call.query, call.key, call.value, output)
        recorder._keys.share(ops, at)

    def _compare(self, op: RegisteredAttention, call: RegisteredCall, output: Any) -> None:
        place = (op.name, op.shape[2] == 1)
        if place in self._explained or (call.dropout and call.module.training):
            return
        self._explained.add(place)
        with torch.no_grad():
            if not explains(op, call, output):
                raise UnreadableError("its output is not softmax(scale Q K^T + mask) V of its arguments")
