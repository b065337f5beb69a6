"""Which framework an array belongs to: the one place that knows.

Nothing here imports a framework.  An array can only come from a framework that is already loaded, so each is
looked up in `sys.modules`.  NumPy, PyTorch and JAX are driven through array-api-compat; TensorFlow has no
array API, so a small module of the same names stands in (`attrace.ops._tensorflow`).
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from attrace.errors import InputError
from attrace.types import Floats

Name = Literal["numpy", "torch", "jax", "tensorflow"]


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework's name and its functions under the names of the array API standard."""

    name: Name
    xp: Any

    def known(self, x: Any) -> bool:
        """Whether the values of x can be looked at: not while a function is traced or compiled."""
        if self.name == "torch":
            compiling = sys.modules["torch"].compiler.is_compiling()
            return not compiling and x.device.type != "meta"
        if self.name == "jax":
            return not isinstance(x, sys.modules["jax"].core.Tracer)
        if self.name == "tensorflow":
            return bool(sys.modules["tensorflow"].executing_eagerly())
        return True

    def matmul(self, a: Any, b: Any) -> Any:
        """The matrix product, in the arrays' own precision."""
        if self.name == "jax":
            return self.xp.matmul(a, b, precision="highest")
        if self.name == "torch":
            with without_autocast(a):
                return self.xp.matmul(a, b)
        return self.xp.matmul(a, b)

    def constant(self, x: Any) -> Any:
        """The same values; no gradient flows through them."""
        if self.name == "torch":
            return x.detach()
        if self.name == "jax":
            return sys.modules["jax"].lax.stop_gradient(x)
        if self.name == "tensorflow":
            return sys.modules["tensorflow"].stop_gradient(x)
        return x

    def kth_smallest(self, flat: Any, k: int) -> Any:
        """The k-th smallest entry (k from 1) of each row: (B, N) -> (B, 1).

        Selection where there is one, else a sort; not a quantile, which in torch stops at 2**24 entries.
        """
        if self.name == "numpy":
            return sys.modules["numpy"].partition(flat, k - 1, axis=1)[:, k - 1 : k]
        if self.name == "torch":
            return sys.modules["torch"].kthvalue(flat, k, dim=1, keepdim=True).values
        return self.xp.sort(flat, axis=1)[:, k - 1 : k]

    def extremes(self, x: Any) -> tuple[Any, Any]:
        """The smallest and the largest entry of all, NaN where there is one; no array is made."""
        if self.name == "torch":
            return tuple(sys.modules["torch"].aminmax(x))
        if self.name == "numpy":
            with sys.modules["numpy"].errstate(invalid="ignore"):  # NaN in bfloat16 would warn
                return x.min(), x.max()
        return self.xp.min(x), self.xp.max(x)

    def one_hot(self, positions: list[int], like: Any) -> Any:
        """(1, k, n) with a one at each of k positions; dtype, device and n of `like`, (..., n)."""
        n = like.shape[-1]
        if self.name == "torch":
            torch = sys.modules["torch"]
            every = torch.arange(n, device=like.device)
            if len(positions) == 1:  # torch.compile then keeps one graph for all positions
                return (every == positions[0])[None, None].to(like.dtype)
            wanted = torch.as_tensor(positions, device=like.device)
        else:
            every, wanted = self.xp.arange(n), self.xp.asarray(positions)
        return self.xp.astype(every[None, None, :] == wanted[None, :, None], like.dtype)

    def running_count(self, flags: Any) -> Any:
        """How many of the flags so far are set, in each row: booleans (B, N) -> integers (B, N)."""
        wide = "int32" if flags.shape[-1] < 2**31 else "int64"
        if self.name == "torch":
            torch = sys.modules["torch"]
            return torch.cumsum(flags, dim=1, dtype=getattr(torch, wide))
        if self.name == "jax":
            return self.xp.cumsum(flags, axis=1, dtype=wide)
        return self.xp.cumulative_sum(flags, axis=1, dtype=getattr(self.xp, wide))

    def eye(self, n: int, like: Any) -> Any:
        if self.name == "torch":
            return sys.modules["torch"].eye(n, dtype=like.dtype, device=like.device)
        return self.xp.eye(n, dtype=like.dtype)

    def follow(self, x: Any, like: Any) -> Any:
        """Move x to the device of `like`: layers of one model may lie on several devices."""
        if self.name == "torch":
            return x.to(like.device)
        if self.name == "jax" and self.known(x) and self.known(like):
            there = like.devices()
            if len(there) == 1 and x.devices() != there:
                return sys.modules["jax"].device_put(x, next(iter(there)))
        return x  # TensorFlow copies by itself

    def double(self, device: Any) -> Any:
        """The dtype to add up in: float64, or float32 on a device that has none."""
        return self.xp.float32 if getattr(device, "type", None) == "mps" else self.xp.float64

    def convert(self, x: Any, dtype: Any, device: Any) -> Any:
        """An array of any framework as one of this; in torch gradients flow."""
        if self.name == "torch":
            return sys.modules["torch"].as_tensor(x).to(device, dtype)
        other = framework_of(x)
        return self.xp.asarray(x if other is None else other.to_numpy(x), dtype=dtype)

    def contract(self, fused: Any, x: Any) -> Any:
        """(B, Q, T) maps times (B, T, M) vectors, exact over long sums, in the vectors' dtype."""
        if self.name == "torch":
            from attrace.ops.attention.rows import contract

            return contract(fused, x.to(fused)).to(x)
        return self.matmul(self.xp.astype(fused, x.dtype), x)

    def to_numpy(self, x: Any) -> Any:
        """A NumPy copy or view, for messages; half precision becomes float32."""
        x = self.xp.astype(x, getattr(self.xp, wide_dtype(dtype_name(x))))
        if self.name == "torch":
            return x.detach().cpu().numpy()
        return sys.modules["numpy"].asarray(x)


