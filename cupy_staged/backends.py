"""Backends: where memory comes from and how work goes to a stream, on CUDA or on the host.

Both have the same few methods, so no caller asks which one it holds. A CUDA backend works with UVA memory, or without
it: then every slot is copied to the device. CuPy is imported when the first CUDA backend is made (`device.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from .errors import CaptureError

EXACT_PINNED_BYTES = 64 << 20  # CuPy's pinned pool rounds up to a power of two: too much for a table this large
PER_THREAD_STREAM = 2  # cudaStreamPerThread
CUDA_NOT_READY = 600  # cudaErrorNotReady
CUDA_CAPTURED_EVENT = 907  # CUDA_ERROR_CAPTURED_EVENT
SPINS = 2000  # looks at a fence word before the waiting thread begins to sleep: about 60 us


class Pinned:
    """A block of host memory that the device can reach.

    Attributes
    ----------
    array : numpy.ndarray
        ``[nbytes] uint8``, the block as the host sees it.
    address, device_address : int
        Where the host and the device (0 where it cannot) find the block.
    """

    __slots__ = ("address", "array", "device_address")

    def __init__(self, array: np.ndarray, device_address: int) -> None:
        self.array = array
        self.address: int = array.ctypes.data
        self.device_address = device_address


def check_native(dtype: Any) -> np.dtype:
    """`dtype` as a NumPy dtype of 1 to 16 bytes: bool, integer, float or complex, native byte order; else TypeError."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype {dtype!r} is not a NumPy dtype") from None
    if found.kind not in "biufc" or found.itemsize not in (1, 2, 4, 8, 16) or found.char in "gG":
        raise TypeError(f"dtype {found} is not supported: use bool, integers, floats or complex of 1 to 16 bytes")
    if not found.isnative:
        raise TypeError(f"dtype {found} is not in native byte order: use {found.newbyteorder('=')}")
    return found  # type: ignore[no-any-return]


class HostBackend:
    """NumPy and Numba stand in for the device; every call is done when it returns."""

    name = "host"
    id = None
    uva = True

    def elsewhere(self) -> bool:
        """Whether another device is current."""
        return False

    def stream(self, stream: Any) -> Any:
        """The stream to use; the host has none, and takes any."""
        return self

    ptr = 0

    def check_current(self) -> None:
        """Raise where nothing may be made now; on the host anything may."""

    def events_of(self, streams: Any) -> list[Any]:
        """What `wait_for` names; on the host it is done already."""
        return []

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Make the device current for a while."""
        return contextlib.nullcontext()

    def pinned(self, nbytes: int) -> Pinned:
        """A block of `nbytes` zero bytes that host and device share."""
        raw = np.zeros(nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64  # the packer aligns contents to 16 bytes
        array = raw[start : start + nbytes]
        return Pinned(array, array.ctypes.data)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A device array of zeros; returns when it is ready for any stream."""
        return np.zeros(shape, dtype)

    def array(self, values: np.ndarray) -> np.ndarray:
        """A device array of `values`; returns when it is ready for any stream."""
        return values.copy()

    def empty_on(self, stream: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A device array for use on `stream`."""
        return np.empty(shape, dtype)

    def view(self, block: Pinned, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The device's view of the start of `block`."""
        return host_view(block, shape, dtype)

    def check_array(self, array: Any, name: str) -> int:
        """The address of a device array that a caller gave; TypeError or ValueError where it is not one of ours."""
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} must be a numpy.ndarray on the host, got {type(array).__name__}")
        return int(array.ctypes.data)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from host to device, in stream order."""
        ctypes.memmove(to, source, nbytes)

    def signal(self, block: Pinned, index: int, value: int, stream: int) -> None:
        """Set word `index` of `block` to `value` once all work on `stream` so far is done."""
        block.array.view(np.uint64)[index] = value

    def new_event(self) -> None:
        """An event that orders streams."""
        return

    def record(self, event: Any, stream: int) -> None:
        """Mark the work on `stream` so far."""

    def wait_event(self, stream: int, event: Any) -> None:
        """Let later work on `stream` start after what `event` marks."""

    def event_done(self, event: Any) -> bool:
        """Whether what `event` marks is done."""
        return True

    def check_health(self, stream: Any) -> bool:
        """Whether all work on `stream` is done; raises what the device reports."""
        return True


def host_view(block: Pinned, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The host's view of the start of `block`."""
    count = int(np.prod(shape, dtype=np.int64))
    return block.array[: count * dtype.itemsize].view(dtype).reshape(shape)


