"""The packer: logs of writes become one slot, overlaps resolved, long writes tiled; and a slot applied on the host.

Works on raw addresses and belongs to nobody: memory is a write log's (`log.py`) and a slot's (`writes.py`). Nothing
here calls CUDA or allocates. The head of `kernels/apply_write.cu` tells the layout of a slot; `pack` writes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .raw import INT64S, WORD, compile_for, copy, jit, load, load32, load_item, put_four, store, store32

# A write log's header, int64 each: counts, addresses, the counts that the last pack took, capacities, and whether any
# two writes can overlap (a log that rules it out saves the packer a look).
LOG_WRITES, LOG_VALUES, LOG_RECORDS, LOG_CONTENTS, LOG_LAST_WRITES, LOG_LAST_VALUES = 0, 1, 2, 3, 4, 5
LOG_MAX_WRITES, LOG_MAX_VALUES, LOG_MAY_OVERLAP, LOG_FIELDS = 6, 7, 8, 9
# One record of a log, int64 each: group << 48 | row, start, length, and where in the log's contents the values begin,
# or for a length of -1 the one value itself (of up to 8 bytes).
RECORD_BYTES, ROW_MASK, ONE_VALUE = 32, (1 << 48) - 1, -1

# What `pack` is told and tells, int64 each. SLOTS is followed by SLOT_FIELDS a slot.
UNIT, SCALE, LOGS, NUM_LOGS, GROUPS, NUM_GROUPS = 0, 1, 2, 3, 4, 5  # bytes of a unit; units an element; tables
TABLE, TABLE_CAPACITY, TABLE_EPOCH = 6, 7, 8  # hash table of touched cells, entries of 16 bytes
PIECES, PIECES_CAPACITY = 9, 10  # scratch: writes after overlaps are resolved
SHAPES, NUM_SHAPES = 11, 12  # launch shapes: (warps, cells a line, most lines) each
NUM_BYTES, NEED = 13, 14  # results: bytes used in the slot; what was missing
TOTAL_LAUNCHES, TOTAL_WRITES, TOTAL_VALUES, TOTAL_BYTES = 15, 16, 17, 18
NUM_SLOTS, NEXT_SLOT, LAST_SLOT = 19, 20, 21  # the ring; LAST_SLOT is of the last pack
NUM_VALUES, PACK_NUMBER = 22, 23  # scratch: values that the logs hold; packs so far, 31 bits
# Contents that the kernel may read in place: where their facts lie (0: none may be), namely first and last address, and
# how far the device's addresses lie from the host's; and whether this pack had a write long enough for that.
DIRECT, HAD_LONG = 24, 25
LAST_BYTES = 26  # what the last pack added to TOTAL_BYTES
NUM_CELLS, NUM_RUNS, NUM_BLOCKS = 27, 28, 29  # scratch: cells laid; long writes; 64-unit blocks if all are pieces
FOUND = 30  # what the last pack found of overlaps, and where the next one begins to look for them
SLOTS, SLOT_FIELDS = 31, 4
SLOT_ADDRESS, SLOT_CAPACITY, SLOT_SEQUENCE, SLOT_DONE = 0, 1, 2, 3  # SLOT_DONE: address of the fence word

# No two writes can overlap; rows seem to come twice, in no order; cells seem to come twice.
APART, ROWS_TWICE, CELLS_TWICE = 0, 1, 2

# A group: units between rows, base address, end of its last write (scratch), and two notes of what a pack has written:
# the pack's number, int32 a row; and an int64 for each 32 units, with the number in the upper half and a bit a unit in
# the lower. Each has a power of two of entries, that less 1 beside it, which those of a large table share. A note may
# be of another writer of the table, or of a neighbour in its entry: then something seems to come twice, and is looked
# at more closely.
GROUP_STRIDE, GROUP_BASE, GROUP_END = 0, 1, 2
GROUP_ROWS_NOTED, GROUP_ROWS_MASK, GROUP_CELLS_NOTED, GROUP_CELLS_MASK, GROUP_FIELDS = 3, 4, 5, 6, 7

# What `pack` returns when it is not the number of a launcher.
NOTHING, GROW_SLOT, GROW_TABLE, GROW_PIECES, TORN, BUSY = -1, -2, -3, -4, -5, -6

MAX_GROUPS = 4095  # 12 bits of a cell
CELL_BYTES, INLINE_LINE = 16, 512  # a cell; a line of cells that may hold values
INLINE_BYTES = 64  # longer writes go as runs: an inline value costs twice its bytes on the bus, a run 1.2 us of latency
LONG_BYTES = 4096  # values of longer writes are read where they were staged, where the addresses allow it
MIN_TILE, MAX_TILE = 4096, 16384  # bytes a warp copies: enough in flight to hide latency; few enough lines to cost 3 %
PIECE_BYTES = 32  # group, offset in units, units, address of the values


@jit
def _entry(table: int, capacity: int, tag: int) -> int:
    """Address of the entry of `tag` (epoch and cells) in the hash table, made new where there is none."""
    mask = capacity - 1
    at = ((tag * -7046029254386353131) >> 20) & mask
    epoch = tag >> 54
    while True:
        entry = table + 16 * at
        found = load(entry)
        if found == tag:
            return entry
        if (found >> 54) != epoch:  # of an earlier pack: empty
            store(entry, tag)
            store(entry + 8, 0)
            return entry
        at = (at + 1) & mask


@jit
def _next_epoch(desc: int) -> int:
    """Start with an empty hash table; it is cleared only when the 9-bit epoch comes round."""
    epoch = load(desc + 8 * TABLE_EPOCH) + 1
    if epoch == 512:
        table = load(desc + 8 * TABLE)
        for i in range(load(desc + 8 * TABLE_CAPACITY)):
            store(table + 16 * i, 0)
        epoch = 1
    store(desc + 8 * TABLE_EPOCH, epoch)
    return epoch


@jit
def _bits(first: int, count: int) -> int:
    """`count` (1 to 64) one-bits from bit `first` on."""
    ones = -1 if count == 64 else (1 << count) - 1
    return ones << first


@jit
def _meet(entry: int, tag: int, cells: int) -> int:
    """Note in an entry of a group's cells that these are written; returns those of them that this pack had noted."""
    before = load(entry) ^ tag
    before &= -np.int64(before >> 32 == 0)  # no branch: it would be taken at random
    store(entry, tag | before | (cells & 0xFFFFFFFF))
    return before & cells


