"""UvaBufferPool: reuse in the steady state, growth, and what it replaces: a buffer made anew at each call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import cupy_staged as cs

from . import common

CAPACITY = 4096


def make_call(case: str, device: str) -> Callable[[], Any]:
    """Make the call of one case; each publishes an int32 array to the device."""
    values = np.arange(CAPACITY, dtype=np.int32)
    if case == "steady":
        pool = cs.UvaBufferPool(CAPACITY, "int32", device=device)
        return lambda: pool.copy_to_uva(values)
    if case == "first growth":  # a new pool whose buffer is too small at once

        def grow() -> None:
            cs.UvaBufferPool(1, "int32", max_concurrency=1, device=device).copy_to_uva(values)

        return grow
    if case == "boundary growth":  # one value more than fits, once the pool is in use

        def cross() -> None:
            used = cs.UvaBufferPool(CAPACITY, "int32", max_concurrency=1, device=device)
            used.copy_to_uva(values)
            used.copy_to_uva(np.arange(CAPACITY + 1, dtype=np.int32))

        return cross

    def anew() -> Any:
        buffer = cs.UvaBuffer(CAPACITY, "int32", device=device)
        buffer.np[:] = values
        return buffer.uva

    return anew


class Pools:
    """4096 int32 to the device's reach. The device is not synchronized; no kernel reads the views."""

    params = (("steady", "first growth", "boundary growth", "buffer made anew"), ("host", "cuda"))
    param_names = ("case", "device")

    def setup(self, case: str, device: str) -> None:
        if device == "cuda":
            common.require_cuda()
        self.call = common.once(("pools", case, device), lambda: make_call(case, device))

    def time_publish(self, case: str, device: str) -> None:
        """Publish once. Not synchronized."""
        self.call()

    def track_p99(self, case: str, device: str) -> float:
        """Measure the 99th percentile of one publish, of 1000. Not synchronized."""
        return float(np.percentile(self.samples(), 99))

    track_p99.unit = "us"  # type: ignore[attr-defined]

    def track_max(self, case: str, device: str) -> float:
        """Measure the longest of 1000 publishes: stalls of the allocator show here. Not synchronized."""
        return float(max(self.samples()))

    track_max.unit = "us"  # type: ignore[attr-defined]

    def samples(self) -> list[float]:
        """Time 1000 publishes, in microseconds."""
        found = []
        for _ in range(1000):
            begun = time.perf_counter_ns()
            self.call()
            found.append((time.perf_counter_ns() - begun) / 1e3)
        return found
