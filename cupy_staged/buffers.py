"""Pinned host memory that kernels read in place: one buffer, a fenced pool of them, and a published host array.

The pool owns its slots. A view that it hands out is read by kernels that it cannot see: it belongs to the stream that
was current (or given) then, until `fence(stream)` or until its slot is taken back.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

from . import ring
from .backends import PER_THREAD_STREAM, Pinned, check_native, drain, host_view
from .device import Device, get_backend, guard_against_fork, refuse_entry, require_uva
from .values import convert, pack_values

MARKS = 16  # fences that one pool keeps in flight, at least


def check_size(size: int | tuple[int, ...], max_dims: int | None = None) -> tuple[int, ...]:
    """`size` as a tuple of ints, none negative; TypeError or ValueError otherwise."""
    dims = size if isinstance(size, (tuple, list)) else (size,)
    for n in dims:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"size must be an int or a tuple of ints, got {size!r}")
        if n < 0:
            raise ValueError(f"size must not be negative, got {size!r}")
    if not dims or (max_dims is not None and len(dims) > max_dims):
        raise ValueError(f"size must have 1 to {max_dims or 'any number of'} dimensions, got {size!r}")
    return tuple(int(n) for n in dims)


class UvaBuffer:
    """One piece of pinned host memory, seen by the host as `np` and by the device as `uva`. Starts as zeros.

    Nothing is copied and nothing is ordered: whoever writes `np` while a kernel reads `uva` must order them.

    Parameters
    ----------
    size : int or tuple of int
        Shape.
    dtype : dtype
        Bool, integer, float or complex of 1 to 16 bytes, native byte order.
    device : None, int or str
        ``None`` is the current CUDA device, or the host where there is none.

    Attributes
    ----------
    np : numpy.ndarray
        ``size``, host memory.
    uva : cupy.ndarray or numpy.ndarray
        The same memory, as the device sees it. Keeps the memory alive.
    nbytes : int

    Raises
    ------
    UvaUnavailableError
        The device does not reach pinned memory; `uva_status()` says why.
    TypeError, ValueError
        A dtype, size or device that is not supported.
    CaptureError
        The current stream is being captured.

    Examples
    --------
    >>> buffer = UvaBuffer((2, 3), "int32", device="host")
    >>> buffer.np[1, 2] = 7
    >>> int(buffer.uva[1, 2]), buffer.nbytes
    (7, 24)
    """

    def __init__(self, size: int | tuple[int, ...], dtype: Any, *, device: Device = None) -> None:
        shape, found = check_size(size), check_native(dtype)
        backend = get_backend(device)
        require_uva(backend, "UvaBuffer")
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * found.itemsize
        block = backend.pinned(max(self.nbytes, 1))
        self.np = host_view(block, shape, found)
        self.uva = backend.view(block, shape, found)


class _Slot:
    """One buffer of a pool, and who may still read it."""

    def __init__(self) -> None:
        self.block: Pinned
        self.host: np.ndarray  # [capacity, ...]
        self.view: Any  # the device's view of it, whole and as last handed out
        self.last: Any
        self.twin: Any = None  # device copy, where there is no UVA memory
        self.marks: dict[int, int] = {}  # fences to pass: word to value
        self.reader: Any = None  # stream of a hand-out that nobody fenced yet


class UvaBufferPool:
    """A round-robin ring of pinned buffers for host arrays that kernels read.

    A buffer is never rewritten while a reader that the pool knows of may still run: a busy one makes the host wait for
    it alone. It grows along dimension 0 to the smallest power of two that holds the input.

    Parameters
    ----------
    size : int or tuple of int
        Shape of each buffer at first; trailing dimensions are kept.
    dtype : dtype
        Bool, integer, float or complex of 1 to 16 bytes, native byte order.
    max_concurrency : int, optional
        Number of buffers; see `set_default_max_concurrency`.
    device : None, int or str

    Attributes
    ----------
    size : int or tuple of int
        As given.
    stats : Stats
        ``launches`` counts hand-outs and copies; ``late_fences`` those that nobody fenced.

    Raises
    ------
    TypeError, ValueError, CaptureError
        As `UvaBuffer`. Without UVA memory the pool works, with one copy to the device a hand-out.

    Examples
    --------
    >>> pool = UvaBufferPool(4, "int32", device="host")
    >>> pool.copy_to_uva([1, 2, 3]).tolist()
    [1, 2, 3]
    """

    def __init__(
        self, size: int | tuple[int, ...], dtype: Any, *, max_concurrency: int | None = None, device: Device = None
    ) -> None:
        shape = check_size(size)
        self.size = size
        self.dtype = check_native(dtype)
        num_slots = ring.check_max_concurrency(max_concurrency)
        self._core = _PoolCore(get_backend(device), shape, self.dtype, num_slots)
        weakref.finalize(self, ring.drop, self._core).atexit = False

    @property
    def stats(self) -> ring.Stats:
        """What the pool has done so far."""
        return self._core.stats

    def copy_to_uva(self, x: Any, *, stream: Any = None) -> Any:
        """Copy host values into the next buffer and return the device's view of them.

        Parameters
        ----------
        x : list, tuple, range, array or iterable
            ``[n, *trailing]``, host. Copied and checked before the call returns.
        stream : optional
            Stream of the kernel that will read the view; the device's current one by default.

        Returns
        -------
        cupy.ndarray or numpy.ndarray
            ``[n, *trailing]``. Valid until the ring comes round to its buffer again.

        Raises
        ------
        TypeError, OverflowError, ValueError
            A value of the wrong kind, one that does not fit, or the wrong shape. Nothing is handed out.
        CaptureError
            The stream is being captured.

        Notes
        -----
        Does not wait for the device unless the buffer is still being read. Call `fence` after the reader's launch, else
        the fence is recorded late, when the buffer is taken back.
        """
        core = self._core
        with core.entered():
            if core.backend.elsewhere():
                with core.backend.current():
                    return core.hand_out(x, stream)
            return core.hand_out(x, stream)

    def copy_to_gpu(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Copy host values into device memory through the next buffer, in stream order, and return the device array.

        Parameters
        ----------
        x : list, tuple, range, array or iterable
            ``[n, *trailing]``, host. Copied and checked before the call returns.
        out : cupy.ndarray, optional
            ``[n, *trailing]``, contiguous, of the pool's dtype. A new array by default.
        stream : optional
            The device's current one by default.

        Returns
        -------
        cupy.ndarray or numpy.ndarray
            `out`, or the new array. Later work on the stream sees the values.

        Raises
        ------
        TypeError, OverflowError, ValueError
            A value of the wrong kind, one that does not fit, the wrong shape, or an `out` that does not match.
        CaptureError
            The stream is being captured.
        """
        core = self._core
        with core.entered():
            if core.backend.elsewhere():
                with core.backend.current():
                    return core.copy(x, out, stream)
            return core.copy(x, out, stream)

    def fence(self, stream: Any = None) -> None:
        """Record that every view handed out so far is read by work that is on `stream` now, and by none later.

        Call it after the reader's launch; several streams may, one call each. Does not wait.

        Parameters
        ----------
        stream : optional
            The device's current one by default.

        Raises
        ------
        CaptureError
            The stream is being captured.
        """
        core = self._core
        with core.entered():
            if core.backend.elsewhere():
                with core.backend.current():
                    core.fence(core.backend.stream(stream))
            else:
                core.fence(core.backend.stream(stream))