@jit
def _resolve(desc: int, num_pieces: int) -> int:
    """Cut every piece down to the cells that no later piece writes; returns the number of pieces left (below 2 w).

    Goes from the last piece to the first, and writes the result behind the input, then over it.
    """
    table, capacity, pieces = load(desc + 8 * TABLE), load(desc + 8 * TABLE_CAPACITY), load(desc + 8 * PIECES)
    unit = load(desc + 8 * UNIT)
    epoch = _next_epoch(desc)
    out = last = pieces + PIECE_BYTES * num_pieces
    for p in range(num_pieces - 1, -1, -1):
        piece = pieces + PIECE_BYTES * p
        group, begin, values = load(piece), load(piece + 8), load(piece + 24)
        key = (epoch << 54) | (group << 42)
        end = begin + load(piece + 16)
        at = begin
        open_at = -1  # start of the run of free cells that is being collected
        while at < end:
            first = at & 63
            count = min(64 - first, end - at)
            bits = _bits(first, count)
            entry = _entry(table, capacity, key | (at >> 6))
            seen = load(entry + 8)
            store(entry + 8, seen | bits)
            if seen & bits == 0:
                if open_at < 0:
                    open_at = at
            else:
                for i in range(count):
                    free = (seen >> (first + i)) & 1 == 0
                    if free and open_at < 0:
                        open_at = at + i
                    elif not free and open_at >= 0:
                        last = put_four(last, group, open_at, at + i - open_at, values + (open_at - begin) * unit)
                        open_at = -1
            at += count
        if open_at >= 0:
            last = put_four(last, group, open_at, end - open_at, values + (open_at - begin) * unit)
    _move(pieces, out, last - out)
    return (last - out) // PIECE_BYTES


