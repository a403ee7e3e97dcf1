"""The plain NumPy model, against numbers worked out by hand: whatever is compared with it leans on it."""

import numpy as np
import pytest

from cupy_staged.testing import (
    BlockTablesModel,
    FastTablesModel,
    TableModel,
    assert_tables_equal,
    converted,
    first_difference,
)


def test_last_staged_wins():
    model = TableModel((2, 4), np.int32)
    for start, values in ((0, [1, 2, 3, 4]), (1, [9, 9]), (2, [5])):
        model.stage_write(0, start, values)
    assert not model.table.any()
    model.apply()
    assert model.table.tolist() == [[1, 9, 5, 4], [0, 0, 0, 0]]
    assert model.staged == []


def test_values_are_copied_when_staged_and_dropped_by_clear():
    model = TableModel(3, np.float32)
    values = np.array([1.5])
    model.stage_write(2, 0, values)
    values[0] = 7
    model.apply()
    model.stage_write(0, 0, [3.0])
    model.clear()
    model.apply()
    assert model.table.tolist() == [0.0, 0.0, 1.5]


@pytest.mark.parametrize(
    ("row", "start", "values"), [(2, 0, [1]), (-1, 0, [1]), (1, 3, [7, 8]), (0, -1, [1]), (0, 5, [])]
)
def test_a_write_outside_stages_nothing(row, start, values):
    model = TableModel((2, 4), np.int32)
    model.stage_write(0, 4, [])
    with pytest.raises(IndexError, match=rf"row {row}|row length 4 \(row {row}\)"):
        model.stage_write(row, start, values)
    assert len(model.staged) == 1


@pytest.mark.parametrize(
    ("values", "dtype", "error"),
    [
        ([1.0], np.int32, TypeError),
        ([1j], np.float64, TypeError),
        ([None], np.float32, TypeError),
        (["1"], np.int8, TypeError),
        ([1.0], np.bool_, TypeError),
        ([2], np.bool_, OverflowError),
        ([128], np.int8, OverflowError),
        ([-1], np.uint64, OverflowError),
        ([np.int64(2**40)], np.int32, OverflowError),
        (np.array([2**40]), np.int32, OverflowError),
        ([1e300], np.float32, OverflowError),
        ([70000], np.float16, OverflowError),
        ([1e300 + 0j], np.complex64, OverflowError),
    ],
)
def test_values_that_do_not_fit(values, dtype, error):
    with pytest.raises(error):
        converted(values, dtype)


def test_values_that_fit():
    assert converted([True, np.uint8(3), -128], np.int8).tolist() == [1, 3, -128]
    assert converted([0, 1, True], np.bool_).tolist() == [False, True, True]
    assert converted([2**64], np.complex128).tolist() == [2**64]
    assert converted(range(3), np.float16).tolist() == [0.0, 1.0, 2.0]
    assert np.isinf(converted([float("inf"), float("nan")], np.float32)).tolist() == [True, False]
    assert converted(iter([2**64 - 1]), np.uint64).tolist() == [2**64 - 1]


def make_model(**options):
    return BlockTablesModel([16, 32], 4, 12, [4, 2], **options)


def test_append_overwrite_and_a_former_owner():
    model = make_model()
    model.append_block_ids(1, [[5, 6, 7], [8]], overwrite=False)
    model.append_block_ids(1, [[9], []], overwrite=False)
    assert model.num_blocks[:, 1].tolist() == [4, 1]
    assert not model.applied_num_blocks.any()
    model.apply()
    assert model.tables[0].table[1].tolist() == [5, 6, 7, 9]
    model.append_block_ids(1, [[3], []], overwrite=True)
    model.apply()
    assert model.tables[0].table[1].tolist() == [3, 6, 7, 9]
    gathered = model.gather_block_tables([1, -1, 99], 4)
    assert gathered[0].tolist() == [[3, 0, 0, 0], [0] * 4, [0] * 4, [0] * 4]
    assert not gathered[1].any()


