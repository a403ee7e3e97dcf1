"""What the tests share: sizes, dtypes, values, and the place (host or CUDA) that a test runs on.

A test is written once against a `Place` and runs on all of them. Every array that a test reads was poisoned or is zero
before, so that a write that never happened shows.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np

DTYPES = tuple(
    np.dtype(d)
    for d in ("bool", "i1", "u1", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8", "c8", "c16")  # one of each
)
# 0, 1, one below, at and above a lane, a 64-byte inline write, a tile; odd lengths between.
LENGTHS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 127, 255, 257, 1025)
POISON = -77

STALL_SOURCE = r"""
extern "C" __global__ void stall(long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while ((long long)(now - begin) < nanoseconds);
}
"""


def number_of_gpus() -> tuple[int, str]:
    """How many CUDA devices the tests can use, and why none; anything but "no CuPy, driver or device" is raised."""
    if importlib.util.find_spec("cupy") is None:
        return 0, "CuPy is not installed"
    from cupy_staged.device import count_devices

    return count_devices()


def random_values(rng: np.random.Generator, dtype: Any, n: int) -> np.ndarray:
    """`n` random values of all magnitudes: integers over the whole range, fractions, infinities, NaN and -0.0."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, n).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, n, dtype, endpoint=True)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        out = np.empty(n, dtype)
        out.real, out.imag = random_values(rng, part, n), random_values(rng, part, n)
        return out
    values = (rng.standard_normal(n) * 1000).astype(dtype)
    special = rng.integers(0, 20, n)
    for which, value in enumerate((np.inf, -np.inf, np.nan, -0.0)):
        values[special == which] = value
    return values


def distinct_values(dtype: Any, n: int, salt: int) -> np.ndarray:
    """`n` values that differ from those of another `salt` in every place: fractions where the dtype has them."""
    whole = np.arange(n, dtype=np.int64) % 4096 + 8192 * (salt + 1)
    dtype = np.dtype(dtype)
    return (whole + 0.25 if dtype.kind in "fc" else whole).astype(dtype)


def take_fences_out(monkeypatch: Any) -> None:
    """Let every wait for a busy slot return at once, as if its fence had passed: for tests that must see the fault."""
    from cupy_staged.ring import FenceWords

    def wait(self: Any, index: int, value: int, _stream: Any) -> None:
        self.words[self.STRIDE * index] = value

    monkeypatch.setattr(FenceWords, "wait", wait)


class Place:
    """The host backend. `device` goes to constructors; streams are None, and every call is done when it returns."""

    name = "host"
    device: Any = "host"
    uva = True
    on_gpu = False
    stream: Any = None

    def make(self, what: Any, *args: Any, **options: Any) -> Any:
        """Construct a library object on this place, under the stream that is current at construction."""
        return what(*args, device=self.device, **options)

    def fuse(self, what: Any, *args: Any, **options: Any) -> Any:
        """Construct something that takes its device from its members."""
        return what(*args, **options)

    def asarray(self, values: Any) -> Any:
        """Make a device array, ready for any stream."""
        return np.array(values)

    def read(self, array: Any, out: Any = None) -> Any:
        """Queue a kernel that copies `array`, of any strides and in UVA memory too; returns the copy."""
        if out is None:
            return np.array(array)
        out[...] = array
        return out

    def asnumpy(self, array: Any) -> np.ndarray:
        """Read the values, once all work on the stream so far is done."""
        return np.array(array)

    def address(self, array: Any) -> int:
        """Where a device array lies."""
        return int(array.ctypes.data)

    def synchronize(self) -> None:
        """Wait for everything on the device."""

    def stall(self, milliseconds: float, stream: Any = None) -> None:
        """Keep the stream busy for a while; the host goes on."""

    def new_stream(self) -> Any:
        """Another stream, non-blocking."""
        return None

    def using(self, stream: Any) -> Any:
        """Make a stream current for a while."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def copies(self) -> Iterator[list[int]]:
        """Collect the bytes of each host-to-device copy that the library makes."""
        from cupy_staged.backends import HostBackend

        found: list[int] = []
        original = HostBackend.copy

        def copy(self: Any, to: int, source: int, nbytes: int, stream: int) -> None:
            found.append(nbytes)
            original(self, to, source, nbytes, stream)

        HostBackend.copy = copy
        try:
            yield found
        finally:
            HostBackend.copy = original


class CudaPlace(Place):
    """One CUDA device. `stream` is current while the test runs; `construction` while the library's objects are made."""

    on_gpu = True

    def __init__(self, name: str, uva: bool, mode: str, device_id: int = 0) -> None:
        import cupy

        self.name, self.uva = name, uva
        self.device = f"cuda:{device_id}"
        self.cupy = cupy
        self.runtime = cupy.cuda.runtime
        with cupy.cuda.Device(device_id):
            self.stream = cupy.cuda.Stream.null if mode == "null" else cupy.cuda.Stream(non_blocking=True)
            self.construction = cupy.cuda.Stream(non_blocking=True) if mode == "other" else self.stream
            self._copy = _copy_kernel()
            self._stall = _stall_kernel()
            self.stall(0)
            self.stream.synchronize()

    def make(self, what: Any, *args: Any, **options: Any) -> Any:
        with self.construction:
            return what(*args, device=self.device, **options)

    def fuse(self, what: Any, *args: Any, **options: Any) -> Any:
        with self.construction:
            return what(*args, **options)

    def asarray(self, values: Any) -> Any:
        array = self.cupy.asarray(np.asarray(values))
        self.stream.synchronize()
        return array

    def read(self, array: Any, out: Any = None) -> Any:
        if out is None:
            out = self.cupy.empty(array.shape, array.dtype)
        return self._copy(array, out)

    def asnumpy(self, array: Any) -> np.ndarray:
        return self.cupy.asnumpy(self.read(array))

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def synchronize(self) -> None:
        self.runtime.deviceSynchronize()

    def stall(self, milliseconds: float, stream: Any = None) -> None:
        with self.using(stream):
            self._stall((1,), (1,), (np.int64(milliseconds * 1e6),))

    def new_stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def using(self, stream: Any) -> Any:
        return contextlib.nullcontext() if stream is None else stream

    @contextlib.contextmanager
    def copies(self) -> Iterator[list[int]]:
        found: list[int] = []
        runtime = self.runtime
        original = runtime.memcpyAsync

        def copy(to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
            if kind != runtime.memcpyDeviceToHost:  # those set fence words
                found.append(nbytes)
            original(to, source, nbytes, kind, stream)

        runtime.memcpyAsync = copy
        try:
            yield found
        finally:
            runtime.memcpyAsync = original


_kernels: dict[str, Any] = {}


def _copy_kernel() -> Any:
    import cupy

    if "copy" not in _kernels:
        _kernels["copy"] = cupy.ElementwiseKernel("T x", "T y", "y = x", "copy_for_test")
    return _kernels["copy"]


def _stall_kernel() -> Any:
    import cupy

    if "stall" not in _kernels:
        _kernels["stall"] = cupy.RawKernel(STALL_SOURCE, "stall")
    return _kernels["stall"]
