"""Tables whose rows the host changes by staged writes: one table, or many by one launch.

A tensor owns its target (or holds the caller's), its write log and the path that applies it. Staging touches the host
only; applying enqueues one launch on the stream given, else on the current stream of the tensor's device.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import packing, ring, writes
from .backends import check_native, finish, host_view
from .buffers import check_size
from .device import Device, get_backend, refuse_in_forked_child, require_uva
from .log import WriteLog, torn_error
from .values import check_capacity, check_ints, convert, explain, refuse, without_numpy_bools

CONTENTS = ("auto", "uva", "h2d")


class StagedWriteTensor:
    """A one- or two-dimensional table in device memory (or UVA memory), changed by staged row writes.

    Parameters
    ----------
    size : int or (int, int)
        ``(num_rows, row_length)``; an int is that many rows of one column.
    dtype : dtype
        Bool, integer, float or complex of 1 to 16 bytes, native byte order.
    target : cupy.ndarray, optional
        The caller's own table of that size and dtype (numpy.ndarray on the host): last dimension contiguous, any row
        stride. By default a new one of zeros.
    uva_instead_of_gpu : bool
        Put the table into UVA memory: for large tables that are rarely read. Without UVA memory it goes to the device.
    contents : {"auto", "uva", "h2d"}
        Whether the kernel reads staged values from the slot in place, or after one asynchronous copy to the device.
    max_concurrency : int, optional
        Slots in the ring; see `set_default_max_concurrency`.
    device : None, int or str
        ``None`` is the current CUDA device, or the host where there is none.

    Attributes
    ----------
    gpu : cupy.ndarray or numpy.ndarray
        ``[num_rows, row_length]`` (or ``[num_rows]``), the table.
    np : numpy.ndarray or None
        A UVA table as the host sees it, valid once the stream is synchronized; else None.
    num_staged : int
        Writes staged since the last apply.
    stats : Stats

    Raises
    ------
    TypeError, ValueError
        A dtype, size, target, policy or device that is not supported.
    UvaUnavailableError
        ``contents="uva"`` without UVA memory.
    CaptureError
        The current stream is being captured. The constructor returns when its own device work is done.

    Examples
    --------
    >>> table = StagedWriteTensor((2, 4), "int32", device="host")
    >>> table.stage_write(1, 1, [7, 8])
    >>> table.apply_write()
    >>> table.gpu.tolist()
    [[0, 0, 0, 0], [0, 7, 8, 0]]
    """

    def __init__(
        self,
        size: int | tuple[int, ...],
        dtype: Any,
        *,
        target: Any = None,
        uva_instead_of_gpu: bool = False,
        contents: str = "auto",
        max_concurrency: int | None = None,
        device: Device = None,
    ) -> None:
        self.shape = check_size(size, max_dims=2)
        self.dtype = check_native(dtype)
        if contents not in CONTENTS:
            raise ValueError(f"contents must be one of {CONTENTS}, got {contents!r}")
        if target is not None and uva_instead_of_gpu:
            raise ValueError("target and uva_instead_of_gpu exclude each other: the target says where the table lies")
        if contents == "h2d" and uva_instead_of_gpu:
            raise ValueError("a UVA table is never fed by a copy: use contents='auto' or 'uva'")
        self.backend = get_backend(device)
        if contents == "uva":
            require_uva(self.backend, "contents='uva'")
        self.num_rows, self.row_length = self.shape[0], (*self.shape, 1)[1]
        self.np: np.ndarray | None = None
        if target is not None:
            self.gpu = target
        elif uva_instead_of_gpu and self.backend.uva:
            block = self.backend.pinned(max(self.num_rows * self.row_length * self.dtype.itemsize, 1))
            self.np = host_view(block, self.shape, self.dtype)
            self.gpu = self.backend.view(block, self.shape, self.dtype)
        else:
            self.gpu = self.backend.zeros(self.shape, self.dtype)
        self._table = self._table_of(self.gpu)
        self._copies = contents == "h2d" or (contents == "auto" and self.np is None and writes.AUTO_COPIES)
        self._log = WriteLog(self.dtype)
        self._users: list[
            tuple[weakref.ref[writes.WritePath], int]
        ] = []  # paths that write this table, and as which group
        self._path = self._make_path(max_concurrency)

    def _make_path(self, max_concurrency: int | None) -> writes.WritePath:
        path = writes.WritePath(
            self.backend, self.dtype, [(self._log, 0)], [self._table], False, max_concurrency, self._copies
        )
        self._users.append((weakref.ref(path), 0))
        weakref.finalize(self, ring.drop, path).atexit = False
        return path

    def _table_of(self, array: Any) -> writes.Table:
        """Where `array` lies, after checking that it can be a target."""
        address = self.backend.check_array(array, "target")
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ValueError(
                f"target must have shape {self.shape} and dtype {self.dtype}, "
                f"got shape {array.shape}, dtype {array.dtype}"
            )
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ValueError("target must be writeable")
        row_bytes = self.row_length * self.dtype.itemsize
        if array.size > 0 and self.row_length > 1 and array.strides[1] != self.dtype.itemsize:
            raise ValueError(f"target's last dimension must be contiguous, got strides {array.strides}")
        stride = array.strides[0] if self.num_rows > 1 and array.size > 0 else row_bytes
        if stride < row_bytes:
            raise ValueError(f"target's rows overlap or run backwards: stride {stride} bytes, a row has {row_bytes}")
        unit = min(self.dtype.itemsize, 8)
        if address % unit or stride % unit:
            raise ValueError(f"target at {address:#x} with row stride {stride} is not aligned to its items")
        return writes.Table(address, stride, array, self.num_rows, row_bytes, unit)

    @property
    def num_staged(self) -> int:
        """Writes staged since the last apply."""
        return self._log.at // packing.RECORD_BYTES

    @property
    def stats(self) -> ring.Stats:
        """What this tensor's own applies have done so far."""
        return self._path.read_stats()

    def stage_write(self, index: int, start: int, x: Any) -> None:
        """Stage the write of `x` to row `index` from column `start` on.

        Parameters
        ----------
        index, start : int
            Row and first column.
        x : list, tuple, range, numpy.ndarray, array.array or iterable
            ``[n]``, host; no values is legal wherever ``0 <= start <= row_length``. Copied: it may be changed after.

        Raises
        ------
        IndexError
            The write does not lie inside its row.
        OverflowError
            A value does not fit the dtype, or a finite one would become infinite.
        TypeError
            A float for an int table, complex for a real one, None, text, a device array.
        ValueError
            An array with more than one dimension.

        Notes
        -----
        Where it raises, what was staged before is untouched. Nothing reaches the device before `apply_write`.
        """
        log = self._log
        if type(x) is not list or log.format is None:
            x = convert(x, self.dtype)
        length, at, end = len(x), log.at, log.end
        try:
            if not (0 <= index < self.num_rows and 0 <= start <= self.row_length - length):
                refuse(index, start, length, self.num_rows, self.row_length)
            if length == 1 and log.put_one is not None:
                log.put_one(log.records, at, index, start, packing.ONE_VALUE, x[0])
                length = 0  # of contents
            else:
                skip = 0
                if length >= log.long:  # to the same place modulo 16 as in the table: see `packing._direct_source`
                    to = self._table.address + index * self._table.stride + start * log.itemsize
                    skip = (to // log.itemsize - end) % (16 // log.itemsize)
                log.put_values(x, end + skip)
                log.put_record(log.records, at, index, start, length, end + skip)
                length += skip
        except (struct.error, OverflowError, TypeError, ValueError, DeprecationWarning):
            refuse_in_forked_child()
            check_ints(index, start)
            if at == log.max_at or end + len(x) + 16 > log.max_end:
                log.reserve(at // packing.RECORD_BYTES + 1, end + len(x) + 16)
                return self.stage_write(index, start, x)
            others = without_numpy_bools(x) if self.dtype.kind in "iu" else None
            if others is not None:
                return self.stage_write(index, start, others)
            if log.format is None:
                raise
            explain(x, self.dtype)
        if log.at != at or log.end != end:  # no call, so no other thread, comes between here and the end
            log.torn = True
            raise torn_error()
        log.end = end + length
        log.at = at + 32  # packing.RECORD_BYTES

    def stage_write_elem(self, index: int, x: Any) -> None:
        """Stage the write of the one value `x` to column 0 of row `index`; errors as `stage_write`."""
        self.stage_write(index, 0, [x])

    def stage_writes(self, indices: Any, starts: Any, contents: Any, cu_lens: Any) -> None:
        """Stage a batch of writes given as arrays; the fast way.

        Parameters
        ----------
        indices, starts, cu_lens : array of int
            ``[num_writes]``, host: row, first column, and inclusive running total of lengths; ``cu_lens[-1]`` is
            ``len(contents)``.
        contents : array, list or iterable
            ``[sum of lengths]``, host.

        Raises
        ------
        IndexError, OverflowError, TypeError, ValueError
            As `stage_write`; ValueError also for arrays of different length and running totals that do not fit. Then
            nothing of the batch is staged.
        RuntimeError
            Another thread is in a call of this tensor.

        Examples
        --------
        >>> table = StagedWriteTensor((3, 4), "int32", device="host")
        >>> table.stage_writes([0, 2], [1, 0], [5, 6, 7], [1, 3])
        >>> table.apply_write()
        >>> table.gpu.tolist()
        [[0, 5, 0, 0], [0, 0, 0, 0], [6, 7, 0, 0]]
        """
        with self._path.entered():
            self._log.stage_batch(indices, starts, contents, cu_lens, self.num_rows, self.row_length)

    def apply_write(self, stream: Any = None, wait_for: Any = ()) -> None:
        """Carry all staged writes into the table with one launch; the last staged wins where they overlap.

        Parameters
        ----------
        stream : optional
            A CuPy stream, or any object with ``__cuda_stream__``; the current stream of the tensor's device by default.
        wait_for : stream, event or iterable of them
            What was enqueued on them before this call is done before the kernel starts; the host does not wait.

        Raises
        ------
        CaptureError
            The stream or one in `wait_for` is being captured, or an event in it was recorded in a capture. Nothing was
            launched, and the writes stay staged.
        ValueError, TypeError
            A stream of another device; no stream at all.
        RuntimeError
            Another thread is in a call of this tensor, or the process was forked.
        CUDARuntimeError
            The launch failed; the writes stay staged.

        Notes
        -----
        Returns when the launch is enqueued. Later work on the stream sees the writes; applies of one tensor are in
        order also over streams. The host waits only where all slots are still being read.
        """
        self._path.apply(stream, wait_for)

    def clear_staged_writes(self) -> None:
        """Forget what is staged."""
        with self._path.entered():
            self._log.clear()

    def reserve(self, num_writes: int, num_values: int) -> None:
        """Make room for that many writes and values a step, so that no apply of that size allocates.

        Raises
        ------
        CaptureError
            The current stream is being captured.

        Notes
        -----
        Returns when its device work is done; waits for slots that are still being read.
        """
        check_capacity(num_writes, num_values)
        self._path.reserve(num_writes, num_values)
        with self._path.entered():
            self._log.reserve(num_writes, num_values)

    def rebind(self, array: Any) -> None:
        """Write to `array` from the next apply on; staged writes go there too. The old target is kept while in use.

        Parameters
        ----------
        array : cupy.ndarray
            Of this tensor's size and dtype, last dimension contiguous (numpy.ndarray on the host).

        Raises
        ------
        TypeError, ValueError
            Another shape, dtype, device or layout.
        CaptureError
            The current stream is being captured.
        """
        self.backend.check_current()
        table = self._table_of(array)
        users = [(path, group) for ref, group in self._users if (path := ref()) is not None]

        def exchange() -> None:
            prepared = [path.prepare_table(group, table) for path, group in users]  # all can, or none does
            finish(lambda: self._go_over(prepared, table, array))

        with self.backend.current():
            _call_inside([path for path, _ in users], exchange)
        ring.sweep()

    def _go_over(self, prepared: list[Callable[[], None]], table: writes.Table, array: Any) -> None:
        """Let all writers of the table go over to another; called again where an interrupt comes."""
        for path_goes_over in prepared:
            path_goes_over()
        self._table, self.gpu, self.np = table, array, None


def _call_inside(paths: list[writes.WritePath], call: Callable[[], None]) -> None:
    """Call `call` with other threads kept out of all `paths`."""
    if len(paths) == 0:
        call()
    else:
        with paths[0].entered():
            _call_inside(paths[1:], call)


class FusedStagedWriter:
    """Applies the staged writes of many tensors with one launch.

    Parameters
    ----------
    tensors : sequence of StagedWriteTensor
        Of one device and item size, not sharing memory.
    max_concurrency : int, optional
        Slots in the ring.

    Attributes
    ----------
    stats : Stats

    Raises
    ------
    TypeError
        A member is no StagedWriteTensor, or has another item size.
    ValueError
        No members, members on different devices, or members that share memory.
    CaptureError
        The current stream is being captured.

    Examples
    --------
    >>> a = StagedWriteTensor((2, 2), "int32", device="host")
    >>> b = StagedWriteTensor((2, 3), "int32", device="host")
    >>> writer = FusedStagedWriter([a, b])
    >>> a.stage_write(0, 0, [1]); b.stage_write(1, 2, [5])
    >>> writer.apply()
    >>> a.gpu.tolist(), b.gpu.tolist(), writer.stats.launches
    ([[1, 0], [0, 0]], [[0, 0, 0], [0, 0, 5]], 1)
    """

    def __init__(self, tensors: Sequence[StagedWriteTensor], *, max_concurrency: int | None = None) -> None:
        self.tensors = tuple(tensors)
        check_members(self.tensors)
        first = self.tensors[0]
        first.backend.check_current()  # CaptureError, before anything is made
        self._path = writes.WritePath(
            first.backend,
            first.dtype,
            [(t._log, group) for group, t in enumerate(self.tensors)],
            [t._table for t in self.tensors],
            len(self.tensors) > 1,
            max_concurrency,
            any(t._copies for t in self.tensors),
        )
        for group, tensor in enumerate(self.tensors):
            tensor._users.append((weakref.ref(self._path), group))
        weakref.finalize(self, ring.drop, self._path).atexit = False

    @property
    def stats(self) -> ring.Stats:
        """What this writer has done so far."""
        return self._path.read_stats()

    def apply(self, stream: Any = None, wait_for: Any = ()) -> None:
        """Carry all staged writes of all members into their tables; as `StagedWriteTensor.apply_write`."""
        self._path.apply(stream, wait_for)

    def refresh_pointers(self, stream: Any = None) -> None:
        """Rewrite the device's table addresses after a `rebind`, in place and in the order of `stream`.

        `apply` does it where it is needed; call it where a captured graph reads the addresses before the next apply.

        Raises
        ------
        CaptureError
            The stream is being captured.
        """
        self._path.refresh_pointers(stream)

    def reserve(self, num_writes: int, num_values: int) -> None:
        """Make room for that many writes and values a step, over all members; see `StagedWriteTensor.reserve`."""
        check_capacity(num_writes, num_values)
        self._path.reserve(num_writes, num_values)
        for tensor in self.tensors:
            with tensor._path.entered():
                tensor._log.reserve(num_writes, num_values)


def check_members(tensors: tuple[StagedWriteTensor, ...]) -> None:
    """Raise where `tensors` cannot be written by one launch."""
    if not tensors:
        raise ValueError("tensors must name at least one StagedWriteTensor, got none")
    if len(tensors) > packing.MAX_GROUPS:
        raise ValueError(f"tensors must be at most {packing.MAX_GROUPS}, got {len(tensors)}")
    for group, tensor in enumerate(tensors):
        if not isinstance(tensor, StagedWriteTensor):
            raise TypeError(f"tensors[{group}] must be a StagedWriteTensor, got {type(tensor).__name__}")
        if tensor.dtype.itemsize != tensors[0].dtype.itemsize:
            raise TypeError(
                f"tensors[{group}] has items of {tensor.dtype.itemsize} bytes, "
                f"tensors[0] of {tensors[0].dtype.itemsize}: make one writer for each item size"
            )
        if tensor.backend is not tensors[0].backend:
            raise ValueError(f"tensors[{group}] lives on another device than tensors[0]")
        for other in range(group):
            if tensors[other]._table.shares_memory(tensor._table):
                raise ValueError(
                    f"tensors[{other}] and tensors[{group}] share memory: their writes would have no order"
                )
