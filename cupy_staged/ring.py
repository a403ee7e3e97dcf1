"""What keeps a slot safe: fence words, retirement of what is replaced or dropped, and the counts that `stats` shows.

A fence word lies in pinned memory. The last reader of a slot (our kernel, or a copy that follows the reader on its
stream) sets it to the slot's sequence, and the host rewrites the slot only after it has seen it. Looking at a word
calls no CUDA, so that nothing here disturbs a capture on another thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .backends import Backend, wait_word
from .device import is_forked_child

_default_max_concurrency = 2


def set_default_max_concurrency(n: int) -> None:
    """Set how many slots a ring has where the constructor is not told; 2 at first.

    Parameters
    ----------
    n : int
        Number of slots, at least 1. One more than the steps that are in flight on the device at once avoids waits.

    Raises
    ------
    TypeError, ValueError
        `n` is not an int, or below 1.
    """
    global _default_max_concurrency
    if n is None:
        raise TypeError("max_concurrency must be an int, got None")
    _default_max_concurrency = check_max_concurrency(n)


def check_max_concurrency(n: int | None) -> int:
    """`n`, or the default for None."""
    if n is None:
        return _default_max_concurrency
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"max_concurrency must be an int, got {n!r}")
    if n < 1:
        raise ValueError(f"max_concurrency must be at least 1, got {n}")
    return int(n)


@dataclass
class Stats:
    """What an object has done since it was made. Times are seconds of host time.

    Attributes
    ----------
    slots : int
        Slots in the ring.
    launches, writes, values, bytes : int
        Kernel launches (or hand-outs), writes and values they carried, bytes packed for them.
    copies : int
        Host-to-device copies.
    growths, host_allocations : int
        Slots replaced by larger ones; blocks of pinned memory allocated.
    waits, wait_s : int, float
        Times that the host waited for a busy slot, and for how long.
    late_fences : int
        Hand-outs that nobody fenced, fenced when their slot was taken back.
    """

    slots: int = 0
    launches: int = 0
    writes: int = 0
    values: int = 0
    bytes: int = 0
    copies: int = 0
    growths: int = 0
    host_allocations: int = 0
    waits: int = 0
    wait_s: float = 0.0
    late_fences: int = 0


class FenceWords:
    """A row of 64-bit words in pinned memory, each on a cache line of its own.

    Attributes
    ----------
    block : Pinned
    words : memoryview
        ``[8 * num_words]`` unsigned 64-bit; word `i` is at ``8 * i``.
    """

    STRIDE = 8

    def __init__(self, backend: Backend, num_words: int, stats: Stats) -> None:
        self.backend = backend
        self.stats = stats
        self.block = backend.pinned(8 * self.STRIDE * num_words)
        self.words = memoryview(self.block.array.view(np.uint64))  # type: ignore[arg-type]
        stats.host_allocations += 1

    def wait(self, index: int, value: int, stream: Any) -> None:
        """Wait until word `index` is `value`, and count the wait."""
        begin = time.perf_counter()
        try:
            wait_word(self.words, self.STRIDE * index, value, self.backend, stream)
        finally:
            self.stats.waits += 1
            self.stats.wait_s += time.perf_counter() - begin


# What was replaced or dropped, each with a function that tells whether its last work is done. Finalizers append here
# and do no more: they may run anywhere, also inside a capture. Constructors, growth and rebind sweep.
_retired: list[tuple[Callable[[], bool], Any]] = []
_sweep_lock = threading.Lock()


def retire(is_idle: Callable[[], bool], kept: Any) -> None:
    """Keep `kept` alive until `is_idle()`."""
    _retired.append((is_idle, kept))


def drop(core: Any) -> None:
    """Finalizer of an object: keep its `core` alive until it is idle."""
    _retired.append((core.is_idle, core))


def sweep() -> None:
    """Let go of everything that is idle. Called where an allocation is made anyway."""
    if is_forked_child() or _sweep_lock.locked():
        return
    with _sweep_lock:
        at = 0
        for _ in range(len(_retired)):  # a finalizer may append meanwhile; an error or interrupt must not drop an entry
            if _retired[at][0]():
                del _retired[at]
            else:
                at += 1


def grown_size(needed: int) -> int:
    """The smallest power of two that holds `needed` (1 for 0)."""
    return 1 << max(needed - 1, 0).bit_length()
