"""Work in threads that start at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(i)` returned for each i below `count`; all begin once every thread is there."""
    start = threading.Barrier(count)

    def run(i: int) -> Any:
        start.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
