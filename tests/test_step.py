"""Gather, slot mapping and both in one launch, against the plain NumPy model, on every backend and stream."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_staged import BlockTables
from cupy_staged.testing import BlockTablesModel, assert_tables_equal

BLOCK_SIZES = (1, 2, 3, 16, 24, 64, 128, 1024, 262144)
SEEDS = range(12)
INT32 = np.iinfo(np.int32)


class Pair:
    """The library's tables and the model, fed alike."""

    def __init__(self, place, *args, max_concurrency=None, **options):
        self.place = place
        self.tables = place.make(BlockTables, *args, max_concurrency=max_concurrency, **options)
        self.model = BlockTablesModel(*args, **options)

    def append(self, row, ids, overwrite):
        self.tables.append_block_ids(row, ids, overwrite)
        self.model.append_block_ids(row, ids, overwrite)

    def apply(self):
        self.tables.apply_staged_writes()
        self.model.apply()

    def fill(self, rng, *, share=1.0):
        """Give every row some blocks, from none to all that it has room for; a few ids are negative."""
        for row in range(self.model.max_num_reqs):
            ids = []
            for blocks, split in zip(self.model.max_blocks, self.model.split, strict=True):
                count = int(rng.integers(0, int(blocks * share) + 1))
                found = rng.integers(0, INT32.max // split, count)
                found[rng.random(count) < 0.05] *= -1
                ids.append(found.tolist())
            self.append(row, ids, True)
        self.apply()

    def batch(self, rng, *, wild=True):
        """Make a random batch: rows, first tokens, positions, and both padded sizes."""
        model = self.model
        num_reqs = int(rng.integers(0, model.max_num_reqs + 1))
        low, high = (-2, model.max_num_reqs + 2) if wild else (0, model.max_num_reqs)
        rows = rng.integers(low, high, num_reqs).astype(np.int32)
        num_tokens = int(rng.integers(0, model.max_num_batched_tokens + 1)) if num_reqs else 0
        starts = np.sort(rng.integers(0, num_tokens + 1, num_reqs + 1)).astype(np.int32)
        spans = [b * n * (model.cp_size if s else 1) for b, n, s in self.groups()]
        positions = rng.integers(0, max(1, int(rng.choice(spans))), num_tokens + 3)
        if wild:
            odd = rng.random(len(positions)) < 0.1
            positions[odd] = rng.choice([-1, -(2**62), 2**62, 2**31, 2**32 + 5, max(spans)], odd.sum())
        padded = int(rng.integers(num_reqs, model.max_num_reqs + 1))
        tokens_padded = int(rng.integers(starts[-1], model.max_num_batched_tokens + 1))
        return rows, starts, positions, padded, tokens_padded

    def groups(self):
        return zip(self.model.block_sizes, self.model.max_blocks, self.model.sharded, strict=True)

    def poison(self):
        """Leave what no step may leave behind in the buffers that it writes."""
        for array in (*self.tables.input_block_tables, self.tables.slot_mappings):
            array[...] = 77

    def check_tables(self, got, batch):
        for group, want in enumerate(self.model.gather_block_tables(batch[0], batch[3])):
            assert_tables_equal(self.place.asnumpy(got[group]), want, group=group)

    def check_slots(self, got, batch):
        want = self.model.compute_slot_mappings(batch[0], batch[1], batch[2], batch[4])
        assert_tables_equal(self.place.asnumpy(got), want[:, : batch[4]])
        assert_tables_equal(self.place.asnumpy(self.tables.slot_mappings), want)

    def check(self, batch):
        """Prepare a batch in every way, from host and from device arrays, and compare it all with the model."""
        tables, place = self.tables, self.place
        *_, padded, tokens_padded = batch
        on_device = tuple(place.asarray(array) for array in batch[:3])
        for arrays in (batch[:3], on_device):
            self.poison()
            found, slots = tables.prepare_step(*arrays, padded, tokens_padded)
            self.check_tables(found, batch)
            self.check_slots(slots, batch)
            self.poison()
            self.check_tables(tables.gather_block_tables(arrays[0], padded), batch)
            assert (place.asnumpy(tables.slot_mappings) == 77).all()
            self.check_slots(tables.compute_slot_mappings(*arrays, tokens_padded), batch)


def random_pair(place, rng, groups):
    """Tables of random sizes: kernel blocks, ranks, interleaves, groups that are not sharded or not mapped."""
    block_sizes = [int(b) for b in rng.choice(BLOCK_SIZES, groups)]
    divisors = [[d for d in (1, 2, 3, 8, 16, b) if b % d == 0 and b // d <= 64] for b in block_sizes]
    kernel_block_sizes = [int(rng.choice(some)) for some in divisors]
    cp_size = int(rng.choice([1, 2, 3, 4, 8]))
    shared = int(np.gcd.reduce(block_sizes))
    return Pair(
        place,
        block_sizes,
        int(rng.integers(1, 7)),
        int(rng.integers(1, 90)),
        [int(n) for n in rng.integers(1, 12, groups)],
        kernel_block_sizes=kernel_block_sizes if rng.random() < 0.7 else None,
        cp_size=cp_size,
        cp_rank=int(rng.integers(0, cp_size)),
        cp_interleave=int(rng.choice([d for d in (1, 2, 4, 16, shared) if shared % d == 0])),
        dcp_sharded=(rng.random(groups) < 0.7).tolist() if rng.random() < 0.7 else None,
        slot_mapping_enabled=(rng.random(groups) < 0.8).tolist() if rng.random() < 0.5 else None,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_random_steps(place, seed):
    rng = np.random.default_rng(seed)
    pair = random_pair(place, rng, int(rng.integers(1, 17)))
    for share in (1.0, 0.4):
        pair.fill(rng, share=share)
        pair.check(pair.batch(rng))
        pair.check(pair.batch(rng, wild=False))


@given(groups=st.integers(1, 16), seed=st.integers(0, 2**32 - 1))
def test_random_shapes(host, groups, seed):
    rng = np.random.default_rng(seed)
    pair = random_pair(host, rng, groups)
    pair.fill(rng)
    pair.check(pair.batch(rng))


@pytest.mark.parametrize("kernel_block", [16, 4])
@pytest.mark.parametrize("interleave", [1, 4, 16])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_ranks_share_the_tokens_of_a_sharded_group(place, cp_size, interleave, kernel_block):
    length = 16 * cp_size * 3
    rows, starts = np.zeros(1, np.int32), np.array([0, length], np.int32)
    positions = np.arange(length)
    owners, places = np.zeros((2, length), np.int64), []
    for rank in range(cp_size):
        pair = Pair(
            place,
            [16, 16],
            2,
            length,
            [3, 3 * cp_size],
            kernel_block_sizes=[kernel_block] * 2,
            cp_size=cp_size,
            cp_rank=rank,
            cp_interleave=interleave,
            dcp_sharded=[True, False],
        )
        pair.append(0, [[5, 1, 9], list(range(3 * cp_size))], True)
        pair.apply()
        slots = pair.tables.compute_slot_mappings(rows, starts, positions, length)
        pair.check_slots(slots, (rows, starts, positions, 1, length))
        slots = place.asnumpy(slots)
        owners += slots >= 0
        places.append(slots[0][slots[0] >= 0])
        assert len(set(places[-1].tolist())) == len(places[-1])  # no two tokens share a slot
        np.testing.assert_array_equal(slots[1], positions)  # not sharded: every rank has every token
    np.testing.assert_array_equal(owners[0], 1)
    assert all(sorted(found) == sorted(places[0]) for found in places)  # every rank fills the same slots


@pytest.mark.parametrize(("block_size", "kernel_block"), [(1, 1), (16, 16), (262144, 64), (262144, 262144)])
def test_contexts_of_a_million_tokens(place, block_size, kernel_block):
    length = 1 << 20
    columns = length // block_size
    pair = Pair(place, [block_size], 3, 64, [columns], kernel_block_sizes=[kernel_block])
    pair.append(1, [list(range(columns, 0, -1))], True)
    pair.apply()
    edges = [0, 1, block_size - 1, block_size, length - block_size, length - 2, length - 1, length, length + 1, 2**40]
    positions = np.array(edges, np.int64)
    rows, starts = np.array([1], np.int32), np.array([0, len(edges)], np.int32)
    slots = pair.tables.compute_slot_mappings(rows, starts, positions, 64)
    pair.check_slots(slots, (rows, starts, positions, 1, 64))
    assert (place.asnumpy(slots)[0, :7] >= 0).all()
    assert (place.asnumpy(slots)[0, 7:] == -1).all()


def test_slots_beyond_32_bits(place):
    pair = Pair(place, [262144], 2, 8, [4])
    pair.append(0, [[INT32.max, 12345]], True)
    pair.apply()
    slots = pair.tables.compute_slot_mappings(
        np.zeros(1, np.int32), np.array([0, 2], np.int32), np.array([262143, 262144]), 2
    )
    assert place.asnumpy(slots).tolist() == [[INT32.max * 262144 + 262143, 12345 * 262144]]


def test_rows_beyond_2_to_32_bytes_are_found_by_stride(place):
    """The stride of a rebound table may be any number of bytes: rows are slices of a larger array."""
    pair = Pair(place, [4], 3, 8, [2])
    large = place.asarray(np.full((3, 50), -5, np.int32))
    pair.tables.block_tables[0].rebind(large[:, 7:9])
    pair.append(2, [[8, 9]], True)
    pair.apply()
    rows, starts, positions = np.array([2], np.int32), np.array([0, 2], np.int32), np.array([1, 6])
    found, slots = pair.tables.prepare_step(rows, starts, positions, 2, 2)
    assert place.asnumpy(found[0]).tolist() == [[8, 9], [0, 0]]
    assert place.asnumpy(slots).tolist() == [[33, 38]]


def test_nothing_of_a_former_owner_shows(place):
    pair = Pair(place, [4], 2, 32, [6])
    pair.append(1, [[11, 12, 13, 14, 15, 16]], True)
    pair.apply()
    pair.append(1, [[21]], True)
    pair.apply()
    rows, starts, positions = np.array([1], np.int32), np.array([0, 5], np.int32), np.array([0, 3, 4, 8, 23])
    found, slots = pair.tables.prepare_step(rows, starts, positions, 1, 5)
    assert place.asnumpy(found[0]).tolist() == [[21, 0, 0, 0, 0, 0]]
    assert place.asnumpy(slots).tolist() == [[84, 87, -1, -1, -1]]
    pair.append(1, [[]], True)  # an overwrite by nothing
    pair.apply()
    found, slots = pair.tables.prepare_step(rows, starts, positions, 1, 5)
    assert not place.asnumpy(found[0]).any()
    assert (place.asnumpy(slots) == -1).all()


def test_what_is_staged_does_not_show_before_it_is_applied(place):
    pair = Pair(place, [4], 2, 32, [6])
    pair.append(1, [[11]], True)
    pair.apply()
    pair.tables.append_block_ids(1, [[12]], False)
    rows, starts, positions = np.array([1], np.int32), np.array([0, 2], np.int32), np.array([0, 4])
    found, slots = pair.tables.prepare_step(rows, starts, positions, 1, 2)
    assert place.asnumpy(found[0]).tolist() == [[11, 0, 0, 0, 0, 0]]
    assert place.asnumpy(slots).tolist() == [[44, -1]]


def test_negative_block_ids_are_padding(place):
    pair = Pair(place, [4], 1, 8, [3])
    pair.append(0, [[-1, 7, INT32.min]], True)
    pair.apply()
    batch = np.zeros(1, np.int32), np.array([0, 3], np.int32), np.array([0, 5, 11]), 1, 3
    pair.check(batch)
    assert place.asnumpy(pair.tables.gather_block_tables(batch[0], 1)[0]).tolist() == [[0, 7, 0]]


@pytest.mark.parametrize("num_reqs_padded", [0, 1, 4])
@pytest.mark.parametrize("num_tokens_padded", [0, 1, 64])
def test_no_requests_give_padding(place, num_reqs_padded, num_tokens_padded):
    pair = Pair(place, [4, 8], 4, 64, [3, 3])
    pair.fill(np.random.default_rng(1))
    batch = np.zeros(0, np.int32), np.zeros(1, np.int32), np.zeros(0, np.int64), num_reqs_padded, num_tokens_padded
    pair.check(batch)


def test_requests_without_tokens(place):
    pair = Pair(place, [4], 4, 64, [3])
    pair.fill(np.random.default_rng(2))
    rows = np.array([2, -1, 0, 1], np.int32)
    pair.check((rows, np.array([0, 0, 0, 0, 0], np.int32), np.zeros(0, np.int64), 4, 5))
    pair.check((rows, np.array([3, 3, 5, 5, 9], np.int32), np.arange(9), 4, 9))  # tokens before the first start


def test_one_long_prefill(place):
    pair = Pair(place, [16] * 3, 4, 8192, [512] * 3)
    pair.append(3, [list(range(512)), list(range(512, 0, -1)), [7] * 300], True)
    pair.apply()
    pair.check((np.array([3, 1], np.int32), np.array([0, 8000, 8001], np.int32), np.arange(8001), 3, 8100))


def test_many_decodes(place):
    rng = np.random.default_rng(3)
    pair = Pair(place, [16] * 2, 256, 512, [20] * 2)
    pair.fill(rng)
    rows = rng.permutation(256).astype(np.int32)
    pair.check((rows, np.arange(257, dtype=np.int32), rng.integers(0, 320, 256), 256, 256))


def test_results_are_persistent_views(place):
    pair = Pair(place, [4, 8], 4, 64, [3, 3])
    tables = pair.tables
    pair.fill(np.random.default_rng(4))
    addresses = [place.address(array) for array in (*tables.input_block_tables, tables.slot_mappings)]
    rows, starts, positions = np.array([1, 2], np.int32), np.array([0, 1, 3], np.int32), np.arange(3)
    first = tables.prepare_step(rows, starts, positions, 3, 5)
    assert [array.shape for array in first[0]] == [(3, 3), (3, 3)]
    assert first[1].shape == (2, 5)
    assert [place.address(array) for array in (*first[0], first[1])] == addresses
    again = tables.prepare_step(rows, starts, positions, 3, 5)
    assert again[0] is first[0]
    assert again[1] is first[1]
    assert tables.gather_block_tables(rows, 3) is first[0]
    assert tables.compute_slot_mappings(rows, starts, positions, 5) is first[1]
    assert tables.get_dummy_block_tables(3) is first[0]
    assert tables.get_dummy_slot_mappings(5) is first[1]


def test_dummies_are_padding_and_leave_the_tables_alone(place):
    pair = Pair(place, [4, 8], 4, 64, [3, 3])
    tables = pair.tables
    assert not any(place.asnumpy(array).any() for array in tables.input_block_tables)
    assert (place.asnumpy(tables.slot_mappings) == -1).all()
    pair.fill(np.random.default_rng(5))
    pair.poison()
    before = [place.asnumpy(table.gpu) for table in tables.block_tables]
    assert not any(place.asnumpy(array).any() for array in tables.get_dummy_block_tables(4))
    assert (place.asnumpy(tables.get_dummy_slot_mappings(3)) == -1).all()
    assert (place.asnumpy(tables.slot_mappings) == -1).all()
    for table, want in zip(tables.block_tables, before, strict=True):
        assert_tables_equal(place.asnumpy(table.gpu), want)
    assert tables.get_dummy_block_tables(0)[0].shape == (0, 3)


def test_slot_mapping_switched_off(place):
    pair = Pair(place, [4, 4], 2, 16, [3, 3], slot_mapping_enabled=[False, True])
    pair.append(0, [[1], [2]], True)
    pair.apply()
    rows, starts, positions = np.zeros(1, np.int32), np.array([0, 2], np.int32), np.array([0, 3])
    found, slots = pair.tables.prepare_step(rows, starts, positions, 1, 3)
    assert place.asnumpy(slots).tolist() == [[-1, -1, -1], [8, 11, -1]]
    assert place.asnumpy(found[0]).tolist() == [[1, 0, 0]]  # it is gathered all the same


@pytest.mark.parametrize("groups", [1, 16, 17, 40])
def test_out(place, groups):
    pair = Pair(place, [4] * groups, 3, 16, [1 + g % 5 for g in range(groups)])
    rng = np.random.default_rng(groups)
    pair.fill(rng)
    batch = np.array([2, 0], np.int32), np.array([0, 3, 7], np.int32), rng.integers(0, 12, 7), 3, 9
    for rows in (batch[0], place.asarray(batch[0])):
        out = [place.asarray(np.full((3, 1 + g % 5), 77, np.int32)) for g in range(groups)]
        pair.poison()
        found = pair.tables.gather_block_tables(rows, 3, out)
        assert all(a is b for a, b in zip(found, out, strict=True))
        pair.check_tables(out, batch)
        assert all((place.asnumpy(array) == 77).all() for array in pair.tables.input_block_tables)
        pair.check_tables(pair.tables.gather_block_tables(rows, 3), batch)  # the next call goes back to its own
    slots = place.asarray(np.full((groups, 12), 77, np.int64))
    pair.poison()
    found = pair.tables.compute_slot_mappings(*batch[:3], 9, slots)
    want = pair.model.compute_slot_mappings(*batch[:3], 9)
    assert_tables_equal(place.asnumpy(found), want[:, :9])
    assert_tables_equal(place.asnumpy(slots), want[:, :12])  # padding up to its end
    assert (place.asnumpy(pair.tables.slot_mappings) == 77).all()


def test_host_arrays_are_snapshots(place):
    pair = Pair(place, [4], 4, 64, [3])
    pair.fill(np.random.default_rng(6))
    batch = pair.batch(np.random.default_rng(7), wild=False)
    place.stall(20)
    given = [array.copy() for array in batch[:3]]
    found, slots = pair.tables.prepare_step(*given, *batch[3:])
    for array in given:
        array[:] = -99
    pair.check_tables(found, batch)
    pair.check_slots(slots, batch)


@pytest.mark.parametrize("max_concurrency", [1, 2, 3])
def test_a_slot_is_not_rewritten_while_it_is_read(place, max_concurrency):
    pair = Pair(place, [4], 4, 64, [3], max_concurrency=max_concurrency)
    pair.fill(np.random.default_rng(8))
    batches = [pair.batch(np.random.default_rng(seed)) for seed in range(4 * max_concurrency + 3)]
    kept = []
    place.stall(30)
    for batch in batches:
        found, slots = pair.tables.prepare_step(*batch)
        kept.append((place.read(found[0]), place.read(slots)))
    for batch, (found, slots) in zip(batches, kept, strict=True):
        pair.check_tables([found], batch)
        want = pair.model.compute_slot_mappings(batch[0], batch[1], batch[2], batch[4])
        assert_tables_equal(place.asnumpy(slots), want[:, : batch[4]])
    assert (pair.tables.stats.waits > 0) == place.on_gpu


def test_host_arrays_of_any_making(place):
    """Read-only, misaligned and derived arrays are taken; a longer `positions` is legal."""
    pair = Pair(place, [4], 4, 64, [3])
    pair.fill(np.random.default_rng(9))
    rows, starts = np.array([3, 1], np.int32), np.array([0, 2, 4], np.int32)
    positions = np.arange(9)
    batch = rows, starts, positions, 2, 4
    for array in (rows, starts, positions):
        array.flags.writeable = False
    pair.check(batch)
    odd = np.zeros(9, np.uint8)[1:].view(np.int32)
    odd[:] = rows
    found, slots = pair.tables.prepare_step(odd, starts, positions, 2, 4)
    pair.check_tables(found, batch)
    pair.check_slots(slots, batch)


def test_rebind_and_refresh(place):
    pair = Pair(place, [4, 4], 2, 16, [3, 3])
    pair.append(0, [[1, 2], [3]], True)
    pair.apply()
    other = place.asarray(np.array([[9, 8, 7], [0, 0, 0]], np.int32))
    pair.tables.block_tables[0].rebind(other)
    rows = np.zeros(1, np.int32)
    assert place.asnumpy(pair.tables.gather_block_tables(rows, 1)[0]).tolist() == [[9, 8, 0]]
    pair.tables.block_tables[1].rebind(place.asarray(np.full((2, 3), 6, np.int32)))
    pair.tables.refresh_pointers()
    found = pair.tables.gather_block_tables(rows, 1)
    assert [place.asnumpy(array).tolist() for array in found] == [[[9, 8, 0]], [[6, 0, 0]]]


def test_tables_may_go_while_a_step_runs(place, collected):
    pair = Pair(place, [4], 4, 64, [3])
    pair.fill(np.random.default_rng(10))
    batch = pair.batch(np.random.default_rng(11), wild=False)
    place.stall(20)
    found, slots = pair.tables.prepare_step(*batch)
    pair.tables = None
    pair.check_tables(found, batch)
    want = pair.model.compute_slot_mappings(batch[0], batch[1], batch[2], batch[4])
    assert_tables_equal(place.asnumpy(slots), want[:, : batch[4]])


# What raises


@pytest.fixture
def small(place):
    tables = place.make(BlockTables, [4, 8], 3, 16, [2, 2])
    yield tables, place
    # After every refusal, a good step still works.
    tables.append_block_ids(1, [[5], [6]], True)
    tables.apply_staged_writes()
    found, slots = tables.prepare_step(np.array([1], np.int32), np.array([0, 1], np.int32), np.array([2]), 1, 1)
    assert [place.asnumpy(array).tolist() for array in found] == [[[5, 0]], [[6, 0]]]
    assert place.asnumpy(slots).tolist() == [[22], [50]]


ROWS, STARTS, POSITIONS = np.zeros(2, np.int32), np.array([0, 1, 2], np.int32), np.zeros(2, np.int64)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("which", "bad", "error", "match"),
    [
        (0, ROWS.astype(np.int64), TypeError, r"idx_mapping must have dtype int32, got int64"),
        (1, STARTS.astype(np.int64), TypeError, r"query_start_loc must have dtype int32"),
        (2, POSITIONS.astype(np.int32), TypeError, r"positions must have dtype int64"),
        (2, POSITIONS.astype(np.float64), TypeError, r"positions must have dtype int64, got float64"),
        (0, np.zeros(4, np.int32)[::2], ValueError, r"idx_mapping must be contiguous"),
        (1, np.zeros(6, np.int32)[::2], ValueError, r"query_start_loc must be contiguous"),
        (2, np.zeros(4, np.int64)[::2], ValueError, r"positions must be contiguous"),
        (0, np.zeros((2, 1), np.int32), ValueError, r"idx_mapping must have one dimension, got shape \(2, 1\)"),
        (1, STARTS[:2], ValueError, r"query_start_loc must have 3 entries for 2 requests, got 2"),
    ],
)
def test_wrong_arrays_raise(small, which, bad, error, match, on_device):
    tables, place = small
    arrays = [ROWS, STARTS, POSITIONS]
    arrays[which] = bad
    if on_device:
        arrays = [place.asarray(array) for array in arrays]
        if not bad.flags.c_contiguous and place.on_gpu:
            arrays[which] = place.asarray(np.repeat(bad, 2))[::2]
        elif not bad.flags.c_contiguous:
            arrays[which] = bad
    with pytest.raises(error, match=match):
        tables.prepare_step(*arrays, 2, 2)
    if which == 0:
        with pytest.raises(error, match=match):
            tables.gather_block_tables(arrays[0], 2)
    with pytest.raises(error, match=match):
        tables.compute_slot_mappings(*arrays, 2)


@pytest.mark.parametrize(
    ("starts", "positions", "match"),
    [
        ([0, 2, 1], [0, 0, 0], r"query_start_loc must rise from 0 or more, got 1 at entry 2"),
        ([-1, 0, 1], [0, 0, 0], r"query_start_loc must rise from 0 or more, got -1 at entry 0"),
        ([0, 1, 4], [0, 0, 0], r"positions has 3 entries, query_start_loc ends at 4"),
        ([0, 1, 4], [0, 0, 0, 0], r"query_start_loc ends at 4: more tokens than num_tokens_padded 3"),
    ],
)
def test_host_arrays_that_do_not_fit_raise(small, starts, positions, match):
    tables, _ = small
    with pytest.raises(ValueError, match=match):
        tables.prepare_step(ROWS, np.array(starts, np.int32), np.array(positions), 2, 3)


@pytest.mark.parametrize(
    ("padded", "tokens_padded", "match"),
    [
        (1, 2, r"num_reqs_padded 1 must be at least len\(idx_mapping\) = 2"),
        (4, 2, r"num_reqs_padded must be 0 to max_num_reqs 3, got 4"),
        (2, 17, r"num_tokens_padded must be 0 to max_num_batched_tokens 16, got 17"),
        (2, -1, r"num_tokens_padded must be 0 to max_num_batched_tokens 16, got -1"),
    ],
)
def test_wrong_sizes_raise(small, padded, tokens_padded, match):
    tables, _ = small
    with pytest.raises(ValueError, match=match):
        tables.prepare_step(ROWS, STARTS, POSITIONS, padded, tokens_padded)
    if tokens_padded == 2:
        with pytest.raises(ValueError, match=match):
            tables.gather_block_tables(ROWS, padded)
    else:
        with pytest.raises(ValueError, match=match):
            tables.compute_slot_mappings(ROWS, STARTS, POSITIONS, tokens_padded)
        with pytest.raises(ValueError, match=match):
            tables.get_dummy_slot_mappings(tokens_padded)


@pytest.mark.parametrize("padded", [-1, 4])
def test_wrong_dummy_sizes_raise(small, padded):
    with pytest.raises(ValueError, match=f"num_reqs_padded .*{padded}"):
        small[0].get_dummy_block_tables(padded)


def test_more_requests_than_rows_raise(small):
    tables, _ = small
    with pytest.raises(ValueError, match="num_reqs_padded 3 must be at least len"):
        tables.compute_slot_mappings(np.zeros(4, np.int32), np.zeros(5, np.int32), POSITIONS, 2)


def test_mixed_and_foreign_arrays_raise(small):
    tables, place = small
    with pytest.raises(TypeError):
        tables.prepare_step([0, 1], STARTS, POSITIONS, 2, 2)
    with pytest.raises(TypeError, match=r"query_start_loc must be a numpy\.ndarray as idx_mapping is, got list"):
        tables.prepare_step(ROWS, [0, 1, 2], POSITIONS, 2, 2)
    if place.on_gpu:
        with pytest.raises(TypeError, match=r"positions must be a numpy\.ndarray as idx_mapping is"):
            tables.prepare_step(ROWS, STARTS, place.asarray(POSITIONS), 2, 2)
        with pytest.raises(TypeError, match=r"query_start_loc must be a cupy\.ndarray"):
            tables.prepare_step(place.asarray(ROWS), STARTS, POSITIONS, 2, 2)


def test_wrong_out_raises(small):
    tables, place = small
    good = [place.asarray(np.zeros((2, 2), np.int32)) for _ in range(2)]
    with pytest.raises(ValueError, match="one array for each of the 2 groups, got 1"):
        tables.gather_block_tables(ROWS, 2, good[:1])
    with pytest.raises(ValueError, match=r"out must be contiguous and of shape \(2, 2\), got shape \(3, 2\)"):
        tables.gather_block_tables(ROWS, 2, [good[0], place.asarray(np.zeros((3, 2), np.int32))])
    with pytest.raises(TypeError, match="out must have dtype int32, got int64"):
        tables.gather_block_tables(ROWS, 2, [good[0], place.asarray(np.zeros((2, 2), np.int64))])
    with pytest.raises(ValueError, match="contiguous"):
        tables.gather_block_tables(ROWS, 2, [good[0], place.asarray(np.zeros((2, 4), np.int32))[:, :2]])
    with pytest.raises(TypeError, match="out must be a"):
        tables.gather_block_tables(ROWS, 2, [good[0], [[0, 0], [0, 0]]])
    with pytest.raises(ValueError, match="at least 2"):
        tables.compute_slot_mappings(ROWS, STARTS, POSITIONS, 2, place.asarray(np.zeros((2, 1), np.int64)))
    with pytest.raises(ValueError, match="shape"):
        tables.compute_slot_mappings(ROWS, STARTS, POSITIONS, 2, place.asarray(np.zeros((1, 4), np.int64)))
    with pytest.raises(TypeError, match="int64"):
        tables.compute_slot_mappings(ROWS, STARTS, POSITIONS, 2, place.asarray(np.zeros((2, 4), np.int32)))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"cp_size": 0}, ValueError, "cp_size and cp_interleave must be at least 1"),
        ({"cp_size": 2, "cp_rank": 2}, ValueError, "cp_rank 0 to cp_size - 1"),
        ({"cp_rank": -1}, ValueError, "cp_rank 0 to cp_size - 1"),
        ({"cp_interleave": 0}, ValueError, "at least 1"),
        ({"cp_interleave": 3}, ValueError, r"cp_interleave 3 must divide block_sizes\[0\] = 4, which is sharded"),
        ({"cp_interleave": 8}, ValueError, r"must divide block_sizes\[0\] = 4"),
        ({"cp_size": 2.0}, TypeError, "cp_size must be an int"),
        ({"dcp_sharded": [True]}, ValueError, "dcp_sharded must have one entry for each of the 2 groups, got 1"),
        ({"slot_mapping_enabled": [True] * 3}, ValueError, "slot_mapping_enabled must have one entry"),
        ({"cp_size": 2**30}, ValueError, "spans"),
    ],
)
def test_wrong_options_raise(host, options, error, match):
    with pytest.raises(error, match=match):
        host.make(BlockTables, [4, 8], 3, 16, [2, 2], **options)


def test_interleave_need_not_divide_a_group_that_is_not_sharded(host):
    host.make(BlockTables, [4, 8], 3, 16, [2, 2], cp_interleave=8, dcp_sharded=[False, True])
