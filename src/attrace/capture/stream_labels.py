"""Labels of a model's data: which state of which stream a tensor's storage holds."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from attrace.capture.torch_forms import storage_of


class Labels:
    """Storage -> label.  A label is a state's number, or its complement where the tokens are learned queries that
    have only met that state in a product.
    """

    _free: ClassVar[Any] = staticmethod(torch.UntypedStorage._free_weak_ref)
    _expired: ClassVar[Any] = staticmethod(torch.UntypedStorage._expired)

    def __init__(self) -> None:
        self._labels: dict[int, int] = {}
        self._references: dict[int, int] = {}
        self._forms: dict[int, tuple[int, tuple[int, ...], tuple[int, ...], int]] = {}
        """Of tensors that have one shape: not of nested ones."""
        self.get = self._labels.get

    def set(self, tensor: Tensor, label: int) -> None:
        storage = tensor.untyped_storage()
        address: int = storage._cdata
        if address not in self._references:
            reference: Any = storage._weak_ref()
            self._references[address] = reference
        self._labels[address] = label
        if not tensor.is_nested:
            self._forms[address] = tensor.numel(), tensor.shape, tensor.stride(), int(tensor.storage_offset())

    def run_of(self, view: Tensor, length: int | None, axis: int | None) -> tuple[int, int, int] | None:
        """(start, count, n) where a view of a labelled tensor has only some of its n tokens.

        `length` is n and `axis` the view's axis of tokens, where they are known.
        """
        form = None if view.is_nested else self._forms.get(storage_of(view))
        if form is None or view.numel() >= form[0]:
            return None
        _, shape, strides, offset = form
        if axis is not None:
            stride, count = view.stride(axis), view.shape[axis]
            total = max((size for size, step in zip(shape, strides, strict=True) if step == stride), default=0)
            rows = [size for size, step in zip(view.shape, view.stride(), strict=True) if step > stride and size > 1]
            if rows and not any(step > stride for step in strides):
                return None  # items of the batch one after the other along the same axis
        else:
            found = token_axis(shape, length)
            if found is None:
                return None
            stride, total = strides[found], shape[found]
            sizes = [size for size, step in zip(view.shape, view.stride(), strict=True) if step == stride]
            count = max(sizes, default=total)
        if not 0 < count < total or length not in (None, total):
            return None
        return (view.storage_offset() - offset) // stride % total, count, total

    def forget(self, address: int) -> None:
        if address in self._labels:
            del self._labels[address]
            self._forms.pop(address, None)
            self._free(self._references.pop(address))

    def drop_dead(self) -> None:
        """Forget storages that are gone."""
        for address in [a for a, reference in self._references.items() if self._expired(reference)]:
            self.forget(address)

    def __len__(self) -> int:
        return len(self._labels)

    def __del__(self) -> None:
        for reference in self._references.values():
            self._free(reference)
        self._references.clear()


def token_axis(shape: tuple[int, ...], length: int | None) -> int | None:
    """Which axis of a tensor holds tokens, `length` of them where that is known."""
    usual = {2: (0,), 3: (1, 0), 4: (2, 1)}.get(len(shape), ())
    if length is None:
        return 1 if len(shape) == 3 else None
    return next((axis for axis in usual if shape[axis] == length), None)
