"""Works that benchmarks, report and experiments share: what is staged, and how it is applied.

A `Work` has a `stage` that touches the host only, and an `apply` that enqueues on the current stream and does not wait.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupy_staged as cs

MOST_CORES = 64  # that are tried for the fastest


@functools.cache
def has_cuda() -> bool:
    """Whether there is a CUDA device to use; asked when a benchmark is set up, never at import."""
    if os.environ.get("CUPY_STAGED_DEVICE") == "host":  # as text: older commits have no function for it
        return False
    try:
        import cupy

        return bool(cupy.cuda.is_available())
    except ImportError:
        return False


def require_cuda() -> Any:
    """Return the `Gpu` of this process; NotImplementedError (asv shows n/a) where there is no CUDA device."""
    if not has_cuda():
        raise NotImplementedError("needs a CUDA device")
    return _gpu()


@functools.cache
def _gpu() -> Any:
    from .gpu import Gpu

    return Gpu()


@functools.cache
def usable_cores() -> list[int]:
    """Return the cores this process may use; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pick_core() -> None:
    """Stay on the core that is fastest at the moment: every round of a report begins with it, and most setups do.

    On a shared machine a core is half as fast for as long as a neighbour uses its other half. Not for what asks for the
    longest of many times: a thread that may not move waits now and then.
    """
    if cores := usable_cores():
        os.sched_setaffinity(0, {min(cores[:MOST_CORES], key=_spin_ns)})


def _spin_ns(core: int) -> int:
    """Time a short loop on a core: the best of three."""
    os.sched_setaffinity(0, {core})
    now, found = time.perf_counter_ns, []
    for _ in range(3):
        begun = now()
        for _ in range(10_000):
            pass
        found.append(now() - begun)
    return min(found)


_made: dict[Any, Any] = {}


def once(key: Any, make: Callable[[], Any]) -> Any:
    """Return what `make` made the first time: asv runs setup around every execution, and allocation is not timed."""
    if key not in _made:
        _made[key] = make()
    return _made[key]


def enqueue_us(work: Work, synchronize: Callable[[], Any], count: int = 200) -> float:
    """Return the median host time of `work.apply` alone, in µs; staging and synchronizing are not timed."""
    now, taken = time.perf_counter_ns, []
    for _ in range(count):
        work.stage()
        begun = now()
        work.apply()
        taken.append(now() - begun)
        synchronize()
    return float(np.median(taken)) / 1e3


def warmed(work: Work) -> Work:
    """Do it once: the first time loads compiled code, and a single sample would show that alone."""
    work.both()
    return work


def nothing() -> None:
    """Do nothing."""


@dataclass
class Work:
    """One thing to measure.

    Attributes
    ----------
    stage, apply : callable
        Host work; then what enqueues it.
    owner : object
        Whose `stats` count launches and bytes, or None.
    """

    stage: Callable[[], Any]
    apply: Callable[[], Any]
    owner: Any = None

    def both(self) -> None:
        """Stage and apply."""
        self.stage()
        self.apply()


def values_of(n: int, form: str) -> Any:
    """Return `n` values as a list or as an int32 array."""
    values = np.arange(1, n + 1, dtype=np.int32)
    return values.tolist() if form == "list" else values


def one_write(
    n: int, form: str = "ndarray", target: str = "device", contents: str = "auto", slots: int = 2, device: Any = None
) -> Work:
    """Make one write of `n` values to a row."""
    table = cs.StagedWriteTensor(
        (4, max(n, 16)),
        "int32",
        uva_instead_of_gpu=target == "uva",
        contents=contents,
        max_concurrency=slots,
        device=device,
    )
    table.reserve(1, n)
    values = values_of(n, form)
    return Work(lambda: table.stage_write(1, 0, values), table.apply_write, table)