def test_a_batch_is_the_calls_in_order():
    one_by_one, batch = make_model(), make_model()
    one_by_one.append_block_ids(2, [[1, 2], [3]], overwrite=True)
    one_by_one.append_block_ids(0, [[4], []], overwrite=False)
    one_by_one.append_block_ids(2, [[5], [6]], overwrite=False)
    batch.append_block_ids_batch([2, 0, 2], [[1, 2, 4, 5], [3, 6]], [[2, 3, 4], [1, 1, 2]], [True, False, False])
    for model in (one_by_one, batch):
        model.apply()
    for a, b in zip(one_by_one.tables, batch.tables, strict=True):
        assert_tables_equal(a.table, b.table)
    assert batch.num_blocks.tolist() == one_by_one.num_blocks.tolist() == [[1, 0, 3, 0], [0, 0, 2, 0]]


@pytest.mark.parametrize(
    ("ids", "totals", "error"),
    [
        ([[1, 2], [1, 2, 3]], [[1, 2], [0, 3]], IndexError),
        ([[1, 2], [2**31]], [[1, 2], [1, 1]], OverflowError),
        ([[1, 2], [1]], [[1, 2], [1, 0]], ValueError),
        ([[1, 2], [1]], [[1, 2], [1]], ValueError),
        ([[1, 2]], [[1, 2]], ValueError),
    ],
)
def test_a_batch_that_is_bad_in_its_last_group_stages_nothing(ids, totals, error):
    model = make_model()
    with pytest.raises(error):
        model.append_block_ids_batch([0, 1], ids, totals, True)
    assert not model.num_blocks.any()
    assert not any(table.staged for table in model.tables)


def test_kernel_blocks():
    model = make_model(kernel_block_sizes=[4, 32])
    model.append_block_ids(0, [[5], [2]], overwrite=True)
    model.apply()
    assert model.tables[0].table.shape == (4, 16)
    assert model.tables[0].table[0, :5].tolist() == [20, 21, 22, 23, 0]
    assert model.num_blocks[:, 0].tolist() == [4, 1]
    slots = model.compute_slot_mappings([0], [0, 4], [0, 6, 15, 16], 4)
    assert slots[0].tolist() == [80, 86, 95, -1] + [-1] * 8
    assert slots[1, :4].tolist() == [64, 70, 79, 80]
    with pytest.raises(OverflowError):
        model.append_block_ids(1, [[2**29], []], overwrite=True)


def test_slots_of_what_is_not_there_are_padding():
    model = make_model(slot_mapping_enabled=[True, False])
    model.append_block_ids(3, [[7, -2], [1]], overwrite=True)
    model.apply()
    slots = model.compute_slot_mappings([3, -1, 4], [0, 5, 6, 7], [-1, 0, 16, 32, 10**9, 0, 0], 9)
    assert slots[0].tolist() == [-1, 112] + [-1] * 10
    assert (slots[1] == -1).all()
    assert model.gather_block_tables([3], 1)[0].tolist() == [[7, 0, 0, 0]]


def test_sizes_of_gather_and_slot_mapping_are_checked():
    model = make_model()
    for padded in (1, 5):
        with pytest.raises(ValueError, match=f"2 requests padded to {padded}"):
            model.gather_block_tables([0, 1], padded)
    for padded in (2, 13):
        with pytest.raises(ValueError, match=f"3 tokens padded to {padded}"):
            model.compute_slot_mappings([0], [0, 3], [0, 1, 2], padded)
    with pytest.raises(ValueError, match="query starts"):
        model.compute_slot_mappings([0], [0], [], 0)


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_ranks_cover_every_token_of_a_sharded_group_once(cp_size, interleave):
    tokens = 2 * 16 * cp_size
    owners, slots_of_rank = np.zeros(tokens, int), []
    for rank in range(cp_size):
        model = BlockTablesModel(
            [16, 16], 1, tokens, [2, 2 * cp_size], cp_size=cp_size, cp_rank=rank, cp_interleave=interleave,
            dcp_sharded=[True, False], kernel_block_sizes=[8, 16],
        )  # fmt: skip
        model.append_block_ids(0, [[3, 9], list(range(2 * cp_size))], overwrite=True)
        model.apply()
        sharded, whole = model.compute_slot_mappings([0], [0, tokens], range(tokens), tokens)
        assert whole.tolist() == list(range(tokens))
        owners += sharded >= 0
        slots_of_rank.append(sorted(sharded[sharded >= 0].tolist()))
    assert (owners == 1).all()
    assert slots_of_rank == [[*range(48, 64), *range(144, 160)]] * cp_size


