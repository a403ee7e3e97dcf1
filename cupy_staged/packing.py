"""All Numba-jitted functions: check batches, find and resolve overlaps, tile, pack, and apply a slot on the host.

They work on raw addresses (ints), since one int costs a call a few hundredths of a microsecond and an array half of one.
Memory belongs to the callers: a write log (`writes.py`) and a slot (`ring.py`). Nothing here calls CUDA or allocates.
The layout of a slot is told at the head of `kernels/apply_write.cu`; `pack` writes it and `apply_host` reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic


def _jit(function: Callable[..., Any]) -> Any:
    """Jit with the disk cache, or without it where no cache folder can be written."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        return njit(function)


def _loader(bits: int) -> Any:
    """A function for jitted code: the signed integer of `bits` at an address of any alignment, as int64."""

    @intrinsic
    def load(_context: Any, address: Any) -> Any:
        def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.PointerType(ir.IntType(bits)))
            value = builder.load(pointer, align=1)
            return value if bits == 64 else builder.sext(value, ir.IntType(64))

        return types.int64(types.int64), codegen

    return load


def _storer(bits: int) -> Any:
    """A function for jitted code: store the low `bits` of an int64 at an address of any alignment."""

    @intrinsic
    def store(_context: Any, address: Any, value: Any) -> Any:
        def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.PointerType(ir.IntType(bits)))
            value = args[1] if bits == 64 else builder.trunc(args[1], ir.IntType(bits))
            builder.store(value, pointer, align=1)
            return cgutils.get_null_value(ir.LiteralStructType([]))

        return types.void(types.int64, types.int64), codegen

    return store


load, load32, load8 = _loader(64), _loader(32), _loader(8)
store, store32 = _storer(64), _storer(32)


@intrinsic
def copy(_context: Any, to: Any, source: Any, num_bytes: Any) -> Any:
    """Copy `num_bytes` from `source` to `to`; they do not overlap."""

    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = ir.PointerType(ir.IntType(8))
        cgutils.raw_memcpy(builder, builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte), args[2], 1)
        return cgutils.get_null_value(ir.LiteralStructType([]))

    return types.void(types.int64, types.int64, types.int64), codegen


# A write log's header, int64 each: counts, addresses, the counts that the last pack took, capacities, and whether any two
# writes can overlap (a log that rules it out saves the packer a look).
LOG_WRITES, LOG_VALUES, LOG_RECORDS, LOG_CONTENTS, LOG_LAST_WRITES, LOG_LAST_VALUES = 0, 1, 2, 3, 4, 5
LOG_MAX_WRITES, LOG_MAX_VALUES, LOG_MAY_OVERLAP, LOG_FIELDS = 6, 7, 8, 9
# One record of a log, int64 each: group << 48 | row, start, length, and where in the log's contents the values begin, or for
# a length of -1 the one value itself (of up to 8 bytes).
RECORD_BYTES, ROW_MASK, ONE_VALUE = 32, (1 << 48) - 1, -1

# What `pack` is told and tells, int64 each. SLOTS is followed by SLOT_FIELDS a slot.
UNIT, SCALE, LOGS, NUM_LOGS, GROUPS, NUM_GROUPS = 0, 1, 2, 3, 4, 5  # bytes of a unit; units an element; tables
TABLE, TABLE_CAPACITY, TABLE_EPOCH = 6, 7, 8  # hash table of touched cells, entries of 16 bytes
PIECES, PIECES_CAPACITY = 9, 10  # scratch: writes after overlaps are resolved
SHAPES, NUM_SHAPES = 11, 12  # launch shapes: (warps, cells a line) each
COPY_BYTES = 13  # slots of at least this many bytes are copied to the device first
NUM_BYTES, NEED = 14, 15  # results: bytes used in the slot; what was missing
TOTAL_LAUNCHES, TOTAL_WRITES, TOTAL_VALUES, TOTAL_BYTES, TOTAL_COPIES = 16, 17, 18, 19, 20
NUM_SLOTS, NEXT_SLOT, LAST_SLOT = 21, 22, 23  # the ring; LAST_SLOT is of the last pack
NUM_VALUES, PACK_NUMBER = 24, 25  # scratch: values that the logs hold; packs so far, 31 bits
# Contents that the kernel may read in place: where their facts lie (0: none may be), namely first and last address, and how
# far the device's addresses lie from the host's; and whether this pack had a write long enough for that.
DIRECT, HAD_LONG = 26, 27
LAST_BYTES = 28  # what the last pack added to TOTAL_BYTES
SLOTS, SLOT_FIELDS = 29, 4
SLOT_ADDRESS, SLOT_CAPACITY, SLOT_SEQUENCE, SLOT_DONE = 0, 1, 2, 3  # SLOT_DONE: address of the fence word

# A group: units between rows, base address, end of its last write (scratch), and where the number of the last pack that
# wrote to a row stands, int32 a row (0: nowhere, the table has too many rows).
GROUP_STRIDE, GROUP_BASE, GROUP_END, GROUP_STAMPS, GROUP_FIELDS = 0, 1, 2, 3, 4

# What `pack` returns when it is not the number of a launcher.
NOTHING, GROW_SLOT, GROW_TABLE, GROW_PIECES, TORN, BUSY = -1, -2, -3, -4, -5, -6