class _PoolCore:
    """What a pool owns; outlives it until its fences have passed."""

    def __init__(self, backend: Any, shape: tuple[int, ...], dtype: np.dtype, num_slots: int) -> None:
        ring.sweep()
        self.backend = backend
        self.lock = threading.Lock()
        self.stats = ring.Stats(slots=num_slots)
        self.dtype = dtype
        self.trailing = shape[1:]
        self.row_bytes = int(np.prod(self.trailing, dtype=np.int64)) * dtype.itemsize
        self._num_words = max(MARKS, 2 * num_slots)
        self._fences = ring.FenceWords(backend, self._num_words, self.stats)
        self._values = [0] * self._num_words
        self._streams: list[Any] = [None] * self._num_words
        self._num_marks = 0
        self._slots = [_Slot() for _ in range(num_slots)]
        self._next = 0
        for slot in self._slots:
            self._allocate(slot, shape[0])
        if backend.id is not None:
            guard_against_fork(self)

    def entered(self) -> threading.Lock:
        """Keep other threads out, in a `with` statement."""
        if self.lock.locked():
            refuse_entry()
        return self.lock

    def hand_out(self, x: Any, stream: Any) -> Any:
        """Copy `x` into the next slot and return its view, for a reader on `stream`."""
        stream = self.backend.stream(stream)
        slot, n = self.fill(x, stream)
        slot.reader = stream  # before the copy: should it raise, the slot is fenced all the same
        if slot.twin is not None and n:
            self.backend.copy(slot.twin.data.ptr, slot.block.address, n * self.row_bytes, stream.ptr)
            self.stats.copies += 1
        return self.view(slot, n)

    def copy(self, x: Any, out: Any, stream: Any) -> Any:
        """Copy `x` through the next slot to `out`, or to a new array, and return that."""
        stream = self.backend.stream(stream)
        values = self.rows_of(x)
        shape = (len(values), *self.trailing)
        if out is None:
            out = self.backend.empty_on(stream, shape, self.dtype)
        to = self.backend.check_array(out, "out")
        if out.shape != shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"out must be contiguous, of shape {shape} and dtype {self.dtype}, "
                f"got shape {out.shape}, dtype {out.dtype}"
            )
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise ValueError("out must be writeable")
        slot, n = self.fill(values, stream)
        if n:
            slot.reader = stream
            self.backend.copy(to, slot.block.address, n * self.row_bytes, stream.ptr)
            self.stats.copies += 1
            word, value = self.mark(stream)
            slot.marks[word] = value
            slot.reader = None
        return out

    def _allocate(self, slot: _Slot, capacity: int) -> None:
        shape = (capacity, *self.trailing)
        block = self.backend.pinned(max(capacity * self.row_bytes, 1))
        self.stats.host_allocations += 1
        host = host_view(block, shape, self.dtype)
        twin = None if self.backend.uva else self.backend.zeros(shape, self.dtype)
        view = self.backend.view(block, shape, self.dtype) if twin is None else twin
        slot.block, slot.host, slot.view, slot.last, slot.twin = block, host, view, view, twin  # all or none

    def is_idle(self) -> bool:
        """Whether everything that the pool knows to read its buffers is done. Asked once the pool was dropped."""
        for slot in self._slots:
            if slot.reader is not None:  # dropped with a view that nobody fenced
                word = self._num_marks % self._num_words
                if self._fences.words[8 * word] != self._values[word]:
                    return False  # a mark would wait
                try:
                    with self.backend.current():
                        self._fence_late(slot)
                except RuntimeError:  # a capture is in the way
                    return False
        return all(self._fences.words[8 * word] == value for word, value in enumerate(self._values))

    def mark(self, stream: Any) -> tuple[int, int]:
        """Fence all work on `stream` so far: a word, and the value that it will get."""
        word = self._num_marks % self._num_words
        self._pass(word, self._values[word])
        value = self._values[word] % 255 + 1
        try:
            self._values[word], self._streams[word] = value, stream
            self.backend.signal(self._fences.block, 8 * word, value, stream.ptr)
        except BaseException:
            drain(self.backend, stream)
            self._fences.words[8 * word] = value
            raise
        self._num_marks += 1
        return word, value

    def _pass(self, word: int, value: int) -> None:
        """Wait until `word` got `value`; a word that was given away since has passed."""
        if self._values[word] == value and self._fences.words[8 * word] != value:
            self._fences.wait(word, value, self._streams[word])

    def fence(self, stream: Any) -> None:
        """Fence every slot that is handed out, on `stream`."""
        handed_out = [slot for slot in self._slots if slot.reader is not None or slot.marks]
        if handed_out:
            word, value = self.mark(stream)
            for slot in handed_out:
                slot.marks[word] = value
                slot.reader = None

    def _fence_late(self, slot: _Slot) -> None:
        """Fence a hand-out that nobody fenced."""
        reader = self.backend.stream(slot.reader)
        if reader.ptr == PER_THREAD_STREAM:  # maybe another thread's: the null stream waits for them all
            reader = self.backend.stream(self.backend.null)
        word, value = self.mark(reader)
        slot.marks[word], slot.reader = value, None
        self.stats.late_fences += 1

    def rows_of(self, x: Any) -> np.ndarray:
        """`x` as an array ``[n, *trailing]`` of the pool's dtype, every value checked; no slot was touched yet."""
        if not self.trailing:
            return self._checked(x)
        rows = values = x
        if not isinstance(x, np.ndarray):
            if hasattr(x, "__cuda_array_interface__"):
                raise TypeError("values must lie on the host: a device array would have to be read back")
            rows = x if hasattr(x, "__array__") else list(x)
            try:
                values = np.asarray(rows)
            except ValueError:
                raise ValueError(
                    f"values must have shape (n, {', '.join(map(str, self.trailing))}), got ragged rows"
                ) from None
            if values.size == 0:
                values = values.astype(self.dtype).reshape(0, *self.trailing) if values.ndim == 1 else values
        if values.shape[1:] != self.trailing or values.ndim == 0:
            raise ValueError(f"values must have shape (n, {', '.join(map(str, self.trailing))}), got {values.shape}")
        flat: Any = values.reshape(-1)
        if isinstance(rows, list) and flat.dtype.kind in "fO" and self.dtype.kind in "iu":
            flat = np.array(rows, object).reshape(-1).tolist()  # NumPy makes floats of ints beyond int64
        return self._checked(flat).reshape(values.shape)

    def _checked(self, x: Any) -> np.ndarray:
        """Convert the values of `x`, of one dimension, to an array of the pool's dtype."""
        values = convert(x, self.dtype)
        if isinstance(values, np.ndarray):
            return values
        found = np.empty(len(values), self.dtype)
        pack_values(values, self.dtype, found.view(np.uint8), 0)
        return found

    def fill(self, x: Any, stream: Any) -> tuple[_Slot, int]:
        """Take the next slot (waiting for its readers), grow it if need be, and copy `x` into it."""
        values = self.rows_of(x)
        n = len(values)
        slot = self._slots[self._next]
        if slot.reader is not None:
            self._fence_late(slot)
        for word, value in slot.marks.items():
            self._pass(word, value)
        slot.marks.clear()
        if n > len(slot.host):
            self._allocate(slot, ring.grown_size(n))
            self.stats.growths += 1
        slot.host[:n] = values
        self._next = (self._next + 1) % len(self._slots)
        self.stats.launches += 1
        self.stats.writes += 1
        self.stats.values += n
        self.stats.bytes += n * self.row_bytes
        return slot, n

    def view(self, slot: _Slot, n: int) -> Any:
        """The device's view of the first `n` rows; made anew only when `n` changed."""
        if len(slot.last) != n:
            slot.last = slot.view if n == len(slot.view) else slot.view[:n]
        return slot.last


