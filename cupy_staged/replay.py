"""A serving trace driven through `BlockTables` as a server does, and checked against plain NumPy.

`Scheduler` decides what each step stages; `replay` owns the tables, stages and applies every step on the current
stream, and compares what the device holds with `testing.BlockTablesModel`. Only such a comparison waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from .block_tables import BlockTables
from .device import Backend, Device, HostBackend
from .scheduler import Request, Scheduler, Step
from .testing import BlockTablesModel, first_difference

__all__ = ["Check", "Percentiles", "ReplayHistory", "ReplayMismatch", "ReplayResult", "Staging", "replay"]

Check: TypeAlias = Literal["all", "sample", "none"]
Staging: TypeAlias = Literal["batch", "call"]
SAMPLE_EVERY: Final = 100


class ReplayMismatch(Exception):
    """The first cell in which the tables differ from the model.

    `what` is `"block table"` or `"num_blocks"`, which has no `column`.
    """

    def __init__(self, step: int, what: str, group: int, row: int, column: int | None, want: int, got: int) -> None:
        self.step, self.what, self.want, self.got = step, what, want, got
        self.group, self.row, self.column = group, row, column
        at = f"group {group}, row {row}" + ("" if column is None else f", column {column}")
        super().__init__(f"step {step}: {what} differs at {at}: want {want}, got {got}")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Host time of a step, in microseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, nanoseconds: Sequence[int]) -> Percentiles:
        """Return the percentiles of a list of times in nanoseconds; zeros where it is empty."""
        return cls(*(np.percentile(nanoseconds or [0], (50, 90, 99)) / 1000).round(2).tolist())


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay did. `tokens` counts scheduled ones, so that what a preempted request computes twice counts twice.

    `writes` to `host_allocations` are those of `BlockTables.stats`; `cells_checked` is how many cells were compared.
    """

    device: str
    staging: str
    check: str
    groups: int
    steps: int
    requests: int
    tokens: int
    preemptions: int
    writes: int
    values: int
    launches: int
    bytes: int
    growths: int
    waits: int
    wait_s: float
    late_fences: int
    host_allocations: int
    stage_us: Percentiles
    apply_us: Percentiles
    steps_checked: int
    cells_checked: int
    seconds: float


@dataclass(slots=True)
class ReplayHistory:
    """What each step of a replay did, for a picture of it.

    Attributes
    ----------
    stage_us, apply_us
        Host time of the step, in microseconds.
    writes
        Writes applied.
    blocks_in_use
        A group each: blocks that the requests of the step's batch own.
    """

    stage_us: list[float] = field(default_factory=list)
    apply_us: list[float] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    blocks_in_use: list[list[int]] = field(default_factory=list)


