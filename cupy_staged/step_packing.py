"""Jitted parts of a step: its descriptor and host inputs laid out in a slot, and the step itself on the host.

The head of `kernels/block_tables.cu` tells what a step does; memory is the `StepPath`'s (`step.py`). Nothing here calls
CUDA.
"""

from __future__ import annotations

from typing import Any

from .packing import BUSY
from .raw import INT32S, INT64S, WORD, compile_for, copy, jit, load, load32, store, store32

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


@jit
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

    `idx` to `gathered` are as in the descriptor: addresses are the device's. Returns the number of the launcher, or
    BUSY.
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


@jit
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


@jit
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


@jit
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


def compile_step() -> None:
    """Compile what `step.py` calls."""
    ints = INT32S
    compile_for(note_step, *[WORD] * 13)
    compile_for(prepare_host, WORD)
    compile_for(pack_step, WORD, ints, ints, INT64S, *[WORD] * 6)


@jit
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
    compile_for(differ, *[WORD] * 3)
