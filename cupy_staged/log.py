"""The write log: writes staged since the last apply, as typed host arrays that the packer reads.

A log belongs to one tensor (or one BlockTables). Staging touches the host only: it makes no CUDA call, so that it may
go on inside a capture.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from . import packing, ring
from .backends import Pinned
from .values import FORMATS, as_int64, convert, pack_values, refuse

NEVER = 1 << 62
SLACK = 16  # the packer reads whole 8-byte words past the last value


class Contents:
    """One block of staged values: plain host memory, or pinned so that the kernel can read long writes in place.

    `direct` is the address of what the packer needs to know for that, 0 where the memory is not pinned. `replaced` is
    the pinned block whose place this one took, and whose facts the packer still has.
    """

    __slots__ = ("_direct", "address", "array", "bytes", "capacity", "direct", "replaced", "values")

    def __init__(self, dtype: np.dtype, capacity: int, pinned: Pinned | None = None) -> None:
        nbytes = capacity * dtype.itemsize
        self.capacity = capacity
        self.array = np.zeros(nbytes + SLACK, np.uint8) if pinned is None else pinned.array
        self.address = self.array.ctypes.data
        self.direct = 0
        self.replaced: Contents | None = None
        if pinned is not None:
            facts = (pinned.address, pinned.address + nbytes, pinned.device_address - pinned.address)
            self._direct = np.array(facts, np.int64)
            self.direct = self._direct.ctypes.data
        self.bytes = memoryview(self.array[:nbytes])  # type: ignore[arg-type]
        self.values = self.array[:nbytes].view(dtype)


class WriteLog:
    """Writes staged since the last apply: records, and the values of those that are longer than one.

    Whoever stages moves `at` and `end` last, so that a failed call leaves nothing behind; it sets `torn` where another
    thread moved them meanwhile. The header, which the packer reads and empties, gets them at apply; a log that jitted
    code fills (`jitted`) counts in the header alone.

    Attributes
    ----------
    at, end : int
        Bytes of records and number of values staged; `max_at` and `max_end` are the capacities.
    records, contents : memoryview
        Bytes of both; what lies past their ends raises. `values` are the contents as an array.
    ring : list of Contents
        One block, or one more than there are slots to read them: see `WritePath`. `turn` is the one in use.
    put_one, put_record : callable
        Write a record with its one value (None where the table does not hold integers), or without.
    header : memoryview
        int64: see `packing`.
    """

    __slots__ = (
        "_records", "address", "at", "contents", "dtype", "end", "flushed", "format", "header", "itemsize",
        "jitted", "long",
        "max_at", "max_end", "put_one", "put_record", "records", "ring", "torn", "turn", "values",
    )  # fmt: skip

    def __init__(self, dtype: np.dtype, jitted: bool = False) -> None:
        self.dtype = dtype
        self.itemsize = dtype.itemsize
        self.format = FORMATS.get(dtype)
        self.jitted = jitted
        self.put_record = struct.Struct("=4q").pack_into
        self.put_one = struct.Struct(f"=3q{self.format}").pack_into if dtype.kind in "iu" else None
        header = np.zeros(packing.LOG_FIELDS, np.int64)
        self._records: np.ndarray
        self.header = memoryview(header)  # type: ignore[arg-type]
        self.header[packing.LOG_MAY_OVERLAP] = 1
        self.address = header.ctypes.data
        self.at = self.end = self.max_at = self.max_end = self.flushed = 0
        self.torn = False
        self.long = NEVER  # values from which on a write is laid for the kernel to read it in place
        self.turn = 0
        self.ring = [Contents(dtype, 1024)]
        self.use(self.ring[0])
        self.reserve(64, 0)

    def reserve(self, num_writes: int, num_values: int) -> None:
        """Make room for that many writes and values in all, keeping what is staged."""
        if num_writes * packing.RECORD_BYTES > self.max_at:
            size = ring.grown_size(num_writes)
            records = np.zeros(size * packing.RECORD_BYTES, np.uint8)
            if self.max_at:
                records[: self.max_at] = self._records[: self.max_at]
            view, address = memoryview(records), records.ctypes.data  # type: ignore[arg-type]
            # From here on there is no call, so no interrupt: packer and stagers go over to the new records at once.
            self.header[packing.LOG_RECORDS], self.header[packing.LOG_MAX_WRITES] = address, size
            self._records = records
            self.records = view
            self.max_at = size * packing.RECORD_BYTES
        if num_values > self.max_end:
            grown = Contents(self.dtype, ring.grown_size(num_values))  # not pinned: staging calls no CUDA
            grown.array[: len(self.contents)] = self.contents
            old = self.ring[self.turn]
            grown.replaced = old if old.direct else old.replaced
            self.ring[self.turn] = grown
            self.use(grown)

    def use(self, contents: Contents) -> None:
        """Stage values into `contents` from now on."""
        self.contents, self.values, self.max_end = contents.bytes, contents.values, contents.capacity
        self.header[packing.LOG_CONTENTS] = contents.address
        self.header[packing.LOG_MAX_VALUES] = contents.capacity

    def put_values(self, values: Any, at: int) -> None:
        """Convert `values` (from `convert`) into the log from value `at` on."""
        if isinstance(values, np.ndarray):
            if at + len(values) > self.max_end:  # NumPy would broadcast one value into no room at all
                raise ValueError("no room")
            self.values[at : at + len(values)] = values
        else:
            pack_values(values, self.dtype, self.contents, at)

    def stage_batch(self, rows: Any, starts: Any, contents: Any, cu_lens: Any, num_rows: int, row_length: int) -> None:
        """Note a batch of writes of group 0, after checking all of it; nothing changes where it raises."""
        rows, starts, cu_lens = (
            as_int64(values, name) for values, name in ((rows, "indices"), (starts, "starts"), (cu_lens, "cu_lens"))
        )
        if not len(rows) == len(starts) == len(cu_lens):
            raise ValueError(
                f"indices, starts and cu_lens must have one length, got {len(rows)}, {len(starts)} and {len(cu_lens)}"
            )
        values = convert(contents, self.dtype)
        at, end = self.at, self.end
        self.reserve(at // packing.RECORD_BYTES + len(rows), 0)
        bad = packing.check_batch(
            self.header[packing.LOG_RECORDS] + at,
            end,
            rows,
            starts,
            cu_lens,
            len(values),
            num_rows,
            row_length,
        )
        if bad >= 0:
            code, w = bad >> 48, bad & ((1 << 48) - 1)
            before = int(cu_lens[w - 1]) if w else 0
            if code == packing.LENGTHS_WRONG:
                raise ValueError(
                    f"cu_lens must rise to len(contents) = {len(values)}, "
                    f"got {cu_lens[w] if w < len(rows) else before} after {before} at write {w}"
                )
            refuse(int(rows[w]), int(starts[w]), int(cu_lens[w]) - before, num_rows, row_length, f"write {w}: ")
        self.reserve(0, end + len(values))  # not before: a refused batch takes no memory for its values
        self.put_values(values, end)
        if self.at != at or self.end != end:
            self.torn = True
            raise torn_error()
        self.end = end + len(values)
        self.at = at + packing.RECORD_BYTES * len(rows)

    def clear(self) -> None:
        """Forget what is staged."""
        self.torn = False
        self.at = self.end = self.header[packing.LOG_WRITES] = self.header[packing.LOG_VALUES] = 0

    def seal(self) -> None:
        """Let every further write fail: see `device.guard_against_fork`."""
        self.records = memoryview(b"")

    def restore(self) -> None:
        """Stage again what the last pack took; `at` and `end` stand until a launch has gone through."""
        header = self.header
        header[packing.LOG_WRITES], header[packing.LOG_VALUES] = (
            header[packing.LOG_LAST_WRITES],
            header[packing.LOG_LAST_VALUES],
        )


def torn_error() -> RuntimeError:
    """Two threads staged on one log at once."""
    return RuntimeError("staged writes are torn: two threads staged at once; clear_staged_writes() and stage again")