class UvaBackedTensor:
    """A host array that is the source of truth, and the device's view of what was last published.

    Parameters
    ----------
    size : int or tuple of int
        Shape.
    dtype : dtype
    max_concurrency : int, optional
        Number of buffers that publishing goes round.
    device : None, int or str

    Attributes
    ----------
    np : numpy.ndarray
        ``size``, host; starts as zeros. Change it freely: published views are copies.
    gpu : cupy.ndarray or numpy.ndarray
        The view that was published last.
    stats : Stats

    Raises
    ------
    TypeError, ValueError, CaptureError
        As `UvaBufferPool`.

    Examples
    --------
    >>> lengths = UvaBackedTensor(4, "int32", device="host")
    >>> lengths.np[:2] = 5, 6
    >>> lengths.copy_to_uva(2).tolist()
    [5, 6]
    """

    def __init__(
        self, size: int | tuple[int, ...], dtype: Any, *, max_concurrency: int | None = None, device: Device = None
    ) -> None:
        shape = check_size(size)
        self._pool = UvaBufferPool(shape, dtype, max_concurrency=max_concurrency, device=device)
        self.np = np.zeros(shape, self._pool.dtype)
        self.gpu = self._pool.copy_to_uva(self.np)

    @property
    def stats(self) -> ring.Stats:
        """What publishing has done so far."""
        return self._pool.stats

    def copy_to_uva(self, n: int | None = None, *, stream: Any = None) -> Any:
        """Publish the first `n` rows (all by default) and return the device's view of exactly those.

        Raises
        ------
        ValueError
            `n` is negative or more than there are.
        TypeError
            `n` is not an int.
        CaptureError
            The stream is being captured.
        """
        if n is None:
            n = len(self.np)
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"n must be an int, got {n!r}")
        if not 0 <= n <= len(self.np):
            raise ValueError(f"n must be 0 to {len(self.np)}, got {n}")
        self.gpu = self._pool.copy_to_uva(self.np[:n], stream=stream)
        return self.gpu

    def fence(self, stream: Any = None) -> None:
        """Record that every view published so far is read by work on `stream` now; see `UvaBufferPool.fence`."""
        self._pool.fence(stream)
