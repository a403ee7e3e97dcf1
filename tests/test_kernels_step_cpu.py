"""`kernels/block_tables.cu` built as C++ and run on the CPU: against the NumPy model, and what it may not touch."""

import mmap
from dataclasses import dataclass, field

import numpy as np
import pytest
from kernel_shim import KernelBuilder, KernelError, KernelLibrary, Launch, find_compiler

from cupy_staged import step_inputs, step_packing
from cupy_staged.testing import BlockTablesModel, assert_tables_equal

POISON = 77
GRIDS = [(1, 32), (1, 128), (3, 64), (7, 128)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no GNU C++ compiler found (CXX, g++, c++)")
    return KernelBuilder(compiler, tmp_path_factory.mktemp("kernels")).file("block_tables.cu")


@dataclass
class Batch:
    """What a step is given. `num_rows` 0 gathers nothing, `slots_length` 0 maps nothing."""

    rows: np.ndarray
    starts: np.ndarray
    positions: np.ndarray
    num_rows: int
    slots_length: int
    sequence: int = 9


@dataclass
class Bench:
    """The model, and memory as the kernels see it."""

    library: KernelLibrary
    model: BlockTablesModel
    strides: list[int]  # elements from row to row
    kept: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = self.model
        ranks = (model.cp_size, model.cp_rank, model.cp_interleave)
        self.facts = step_inputs.group_facts(
            model.block_sizes, model.kernel_block_sizes, model.max_blocks, ranks, model.sharded, model.enabled
        )
        self.widths = self.facts[:, step_packing.F_WIDTH].tolist()
        groups, reqs = len(self.widths), model.max_num_reqs
        lengths = [(reqs - 1) * stride + width for stride, width in zip(self.strides, self.widths, strict=True)]
        self.tables = [np.full(length, POISON, np.int32) for length in lengths]
        self.counts = np.zeros((groups, reqs), np.int32)
        everything = [*self.tables, self.counts]
        strides = [4 * s for s in self.strides] + [4 * reqs]
        self.targets = np.array([[array.ctypes.data for array in everything], strides], np.int64)
        chunks = [g << 40 | c for g, w in enumerate(self.widths) for c in range(0, w, step_packing.GATHER_COLUMNS)]
        self.chunks = np.array(chunks, np.int64)

    def take_model(self) -> None:
        """Copy what the model holds; cells behind the count are a former owner's."""
        for table, stride, width, want in zip(self.tables, self.strides, self.widths, self.model.tables, strict=True):
            for row in range(self.model.max_num_reqs):
                table[row * stride : row * stride + width] = want.rows[row]
        self.counts[...] = self.model.applied_num_blocks

    def outputs(self, batch: Batch) -> tuple[list[np.ndarray], np.ndarray]:
        gathered = [np.full((batch.num_rows, width), POISON, np.int32) for width in self.widths]
        return gathered, np.full((len(self.widths), batch.slots_length + 3), POISON, np.int64)

    def descriptor(
        self, batch: Batch, gathered: list[np.ndarray], slots: np.ndarray, *, own: bool = False
    ) -> np.ndarray:
        """Lay a step out as the kernel's head says; `own`: gather to addresses in the descriptor itself."""
        addresses = np.array([array.ctypes.data for array in gathered], np.int64)
        self.kept = [addresses]
        step = np.zeros(step_packing.STEP_BYTES // 8, np.int64)
        step[0], step[5] = batch.sequence, batch.num_rows
        step[1:4] = [array.ctypes.data for array in (batch.rows, batch.starts, batch.positions)]
        step[4], step[6] = len(batch.rows), len(batch.positions)
        step[7:11] = slots.ctypes.data, slots.shape[1], batch.slots_length, 0 if own else addresses.ctypes.data
        step[11:14] = self.targets.ctypes.data, self.facts.ctypes.data, self.chunks.ctypes.data
        step[14:18] = len(self.widths), len(self.widths) + 1, self.model.max_num_reqs, len(self.chunks)
        if own:
            step[step_packing.S_OUT : step_packing.S_OUT + len(addresses)] = addresses
        return step

    def launch(
        self, batch: Batch, grid: int, block: int, *, order: int = 0, by_value: bool = False, own: bool = False
    ) -> tuple[list[np.ndarray], np.ndarray, Launch]:
        gathered, slots = self.outputs(batch)
        step = self.descriptor(batch, gathered, slots, own=own)
        reads = [batch.rows, batch.starts, batch.positions, self.targets, self.facts, self.chunks, self.counts]
        reads += [*self.kept, *self.tables]
        memory = {"reads": reads, "writes": [*gathered, slots], "order": order}
        if by_value:
            value = int.from_bytes(step.tobytes()[: 8 * (step_packing.S_OUT + step_packing.OUT_GROUPS)], "little")
            return gathered, slots, self.library.launch("prepare_step_by_value", grid, block, value, **memory)
        ticket, done = np.zeros(1, np.uint32), np.full(1, 0xDEAD, np.uint64)
        launch = self.library.launch("prepare_step", grid, block, step, ticket, done, **memory)
        assert launch.published == [done.ctypes.data]
        assert launch.accesses_after_publish == 0
        assert (int(done[0]), int(ticket[0])) == (batch.sequence, 0)
        return gathered, slots, launch

    def check(self, batch: Batch, grid: int, block: int, **options: object) -> Launch:
        gathered, slots, launch = self.launch(batch, grid, block, **options)
        if batch.num_rows:
            for group, want in enumerate(self.model.gather_block_tables(batch.rows, batch.num_rows)):
                assert_tables_equal(gathered[group], want, group=group)
        if batch.slots_length:
            want = self.model.compute_slot_mappings(batch.rows, batch.starts, batch.positions, batch.slots_length)
            assert_tables_equal(slots[:, : batch.slots_length], want[:, : batch.slots_length])
        assert (slots[:, batch.slots_length :] == POISON).all()
        cells = sum(self.widths) * batch.num_rows
        assert launch.stores[4] == cells  # each cell once
        assert launch.stores[8] == batch.slots_length * len(self.widths) + len(launch.published)
        return launch


def make_bench(library: KernelLibrary, rng: np.random.Generator, groups: int, max_reqs: int = 5, **options) -> Bench:
    block_sizes = [int(b) for b in rng.choice([1, 3, 16, 48, 262144], groups)]
    divisors = [[d for d in (1, 3, 16, b) if b % d == 0 and b // d <= 48] for b in block_sizes]
    kernel_block_sizes = [int(rng.choice(some)) for some in divisors]
    cp_size = int(rng.choice([1, 2, 3, 8]))
    settings = {
        "kernel_block_sizes": kernel_block_sizes,
        "cp_size": cp_size,
        "cp_rank": int(rng.integers(0, cp_size)),
        "dcp_sharded": (rng.random(groups) < 0.7).tolist(),
        "slot_mapping_enabled": (rng.random(groups) < 0.8).tolist(),
    } | options
    widths = [int(n) for n in rng.integers(1, 9, groups)]
    model = BlockTablesModel(block_sizes, max_reqs, 200, widths, **settings)
    strides = [table.rows.shape[1] + int(rng.integers(0, 4)) for table in model.tables]
    return Bench(library, model, strides)


def fill(bench: Bench, rng: np.random.Generator) -> None:
    model = bench.model
    for row in range(model.max_num_reqs):
        counts = [int(rng.integers(0, n + 1)) for n in model.max_blocks]
        ids = [rng.integers(-3, (2**31 - 1) // s, n).tolist() for n, s in zip(counts, model.split, strict=True)]
        model.append_block_ids(row, ids, True)
    model.apply()
    bench.take_model()


def random_batch(bench: Bench, rng: np.random.Generator) -> Batch:
    model = bench.model
    num_reqs = int(rng.integers(0, model.max_num_reqs + 1))
    num_tokens = int(rng.integers(0, 150)) if num_reqs else 0
    starts = np.sort(rng.integers(0, num_tokens + 1, num_reqs + 1)).astype(np.int32)
    spans = [b * n for b, n in zip(model.block_sizes, model.max_blocks, strict=True)]
    positions = rng.integers(-1, 2 + int(rng.choice(spans)) * model.cp_size, num_tokens + 1)
    positions[rng.random(len(positions)) < 0.05] = int(rng.choice([-(2**63), 2**63 - 1, 2**32, 2**31]))
    rows = rng.integers(-2, model.max_num_reqs + 2, num_reqs).astype(np.int32)
    num_rows, length = int(rng.integers(num_reqs, model.max_num_reqs + 1)), int(rng.integers(150, 201))
    return Batch(rows, starts, positions, num_rows, length)


@pytest.mark.parametrize(("grid", "block"), GRIDS)
@pytest.mark.parametrize("seed", range(6))
def test_random_steps(library: KernelLibrary, grid: int, block: int, seed: int) -> None:
    rng = np.random.default_rng(100 * seed + grid)
    bench = make_bench(library, rng, int(rng.integers(1, 17)))
    fill(bench, rng)
    batch = random_batch(bench, rng)
    bench.check(batch, grid, block, order=seed)
    bench.check(batch, grid, block, by_value=True)
    bench.check(batch, grid, block, by_value=True, own=True)
    batch.num_rows = 0
    bench.check(batch, grid, block)  # slot mapping alone
    batch.num_rows, batch.slots_length = bench.model.max_num_reqs, 0
    bench.check(batch, grid, block)  # gather alone


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("interleave", [1, 2, 16])
def test_ranks_and_interleave(library: KernelLibrary, rank: int, interleave: int) -> None:
    model = BlockTablesModel(
        [16, 48, 16], 2, 200, [3, 1, 12], cp_size=4, cp_rank=rank, cp_interleave=interleave,
        kernel_block_sizes=[4, 16, 16], dcp_sharded=[True, True, False],
    )  # fmt: skip
    bench = Bench(library, model, [12, 3, 12])
    fill(bench, np.random.default_rng(rank))
    rows, starts = np.array([1, 0], np.int32), np.array([0, 192, 195], np.int32)
    bench.check(Batch(rows, starts, np.r_[0:192, 0:3], 2, 200), 2, 64)


@pytest.mark.parametrize("width", [1, 31, 32, 127, 128, 129, 511, 512, 513, 1100])
def test_rows_of_every_width(library: KernelLibrary, width: int) -> None:
    model = BlockTablesModel([1, 2], 3, 64, [width, 7])
    bench = Bench(library, model, [width, 9])
    for row, count in enumerate((width, width // 2, 0)):
        model.append_block_ids(row, [list(range(1, count + 1)), [5] * (count % 8)], True)
    model.apply()
    bench.take_model()
    for rows in ([0, 1, 2], [2, 1], [-1, 0], [3, -5, 2], []):
        batch = Batch(np.array(rows, np.int32), np.zeros(len(rows) + 1, np.int32), np.zeros(1, np.int64), 3, 0)
        launch = bench.check(batch, 2, 128)
        assert launch.stores[4] == 3 * (width + 7)


@pytest.mark.parametrize("num_reqs", [1, 2, 31, 32, 33, 200])
def test_every_request_is_found(library: KernelLibrary, num_reqs: int) -> None:
    model = BlockTablesModel([4], num_reqs, 256, [2])
    bench = Bench(library, model, [2])
    for row in range(num_reqs):
        model.append_block_ids(row, [[2 * row + 1, 2 * row + 2]], True)
    model.apply()
    bench.take_model()
    rng = np.random.default_rng(num_reqs)
    rows = rng.permutation(num_reqs).astype(np.int32)
    last = np.eye(1, num_reqs, num_reqs - 1, dtype=int)[0]
    for lengths in (np.ones(num_reqs, int), rng.integers(0, 2, num_reqs), last):
        starts = np.r_[0, np.cumsum(lengths)].astype(np.int32)
        bench.check(Batch(rows, starts, rng.integers(0, 8, int(starts[-1]) + 1), num_reqs, 256), 3, 64, order=num_reqs)


def test_no_requests_read_nothing(library: KernelLibrary) -> None:
    """Dummies have no arrays at all."""
    bench = make_bench(library, np.random.default_rng(1), 3)
    fill(bench, np.random.default_rng(2))
    batch = Batch(np.zeros(0, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int64), 4, 100)
    gathered, slots = bench.outputs(batch)
    step = bench.descriptor(batch, gathered, slots)
    step[step_packing.S_IDX] = step[step_packing.S_STARTS] = step[step_packing.S_POSITIONS] = 0
    reads = [bench.targets, bench.facts, bench.chunks, *bench.kept]  # neither tables nor counts
    ticket, done = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
    memory = {"reads": reads, "writes": [*gathered, slots]}
    library.launch("prepare_step", 2, 64, step, ticket, done, **memory)
    assert not any(array.any() for array in gathered)
    assert (slots[:, :100] == -1).all()


@pytest.mark.parametrize(
    "starts",
    [[0, 5, 400], [0, -7, 5], [9, 3, 5], [-3, -2, -1], [2**31 - 1, 0, 150], [0, 2**31 - 1, 2**31 - 1], [200, 200, 200]],
)
def test_starts_that_fit_nothing_stay_inside_the_buffers(library: KernelLibrary, starts: list[int]) -> None:
    """Device arrays cannot be checked: whatever they hold, the shim finds no access outside."""
    bench = make_bench(library, np.random.default_rng(3), 2)
    fill(bench, np.random.default_rng(4))
    positions = np.arange(20)
    batch = Batch(np.array([0, 4], np.int32), np.array(starts, np.int32), positions, 2, 180)
    for order in range(3):
        _, slots, _ = bench.launch(batch, 2, 64, order=order)
        assert (slots[:, 20:180] == -1).all()  # no position, no slot


def test_padding_is_spread_over_the_blocks(library: KernelLibrary) -> None:
    """The same step by one block and by many stores the same cells; with as many warps as tiles each has one tile."""
    model = BlockTablesModel([16], 1, 4096, [4])
    bench = Bench(library, model, [4])
    bench.take_model()
    batch = Batch(np.zeros(1, np.int32), np.array([0, 1], np.int32), np.zeros(1, np.int64), 1, 4096)
    one, many = bench.check(batch, 1, 32), bench.check(batch, 32, 128)
    assert one.stores[8] == many.stores[8] == 4097


def test_addresses_beyond_32_bits(library: KernelLibrary) -> None:
    """Row 50 000 of a table with a stride of 50 000 cells lies past 2**33 bytes."""
    reqs, stride, row = 50_001, 50_000, 50_000
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it since 3.13
    try:
        memory = mmap.mmap(-1, 4 * reqs * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(f"no sparse mapping of {4 * reqs * stride} bytes: {error}")
    table = np.frombuffer(memory, np.int32)
    table[row * stride : row * stride + 3] = 2**31 - 1, 6, 7
    model = BlockTablesModel([262144], 1, 8, [3])
    bench = Bench(library, model, [3])
    bench.model.max_num_reqs = reqs
    bench.tables, bench.strides = [table], [stride]
    bench.counts = np.zeros((1, reqs), np.int32)
    bench.counts[0, row] = 3
    bench.targets = np.array([[table.ctypes.data, bench.counts.ctypes.data], [4 * stride, 4 * reqs]], np.int64)
    batch = Batch(np.array([row], np.int32), np.array([0, 2], np.int32), np.array([262143, 262144]), 1, 8)
    gathered, slots, _ = bench.launch(batch, 1, 64)
    assert gathered[0].tolist() == [[2**31 - 1, 6, 7]]
    assert slots[0, :8].tolist() == [(2**31 - 1) * 262144 + 262143, 6 * 262144, *[-1] * 6]


@pytest.mark.parametrize("num_cells", [1, 18, 255, 256, 257, 1000])
@pytest.mark.parametrize(("grid", "block"), [(1, 256), (4, 256), (2, 32)])
def test_fetch_copies_the_slot(library: KernelLibrary, num_cells: int, grid: int, block: int) -> None:
    room = np.zeros(4 * num_cells + 4, np.uint64)
    begin = (-room.ctypes.data // 8) % 2
    slot, twin = room[begin : begin + 2 * num_cells], room[begin + 2 * num_cells : begin + 4 * num_cells]
    slot[:] = np.random.default_rng(num_cells).integers(0, 2**63, 2 * num_cells)
    launch = library.launch("fetch_step", grid, block, slot, twin, num_cells)
    np.testing.assert_array_equal(twin, slot)
    assert launch.loads[16] == launch.stores[16] == num_cells


def test_the_shim_sees_a_table_that_is_too_short(library: KernelLibrary) -> None:
    """The checks above would notice: a count past the width leads outside, and the launch is stopped."""
    model = BlockTablesModel([4], 1, 64, [2])
    bench = Bench(library, model, [2])
    bench.counts[0, 0] = 2
    bench.tables = [bench.tables[0][:1].copy()]
    bench.targets[0, 0] = bench.tables[0].ctypes.data
    batch = Batch(np.zeros(1, np.int32), np.array([0, 1], np.int32), np.array([4]), 1, 8)
    with pytest.raises(KernelError, match="out of bounds"):
        bench.launch(batch, 1, 32)