def test_interleaved_tokens_by_hand():
    model = BlockTablesModel([4], 1, 16, [2], cp_size=2, cp_rank=1, cp_interleave=2)
    model.append_block_ids(0, [[10, 20]], overwrite=True)
    model.apply()
    slots = model.compute_slot_mappings([0], [0, 10], range(10), 10)
    assert slots[0, :10].tolist() == [-1, -1, 40, 41, -1, -1, 42, 43, -1, -1]


@pytest.mark.parametrize(
    "options",
    [{"kernel_block_sizes": [5, 32]}, {"cp_size": 2, "cp_rank": 2}, {"cp_interleave": 3}, {"dcp_sharded": [True]}],
)
def test_bad_layouts(options):
    with pytest.raises(ValueError, match=r"divide|outside|cp_interleave|entry a group"):
        make_model(**options)


def test_the_first_difference_is_named():
    want = np.arange(12, dtype=np.int32).reshape(3, 4)
    got = want.copy()
    assert_tables_equal(got, want)
    got[2, 0] = got[1, 3] = -5
    assert first_difference(got, want) == (1, 3)
    with pytest.raises(AssertionError, match=r"group 2, row 1, column 3: got .*-5.*, want .*7"):
        assert_tables_equal(got, want, group=2)
    with pytest.raises(AssertionError, match="int64"):
        assert_tables_equal(got.astype(np.int64), want)
    assert first_difference(np.zeros((0, 4)), np.zeros((0, 4))) is None


def test_bits_are_compared_and_not_values():
    nan = np.array([np.nan, 0.0], np.float32)
    assert first_difference(nan, nan.copy()) is None
    assert first_difference(nan, np.array([np.nan, -0.0], np.float32)) == (1,)


@pytest.mark.parametrize("seed", range(40))
def test_the_fast_model_agrees_with_the_simple_one(seed):
    """Random shapes and steps: bad rows, negative and far positions, negative ids, a first token behind 0."""
    rng = np.random.default_rng(seed)
    groups, reqs, tokens = int(rng.integers(1, 4)), int(rng.integers(1, 6)), int(rng.integers(1, 50))
    cp_size, interleave = int(rng.integers(1, 5)), int(rng.choice([1, 2, 4]))
    kernel_sizes = rng.choice([1, 3, 8], groups)
    sizes = kernel_sizes * interleave * rng.choice([1, 2, 5], groups)
    widths = rng.integers(1, 9, groups)
    flags = {name: (rng.random(groups) < 0.7).tolist() for name in ("dcp_sharded", "slot_mapping_enabled")}
    ranks = {"cp_size": cp_size, "cp_rank": int(rng.integers(cp_size)), "cp_interleave": interleave}
    shape = (sizes.tolist(), reqs, tokens, widths.tolist())
    models = [
        kind(*shape, kernel_block_sizes=kernel_sizes.tolist(), **ranks, **flags)
        for kind in (BlockTablesModel, FastTablesModel)
    ]
    for _ in range(6):
        ids = [rng.integers(-2, 1000, rng.integers(0, width + 1)).tolist() for width in widths]
        row = int(rng.integers(reqs))
        for model in models:
            model.append_block_ids(row, ids, overwrite=True)
            model.apply()
        num_reqs = int(rng.integers(0, reqs + 1))
        rows = rng.integers(-1, reqs + 1, num_reqs)
        starts = np.sort(rng.integers(0, tokens + 1, num_reqs + 1)).astype(np.int32)
        positions = rng.integers(-2, int((sizes * widths).max()) * cp_size + 9, int(starts[-1]) + 3)
        padded = int(rng.integers(num_reqs, reqs + 1))
        simple, fast = (model.gather_block_tables(rows, padded) for model in models)
        for group in range(groups):
            assert_tables_equal(fast[group], simple[group], group=group)
        simple, fast = (model.compute_slot_mappings(rows, starts, positions, tokens) for model in models)
        assert_tables_equal(fast, simple)