def without_autocast(x: Any) -> Any:
    """In torch: a context in which autocast does not turn the product into half precision."""
    torch: Any = sys.modules["torch"]
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def framework(name: Name) -> Framework:
    """The framework of that name, which must be loaded."""
    if name == "torch":
        import array_api_compat.torch as torch_namespace

        return Framework(name, torch_namespace)
    if name == "numpy":
        import array_api_compat.numpy as numpy_namespace

        return Framework(name, numpy_namespace)
    if name == "jax":
        return Framework(name, sys.modules["jax"].numpy)
    from attrace.ops import _tensorflow

    return Framework(name, _tensorflow)


def framework_of(x: Any) -> Framework | None:
    """The framework x belongs to, or None where x is not an array of one of the four."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return framework("torch")
    import array_api_compat

    if array_api_compat.is_numpy_array(x):
        return framework("numpy")
    if array_api_compat.is_jax_array(x):
        return framework("jax")
    tensorflow: Any = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(x, (tensorflow.Tensor, tensorflow.Variable)):
        return framework("tensorflow")
    return None


def to_floats(x: Any) -> Floats:
    """An array of any framework as NumPy float64."""
    found = framework_of(x)
    return np.asarray(x if found is None else found.to_numpy(x), dtype=np.float64)


def dtype_name(x: Any) -> str:
    """The dtype's plain name, "float32" for instance, whatever the framework calls it."""
    name = getattr(x.dtype, "name", None)
    return name if isinstance(name, str) else str(x.dtype).removeprefix("torch.")


def wide_dtype(name: str) -> str:
    """The dtype that maps of this dtype are computed in: float32 for half precision, else their own."""
    computed_in = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
    if name not in computed_in:
        raise InputError(
            f"Expected maps of dtype {', '.join(computed_in)}. Received: {name}. "
            "Convert them first, for instance with .astype('float32') or .float()."
        )
    return computed_in[name]
