"""A serving trace driven through `BlockTables` as a server does, and checked against plain NumPy.

`Scheduler` decides what each step stages; `replay` owns the tables, stages, applies and prepares every step on the
current stream, and lets a `Checker` compare what the device holds with the model in `testing`. Only such a comparison,
and the end, waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from .backends import Backend, HostBackend
from .block_tables import BlockTables
from .device import Device
from .replay_check import Checker, ReplayMismatch
from .replay_steps import EagerSteps, GraphSteps, make_steps, padded_sizes, synchronize
from .scheduler import Request, Scheduler, Step
from .testing import FastTablesModel

__all__ = ["Check", "Percentiles", "ReplayHistory", "ReplayMismatch", "ReplayResult", "Staging", "replay"]

Check: TypeAlias = Literal["all", "sample", "none"]
Staging: TypeAlias = Literal["batch", "call"]
SAMPLE_EVERY: Final = 100


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Host time of a step, in microseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> Percentiles:
        """Return the percentiles of a list of times; zeros where it is empty."""
        return cls(*np.percentile(microseconds or [0], (50, 90, 99)).round(2).tolist())


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay did. `tokens` counts scheduled ones, so that what a preempted request computes twice counts twice.

    `writes` to `host_allocations` are those of `BlockTables.stats`, so that launches are those of applies;
    `graphs` is how many were captured; `cells_checked` is how many cells were compared.
    """

    device: str
    staging: str
    check: str
    groups: int
    block_sizes: list[int]
    kernel_block_sizes: list[int]
    cp_size: int
    cp_rank: int
    cp_interleave: int
    graphs: int
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
    prepare_us: Percentiles
    steps_checked: int
    cells_checked: int
    seconds: float


@dataclass(slots=True)
class ReplayHistory:
    """What each step of a replay did, for a picture of it.

    Attributes
    ----------
    stage_us, apply_us, prepare_us
        Host time of the step, in microseconds.
    writes
        Writes applied.
    blocks_in_use
        A group each: kernel blocks that the requests of the step's batch own.
    """

    stage_us: list[float] = field(default_factory=list)
    apply_us: list[float] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    blocks_in_use: list[list[int]] = field(default_factory=list)
    prepare_us: list[float] = field(default_factory=list)


def replay(
    requests: Iterable[Request],
    *,
    block_sizes: Sequence[int] = (16,),
    kernel_block_sizes: Sequence[int] | None = None,
    num_blocks: int | Sequence[int] = 16384,
    max_reqs: int = 256,
    max_tokens: int = 2048,
    max_model_len: int = 16384,
    cp_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    device: Device = None,
    check: Check = "all",
    staging: Staging = "batch",
    graph: bool = False,
    seed: int = 0,
    on_step: Callable[[Step], None] | None = None,
    history: ReplayHistory | None = None,
) -> ReplayResult:
    """Drive `BlockTables` with a trace: every step is staged, applied, prepared, and compared as `check` says.

    Parameters
    ----------
    requests
        In order of arrival, from `read_trace` or `generate_trace`.
    block_sizes
        Tokens a KV block, a group each.
    kernel_block_sizes, cp_size, cp_rank, cp_interleave
        As in `BlockTables`. All groups are sharded, so that a request needs a new block every
        `block_size * cp_size` tokens.
    num_blocks
        KV blocks in each group's pool, one number for all or a group each.
    max_reqs, max_tokens, max_model_len, seed
        As in `Scheduler`.
    device
        As everywhere in `cupy_staged`.
    check
        `"all"`: after every step, every cell of every group's table, of its gathered block table and of its slot
        mapping, padding included, and every count, on the device and on the host. `"sample"`: the same after every
        100th step and the last, but of the gathered block tables only the step's rows. `"none"`: nothing, so that
        nothing waits for the device.
    staging
        `"batch"`: one `append_block_ids_batch` a step, from arrays. `"call"`: one `append_block_ids` a row, from lists.
    graph
        Prepare each step with a graph, captured once for each pair of padded sizes, instead of `prepare_step` with
        NumPy arrays. Preparing then includes the uploads that the graph reads.
    on_step
        Called after each step and its comparison, outside of what is timed.
    history
        Gets an entry for each step, outside of what is timed.

    Raises
    ------
    ReplayMismatch
        At the first cell that differs.
    ValueError
        Bad parameters, a device that is not there, graphs on the host, a bad trace line.
    """
    if check not in get_args(Check) or staging not in get_args(Staging):
        raise ValueError(f"check is one of {get_args(Check)}, staging of {get_args(Staging)}: {check!r}, {staging!r}")
    pools = [num_blocks] * len(block_sizes) if isinstance(num_blocks, int) else list(num_blocks)
    limits = {"max_reqs": max_reqs, "max_tokens": max_tokens, "max_model_len": max_model_len}
    spans = [size * max(cp_size, 1) for size in block_sizes]  # BlockTables explains a bad one
    scheduler = Scheduler(requests, block_sizes=spans, num_blocks=pools, seed=seed, **limits)
    shape = (list(block_sizes), max_reqs, max_tokens, scheduler.max_blocks_per_group)
    kernel_sizes = list(block_sizes if kernel_block_sizes is None else kernel_block_sizes)
    cp: dict[str, Any] = {"cp_size": cp_size, "cp_rank": cp_rank, "cp_interleave": cp_interleave}
    tables = BlockTables(*shape, kernel_block_sizes=kernel_sizes, **cp, device=device)
    checker = None
    if check != "none":
        model = FastTablesModel(*shape, kernel_block_sizes=kernel_sizes, **cp)
        checker = Checker(tables, model, check == "all")
    steps = make_steps(tables, graph)
    times = ReplayHistory() if history is None else history
    begin = time.perf_counter()
    try:
        tokens = _run(scheduler, tables, steps, checker, check, staging, times, on_step, history is not None)
    finally:
        synchronize(tables.backend)  # a graph is not the library's: it must be done before it is dropped
    stats = tables.stats
    names = ("writes", "values", "launches", "bytes", "growths", "waits", "wait_s", "late_fences", "host_allocations")
    return ReplayResult(
        device=_device_name(tables.backend),
        staging=staging,
        check=check,
        groups=len(block_sizes),
        block_sizes=list(block_sizes),
        kernel_block_sizes=kernel_sizes,
        **cp,
        graphs=steps.num_graphs,
        steps=len(times.stage_us),
        requests=scheduler.num_finished,
        tokens=tokens,
        preemptions=scheduler.num_preemptions,
        stage_us=Percentiles.of(times.stage_us),
        apply_us=Percentiles.of(times.apply_us),
        prepare_us=Percentiles.of(times.prepare_us),
        steps_checked=0 if checker is None else checker.steps,
        cells_checked=0 if checker is None else checker.cells,
        seconds=round(time.perf_counter() - begin, 3),
        **{name: getattr(stats, name) for name in names},
    )


