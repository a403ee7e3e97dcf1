"""Corners where a write was once lost, or an error came out wrong; each on every backend where it can differ."""

import numpy as np
import pytest

from cupy_staged import BlockTables, FusedStagedWriter, StagedWriteTensor, UvaBufferPool
from cupy_staged.testing import assert_tables_equal

KINDS = ["bool", "f2", "f4", "f8", "c8", "c16", "i4"]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("as_list", [False, True])
def test_one_value_into_contents_that_are_just_full(place, dtype, as_list):
    table = place.make(StagedWriteTensor, (1, 4096), dtype)
    want = np.zeros((1, 4096), dtype)
    full = table._log.max_end
    table.stage_write(0, 0, np.ones(full, dtype))
    assert table._log.end == table._log.max_end == full
    want[0, :full] = 1
    for column in range(3000, 3100):
        one = np.ones(1, dtype)
        table.stage_write(0, column, one.tolist() if as_list else one)
        want[0, column] = 1
    table.apply_write()
    assert_tables_equal(place.asnumpy(table.gpu), want)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("shorter", [[], [50]])
def test_a_new_owner_after_an_overwrite_in_one_step(place, batch, shorter):
    tables = place.make(BlockTables, [16], 4, 64, [32])
    if batch:
        ids = np.array([*range(100, 120), *shorter, 7, 8, 9], np.int32)
        totals = np.cumsum([20, len(shorter), 3])
        tables.append_block_ids_batch([1, 1, 1], [ids], [totals], np.array([False, True, False]))
    else:
        tables.append_block_ids(1, [list(range(100, 120))], True)
        tables.append_block_ids(1, [shorter], True)
        tables.append_block_ids(1, [[7, 8, 9]], False)
    tables.apply_staged_writes()
    want = [*shorter, 7, 8, 9]
    assert place.asnumpy(tables.block_tables[0].gpu)[1, : len(want)].tolist() == want
    assert place.asnumpy(tables.num_blocks.gpu)[0, 1] == len(want)


@pytest.mark.parametrize("staged", [False, True])
def test_reserve_below_what_the_log_has_grown_to(place, staged):
    table = place.make(StagedWriteTensor, (4, 8192), "f4")
    want = np.zeros((4, 8192), "f4")
    table.stage_write(0, 0, np.arange(5000, dtype="f4"))
    want[0, :5000] = np.arange(5000)
    if not staged:
        table.apply_write()
    table.reserve(1, 3000)
    table.stage_write(1, 1, np.arange(6000, dtype="f4"))
    want[1, 1:6001] = np.arange(6000)
    table.apply_write()
    assert_tables_equal(place.asnumpy(table.gpu), want)


