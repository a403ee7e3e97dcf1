"""One write's way: staged into a log, packed into a slot, launched, fenced.

A `WriteLog` belongs to one tensor (or one BlockTables) and holds typed host arrays. A `WritePath` owns the ring of slots
and carries the writes of one or many logs into their tables with one launch, on the stream given. It goes one way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from . import kernels, packing, ring
from .device import Backend, Pinned, guard_against_fork, is_forked_child

COPY_BYTES = 1 << 62  # "auto" for a device table: docs/performance.md has the measured crossover
FIRST_SLOT_BYTES = 1 << 15
SLACK = 16  # the packer reads whole 8-byte words past the last value

# What struct can pack; it checks kind and range of each value, and is the fastest way measured from a list.
_FORMATS = {np.dtype(c): c for c in "bBhHiIqQefd"}


def convert(values: Any, dtype: np.dtype) -> np.ndarray | list[Any] | tuple[Any, ...] | range:
    """`values` as a list, tuple or range for struct, or as a 1-D contiguous array of `dtype` with every value checked.

    Raises
    ------
    TypeError
        `values` is text, None, a device array, no iterable, or of a kind that the table does not hold.
    OverflowError
        A value does not fit `dtype`.
    ValueError
        An array has more or fewer than one dimension.
    """
    if not isinstance(values, np.ndarray):
        if hasattr(values, "__cuda_array_interface__"):
            raise TypeError("values must lie on the host: a device array would have to be read back")
        if isinstance(values, (str, bytes, bytearray, dict)) or not (
            isinstance(values, Iterable) or hasattr(values, "__array__")
        ):
            raise TypeError(f"values must be a list, tuple, range, array or iterable of numbers, got {type(values).__name__}")
        if hasattr(values, "__array__") or hasattr(values, "typecode"):
            values = np.asarray(values)
        else:
            if not isinstance(values, (list, tuple, range)):
                values = list(values)
            if dtype in _FORMATS:
                return values  # type: ignore[no-any-return]
            values = _array_of(values, dtype)
    if values.ndim != 1:
        raise ValueError(f"values must have one dimension, got shape {values.shape}")
    if values.dtype == dtype:
        return np.ascontiguousarray(values)
    return _cast(values, dtype)


def _array_of(values: Any, dtype: np.dtype) -> np.ndarray:
    """A list as an array, for the dtypes that struct does not know (bool, complex)."""
    try:
        found = np.array(values) if len(values) else np.empty(0, dtype)
    except ValueError:
        raise TypeError(f"values must be numbers, got a nested list for {dtype}") from None
    return found


def _cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`values` converted to `dtype`; nothing wraps, nothing loses its fraction, no finite value becomes infinite."""
    kind, wanted = values.dtype.kind, dtype.kind
    if kind == "O":
        values = _array_of(values.tolist(), dtype)
        kind = values.dtype.kind
        if kind == "O" and all(isinstance(v, int) for v in values.tolist()):
            raise OverflowError(f"a value does not fit {dtype}")
    order = "biufc"
    if kind not in order:
        raise TypeError(f"values of dtype {values.dtype} cannot go into a table of {dtype}")
    if (kind == "c" and wanted != "c") or (kind == "f" and wanted in "biu"):
        raise TypeError(f"values of dtype {values.dtype} cannot go into a table of {dtype}: round or convert them first")
    if values.size == 0:
        return np.empty(0, dtype)
    if wanted in "biu":
        low, high = (0, 1) if wanted == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        smallest, largest = int(values.min()), int(values.max())
        if smallest < low or largest > high:
            bad = smallest if smallest < low else largest
            raise OverflowError(f"value {bad} does not fit {dtype} ({low} to {high})")
        return values.astype(dtype)
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    if kind in "fc" or values.dtype.itemsize >= dtype.itemsize:
        lost = np.isinf(cast) & ~np.isinf(values) if kind in "fc" else np.isinf(cast)
        if lost.any():
            raise OverflowError(f"value {values[int(lost.argmax())]!r} does not fit {dtype}: it would become infinite")
    return cast