def replay(
    requests: Iterable[Request],
    *,
    block_sizes: Sequence[int] = (16,),
    num_blocks: int | Sequence[int] = 16384,
    max_reqs: int = 256,
    max_tokens: int = 2048,
    max_model_len: int = 16384,
    device: Device = None,
    check: Check = "all",
    staging: Staging = "batch",
    seed: int = 0,
    on_step: Callable[[Step], None] | None = None,
    history: ReplayHistory | None = None,
) -> ReplayResult:
    """Drive `BlockTables` with a trace: every step is staged, applied, and compared as `check` says.

    Parameters
    ----------
    requests
        In order of arrival, from `read_trace` or `generate_trace`.
    block_sizes
        Tokens a KV block, a group each.
    num_blocks
        KV blocks in each group's pool, one number for all or a group each.
    max_reqs, max_tokens, max_model_len, seed
        As in `Scheduler`.
    device
        As everywhere in `cupy_staged`.
    check
        `"all"`: after every step, every cell of every group's table and every count, on the device and on the host.
        `"sample"`: the same after every 100th step and the last. `"none"`: nothing, so that nothing waits for the
        device.
    staging
        `"batch"`: one `append_block_ids_batch` a step, from arrays. `"call"`: one `append_block_ids` a row, from lists.
    on_step
        Called after each step and its comparison, outside of what is timed.
    history
        Gets an entry for each step, outside of what is timed.

    Raises
    ------
    ReplayMismatch
        At the first cell that differs.
    ValueError
        Bad parameters, a device that is not there, a bad trace line.
    """
    if check not in get_args(Check) or staging not in get_args(Staging):
        raise ValueError(f"check is one of {get_args(Check)}, staging of {get_args(Staging)}: {check!r}, {staging!r}")
    pools = [num_blocks] * len(block_sizes) if isinstance(num_blocks, int) else list(num_blocks)
    limits = {"max_reqs": max_reqs, "max_tokens": max_tokens, "max_model_len": max_model_len}
    scheduler = Scheduler(requests, block_sizes=block_sizes, num_blocks=pools, seed=seed, **limits)
    shape = (list(block_sizes), max_reqs, max_tokens, scheduler.max_blocks_per_group)
    tables, model = BlockTables(*shape, device=device), BlockTablesModel(*shape)
    stage_ns: list[int] = []
    apply_ns: list[int] = []
    tokens = steps_checked = cells_checked = 0
    unchecked: Step | None = None
    writes = 0
    begin = time.perf_counter()
    for step in scheduler:
        calls = [] if staging == "batch" else list(_calls(step))
        t0 = time.perf_counter_ns()
        if staging == "batch":
            tables.append_block_ids_batch(step.rows, step.new_block_ids, step.cu_num_blocks, step.overwrite)
        for row, ids, overwrite in calls:
            tables.append_block_ids(row, ids, overwrite)
        t1 = time.perf_counter_ns()
        tables.apply_staged_writes()
        t2 = time.perf_counter_ns()
        stage_ns.append(t1 - t0)
        apply_ns.append(t2 - t1)
        tokens += len(step.positions)
        if history is not None:
            before, writes = writes, tables.stats.writes
            history.stage_us.append((t1 - t0) / 1000)
            history.apply_us.append((t2 - t1) / 1000)
            history.writes.append(writes - before)
            history.blocks_in_use.append(tables.num_blocks.np[:, step.idx_mapping].sum(axis=1).tolist())
        if check != "none":
            model.append_block_ids_batch(step.rows, step.new_block_ids, step.cu_num_blocks, step.overwrite)
            model.apply()
            unchecked = step
            if check == "all" or step.index % SAMPLE_EVERY == 0:
                cells_checked += _compare(tables, model, step.index)
                steps_checked, unchecked = steps_checked + 1, None
        if on_step is not None:
            on_step(step)
    if unchecked is not None:
        cells_checked += _compare(tables, model, unchecked.index)
        steps_checked += 1
    stats = tables.stats
    names = ("writes", "values", "launches", "bytes", "growths", "waits", "wait_s", "late_fences", "host_allocations")
    return ReplayResult(
        device=_device_name(tables.backend),
        staging=staging,
        check=check,
        groups=len(block_sizes),
        steps=len(stage_ns),
        requests=scheduler.num_finished,
        tokens=tokens,
        preemptions=scheduler.num_preemptions,
        stage_us=Percentiles.of(stage_ns),
        apply_us=Percentiles.of(apply_ns),
        steps_checked=steps_checked,
        cells_checked=cells_checked,
        seconds=round(time.perf_counter() - begin, 3),
        **{name: getattr(stats, name) for name in names},
    )


def _calls(step: Step) -> Iterator[tuple[int, list[list[int]], bool]]:
    """Yield a step's appends one row at a time, as lists: `(row, ids of each group, overwrite)`."""
    begins = [0] * len(step.new_block_ids)
    for i, row in enumerate(step.rows.tolist()):
        ends = [int(totals[i]) for totals in step.cu_num_blocks]
        ids = [group[b:e].tolist() for group, b, e in zip(step.new_block_ids, begins, ends, strict=True)]
        yield row, ids, bool(step.overwrite[i])
        begins = ends


def _compare(tables: BlockTables, model: BlockTablesModel, step: int) -> int:
    """Compare all tables and counts cell by cell, waiting for the device; return the number of cells."""
    cells = 0
    for group, want in enumerate(model.tables):
        got = _on_host(tables.block_tables[group].gpu)
        cells += got.size
        if (cell := first_difference(got, want.table)) is not None:
            row, column = cell
            raise ReplayMismatch(step, "block table", group, row, column, int(want.table[cell]), int(got[cell]))
    for counts, wanted in ((tables.num_blocks.gpu, model.applied_num_blocks), (tables.num_blocks.np, model.num_blocks)):
        got = _on_host(counts)
        cells += got.size
        if (cell := first_difference(got, wanted)) is not None:
            raise ReplayMismatch(step, "num_blocks", cell[0], cell[1], None, int(wanted[cell]), int(got[cell]))
    return cells


def _device_name(backend: Backend) -> str:
    if isinstance(backend, HostBackend):
        return "host"
    name = backend.runtime.getDeviceProperties(backend.id)["name"].decode()
    return f"cuda:{backend.id} ({name}{'' if backend.uva else ', without UVA memory'})"


def _on_host(array: Any) -> NDArray[Any]:
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())
