"""Calls that were seen: which of their axes are batch, heads and tokens, and their place among the layers.

Where sizes alone don't tell, a call's result is followed until an operator shows which of its axes are channels.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from attrace.capture.beside import beside_tokens
from attrace.capture.callers import ANOTHER, Caller, caller_among, kind_of
from attrace.capture.layouts import Axes, Layout, joined_within, laid_out
from attrace.capture.steps import Call, joins_cache
from attrace.capture.torch_blocks import BlockInputs
from attrace.capture.torch_forms import CallByAxes, Following, Pending, storage_of
from attrace.capture.torch_ops import TorchAttention
from attrace.capture.trace import Trace

aten = torch.ops.aten

MOST_FOLLOWED = 32
"""Results of calls whose heads are not told yet."""
# Operators that read channels: which of their arguments holds them, and along which axis.
CHANNELS: dict[str, tuple[slice, int]] = {
    "product": (slice(-2, -1), -1),
    "linear": (slice(-2, -1), -1),
    "norm": (slice(1), -1),
    "add": (slice(2), -1),
    "seen": (slice(1), 1),
}


class Placing:
    """What a recorder knows of the run, and how a call that it saw becomes one of the trace."""

    follows_streams: ClassVar[bool] = False

    def __init__(self, trace: Trace, modules: dict[str, nn.Module], *, blocks: BlockInputs | None) -> None:
        self._trace = trace
        self._blocks = blocks
        self._values = blocks is not None
        self._thread = threading.get_ident()
        self._names = {id(module): name or trace.model for name, module in modules.items()}
        self._running = False
        self._call = Call()
        self._batch: int | None = None
        self._pending: dict[int, Pending] = {}
        self._followed: dict[int, Following] = {}

    def _caller(self) -> Caller:
        """Who calls; ANOTHER where no module of the model is on the stack."""
        if not self._running and torch._C._current_graph_task_id() != -1:
            return ANOTHER  # a backward pass runs checkpointed layers again
        return caller_among(self._names) or (Caller(self._trace.model) if self._running else ANOTHER)

    def _is_certain(self, call: CallByAxes, batch: int | None, width: int) -> bool:
        """Whether sizes alone tell a call's heads and tokens from all else."""
        lead, given = call.lead, call.caller.given
        if call.beside == "layers":
            return True
        if call.unclear or call.beside or len(lead) != 2 or lead != (batch, call.caller.heads) or len(given) != 3:
            return False
        ordered = batch == 1 or lead[0] != lead[1]
        others = (width, lead[1]) if lead[1] > 1 else ()  # sizes that could be taken for the tokens'
        return ordered and given[:2] == (batch, call.queries) and call.queries not in others

    def _begin(self, call: CallByAxes, *, follows: bool) -> None:
        """Record a call, unless it is not among tokens; one that is followed may prove to be another."""
        if not follows:
            self._settle_call(call, None)
        if not call.beside:
            self._place(call, len(self._trace.ops))
            self._record(call.op)

    def _place(self, call: CallByAxes, layer: int) -> None:
        op = call.op
        op.layer, op.windows = layer, self._windows(op.shape[0])
        op.kind = self._kind_of(call.caller, op.shape, op.windows)

    def _follow_result(
        self, call: CallByAxes, axes: Axes, out: Tensor, *, width: int, sums: Tensor | None = None
    ) -> None:
        layout = laid_out(axes, out)
        if layout is None:
            self._settle_call(call, None)
        else:
            self._followed[storage_of(out)] = Following(call, layout, width, out.detach(), sums)
        if len(self._followed) > MOST_FOLLOWED:
            self._settle(next(iter(self._followed.values())), None)

    def _watch(self, func: Any, part: str, args: tuple[Any, ...], out: Any) -> None:
        """Look for what recorded calls gave: where its axes end up tells which are heads."""
        if func is aten.cat.default:
            self._watch_joined(args, out)
        elif part in ("carrier", "dropout"):
            result = out[0] if isinstance(out, tuple) else out
            given = next((a for a in args if isinstance(a, Tensor) and storage_of(a) in self._followed), None)
            if given is None or storage_of(result) == storage_of(given):
                return
            found = self._followed[storage_of(given)]
            found.take_factor(args)
            axes = found.within(given)
            if axes is not None and not self._tells(found, axes[-1]) and result.shape == given.shape:
                self._follow_copy(found, axes, result)
        elif part in CHANNELS:
            place, axis = CHANNELS[part]
            for given in args[place]:
                known = self._followed.get(storage_of(given)) if isinstance(given, Tensor) else None
                axes = None if known is None else known.within(given)
                if known is not None and axes is not None:
                    self._tells(known, axes[axis], projects=part in ("linear", "seen"))
            if part == "product":
                self._watch_product(args)

    def _watch_product(self, args: tuple[Any, ...]) -> None:
        """Rows that are summed over by weights of their own are channels; those that are compared are tokens."""
        if any(storage_of(arg) in self._pending for arg in args[-2:]):
            return  # told with the softmax
        for at, axis in ((-2, -1), (-1, -2)):
            found = self._followed.get(storage_of(args[at]))
            axes = None if found is None else found.within(args[at])
            if found is None or axes is None:
                continue
            if not any(p.axis == len(found.call.lead) for p in axes[axis]):
                found.compared = True
            elif at == -1 and not found.compared:
                self._settle(found, "channels")

    def _watch_joined(self, args: tuple[Any, ...], out: Tensor) -> None:
        parts: list[Tensor] = list(args[0])
        found = self._followed.get(storage_of(parts[0]))
        if found is None or len(parts) < 2 or any(storage_of(t) != storage_of(parts[0]) for t in parts):
            return
        axes = joined_within(found.layout, parts, (args[1] if len(args) > 1 else 0) % out.ndim)
        if axes is not None and not self._tells(found, axes[-1]):
            self._follow_copy(found, axes, out)

    def _follow_copy(self, found: Following, axes: Axes, copy: Tensor) -> None:
        if (moved := found.moved(axes, copy.detach())) is not None:
            self._followed[storage_of(copy)] = moved

    def _tells(self, found: Following, channels: Layout, *, projects: bool = False) -> bool:
        """Whether an axis of channels settles a call; one head at least where they are projected as they are."""
        told, call = found.told_by(channels, items=self._batch), found.call
        if told is None or (told == () and not (projects and call.caller.heads is None)):
            return False
        self._settle(found, told)
        return True

    def _settle(self, found: Following, told: Layout | str | None) -> None:
        self._followed = {k: f for k, f in self._followed.items() if f.call is not found.call}
        self._settle_call(found.call, told)

    def _settle_call(self, call: CallByAxes, told: Layout | str | None) -> None:
        """A call's heads, or what it is among instead of tokens; None where nothing tells."""
        op, ops, unread = call.op, self._trace.ops, self._trace.unread
        placed = op.layer < len(ops) and ops[op.layer] is op
        if not placed and told is not None and (not call.beside or self.follows_streams):
            told = call.beside or None  # taken out since, by the call that it was part of
        if told is None and call.unclear and not call.beside:
            unread.append(call.why_unclear)
        told = told or call.beside if told != () else told
        if isinstance(told, str) and told:
            if placed and op.step is not None:
                unread.append(f"{op.name} (attention among {told})")
                return
            if placed:
                del ops[op.layer]
                for layer, later in enumerate(ops[op.layer :], op.layer):
                    later.layer = layer
            self._trace.beside.setdefault(op.name, (told, op.shape))
        elif isinstance(told, tuple) and (told != call.heads or not placed):
            before = op.shape
            call.lay_out(told)
            self._place(call, op.layer if placed else len(ops))
            if not placed:
                self._record(op)
            elif op.step is not None and (before[0], before[2]) != (op.shape[0], op.shape[2]):
                unread.append(f"{op.name} (heads in an order of their own, where streams are joined)")

    def _beside(self, caller: Caller, shape: tuple[int, int, int, int], width: int) -> str:
        """What a call attends among, by its sizes, where that is not tokens."""
        return beside_tokens(
            caller.given,
            shape,
            width,
            heads=caller.heads,
            tokens=self._call.tokens,
            convolves=caller.convolves,
        )

    def is_beside(self, caller: Caller, shape: tuple[int, int, int, int], width: int) -> bool:
        """Whether a call attends among something else than tokens, of which the trace is then told."""
        what = self._beside(caller, shape, width)
        if what:
            self._trace.beside.setdefault(caller.name, (what, shape))
        return bool(what)

    def _windows(self, maps: int) -> int:
        """Into how many windows each item of the batch is cut, where its windows lie in the batch axis."""
        batch = self._batch
        return maps // batch if batch and maps > batch and maps % batch == 0 else 1

    def _kind_of(self, caller: Caller, shape: tuple[int, int, int, int], windows: int = 1) -> Literal["self", "cross"]:
        if caller.cross is None and self._running and joins_cache(shape, self._call):
            return "self"
        return kind_of(caller, shape, windows)

    def _record(self, op: TorchAttention) -> None:
        if self._blocks is not None:
            op.block = self._blocks.block_of(op.name, op.value)
        op.queries = op.keys = self._trace.main
        self._trace.ops.append(op)

    def joined(self, ops: list[TorchAttention], query: Tensor, key: Tensor, value: Tensor, output: Any) -> None:
        """Be told of recorded calls that no operator showed; a recorder of streams notes what they join."""
