"""All Numba-jitted functions: check batches, find and resolve overlaps, tile, pack, and apply a slot on the host.

They work on raw addresses (ints), since one int costs a call a few hundredths of a microsecond and an array half of one.
Memory belongs to the callers: a write log (`writes.py`) and a slot (`ring.py`). Nothing here calls CUDA or allocates.
The layout of a slot is told at the head of `kernels/apply_write.cu`; `pack` writes it and `apply_host` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


# A write log's header, int64 each: counts, addresses, and the counts that the last pack took.
LOG_WRITES, LOG_VALUES, LOG_RECORDS, LOG_CONTENTS, LOG_LAST_WRITES, LOG_LAST_VALUES, LOG_FIELDS = 0, 1, 2, 3, 4, 5, 6
# One record of a log: group, row, start, length.
RECORD_BYTES = 32

# What `pack` is told and tells, int64 each. SLOTS is followed by SLOT_FIELDS a slot.
UNIT, SCALE, LOGS, NUM_LOGS, GROUPS, NUM_GROUPS = 0, 1, 2, 3, 4, 5  # bytes of a unit; units an element; tables
TABLE, TABLE_CAPACITY, TABLE_EPOCH = 6, 7, 8  # hash table of touched cells, entries of 16 bytes
PIECES, PIECES_CAPACITY = 9, 10  # scratch: writes after overlaps are resolved
SHAPES, NUM_SHAPES = 11, 12  # launch shapes: (warps, cells a line) each
COPY_BYTES = 13  # slots of at least this many bytes are copied to the device first
NUM_BYTES, NEED = 14, 15  # results: bytes used in the slot; what was missing
TOTAL_LAUNCHES, TOTAL_WRITES, TOTAL_VALUES, TOTAL_BYTES, TOTAL_COPIES = 16, 17, 18, 19, 20
SLOTS, SLOT_FIELDS = 24, 3
SLOT_ADDRESS, SLOT_CAPACITY, SLOT_SEQUENCE = 0, 1, 2

# A group: units between rows, base address, end of its last write (scratch).
GROUP_STRIDE, GROUP_BASE, GROUP_END, GROUP_FIELDS = 0, 1, 2, 3

# What `pack` returns when it is not the number of a launch shape.
NOTHING, GROW_SLOT, GROW_TABLE, GROW_PIECES, TORN = -1, -2, -3, -4, -5

MAX_GROUPS = 4095  # 12 bits of a cell
INLINE_BYTES = 64  # longer writes go as runs: an inline value costs twice its bytes on the bus, a run 1.2 us of latency
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

    Notes on the way whether the writes of each group come in ascending order, in which case none can overlap.
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

    pieces = load(desc + 8 * PIECES)
    count, blocks, ascending = 0, 0, True
    for i in range(load(desc + 8 * NUM_LOGS)):
        log, first_group = load(logs + 16 * i), load(logs + 16 * i + 8)
        records, values = load(log + 8 * LOG_RECORDS), load(log + 8 * LOG_CONTENTS)
        end_values = values + load(log + 8 * LOG_VALUES) * unit * scale
        for w in range(load(log + 8 * LOG_WRITES)):
            record = records + RECORD_BYTES * w
            units = load(record + 24) * scale
            if units == 0:
                continue
            group = load(record) + first_group
            facts = groups + 8 * GROUP_FIELDS * group
            offset = load(record + 8) * load(facts + 8 * GROUP_STRIDE) + load(record + 16) * scale
            if offset < load(facts + 8 * GROUP_END):
                ascending = False
            store(facts + 8 * GROUP_END, offset + units)
            blocks += ((offset & 63) + units + 63) >> 6
            count = _put_piece(pieces, count, group, offset, offset + units, values)
            values += units * unit
        if values != end_values:
            return TORN
    if not ascending:
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
        num_writes, num_values = load(log + 8 * LOG_WRITES), load(log + 8 * LOG_VALUES)
        store(log + 8 * LOG_LAST_WRITES, num_writes)
        store(log + 8 * LOG_LAST_VALUES, num_values)
        store(log + 8 * LOG_WRITES, 0)
        store(log + 8 * LOG_VALUES, 0)
        store(desc + 8 * TOTAL_WRITES, load(desc + 8 * TOTAL_WRITES) + num_writes)
        store(desc + 8 * TOTAL_VALUES, load(desc + 8 * TOTAL_VALUES) + num_values)


@_jit
def pack(desc: int, slot: int) -> int:
    """Lay all staged writes out in slot number `slot`; returns the number of the launch shape, or a code below 0.

    `slot` is free (its fence has passed). On success it has a new sequence, the logs are empty (and know what was taken),
    NUM_BYTES is set and the totals have grown; otherwise nothing changed but scratch, and NEED says how much of what was
    missing. A shape number at or past NUM_SHAPES means the same shape after a copy of the slot to the device.
    """
    num_pieces = _gather(desc)
    if num_pieces == 0:  # only writes of no values
        _take(desc)
        return NOTHING
    if num_pieces < 0:
        return num_pieces
    unit, pieces, groups = load(desc + 8 * UNIT), load(desc + 8 * PIECES), load(desc + 8 * GROUPS)

    # How much there is: inline cells, runs, and the tiles that runs are cut into.
    num_cells, num_runs, run_bytes = 0, 0, 0
    for p in range(num_pieces):
        num_bytes = load(pieces + PIECE_BYTES * p + 16) * unit
        if num_bytes <= INLINE_BYTES:
            num_cells += (num_bytes + 7) >> 3
        else:
            num_runs += 1
            run_bytes += num_bytes
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
    state = desc + 8 * (SLOTS + SLOT_FIELDS * slot)
    if at + run_bytes + 32 * num_runs > load(state + 8 * SLOT_CAPACITY):
        store(desc + 8 * NEED, at + run_bytes + 32 * num_runs)
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
            group, offset = load(piece), load(piece + 8)
            address = load(groups + 8 * (GROUP_FIELDS * group + GROUP_BASE)) + offset * unit
            at = ((at + 15) & ~15) + (address & 15)
            copy(base + at, load(piece + 24), units * unit)
            while units > 0:
                if runs_here == runs_per_line or cell == room:
                    store(line, sequence)
                    store(line + 8, lines | (cell << 32))
                    line, cell, runs_here = line + line_bytes, 0, 0
                cell, runs_here = cell + 1, runs_here + 1
                count = min(units, tile // unit)
                store(line + 16 * cell, (15 << 60) | (group << 48) | offset)
                store(line + 16 * cell + 8, (count << 40) | at)
                offset, at, units = offset + count, at + count * unit, units - count
    store(line, sequence)
    store(line + 8, lines | (cell << 32))
    for i in range(lines, warps):  # warps without work read a header too
        store(base + i * line_bytes, sequence)
        store(base + i * line_bytes + 8, lines)

    _take(desc)
    store(desc + 8 * NUM_BYTES, at)
    store(desc + 8 * TOTAL_LAUNCHES, load(desc + 8 * TOTAL_LAUNCHES) + 1)
    store(desc + 8 * TOTAL_BYTES, load(desc + 8 * TOTAL_BYTES) + at)
    store(state + 8 * SLOT_SEQUENCE, sequence)
    if at >= load(desc + 8 * COPY_BYTES):
        store(desc + 8 * TOTAL_COPIES, load(desc + 8 * TOTAL_COPIES) + 1)
        return shape + load(desc + 8 * NUM_SHAPES)
    return shape


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
            if kind == 15:
                y = load(line + 16 * c + 8)
                copy(to, slot + (y & 0xFFFFFFFFFF), (y >> 40) * unit)
            else:
                copy(to, line + 16 * c + 8, kind * unit)
    return load(slot)


# What is wrong with a batch.
ROW_OUTSIDE, START_OUTSIDE, LENGTHS_WRONG = 1, 2, 3


@_jit
def check_batch(
    log: int, rows: int, starts: int, cu_lens: int, num_writes: int, num_contents: int, num_rows: int, row_length: int
) -> int:
    """Check a batch and note it behind the log's last record; the log's counts stay, so nothing is staged yet.

    Returns -1, or `code << 48 | index of the first bad write`. `rows`, `starts`, `cu_lens` are int64 arrays.
    """
    record = load(log + 8 * LOG_RECORDS) + RECORD_BYTES * load(log + 8 * LOG_WRITES)
    before = 0
    for w in range(num_writes):
        row, start, total = load(rows + 8 * w), load(starts + 8 * w), load(cu_lens + 8 * w)
        if row < 0 or row >= num_rows:
            return (ROW_OUTSIDE << 48) | w
        if total < before or total > num_contents:
            return (LENGTHS_WRONG << 48) | w
        if start < 0 or start > row_length - (total - before):
            return (START_OUTSIDE << 48) | w
        store(record, 0)
        store(record + 8, row)
        store(record + 16, start)
        store(record + 24, total - before)
        record += RECORD_BYTES
        before = total
    if before != num_contents:
        return (LENGTHS_WRONG << 48) | num_writes
    return -1


# What `append` is told, int64 each: sizes, addresses of [groups, max_num_reqs] arrays, and the batch.
A_GROUPS, A_MAX_REQS, A_LOG = 0, 1, 2
A_COUNTS, A_STAMPS, A_EPOCH = 3, 4, 5  # int32 blocks a request has; int64 (epoch, place in the log) of its staged count
A_WIDTHS, A_FACTORS = 6, 7  # int64 a group: kernel blocks a row, kernel blocks a KV block
A_OLD = 8  # int64 scratch a (write, group): counts to go back to
A_ROWS, A_ROW_BYTES, A_OVERWRITE, A_OVERWRITE_STEP = 9, 10, 11, 12  # request rows; a byte each, or one for all
A_INPUTS, A_BAD_GROUP, A_FIELDS = 13, 14, 15  # a group: address and item size of ids, address and item size of totals
INPUT_FIELDS = 4
BLOCK_OVERFLOW = 4


@_jit
def _load_item(address: int, item_bytes: int) -> int:
    """The int32 or int64 at `address`."""
    return load(address) if item_bytes == 8 else load32(address)


@_jit
def append(desc: int, num_writes: int) -> int:
    """Stage new block ids of all groups for `num_writes` requests, and the counts that they lead to; all or nothing.

    Returns -1, or `code << 48 | index of the first bad write`, with A_BAD_GROUP set. Room in the log was made before.
    """
    groups, max_reqs, log = load(desc + 8 * A_GROUPS), load(desc + 8 * A_MAX_REQS), load(desc + 8 * A_LOG)
    counts, old = load(desc + 8 * A_COUNTS), load(desc + 8 * A_OLD)
    widths, factors = load(desc + 8 * A_WIDTHS), load(desc + 8 * A_FACTORS)
    rows, row_bytes = load(desc + 8 * A_ROWS), load(desc + 8 * A_ROW_BYTES)
    overwrites, overwrite_step = load(desc + 8 * A_OVERWRITE), load(desc + 8 * A_OVERWRITE_STEP)
    inputs = load(desc + 8 * A_INPUTS)

    # First all checks, with the counts moving on (a row may come more than once) and the old ones noted.
    bad, done = -1, 0
    for w in range(num_writes):
        row = _load_item(rows + row_bytes * w, row_bytes)
        if row < 0 or row >= max_reqs:
            bad = (ROW_OUTSIDE << 48) | w
            break
        overwrite = load8(overwrites + overwrite_step * w)
        for g in range(groups):
            given = inputs + 8 * INPUT_FIELDS * g
            cu, cu_bytes = load(given + 16), load(given + 24)
            before = 0 if w == 0 else _load_item(cu + cu_bytes * (w - 1), cu_bytes)
            total = _load_item(cu + cu_bytes * w, cu_bytes)
            factor, count = load(factors + 8 * g), counts + 4 * (max_reqs * g + row)
            had = load32(count)
            has = (0 if overwrite else had) + (total - before) * factor
            if has > load(widths + 8 * g):
                bad = (START_OUTSIDE << 48) | w
            else:
                ids, ids_bytes = load(given), load(given + 8)
                for i in range(before, total):
                    b = _load_item(ids + ids_bytes * i, ids_bytes)
                    if b * factor + factor - 1 > 0x7FFFFFFF or b * factor < -0x80000000:
                        bad = (BLOCK_OVERFLOW << 48) | w
                        break
            if bad >= 0:
                store(desc + 8 * A_BAD_GROUP, g)
                break
            store(old + 8 * done, had)
            store32(count, has)
            done += 1
        if bad >= 0:
            break
    if bad >= 0:
        for d in range(done - 1, -1, -1):
            w, g = d // groups, d % groups
            row = _load_item(rows + row_bytes * w, row_bytes)
            store32(counts + 4 * (max_reqs * g + row), load(old + 8 * d))
        return bad

    # Then the records: nothing can go wrong any more.
    if load(log + 8 * LOG_WRITES) == 0:
        store(desc + 8 * A_EPOCH, load(desc + 8 * A_EPOCH) + 1)
    epoch, stamps = load(desc + 8 * A_EPOCH), load(desc + 8 * A_STAMPS)
    staged, values = load(log + 8 * LOG_WRITES), load(log + 8 * LOG_VALUES)
    records, contents = load(log + 8 * LOG_RECORDS), load(log + 8 * LOG_CONTENTS)
    done = 0
    for w in range(num_writes):
        row = _load_item(rows + row_bytes * w, row_bytes)
        overwrite = load8(overwrites + overwrite_step * w)
        for g in range(groups):
            given = inputs + 8 * INPUT_FIELDS * g
            cu, cu_bytes, ids, ids_bytes = load(given + 16), load(given + 24), load(given), load(given + 8)
            before = 0 if w == 0 else _load_item(cu + cu_bytes * (w - 1), cu_bytes)
            total = _load_item(cu + cu_bytes * w, cu_bytes)
            factor = load(factors + 8 * g)
            start = 0 if overwrite else load(old + 8 * done)
            done += 1
            if total > before:
                staged = _put_record(records, staged, g, row, start, (total - before) * factor)
                for i in range(before, total):
                    b = _load_item(ids + ids_bytes * i, ids_bytes) * factor
                    for k in range(factor):
                        store32(contents + 4 * values, b + k)
                        values += 1
            elif not overwrite:
                continue  # nothing new
            count = start + (total - before) * factor
            stamp = stamps + 16 * (max_reqs * g + row)
            if load(stamp) != epoch:
                store(stamp, epoch)
                store(stamp + 8, values)
                staged = _put_record(records, staged, groups, g, row, 1)
                values += 1
            store32(contents + 4 * load(stamp + 8), count)
    store(log + 8 * LOG_VALUES, values)
    store(log + 8 * LOG_WRITES, staged)
    return -1


@_jit
def _put_record(records: int, index: int, group: int, row: int, start: int, length: int) -> int:
    record = records + RECORD_BYTES * index
    store(record, group)
    store(record + 8, row)
    store(record + 16, start)
    store(record + 24, length)
    return index + 1


@_jit
def check_totals(cu: int, cu_bytes: int, num_writes: int, num_ids: int) -> int:
    """-1 if the running totals rise from 0 or more to `num_ids`; else the index of the first that does not fit."""
    before = 0
    for w in range(num_writes):
        total = _load_item(cu + cu_bytes * w, cu_bytes)
        if total < before or total > num_ids:
            return w
        before = total
    return -1 if before == num_ids else num_writes


def compile_all() -> None:
    """Compile, or load from the disk cache, every function that Python calls; later calls compile nothing."""
    for function, num_args in ((pack, 2), (apply_host, 4), (check_batch, 8), (append, 2), (check_totals, 4)):
        if not function.signatures:
            function.compile((types.int64,) * num_args)
