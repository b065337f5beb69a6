"""TensorFlow under the names of the array API standard: what attrace's array functions need of it, no more.

Only TensorFlow's own operations, so results are tensors, gradients flow through a GradientTape, and
everything works inside `tf.function`.  Imported only when an array of TensorFlow was given.
"""

from __future__ import annotations

import sys
from typing import Any

tf: Any = sys.modules["tensorflow"]

float32 = tf.float32
float64 = tf.float64
int32 = tf.int32
int64 = tf.int64


def arange(n: int) -> Any:
    return tf.range(n)


def asarray(x: Any) -> Any:
    return tf.convert_to_tensor(x)


def astype(x: Any, dtype: Any) -> Any:
    return tf.cast(x, dtype)


def sum(x: Any, *, axis: int, keepdims: bool = False, dtype: Any = None) -> Any:
    return tf.reduce_sum(x if dtype is None else tf.cast(x, dtype), axis=axis, keepdims=keepdims)


def mean(x: Any, *, axis: int) -> Any:
    return tf.reduce_mean(x, axis=axis)


def max(x: Any, *, axis: int | None = None) -> Any:
    return tf.reduce_max(x, axis=axis)


def min(x: Any, *, axis: int | None = None) -> Any:
    return tf.reduce_min(x, axis=axis)


def matmul(a: Any, b: Any) -> Any:
    return tf.matmul(a, b)


def matrix_transpose(x: Any) -> Any:
    return tf.linalg.matrix_transpose(x)


def where(condition: Any, a: Any, b: Any) -> Any:
    return tf.where(condition, a, b)


def ones_like(x: Any) -> Any:
    return tf.ones_like(x)


def zeros_like(x: Any) -> Any:
    return tf.zeros_like(x)


def stack(arrays: list[Any], *, axis: int) -> Any:
    return tf.stack(arrays, axis=axis)


def eye(n: int, *, dtype: Any) -> Any:
    return tf.eye(n, dtype=dtype)


def reshape(x: Any, shape: tuple[int, ...]) -> Any:
    return tf.reshape(x, shape)


def sort(x: Any, *, axis: int) -> Any:
    return tf.sort(x, axis=axis)


def cumulative_sum(x: Any, *, axis: int, dtype: Any) -> Any:
    return tf.cumsum(tf.cast(x, dtype), axis=axis)
