"""What every recorded attention call is, whatever the seam that saw it and the framework that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from attrace.ops.namespace import Name
from attrace.ops.rollout.checks import check_positions
from attrace.types import Heads


@dataclass(eq=False)
class RecordedOp:
    """One recorded call, an `attrace.types.AttentionOp`: subclasses give its rows, and the products by them."""

    vectors: ClassVar[Name]
    """The framework of the vectors that it takes and gives."""
    name: str
    layer: int
    """Place of the call in the order of the model's attention calls, from 0."""
    shape: tuple[int, int, int, int]
    kind: Literal["self", "cross"]
    """Whether keys and values come from the stream of the queries or from another one."""
    queries: str = "tokens"
    """The token stream of the queries, by name."""
    keys: str = "tokens"
    """The token stream of keys and values."""
    block: Any = None
    """The block around the call, kept with the values where the model's family is known (PyTorch alone)."""

    @property
    def heads(self) -> int:
        return self.shape[1]

    @property
    def causal(self) -> bool:
        """Whether the call itself says that no query sees a later key; a mask may say so too."""
        return False

    @property
    def device(self) -> Any:
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        """Dtype of the weights: float32, or float64 where the model runs in it."""
        raise NotImplementedError

    def first_bad_row(self) -> int | None:
        """The first query position with NaN or infinity in what was recorded, or None."""
        raise NotImplementedError

    def weights(self, rows: Any = None) -> Any:
        raise NotImplementedError

    def matvec(self, x: Any, *, heads: Heads = "mean") -> Any:
        raise NotImplementedError

    def rmatvec(self, r: Any, *, heads: Heads = "mean") -> Any:
        raise NotImplementedError

    def fused(self, heads: Heads = "mean") -> Any:
        raise NotImplementedError


def check_rows(rows: Any, op: RecordedOp) -> list[int]:
    """Query rows that are asked for, as indices from 0; InputError where there are none of that number."""
    wanted = rows.tolist() if hasattr(rows, "tolist") else rows
    return check_positions(f"query rows of {op.name}", wanted, op.shape[2])[0]
