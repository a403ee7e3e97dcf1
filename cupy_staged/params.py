"""Named per-request scalars that kernels read: NumPy arrays on the host, copies at fixed addresses on the device.

A `DeviceParamTable` owns one block of memory on either side, so that all fields go over in one copy. The copy is
enqueued on the stream given to `sync`; it reads a fenced slot, so the host may go on changing values at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from . import ring, step_packing
from .backends import PER_THREAD_STREAM, check_native, drain
from .device import Device, get_backend, guard_against_fork, refuse_entry

ALIGNMENT = 256  # bytes: of each field, as of an allocation of its own


class DeviceParam:
    """One field of a `DeviceParamTable`.

    Attributes
    ----------
    np : numpy.ndarray
        ``[num_rows]``, host: the source of truth. Change it in place and freely.
    gpu : cupy.ndarray or numpy.ndarray
        ``[num_rows]``, device, at a fixed address: the values of the last `DeviceParamTable.sync`.
    """

    __slots__ = ("gpu", "np")

    def __init__(self, host: np.ndarray, device: Any) -> None:
        self.np = host
        self.gpu = device


class DeviceParamTable:
    """Per-request scalars of mixed dtypes, brought to the device by one copy, and only when something changed.

    Parameters
    ----------
    num_rows : int
        Rows of every field.
    fields : mapping of str to dtype
        Bool, integers, floats or complex of 1 to 16 bytes, native byte order. All start as zeros.
    device : None, int or str
        ``None`` is the current CUDA device, or the host where there is none.

    Attributes
    ----------
    num_rows : int
    stats : Stats
        ``copies`` counts the calls of `sync` that found a change, ``bytes`` what they copied.

    Raises
    ------
    TypeError
        A name that is no str, a dtype that is not supported, a number of rows that is no int.
    ValueError
        No fields, or no rows.
    CaptureError
        The current stream is being captured. The constructor returns when its own device work is done.

    Examples
    --------
    >>> params = DeviceParamTable(4, {"temperature": "float32", "top_k": "int32"}, device="host")
    >>> params["temperature"].np[2] = 0.5
    >>> params["top_k"].np[:] = 40
    >>> params.sync()
    >>> params["temperature"].gpu.tolist(), params["top_k"].gpu.tolist()
    ([0.0, 0.0, 0.5, 0.0], [40, 40, 40, 40])
    >>> params.sync()  # nothing changed: nothing is copied
    >>> params.stats.copies
    1
    """

    def __init__(self, num_rows: int, fields: Mapping[str, Any], *, device: Device = None) -> None:
        if isinstance(num_rows, bool) or not isinstance(num_rows, (int, np.integer)):
            raise TypeError(f"num_rows must be an int, got {num_rows!r}")
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, got {num_rows}")
        if not fields:
            raise ValueError("fields must name at least one field, got none")
        self.num_rows = int(num_rows)
        dtypes: dict[str, np.dtype] = {}
        for name, dtype in fields.items():
            if not isinstance(name, str):
                raise TypeError(f"the name of a field must be a str, got {name!r}")
            dtypes[name] = check_native(dtype)
        places: dict[str, slice] = {}
        end = 0
        for name, dtype in dtypes.items():
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + self.num_rows * dtype.itemsize
            places[name] = slice(begin, end)
        self._core = core = _ParamCore(get_backend(device), -(-end // 8) * 8)
        self._fields = {
            name: DeviceParam(core.host[place].view(dtypes[name]), core.device[place].view(dtypes[name]))
            for name, place in places.items()
        }
        weakref.finalize(self, ring.drop, core).atexit = False

    def __getitem__(self, name: str) -> DeviceParam:
        try:
            return self._fields[name]
        except KeyError:
            raise KeyError(f"no field {name!r}; there are {', '.join(self._fields)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    @property
    def stats(self) -> ring.Stats:
        """What `sync` has done so far."""
        return self._core.stats

    def sync(self, stream: Any = None) -> None:
        """Bring all fields to the device with one copy, unless nothing changed since the last call.

        Parameters
        ----------
        stream : optional
            A CuPy stream, or any object with ``__cuda_stream__``; the device's current one by default.

        Raises
        ------
        CaptureError
            The stream is being captured. Nothing was enqueued; a graph may read the fields, which stay where they are.
        ValueError, TypeError
            A stream of another device; no stream at all.
        RuntimeError
            Another thread is in `sync`, or the process was forked.

        Notes
        -----
        Returns when the copy is enqueued, and the values may be changed at once. Later work on the stream sees them;
        copies of one table are in order also over streams. The host waits only where both slots are still being read. A
        call that finds no change looks at the values on the host and enqueues nothing.
        """
        core = self._core
        if core.lock.locked():
            refuse_entry()
        with core.lock:
            if core.backend.elsewhere():
                with core.backend.current():
                    core.sync(core.backend.stream(stream))
            else:
                core.sync(core.backend.stream(stream))


class _ParamCore:
    """What a table owns; outlives it until its copies are done."""

    def __init__(self, backend: Any, nbytes: int) -> None:
        ring.sweep()
        step_packing.compile_params()
        num_slots = ring.check_max_concurrency(None)
        self.backend = backend
        self.lock = threading.Lock()
        self.stats = ring.Stats(slots=num_slots)
        self.host = np.zeros(nbytes, np.uint8)
        self._published = np.zeros(nbytes, np.uint8)
        self.device = backend.zeros((nbytes,), np.dtype(np.uint8))
        self._to = backend.check_array(self.device, "device")
        self._addresses = self.host.ctypes.data, self._published.ctypes.data, nbytes // 8
        self._fences = ring.FenceWords(backend, num_slots, self.stats)
        self._event = backend.new_event()
        self._slots = [backend.pinned(nbytes) for _ in range(num_slots)]
        self._sequences = [0] * num_slots
        self._next = 0
        self._last_stream: Any = None
        self.stats.host_allocations += num_slots
        if backend.id is not None:
            guard_against_fork(self)

    def is_idle(self) -> bool:
        """Whether every copy is done."""
        passed = all(self._fences.words[8 * i] == value for i, value in enumerate(self._sequences))
        return passed and bool(self.backend.event_done(self._event))

    def sync(self, stream: Any) -> None:
        """Publish what changed, on `stream`, which is not being captured."""
        slot, backend, last = self._next, self.backend, self._last_stream
        if last is not None and (last.ptr != stream.ptr or stream.ptr == PER_THREAD_STREAM):
            backend.wait_event(stream.ptr, self._event)  # also where there is nothing to copy: its readers come after
        if not step_packing.differ(*self._addresses):
            return
        if self._fences.words[8 * slot] != self._sequences[slot]:
            self._fences.wait(slot, self._sequences[slot], self._last_stream)
        block, nbytes = self._slots[slot], self.host.nbytes
        block.array[:] = self.host
        sequence = self._sequences[slot] % 255 + 1
        try:
            self._sequences[slot], self._last_stream = sequence, stream
            backend.copy(self._to, block.address, nbytes, stream.ptr)
            backend.signal(self._fences.block, 8 * slot, sequence, stream.ptr)
            backend.record(self._event, stream.ptr)
        except BaseException:
            drain(backend, stream)
            self._sequences[slot] = self._fences.words[8 * slot]  # nobody reads the slot
            raise
        self._next = (slot + 1) % len(self._slots)
        self._published[:] = block.array  # not `host`, which another thread may have changed meanwhile
        self.stats.launches += 1
        self.stats.copies += 1
        self.stats.bytes += nbytes
