"""The experiments that decide the design: how to launch, how to fence, where to stage, which contents, which grid.

``python -m asv_bench.experiments OUT`` on a CUDA machine writes ``experiments.json``, ``experiments.md`` and, with
matplotlib, ``experiments.png``. Everything runs in one process, arms alternate, and both the null stream and a
non-blocking one are measured. ``--device host --quick`` tries what can be tried without a GPU.

Experiments look inside the package: they exchange the launch shapes for the objects that they make, and launchers of
single objects. Benchmarks and report use public names only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

import cupy_staged as cs
from cupy_staged import kernels, packing
from cupy_staged.values import convert, pack_values, refuse

from . import measure
from .benchmarks import common
from .benchmarks.gpu import SOURCE, pack_arguments
from .measure import Run, Summary, quiet, say, shown, summary, table

Calls = dict[str, Callable[[], Any]]


def time_calls(calls: Calls, rounds: int, number: int, after: Callable[[], Any]) -> dict[str, Summary | None]:
    """Measure host microseconds a call: rounds alternate, each `number` calls in a row, then `after` untimed."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    now = time.perf_counter_ns
    with quiet():
        for call in calls.values():
            call()
        after()
        for _ in range(rounds):
            common.pick_core()
            for name, call in calls.items():
                begun = now()
                for _ in range(number):
                    call()
                samples[name].append((now() - begun) / number / 1e3)
                after()
    return {name: summary(found) for name, found in samples.items()}


# -- (a) ways to launch ------------------------------------------------------------------------------------------------


def launch_ways(gpu: Any, stream: Any) -> tuple[Calls, dict[str, str]]:
    """Make launches of one kernel with eight arguments; say why an arm is missing."""
    kernel, arguments = gpu.kernels["eight"], gpu.arguments("eight")
    graph = gpu.capture(gpu.raw("eight"))
    handle, launch_graph, ptr = int(graph.graphExec), gpu.runtime.graphLaunch, stream.ptr
    function = int(kernel.kernel.ptr)
    params, kept = pack_arguments(arguments)
    driver = importlib.import_module("cupy_backends.cuda.api.driver")
    launch_driver = driver.launchKernel
    c_launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    c_launch.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p] * 3
    c_launch.restype = ctypes.c_int
    ways: Calls = {
        "RawKernel": lambda: kernel((1,), (32,), arguments),
        "Graph.launch": lambda: graph.launch(stream),
        "runtime.graphLaunch": lambda: launch_graph(handle, ptr),
        "driver.launchKernel, prepared": lambda: launch_driver(function, 1, 1, 1, 32, 1, 1, 0, ptr, params, 0),
        "ctypes cuLaunchKernel, prepared": lambda: c_launch(function, 1, 1, 1, 32, 1, 1, 0, ptr, params, None),
    }
    gpu._kept.append((kept, graph))
    missing = {}
    try:
        ways["cuda.core launch"] = cuda_core_launch(gpu, stream, arguments)
    except ImportError as error:
        missing["cuda.core launch"] = f"not installed ({error})"
    except Exception as error:  # noqa: BLE001 - its interface is young: the other five arms count more
        missing["cuda.core launch"] = f"failed: {type(error).__name__}: {error}"
    return ways, missing


