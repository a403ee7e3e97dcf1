"""How a replay prepares its steps: eagerly from host arrays, or by CUDA graphs that were captured once.

Both run on the current stream of the tables' device, and pad a step as a server with captured graphs does: to the next
power of two, up to the most there can be.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .backends import Backend, HostBackend
from .block_tables import BlockTables
from .buffers import UvaBufferPool
from .scheduler import Step

__all__ = ["EagerSteps", "GraphSteps", "make_steps", "padded_sizes", "synchronize"]

PADDING_ROW: Final = -1


def padded_sizes(step: Step, tables: BlockTables) -> tuple[int, int]:
    """Return `(num_reqs_padded, num_tokens_padded)` of a step."""
    sizes = (len(step.idx_mapping), tables.max_num_reqs), (len(step.positions), tables.max_num_batched_tokens)
    num_reqs, num_tokens = (min(1 << (n - 1).bit_length() if n else 0, most) for n, most in sizes)
    return num_reqs, num_tokens


def make_steps(tables: BlockTables, graph: bool) -> EagerSteps | GraphSteps:
    """Return what prepares the steps of `tables`; ValueError where there are no graphs."""
    return GraphSteps(tables) if graph else EagerSteps(tables)


def synchronize(backend: Backend) -> None:
    """Wait for what is on the device's current stream."""
    if not isinstance(backend, HostBackend):
        backend.stream(None).synchronize()


class EagerSteps:
    """One `prepare_step` a step, from the step's NumPy arrays."""

    num_graphs = 0

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables

    def get_ready(self, sizes: tuple[int, int]) -> None:
        """Nothing to do."""

    def prepare(self, step: Step, sizes: tuple[int, int]) -> None:
        """Enqueue gather and slot mapping, padded to `sizes`."""
        self._tables.prepare_step(step.idx_mapping, step.query_start_loc, step.positions, *sizes)


class GraphSteps:
    """One graph for each pair of padded sizes: gather and slot mapping, read from device arrays at fixed addresses.

    A step is three uploads, through fenced slots, and one graph launch. Padding requests have row -1 and no tokens;
    positions behind the last token are left over from earlier steps. Synchronize before this object or the tables go.

    Raises
    ------
    ValueError
        The tables are on the host.
    """

    def __init__(self, tables: BlockTables) -> None:
        backend = tables.backend
        if isinstance(backend, HostBackend):
            raise ValueError("the host backend has no graphs: replay without, or on a CUDA device")
        self._tables, self._backend = tables, backend
        self._graphs: dict[tuple[int, int], Any] = {}
        self._views: dict[tuple[int, int], list[tuple[UvaBufferPool, NDArray[Any], Any]]] = {}
        with backend.current():
            self._stream = backend.cupy.cuda.Stream(non_blocking=True)
        self._host: list[NDArray[Any]] = [
            np.full(tables.max_num_reqs, PADDING_ROW, np.int32),
            np.zeros(tables.max_num_reqs + 1, np.int32),
            np.zeros(tables.max_num_batched_tokens, np.int64),
        ]
        self._device = [backend.array(array) for array in self._host]
        self._pools = [UvaBufferPool(len(array), array.dtype, device=backend.id) for array in self._host]

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def get_ready(self, sizes: tuple[int, int]) -> None:
        """Capture the graph of these sizes, unless it is there."""
        if sizes in self._graphs:
            return
        num_reqs, num_tokens = sizes
        lengths = (num_reqs, num_reqs + 1, num_tokens)
        self._views[sizes] = [
            (pool, host[:n], device[:n])
            for pool, host, device, n in zip(self._pools, self._host, self._device, lengths, strict=True)
        ]
        with self._backend.current(), self._stream:
            self._stream.begin_capture()
            try:
                rows, starts, positions = (device for _, _, device in self._views[sizes])
                self._tables.prepare_step(rows, starts, positions, *sizes)
            finally:
                graph = self._stream.end_capture()
        self._graphs[sizes] = graph

    def prepare(self, step: Step, sizes: tuple[int, int]) -> None:
        """Enqueue the uploads and the graph of `sizes`, which `get_ready` has captured."""
        rows, starts, positions = self._host
        num_reqs, padded = len(step.idx_mapping), sizes[0]
        rows[:num_reqs], rows[num_reqs:padded] = step.idx_mapping, PADDING_ROW
        starts[: num_reqs + 1], starts[num_reqs + 1 : padded + 1] = step.query_start_loc, step.query_start_loc[-1]
        positions[: len(step.positions)] = step.positions
        for pool, host, device in self._views[sizes]:
            pool.copy_to_gpu(host, device)
        self._graphs[sizes].launch(self._backend.stream(None))