MAX_GROUPS = 4095  # 12 bits of a cell
INLINE_BYTES = 64  # longer writes go as runs: an inline value costs twice its bytes on the bus, a run 1.2 us of latency
LONG_BYTES = 4096  # values of longer writes are read where they were staged, where the addresses allow it
MIN_TILE, MAX_TILE = 4096, 16384  # bytes a warp copies: enough in flight to hide latency; few enough lines to cost 3 %
PIECE_BYTES = 32  # group, offset in units, units, address of the values


@_jit
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


@_jit
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


@_jit
def _bits(first: int, count: int) -> int:
    """`count` (1 to 64) one-bits from bit `first` on."""
    ones = -1 if count == 64 else (1 << count) - 1
    return ones << first


@_jit
def _any_overlap(desc: int, num_pieces: int) -> bool:
    """Whether two pieces share a cell: one bit a cell, 64 cells an entry. The table is large enough."""
    table, capacity, pieces = load(desc + 8 * TABLE), load(desc + 8 * TABLE_CAPACITY), load(desc + 8 * PIECES)
    epoch = _next_epoch(desc)
    for p in range(num_pieces):
        piece = pieces + PIECE_BYTES * p
        key = (epoch << 54) | (load(piece) << 42)
        at = load(piece + 8)
        end = at + load(piece + 16)
        while at < end:
            first = at & 63
            count = min(64 - first, end - at)
            bits = _bits(first, count)
            entry = _entry(table, capacity, key | (at >> 6))
            seen = load(entry + 8)
            if seen & bits:
                return True
            store(entry + 8, seen | bits)
            at += count
    return False


@_jit
def _resolve(desc: int, num_pieces: int) -> int:
    """Cut every piece down to the cells that no later piece writes; returns the number of pieces left (below 2 w).

    Goes from the last piece to the first, and writes the result behind the input, then over it.
    """
    table, capacity, pieces = load(desc + 8 * TABLE), load(desc + 8 * TABLE_CAPACITY), load(desc + 8 * PIECES)
    unit = load(desc + 8 * UNIT)
    epoch = _next_epoch(desc)
    out = pieces + PIECE_BYTES * num_pieces
    left = 0
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
                        left = _put_piece(out, left, group, open_at, at + i, values + (open_at - begin) * unit)
                        open_at = -1
            at += count
        if open_at >= 0:
            left = _put_piece(out, left, group, open_at, end, values + (open_at - begin) * unit)
    _move(pieces, out, left)
    return left


@_jit
def _put_piece(out: int, index: int, group: int, begin: int, end: int, values: int) -> int:
    piece = out + PIECE_BYTES * index
    store(piece, group)
    store(piece + 8, begin)
    store(piece + 16, end - begin)
    store(piece + 24, values)
    return index + 1