def cuda_core_launch(gpu: Any, stream: Any, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    """Make the launch of `cuda.core`, with its own compiled copy of the kernel."""
    core = importlib.import_module("cuda.core")
    if not hasattr(core, "Program"):  # before its version 1
        core = importlib.import_module("cuda.core.experimental")

    device = core.Device()
    device.set_current()
    capability = gpu.cupy.cuda.Device().compute_capability
    options = core.ProgramOptions(std="c++17", arch=f"sm_{capability}")
    kernel = core.Program(SOURCE, "c++", options).compile("cubin").get_kernel("eight")
    own = core.Stream.from_handle(stream.ptr) if stream.ptr else device.default_stream
    config = core.LaunchConfig(grid=1, block=32)

    def launch() -> None:
        core.launch(own, config, kernel, *arguments)

    launch()
    stream.synchronize()
    return launch


def experiment_launch(gpu: Any, quick: bool) -> dict[str, Any]:
    """Compare the host time of each way to launch; 50 in a row, so that the queue never fills."""
    out: dict[str, Any] = {"host_us": {}, "empty_host_us": {}, "missing": {}}
    for name, stream in gpu.streams.items():
        with stream:
            ways, missing = launch_ways(gpu, stream)
            out["host_us"][name] = time_calls(ways, 10 if quick else 40, 50, stream.synchronize)
            empty = {"RawKernel": gpu.raw("empty"), "runtime.graphLaunch": gpu.graph("empty")}
            out["empty_host_us"][name] = time_calls(empty, 10 if quick else 40, 50, stream.synchronize)
        out["missing"].update(missing)
    return out


# -- (b) fences --------------------------------------------------------------------------------------------------------


def graph_with_event(gpu: Any, event: Any) -> Callable[[], Any]:
    """Make a launch of one graph that runs the word's kernel, then records an event: one call instead of two."""
    record = ctypes.CDLL("libcuda.so.1").cuEventRecordWithFlags
    record.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
    kernel, external = gpu.raw("write_word"), 1  # CU_EVENT_RECORD_EXTERNAL: a node, not a dependency of the capture

    def enqueue() -> None:
        kernel()
        if error := record(event.ptr, gpu.side.ptr, external):
            raise RuntimeError(f"cuEventRecordWithFlags: error {error}")

    handle, current = int(gpu.capture(enqueue).graphExec), gpu.cupy.cuda.get_current_stream
    return lambda: gpu.runtime.graphLaunch(handle, current().ptr)


def experiment_fence(gpu: Any, quick: bool) -> dict[str, Any]:
    """Compare an event (record after the launch, query before the rewrite) with a word in mapped memory."""
    out: dict[str, Any] = {"host_us": {}, "gpu_us": {}, "node_gpu_us": {}}
    rounds, runtime = (3, gpu.runtime) if quick else (7, gpu.runtime)
    event = gpu.cupy.cuda.Event(disable_timing=True)
    words = gpu.words
    for name, stream in gpu.streams.items():
        ptr = stream.ptr
        with stream:
            empty, word = gpu.graph("empty"), gpu.graph("write_word")
            event.record(stream)
            stream.synchronize()

            def by_event(empty: Any = empty, ptr: int = ptr) -> None:
                empty()
                runtime.eventRecord(event.ptr, ptr)

            calls: Calls = {
                "event record": lambda ptr=ptr: runtime.eventRecord(event.ptr, ptr),
                "event query": lambda: runtime.eventQuery(event.ptr),
                "word compare": lambda: words[0] == 1,
                "streamIsCapturing": lambda ptr=ptr: runtime.streamIsCapturing(ptr),
                "launch alone": empty,
                "launch, event record": by_event,
                "launch of a kernel that writes the word": word,
            }
            try:
                calls["graph of kernel and event record"] = graph_with_event(gpu, event)
            except (AttributeError, OSError, RuntimeError) as error:
                out["missing"] = str(error)
            out["host_us"][name] = time_calls(calls, 10 if quick else 40, 50, stream.synchronize)
        arms = {arm: call for arm, call in calls.items() if arm.startswith(("launch", "graph"))}
        out["gpu_us"][name] = {arm: summary(gpu.gpu_samples(call, 32, stream, rounds)) for arm, call in arms.items()}
    stream = gpu.streams["non-blocking"]
    for arm in ("empty", "write_word"):
        out["node_gpu_us"][arm] = summary(gpu.node_samples(gpu.raw(arm), stream, rounds))
    return out


# -- (c) staging into a log, or straight into the slot -----------------------------------------------------------------


@njit
def lines_of(slot: int, num_values: int, target: int, tile: int, lines_bytes: int, sequence: int) -> int:
    """Do what `pack` does for one run of int32 whose contents already lie behind the lines: header and tile a line."""
    at, left, offset, line = lines_bytes + (target & 15), num_values, 0, slot
    lines = (num_values * 4 + tile - 1) // tile
    while left > 0:
        count = min(left, tile // 4)
        packing.store(line, sequence)
        packing.store(line + 8, lines | (1 << 32))
        packing.store(line + 16, (15 << 60) | offset)
        packing.store(line + 24, (count << 40) | at)
        line, offset, at, left = line + 32, offset + count, at + count * 4, left - count
    return lines


class Direct:
    """The prototype that stages straight into a leased slot: checks and contents at stage, lines at apply."""

    def __init__(self, num_values: int, device: Any) -> None:
        self.backend = backend = cs.StagedWriteTensor((1, 1), "int32", device=device).backend
        self.lock = threading.Lock()
        self.done = memoryview(np.zeros(1, np.uint64))
        self.lines_bytes = 32 * 1024
        self.block = backend.pinned(self.lines_bytes + 4 * num_values + 64)
        self.contents = memoryview(self.block.array)[self.lines_bytes :]
        self.values = self.block.array[self.lines_bytes :][: 4 * num_values].view(np.int32)
        self.row_length, self.length = num_values, 0

    def stage(self, row: int, start: int, values: Any) -> None:
        """Check one write and copy its values."""
        if type(values) is not list:
            values = convert(values, np.dtype(np.int32))
        length = len(values)
        if not (0 <= row < 1 and 0 <= start <= self.row_length - length):
            refuse(row, start, length, 1, self.row_length)
        if isinstance(values, np.ndarray):
            self.values[:length] = values
        else:
            pack_values(values, np.dtype(np.int32), self.contents, 0)
        self.length = length

    def apply(self) -> None:
        """Check lock, device and stream as `apply_write` does, write the lines, and launch nothing."""
        self.lock.acquire(False)
        try:
            if not self.backend.elsewhere() and self.backend.stream(None).ptr >= 0 and self.done[0] <= 1:
                tile = min(max((self.length * 4 >> 7) & ~15, packing.MIN_TILE), packing.MAX_TILE)
                lines_of(self.block.address, self.length, 0, tile, self.lines_bytes, 1)
                self.done[0] = 1
        finally:
            self.lock.release()


def without_launch(work: common.Work) -> None:
    """Let the applies of an object with one slot pack, and launch nothing: the slot is free again at once."""
    path = work.owner._path
    done, sequence = path._done, memoryview(path._slots[0].array[:8].view(np.uint64))

    def launch(_stream: int) -> None:
        done[0] = sequence[0]

    path._launch[:] = [launch] * len(path._launch)


def experiment_staging(machine: Any, quick: bool) -> dict[str, Any]:
    """Compare the host time of stage and pack, without a launch: contents copied twice (log, slot) or once (slot)."""
    out: dict[str, Any] = {}
    for n in (1, 4096, 65536, 131072):
        direct = Direct(n, machine.device)
        for form in ("list", "ndarray"):
            values = common.values_of(n, form)
            log = common.one_write(n, form, slots=1, device=machine.device)
            without_launch(log)

            def slot(values: Any = values, direct: Direct = direct) -> None:
                direct.stage(0, 0, values)
                direct.apply()

            number = 200 if n == 1 else 20 if n == 4096 or form == "ndarray" else 2
            arms = {"log, then pack": log.both, "straight into the slot": slot}
            out[f"{n} {form}"] = time_calls(arms, 5 if quick else 21, number, common.nothing)
    return out


# -- (d) contents ------------------------------------------------------------------------------------------------------

SIZES = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)


def experiment_contents(machine: Any, quick: bool) -> dict[str, Any]:
    """Compare contents read over the bus ("uva") with one copy first ("h2d"): one write of 1 to 1 Mi int32."""
    gpu = machine.gpu
    out: dict[str, Any] = {}
    for stream in ("null", "non-blocking"):
        rows = out[stream] = {}
        for n in SIZES[::3] if quick else SIZES:
            slots = 32 if n <= 65536 else 8
            arms = {c: common.one_write(n, contents=c, slots=slots) for c in ("uva", "h2d")}
            rows[n] = measure.measure(machine, {stream: arms}, 8, 25, 0.6)[stream]
            for _ in range(2):
                for name, work in arms.items():
                    rows[n][name].setdefault("gpu_samples", []).extend(
                        gpu.gpu_samples(work.both, slots, machine.streams[stream], 3)
                    )
            for name in arms:
                rows[n][name]["gpu"] = summary(rows[n][name].pop("gpu_samples"))
    for stream in ("null", "non-blocking"):
        for part in ("gpu", "total", "apply"):
            out.setdefault("crossover", {}).setdefault(stream, {})[part] = crossover(out[stream], part)
    return out


def crossover(rows: dict[int, Any], part: str) -> int | None:
    """Return the smallest size from which on "h2d" is never slower; None where there is none."""
    found = None
    for n in sorted(rows, reverse=True):
        uva, h2d = rows[n]["uva"][part], rows[n]["h2d"][part]
        if uva is None or h2d is None or h2d["median"] > uva["median"]:
            break
        found = n
    return found


# -- (e) launch shapes -------------------------------------------------------------------------------------------------

GRIDS = ((1, 32), (1, 128), (2, 128), (4, 128), (8, 128), (16, 128), (32, 128), (64, 128), (132, 128), (264, 128))
GRIDS += ((8, 256), (32, 256), (132, 256))


@contextlib.contextmanager
def launch_shapes(grids: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Objects made meanwhile know these grids only, for both kinds of line."""
    before = kernels.SHAPES
    kernels.SHAPES = tuple((*grid, cells) for cells in (32, 2) for grid in grids)
    try:
        yield
    finally:
        kernels.SHAPES = before


def apply_node(make: Callable[[int], common.Work], stream: Any) -> Callable[[], None]:
    """Do one apply, and return the launch of its kernel on the slot that it left packed: for many in one graph."""
    calls: list[tuple[Any, ...]] = []
    get_function = kernels.get_function

    def recording(*key: Any) -> Callable[..., None]:
        function = get_function(*key)

        def call(*arguments: Any) -> None:
            calls.append((function, *arguments))
            function(*arguments)

        return call

    kernels.get_function = recording
    try:
        work = make(1)
    finally:
        kernels.get_function = get_function
    path, chosen = work.owner._path, []
    launchers = list(path._launch)  # of the only slot: one a shape
    path._launch[:] = [lambda ptr, i=i: (chosen.append(i), launchers[i](ptr)) for i in range(len(launchers))]
    with stream:
        work.both()
    stream.synchronize()
    function, grid, block, arguments = calls[chosen[0] - len(launchers)]  # growth captured anew: the last ones count

    def launch(_kept: Any = work) -> None:
        function(grid, block, arguments)

    return launch


def experiment_shapes(machine: Any, quick: bool) -> dict[str, Any]:
    """Measure the GPU time of apply for each grid: queued applies, and the kernel alone in a graph, next to floors."""
    gpu, stream = machine.gpu, machine.streams["non-blocking"]
    rounds = 3 if quick else 5
    out: dict[str, Any] = {"floors": floors(gpu, stream, rounds), "writes": {}, "values": {}, "now": {}}
    works: list[tuple[str, int, Callable[[int], common.Work]]] = []
    for n in (1, 8, 64, 512, 2048, 4096):
        works.append(("writes", n, lambda slots, n=n: common.many_writes(n, order="shuffled", slots=slots)))
    for n in (4096, 16384, 65536, 262144, 1048576):
        works.append(("values", n, lambda slots, n=n: common.one_write(n, contents="uva", slots=slots)))
    for kind, n, make in works[:: 3 if quick else 1]:
        slots = 8 if kind == "values" and n > 65536 else 32
        row = out[kind][n] = {}
        grids = GRIDS if kind == "writes" else [g for g in GRIDS if g[0] >= 8 or n <= 16384]
        for grid in [None, *grids]:  # None: as the package chooses
            with launch_shapes((grid,)) if grid else contextlib.nullcontext():
                work = make(slots)
                name = f"{grid[0]} x {grid[1]}" if grid else "as chosen"
                row[name] = {"queued": summary(gpu.gpu_samples(work.both, slots, stream, rounds))}
                row[name]["kernel"] = summary(gpu.node_samples(apply_node(make, stream), stream, rounds))
        if kind == "values":
            row["DMA copy"] = {"queued": summary(gpu.copy_samples(4 * n, stream, rounds))}
            whole = row["DMA copy"]["queued"]
            for found in row.values():
                best = found.get("kernel") or found["queued"]
                if best and whole:
                    found["share_of_dma"] = round(whole["median"] / best["median"], 3)
    return out


def floors(gpu: Any, stream: Any, rounds: int) -> dict[str, Any]:
    """Measure the GPU time of the least that there is: launches one by one, and kernels in a row in one graph."""
    found: dict[str, Any] = {"queued": {}, "kernel": {}}
    for name in ("empty", "chain1", "chain3", "read_line", "write_word"):
        found["queued"][name] = summary(gpu.gpu_samples(gpu.graph(name), 32, stream, rounds))
        found["kernel"][name] = summary(gpu.node_samples(gpu.raw(name), stream, rounds))
    return found


# -- the page ----------------------------------------------------------------------------------------------------------


def medians(name: str, found: dict[str, Any]) -> list[str]:
    """Write one row of a table."""
    return [name, *(shown(value) for value in found.values())]


def markdown(data: dict[str, Any]) -> str:
    """Write the page of experiments, from the JSON."""
    sections, text = data["sections"], ["Microseconds, median [quartiles].", ""]
    if launch := sections.get("launch"):
        streams = list(launch["host_us"])
        rows = [
            [way, *(shown(launch["host_us"][s].get(way)) for s in streams)] for way in launch["host_us"][streams[0]]
        ]
        rows += [[way, why, ""] for way, why in launch["missing"].items()]
        rows += [[f"empty kernel: {way}", *(shown(launch["empty_host_us"][s][way]) for s in streams)]
                 for way in launch["empty_host_us"][streams[0]]]  # fmt: skip
        text += ["### Ways to launch a kernel of 8 arguments (host)", "", table(["way", *streams], rows), ""]
    if fence := sections.get("fence"):
        streams = list(fence["host_us"])
        rows = [
            [f"host: {arm}", *(shown(fence["host_us"][s][arm]) for s in streams)]
            for arm in fence["host_us"][streams[0]]
        ]
        rows += [
            [f"GPU: {arm}", *(shown(fence["gpu_us"][s][arm]) for s in streams)] for arm in fence["gpu_us"][streams[0]]
        ]
        rows += [
            [f"GPU, in a row in one graph: {arm}", "", shown(found)] for arm, found in fence["node_gpu_us"].items()
        ]
        text += ["### Fences", "", table(["what", *streams], rows), ""]
    if staging := sections.get("staging"):
        rows = [medians(name, found) for name, found in staging.items()]
        text += [
            "### Stage and pack (host)",
            "",
            table(["int32 values", "log, then pack", "straight into the slot"], rows),
            "",
        ]
    if contents := sections.get("contents"):
        for stream in [name for name in contents if name != "crossover"]:
            parts = [(part, arm) for part in ("gpu", "total", "apply") for arm in ("uva", "h2d")]
            rows = [
                [str(n), *(shown(found[arm][part]) for part, arm in parts)] for n, found in contents[stream].items()
            ]
            head = ["values", *(f"{part}, {arm}" for part, arm in parts)]
            text += [f"### Contents by uva and by h2d, {stream} stream", "", table(head, rows), ""]
            text += [f"h2d is never slower from this many int32 on: {contents['crossover'][stream]}", ""]
    if shapes := sections.get("shapes"):
        kinds = shapes["floors"]
        rows = [[name, shown(kinds["queued"][name]), shown(kinds["kernel"][name])] for name in kinds["queued"]]
        text += ["### Floors (GPU)", "", table(["kernel", "queued", "in a row in one graph"], rows), ""]
        for kind, what in (("writes", "writes of one value"), ("values", "values in one write")):
            for n, row in shapes[kind].items():
                rows = [
                    [grid, shown(f["queued"]), shown(f.get("kernel")), str(f.get("share_of_dma", ""))]
                    for grid, f in row.items()
                ]
                head = ["blocks x threads", "queued", "in a row in one graph", "share of the DMA rate"]
                text += [f"### Launch shapes: {n} {what} (GPU)", "", table(head, rows), ""]
    for name, why in data["failed"].items():
        text += [f"Section {name} has no result: {why.strip().splitlines()[-1]}", ""]
    return "\n".join(text)


def best_shapes(data: dict[str, Any]) -> str:
    """Write the short table that a run prints last: the fastest grid of each work."""
    shapes, rows = data["sections"].get("shapes"), []
    for kind in ("writes", "values") if shapes else ():
        for n, row in shapes[kind].items():
            grids = {g: f for g, f in row.items() if f.get("kernel")}
            if grids:
                best = min(grids, key=lambda g: grids[g]["kernel"]["median"])
                chosen = grids.get("as chosen", grids[best])
                rows.append([f"{n} {kind}", best, shown(grids[best]["kernel"]), shown(chosen["kernel"]),
                             str(chosen.get("share_of_dma", ""))])  # fmt: skip
    return table(["work", "fastest grid", "its kernel", "kernel as chosen", "share of DMA as chosen"], rows)


def plot(data: dict[str, Any], path: Path) -> None:
    """Contents by size, as a picture; nothing without matplotlib."""
    contents = data["sections"].get("contents")
    if not contents:
        return
    if importlib.util.find_spec("matplotlib") is None:
        say('no picture: matplotlib is not installed (pip install "cupy-staged[plot]")')
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, stream in zip(axes, ("null", "non-blocking"), strict=True):
        for arm, color in (("uva", "tab:blue"), ("h2d", "tab:orange")):
            for part, style in (("gpu", "-"), ("total", "--"), ("apply", ":")):
                points = [(int(n), row[arm][part]["median"]) for n, row in contents[stream].items() if row[arm][part]]
                axis.loglog(*zip(*points, strict=True), style, color=color, label=f"{arm}, {part}")
        axis.set(xlabel="int32 values in one write", title=f"{stream} stream")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("µs")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the experiments and write the page."""
    parser = argparse.ArgumentParser(prog="python -m asv_bench.experiments", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "host"))
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds")
    parser.add_argument("--limit-s", type=float, default=200.0, help="no section begins after so many seconds")
    parser.add_argument("--only", nargs="*", help="launch, fence, staging, contents, shapes")
    options = parser.parse_args()
    machine, quick = measure.machine_of(options.device), options.quick
    run = Run(options.out, "experiments", options.limit_s)
    sections: Calls = {"staging": lambda: experiment_staging(machine, quick)}
    if machine.gpu is not None:
        sections = {
            "launch": lambda: experiment_launch(machine.gpu, quick),
            "fence": lambda: experiment_fence(machine.gpu, quick),
            **sections,
            "shapes": lambda: experiment_shapes(machine, quick),
            "contents": lambda: experiment_contents(machine, quick),
        }
    for name, make in sections.items():
        if not options.only or name in options.only:
            run.section(name, make)
    (options.out / "experiments.md").write_text(markdown(run.data))
    plot(run.data, options.out / "experiments.png")
    say("\n" + markdown({"sections": {k: v for k, v in run.data["sections"].items() if k != "shapes"}, "failed": {}}))
    say(best_shapes(run.data))


if __name__ == "__main__":
    main()