def many_writes(
    n: int, way: str = "batch", order: str = "ascending", target: str = "device", slots: int = 2, device: Any = None
) -> Work:
    """Make `n` writes of one value to a (4096, 64) table.

    `way` is "call" (one `stage_write` each, from lists) or "batch" (one `stage_writes`, from arrays); `order` is
    "ascending" or "shuffled" rows; "twice": half as many rows, each two times, in two columns and in no order; or
    "overlapping": each cell is written about twice.
    """
    rows, starts = np.arange(n, dtype=np.int64), np.full(n, 3)
    if order == "shuffled":
        rows = np.random.default_rng(0).permutation(rows)
    elif order == "twice":
        rows, columns = np.divmod(np.random.default_rng(0).permutation(n), 2)
        starts = 3 + 50 * columns
    elif order == "overlapping":
        rows = np.random.default_rng(0).integers(0, max(n // 2, 1), n)
    table = cs.StagedWriteTensor(
        (max(n, 4096), 64), "int32", uva_instead_of_gpu=target == "uva", max_concurrency=slots, device=device
    )
    table.reserve(n, n)
    values, totals = np.arange(n, dtype=np.int32), np.arange(1, n + 1)
    if way == "batch":
        return Work(lambda: table.stage_writes(rows, starts, values, totals), table.apply_write, table)
    calls = [(row, [value]) for row, value in zip(rows.tolist(), values.tolist(), strict=True)]

    def stage() -> None:
        for row, value in calls:
            table.stage_write(row, 3, value)

    return Work(stage, table.apply_write, table)


def tensors_of(groups: int, device: Any, slots: int = 2) -> list[cs.StagedWriteTensor]:
    """Make one (256, 1024) table a group."""
    return [cs.StagedWriteTensor((256, 1024), "int32", max_concurrency=slots, device=device) for _ in range(groups)]


def stage_groups(tensors: list[cs.StagedWriteTensor], writes: int) -> Callable[[], None]:
    """Stage `writes` writes of one value in every group: one call, or one batch."""
    one = [7]
    rows, starts = np.arange(writes), np.full(writes, 5)
    values, totals = np.arange(writes, dtype=np.int32), np.arange(1, writes + 1)

    def stage() -> None:
        for tensor in tensors:
            if writes == 1:
                tensor.stage_write(3, 5, one)
            else:
                tensor.stage_writes(rows, starts, values, totals)

    return stage


def fused(groups: int, writes: int = 1, slots: int = 2, device: Any = None) -> Work:
    """Make some one-value writes in each of `groups` tables, applied by one launch."""
    tensors = tensors_of(groups, device)
    writer = cs.FusedStagedWriter(tensors, max_concurrency=slots)
    writer.reserve(groups * writes, groups * writes)
    return Work(stage_groups(tensors, writes), writer.apply, writer)


def separate(groups: int, writes: int = 1, slots: int = 2, device: Any = None) -> Work:
    """Do the same as `fused` by one launch a group."""
    tensors = tensors_of(groups, device, slots)

    def apply() -> None:
        for tensor in tensors:
            tensor.apply_write()

    return Work(stage_groups(tensors, writes), apply)


def make_tables(groups: int, requests: int, slots: int = 2, device: Any = None) -> cs.BlockTables:
    """Make the block tables of a server of that size."""
    return cs.BlockTables([16] * groups, requests, 8192, [512] * groups, max_concurrency=slots, device=device)


def append_blocks(groups: int, requests: int, way: str = "batch", slots: int = 2, device: Any = None) -> Work:
    """Append one new KV block for every request in every group; "call" by request from lists, "batch" from arrays.

    Rows are overwritten, so that the same work can be done again and again.
    """
    tables = make_tables(groups, requests, slots, device)
    if way == "call":
        calls = [(row, [[row + 1]] * groups) for row in range(requests)]

        def stage() -> None:
            for row, ids in calls:
                tables.append_block_ids(row, ids, True)
    else:
        rows, ids = np.arange(requests), [np.arange(1, requests + 1, dtype=np.int32)] * groups
        totals = [np.arange(1, requests + 1, dtype=np.int32)] * groups

        def stage() -> None:
            tables.append_block_ids_batch(rows, ids, totals, True)

    return Work(stage, tables.apply_staged_writes, tables)


def prepare_step(groups: int, requests: int, where: str = "device", slots: int = 2, device: Any = None) -> Work:
    """Gather and map the slots of one decode step, a token a request; its inputs on the "device" or the "host"."""
    if not hasattr(cs.BlockTables, "prepare_step"):
        raise NotImplementedError("BlockTables has no prepare_step")
    filled = append_blocks(groups, requests, slots=slots, device=device)
    filled.both()
    arrays: tuple[Any, ...] = (
        np.random.default_rng(0).permutation(requests).astype(np.int32),
        np.arange(requests + 1, dtype=np.int32),
        np.arange(requests, dtype=np.int64) % 16,
    )
    if where == "device" and device != "host":
        import cupy

        arrays = tuple(cupy.asarray(array) for array in arrays)
        cupy.cuda.Device().synchronize()
    tables = filled.owner
    return Work(nothing, lambda: tables.prepare_step(*arrays, requests, requests), tables)


def rotation(count: int) -> Callable[[], int]:
    """Make a function that returns 0, 1, ... count - 1 and begins anew."""
    return functools.partial(next, itertools.cycle(range(count)))
