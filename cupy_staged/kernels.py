"""Load the CUDA sources, compile each once a device, and make launchers with fixed arguments.

A launcher is called with a stream address and does nothing but launch: a captured graph where slots are read in place.
Compiled functions stay for the life of the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import packing, step_packing
from .backends import Backend, CudaBackend, Pinned
from .device import Device, get_backend

# (blocks, threads a block, cells a line). The first is for small applies: one warp, one bus read. 32 cells hold 31
# short writes or runs; 2 cells hold one tile of a long write. A warp without a line reads one all the same, so the
# sizes lie close where lines are few.
SHAPES = (
    *((blocks, threads, 32) for blocks, threads in ((1, 32), (1, 128), (8, 128), (32, 128), (64, 128), (132, 128))),
    *((blocks, 128, 2) for blocks in (8, 32, 264)),
)

# The kernels of a step, and the blocks (of STEP_THREADS) they start: few where there is little to do, as an idle block
# still draws a ticket.
STEP_KERNELS = ("fetch_step", "prepare_step", "prepare_step_by_value")
STEP_GRIDS = (132, 528)
STEP_THREADS = 128
FETCH_THREADS = 256

_functions: dict[tuple[int, str, str, int], Any] = {}
_lock = threading.Lock()


def kernel_folder() -> Path:
    """Where the kernel sources are: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    return here / "kernels" if (here / "kernels").is_dir() else here.parent / "kernels"


def source_of(name: str) -> str:
    """The whole text of kernel file `name`: the shared head, then the file."""
    folder = kernel_folder()
    return (folder / "warp.cuh").read_text() + (folder / f"{name}.cu").read_text()


def get_function(backend: CudaBackend, file: str, name: str, unit: int = 4) -> Any:
    """Kernel `name` of `file`, compiled for elements of `unit` bytes and loaded on the backend's device."""
    key = (backend.id, file, name, unit)
    function = _functions.get(key)
    if function is None:
        with _lock, backend.current():
            options = ("-std=c++17", f"-DUNIT_BYTES={unit}")
            try:
                function = backend.cupy.RawModule(code=source_of(file), options=options).get_function(name)
            except OSError:  # CuPy's cache folder cannot be written: compile in memory
                before = os.environ.get("CUPY_CACHE_IN_MEMORY")
                os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
                try:
                    function = backend.cupy.RawModule(code=source_of(file), options=options).get_function(name)
                finally:
                    del os.environ["CUPY_CACHE_IN_MEMORY"]
                    if before is not None:
                        os.environ["CUPY_CACHE_IN_MEMORY"] = before
            _functions[key] = function
    return function


def warmup(device: Device = None) -> None:
    """Compile and load for a device now, so that constructors find it done.

    What depends on the number of groups of a `BlockTables` is compiled by its constructor.

    Parameters
    ----------
    device : None, int or str
        As in every constructor.

    Raises
    ------
    ValueError
        The device is not there.
    CaptureError
        The device's current stream is being captured.
    """
    backend = get_backend(device)
    packing.compile_all()
    step_packing.compile_step()
    step_packing.compile_params()
    if isinstance(backend, CudaBackend):
        for unit in (1, 2, 4, 8):
            for name in ("apply_write", "apply_write_groups"):
                get_function(backend, "apply_write", name, unit)
        for name in STEP_KERNELS:
            get_function(backend, "block_tables", name)