def _explain(values: Any, dtype: np.dtype) -> NoReturn:
    """Say which value of a list struct refused, and why."""
    for position, value in enumerate(values):
        try:
            struct.pack(_FORMATS[dtype], value)
        except OverflowError:
            raise OverflowError(f"value {value!r} at position {position} does not fit {dtype}") from None
        except struct.error:
            if dtype.kind in "iu" and hasattr(value, "__index__"):
                raise OverflowError(f"value {value!r} at position {position} does not fit {dtype}") from None
            raise TypeError(f"value {value!r} at position {position} cannot go into a table of {dtype}") from None
    raise TypeError(f"values cannot go into a table of {dtype}")


def pack_values(values: Any, dtype: np.dtype, into: Any, at: int) -> None:
    """Write a list, tuple or range into the bytes of `into` from element `at` on, checking every value."""
    try:
        struct.pack_into(f"{len(values)}{_FORMATS[dtype]}", into, at * dtype.itemsize, *values)
    except (struct.error, OverflowError):
        _explain(values, dtype)


class WriteLog:
    """Writes staged since the last apply: records of (group, row, start, length), and their values back to back.

    Attributes
    ----------
    header : memoryview
        int64: writes, values, and where both arrays lie. The packer reads it and sets both counts to 0; whoever stages
        adds to them last, so that a failed call leaves nothing behind.
    address : int
        Of the header.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.format = _FORMATS.get(dtype)
        self._one = struct.Struct(self.format).pack_into if self.format else None
        self._record = struct.Struct("4q").pack_into
        header = np.zeros(packing.LOG_FIELDS, np.int64)
        self._header = header
        self.header = memoryview(header)  # type: ignore[arg-type]
        self.address = header.ctypes.data
        self.num_writes = 0  # capacities
        self.num_values = 0
        self.reserve(64, 1024)

    def reserve(self, num_writes: int, num_values: int) -> None:
        """Make room for that many writes and values in all, keeping what is staged."""
        if num_writes > self.num_writes:
            records = np.zeros(ring.grown_size(num_writes) * packing.RECORD_BYTES, np.uint8)
            used = self.header[packing.LOG_WRITES] * packing.RECORD_BYTES
            if used:
                records[:used] = self._records[:used]
            self._records = records
            self.records = memoryview(records)  # type: ignore[arg-type]
            self.header[packing.LOG_RECORDS] = records.ctypes.data
            self.num_writes = ring.grown_size(num_writes)
        if num_values > self.num_values:
            size = ring.grown_size(num_values)
            contents = np.zeros(size * self.dtype.itemsize + SLACK, np.uint8)
            used = self.header[packing.LOG_VALUES] * self.dtype.itemsize
            if used:
                contents[:used] = self._contents[:used]
            self._contents = contents
            self.contents = memoryview(contents)  # type: ignore[arg-type]
            self.values = contents[: size * self.dtype.itemsize].view(self.dtype)
            self.header[packing.LOG_CONTENTS] = contents.ctypes.data
            self.num_values = size

    def put_values(self, values: Any, at: int) -> None:
        """Convert `values` (from `convert`) into the log from value `at` on; the counts stay."""
        if isinstance(values, np.ndarray):
            self.values[at : at + len(values)] = values
        else:
            pack_values(values, self.dtype, self.contents, at)

    def stage(self, row: int, start: int, values: Any, num_rows: int, row_length: int) -> None:
        """Note one write of group 0, after checking it; nothing changes where it raises."""
        if type(values) is not list:
            values = convert(values, self.dtype)
        elif self.format is None:
            values = convert(values, self.dtype)
        length = len(values)
        if not (0 <= row < num_rows and 0 <= start <= row_length - length):
            refuse(row, start, length, num_rows, row_length)
        header = self.header
        num_writes = header[0]
        num_values = header[1]
        if num_writes == self.num_writes or num_values + length > self.num_values:
            self.reserve(num_writes + 1, num_values + length)
        if length == 1 and self._one is not None:
            try:
                self._one(self.contents, num_values * self.dtype.itemsize, values[0])
            except (struct.error, OverflowError):
                _explain(values, self.dtype)
        else:
            self.put_values(values, num_values)
        try:
            self._record(self.records, num_writes * 32, 0, row, start, length)
        except struct.error:
            raise TypeError(f"row and start must be ints, got {row!r} and {start!r}") from None
        header[1] = num_values + length
        header[0] = num_writes + 1

    def stage_batch(
        self, rows: Any, starts: Any, contents: Any, cu_lens: Any, num_rows: int, row_length: int
    ) -> None:
        """Note a batch of writes of group 0, after checking all of it; nothing changes where it raises."""
        rows, starts, cu_lens = (
            as_int64(values, name) for values, name in ((rows, "indices"), (starts, "starts"), (cu_lens, "cu_lens"))
        )
        if not len(rows) == len(starts) == len(cu_lens):
            raise ValueError(
                f"indices, starts and cu_lens must have one length, got {len(rows)}, {len(starts)} and {len(cu_lens)}"
            )
        values = convert(contents, self.dtype)
        num_writes, num_values = self.header[0], self.header[1]
        self.reserve(num_writes + len(rows), num_values + len(values))
        bad = packing.check_batch(
            self.address,
            rows.ctypes.data,
            starts.ctypes.data,
            cu_lens.ctypes.data,
            len(rows),
            len(values),
            num_rows,
            row_length,
        )
        if bad >= 0:
            code, w = bad >> 48, bad & ((1 << 48) - 1)
            before = int(cu_lens[w - 1]) if w else 0
            if code == packing.LENGTHS_WRONG:
                raise ValueError(
                    f"cu_lens must rise to len(contents) = {len(values)}, got {cu_lens[w] if w < len(rows) else before} "
                    f"after {before} at write {w}"
                )
            refuse(int(rows[w]), int(starts[w]), int(cu_lens[w]) - before, num_rows, row_length, f"write {w}: ")
        self.put_values(values, num_values)
        self.header[1] = num_values + len(values)
        self.header[0] = num_writes + len(rows)

    def clear(self) -> None:
        """Forget what is staged."""
        self.header[0] = 0
        self.header[1] = 0

    def restore(self) -> None:
        """Stage again what the last pack took."""
        self.header[0] = self.header[packing.LOG_LAST_WRITES]
        self.header[1] = self.header[packing.LOG_LAST_VALUES]


def refuse(row: int, start: int, length: int, num_rows: int, row_length: int, which: str = "") -> NoReturn:
    """Raise the IndexError of a write outside its table."""
    if not 0 <= row < num_rows:
        rule = f"row {row} is not one of the {num_rows} rows (start {start}, length {length}"
    elif start < 0:
        rule = f"start {start} is negative (length {length}"
    else:
        rule = f"start {start} + length {length} exceeds row length {row_length} (row {row}"
    raise IndexError(f"{which}{rule} of a ({num_rows}, {row_length}) table)")


def as_int64(values: Any, name: str) -> np.ndarray:
    """`values` as a contiguous ``[n] int64`` array; TypeError for anything but ints, ValueError for other shapes."""
    if hasattr(values, "__cuda_array_interface__"):
        raise TypeError(f"{name} must lie on the host, got a device array")
    found = np.asarray(values)
    if found.size == 0:
        found = found.astype(np.int64)
    if found.dtype.kind not in "iu":
        raise TypeError(f"{name} must be ints, got dtype {found.dtype}")
    if found.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {found.shape}")
    if found.dtype == np.uint64 and found.size and int(found.max()) > np.iinfo(np.int64).max:
        raise OverflowError(f"{name} holds {found.max()}, which does not fit int64")
    return np.ascontiguousarray(found, np.int64)


class Table:
    """Where the writes of one group go.

    `address` is the base in bytes on the device, `stride` the bytes from row to row, `kept` what keeps it alive.
    """

    def __init__(self, address: int, stride: int, kept: Any) -> None:
        self.address = address
        self.stride = stride
        self.kept = kept


class WritePath:
    """Packs the writes of its logs into a slot and launches the kernel that carries them into their tables.

    Parameters
    ----------
    logs : list of (WriteLog, int)
        Each with the group that its record's group 0 is.
    tables : list of Table
        One a group.
    grouped : bool
        Whether the kernel finds the tables through an array of addresses.
    copy_bytes : int
        Slots of at least so many bytes are copied to the device before the launch.
    """

    def __init__(
        self,
        backend: Backend,
        dtype: np.dtype,
        logs: list[tuple[WriteLog, int]],
        tables: list[Table],
        grouped: bool,
        max_concurrency: int | None,
        copy_bytes: int,
    ) -> None:
        ring.sweep()
        packing.compile_all()
        num_slots = ring.check_max_concurrency(max_concurrency)
        self.backend = backend
        self.lock = threading.Lock()
        self.stats = ring.Stats(slots=num_slots)
        self._logs = logs
        self.tables = tables
        self._unit = min(dtype.itemsize, 8)
        self._itemsize = dtype.itemsize
        self._event = backend.new_event()
        self._fences = ring.FenceWords(backend, num_slots, self.stats)
        self._done = self._fences.words
        self._last = 0  # slot and stream of the last launch
        self._last_stream: Any = None
        self._last_ptr = -1
        self._next = 0
        self.stale = False  # a table was exchanged, the pointers on the device are old
        self.targets = kernels.Targets(backend, np.array([[t.address for t in tables], [t.stride for t in tables]], np.int64), grouped)

        desc = np.zeros(packing.SLOTS + packing.SLOT_FIELDS * num_slots, np.int64)
        self._desc = desc
        self._words = memoryview(desc)  # type: ignore[arg-type]
        self._address = desc.ctypes.data
        self._log_table = np.array([(log.address, first) for log, first in logs], np.int64)
        self._groups = np.zeros((len(tables), packing.GROUP_FIELDS), np.int64)
        self._shapes = kernels.shape_table()
        words = self._words
        words[packing.UNIT], words[packing.SCALE] = self._unit, dtype.itemsize // self._unit
        words[packing.LOGS], words[packing.NUM_LOGS] = self._log_table.ctypes.data, len(logs)
        words[packing.GROUPS], words[packing.NUM_GROUPS] = self._groups.ctypes.data, len(tables)
        words[packing.SHAPES], words[packing.NUM_SHAPES] = self._shapes.ctypes.data, len(self._shapes)
        words[packing.COPY_BYTES] = copy_bytes
        self._num_bytes = words[packing.NUM_BYTES : packing.NUM_BYTES + 1]
        self._sequences = [packing.SLOTS + packing.SLOT_FIELDS * i + packing.SLOT_SEQUENCE for i in range(num_slots)]
        self._slots = [Pinned(np.empty(0, np.uint8), 0)] * num_slots
        self._launch: list[list[kernels.Launcher]] = [[] for _ in range(num_slots)]
        self._kept: list[list[Any]] = [[] for _ in range(num_slots)]
        self._note_tables()
        self._make_room(packing.GROW_PIECES, 0, 3 * 64)
        self._make_room(packing.GROW_TABLE, 0, 256)
        for slot in range(num_slots):
            self._make_room(packing.GROW_SLOT, slot, max(FIRST_SLOT_BYTES, self.targets.facts.nbytes))
        self.stats.growths = 0
        if backend.id is not None:
            guard_against_fork(self)

    # -- the hot path ------------------------------------------------------------------------------------------------

    def apply(self, stream: Any = None, wait_for: Any = ()) -> None:
        """Carry all staged writes into their tables, on `stream` or the device's current one; does not wait for it."""
        if not self.lock.acquire(False):
            self._refuse()
        try:
            if self.backend.elsewhere():
                with self.backend.current():
                    self._apply(stream, wait_for)
            else:
                self._apply(stream, wait_for)
        finally:
            self.lock.release()

    def _apply(self, stream: Any, wait_for: Any) -> None:
        stream = self.backend.stream(stream)
        ptr = stream.ptr
        if wait_for != ():
            for event in self.backend.events_of(wait_for):
                self.backend.wait_event(ptr, event)
        if ptr != self._last_ptr:
            self._order(ptr)
        if self.stale:
            self._refresh(stream)
        slot = self._next
        if self._done[8 * slot] != self._words[self._sequences[slot]]:
            self._wait(slot)
        shape = packing.pack(self._address, slot)
        while shape < 0:
            if shape == packing.NOTHING:
                return
            self._make_room(shape, slot, self._words[packing.NEED])
            shape = packing.pack(self._address, slot)
        try:
            self._last_stream, self._last_ptr = stream, ptr
            self._launch[slot][shape](ptr)
        except BaseException:
            self._recover(slot, stream)
            raise
        finally:
            self._last = slot
        self._next = slot + 1 if slot + 1 < len(self._slots) else 0

    # -- what happens now and then -----------------------------------------------------------------------------------

    def _refuse(self) -> NoReturn:
        if is_forked_child():
            raise RuntimeError("CUDA was in use when this process was forked: make new objects in a spawned process")
        raise RuntimeError("this object is in use by another thread: give each thread its own, or lock around the calls")

    def marks(self) -> list[tuple[memoryview, int, int]]:
        """The fences of everything that this path has launched."""
        return [(self._done, 8 * slot, self._words[at]) for slot, at in enumerate(self._sequences)]

    def _wait(self, slot: int) -> None:
        self._fences.wait(slot, self._words[self._sequences[slot]], self._last_stream)

    def _order(self, ptr: int) -> None:
        """Let work on stream `ptr` start after the last launch, which went to another stream."""
        if self._done[8 * self._last] != self._words[self._sequences[self._last]]:
            self.backend.wait_event(ptr, self._event)

    def _recover(self, slot: int, stream: Any) -> None:
        """After a launch that raised: find out whether it ran all the same, and if not, stage its writes again."""
        with contextlib.suppress(Exception):  # the first error is the one to show
            for _ in range(1000):
                if self.backend.check_health(stream):
                    break
                time.sleep(1e-3)
        at = self._sequences[slot]
        if self._done[8 * slot] != self._words[at]:
            self._words[at] = self._done[8 * slot]
            for log, _ in self._logs:
                log.restore()
            self._words[packing.TOTAL_LAUNCHES] -= 1

    def _note_tables(self) -> None:
        """Tell the packer and the kernels where the tables are."""
        for group, table in enumerate(self.tables):
            if table.stride % self._unit or table.address % self._unit:
                raise ValueError(f"target at {table.address:#x} with row stride {table.stride} is not aligned to its items")
            self._groups[group, packing.GROUP_STRIDE] = table.stride // self._unit
            self._groups[group, packing.GROUP_BASE] = table.address
            self.targets.facts[:, group] = table.address, table.stride

    def _make_room(self, what: int, slot: int, needed: int) -> None:
        """Replace what was too small by the next power of two."""
        if what == packing.TORN:
            raise RuntimeError("staged writes are torn: two threads staged on one object at once; stage again")
        size = ring.grown_size(needed)
        if what == packing.GROW_PIECES:
            self._pieces = np.zeros(size * packing.PIECE_BYTES, np.uint8)
            self._words[packing.PIECES], self._words[packing.PIECES_CAPACITY] = self._pieces.ctypes.data, size
        elif what == packing.GROW_TABLE:
            self._table = np.zeros(size * 16, np.uint8)
            self._words[packing.TABLE], self._words[packing.TABLE_CAPACITY] = self._table.ctypes.data, size
            self._words[packing.TABLE_EPOCH] = 0
        else:
            ring.sweep()
            block = self.backend.pinned(size)  # the slot is free: what it replaces has no reader left
            self._slots[slot] = block
            self._launch[slot], self._kept[slot] = self._launchers(slot, block)
            at = packing.SLOTS + packing.SLOT_FIELDS * slot
            self._words[at + packing.SLOT_ADDRESS], self._words[at + packing.SLOT_CAPACITY] = block.address, size
            self.stats.growths += 1
            self.stats.host_allocations += 1

    def _launchers(self, slot: int, block: Pinned) -> tuple[list[kernels.Launcher], list[Any]]:
        fence = (self._fences.block, 8 * slot)
        return kernels.make_launchers(
            self.backend, self._unit, block, fence, self.targets, self._event, self._num_bytes
        )

    def exclusive(self) -> contextlib.AbstractContextManager[Any]:
        """Keep other threads out, and make the device current."""
        return _Exclusive(self)

    def reserve(self, num_writes: int, num_values: int) -> None:
        """Make slots and scratch large enough for that many writes and values in one apply."""
        with self.exclusive():
            self.backend.stream(None)
            num_bytes = num_values * self._itemsize
            tiles = num_writes + num_bytes // packing.MIN_TILE + 1
            lines = min(8 * num_writes, num_bytes) // 31 + 2 + min(tiles, 512)
            lines = next((blocks * threads // 32 for blocks, threads, _ in kernels.SHAPES if lines <= blocks * threads // 32), lines)
            needed = 512 * lines + 32 * max(tiles, 1056) + num_bytes + 32 * num_writes + 64
            if 3 * num_writes > self._words[packing.PIECES_CAPACITY]:
                self._make_room(packing.GROW_PIECES, 0, 3 * num_writes)
            blocks = 2 * (2 * num_writes + num_bytes // self._unit // 64)
            if blocks > self._words[packing.TABLE_CAPACITY]:
                self._make_room(packing.GROW_TABLE, 0, blocks)
            for slot, block in enumerate(self._slots):
                if needed > block.array.nbytes:
                    if self._done[8 * slot] != self._words[self._sequences[slot]]:
                        self._wait(slot)
                    self._make_room(packing.GROW_SLOT, slot, needed)

    def set_table(self, group: int, table: Table) -> None:
        """Go over to another table for `group`, from the next apply on; the old one is retired. Called exclusively."""
        ring.retire(self.marks(), (self.tables, list(self._kept)))
        self.tables = [*self.tables[:group], table, *self.tables[group + 1 :]]
        self._note_tables()
        self.stale = True
        if not self.targets.grouped:  # graphs hold the address: made anew
            for slot, block in enumerate(self._slots):
                self._launch[slot], self._kept[slot] = self._launchers(slot, block)
        ring.sweep()

    def refresh_pointers(self, stream: Any = None) -> None:
        """Rewrite the device's array of table addresses in place, in the order of `stream`."""
        with self.exclusive():
            stream = self.backend.stream(stream)
            self._order(stream.ptr)
            self._refresh(stream)

    def _refresh(self, stream: Any) -> None:
        slot = self._next
        block = self._slots[slot]
        if self._done[8 * slot] != self._words[self._sequences[slot]]:
            self._wait(slot)
        facts = self.targets.facts
        block.array[: facts.nbytes] = facts.reshape(-1).view(np.uint8)
        sequence = self._words[self._sequences[slot]] % 255 + 1
        self._words[self._sequences[slot]] = sequence
        self._last, self._last_stream, self._last_ptr = slot, stream, stream.ptr
        self._next = (slot + 1) % len(self._slots)
        self.backend.copy(self.targets.device_address, block.address, facts.nbytes, stream.ptr)
        self.backend.signal(self._fences.block, 8 * slot, sequence, stream.ptr)
        self.backend.record(self._event, stream.ptr)
        self.stale = False

    def read_stats(self) -> ring.Stats:
        """The counts so far."""
        words = self._words
        return dataclasses.replace(
            self.stats,
            launches=words[packing.TOTAL_LAUNCHES],
            writes=words[packing.TOTAL_WRITES],
            values=words[packing.TOTAL_VALUES],
            bytes=words[packing.TOTAL_BYTES],
            copies=words[packing.TOTAL_COPIES] if self.backend.uva else words[packing.TOTAL_LAUNCHES],
        )


class _Exclusive:
    """Holds a path's lock, with its device current."""

    def __init__(self, path: WritePath) -> None:
        self._path = path
        self._device = path.backend.current()

    def __enter__(self) -> None:
        if not self._path.lock.acquire(False):
            self._path._refuse()
        self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._device.__exit__(*error)
        self._path.lock.release()