def test_long_writes_through_a_log_that_grows_and_several_paths(place):
    """Own applies read long values where they were staged, a writer's copy them, in turn and while the log grows."""
    table = place.make(StagedWriteTensor, (3, 40_000), "f4")
    writers = [FusedStagedWriter([table]) for _ in range(3)]
    want = np.zeros((3, 40_000), "f4")
    rng = np.random.default_rng(3)
    for step in range(24):
        for _ in range(2):
            values = rng.random(int(rng.integers(1000, 2000 * (1 + step // 2))), "f4")
            row, start = int(rng.integers(3)), int(rng.integers(40_000 - len(values)))
            table.stage_write(row, start, values)
            want[row, start : start + len(values)] = values
        keep = [np.full(3, 12345) for _ in range(8)]  # takes memory that was let go of too early
        (table.apply_write if step % 3 else writers[step % 3].apply)()
        del keep
    assert_tables_equal(place.asnumpy(table.gpu), want)


def test_out_that_is_read_only(host):
    pool = host.make(UvaBufferPool, 4, "i4")
    out = np.zeros(4, np.int32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        pool.copy_to_gpu([1, 2, 3, 4], out=out)
    assert not out.any()


class StagesAnother:
    def __init__(self, table):
        self.table = table

    def __index__(self):
        self.table.stage_write(1, 0, [7])
        return 1


def test_a_batch_torn_by_another_write(host):
    table = host.make(StagedWriteTensor, (2, 4), "i4")
    with pytest.raises(RuntimeError, match="torn"):
        table.stage_writes([0], [0], [StagesAnother(table)], [1])
    with pytest.raises(RuntimeError, match="torn"):
        table.apply_write()


def test_a_write_staged_during_an_apply_is_not_dropped_silently(host):
    table = host.make(StagedWriteTensor, (2, 4), "i4")
    table.stage_write(0, 0, [5])
    launch = table._path._launch[0]

    def launch_and_stage(stream):
        launch(stream)
        table.stage_write(1, 0, [7])

    table._path._launch[0] = launch_and_stage
    table.apply_write()
    assert table.gpu.tolist() == [[5, 0, 0, 0], [0, 0, 0, 0]]
    with pytest.raises(RuntimeError, match="torn"):
        table.apply_write()


def test_rebind_to_memory_of_another_member(place):
    base = place.asarray(np.zeros((2, 8), np.int32))
    a, b = place.make(StagedWriteTensor, (2, 4), "i4"), place.make(StagedWriteTensor, (2, 4), "i4", target=base[:, :4])
    writer = FusedStagedWriter([a, b])
    with pytest.raises(ValueError, match="shares memory"):
        a.rebind(base[:, 2:6])
    a.rebind(base[:, 4:])
    a.stage_write(0, 0, [1, 2, 3, 4])
    b.stage_write(0, 1, [9])
    writer.apply()
    assert place.asnumpy(base).tolist() == [[0, 9, 0, 0, 1, 2, 3, 4], [0] * 8]


@pytest.mark.parametrize("groups", [65, 1200])
def test_very_many_groups(host, groups):
    tables = host.make(BlockTables, [4] * groups, 2, 8, [3] * groups)
    ids = [np.array([g, g + 1, g + 2], np.int32) for g in range(groups)]
    tables.append_block_ids_batch([1, 0], ids, [np.array([2, 3])] * groups, True)
    tables.apply_staged_writes()
    for g in range(groups):
        assert tables.block_tables[g].gpu.tolist() == [[g + 2, 0, 0], [g, g + 1, 0]]
    with pytest.raises(ValueError, match=f"{groups - 1}"):
        tables.append_block_ids_batch([1], ids[:1] * groups, [np.array([3])] * (groups - 1) + [np.array([1, 3])], True)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("row", [1.0, None, "1", np.float64(1), float("nan")])
def test_rows_that_are_no_ints(host, dtype, row):
    table = host.make(StagedWriteTensor, (4, 4), dtype)
    for index, start in ((row, 0), (0, row)):
        with pytest.raises(TypeError, match="row and start must be ints"):
            table.stage_write(index, start, [True])
    assert table.num_staged == 0


@pytest.mark.parametrize(("sizes", "error"), [((-5, 1), ValueError), ((1, 1.5), TypeError), ((True, 2), TypeError)])
def test_reserve_takes_counts(host, sizes, error):
    a = host.make(StagedWriteTensor, (4, 4), "i4")
    for thing in (a, FusedStagedWriter([a]), host.make(BlockTables, [4], 2, 8, [3])):
        with pytest.raises(error, match="reserve takes"):
            thing.reserve(*sizes)


def test_masked_values_and_numpy_flags(host):
    table = host.make(StagedWriteTensor, (4, 4), "i4")
    with pytest.raises(TypeError, match="masked"):
        table.stage_write(0, 0, np.ma.array([1, 2], mask=[0, 1]))
    with pytest.raises(OverflowError, match="indices"):
        table.stage_writes([2**70], [0], [1], [1])
    tables = host.make(BlockTables, [4], 2, 8, [3])
    tables.append_block_ids_batch([0, 1], [[5, 6]], [[1, 2]], np.True_)
    tables.apply_staged_writes()
    assert tables.block_tables[0].gpu[:, 0].tolist() == [5, 6]


@pytest.mark.parametrize("ids", [b"\x05\x06", {5: 1}, np.ma.array([5], mask=[True]), "56"])
def test_block_ids_of_the_wrong_kind(host, ids):
    tables = host.make(BlockTables, [4, 4], 2, 8, [3, 3])
    for lists in ([ids, [7]], [[7], ids]):
        with pytest.raises(TypeError):
            tables.append_block_ids(0, lists, True)
    with pytest.raises(TypeError):
        tables.append_block_ids_batch([0], [ids, [7]], [[1], [1]], True)
    assert not tables.num_blocks.np.any()


def test_flags_of_a_batch(host):
    tables = host.make(BlockTables, [4], 3, 8, [3])
    tables.append_block_ids_batch([0, 1], [[5, 6]], [[1, 2]], np.array(True))
    tables.append_block_ids_batch([], [[]], [[]], [])
    tables.append_block_ids_batch([0, 1], [[7, 8]], [[1, 2]], [True, False])
    tables.apply_staged_writes()
    assert tables.block_tables[0].gpu.tolist() == [[7, 0, 0], [6, 8, 0], [0, 0, 0]]


def test_a_group_cannot_be_bound_to_the_counts(place):
    tables = place.make(BlockTables, [4] * 4, 4, 8, [4] * 4)
    with pytest.raises(ValueError, match="shares memory"):
        tables.block_tables[0].rebind(tables.num_blocks.gpu)
