"""Jitted staging of block ids: one pass checks all requests and groups, another notes the writes that follow.

Memory is the `BlockLog`'s (`appends.py`). Host only.
"""

from __future__ import annotations

from typing import Any

from numba import types

from .packing import (
    LENGTHS_WRONG,
    LOG_CONTENTS,
    LOG_MAX_VALUES,
    LOG_MAX_WRITES,
    LOG_MAY_OVERLAP,
    LOG_RECORDS,
    LOG_VALUES,
    LOG_WRITES,
    RECORD_BYTES,
    ROW_OUTSIDE,
    START_OUTSIDE,
    wrong_total,
)
from .raw import INT32S, INT64S, WORD, compile_for, copy, jit, load, load8, load32, load_item, put_four, store, store32

# What `append` is told, int64 each: sizes, addresses of [groups, max_num_reqs] arrays, the batch, and scratch.
A_GROUPS, A_MAX_REQS, A_LOG, A_MAX_FACTOR = 0, 1, 2, 3
# int32 blocks a request has; int64 epoch in which its ids were staged last; int64 (epoch, place in the log) of the
# record that carries the counts of a chunk of rows: one run of changed counts costs less than a cell for each.
A_COUNTS, A_STAMPS, A_EPOCH, A_CHUNKS = 4, 5, 6, 7
CHUNK_BITS = 6
CHUNK = 1 << CHUNK_BITS
A_WIDTHS, A_FACTORS = 8, 9  # int64 a group: kernel blocks a row, kernel blocks a KV block
A_ROWS, A_OVERWRITE, A_OVERWRITE_STEP = 10, 11, 12  # int64 request rows; a byte each, or one for all
A_INPUTS, A_BAD_GROUP, A_NEED_VALUES = 13, 14, 15
A_OLD, A_OLD_CAPACITY = 16, 17  # int64 a (write, group): counts to go back to
A_ONE, A_IDS, A_FIELDS = 18, 19, 20  # one request: int64 row, flag, then a length a group; its int32 ids back to back
IDS, IDS_BYTES, TOTALS, TOTALS_BYTES, NUM_IDS, INPUT_FIELDS = 0, 1, 2, 3, 4, 5  # a group's part of a batch
BLOCK_OVERFLOW, NO_ROOM = 4, 5


@jit
def _any_id_outside(ids: int, ids_bytes: int, num_ids: int, factor: int) -> bool:
    """Whether a KV block id, expanded to `factor` kernel blocks, leaves int32."""
    if ids_bytes == 4 and factor == 1:
        return False
    for i in range(num_ids):
        b = load_item(ids + ids_bytes * i, ids_bytes)
        if b > (0x7FFFFFFF - (factor - 1)) // factor or b < -(0x80000000 // factor):
            return True
    return False


@jit
def append_one(desc: int, row: int, overwrite: int) -> int:
    """As `append`, for one request whose ids and lengths lie in the scratch of `desc`."""
    one, ids, inputs = load(desc + 8 * A_ONE), load(desc + 8 * A_IDS), load(desc + 8 * A_INPUTS)
    store(one, row)
    store(one + 8, overwrite)
    store(desc + 8 * A_ROWS, one)
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