def shape_table() -> np.ndarray:
    """``[num_shapes, 3] int64``: warps, cells a line and the most lines of each launch shape, for the packer.

    It takes the first for as many lines as it has. That is a line a warp, and two from 256 warps on: a second round
    costs less than so many idle warps.
    """
    sizes = [(blocks * threads // 32, cells) for blocks, threads, cells in SHAPES]
    return np.array([(warps, cells, warps if warps < 256 else 2 * warps) for warps, cells in sizes], np.int64)


Launcher = Callable[[int], None]


class Targets:
    """The tables of one apply: a base address and a row stride each, on the host and at a fixed place on the device.

    Attributes
    ----------
    facts : numpy.ndarray
        ``[2, num_tables] int64``, host: addresses, then bytes from row to row.
    device_address : int
        Of the same array on the device, rewritten in place when a table is exchanged: captured graphs read it.
    grouped : bool
        Whether the apply kernel finds the tables through that array.
    """

    def __init__(self, backend: Backend, facts: np.ndarray, grouped: bool) -> None:
        self.facts = facts
        self.grouped = grouped
        self.on_device = backend.array(facts)
        self.device_address = backend.check_array(self.on_device, "facts")

    def arguments(self) -> tuple[int, ...]:
        """The apply kernel's last arguments."""
        if self.grouped:
            return (self.device_address,)
        return (int(self.facts[0, 0]), int(self.facts[0, 1]) if self.facts.shape[1] > 1 else 0)


def make_launchers(
    backend: Backend,
    unit: int,
    slot: Pinned,
    fence: tuple[Pinned, int],
    targets: Targets,
    event: Any,
    copies: bool,
    num_bytes: memoryview,
) -> tuple[list[Launcher], list[Any]]:
    """One launcher for each shape, and what they need kept alive.

    `fence` is the block and index of the word that gets the slot's sequence. With `copies` the slot is copied to the
    device before each launch; `num_bytes[0]` tells how much.
    """
    if isinstance(backend, CudaBackend):
        return _cuda_launchers(backend, unit, slot, fence, targets, event, copies, num_bytes)
    words = fence[0].array.view(np.uint64)

    def make(cells: int) -> Launcher:
        def launch(_stream: int) -> None:
            words[fence[1]] = packing.apply_host(slot.address, cells, unit, addresses)

        return launch

    addresses = targets.facts.ctypes.data
    return [make(cells) for _, _, cells in SHAPES], [targets]


def _cuda_launchers(
    backend: CudaBackend,
    unit: int,
    slot: Pinned,
    fence: tuple[Pinned, int],
    targets: Targets,
    event: Any,
    copies: bool,
    num_bytes: memoryview,
) -> tuple[list[Launcher], list[Any]]:
    runtime = backend.runtime
    function = get_function(backend, "apply_write", "apply_write_groups" if targets.grouped else "apply_write", unit)
    twin = backend.zeros((slot.array.nbytes,), np.dtype(np.uint8)) if copies else None
    source = slot.device_address if twin is None else twin.data.ptr
    scratch = backend.zeros((2,), np.dtype(np.uint64))  # the blocks' ticket; a fence word that nobody reads
    ticket = scratch.data.ptr
    word = fence[0].device_address + 8 * fence[1] if backend.uva else ticket + 8
    kept: list[Any] = [slot, fence[0], targets, twin, scratch, event]

    def capture(shape: tuple[int, int, int]) -> int:
        blocks, threads, cells = shape
        arguments = (source, np.uint32(cells), ticket, word, *targets.arguments())
        graph = backend.capture(lambda: function((blocks,), (threads,), arguments))
        kept.append(graph)
        return int(graph.graphExec)

    def in_place(graph: int) -> Launcher:
        launch_graph, record, event_ptr = runtime.graphLaunch, runtime.eventRecord, event.ptr

        def launch(stream: int) -> None:
            launch_graph(graph, stream)
            record(event_ptr, stream)

        return launch

    def copied(graph: int) -> Launcher:
        def launch(stream: int) -> None:
            backend.copy(source, slot.address, num_bytes[0], stream)
            runtime.graphLaunch(graph, stream)
            if not backend.uva:  # the kernel cannot write the host's word
                backend.signal(fence[0], fence[1], int(slot.array[0]), stream)
            runtime.eventRecord(event.ptr, stream)

        return launch

    make = copied if copies else in_place
    return [make(capture(shape)) for shape in SHAPES], kept


def make_step_launchers(
    backend: Backend, slot: Pinned, twin: int, scratch: int, fence: tuple[Pinned, int], num_bytes: memoryview
) -> tuple[list[Launcher], list[Any]]:
    """Make the launchers of one step slot, in the order of `step_packing.note_step`, and say what they need kept alive.

    `twin` is the address of the slot's copy on the device, `scratch` that of two words there (the blocks' ticket, and a
    fence word that nobody reads), `fence` as in `make_launchers`; `num_bytes[0]` tells how much of the slot is used.
    """
    if not isinstance(backend, CudaBackend):
        words = fence[0].array.view(np.uint64)

        def on_host(_stream: int) -> None:
            words[fence[1]] = step_packing.prepare_host(slot.address)

        return [on_host] * step_packing.STEP_SHAPES, []

    runtime = backend.runtime
    fetch = get_function(backend, "block_tables", "fetch_step")
    prepare = get_function(backend, "block_tables", "prepare_step")
    word = fence[0].device_address + 8 * fence[1] if backend.uva else scratch + 8
    graphs: list[Any] = []

    def capture(num_cells: int, blocks: int) -> int:
        def launch() -> None:
            if num_cells:
                fetch_blocks = min(-(-num_cells // FETCH_THREADS), STEP_GRIDS[0])
                fetch((fetch_blocks,), (FETCH_THREADS,), (slot.device_address, twin, np.uint64(num_cells)))
            prepare((blocks,), (STEP_THREADS,), (twin, scratch, word))

        graph = backend.capture(launch)
        graphs.append(graph)
        return int(graph.graphExec)

    def fetched(graph: int) -> Launcher:
        launch_graph = runtime.graphLaunch

        def launch(stream: int) -> None:
            launch_graph(graph, stream)

        return launch

    def copied(graph: int) -> Launcher:
        def launch(stream: int) -> None:
            backend.copy(twin, slot.address, num_bytes[0], stream)
            runtime.graphLaunch(graph, stream)
            backend.signal(fence[0], fence[1], int(slot.array[0]), stream)

        return launch

    if not backend.uva:
        return [copied(capture(0, blocks)) for blocks in STEP_GRIDS] * (
            step_packing.STEP_SHAPES // len(STEP_GRIDS)
        ), graphs
    sizes = [min(size, slot.array.nbytes) for size in (*step_packing.FETCH_BYTES, slot.array.nbytes)]
    return [fetched(capture(size // 16, blocks)) for size in sizes for blocks in STEP_GRIDS], graphs


def make_step_recorder(backend: Backend, descriptor: np.ndarray) -> Callable[[int, int], None]:
    """Make a function that launches a step from `descriptor` (host), by value: what a capture takes up.

    It is called with the number of the grid (0 or 1) and a stream. The descriptor may change when it returns.
    """
    if not isinstance(backend, CudaBackend):
        return lambda _grid, _stream: None  # the host captures nothing
    from cupy_backends.cuda.api import driver

    with backend.current():
        function = get_function(backend, "block_tables", "prepare_step_by_value").kernel.ptr
    params = np.array([descriptor.ctypes.data], np.uint64)

    def launch(grid: int, stream: int) -> None:
        driver.launchKernel(function, STEP_GRIDS[grid], 1, 1, STEP_THREADS, 1, 1, 0, stream, params.ctypes.data, 0)

    return launch