class CudaBackend:
    """One CUDA device. With `uva`, kernels read slots in place; without, slots are copied to the device first."""

    name = "cuda"

    def __init__(self, device_id: int, uva: bool) -> None:
        import cupy

        self.id = device_id
        self.uva = uva
        self.cupy = cupy
        self.runtime = cupy.cuda.runtime
        self.null = cupy.cuda.Stream.null
        self._get_device = cupy.cuda.runtime.getDevice
        self._current_stream = cupy.cuda.get_current_stream
        self._is_capturing = cupy.cuda.runtime.streamIsCapturing
        self._error = cupy.cuda.runtime.CUDARuntimeError
        with self.current():
            self.stream(None)  # CaptureError before anything is made
            # Memory comes from and is cleared on a stream of our own: a constructor neither waits for a stalled stream
            # of the caller nor races with it, and a dropped block goes back to where no kernel of the caller was
            # queued.
            self.setup = cupy.cuda.Stream(non_blocking=True)
            self._setup_lock = threading.RLock()
            with self.using(self.setup):
                # Sources of fence words. No kernel of CuPy's makes them: it would be compiled, which fails where CuPy's
                # cache cannot be written.
                self._values = cupy.asarray(np.arange(256, dtype=np.uint64))
            self.setup.synchronize()

    def elsewhere(self) -> bool:
        """Whether another device is current."""
        return bool(self._get_device() != self.id)

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Make the device current for a while."""
        return self.cupy.cuda.Device(self.id)  # type: ignore[no-any-return]

    def check_current(self) -> None:
        """Raise CaptureError where the device's current stream is being captured."""
        with self.current():
            self.stream(None)

    @contextlib.contextmanager
    def on_setup(self) -> Iterator[None]:
        """Work on the setup stream, one thread at a time: graphs are captured on it."""
        with self._setup_lock, self.current(), self.using(self.setup):
            yield

    @contextlib.contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Make `stream` current for a while by `use`: leaving a `with` block would undo the caller's own `use`."""
        before = self._current_stream(self.id)
        stream.use()
        try:
            yield
        finally:
            before.use()

    def capture(self, launch: Callable[[], None]) -> Any:
        """What `launch` enqueues on the setup stream, as a graph; the stream is as before also where it raises."""
        with self.on_setup():
            try:
                self.setup.begin_capture(self.runtime.streamCaptureModeRelaxed)
                launch()
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to show
                    self.setup.end_capture()
                raise
            return self.setup.end_capture()

    def stream(self, stream: Any) -> Any:
        """The stream to use, with a `ptr`; CaptureError where it is being captured, ValueError on another device."""
        if stream is None:
            stream = self._current_stream(self.id)
        else:
            if not hasattr(stream, "ptr"):
                stream = self._foreign_stream(stream)
            if stream.device_id != self.id and stream.device_id >= 0:
                raise ValueError(
                    f"{stream!r} belongs to device {stream.device_id}; this object lives on device {self.id}"
                )
        try:
            if not self._is_capturing(stream.ptr):
                return stream
        except self._error:
            pass
        return self._refuse_capture(stream)

    def _foreign_stream(self, stream: Any) -> Any:
        """A stream of another library, by the CUDA stream protocol."""
        if not hasattr(stream, "__cuda_stream__"):
            raise TypeError(f"stream must be a CuPy stream or have __cuda_stream__, got {type(stream).__name__}")
        return self.cupy.cuda.Stream.from_external(stream)

    def events_of(self, streams: Any) -> list[Any]:
        """Events that mark what was enqueued so far on the streams (or events) that `wait_for` names."""
        if not isinstance(streams, Iterable):
            streams = (streams,)
        kind = self.cupy.cuda.Event
        checked = [refuse_captured(s) if isinstance(s, kind) else self.stream_anywhere(s) for s in streams]
        return [source if isinstance(source, kind) else self._event_on(source) for source in checked]

    def stream_anywhere(self, stream: Any) -> Any:
        """A stream of any device, checked for captures."""
        if not hasattr(stream, "ptr"):
            stream = self._foreign_stream(stream)
        return self._refuse_capture(stream)

    def _refuse_capture(self, stream: Any) -> Any:
        """Raise CaptureError where `stream` is being captured or work on it would break a capture; else return it."""
        try:
            capturing = self._is_capturing(stream.ptr)
        except RuntimeError as error:  # of CuPy's own where the capture was invalidated
            if isinstance(error, self._error) and not 900 <= error.status < 910:  # not about captures: it is broken
                raise
            raise CaptureError(f"another stream is being captured, and this one would break it: {error}") from None
        if capturing:
            raise CaptureError(f"{stream!r} is being captured: call this before the capture begins or after it ends")
        return stream

    def _event_on(self, stream: Any) -> Any:
        device_id = stream.device_id if stream.device_id >= 0 else self.id
        with self.cupy.cuda.Device(device_id):
            event = self.cupy.cuda.Event(disable_timing=True)
            event.record(stream)
        return event

    def pinned(self, nbytes: int) -> Pinned:
        """A block of `nbytes` zero bytes that host and device share; not mapped where there is no UVA memory."""
        with self.current():
            try:
                if nbytes < EXACT_PINNED_BYTES:
                    owner = self.cupy.cuda.alloc_pinned_memory(nbytes)
                else:
                    owner = self.cupy.cuda.PinnedMemoryPointer(self.cupy.cuda.PinnedMemory(nbytes), 0)
            except self._error:
                if self.uva:
                    raise
                return HostBackend().pinned(nbytes)  # pageable: copies block, and are right
            array = np.frombuffer(owner, np.uint8, nbytes)
            array[:] = 0
            address = self.runtime.pointerGetAttributes(owner.ptr).devicePointer if self.uva else 0
        return Pinned(array, address)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A device array of zeros; returns when it is ready for any stream."""
        with self.on_setup():
            array = self.cupy.zeros(shape, dtype)
            self.setup.synchronize()
        return array

    def array(self, values: np.ndarray) -> Any:
        """A device array of `values`; returns when it is ready for any stream."""
        with self.on_setup():
            array = self.cupy.asarray(values)
            self.setup.synchronize()
        return array

    def empty_on(self, stream: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A device array for use on `stream`."""
        with self.using(stream):
            return self.cupy.empty(shape, dtype)

    def view(self, block: Pinned, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """The device's view of the start of `block`, which it keeps alive."""
        memory = self.cupy.cuda.UnownedMemory(block.device_address, block.array.nbytes, block, self.id)
        return self.cupy.ndarray(shape, dtype, self.cupy.cuda.MemoryPointer(memory, 0))

    def check_array(self, array: Any, name: str) -> int:
        """The address of a device array that a caller gave; TypeError or ValueError where it is not one of ours."""
        if not isinstance(array, self.cupy.ndarray):
            raise TypeError(f"{name} must be a cupy.ndarray, got {type(array).__name__}")
        if array.device.id != self.id:
            raise ValueError(f"{name} lies on device {array.device.id}; this object lives on device {self.id}")
        return int(array.data.ptr)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from host to device, in stream order."""
        self.runtime.memcpyAsync(to, source, nbytes, self.runtime.memcpyHostToDevice, stream)

    def signal(self, block: Pinned, index: int, value: int, stream: int) -> None:
        """Set word `index` of `block` to `value` once all work on `stream` so far is done."""
        source = self._values.data.ptr + 8 * value
        self.runtime.memcpyAsync(block.address + 8 * index, source, 8, self.runtime.memcpyDeviceToHost, stream)

    def new_event(self) -> Any:
        """An event that orders streams."""
        with self.current():
            return self.cupy.cuda.Event(disable_timing=True)

    def record(self, event: Any, stream: int) -> None:
        """Mark the work on `stream` so far."""
        self.runtime.eventRecord(event.ptr, stream)

    def wait_event(self, stream: int, event: Any) -> None:
        """Let later work on `stream` start after what `event` marks."""
        self.runtime.streamWaitEvent(stream, event.ptr)

    def event_done(self, event: Any) -> bool:
        """Whether what `event` marks is done; not so after a device error either."""
        with relaxed_capture():
            return bool(self.runtime.eventQuery(event.ptr) == 0)

    def check_health(self, stream: Any) -> bool:
        """Whether all work on `stream` is done; raises what the device reports.

        A query would break a capture that is under way in global mode on another thread: the mode of this thread is
        relaxed around it. A stream that is being captured is not asked at all.
        """
        if self._is_capturing(stream.ptr):
            return False
        with relaxed_capture():
            status = self.runtime.streamQuery(stream.ptr)
        if status not in (0, CUDA_NOT_READY):
            raise self._error(status)
        return bool(status == 0)


Backend = HostBackend | CudaBackend


@functools.cache
def driver() -> Any:
    """The CUDA driver, for what CuPy has no name for."""
    library = ctypes.CDLL("libcuda.so.1" if os.name == "posix" else "nvcuda.dll")
    library.cuEventElapsedTime.argtypes = [ctypes.c_void_p] * 3
    return library


def refuse_captured(event: Any) -> Any:
    """Raise CaptureError where `event` was recorded in a capture that is under way; else return it.

    To wait for it would draw the stream into the capture, and a query would break that. Asked for a time, the driver
    says so and leaves the capture alone; what it says of other events is of no interest.
    """
    time_ms = ctypes.c_float()
    if driver().cuEventElapsedTime(ctypes.byref(time_ms), event.ptr, event.ptr) == CUDA_CAPTURED_EVENT:
        raise CaptureError(
            f"{event!r} was recorded in a capture that is under way: give one that was recorded outside, "
            f"or the stream that the graph is launched on"
        )
    return event


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread call what a capture in global mode on another thread forbids."""
    exchange = driver().cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def wait_word(word: memoryview, index: int, value: int, backend: Backend, stream: Any) -> None:
    """Wait until `word[index]` is `value`, looking at the stream now and then, so that a fault does not hang.

    Raises
    ------
    RuntimeError
        All work on the stream is done and the word never came. It is set, as nobody reads what it guards: the next call
        may use that.
    """
    spins = 0
    while word[index] != value:
        spins += 1
        if spins <= SPINS:
            continue
        time.sleep(2e-5)
        # The per-thread default stream is another one for each thread: that this thread's is done says nothing.
        if spins % 1024 == 0 and backend.check_health(stream) and stream.ptr != PER_THREAD_STREAM:
            time.sleep(1e-3)
            if word[index] != value:
                word[index] = value
                raise RuntimeError(f"work on {stream!r} is done, but its fence word never came: a launch was lost")


def finish(call: Callable[[], None]) -> None:
    """Call `call`, whose work may be done twice, until it comes to its end; an interrupt meanwhile is raised then."""
    raised = None
    try:
        for _ in range(100):  # not for ever, should it be no interrupt
            try:
                call()
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                raised = error
        if raised is not None:
            raise raised
    finally:
        del raised


def drain(backend: Backend, stream: Any) -> None:
    """Wait until `stream` has no work left or is broken, after a call that raised where work may have been enqueued.

    Only then is it known what ran, and nobody reads what the call used. A Ctrl-C meanwhile is held back, as by a
    synchronize: the first error is the one to show.
    """
    while True:
        try:
            if backend.check_health(stream):
                return
            time.sleep(1e-4)
        except KeyboardInterrupt:
            continue
        except Exception as error:  # noqa: BLE001 - the caller is about to raise what it met first
            if not 900 <= getattr(error, "status", 0) < 910:  # the device is broken
                return
            time.sleep(1e-4)  # a capture elsewhere forbids to ask