def _run(
    scheduler: Scheduler,
    tables: BlockTables,
    steps: EagerSteps | GraphSteps,
    checker: Checker | None,
    check: Check,
    staging: Staging,
    times: ReplayHistory,
    on_step: Callable[[Step], None] | None,
    is_drawn: bool,
) -> int:
    """Carry out all steps, and fill `times`, the rest of it only where `is_drawn`; return the tokens scheduled."""
    tokens = writes = 0
    unchecked: tuple[Step, tuple[int, int]] | None = None
    for step in scheduler:
        calls = [] if staging == "batch" else list(_calls(step))
        sizes = padded_sizes(step, tables)
        steps.get_ready(sizes)
        t0 = time.perf_counter_ns()
        if staging == "batch":
            tables.append_block_ids_batch(step.rows, step.new_block_ids, step.cu_num_blocks, step.overwrite)
        for row, ids, overwrite in calls:
            tables.append_block_ids(row, ids, overwrite)
        t1 = time.perf_counter_ns()
        tables.apply_staged_writes()
        t2 = time.perf_counter_ns()
        steps.prepare(step, sizes)
        t3 = time.perf_counter_ns()
        times.stage_us.append((t1 - t0) / 1000)
        times.apply_us.append((t2 - t1) / 1000)
        times.prepare_us.append((t3 - t2) / 1000)
        if is_drawn:
            before, writes = writes, tables.stats.writes
            times.writes.append(writes - before)
            times.blocks_in_use.append(tables.num_blocks.np[:, step.idx_mapping].sum(axis=1).tolist())
        tokens += len(step.positions)
        if checker is not None:
            checker.follow(step)
            unchecked = step, sizes
            if check == "all" or step.index % SAMPLE_EVERY == 0:
                checker.compare(*unchecked)
                unchecked = None
        if on_step is not None:
            on_step(step)
    if checker is not None and unchecked is not None:
        checker.compare(*unchecked)
    return tokens


def _calls(step: Step) -> Iterator[tuple[int, list[list[int]], bool]]:
    """Yield a step's appends one row at a time, as lists: `(row, ids of each group, overwrite)`."""
    begins = [0] * len(step.new_block_ids)
    for i, row in enumerate(step.rows.tolist()):
        ends = [int(totals[i]) for totals in step.cu_num_blocks]
        ids = [group[b:e].tolist() for group, b, e in zip(step.new_block_ids, begins, ends, strict=True)]
        yield row, ids, bool(step.overwrite[i])
        begins = ends


def _device_name(backend: Backend) -> str:
    if isinstance(backend, HostBackend):
        return "host"
    name = backend.runtime.getDeviceProperties(backend.id)["name"].decode()
    return f"cuda:{backend.id} ({name}{'' if backend.uva else ', without UVA memory'})"
