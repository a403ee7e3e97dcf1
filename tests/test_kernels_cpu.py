"""The kernel sources, built as C++ and run on the CPU: what they write, and what they may not touch.

The slots here are laid out by a builder of the tests' own, written from the head of `kernels/apply_write.cu`; one part
takes them from the library's packer.
"""

import mmap
from dataclasses import dataclass

import numpy as np
import pytest
from kernel_shim import (
    KERNELS,
    KernelBuilder,
    KernelError,
    KernelLibrary,
    Launch,
    find_compiler,
    kernel_names,
    kernel_sources,
)

from cupy_staged import kernels, packing

UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
GUARD = 64  # bytes on either side of a table
SEQUENCE = 0x1234_5678_9ABC

each_unit = pytest.mark.parametrize("unit_bytes", UNITS)
each_line_size = pytest.mark.parametrize("cells_per_line", [32, 2])
each_shape = pytest.mark.parametrize(("grid", "block"), [(1, 32), (1, 128), (3, 64), (8, 128)])


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> KernelBuilder:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no GNU C++ compiler found (CXX, g++, c++)")
    return KernelBuilder(compiler, tmp_path_factory.mktemp("kernels"))


def aligned(nbytes: int, shift: int = 0) -> np.ndarray:
    """`[nbytes] uint8` of zeros at an address that is `shift` modulo 16."""
    # Mapped memory lies high: an offset can be taken from its address without leaving the address space.
    room = np.frombuffer(mmap.mmap(-1, nbytes + 32), np.uint8)
    begin = (shift - room.ctypes.data) % 16
    return room[begin : begin + nbytes]


class Table:
    """A table of random cells between two guard zones, and what it should hold after the writes."""

    def __init__(self, rng: np.random.Generator, unit_bytes: int, length: int, shift: int = 0) -> None:
        self._all = aligned(2 * GUARD + length * unit_bytes, shift)
        self._all[:] = rng.integers(0, 256, len(self._all), np.uint8)
        self._expected = self._all.copy()
        inside = slice(GUARD, GUARD + length * unit_bytes)
        self.cells = self._all[inside].view(UNITS[unit_bytes])
        self.expected = self._expected[inside].view(UNITS[unit_bytes])

    @property
    def address(self) -> int:
        return self.cells.ctypes.data

    def check(self) -> None:
        np.testing.assert_array_equal(self._all, self._expected)


@dataclass
class Write:
    group: int
    offset: int
    values: np.ndarray
    address: int  # where the first element goes
    run: bool


