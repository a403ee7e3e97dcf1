"""From the log to the tables: pack into a slot, launch, fence.

A `WritePath` owns the ring of slots and carries the writes of one or many logs (`log.py`) into their tables with one
launch, on the stream given. It goes one way.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from . import kernels, packing, ring
from .backends import PER_THREAD_STREAM, Backend, Pinned, drain
from .device import guard_against_fork, refuse_entry
from .log import NEVER, SLACK, Contents, WriteLog, torn_error

AUTO_COPIES = False  # "auto" for a device table: a copy first never paid, docs/performance.md has the data
FIRST_SLOT_BYTES = 1 << 15
MAX_NOTED = 1 << 20  # entries of a packer's note: of 1 Mi rows, or of 32 Mi units, 8 MiB


def no_launch(_stream: int) -> None:
    """Stands where there is no launcher yet, or none any more."""
    raise RuntimeError("a rebind was interrupted over and over: rebind once more, what was staged is still staged")


class Table:
    """Where the writes of one group go.

    `address` is the base in bytes on the device, `stride` the bytes from row to row, `kept` what keeps it alive, `unit`
    the bytes of a unit; `rows_noted` and `cells_noted` are the packer's notes of what a pack has written.
    """

    def __init__(self, address: int, stride: int, kept: Any, num_rows: int, row_bytes: int, unit: int) -> None:
        self.address = address
        self.stride = stride
        self.kept = kept
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        blocks = -(-num_rows * stride // unit // 32)
        self.rows_noted = np.zeros(min(ring.grown_size(num_rows), MAX_NOTED), np.int32)
        self.cells_noted = np.zeros(min(ring.grown_size(blocks), MAX_NOTED), np.int64)

    def shares_memory(self, other: Table) -> bool:
        """Whether two tables may have a cell in common; column slices of one array do not."""
        a, b = (self, other) if self.address <= other.address else (other, self)
        if 0 in (a.num_rows, a.row_bytes, b.num_rows, b.row_bytes):
            return False
        if b.address >= a.address + (a.num_rows - 1) * a.stride + a.row_bytes:
            return False
        if a.num_rows == 1:
            return True
        offset = (b.address - a.address) % a.stride
        apart = offset >= a.row_bytes and offset + b.row_bytes <= a.stride
        return not (apart and (b.num_rows == 1 or b.stride % a.stride == 0))


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
    copies : bool
        Whether slots are copied to the device before the launch; they always are without UVA memory.
    """

    def __init__(
        self,
        backend: Backend,
        dtype: np.dtype,
        logs: list[tuple[WriteLog, int]],
        tables: list[Table],
        grouped: bool,
        max_concurrency: int | None,
        copies: bool,
    ) -> None:
        ring.sweep()
        packing.compile_all()
        num_slots = ring.check_max_concurrency(max_concurrency)
        self.backend = backend
        self.lock = threading.Lock()
        self.stats = ring.Stats(slots=num_slots)
        self.logs = [log for log, _ in logs]
        self._counted = [log for log in self.logs if not log.jitted]
        self.tables = tables
        self._unit = min(dtype.itemsize, 8)
        self._itemsize = dtype.itemsize
        self._event = backend.new_event()
        self._fences = ring.FenceWords(backend, num_slots, self.stats)
        self._done = self._fences.words
        self._last_stream: Any = None  # of the last launch; kept, so that its address is not given to another
        self._last_ptr = -1
        self._stale = False  # a table was exchanged, the addresses on the device are old
        self.targets = kernels.Targets(
            backend, np.array([[t.address for t in tables], [t.stride for t in tables]], np.int64), grouped
        )

        desc = np.zeros(packing.SLOTS + packing.SLOT_FIELDS * num_slots, np.int64)
        self._words = memoryview(desc)  # type: ignore[arg-type]  # keeps `desc`
        self._address = desc.ctypes.data
        self._log_table = np.array([(log.address, first) for log, first in logs], np.int64)
        self._groups = np.zeros((len(tables), packing.GROUP_FIELDS), np.int64)
        self._shapes = kernels.shape_table()
        words = self._words
        words[packing.UNIT], words[packing.SCALE] = self._unit, dtype.itemsize // self._unit
        words[packing.LOGS], words[packing.NUM_LOGS] = self._log_table.ctypes.data, len(logs)
        words[packing.GROUPS], words[packing.NUM_GROUPS] = self._groups.ctypes.data, len(tables)
        words[packing.SHAPES], words[packing.NUM_SHAPES] = self._shapes.ctypes.data, len(self._shapes)
        self._copies = copies or not backend.uva
        self._num_bytes = words[packing.NUM_BYTES : packing.NUM_BYTES + 1]
        words[packing.NUM_SLOTS] = num_slots
        self._slot_fields = [packing.SLOTS + packing.SLOT_FIELDS * slot for slot in range(num_slots)]
        for slot, at in enumerate(self._slot_fields):
            words[at + packing.SLOT_DONE] = self._fences.block.address + 64 * slot
        self._slots = [Pinned(np.empty(0, np.uint8), 0)] * num_slots
        self._launch: list[kernels.Launcher] = [no_launch] * (num_slots * len(kernels.SHAPES))
        self._kept: list[list[Any]] = [[] for _ in range(num_slots)]
        self._note_tables()
        # Long writes of a path's only log are not copied again, unless the whole slot goes to the device by a copy.
        # Only the first path of a log may: it knows the launches that read its blocks, and no other path's.
        in_place = len(logs) == 1 and not logs[0][0].jitted and not self._copies
        in_place = in_place and logs[0][0].long == NEVER
        self._direct_log = logs[0][0] if in_place else None
        if self._direct_log is not None:
            self._direct_log.long = -(-packing.LONG_BYTES // dtype.itemsize)
            self._direct_log.ring *= num_slots + 1
            self._reserve_contents(self._direct_log.max_end + 1)
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
        if self.lock.locked():
            refuse_entry()
        with self.lock:  # no interrupt comes between taking it and here, as one could with `acquire`
            if self.backend.elsewhere():
                with self.backend.current():
                    self._apply(stream, wait_for)
            else:
                self._apply(stream, wait_for)

    def _apply(self, stream: Any, wait_for: Any) -> None:
        stream = self.backend.stream(stream)
        ptr = stream.ptr
        if wait_for != ():
            for event in self.backend.events_of(wait_for):
                self.backend.wait_event(ptr, event)
            self.backend.stream(stream)  # should an event have drawn it into a capture all the same
        if ptr != self._last_ptr:
            self._switch(stream)
        packed = self._words[packing.TOTAL_LAUNCHES]
        try:
            for log in self._counted:
                header = log.header
                header[0] = log.at >> 5  # LOG_WRITES, LOG_VALUES
                header[1] = log.end
                log.flushed = log.at
                if log.torn:
                    raise torn_error()
            launcher = packing.pack(self._address)
            if launcher < 0:
                launcher = self._make_way(launcher)
            if launcher >= 0:
                self._launch[launcher](ptr)
            for log in self._counted:
                if log.at != log.flushed:  # another thread staged meanwhile
                    log.torn = True
                log.at = log.end = 0
            if self._words[packing.HAD_LONG]:
                self._turn_contents()
        except BaseException:
            if self._words[packing.TOTAL_LAUNCHES] != packed:
                self._recover(stream)
            raise

    # -- what happens now and then -----------------------------------------------------------------------------------

    def _turn_contents(self) -> None:
        """After an apply whose kernel reads long writes where they were staged: stage the next into another block.

        There is one block more than there are slots. A block comes round after as many launches as there are slots and
        one, and the last of those took the slot, and waited for the fence, of the launch that read the block.
        """
        self._words[packing.HAD_LONG] = 0
        log = self._direct_log
        if log is None:
            return
        contents, turn = log.ring[log.turn], log.turn
        if contents.direct:
            turn = turn + 1 if turn + 1 < len(log.ring) else 0
        following = log.ring[turn]
        if following.direct == 0 or following.capacity < contents.capacity:
            following = log.ring[turn] = self._pinned_contents(contents.capacity)
        log.turn = turn
        log.use(following)
        self._words[packing.DIRECT] = following.direct

    def _pinned_contents(self, capacity: int) -> Contents:
        nbytes = capacity * self._itemsize + SLACK
        self.stats.host_allocations += 1
        return Contents(self.logs[0].dtype, capacity, self.backend.pinned(nbytes))

    def _reserve_contents(self, num_values: int) -> None:
        """Make every block of contents hold `num_values`; all slots are free."""
        log = self._direct_log
        if log is None or num_values <= min(contents.capacity for contents in log.ring):
            return
        capacity = ring.grown_size(max(num_values, log.max_end))
        blocks = [self._pinned_contents(capacity) for _ in log.ring]
        current = blocks[log.turn]
        current.bytes[: len(log.contents)] = log.contents
        self._words[packing.DIRECT] = current.direct  # before the old blocks go
        log.use(current)
        log.ring = blocks

    def is_idle(self) -> bool:
        """Whether everything that this path launched is done, to the last store."""
        passed = all(self._done[8 * slot] == self._sequence(slot) for slot in range(len(self._slots)))
        return passed and self.backend.event_done(self._event)

    def _sequence(self, slot: int) -> int:
        """What the fence word of `slot` will be once its last reader is done."""
        return self._words[self._slot_fields[slot] + packing.SLOT_SEQUENCE]

    def _wait(self, slot: int) -> None:
        """Wait until nobody reads `slot`."""
        if self._done[8 * slot] != self._sequence(slot):
            self._fences.wait(slot, self._sequence(slot), self._last_stream)

    def _switch(self, stream: Any) -> None:
        """Go over to another stream: let its work start after the last launch.

        Also where the fence word came: it says that the slot was read, not that everything is written.
        """
        if self._last_stream is not None:
            self.backend.wait_event(stream.ptr, self._event)
        if self._stale:
            self._refresh(stream)
        self._last_stream = stream
        self._last_ptr = -1 if stream.ptr == PER_THREAD_STREAM else stream.ptr  # one number, a stream for each thread

    def _make_way(self, code: int) -> int:
        """Do what the packer asks for until it has packed, or has nothing to pack."""
        while code < 0 and code != packing.NOTHING:
            slot = self._words[packing.NEXT_SLOT]
            if code == packing.BUSY:
                self._wait(slot)
            elif code == packing.TORN:
                raise torn_error()
            else:
                self._make_room(code, slot, self._words[packing.NEED])
            code = packing.pack(self._address)
        return code

    def _recover(self, stream: Any) -> None:
        """After a launch that raised: find out whether it ran all the same, and if not, stage its writes again."""
        slot = self._words[packing.LAST_SLOT]
        drain(self.backend, stream)
        self._words[packing.HAD_LONG] = 0  # no block of contents is being read
        if self._done[8 * slot] == self._sequence(slot):
            for log in self._counted:
                log.at = log.end = 0
            return
        self._words[self._slot_fields[slot] + packing.SLOT_SEQUENCE] = self._done[8 * slot]
        self._words[packing.NEXT_SLOT] = slot
        for total, of_last in ((packing.TOTAL_LAUNCHES, 1), *self._last_totals()):
            self._words[total] -= of_last
        for log in self.logs:
            log.restore()

    def _last_totals(self) -> list[tuple[int, int]]:
        """What the last pack added to the totals."""
        words = self._words
        num_writes = sum(log.header[packing.LOG_LAST_WRITES] for log in self.logs)
        return [
            (packing.TOTAL_WRITES, num_writes),
            (packing.TOTAL_VALUES, words[packing.NUM_VALUES]),
            (packing.TOTAL_BYTES, words[packing.LAST_BYTES]),
        ]

    def _note_tables(self) -> None:
        """Tell the packer and the kernels where the tables are."""
        for group, table in enumerate(self.tables):
            if table.stride % self._unit or table.address % self._unit:
                raise ValueError(
                    f"target at {table.address:#x} with row stride {table.stride} is not aligned to its items"
                )
            rows, cells = table.rows_noted, table.cells_noted
            notes = (rows.ctypes.data, len(rows) - 1, cells.ctypes.data, len(cells) - 1)
            self._groups[group] = table.stride // self._unit, table.address, 0, *notes
            self.targets.facts[:, group] = table.address, table.stride

    def _make_room(self, what: int, slot: int, needed: int) -> None:
        """Replace what was too small by the next power of two."""
        size = ring.grown_size(needed)
        if what == packing.GROW_PIECES:
            pieces = np.zeros(size * packing.PIECE_BYTES, np.uint8)
            address = pieces.ctypes.data  # the packer gets it before the old ones go: an interrupt may come between
            self._words[packing.PIECES], self._words[packing.PIECES_CAPACITY] = address, size
            self._pieces = pieces
        elif what == packing.GROW_TABLE:
            table = np.zeros(size * 16, np.uint8)
            address = table.ctypes.data
            self._words[packing.TABLE], self._words[packing.TABLE_CAPACITY] = address, size
            self._words[packing.TABLE_EPOCH] = 0
            self._table = table
        else:
            ring.sweep()
            block = self.backend.pinned(size)  # the slot is free: what it replaces has no reader left
            made = self._launchers_of(slot, block, self.targets)
            at = self._slot_fields[slot]
            self._slots[slot] = block
            self._set_launchers(slot, made)
            self._words[at + packing.SLOT_ADDRESS], self._words[at + packing.SLOT_CAPACITY] = block.address, size
            self.stats.growths += 1
            self.stats.host_allocations += 1

    def _launchers_of(
        self, slot: int, block: Pinned, targets: kernels.Targets
    ) -> tuple[list[kernels.Launcher], list[Any]]:
        fence = (self._fences.block, 8 * slot)
        return kernels.make_launchers(
            self.backend, self._unit, block, fence, targets, self._event, self._copies, self._num_bytes
        )

    def _set_launchers(self, slot: int, made: tuple[list[kernels.Launcher], list[Any]]) -> None:
        launchers, self._kept[slot] = made
        self._launch[slot * len(launchers) : (slot + 1) * len(launchers)] = launchers

    def entered(self) -> threading.Lock:
        """Keep other threads out, in a `with` statement."""
        if self.lock.locked():
            refuse_entry()
        return self.lock

    def reserve(self, num_writes: int, num_values: int) -> None:
        """Make slots and scratch large enough for that many writes and values in one apply."""
        with self.entered(), self.backend.current():
            self.backend.stream(None)
            num_bytes = num_values * self._itemsize
            tiles = num_writes + num_bytes // packing.MIN_TILE + 1
            lines = min(8 * num_writes, num_bytes) // 31 + 2 + min(tiles, 512)
            lines = next((max(lines, warps) for warps, _, most in self._shapes.tolist() if lines <= most), lines)
            needed = 512 * lines + 32 * max(tiles, 1056) + num_bytes + 32 * num_writes + 64
            if 3 * num_writes > self._words[packing.PIECES_CAPACITY]:
                self._make_room(packing.GROW_PIECES, 0, 3 * num_writes)
            blocks = 2 * (2 * num_writes + num_bytes // self._unit // 64)
            if blocks > self._words[packing.TABLE_CAPACITY]:
                self._make_room(packing.GROW_TABLE, 0, blocks)
            for slot, block in enumerate(self._slots):
                self._wait(slot)
                if needed > block.array.nbytes:
                    self._make_room(packing.GROW_SLOT, slot, needed)
            self._reserve_contents(num_values + 16 * min(num_writes, num_bytes // packing.LONG_BYTES))

    def prepare_table(self, group: int, table: Table) -> Callable[[], None]:
        """Make what another table for `group` needs; the function that goes over to it can no longer fail.

        Both are called with the lock held. The next apply writes to the new table; the old one is retired. Where an
        interrupt came into that function, it is called again.
        """
        for other, neighbour in enumerate(self.tables):
            if other != group and table.shares_memory(neighbour):
                raise ValueError(f"the new target of group {group} shares memory with that of group {other}")
        tables = [*self.tables[:group], table, *self.tables[group + 1 :]]
        launch, kept = list(self._launch), list(self._kept)
        if not self.targets.grouped or launch[0] is no_launch:  # graphs hold the address, or there are none
            targets = copy.copy(self.targets)
            targets.facts = self.targets.facts.copy()
            targets.facts[:, group] = table.address, table.stride
            made = [self._launchers_of(slot, block, targets) for slot, block in enumerate(self._slots)]
            launch, kept = [launcher for launchers, _ in made for launcher in launchers], [keeps for _, keeps in made]

        def go_over() -> None:
            ring.retire(self.is_idle, (self.tables, self._kept))
            self._launch = [no_launch] * len(launch)  # until packer and launchers are of one mind again
            self._stale, self._last_ptr = True, -1  # the next apply goes by `_switch`
            self.tables = tables
            self._note_tables()
            self._kept = kept
            self._launch = launch

        return go_over

    def refresh_pointers(self, stream: Any = None) -> None:
        """Rewrite the device's table addresses in place, in the order of `stream`."""
        with self.entered(), self.backend.current():
            self._stale = True
            self._switch(self.backend.stream(stream))

    def _refresh(self, stream: Any) -> None:
        slot, facts = self._words[packing.NEXT_SLOT], self.targets.facts
        self._wait(slot)
        block, at = self._slots[slot], self._slot_fields[slot] + packing.SLOT_SEQUENCE
        block.array[: facts.nbytes] = facts.reshape(-1).view(np.uint8)
        sequence = self._words[at] % 255 + 1
        self._words[at], self._words[packing.LAST_SLOT] = sequence, slot
        self._words[packing.NEXT_SLOT] = (slot + 1) % len(self._slots)
        try:
            self.backend.copy(self.targets.device_address, block.address, facts.nbytes, stream.ptr)
            self.backend.signal(self._fences.block, 8 * slot, sequence, stream.ptr)
            self.backend.record(self._event, stream.ptr)
        except BaseException:
            drain(self.backend, stream)
            self._words[at] = self._done[8 * slot]  # nobody reads the slot
            raise
        self._stale = False

    def read_stats(self) -> ring.Stats:
        """The counts so far."""
        words = self._words
        return dataclasses.replace(
            self.stats,
            launches=words[packing.TOTAL_LAUNCHES],
            writes=words[packing.TOTAL_WRITES],
            values=words[packing.TOTAL_VALUES],
            bytes=words[packing.TOTAL_BYTES],
            copies=words[packing.TOTAL_LAUNCHES] if self._copies else 0,
        )