@jit
def _move(to: int, source: int, num_bytes: int) -> None:
    """Move whole words down; the ranges may overlap, and `to` lies below."""
    for i in range(num_bytes >> 3):
        store(to + 8 * i, load(source + 8 * i))


@jit
def _put_cells(base: int, limit: int, at: int, where: int, values: int, units: int, per_cell: int) -> int:
    """Write a short write's cells into the lines of the slot at `base`; returns where the last one is.

    `at` is where the one before is, `where` is group << 48 | offset. Past `limit` it begins anew at the base: the slot
    is too small, and will not be launched.
    """
    while True:
        at += CELL_BYTES
        if (at - base) & (INLINE_LINE - 1) == 0:  # a header's place
            at = (at if at + INLINE_LINE <= limit else base) + CELL_BYTES
        count = min(units, per_cell)
        store(at, (count << 60) | where)
        store(at + 8, load(values))  # may read past the last value: logs have room behind
        if units <= per_cell:
            return at
        where, values, units = where + count, values + 8, units - count


def _gatherer(look: int) -> Any:
    """The pass over the writes, for one way to look for overlaps: each is compiled with what it needs alone.

    They are in the disk cache as parts of `pack`.
    """

    @njit
    def gather(desc: int, base: int, limit: int) -> int:
        """Take up the writes of all logs; returns the number of pieces, or TORN.

        Short ones are laid into the slot at `base`, long ones become pieces; looking for CELLS_TWICE, all do. NUM_CELLS
        and NUM_RUNS get the number of cells laid and of pieces. Looking for APART, rows are noted: FOUND gets
        ROWS_TWICE where one was noted already and the writes of some group do not come in ascending order. Looking for
        more, cells are noted: it gets CELLS_TWICE where one was noted already, else ROWS_TWICE.
        """
        unit, scale = load(desc + 8 * UNIT), load(desc + 8 * SCALE)
        logs, groups = load(desc + 8 * LOGS), load(desc + 8 * GROUPS)
        for g in range(load(desc + 8 * NUM_GROUPS)):
            store(groups + 8 * (GROUP_FIELDS * g + GROUP_END), 0)

        pieces, pack_number = load(desc + 8 * PIECES), (load(desc + 8 * PACK_NUMBER) + 1) & 0x7FFFFFFF
        store(desc + 8 * PACK_NUMBER, pack_number)
        piece, cell, per_cell = pieces, base, 8 // unit
        notes, mask = (GROUP_ROWS_NOTED, GROUP_ROWS_MASK) if look == APART else (GROUP_CELLS_NOTED, GROUP_CELLS_MASK)
        num_cells, num_runs, blocks, num_values, ascending, met = 0, 0, 0, 0, True, 0
        for i in range(load(desc + 8 * NUM_LOGS)):
            log, first_group = load(logs + 16 * i), load(logs + 16 * i + 8)
            record, values = load(log + 8 * LOG_RECORDS), load(log + 8 * LOG_CONTENTS)
            may_overlap, num_contents = load(log + 8 * LOG_MAY_OVERLAP) != 0, load(log + 8 * LOG_VALUES)
            facts, stride, noted, of_group = 0, 0, 0, -1  # of the group at hand
            for _ in range(load(log + 8 * LOG_WRITES)):
                length = load(record + 16)
                if length != 0:
                    source, row = record + 24, load(record)
                    if length > 0:
                        begin = load(source)
                        if begin + length > num_contents:
                            return TORN
                        source = values + begin * scale * unit
                    else:
                        length = 1
                    num_values += length
                    units = length * scale
                    group = (row >> 48) + first_group
                    if group != of_group:
                        facts, of_group = groups + 8 * GROUP_FIELDS * group, group
                        stride, noted = load(facts + 8 * GROUP_STRIDE), load(facts + 8 * notes)
                    row &= ROW_MASK
                    offset = row * stride + load(record + 8) * scale
                    if may_overlap and look == APART:
                        if offset < load(facts + 8 * GROUP_END):
                            ascending = False
                        store(facts + 8 * GROUP_END, offset + units)
                        at = noted + 4 * (row & load(facts + 8 * mask))
                        if load32(at) == pack_number:
                            met = 1
                        else:
                            store32(at, pack_number)
                    elif may_overlap:
                        block, first, left = offset >> 5, offset & 31, units
                        while met == 0:
                            entry = noted + 8 * (block & load(facts + 8 * mask))
                            met = _meet(entry, pack_number << 32, ((1 << min(left, 32)) - 1) << first)
                            left -= 32 - first
                            if left <= 0:
                                break
                            block, first = block + 1, 0
                    if look == CELLS_TWICE or units * unit > INLINE_BYTES:
                        piece = put_four(piece, group, offset, units, source)
                        num_runs += 1
                        if look == CELLS_TWICE:
                            blocks += ((offset & 63) + units + 63) >> 6
                    else:
                        num_cells += (units * unit + 7) >> 3
                        cell = _put_cells(base, limit, cell, (group << 48) | offset, source, units, per_cell)
                record += RECORD_BYTES
        store(desc + 8 * NUM_CELLS, num_cells)
        store(desc + 8 * NUM_RUNS, num_runs)
        store(desc + 8 * NUM_VALUES, num_values)
        store(desc + 8 * NUM_BLOCKS, blocks)
        if look == APART:
            store(desc + 8 * FOUND, APART if ascending or met == 0 else ROWS_TWICE)
        else:
            store(desc + 8 * FOUND, ROWS_TWICE if met == 0 else CELLS_TWICE)
        return (piece - pieces) // PIECE_BYTES

    return gather


