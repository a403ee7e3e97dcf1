"""Apply on a CUDA device: enqueue, synchronized and GPU time apart, on a non-blocking stream; floors and baselines."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import common

TARGETS = ("device, uva", "device, h2d", "UVA target")
SLOTS = 32  # as many applies are queued at once for GPU time


class OnDevice:
    """A CUDA device and a stream, with `work` to be timed."""

    work: common.Work
    queued: common.Work

    def use_gpu(self) -> None:
        """Take the device and a core, or say that there is no device."""
        self.gpu = common.require_cuda()
        self.stream = self.gpu.streams["non-blocking"]
        self.stream.use()
        common.pick_core()

    def enqueue_us(self) -> float:
        """Return the host time of apply."""
        return common.enqueue_us(self.work, self.stream.synchronize)

    def gpu_us(self) -> float:
        """Return the GPU time of one of many queued applies."""
        return float(np.median(self.gpu.gpu_samples(self.queued.both, SLOTS, self.stream)))


class OneWrite(OnDevice):
    """One write of 1 to 131072 int32 from an array: a device table by `uva` and `h2d` contents, and a UVA table."""

    params = ((1, 256, 4096, 131072), TARGETS)
    param_names = ("values", "target")

    def setup(self, values: int, target: str) -> None:
        self.use_gpu()
        where, contents = ("uva", "auto") if target == "UVA target" else ("device", target.split(", ")[1])

        def make(slots: int) -> common.Work:
            return common.one_write(values, target=where, contents=contents, slots=slots)

        self.work = common.once(("one", values, target), lambda: common.warmed(make(2)))
        self.queued = common.once(("one queued", values, target), lambda: make(SLOTS))

    def time_synchronized(self, values: int, target: str) -> None:
        """Stage, apply, synchronize. Synchronized."""
        self.work.both()
        self.stream.synchronize()

    def track_enqueue(self, values: int, target: str) -> float:
        """Measure the host time of apply. Not synchronized while timed."""
        return self.enqueue_us()

    track_enqueue.unit = "us"  # type: ignore[attr-defined]

    def track_gpu(self, values: int, target: str) -> float:
        """Measure the GPU time of one apply, by events around many queued ones. Synchronized after them."""
        return self.gpu_us()

    track_gpu.unit = "us"  # type: ignore[attr-defined]


class ManyWrites(OnDevice):
    """1 to 2048 writes of one value, staged as a batch in shuffled rows, to a device table."""

    params = (1, 64, 512, 2048)
    param_names = ("writes",)

    def setup(self, writes: int) -> None:
        self.use_gpu()
        self.work = common.once(("many", writes), lambda: common.warmed(common.many_writes(writes, order="shuffled")))
        self.queued = common.once(
            ("many queued", writes), lambda: common.many_writes(writes, order="shuffled", slots=SLOTS)
        )

    def time_synchronized(self, writes: int) -> None:
        """Stage, apply, synchronize. Synchronized."""
        self.work.both()
        self.stream.synchronize()

    def track_enqueue(self, writes: int) -> float:
        """Measure the host time of apply. Not synchronized while timed."""
        return self.enqueue_us()

    track_enqueue.unit = "us"  # type: ignore[attr-defined]

    def track_gpu(self, writes: int) -> float:
        """Measure the GPU time of one apply, by events around many queued ones. Synchronized after them."""
        return self.gpu_us()

    track_gpu.unit = "us"  # type: ignore[attr-defined]


class Baselines(OnDevice):
    """The same writes by plain CuPy, to a (4096, 64) table: what this package is to be compared with."""

    params = (1, 64, 2048)
    param_names = ("writes",)

    def setup(self, writes: int) -> None:
        self.use_gpu()
        self.rows = np.random.default_rng(0).permutation(writes)
        self.values = np.arange(writes, dtype=np.int32)
        self.table, self.kernel = common.once(("baselines", writes), self.make)

    def make(self) -> tuple[Any, Any]:
        """Make the table, and a kernel that scatters values."""
        cupy = self.gpu.cupy
        code = """extern "C" __global__ void scatter(int* table, const long long* rows, const int* values, int n) {
            for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
                table[64 * rows[i] + 3] = values[i];
        }"""
        return cupy.zeros((4096, 64), "int32"), cupy.RawKernel(code, "scatter")

    def time_loop_of_assignments(self, writes: int) -> None:
        """Assign cell by cell. Synchronized."""
        for row, value in zip(self.rows, self.values, strict=True):
            self.table[row, 3] = value
        self.stream.synchronize()

    def time_fancy_indexing(self, writes: int) -> None:
        """Assign all cells at once, by an index array that travels. Synchronized."""
        cupy = self.gpu.cupy
        self.table[cupy.asarray(self.rows), 3] = cupy.asarray(self.values)
        self.stream.synchronize()

    def time_copy_then_kernel(self, writes: int) -> None:
        """Copy rows and values to new device arrays, then scatter by one kernel. Synchronized."""
        cupy = self.gpu.cupy
        rows, values = cupy.asarray(self.rows), cupy.asarray(self.values)
        self.kernel((min(-(-len(rows) // 128), 64),), (128,), (self.table, rows, values, np.int32(len(rows))))
        self.stream.synchronize()


class Floors(OnDevice):
    """An empty kernel: no blocking step is faster than its launch and a synchronize."""

    params = ("raw launch", "graph launch")
    param_names = ("launch",)

    def setup(self, launch: str) -> None:
        self.use_gpu()
        graph = launch == "graph launch"
        self.launch = common.once(
            ("floor", launch), lambda: self.gpu.graph("empty", self.stream) if graph else self.gpu.raw("empty")
        )
        self.work = common.Work(common.nothing, self.launch)

    def time_synchronized(self, launch: str) -> None:
        """Launch and synchronize. Synchronized."""
        self.launch()
        self.stream.synchronize()

    def track_enqueue(self, launch: str) -> float:
        """Measure the host time of the launch. Not synchronized while timed."""
        return self.enqueue_us()

    track_enqueue.unit = "us"  # type: ignore[attr-defined]