@_jit
def _move(to: int, source: int, count: int) -> None:
    """Move `count` pieces down; the ranges may overlap, and `to` lies below."""
    for i in range(count * PIECE_BYTES // 8):
        store(to + 8 * i, load(source + 8 * i))


@_jit
def _gather(desc: int) -> int:
    """Turn all logs into pieces; returns their number, or the code of what stands in the way.

    Notes on the way whether the writes of each group come in ascending order, or none of its rows comes twice: then none
    can overlap.
    """
    unit, scale = load(desc + 8 * UNIT), load(desc + 8 * SCALE)
    logs, groups = load(desc + 8 * LOGS), load(desc + 8 * GROUPS)
    num_writes = 0
    for i in range(load(desc + 8 * NUM_LOGS)):
        num_writes += load(load(logs + 16 * i) + 8 * LOG_WRITES)
    if num_writes == 0:
        return NOTHING
    if 3 * num_writes > load(desc + 8 * PIECES_CAPACITY):
        store(desc + 8 * NEED, 3 * num_writes)
        return GROW_PIECES
    for g in range(load(desc + 8 * NUM_GROUPS)):
        store(groups + 8 * (GROUP_FIELDS * g + GROUP_END), 0)

    piece, pack_number = load(desc + 8 * PIECES), (load(desc + 8 * PACK_NUMBER) + 1) & 0x7FFFFFFF
    store(desc + 8 * PACK_NUMBER, pack_number)
    count, blocks, num_values, ascending, once = 0, 0, 0, True, True
    for i in range(load(desc + 8 * NUM_LOGS)):
        log, first_group = load(logs + 16 * i), load(logs + 16 * i + 8)
        record, values = load(log + 8 * LOG_RECORDS), load(log + 8 * LOG_CONTENTS)
        may_overlap, num_contents = load(log + 8 * LOG_MAY_OVERLAP) != 0, load(log + 8 * LOG_VALUES)
        facts, stride, stamps, of_group = 0, 0, 0, -1  # of the group at hand
        for _ in range(load(log + 8 * LOG_WRITES)):
            length = load(record + 16)
            if length != 0:
                where, row = record + 24, load(record)
                if length > 0:
                    begin = load(where)
                    if begin + length > num_contents:
                        return TORN
                    where = values + begin * scale * unit
                else:
                    length = 1
                num_values += length
                units = length * scale
                group = (row >> 48) + first_group
                if group != of_group:
                    facts, of_group = groups + 8 * GROUP_FIELDS * group, group
                    stride, stamps = load(facts + 8 * GROUP_STRIDE), load(facts + 8 * GROUP_STAMPS)
                row &= ROW_MASK
                offset = row * stride + load(record + 8) * scale
                if may_overlap:
                    if offset < load(facts + 8 * GROUP_END):
                        ascending = False
                    store(facts + 8 * GROUP_END, offset + units)
                    if stamps == 0 or load32(stamps + 4 * row) == pack_number:
                        once = False
                    else:
                        store32(stamps + 4 * row, pack_number)
                    blocks += ((offset & 63) + units + 63) >> 6
                store(piece, group)
                store(piece + 8, offset)
                store(piece + 16, units)
                store(piece + 24, where)
                piece += PIECE_BYTES
                count += 1
            record += RECORD_BYTES
    store(desc + 8 * NUM_VALUES, num_values)
    if not (ascending or once):
        if 2 * blocks > load(desc + 8 * TABLE_CAPACITY):
            store(desc + 8 * NEED, 2 * blocks)
            return GROW_TABLE
        if _any_overlap(desc, count):
            count = _resolve(desc, count)
    return count


@_jit
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


@_jit
def _address(desc: int, piece: int) -> int:
    """Where on the device a piece goes."""
    facts = load(desc + 8 * GROUPS) + 8 * GROUP_FIELDS * load(piece)
    return load(facts + 8 * GROUP_BASE) + load(piece + 8) * load(desc + 8 * UNIT)


@_jit
def _direct_source(desc: int, piece: int) -> int:
    """The device address of a piece's values where the kernel may read them in place, else 0."""
    direct, values = load(desc + 8 * DIRECT), load(piece + 24)
    if direct == 0 or values < load(direct) or values >= load(direct + 8):
        return 0
    source = values + load(direct + 16)
    if source >> 48 != 0:  # a cell has 48 bits for it
        return 0
    return source if (source - _address(desc, piece)) & 15 == 0 else 0


@_jit
def pack(desc: int) -> int:
    """Lay all staged writes out in the next slot; returns the number of the launcher to call, or a code below 0.

    A slot whose fence has not passed is BUSY. On success the slot has a new sequence, the logs are empty (and know what
    was taken), NUM_BYTES is set and the totals have grown; otherwise nothing changed but scratch, and NEED says how much
    of what was missing. Launchers come by slot: one for each shape, then one for each shape after a copy of the slot.
    """
    num_pieces = _gather(desc)
    if num_pieces == 0:  # only writes of no values
        _take(desc)
        return NOTHING
    if num_pieces < 0:
        return num_pieces
    slot = load(desc + 8 * NEXT_SLOT)
    state = desc + 8 * (SLOTS + SLOT_FIELDS * slot)
    if load(load(state + 8 * SLOT_DONE)) != load(state + 8 * SLOT_SEQUENCE):
        return BUSY
    unit, pieces, groups = load(desc + 8 * UNIT), load(desc + 8 * PIECES), load(desc + 8 * GROUPS)

    # How much there is: inline cells, runs, and the tiles that runs are cut into.
    num_cells, num_runs, run_bytes, direct_bytes, had_long = 0, 0, 0, 0, 0
    for p in range(num_pieces):
        piece = pieces + PIECE_BYTES * p
        num_bytes = load(piece + 16) * unit
        if num_bytes <= INLINE_BYTES:
            num_cells += (num_bytes + 7) >> 3
        else:
            num_runs += 1
            run_bytes += num_bytes
            if num_bytes >= LONG_BYTES:
                had_long = 1
                if _direct_source(desc, piece) != 0:
                    direct_bytes += num_bytes
    tile = min(max((run_bytes >> 7) & ~15, MIN_TILE), MAX_TILE)
    num_tiles = 0
    if num_runs > 0:
        for p in range(num_pieces):
            num_bytes = load(pieces + PIECE_BYTES * p + 16) * unit
            if num_bytes > INLINE_BYTES:
                num_tiles += (num_bytes + tile - 1) // tile

    # How many lines that makes, and the smallest launch shape that has a warp for each.
    cells_per_line, runs_per_line = 32, min(max((num_tiles + 255) >> 8, 1), 31)
    if num_cells == 0 and num_tiles >= 8:
        cells_per_line, runs_per_line = 2, 1
    room = cells_per_line - 1
    lines = (num_cells + room - 1) // room
    beside = min(runs_per_line, lines * room - num_cells)  # runs that still fit into the last inline line
    lines += (max(num_tiles - beside, 0) + runs_per_line - 1) // runs_per_line
    shapes, shape, warps = load(desc + 8 * SHAPES), -1, 0
    for s in range(load(desc + 8 * NUM_SHAPES)):
        if load(shapes + 16 * s + 8) == cells_per_line and warps < lines:
            shape, warps = s, load(shapes + 16 * s)
    line_bytes = 16 * cells_per_line
    at = max(lines, warps) * line_bytes  # contents begin here
    if at + run_bytes - direct_bytes + 32 * num_runs > load(state + 8 * SLOT_CAPACITY):
        store(desc + 8 * NEED, at + run_bytes - direct_bytes + 32 * num_runs)
        return GROW_SLOT

    base = load(state + 8 * SLOT_ADDRESS)
    sequence = load(state + 8 * SLOT_SEQUENCE) % 255 + 1
    line, cell, runs_here = base, 0, 0
    for p in range(num_pieces):  # short writes: values in their cells, lines filled to the last
        piece = pieces + PIECE_BYTES * p
        units = load(piece + 16)
        if units * unit > INLINE_BYTES:
            continue
        where, values = (load(piece) << 48) | load(piece + 8), load(piece + 24)
        per_cell = 8 // unit
        while units > 0:
            if cell == room:
                store(line, sequence)
                store(line + 8, lines | (cell << 32))
                line, cell = line + line_bytes, 0
            cell += 1
            count = min(units, per_cell)
            store(line + 16 * cell, (count << 60) | where)
            store(line + 16 * cell + 8, load(values))  # may read past the last value: logs have room behind
            where, values, units = where + count, values + 8, units - count
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
    launcher = 2 * load(desc + 8 * NUM_SHAPES) * slot + shape
    if at >= load(desc + 8 * COPY_BYTES):
        store(desc + 8 * TOTAL_COPIES, load(desc + 8 * TOTAL_COPIES) + 1)
        launcher += load(desc + 8 * NUM_SHAPES)
    return launcher


@_jit
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


@_jit
def check_batch(
    record: int, end: int, rows: Any, starts: Any, cu_lens: Any, num_contents: int, num_rows: int, row_length: int
) -> int:
    """Check a batch and note it from address `record` on, with values from `end` on; nothing is staged yet.

    Returns -1, or `code << 48 | index of the first bad write`. `rows`, `starts`, `cu_lens` are ``[n] int64`` arrays.
    """
    before = 0
    for w in range(np.uint64(len(rows))):  # unsigned: no look for negative indices
        row, start, total = rows[w], starts[w], cu_lens[w]
        if row < 0 or row >= num_rows:
            return (ROW_OUTSIDE << 48) | np.int64(w)
        if total < before or total > num_contents:
            return (LENGTHS_WRONG << 48) | np.int64(w)
        if start < 0 or start > row_length - (total - before):
            return (START_OUTSIDE << 48) | np.int64(w)
        record = _put_record(record, row, start, total - before, end + before)
        before = total
    if before != num_contents:
        return (LENGTHS_WRONG << 48) | len(rows)
    return -1


# What `append` is told, int64 each: sizes, addresses of [groups, max_num_reqs] arrays, the batch, and scratch.
A_GROUPS, A_MAX_REQS, A_LOG, A_MAX_FACTOR = 0, 1, 2, 3
# int32 blocks a request has; int64 epoch in which its ids were staged last; int64 (epoch, place in the log) of the record that
# carries the counts of a chunk of rows: one run of changed counts costs less than a cell for each.
A_COUNTS, A_STAMPS, A_EPOCH, A_CHUNKS, CHUNK = 4, 5, 6, 20, 64
A_WIDTHS, A_FACTORS = 7, 8  # int64 a group: kernel blocks a row, kernel blocks a KV block
A_ROWS, A_ROW_BYTES, A_OVERWRITE, A_OVERWRITE_STEP = 9, 10, 11, 12  # request rows; a byte each, or one for all
A_INPUTS, A_BAD_GROUP, A_NEED_VALUES = 13, 14, 15
A_OLD, A_OLD_CAPACITY = 16, 17  # int64 a (write, group): counts to go back to
A_ONE, A_IDS, A_FIELDS = 18, 19, 21  # one request: int64 row, flag, then a length a group; its int32 ids back to back
IDS, IDS_BYTES, TOTALS, TOTALS_BYTES, NUM_IDS, INPUT_FIELDS = 0, 1, 2, 3, 4, 5  # a group's part of a batch
BLOCK_OVERFLOW, NO_ROOM = 4, 5


@_jit
def _load_item(address: int, item_bytes: int) -> int:
    """The int32 or int64 at `address`."""
    return load(address) if item_bytes == 8 else load32(address)


@_jit
def _any_id_outside(ids: int, ids_bytes: int, num_ids: int, factor: int) -> bool:
    """Whether a KV block id, expanded to `factor` kernel blocks, leaves int32."""
    if ids_bytes == 4 and factor == 1:
        return False
    for i in range(num_ids):
        b = _load_item(ids + ids_bytes * i, ids_bytes)
        if b > (0x7FFFFFFF - (factor - 1)) // factor or b < -(0x80000000 // factor):
            return True
    return False


@_jit
def append_one(desc: int, row: int, overwrite: int) -> int:
    """As `append`, for one request whose ids and lengths lie in the scratch of `desc`."""
    one, ids, inputs = load(desc + 8 * A_ONE), load(desc + 8 * A_IDS), load(desc + 8 * A_INPUTS)
    store(one, row)
    store(one + 8, overwrite)
    store(desc + 8 * A_ROWS, one)
    store(desc + 8 * A_ROW_BYTES, 8)
    store(desc + 8 * A_OVERWRITE, one + 8)
    store(desc + 8 * A_OVERWRITE_STEP, 0)
    for g in range(load(desc + 8 * A_GROUPS)):
        given, length = inputs + 8 * INPUT_FIELDS * g, load(one + 16 + 8 * g)
        store(given + 8 * IDS, ids)
        store(given + 8 * IDS_BYTES, 4)
        store(given + 8 * TOTALS, one + 16 + 8 * g)
        store(given + 8 * TOTALS_BYTES, 8)
        store(given + 8 * NUM_IDS, length)
        ids += 4 * length
    return append(desc, 1)


@_jit
def append(desc: int, num_writes: int) -> int:
    """Stage new block ids of all groups for `num_writes` requests, and the counts that they lead to; all or nothing.

    Returns -1, or `code << 48 | index of the first bad write`, with A_BAD_GROUP set. NO_ROOM asks for room in the log for
    twice the (write, group) pairs and A_NEED_VALUES values, and for scratch.
    """
    groups, max_reqs, log = load(desc + 8 * A_GROUPS), load(desc + 8 * A_MAX_REQS), load(desc + 8 * A_LOG)
    counts, old = load(desc + 8 * A_COUNTS), load(desc + 8 * A_OLD)
    widths, factors = load(desc + 8 * A_WIDTHS), load(desc + 8 * A_FACTORS)
    rows, row_bytes = load(desc + 8 * A_ROWS), load(desc + 8 * A_ROW_BYTES)
    overwrites, overwrite_step = load(desc + 8 * A_OVERWRITE), load(desc + 8 * A_OVERWRITE_STEP)
    inputs = load(desc + 8 * A_INPUTS)

    num_ids = 0
    for g in range(groups):
        given = inputs + 8 * INPUT_FIELDS * g
        totals, totals_bytes, before = load(given + 8 * TOTALS), load(given + 8 * TOTALS_BYTES), 0
        store(desc + 8 * A_BAD_GROUP, g)
        for w in range(num_writes):
            total = _load_item(totals + totals_bytes * w, totals_bytes)
            if total < before:
                return (LENGTHS_WRONG << 48) | w
            before = total
        if before != load(given + 8 * NUM_IDS):
            return (LENGTHS_WRONG << 48) | num_writes
        num_ids += before
    pairs = num_writes * groups
    num_chunks = (max_reqs + CHUNK - 1) // CHUNK
    store(
        desc + 8 * A_NEED_VALUES, num_ids * load(desc + 8 * A_MAX_FACTOR) + CHUNK * min(pairs, groups * num_chunks)
    )
    if (
        load(log + 8 * LOG_WRITES) + 2 * pairs > load(log + 8 * LOG_MAX_WRITES)
        or load(log + 8 * LOG_VALUES) + load(desc + 8 * A_NEED_VALUES) > load(log + 8 * LOG_MAX_VALUES)
        or pairs > load(desc + 8 * A_OLD_CAPACITY)
    ):
        return NO_ROOM << 48

    # All checks, with the counts moving on (a row may come more than once) and the old ones noted.
    for w in range(num_writes):
        row = _load_item(rows + row_bytes * w, row_bytes)
        if row < 0 or row >= max_reqs:
            return (ROW_OUTSIDE << 48) | w
    done = old
    for g in range(groups):
        given = inputs + 8 * INPUT_FIELDS * g
        totals, totals_bytes = load(given + 8 * TOTALS), load(given + 8 * TOTALS_BYTES)
        width, factor, counts_here, before = load(widths + 8 * g), load(factors + 8 * g), counts + 4 * max_reqs * g, 0
        bad = -1
        if _any_id_outside(load(given + 8 * IDS), load(given + 8 * IDS_BYTES), load(given + 8 * NUM_IDS), factor):
            bad = (BLOCK_OVERFLOW << 48) | num_writes
        else:
            for w in range(num_writes):
                count = counts_here + 4 * _load_item(rows + row_bytes * w, row_bytes)
                total = _load_item(totals + totals_bytes * w, totals_bytes)
                had = load32(count)
                has = (total - before) * factor
                if load8(overwrites + overwrite_step * w) == 0:
                    has += had
                if has > width:
                    bad = (START_OUTSIDE << 48) | w
                    break
                store(done, had)
                store32(count, has)
                done, before = done + 8, total
        if bad >= 0:
            store(desc + 8 * A_BAD_GROUP, g)
            while done > old:
                done -= 8
                w = (done - old) // 8
                row = _load_item(rows + row_bytes * (w % num_writes), row_bytes)
                store32(counts + 4 * (max_reqs * (w // num_writes) + row), load(done))
            return bad

    # Then the records: nothing can go wrong any more.
    if load(log + 8 * LOG_WRITES) == 0:
        store(desc + 8 * A_EPOCH, load(desc + 8 * A_EPOCH) + 1)
        store(log + 8 * LOG_MAY_OVERLAP, 0)
    epoch, stamps = load(desc + 8 * A_EPOCH), load(desc + 8 * A_STAMPS)
    records = load(log + 8 * LOG_RECORDS)
    record = records + RECORD_BYTES * load(log + 8 * LOG_WRITES)
    contents, values = load(log + 8 * LOG_CONTENTS), load(log + 8 * LOG_VALUES)
    for g in range(groups):
        given = inputs + 8 * INPUT_FIELDS * g
        totals, totals_bytes = load(given + 8 * TOTALS), load(given + 8 * TOTALS_BYTES)
        factor, stamps_here, old_here = load(factors + 8 * g), stamps + 8 * max_reqs * g, old + 8 * num_writes * g
        counts_here, chunks_here = counts + 4 * max_reqs * g, load(desc + 8 * A_CHUNKS) + 16 * num_chunks * g
        before = 0
        for w in range(num_writes):
            total = _load_item(totals + totals_bytes * w, totals_bytes)
            row, start = _load_item(rows + row_bytes * w, row_bytes), load(old_here + 8 * w)
            stamp = stamps_here + 8 * row
            if load8(overwrites + overwrite_step * w) != 0:
                start = 0
                if load(stamp) == epoch:  # this one, or what comes after it, goes over ids that are staged already
                    store(log + 8 * LOG_MAY_OVERLAP, 1)
            if total > before:
                store(stamp, epoch)
                record = _put_record(
                    record, (g << 48) | row, start, (total - before) * factor, values + before * factor
                )
                before = total
        _expand_ids(contents + 4 * values, load(given + 8 * IDS), load(given + 8 * IDS_BYTES), before, factor)
        values += before * factor
        before = 0
        for w in range(num_writes):
            total = _load_item(totals + totals_bytes * w, totals_bytes)
            if total == before and load8(overwrites + overwrite_step * w) == 0:
                continue
            before = total
            row = _load_item(rows + row_bytes * w, row_bytes)
            chunk = chunks_here + 16 * (row // CHUNK)
            if load(chunk) != epoch:
                store(chunk, epoch)
                store(chunk + 8, record - records)
                record = _put_record(record, (groups << 48) | g, row, 1, values + row % CHUNK)
                values += CHUNK
            at = records + load(chunk + 8)  # carries the counts of rows `first` to `end`, and from now on of `row`
            first, place = load(at + 8), load(at + 24)
            end = first + load(at + 16)
            if row < first:
                place -= first - row
                store(at + 24, place)
                store(at + 8, row)
                store(at + 16, end - row)
                copy(contents + 4 * place, counts_here + 4 * row, 4 * (first - row))
            elif row >= end:
                store(at + 16, row + 1 - first)
                copy(contents + 4 * (place + end - first), counts_here + 4 * end, 4 * (row + 1 - end))
            else:
                store32(contents + 4 * (place + row - first), load32(counts_here + 4 * row))
    store(log + 8 * LOG_VALUES, values)
    store(log + 8 * LOG_WRITES, (record - records) // RECORD_BYTES)
    return -1


@_jit
def _expand_ids(to: int, ids: int, ids_bytes: int, num_ids: int, factor: int) -> None:
    """Write KV block ids as the kernel blocks that they are."""
    if ids_bytes == 4 and factor == 1:
        copy(to, ids, 4 * num_ids)
        return
    for i in range(num_ids):
        first = _load_item(ids + ids_bytes * i, ids_bytes) * factor
        for k in range(factor):
            store32(to, first + k)
            to += 4


@_jit
def _put_record(record: int, group_and_row: int, start: int, length: int, value: int) -> int:
    store(record, group_and_row)
    store(record + 8, start)
    store(record + 16, length)
    store(record + 24, value)
    return record + RECORD_BYTES


@_jit
def append_batch(desc: int, rows: Any, ids: Any, totals: Any) -> int:
    """As `append`, from an array of rows and a tuple of arrays each of ids and totals; -2 - g where totals g are too few."""
    inputs = load(desc + 8 * A_INPUTS)
    store(desc + 8 * A_ROWS, rows.ctypes.data)
    store(desc + 8 * A_ROW_BYTES, 8)
    for g in range(len(ids)):
        if len(totals[g]) != len(rows):
            return -2 - g
        given = inputs + 8 * INPUT_FIELDS * g
        store(given + 8 * IDS, ids[g].ctypes.data)
        store(given + 8 * IDS_BYTES, 4)
        store(given + 8 * TOTALS, totals[g].ctypes.data)
        store(given + 8 * TOTALS_BYTES, totals[g].itemsize)
        store(given + 8 * NUM_IDS, len(ids[g]))
    return append(desc, len(rows))


# The descriptor of one step, as in `kernels/block_tables.cu`: int64 each.
S_SEQUENCE, S_IDX, S_STARTS, S_POSITIONS, S_NUM_REQS, S_NUM_ROWS, S_NUM_POSITIONS = 0, 1, 2, 3, 4, 5, 6
S_SLOTS, S_SLOTS_STRIDE, S_SLOTS_LENGTH, S_GATHERED = 7, 8, 9, 10
S_TARGETS, S_FACTS, S_CHUNKS, S_NUM_GROUPS, S_NUM_TABLES, S_MAX_REQS, S_NUM_CHUNKS = 11, 12, 13, 14, 15, 16, 17
S_FIRST_GROUP, S_OUT, OUT_GROUPS = 18, 19, 16
STEP_BYTES = 288  # rounded up to 16: inputs of the host lie behind it
# Facts of a group, int64 each; the width is that of a chunk of a gathered row.
F_SPAN, F_RANKS, F_RANK, F_INTERLEAVE, F_SPLIT, F_KERNEL_BLOCK, F_COLUMNS, F_WIDTH, F_FIELDS = 0, 1, 2, 3, 4, 5, 6, 7, 8
GATHER_COLUMNS, GROUPS_PER_UNIT = 512, 4

# What a step is told and tells, int64 each: constants of the descriptor (S_TARGETS to S_NUM_CHUNKS), then the ring. A
# slot has its address, that of the device's copy of it, its sequence, and the address of its fence word. Behind the
# ring comes one slot that is not fenced: the descriptor that goes by value.
P_CONSTANTS, P_NUM_SLOTS, P_NEXT, P_BYTES, P_BAD, P_SMALL_UNITS, P_SLOTS, P_SLOT_FIELDS = 0, 7, 8, 9, 10, 11, 12, 4
# Launchers of a slot: by bytes to fetch, each for few and for many units.
FETCH_BYTES = (4096, 32768)
STEP_SHAPES = 6
# What is wrong with a step's host arrays.
WRONG_COUNT, NOT_RISING, TOO_FEW_POSITIONS, TOO_MANY_TOKENS = -11, -12, -13, -14


@_jit
def note_step(
    desc: int,
    direct: int,
    idx: int,
    starts: int,
    positions: int,
    num_reqs: int,
    num_rows: int,
    num_positions: int,
    slots: int,
    slots_stride: int,
    slots_length: int,
    gathered: int,
    num_bytes: int,
) -> int:
    """Write a step's descriptor into the next slot, or, `direct`, into the one behind the ring.

    `idx` to `gathered` are as in the descriptor: addresses are the device's. Returns the number of the launcher, or BUSY.
    """
    num_slots = load(desc + 8 * P_NUM_SLOTS)
    slot = num_slots if direct else load(desc + 8 * P_NEXT)
    state = desc + 8 * (P_SLOTS + P_SLOT_FIELDS * slot)
    step, sequence = load(state), load(state + 16)
    if not direct:
        if load(load(state + 24)) != sequence:
            return BUSY
        sequence = sequence % 255 + 1
        store(state + 16, sequence)
        store(desc + 8 * P_NEXT, (slot + 1) % num_slots)
    store(step + 8 * S_SEQUENCE, sequence)
    store(step + 8 * S_IDX, idx)
    store(step + 8 * S_STARTS, starts)
    store(step + 8 * S_POSITIONS, positions)
    store(step + 8 * S_NUM_REQS, num_reqs)
    store(step + 8 * S_NUM_ROWS, num_rows)
    store(step + 8 * S_NUM_POSITIONS, num_positions)
    store(step + 8 * S_SLOTS, slots)
    store(step + 8 * S_SLOTS_STRIDE, slots_stride)
    store(step + 8 * S_SLOTS_LENGTH, slots_length)
    store(step + 8 * S_GATHERED, gathered)
    copy(step + 8 * S_TARGETS, desc + 8 * P_CONSTANTS, 8 * 7)
    store(desc + 8 * P_BYTES, num_bytes)
    groups, chunks = load(step + 8 * S_NUM_GROUPS), load(step + 8 * S_NUM_CHUNKS)
    units = (slots_length + 31) // 32 * ((groups + GROUPS_PER_UNIT - 1) // GROUPS_PER_UNIT) + num_rows * chunks
    fetch = 0 if num_bytes <= FETCH_BYTES[0] else 1 if num_bytes <= FETCH_BYTES[1] else 2
    return STEP_SHAPES * slot + 2 * fetch + (0 if units <= load(desc + 8 * P_SMALL_UNITS) else 1)


@_jit
def pack_step(
    desc: int,
    idx: Any,
    starts: Any,
    positions: Any,
    num_rows: int,
    num_tokens: int,
    slots: int,
    slots_stride: int,
    slots_length: int,
    gathered: int,
) -> int:
    """Check a step's host arrays and lay them out behind the descriptor in the next slot.

    `starts` and `positions` are ignored where no slots are mapped. Returns as `note_step`, or what is wrong with the
    arrays; then nothing was taken.
    """
    num_reqs, num_positions, before = len(idx), 0, 0
    if slots_length > 0:
        if len(starts) != num_reqs + 1:
            return WRONG_COUNT
        for i in range(num_reqs + 1):
            if starts[i] < before:
                store(desc + 8 * P_BAD, i)
                return NOT_RISING
            before = starts[i]
        num_positions = before
        if num_positions > len(positions):
            return TOO_FEW_POSITIONS
        if num_positions > num_tokens:
            return TOO_MANY_TOKENS
    at_starts = STEP_BYTES + (4 * num_reqs + 15 & ~15)
    at_positions = at_starts + (4 * num_reqs + 19 & ~15)
    state = desc + 8 * (P_SLOTS + P_SLOT_FIELDS * load(desc + 8 * P_NEXT))
    if load(load(state + 24)) != load(state + 16):
        return BUSY
    step, twin = load(state), load(state + 8)
    copy(step + STEP_BYTES, idx.ctypes.data, 4 * num_reqs)
    if slots_length > 0:
        copy(step + at_starts, starts.ctypes.data, 4 * (num_reqs + 1))
        copy(step + at_positions, positions.ctypes.data, 8 * num_positions)
    return note_step(
        desc,
        0,
        twin + STEP_BYTES,
        twin + at_starts,
        twin + at_positions,
        num_reqs,
        num_rows,
        num_positions,
        slots,
        slots_stride,
        slots_length,
        gathered,
        at_positions + 8 * num_positions,
    )


@_jit
def _slot_of(step: int, group: int, row: int, position: int) -> int:
    """Where the KV of a request's token goes in a group, or -1; `row` lies inside the table."""
    facts = load(step + 8 * S_FACTS) + 8 * F_FIELDS * group
    span, ranks, interleave = load(facts + 8 * F_SPAN), load(facts + 8 * F_RANKS), load(facts + 8 * F_INTERLEAVE)
    kv_column, offset = position // span, position % span
    if kv_column >= load(facts + 8 * F_COLUMNS):
        return -1
    if ranks > 1:
        turn = offset // interleave
        if turn % ranks != load(facts + 8 * F_RANK):
            return -1
        offset = turn // ranks * interleave + offset % interleave
    kernel_block = load(facts + 8 * F_KERNEL_BLOCK)
    column = kv_column * load(facts + 8 * F_SPLIT) + offset // kernel_block
    targets, num_tables = load(step + 8 * S_TARGETS), load(step + 8 * S_NUM_TABLES)
    counts = load(targets + 8 * (num_tables - 1))
    if column >= load32(counts + 4 * (group * load(step + 8 * S_MAX_REQS) + row)):
        return -1
    block = load32(load(targets + 8 * group) + row * load(targets + 8 * (num_tables + group)) + 4 * column)
    return block * kernel_block + offset % kernel_block if block >= 0 else -1


@_jit
def prepare_host(step: int) -> int:
    """Do what the kernel does with a step's descriptor; returns its sequence."""
    idx, starts, positions = load(step + 8 * S_IDX), load(step + 8 * S_STARTS), load(step + 8 * S_POSITIONS)
    num_reqs, max_reqs = load(step + 8 * S_NUM_REQS), load(step + 8 * S_MAX_REQS)
    targets, num_tables = load(step + 8 * S_TARGETS), load(step + 8 * S_NUM_TABLES)
    slots, stride, length = load(step + 8 * S_SLOTS), load(step + 8 * S_SLOTS_STRIDE), load(step + 8 * S_SLOTS_LENGTH)
    for group in range(load(step + 8 * S_NUM_GROUPS)):
        to = slots + 8 * stride * group
        token = 0
        for i in range(num_reqs if length > 0 else 0):
            row, begin, end = load32(idx + 4 * i), load32(starts + 4 * i), load32(starts + 4 * (i + 1))
            while token < begin:
                store(to + 8 * token, -1)
                token += 1
            while token < end:
                position = load(positions + 8 * token)
                known = row >= 0 and row < max_reqs and position >= 0
                store(to + 8 * token, _slot_of(step, group, row, position) if known else -1)
                token += 1
        while token < length:
            store(to + 8 * token, -1)
            token += 1
    gathered, chunks = load(step + 8 * S_GATHERED), load(step + 8 * S_CHUNKS)
    for c in range(load(step + 8 * S_NUM_CHUNKS)):
        chunk = load(chunks + 8 * c)
        group, first = chunk >> 40, chunk & 0xFFFFFFFFFF
        width = load(load(step + 8 * S_FACTS) + 8 * (F_FIELDS * group + F_WIDTH))
        table, row_bytes = load(targets + 8 * group), load(targets + 8 * (num_tables + group))
        own = step + 8 * (S_OUT + group - load(step + 8 * S_FIRST_GROUP))
        to = load(gathered + 8 * group) if gathered else load(own)
        for i in range(load(step + 8 * S_NUM_ROWS)):
            row = load32(idx + 4 * i) if i < num_reqs else -1
            owned = 0
            if row >= 0 and row < max_reqs:
                owned = load32(load(targets + 8 * (num_tables - 1)) + 4 * (group * max_reqs + row))
            for column in range(first, min(first + GATHER_COLUMNS, width)):
                block = load32(table + row * row_bytes + 4 * column) if column < owned else 0
                store32(to + 4 * (i * width + column), max(block, 0))
    return load(step)


_INTS = types.Array(types.int64, 1, "C")
_compiling = threading.RLock()


def compile_all() -> None:
    """Compile, or load from the disk cache, every function that Python calls; later calls compile nothing."""
    word = types.int64
    _compile(pack, word)
    _compile(apply_host, *[word] * 4)
    _compile(check_batch, word, word, _INTS, _INTS, _INTS, word, word, word)


MAX_TUPLE = 64  # arrays in a tuple: its compile time grows with the square


def compile_appends(num_groups: int) -> None:
    """Compile what stages block ids of `num_groups` groups."""
    word = types.int64
    _compile(append_one, *[word] * 3)
    if num_groups > MAX_TUPLE:
        _compile(append, word, word)
        return
    ids = types.UniTuple(types.Array(types.int32, 1, "C"), num_groups)
    _compile(append_batch, word, _INTS, ids, ids)
    _compile(append_batch, word, _INTS, ids, types.UniTuple(_INTS, num_groups))


def _compile(function: Any, *arguments: Any) -> None:
    with _compiling:  # another thread would switch compiling off meanwhile
        if arguments not in function.signatures:
            function.disable_compile(False)
            function.compile(arguments)
            function.disable_compile()  # a call with other types raises TypeError


def compile_step() -> None:
    """Compile what `step.py` calls."""
    word, ints = types.int64, types.Array(types.int32, 1, "C")
    _compile(note_step, *[word] * 13)
    _compile(prepare_host, word)
    _compile(pack_step, word, ints, ints, _INTS, *[word] * 6)


@_jit
def differ(one: int, other: int, num_words: int) -> bool:
    """Whether two arrays of 8-byte words differ in a bit."""
    at = 0
    while at < num_words:
        end = min(at + 512, num_words)  # no branch inside: it is compared 64 bytes at a time
        found = 0
        for i in range(at, end):
            found |= load(one + 8 * i) ^ load(other + 8 * i)
        if found != 0:
            return True
        at = end
    return False


def compile_params() -> None:
    """Compile what `params.py` calls."""
    _compile(differ, *[types.int64] * 3)