_gather_by_rows, _gather_by_cells, _gather_pieces = _gatherer(APART), _gatherer(ROWS_TWICE), _gatherer(CELLS_TWICE)


@jit
def _lay_pieces(desc: int, base: int, limit: int, num_pieces: int) -> None:
    """Lay the short ones of all pieces into the slot; counts as `gather` does."""
    unit, pieces = load(desc + 8 * UNIT), load(desc + 8 * PIECES)
    cell, num_cells, num_runs, per_cell = base, 0, 0, 8 // unit
    for p in range(num_pieces):
        piece = pieces + PIECE_BYTES * p
        units = load(piece + 16)
        if units * unit <= INLINE_BYTES:
            num_cells += (units * unit + 7) >> 3
            where = (load(piece) << 48) | load(piece + 8)
            cell = _put_cells(base, limit, cell, where, load(piece + 24), units, per_cell)
        else:
            num_runs += 1
    store(desc + 8 * NUM_CELLS, num_cells)
    store(desc + 8 * NUM_RUNS, num_runs)


@jit
def _any_values(desc: int) -> bool:
    """Whether any staged write has a value."""
    logs = load(desc + 8 * LOGS)
    for i in range(load(desc + 8 * NUM_LOGS)):
        log = load(logs + 16 * i)
        record = load(log + 8 * LOG_RECORDS)
        for _ in range(load(log + 8 * LOG_WRITES)):
            if load(record + 16) != 0:
                return True
            record += RECORD_BYTES
    return False


@jit
def _take(desc: int) -> None:
    """Empty the logs, noting what they held, and count it."""
    logs = load(desc + 8 * LOGS)
    for i in range(load(desc + 8 * NUM_LOGS)):
        log = load(logs + 16 * i)
        num_writes = load(log + 8 * LOG_WRITES)
        store(log + 8 * LOG_LAST_WRITES, num_writes)
        store(log + 8 * LOG_LAST_VALUES, load(log + 8 * LOG_VALUES))
        store(log + 8 * LOG_WRITES, 0)
        store(log + 8 * LOG_VALUES, 0)
        store(desc + 8 * TOTAL_WRITES, load(desc + 8 * TOTAL_WRITES) + num_writes)
    store(desc + 8 * TOTAL_VALUES, load(desc + 8 * TOTAL_VALUES) + load(desc + 8 * NUM_VALUES))


