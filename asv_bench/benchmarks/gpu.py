"""What only a CUDA device can measure: probe kernels, floors, and GPU time by events behind a stalled stream.

`Gpu` owns its kernels, graphs and a word of pinned memory. Nothing here touches CUDA before a `Gpu` is made.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// The floor of every launch.
extern "C" __global__ void empty() {}

// The shape of our own arguments, and no work: `f` is never the largest number.
extern "C" __global__ void eight(u64* a, u64* b, u64* c, u64* d, u64 e, u64 f, u32 g, u32 h) {
    if (f == ~0ull) a[e] = b[g] + c[h] + d[0];
}

// Holds its stream until the host sets `go` to `turn`, at most `limit` nanoseconds.
extern "C" __global__ void stall(const volatile u32* go, u32 turn, u64 limit) {
    const u64 begin = now_ns();
    while (*go != turn && now_ns() - begin < limit) {}
}

// One thread follows `links` dependent reads, each over the bus where `from` is UVA memory (a word holding 0).
extern "C" __global__ void chain(const volatile u64* from, u64* to, u32 links) {
    u64 at = 0;
    for (u32 i = 0; i < links; ++i) at = from[at];
    *to = at;
}

// One warp reads one 512-byte line: what a small apply cannot do without.
struct __align__(16) Cell { u64 x, y; };
extern "C" __global__ void read_line(const Cell* __restrict__ from, u64* to) {
    const Cell cell = from[threadIdx.x];
    to[threadIdx.x] = cell.x + cell.y;
}

// A fence word written last.
extern "C" __global__ void write_word(volatile u64* done, u64 value) {
    __threadfence_system();
    *done = value;
}
"""

STALL_NS = 1_000_000_000  # a call that waits for the stalled stream ends then, instead of never
NODES = 64  # kernels in a row in one graph


class Gpu:
    """Probe kernels and clocks of the current CUDA device.

    Attributes
    ----------
    streams : dict of str to cupy.cuda.Stream
        The null stream and a non-blocking one.
    """

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.runtime = cupy.cuda.runtime
        self.streams = {"null": cupy.cuda.Stream.null, "non-blocking": cupy.cuda.Stream(non_blocking=True)}
        self.side = cupy.cuda.Stream(non_blocking=True)  # captures
        module = cupy.RawModule(code=SOURCE, options=("-std=c++17",))
        names = ("empty", "eight", "stall", "chain", "read_line", "write_word")
        self.kernels = {name: module.get_function(name) for name in names}
        self.host_block = cupy.cuda.alloc_pinned_memory(1 << 16)
        host = np.frombuffer(self.host_block, np.uint8, 1 << 16)
        host[:] = 0
        self.uva = int(self.runtime.pointerGetAttributes(self.host_block.ptr).devicePointer)
        self.go = host[:4].view(np.uint32)  # the stall's word; UVA data for reads begin at byte 4096
        self.words = memoryview(host[64:128].view(np.uint64))
        self.scratch = cupy.zeros(1024, cupy.uint64)
        self._begin, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        self._kept: list[Any] = []
        cupy.cuda.Device().synchronize()

    def arguments(self, name: str) -> tuple[Any, ...]:
        """Return the arguments of a probe kernel."""
        data, out = self.uva + 4096, self.scratch.data.ptr
        return {
            "empty": (),
            "eight": (out, out, out, out, np.uint64(1), np.uint64(2), np.uint32(3), np.uint32(4)),
            "chain1": (data, out, np.uint32(1)),
            "chain3": (data, out, np.uint32(3)),
            "read_line": (data, out),
            "write_word": (self.uva + 64, np.uint64(1)),
        }[name]

    def raw(self, name: str) -> Callable[[], None]:
        """Make a raw launch of a probe kernel by one warp, on the current stream."""
        kernel, arguments = self.kernels[name.rstrip("13")], self.arguments(name)
        grid, block = (1,), (1,) if name.startswith(("chain", "write")) else (32,)
        return lambda: kernel(grid, block, arguments)

    def capture(self, enqueue: Callable[[], None], count: int = 1) -> Any:
        """Capture a graph of `count` times what `enqueue` puts on the current stream."""
        with self.side:
            self.side.begin_capture(self.runtime.streamCaptureModeRelaxed)
            try:
                for _ in range(count):
                    enqueue()
            finally:
                graph = self.side.end_capture()
        self._kept.append(graph)
        return graph

    def graph(self, name: str, stream: Any = None) -> Callable[[], None]:
        """Make a launch of a graph of one probe kernel, on `stream` (the cheapest way there is) or the current one."""
        handle, launch = int(self.capture(self.raw(name)).graphExec), self.runtime.graphLaunch
        if stream is not None:
            ptr = stream.ptr
            return lambda: launch(handle, ptr)
        current = self.cupy.cuda.get_current_stream
        return lambda: launch(handle, current().ptr)

    def gpu_us(self, enqueue: Callable[[], Any], count: int, stream: Any) -> float:
        """Measure the GPU time of one `enqueue` in microseconds: `count` behind a stalled stream, between two events.

        All are queued before the first one starts, so that host time does not show. NaN where something waited for the
        stream and the stall ended by itself.
        """
        turn = int(self.go[0]) + 1
        with stream:
            self.kernels["stall"]((1,), (1,), (self.uva, np.uint32(turn), np.uint64(STALL_NS)))
            begun = time.perf_counter_ns()
            self._begin.record(stream)
            try:
                for _ in range(count):
                    enqueue()
                self._end.record(stream)
            finally:
                waited = time.perf_counter_ns() - begun
                self.go[0] = turn
            self._end.synchronize()
        if waited >= STALL_NS // 2:
            return math.nan
        return float(self.cupy.cuda.get_elapsed_time(self._begin, self._end)) * 1e3 / count

    def gpu_samples(self, enqueue: Callable[[], Any], count: int, stream: Any, rounds: int = 5) -> list[float]:
        """Call `gpu_us` several times, after one uncounted pass (graphs are uploaded at their first launch)."""
        with stream:
            for _ in range(count):
                enqueue()
        stream.synchronize()
        return [self.gpu_us(enqueue, count, stream) for _ in range(rounds)]

    def node_samples(self, enqueue: Callable[[], None], stream: Any, rounds: int = 5) -> list[float]:
        """Measure the GPU time of one of `NODES` kernels back to back in one graph: the kernel, without its launch."""
        graph = self.capture(enqueue, NODES)
        handle = int(graph.graphExec)
        launch = self.runtime.graphLaunch
        return [us / NODES for us in self.gpu_samples(lambda: launch(handle, stream.ptr), 4, stream, rounds)]

    def copy_samples(self, nbytes: int, stream: Any, rounds: int = 5) -> list[float]:
        """Measure the GPU time of one DMA copy of so many bytes from pinned memory."""
        source = self.cupy.cuda.alloc_pinned_memory(nbytes)
        target = self.cupy.empty(nbytes, self.cupy.uint8)
        copy, kind = self.runtime.memcpyAsync, self.runtime.memcpyHostToDevice
        return self.gpu_samples(lambda: copy(target.data.ptr, source.ptr, nbytes, kind, stream.ptr), 16, stream, rounds)


def pack_arguments(values: tuple[Any, ...]) -> tuple[int, Any]:
    """Lay kernel arguments out as the driver wants them: the address of an array of pointers, and its owners."""
    cells = [np.array([v], v.dtype if isinstance(v, np.generic) else np.uint64) for v in values]
    pointers = (ctypes.c_void_p * len(cells))(*(c.ctypes.data for c in cells))
    return ctypes.addressof(pointers), (cells, pointers)