@jit
def append(desc: int, num_writes: int) -> int:
    """Stage new block ids of all groups for `num_writes` requests, and the counts that they lead to; all or nothing.

    Returns -1, or `code << 48 | index of the first bad write`, with A_BAD_GROUP set. NO_ROOM asks for scratch for each
    (write, group) pair, and for room in the log for twice as many writes and A_NEED_VALUES values: for values only once
    everything was found to be right.
    """
    groups, max_reqs, log = load(desc + 8 * A_GROUPS), load(desc + 8 * A_MAX_REQS), load(desc + 8 * A_LOG)
    counts, old = load(desc + 8 * A_COUNTS), load(desc + 8 * A_OLD)
    widths, factors = load(desc + 8 * A_WIDTHS), load(desc + 8 * A_FACTORS)
    rows = load(desc + 8 * A_ROWS)
    overwrites, overwrite_step = load(desc + 8 * A_OVERWRITE), load(desc + 8 * A_OVERWRITE_STEP)
    inputs = load(desc + 8 * A_INPUTS)

    num_ids = 0
    for g in range(groups):
        given = inputs + 8 * INPUT_FIELDS * g
        w = wrong_total(load(given + 8 * TOTALS), load(given + 8 * TOTALS_BYTES), num_writes, load(given + 8 * NUM_IDS))
        if w >= 0:
            store(desc + 8 * A_BAD_GROUP, g)
            return (LENGTHS_WRONG << 48) | w
        num_ids += load(given + 8 * NUM_IDS)
    pairs, num_chunks = num_writes * groups, (max_reqs + CHUNK - 1) // CHUNK
    store(desc + 8 * A_NEED_VALUES, 0)
    if pairs > load(desc + 8 * A_OLD_CAPACITY) or (
        load(log + 8 * LOG_WRITES) + 2 * pairs > load(log + 8 * LOG_MAX_WRITES)
    ):
        return NO_ROOM << 48

    # All checks, with the counts moving on (a row may come more than once) and the old ones noted.
    for w in range(num_writes):
        row = load(rows + 8 * w)
        if row < 0 or row >= max_reqs:
            return (ROW_OUTSIDE << 48) | w
    done, bad = old, -1
    for g in range(groups):
        store(desc + 8 * A_BAD_GROUP, g)
        given = inputs + 8 * INPUT_FIELDS * g
        totals, totals_bytes = load(given + 8 * TOTALS), load(given + 8 * TOTALS_BYTES)
        width, factor, counts_here, before = load(widths + 8 * g), load(factors + 8 * g), counts + 4 * max_reqs * g, 0
        if _any_id_outside(load(given + 8 * IDS), load(given + 8 * IDS_BYTES), load(given + 8 * NUM_IDS), factor):
            bad = (BLOCK_OVERFLOW << 48) | num_writes
        else:
            for w in range(num_writes):
                count = counts_here + 4 * load(rows + 8 * w)
                total = load_item(totals + totals_bytes * w, totals_bytes)
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
            break
    need = num_ids * load(desc + 8 * A_MAX_FACTOR) + CHUNK * min(pairs, groups * num_chunks)
    if bad < 0 and load(log + 8 * LOG_VALUES) + need > load(log + 8 * LOG_MAX_VALUES):
        store(desc + 8 * A_NEED_VALUES, need)
        bad = NO_ROOM << 48
    if bad >= 0:
        while done > old:
            done -= 8
            w = (done - old) // 8
            row = load(rows + 8 * (w % num_writes))
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
        num_ids, before, chunk, low, high = load(given + 8 * NUM_IDS), 0, -1, 0, 0
        counts_at = values + num_ids * factor  # behind the ids
        for w in range(num_writes):
            total = load_item(totals + totals_bytes * w, totals_bytes)
            row, start = load(rows + 8 * w), load(old_here + 8 * w)
            stamp = stamps_here + 8 * row
            if load8(overwrites + overwrite_step * w) != 0:
                start = 0
                if load(stamp) == epoch:  # this one, or what comes after it, goes over ids that are staged already
                    store(log + 8 * LOG_MAY_OVERLAP, 1)
            elif total == before:
                continue
            if total > before:
                store(stamp, epoch)
                record = put_four(record, (g << 48) | row, start, (total - before) * factor, values + before * factor)
                before = total
            if row >> CHUNK_BITS != chunk:
                if chunk >= 0:
                    record, counts_at = _put_counts(
                        chunks_here + 16 * chunk, epoch, records, record, contents, counts_at, counts_here,
                        (groups << 48) | g, low, high,
                    )  # fmt: skip
                chunk, low, high = row >> CHUNK_BITS, row, row
            low, high = min(low, row), max(high, row + 1)
        if chunk >= 0:
            record, counts_at = _put_counts(
                chunks_here + 16 * chunk, epoch, records, record, contents, counts_at, counts_here,
                (groups << 48) | g, low, high,
            )  # fmt: skip
        _expand_ids(contents + 4 * values, load(given + 8 * IDS), load(given + 8 * IDS_BYTES), num_ids, factor)
        values = counts_at
    store(log + 8 * LOG_VALUES, values)
    store(log + 8 * LOG_WRITES, (record - records) // RECORD_BYTES)
    return -1


@jit
def _put_counts(
    chunk: int,
    epoch: int,
    records: int,
    record: int,
    contents: int,
    values: int,
    counts: int,
    group_and_row: int,
    low: int,
    high: int,
) -> tuple[int, int]:
    """Let the record of a chunk carry the counts of rows `low` to `high` too; returns the ends of records and values.

    `chunk` is the address of the chunk's epoch and record. The rows between what it has and what comes travel along.
    """
    if load(chunk) != epoch:
        store(chunk, epoch)
        store(chunk + 8, record - records)
        record = put_four(record, group_and_row, low, 0, values + (low & (CHUNK - 1)))
        values += CHUNK
    at = records + load(chunk + 8)
    first, place = load(at + 8), load(at + 24)
    end = first + load(at + 16)
    begin, stop = min(low, end), max(high, first)
    to = contents + 4 * (place + begin - first)
    if stop - begin == 1:
        store32(to, load32(counts + 4 * begin))
    else:
        copy(to, counts + 4 * begin, 4 * (stop - begin))
    low = min(low, first)
    store(at + 8, low)
    store(at + 16, max(high, end) - low)
    store(at + 24, place + low - first)
    return record, values


@jit
def _expand_ids(to: int, ids: int, ids_bytes: int, num_ids: int, factor: int) -> None:
    """Write KV block ids as the kernel blocks that they are."""
    if ids_bytes == 4 and factor == 1:
        copy(to, ids, 4 * num_ids)
        return
    for i in range(num_ids):
        first = load_item(ids + ids_bytes * i, ids_bytes) * factor
        for k in range(factor):
            store32(to, first + k)
            to += 4


@jit
def append_batch(desc: int, rows: Any, ids: Any, totals: Any) -> int:
    """As `append`, from an array of rows and tuples of arrays of ids and totals; -2 - g where totals g are too few."""
    inputs = load(desc + 8 * A_INPUTS)
    store(desc + 8 * A_ROWS, rows.ctypes.data)
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


MAX_TUPLE = 64  # arrays in a tuple: its compile time grows with the square


def compile_appends(num_groups: int) -> None:
    """Compile what stages block ids of `num_groups` groups."""
    compile_for(append_one, *[WORD] * 3)
    if num_groups > MAX_TUPLE:
        compile_for(append, WORD, WORD)
        return
    ids = types.UniTuple(INT32S, num_groups)
    compile_for(append_batch, WORD, INT64S, ids, ids)
    compile_for(append_batch, WORD, INT64S, ids, types.UniTuple(INT64S, num_groups))