@jit
def _address(desc: int, piece: int) -> int:
    """Where on the device a piece goes."""
    facts = load(desc + 8 * GROUPS) + 8 * GROUP_FIELDS * load(piece)
    return load(facts + 8 * GROUP_BASE) + load(piece + 8) * load(desc + 8 * UNIT)


@jit
def _direct_source(desc: int, piece: int) -> int:
    """The device address of a piece's values where the kernel may read them in place, else 0."""
    direct, values = load(desc + 8 * DIRECT), load(piece + 24)
    if direct == 0 or values < load(direct) or values >= load(direct + 8):
        return 0
    source = values + load(direct + 16)
    if source >> 48 != 0:  # a cell has 48 bits for it
        return 0
    return source if (source - _address(desc, piece)) & 15 == 0 else 0


@jit
def pack(desc: int) -> int:
    """Lay all staged writes out in the next slot; returns the number of the launcher to call, or a code below 0.

    Without a value there is NOTHING to launch, and the logs are emptied. A slot whose fence has not passed is BUSY. On
    success the slot has a new sequence, the logs are empty (and know what was taken), NUM_BYTES is set and the totals
    have grown; otherwise nothing changed but scratch and FOUND, and NEED says how much of what was missing. Launchers
    come by slot, one for each shape.
    """
    num_writes, logs = 0, load(desc + 8 * LOGS)
    for i in range(load(desc + 8 * NUM_LOGS)):
        num_writes += load(load(logs + 16 * i) + 8 * LOG_WRITES)
    if not _any_values(desc):
        if num_writes > 0:
            store(desc + 8 * NUM_VALUES, 0)
            _take(desc)
        return NOTHING
    if 3 * num_writes > load(desc + 8 * PIECES_CAPACITY):
        store(desc + 8 * NEED, 3 * num_writes)
        return GROW_PIECES
    slot = load(desc + 8 * NEXT_SLOT)
    state = desc + 8 * (SLOTS + SLOT_FIELDS * slot)
    if load(load(state + 8 * SLOT_DONE)) != load(state + 8 * SLOT_SEQUENCE):
        return BUSY
    unit, pieces = load(desc + 8 * UNIT), load(desc + 8 * PIECES)
    base, capacity = load(state + 8 * SLOT_ADDRESS), load(state + 8 * SLOT_CAPACITY)

    # Short writes: values in their cells, lines filled to the last. Where rows come twice in no order, all are gone
    # through again to look at each cell, and where cells do, once more to cut them. The next pack begins there, so that
    # it goes through them once; now and then one tries the cheapest way again.
    found = load(desc + 8 * FOUND) if load(desc + 8 * TOTAL_LAUNCHES) % 61 != 0 else APART
    look, num_pieces = -1, 0
    while found > look:
        look = found
        if look == APART:
            num_pieces = _gather_by_rows(desc, base, base + capacity)
        elif look == ROWS_TWICE:
            num_pieces = _gather_by_cells(desc, base, base + capacity)
        else:
            num_pieces = _gather_pieces(desc, base, base + capacity)
        if num_pieces < 0:
            return num_pieces
        found = load(desc + 8 * FOUND)
    if look == CELLS_TWICE:
        if found == CELLS_TWICE:
            needed = 2 * load(desc + 8 * NUM_BLOCKS)
            if needed > load(desc + 8 * TABLE_CAPACITY):
                store(desc + 8 * NEED, needed)
                return GROW_TABLE
            num_pieces = _resolve(desc, num_pieces)
        _lay_pieces(desc, base, base + capacity, num_pieces)
    num_cells, num_runs = load(desc + 8 * NUM_CELLS), load(desc + 8 * NUM_RUNS)

    # Long writes, and the tiles that they are cut into.
    run_bytes, direct_bytes, had_long, num_tiles = 0, 0, 0, 0
    if num_runs > 0:
        for p in range(num_pieces):
            piece = pieces + PIECE_BYTES * p
            num_bytes = load(piece + 16) * unit
            if num_bytes > INLINE_BYTES:
                run_bytes += num_bytes
                if num_bytes >= LONG_BYTES:
                    had_long = 1
                    if _direct_source(desc, piece) != 0:
                        direct_bytes += num_bytes
    tile = min(max((run_bytes >> 7) & ~15, MIN_TILE), MAX_TILE)
    if num_runs > 0:
        for p in range(num_pieces):
            num_bytes = load(pieces + PIECE_BYTES * p + 16) * unit
            if num_bytes > INLINE_BYTES:
                num_tiles += (num_bytes + tile - 1) // tile

    # How many lines that makes, and the smallest launch shape for so many.
    cells_per_line, runs_per_line = INLINE_LINE // CELL_BYTES, min(max((num_tiles + 255) >> 8, 1), 31)
    if num_cells == 0 and num_tiles >= 8:
        cells_per_line, runs_per_line = 2, 1
    room, line_bytes = cells_per_line - 1, CELL_BYTES * cells_per_line
    lines = (num_cells + room - 1) // room
    beside = min(runs_per_line, lines * room - num_cells)  # runs that still fit into the last inline line
    lines += (max(num_tiles - beside, 0) + runs_per_line - 1) // runs_per_line
    shapes, shape, warps, most = load(desc + 8 * SHAPES), -1, 0, 0
    for s in range(load(desc + 8 * NUM_SHAPES)):
        if load(shapes + 24 * s + 8) == cells_per_line and most < lines:
            shape, warps, most = s, load(shapes + 24 * s), load(shapes + 24 * s + 16)
    at = max(lines, warps) * line_bytes  # contents begin here
    if at + run_bytes - direct_bytes + 32 * num_runs > capacity:
        store(desc + 8 * NEED, at + run_bytes - direct_bytes + 32 * num_runs)
        return GROW_SLOT

    sequence = load(state + 8 * SLOT_SEQUENCE) % 255 + 1
    for i in range(num_cells // room):
        store(base + line_bytes * i, sequence)
        store(base + line_bytes * i + 8, lines | (room << 32))
    line, cell, runs_here = base + line_bytes * (num_cells // room), num_cells % room, 0
    if num_runs > 0:
        for p in range(num_pieces):  # long writes: contents behind the lines, tiles spread over the lines
            piece = pieces + PIECE_BYTES * p
            units = load(piece + 16)
            if units * unit <= INLINE_BYTES:
                continue
            x = (15 << 60) | (load(piece) << 48) | load(piece + 8)
            source = 0 if units * unit < LONG_BYTES else _direct_source(desc, piece)
            if source != 0:
                x -= 1 << 60
            else:
                at = ((at + 15) & ~15) + (_address(desc, piece) & 15)
                copy(base + at, load(piece + 24), units * unit)
            while units > 0:
                if runs_here == runs_per_line or cell == room:
                    store(line, sequence)
                    store(line + 8, lines | (cell << 32))
                    line, cell, runs_here = line + line_bytes, 0, 0
                cell, runs_here = cell + 1, runs_here + 1
                count = min(units, tile // unit)
                store(line + 16 * cell, x)
                if source != 0:
                    store(line + 16 * cell + 8, (count << 48) | source)
                    source += count * unit
                else:
                    store(line + 16 * cell + 8, (count << 40) | at)
                    at += count * unit
                x, units = x + count, units - count
    if cell > 0:
        store(line, sequence)
        store(line + 8, lines | (cell << 32))
    for i in range(lines, warps):  # warps without work read a header too
        store(base + i * line_bytes, sequence)
        store(base + i * line_bytes + 8, lines)

    _take(desc)
    store(desc + 8 * NUM_BYTES, at)
    store(desc + 8 * TOTAL_LAUNCHES, load(desc + 8 * TOTAL_LAUNCHES) + 1)
    store(desc + 8 * TOTAL_BYTES, load(desc + 8 * TOTAL_BYTES) + at + direct_bytes)
    store(desc + 8 * LAST_BYTES, at + direct_bytes)
    store(desc + 8 * HAD_LONG, had_long)
    store(state + 8 * SLOT_SEQUENCE, sequence)
    store(desc + 8 * LAST_SLOT, slot)
    store(desc + 8 * NEXT_SLOT, slot + 1 if slot + 1 < load(desc + 8 * NUM_SLOTS) else 0)
    return load(desc + 8 * NUM_SHAPES) * slot + shape


@jit
def apply_host(slot: int, cells_per_line: int, unit: int, targets: int) -> int:
    """Do what the kernel does with a packed slot, one line after the other; returns the slot's sequence.

    `targets` is the address of an int64 base address a group.
    """
    lines = load(slot + 8) & 0xFFFFFFFF
    for i in range(lines):
        line = slot + i * 16 * cells_per_line
        for c in range(1, (load(line + 8) >> 32) + 1):
            x = load(line + 16 * c)
            kind, group, offset = (x >> 60) & 15, (x >> 48) & 0xFFF, x & 0xFFFFFFFFFFFF
            to = load(targets + 8 * group) + offset * unit
            y = load(line + 16 * c + 8)
            if kind == 15:
                copy(to, slot + (y & 0xFFFFFFFFFF), (y >> 40) * unit)
            elif kind == 14:
                copy(to, y & 0xFFFFFFFFFFFF, (y >> 48) * unit)
            else:
                copy(to, line + 16 * c + 8, kind * unit)
    return load(slot)


# What is wrong with a batch.
ROW_OUTSIDE, START_OUTSIDE, LENGTHS_WRONG = 1, 2, 3


@jit
def wrong_total(totals: int, item_bytes: int, num_writes: int, num_values: int) -> int:
    """-1 where inclusive running totals rise to `num_values`; else which one is wrong first, or their number."""
    before = 0
    for w in range(num_writes):
        total = load_item(totals + item_bytes * w, item_bytes)
        if total < before or total > num_values:
            return w
        before = total
    return -1 if before == num_values else num_writes


@jit
def check_batch(
    record: int, end: int, rows: Any, starts: Any, cu_lens: Any, num_contents: int, num_rows: int, row_length: int
) -> int:
    """Check a batch and note it from address `record` on, with values from `end` on; nothing is staged yet.

    Returns -1, or `code << 48 | index of the first bad write`. `rows`, `starts`, `cu_lens` are ``[n] int64`` arrays.
    """
    wrong, before = wrong_total(cu_lens.ctypes.data, 8, len(rows), num_contents), 0
    if wrong >= 0:
        return (LENGTHS_WRONG << 48) | wrong
    for w in range(np.uint64(len(rows))):  # unsigned: no look for negative indices
        row, start, total = rows[w], starts[w], cu_lens[w]
        if row < 0 or row >= num_rows:
            return (ROW_OUTSIDE << 48) | np.int64(w)  # type: ignore[return-value]
        if start < 0 or start > row_length - (total - before):
            return (START_OUTSIDE << 48) | np.int64(w)  # type: ignore[return-value]
        record = put_four(record, row, start, total - before, end + before)
        before = total
    return -1


def compile_all() -> None:
    """Compile, or load from the disk cache, every function that Python calls; later calls compile nothing."""
    compile_for(pack, WORD)
    compile_for(apply_host, *[WORD] * 4)
    compile_for(check_batch, WORD, WORD, INT64S, INT64S, INT64S, WORD, WORD, WORD)