def lay_out(
    writes: list[Write], cells_per_line: int, num_warps: int, *, room: int | None = None, sequence: int = SEQUENCE
) -> np.ndarray:
    """Lay writes out in a slot: up to `room` cells a line, contents behind them, the end rounded up to 16 bytes."""
    room = cells_per_line - 1 if room is None else room
    cells: list[tuple[int, int]] = []
    contents: list[tuple[int, np.ndarray]] = []
    num_cells = 0
    for write in writes:
        per_cell = 8 // write.values.itemsize
        num_cells += 1 if write.run else -(-len(write.values) // per_cell)
    num_lines = -(-num_cells // room)
    at = max(num_lines, num_warps) * cells_per_line * 16
    for write in writes:
        where = write.group << 48 | write.offset
        if write.run:
            at += -at % 16 + write.address % 16
            cells.append((15 << 60 | where, len(write.values) << 40 | at))
            contents.append((at, write.values.view(np.uint8)))
            at += write.values.nbytes
        else:
            per_cell = 8 // write.values.itemsize
            for i in range(0, len(write.values), per_cell):
                part = write.values[i : i + per_cell]
                # What lies behind the last value must not matter.
                y = int.from_bytes(part.tobytes().ljust(8, b"\xee"), "little")
                cells.append((len(part) << 60 | (where + i), y))

    slot = aligned(-(-at // 16) * 16)
    slot[:] = 0xEE
    lines = slot.view(np.uint64)[: max(num_lines, num_warps) * cells_per_line * 2].reshape(-1, cells_per_line, 2)
    for i, line in enumerate(lines):
        here = cells[i * room : (i + 1) * room]
        line[0] = sequence, num_lines | len(here) << 32
        line[1 : 1 + len(here)] = np.array(here, np.uint64).reshape(-1, 2)
    for begin, values in contents:
        slot[begin : begin + len(values)] = values
    return slot


class Bench:
    """Tables, a ticket and a `done` word; launches, and checks what every launch has to keep."""

    def __init__(self, library: KernelLibrary, unit_bytes: int, seed: int = 0) -> None:
        self.library = library
        self.unit_bytes = unit_bytes
        self.rng = np.random.default_rng(seed)
        self.ticket = np.zeros(1, np.uint32)
        self.done = np.full(1, 0xDEAD, np.uint64)
        self.tables: dict[int, Table] = {}
        self.writes: list[Write] = []

    def table(self, group: int, length: int, shift: int = 0) -> Table:
        self.tables[group] = Table(self.rng, self.unit_bytes, length, shift)
        return self.tables[group]

    def write(self, group: int, offset: int, length: int, *, run: bool) -> None:
        table = self.tables[group]
        values = self.rng.integers(0, 1 << 8 * self.unit_bytes, length, UNITS[self.unit_bytes], endpoint=False)
        table.expected[offset : offset + length] = values
        self.writes.append(Write(group, offset, values, table.address + offset * self.unit_bytes, run))

    def random_writes(self, group: int, longest_run: int) -> None:
        """Fill most of a table with writes that do not overlap, of every kind."""
        at, end = 0, len(self.tables[group].cells)
        while True:
            at += int(self.rng.integers(0, 4))
            run = bool(self.rng.random() < 0.5)
            length = int(self.rng.integers(1, longest_run if run else 20))
            if at + length > end:
                return
            self.write(group, at, length, run=run)
            at += length

    def apply(
        self, grid: int, block: int, slot: np.ndarray, cells_per_line: int, *, order: int = 0, sequence: int = SEQUENCE
    ) -> Launch:
        """Launch `apply_write` for groups 0 and 1, else `apply_write_groups`, and check the tables."""
        slot.flags.writeable = False
        memory = [table.cells for table in self.tables.values()]
        if set(self.tables) <= {0, 1}:
            ends = [self.tables[group].cells if group in self.tables else 0 for group in (0, 1)]
            args = ("apply_write", grid, block, slot, cells_per_line, self.ticket, self.done, *ends)
        else:
            bases = np.zeros(max(self.tables) + 1, np.uint64)
            for group, table in self.tables.items():
                bases[group] = table.address
            args = ("apply_write_groups", grid, block, slot, cells_per_line, self.ticket, self.done, bases)
        launch = self.library.launch(*args, writes=memory, order=order)
        self.check_end(launch, sequence)
        for table in self.tables.values():
            table.check()
        return launch

    def check_end(self, launch: Launch, sequence: int) -> None:
        """`done` holds the sequence, was written once and last, and the ticket is ready for the next launch."""
        assert launch.published == [self.done.ctypes.data]
        assert launch.accesses_after_publish == 0
        assert int(self.done[0]) == sequence
        assert int(self.ticket[0]) == 0

    @property
    def bytes_written(self) -> int:
        return sum(write.values.nbytes for write in self.writes)


def stored_bytes(launch: Launch) -> int:
    """Bytes stored, without the `done` word."""
    return sum(width * count for width, count in launch.stores.items()) - 8


@pytest.fixture
def bench(builder: KernelBuilder, unit_bytes: int) -> Bench:
    return Bench(builder.file("apply_write.cu", unit_bytes), unit_bytes)


# apply_write and apply_write_groups


@each_unit
@each_line_size
@each_shape
@pytest.mark.parametrize("groups", [(0,), (0, 1), (0, 1, 2)])
def test_random_writes(bench: Bench, cells_per_line: int, grid: int, block: int, groups: tuple[int, ...]) -> None:
    for group in groups:
        bench.table(group, 700, shift=bench.unit_bytes * group % 16)
        bench.random_writes(group, 90)
    bench.rng.shuffle(bench.writes)
    slot = lay_out(bench.writes, cells_per_line, grid * block // 32)
    launch = bench.apply(grid, block, slot, cells_per_line, order=grid + block)
    assert stored_bytes(launch) == bench.bytes_written


@each_unit
@each_line_size
@pytest.mark.parametrize("shift", [0, 8])
def test_value_cells_of_every_count_and_alignment(bench: Bench, cells_per_line: int, shift: int) -> None:
    bench.table(0, 8 * 16 * 20, shift)
    at = 0
    for count in range(1, 8 // bench.unit_bytes + 1):
        for residue in range(16 // bench.unit_bytes):
            at += (residue - at) % (16 // bench.unit_bytes)
            bench.write(0, at, count, run=False)
            at += count + 1
    slot = lay_out(bench.writes, cells_per_line, 4)
    assert stored_bytes(bench.apply(1, 128, slot, cells_per_line)) == bench.bytes_written


RUN_LENGTHS = (*range(1, 35), 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047, 4095, 4096, 4097, 5000)


@each_unit
@pytest.mark.parametrize("cells_per_line", [32, 2])
def test_runs_of_every_length_and_alignment(bench: Bench, cells_per_line: int) -> None:
    per_cell = 16 // bench.unit_bytes
    for residue in range(per_cell):
        bench.writes.clear()
        bench.table(0, sum(RUN_LENGTHS) + len(RUN_LENGTHS) * (per_cell + 1))
        at, whole_steps = 0, 0
        for length in RUN_LENGTHS:
            at += (residue - at) % per_cell
            bench.write(0, at, length, run=True)
            whole_steps += max((at + length) // per_cell - -(-at // per_cell), 0)
            at += length + 1
        slot = lay_out(bench.writes, cells_per_line, 4)
        launch = bench.apply(2, 64, slot, cells_per_line, order=residue)
        assert stored_bytes(launch) == bench.bytes_written
        assert launch.stores[16] == whole_steps  # the inside of a run moves in the widest steps, and nothing else does


@each_unit
@pytest.mark.parametrize("shift", range(16))
def test_target_of_any_alignment(bench: Bench, shift: int) -> None:
    if shift % bench.unit_bytes:
        bench.table(0, 8, shift)
        bench.write(0, 3, 1, run=False)
        with pytest.raises(KernelError, match=r"misaligned|undefined: type_mismatch"):
            bench.apply(1, 32, lay_out(bench.writes, 32, 1), 32)
        return
    bench.table(0, 300, shift)
    bench.random_writes(0, 60)
    bench.apply(1, 64, lay_out(bench.writes, 32, 2), 32)


@each_unit
def test_a_run_longer_than_16_bits(bench: Bench) -> None:
    bench.table(0, 70_001)
    bench.write(0, 1, 70_000, run=True)
    bench.apply(1, 32, lay_out(bench.writes, 2, 1), 2)


@pytest.mark.parametrize("unit_bytes", [1, 4])
@each_line_size
@each_shape
@pytest.mark.parametrize("room", [None, 1])
def test_many_lines_a_warp(bench: Bench, cells_per_line: int, grid: int, block: int, room: int | None) -> None:
    num_warps = grid * block // 32
    num_cells = (5 * num_warps + 1) * (room or cells_per_line - 1)
    bench.table(0, 3 * num_cells)
    for i in range(num_cells):
        bench.write(0, 3 * i, 2, run=i % 8 == 0)
    slot = lay_out(bench.writes, cells_per_line, num_warps, room=room)
    launch = bench.apply(grid, block, slot, cells_per_line, order=1)
    assert stored_bytes(launch) == bench.bytes_written


@pytest.mark.parametrize("unit_bytes", [2, 8])
@each_line_size
def test_few_lines_for_many_blocks(bench: Bench, cells_per_line: int) -> None:
    bench.table(0, 900)
    bench.random_writes(0, 200)
    slot = lay_out(bench.writes, cells_per_line, 264 * 4)
    bench.apply(264, 128, slot, cells_per_line, order=3)


@pytest.mark.parametrize("unit_bytes", [4])
@each_line_size
@each_shape
def test_empty_lines_write_nothing(bench: Bench, cells_per_line: int, grid: int, block: int) -> None:
    table = bench.table(0, 10)
    before = table.cells.copy()
    slot = lay_out([], cells_per_line, grid * block // 32)
    launch = bench.apply(grid, block, slot, cells_per_line)
    assert stored_bytes(launch) == 0
    np.testing.assert_array_equal(table.cells, before)


@pytest.mark.parametrize("unit_bytes", [4])
def test_cells_past_the_count_of_a_line_are_ignored(bench: Bench) -> None:
    bench.table(0, 10)
    bench.write(0, 2, 1, run=False)
    slot = lay_out(bench.writes, 32, 1)
    # A write as a former use of the slot may have left it.
    slot[32:48].view(np.uint64)[:] = (1 << 60 | 5, 99)
    bench.apply(1, 32, slot, 32)


@pytest.mark.parametrize("unit_bytes", [4])
@pytest.mark.parametrize("grid", [1, 2, 7, 264])
@pytest.mark.parametrize("order", [0, 1, 5])
@pytest.mark.parametrize("sequence", [1, 255, 2**32, 2**64 - 1])
def test_done_and_ticket_over_launches(bench: Bench, grid: int, order: int, sequence: int) -> None:
    bench.table(0, 100)
    bench.random_writes(0, 9)
    for step in range(2):
        slot = lay_out(bench.writes, 32, 2 * grid, sequence=sequence - step)
        bench.apply(grid, 64, slot, 32, order=order, sequence=sequence - step)


@pytest.mark.parametrize("unit_bytes", [4, 8])
@pytest.mark.parametrize("cells_per_line", [32, 2])
@pytest.mark.parametrize("order", [0, 1, 11, 12, 13])
def test_any_order_of_blocks_and_lanes(bench: Bench, cells_per_line: int, order: int) -> None:
    for group in range(3):
        bench.table(group, 500, shift=8)
        bench.random_writes(group, 40)
    bench.apply(8, 64, lay_out(bench.writes, cells_per_line, 16), cells_per_line, order=order)


@each_unit
def test_group_ids_up_to_the_last(bench: Bench) -> None:
    for group in (0, 1, 2, 255, 256, 2047, 2048, 4094, 4095):
        bench.table(group, 60, shift=8)
        bench.random_writes(group, 25)
    bench.apply(3, 64, lay_out(bench.writes, 32, 6), 32)


@each_unit
def test_counts_are_the_second_table(bench: Bench) -> None:
    bench.table(0, 60)
    bench.table(1, 8, shift=8)
    bench.write(0, 3, 40, run=True)
    bench.write(1, 5, 1, run=False)
    bench.write(0, 50, 1, run=False)
    bench.write(1, 7, 1, run=False)
    bench.apply(1, 32, lay_out(bench.writes, 32, 1), 32)


@each_unit
@pytest.mark.parametrize("offset", [2**31 - 3, 2**31 + 5, 2**32 - 3, 2**32 + 5, 2**33 + 1, 2**40 + 7])
@pytest.mark.parametrize("kernel", ["apply_write", "apply_write_groups"])
def test_offsets_past_32_bits(bench: Bench, offset: int, kernel: str) -> None:
    # Only the piece of the table around the offset is real.
    table = bench.table(0, 200)
    bench.random_writes(0, 50)
    for write in bench.writes:
        write.offset += offset
    base = (table.address - offset * bench.unit_bytes) % 2**64  # wraps, where the heap lies low
    last = 0 if kernel == "apply_write" else None
    args = (base, last) if last is not None else (np.array([base], np.uint64),)
    slot = lay_out(bench.writes, 32, 2)
    launch = bench.library.launch(kernel, 1, 64, slot, 32, bench.ticket, bench.done, *args, writes=[table.cells])
    bench.check_end(launch, SEQUENCE)
    table.check()


@pytest.mark.parametrize("unit_bytes", [1, 8])
@pytest.mark.parametrize("at", [2**31 + 16, 2**32 + 48, 2**33])
def test_contents_far_behind_the_lines(bench: Bench, at: int) -> None:
    table = bench.table(0, 200)
    bench.write(0, 3, 150, run=True)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it since 3.13
    try:
        memory = mmap.mmap(-1, at + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(f"no sparse mapping of {at} bytes: {error}")
    slot = np.frombuffer(memory, np.uint8)
    begin = at + bench.writes[0].address % 16
    slot[begin : begin + bench.writes[0].values.nbytes] = bench.writes[0].values.view(np.uint8)
    slot[:64].view(np.uint64)[:4] = (SEQUENCE, 1 | 1 << 32, 15 << 60 | 3, 150 << 40 | begin)
    launch = bench.library.launch("apply_write", 1, 32, slot, 2, bench.ticket, bench.done, table.cells, 0)
    bench.check_end(launch, SEQUENCE)
    table.check()


@pytest.mark.parametrize("request_word", [0, 1, 2**63, 2**64 - 1, 0x0123_4567_89AB_CDEF])
@pytest.mark.parametrize(("grid", "block"), [(1, 1), (1, 32), (2, 64)])
def test_uva_probe_answers_with_flipped_bits(builder: KernelBuilder, request_word: int, grid: int, block: int) -> None:
    request, answer = np.array([request_word], np.uint64), np.zeros(1, np.uint64)
    launch = builder.file("uva_probe.cu").launch("uva_probe", grid, block, request, answer)
    assert int(answer[0]) == request_word ^ (2**64 - 1)
    assert launch.published == [answer.ctypes.data]


# From the library's packer


@dataclass
class Packed:
    slot: np.ndarray
    grid: int
    block: int
    cells_per_line: int
    sequence: int


def pack(
    unit_bytes: int, groups: list[tuple[int, int, int]], logs: list[list[tuple[int, int, int, np.ndarray]]]
) -> Packed:
    """Pack with the library.

    A group is (row stride in elements, base address, entries of its notes), a write (group, row, start, values).
    """
    keep = []  # the packer sees addresses only

    def hold(array: np.ndarray) -> int:
        keep.append(array)
        return array.ctypes.data

    num_writes = sum(map(len, logs))
    log_table = []
    for log in logs:
        ends = np.cumsum([0, *(len(values) for *_, values in log)])
        records = np.array(
            [(g << 48 | row, start, len(values), end) for (g, row, start, values), end in zip(log, ends, strict=False)],
            np.int64,
        ).reshape(-1, 4)
        values = np.concatenate([np.zeros(0, UNITS[unit_bytes]), *(values for *_, values in log)])
        contents = aligned(values.nbytes + 8)  # the packer reads in steps of 8 bytes
        contents[: values.nbytes] = values.view(np.uint8)
        head = np.zeros(packing.LOG_FIELDS, np.int64)
        head[packing.LOG_WRITES], head[packing.LOG_VALUES] = len(log), len(values)
        head[packing.LOG_MAY_OVERLAP] = 1
        head[packing.LOG_RECORDS], head[packing.LOG_CONTENTS] = hold(records), hold(contents)
        log_table.append((hold(head), 0))

    slot = aligned(1 << 21)
    capacity = 1 << 15
    desc = np.zeros(packing.SLOTS + packing.SLOT_FIELDS, np.int64)
    desc[packing.UNIT], desc[packing.SCALE] = unit_bytes, 1
    desc[packing.LOGS], desc[packing.NUM_LOGS] = hold(np.array(log_table, np.int64)), len(logs)
    facts = np.zeros((len(groups), packing.GROUP_FIELDS), np.int64)
    for fact, (stride, base, entries) in zip(facts, groups, strict=True):
        fact[[packing.GROUP_STRIDE, packing.GROUP_BASE]] = stride, base
        fact[[packing.GROUP_ROWS_MASK, packing.GROUP_CELLS_MASK]] = entries - 1
        fact[packing.GROUP_ROWS_NOTED] = hold(np.zeros(entries, np.int32))
        fact[packing.GROUP_CELLS_NOTED] = hold(np.zeros(entries, np.int64))
    desc[packing.GROUPS], desc[packing.NUM_GROUPS] = hold(facts), len(groups)
    desc[packing.TABLE], desc[packing.TABLE_CAPACITY] = hold(np.zeros((capacity, 2), np.int64)), capacity
    desc[packing.PIECES] = hold(np.zeros((3 * num_writes + 1, packing.PIECE_BYTES), np.uint8))
    desc[packing.PIECES_CAPACITY] = 3 * num_writes + 1
    desc[packing.SHAPES], desc[packing.NUM_SHAPES] = hold(kernels.shape_table()), len(kernels.SHAPES)
    state = desc[packing.SLOTS :]
    state[packing.SLOT_ADDRESS] = slot.ctypes.data
    state[packing.SLOT_SEQUENCE], state[packing.SLOT_DONE] = 41, hold(np.array([41]))
    desc[packing.NUM_SLOTS] = 1

    for room in (512, 4096, len(slot)):
        slot[:] = 0xEE
        state[packing.SLOT_CAPACITY] = room
        shape = packing.pack(desc.ctypes.data)
        assert (slot[room:] == 0xEE).all()  # a slot that is too small is not left
        if shape != packing.GROW_SLOT:
            break
        assert room < desc[packing.NEED] <= len(slot)
    assert 0 <= shape < len(kernels.SHAPES)
    num_bytes = -(-int(desc[packing.NUM_BYTES]) // 16) * 16  # the kernel reads whole 16-byte steps
    return Packed(slot[:num_bytes], *kernels.SHAPES[shape], int(state[packing.SLOT_SEQUENCE]))


@each_unit
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("longest", [8, 60, 3000, 20_000])
@pytest.mark.parametrize("num_writes", [1, 7, 150])
def test_packed_writes(builder: KernelBuilder, unit_bytes: int, num_groups: int, longest: int, num_writes: int) -> None:
    """Random writes, also overlapping ones, give what NumPy gives one by one: by kernel and by `apply_host`."""
    bench = Bench(builder.file("apply_write.cu", unit_bytes), unit_bytes, seed=num_writes + longest)
    rng = bench.rng
    num_rows, width, stride = 5, longest + 20, longest + 23
    num_writes = min(num_writes, 400_000 // longest)
    logs = []
    for group in range(num_groups):
        table = bench.table(group, num_rows * stride, shift=8 * (group % 2))
        log = []
        for _ in range(num_writes):
            length = int(rng.integers(0, longest + 1))
            row, start = int(rng.integers(num_rows)), int(rng.integers(width - length + 1))
            values = rng.integers(0, 1 << 8 * unit_bytes, length, UNITS[unit_bytes], endpoint=False)
            table.expected[row * stride + start : row * stride + start + length] = values
            log.append((group, row, start, values))
        logs.append(log)
    logs[0].append((0, 1, 2, np.arange(3, dtype=UNITS[unit_bytes])))  # at least one value
    bench.tables[0].expected[stride + 2 : stride + 5] = np.arange(3)

    tables = [bench.tables[group] for group in range(num_groups)]
    entries = (1 << 13, 1, 4)  # room for every cell, or for few
    packed = pack(unit_bytes, [(stride, t.address, n) for t, n in zip(tables, entries, strict=False)], logs)
    host = [table.cells.copy() for table in tables]
    addresses = np.array([cells.ctypes.data for cells in host], np.int64)
    slot = packed.slot.ctypes.data
    assert packing.apply_host(slot, packed.cells_per_line, unit_bytes, addresses.ctypes.data) == packed.sequence
    for cells, table in zip(host, tables, strict=True):
        np.testing.assert_array_equal(cells, table.expected)

    bench.apply(
        packed.grid, packed.block, packed.slot, packed.cells_per_line, order=1 + num_writes, sequence=packed.sequence
    )


# The shim itself: what it must find


def run_text(builder: KernelBuilder, body: str, *, grid: int = 1, block: int = 64, order: int = 0) -> np.ndarray:
    """Run a kernel of `u32* out [64]`, `const u32* in [4]`, `volatile u32* word [1]` and `u32* ticket [1]`."""
    source = (
        'extern "C" __global__ void k(u32* out, const u32* in, volatile u32* word, u32* ticket) {\n'
        f"    const u32 t = threadIdx.x, b = blockIdx.x;\n    (void)t; (void)b;\n{body}\n}}\n"
    )
    out, words = np.zeros(64, np.uint32), np.arange(4, dtype=np.uint32)
    args = (out, words, np.zeros(1, np.uint32), np.zeros(1, np.uint32))
    builder.text(source).launch("k", grid, block, *args, order=order, max_steps=100_000)
    return out


BROKEN = {
    "other step": ("if (t < 7) WARP_BALLOT(1); else WARP_BALLOT(0);", "divergence: waits in WARP_BALLOT"),
    "step of a part": ("if (t != 9) WARP_BALLOT(1);", "divergence"),
    "ended lane": ("if (t == 0) return; WARP_BALLOT(1);", "has ended"),
    "block step of a part": ("if (t < 32) BLOCK_SYNC();", "divergence"),
    "block and warp step": ("if (t & 1) BLOCK_SYNC(); else WARP_BALLOT(1);", "divergence"),
    "load outside": ("out[0] = in[4 + t];", "out of bounds: reads 4 bytes at byte 16 of argument 1"),
    "store outside": ("out[64 + t] = 1;", "out of bounds: stores 4 bytes at byte 256 of argument 0"),
    "store below": ("out[(i64)t - 1] = 1;", "out of bounds: stores 4 bytes at byte -4 of argument 0"),
    "store to const": ("((u32*)in)[0] = 1;", "may not"),
    "two threads store": ("out[t / 2] = 1;", "race: stores to"),
    "two blocks store": ("if (t == 0) out[3] = b;", "race: stores to"),
    "read what another stores": ("out[t] = t; out[t] = out[t ^ 32] + out[t];", "race"),
    "store what another read": ("if (in[0] + out[40 + t % 2] < 9 && t == 50) out[40] = 1;", "race"),
    "misaligned": ("*(u64*)(out + 1 + 2 * (t % 8)) = 1;", r"misaligned|type_mismatch"),
    "shift": ("out[t] = 1u << (t + 1);", "undefined: shift_out_of_bounds"),
    "no end": ("while (*word == 0) {}", "does not end"),
    "ticket before fence": ("out[t] = b; BLOCK_SYNC(); if (t == 0) TICKET(ticket, 0);", "not fenced"),
    "ticket before the block": (
        "if (t == 0) { FENCE_DEVICE(); TICKET(ticket, 1); } if (b == 0) out[t] = 1;",
        "after its block drew a ticket",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_shim_reports(builder: KernelBuilder, name: str) -> None:
    body, message = BROKEN[name]
    with pytest.raises(KernelError, match=message):
        run_text(builder, body, grid=2)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_shim_accepts_a_right_kernel(builder: KernelBuilder, order: int) -> None:
    body = """
        u32 sum = t;
        for (u32 step = 16; step; step /= 2) sum += WARP_SHUFFLE_XOR(sum, step);
        const u32 odd = WARP_BALLOT(t & 1);
        const u32 first = WARP_BROADCAST(t, LOWEST_BIT(odd));
        out[t] = sum * 1000 + first;
        BLOCK_SYNC();
        const u32 other = out[63 - t];
        BLOCK_SYNC();
        out[t] = other;
        BLOCK_SYNC();
        if (t == 0) {
            FENCE_DEVICE();
            if (TICKET(ticket, gridDim.x - 1) == gridDim.x - 1) {
                FENCE_SYSTEM();
                *word = 1;
            }
        }
    """
    out = run_text(builder, body, order=order)
    low, high = sum(range(32)) * 1000 + 1, sum(range(32, 64)) * 1000 + 33
    np.testing.assert_array_equal(out, [high] * 32 + [low] * 32)


def test_shim_refuses_a_part_of_a_warp(builder: KernelBuilder) -> None:
    with pytest.raises(KernelError, match="fewer than 32 threads"):
        run_text(builder, "WARP_BALLOT(1);", block=48)


@pytest.mark.parametrize("name", [path.name for path in kernel_sources()])
def test_shim_takes_every_kernel_source(builder: KernelBuilder, name: str) -> None:
    library = builder.file(name, 4)
    for kernel in kernel_names((KERNELS / name).read_text()):
        with pytest.raises(TypeError, match=f"{kernel} takes"):
            library.launch(kernel, 1, 32)
