"""BlockTables on every backend: appending block ids and carrying them, with the counts, to the device."""

import numpy as np
import pytest
from common import POISON
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_staged import BlockTables
from cupy_staged.testing import BlockTablesModel, assert_tables_equal


def make(place, block_sizes, max_reqs, widths, **options):
    model = BlockTablesModel(
        block_sizes, max_reqs, 64, widths, **{k: v for k, v in options.items() if k != "max_concurrency"}
    )
    return place.make(BlockTables, block_sizes, max_reqs, 64, widths, **options), model


def check(place, tables, model):
    """Every cell of every table, and the counts on both sides."""
    for group, (table, want) in enumerate(zip(tables.block_tables, model.tables, strict=True)):
        assert_tables_equal(place.asnumpy(table.gpu), want.rows, group=group)
    assert_tables_equal(np.array(tables.num_blocks.np), model.num_blocks)
    assert_tables_equal(place.asnumpy(tables.num_blocks.gpu), model.applied_num_blocks)


def apply(tables, model):
    tables.apply_staged_writes()
    model.apply()


def append(tables, model, *args):
    tables.append_block_ids(*args)
    model.append_block_ids(*args)


@pytest.mark.parametrize("groups", range(1, 9))
def test_one_launch_for_all_groups_and_counts(place, groups):
    rng = np.random.default_rng(groups)
    widths = [7, 1, 300, 64, 129, 2, 16, 33][:groups]
    tables, model = make(place, [16] * groups, 12, widths)
    for step in range(6):
        for row in rng.choice(12, 8, replace=False).tolist():
            overwrite = bool(rng.integers(0, 2))
            ids = []
            for group in range(groups):
                has = 0 if overwrite else int(model.num_blocks[group, row])
                ids.append(rng.integers(0, 2**31, int(rng.integers(0, widths[group] - has + 1))).tolist())
            append(tables, model, row, ids, overwrite)
        apply(tables, model)
        check(place, tables, model)
        assert tables.stats.launches == step + 1


@pytest.mark.parametrize("groups", [1, 3])
def test_append_after_overwrite_in_one_step(place, groups):
    tables, model = make(place, [16] * groups, 4, [10] * groups)
    append(tables, model, 2, [[1, 2, 3, 4, 5, 6]] * groups, False)
    apply(tables, model)
    append(tables, model, 2, [[7]] * groups, False)
    append(tables, model, 2, [[8, 9]] * groups, True)
    append(tables, model, 2, [[10]] * groups, False)
    append(tables, model, 1, [[11]] * groups, False)
    append(tables, model, 2, [[]] * groups, False)
    apply(tables, model)
    check(place, tables, model)
    assert place.asnumpy(tables.block_tables[0].gpu)[2, :3].tolist() == [8, 9, 10]
    assert tables.num_blocks.np[:, 2].tolist() == [3] * groups


def test_an_overwrite_by_nothing_publishes_the_count_zero(place):
    tables, model = make(place, [16, 32], 4, [8, 4])
    append(tables, model, 1, [[5, 6], [7]], True)
    apply(tables, model)
    append(tables, model, 1, [[], []], True)
    assert tables.num_blocks.np[:, 1].tolist() == [0, 0]
    assert place.asnumpy(tables.num_blocks.gpu)[:, 1].tolist() == [2, 1]  # not applied yet
    apply(tables, model)
    check(place, tables, model)
    assert place.asnumpy(tables.num_blocks.gpu)[:, 1].tolist() == [0, 0]


def test_nothing_new_launches_nothing(place):
    tables, _ = make(place, [16, 32], 4, [8, 4])
    tables.apply_staged_writes()
    tables.append_block_ids(1, [[], []], overwrite=False)
    tables.append_block_ids_batch([], [[], []], [[], []], overwrite=True)
    tables.append_block_ids_batch([2, 2], [[], []], [[0, 0], [0, 0]], overwrite=False)
    tables.apply_staged_writes()
    assert tables.stats.launches == 0


def test_groups_of_which_some_get_nothing(place):
    tables, model = make(place, [16, 32, 64], 4, [8, 4, 2])
    append(tables, model, 0, [[], [5], []], False)
    append(tables, model, 3, [[1, 2], [], []], True)
    apply(tables, model)
    check(place, tables, model)


@pytest.mark.parametrize("factors", [(1, 4), (2,), (16, 1, 3)], ids=str)
def test_kernel_blocks(place, factors):
    sizes, kernel = [48 * f for f in factors], [48] * len(factors)
    tables, model = make(place, sizes, 3, [5] * len(factors), kernel_block_sizes=kernel)
    assert [t.gpu.shape for t in tables.block_tables] == [(3, 5 * f) for f in factors]
    append(tables, model, 1, [[7, 0, 3]] * len(factors), False)
    append(tables, model, 1, [[2]] * len(factors), False)
    append(tables, model, 2, [[9, 1, 1, 4, 6]] * len(factors), True)
    apply(tables, model)
    check(place, tables, model)
    assert tables.num_blocks.np[:, 1].tolist() == [4 * f for f in factors]


@pytest.mark.parametrize("kind", [list, np.int32, np.int64, np.uint16])
def test_ids_as_lists_and_arrays(place, kind):
    tables, model = make(place, [16, 32], 4, [8, 4])
    ids = [[5, 6, 700], [9]]
    given = ids if kind is list else [np.array(i, kind) for i in ids]
    tables.append_block_ids(np.int64(2), given, overwrite=True)
    tables.append_block_ids(2, [given[1], tuple(ids[1])], overwrite=False)
    tables.append_block_ids(2, (range(2), iter([3])), overwrite=False)
    for new, overwrite in ((ids, True), ([ids[1], ids[1]], False), ([[0, 1], [3]], False)):
        model.append_block_ids(2, new, overwrite)
    apply(tables, model)
    check(place, tables, model)


def test_what_is_appended_is_a_snapshot(place):
    tables, model = make(place, [16], 4, [8], max_concurrency=1)
    ids, rows, totals = np.array([5, 6, 7], np.int32), np.array([0, 3]), np.array([2, 3])
    flags = np.array([True, False])
    model.append_block_ids(1, [ids], True)
    model.append_block_ids_batch(rows, [ids], [totals], flags)
    place.stall(20)
    tables.append_block_ids(1, [ids], overwrite=True)
    tables.append_block_ids_batch(rows, [ids], [totals], flags)
    ids[...], rows[...], totals[...], flags[...] = POISON, 2, 0, True
    tables.apply_staged_writes()
    model.apply()
    check(place, tables, model)


@pytest.mark.parametrize("as_lists", [True, False])
def test_a_batch_is_the_same_as_its_appends(place, as_lists):
    """Rows repeat, in order; some overwrite and some append."""
    rng = np.random.default_rng(5)
    tables, model = make(place, [16, 64], 6, [400, 300], kernel_block_sizes=[16, 32])
    for _ in range(5):
        rows = rng.integers(0, 6, 20)
        overwrite = rng.integers(0, 2, 20).astype(bool)
        lengths = [rng.integers(0, 15, 20) for _ in range(2)]
        ids = [rng.integers(0, 2**30, n.sum()).astype(np.int32) for n in lengths]
        totals = [np.cumsum(n) for n in lengths]
        for i, row in enumerate(rows):
            model.append_block_ids(
                int(row), [ids[g][totals[g][i] - lengths[g][i] : totals[g][i]] for g in range(2)], bool(overwrite[i])
            )
        if as_lists:
            tables.append_block_ids_batch(
                rows.tolist(), [i.tolist() for i in ids], [t.tolist() for t in totals], overwrite.tolist()
            )
        else:
            tables.append_block_ids_batch(rows.astype(np.int32), ids, totals, overwrite)
        apply(tables, model)
        check(place, tables, model)
    assert tables.stats.launches == 5


BAD_APPENDS = [
    ((0, [[1]], False), ValueError, "2 groups, got 1"),
    ((0, [[1], [1], [1]], False), ValueError, "2 groups, got 3"),
    ((4, [[1], [1]], False), IndexError, "row 4 is not one of the 4 rows"),
    ((-1, [[1], [1]], True), IndexError, "row -1"),
    ((2**40, [[1], [1]], True), IndexError, f"row {2**40}"),
    ((1, [[1] * 7, []], False), IndexError, r"row 1 has 2 .*group 0.*row length 8"),
    ((1, [[], [1] * 4], False), IndexError, r"row 1 has 2 .*group 1.*row length 8"),
    ((1, [[1], [1] * 5], True), IndexError, "group 1"),
    ((1, [[1, 2**31], []], False), OverflowError, str(2**31)),
    ((1, [[1], [2**30]], False), OverflowError, "group 1 does not fit int32 once expanded"),
    ((1, [[], np.array([-(2**30) - 1])], False), OverflowError, "group 1"),
    ((1, [np.array([2**31]), []], False), OverflowError, str(2**31)),
    ((1, [[1.0], []], False), TypeError, r"1\.0"),
    ((1, [[], [1, None]], False), TypeError, "None"),
    ((1, [np.array([1.5]), []], False), TypeError, "float64"),
    ((1, ["12", []], False), TypeError, "str"),
    ((1, [None, []], False), TypeError, "NoneType"),
    ((1.0, [[1], [1]], False), TypeError, "int"),
    (("1", [[1], [1]], False), TypeError, "int"),
    ((None, [[1], [1]], False), TypeError, "int"),
]


@pytest.mark.parametrize(("args", "error", "message"), BAD_APPENDS)
def test_a_bad_append_stages_nothing_in_any_group(place, args, error, message):
    tables, model = make(place, [16, 32], 4, [8, 4], kernel_block_sizes=[16, 16])
    append(tables, model, 1, [[5, 6], [7]], True)
    counts = np.array(tables.num_blocks.np)
    with pytest.raises(error, match=message):
        tables.append_block_ids(*args)
    assert_tables_equal(np.array(tables.num_blocks.np), counts)
    append(tables, model, 1, [[8], []], False)
    append(tables, model, 0, [[9], [9, 9]], False)
    apply(tables, model)
    check(place, tables, model)


BAD_BATCHES = [
    (([0, 1], [[1, 2]], [[1, 2]], False), ValueError, "2 groups, got 1 and 1"),
    (([0, 1], [[1, 2], [3]], [[1, 2]], False), ValueError, "got 2 and 1"),
    (([0, 4], [[1, 2], [3]], [[1, 2], [0, 1]], False), IndexError, "row 4"),
    (([0, 1], [[1, 2], [3]], [[1, 3], [0, 1]], False), ValueError, r"cu_num_blocks\[0\].* = 2"),
    (([0, 1], [[1, 2], [3]], [[1, 2], [0, 0]], False), ValueError, r"cu_num_blocks\[1\].* = 1"),
    (([0, 1], [[1, 2], [3]], [[2, 1], [0, 1]], False), ValueError, r"cu_num_blocks\[0\]"),
    (([0, 1], [[1, 2], [3]], [[-1, 2], [0, 1]], False), ValueError, r"cu_num_blocks\[0\]"),
    (([0, 1], [[1, 2], [3]], [[1, 2], [1]], False), ValueError, r"cu_num_blocks\[1\] must have 2 entries.*got 1"),
    (([0, 1], [[1, 2], [3]], [[1, 2], [0, 1, 1]], False), ValueError, r"cu_num_blocks\[1\] must have 2 entries.*got 3"),
    # Running totals come first, whatever else is wrong too.
    (
        ([0, 1, 2], [[1] * 16, [3]], [[15, 9, 16], [0, 1, 1]], False),
        ValueError,
        r"cu_num_blocks\[0\].*got 9 at entry 1",
    ),
    (([0, 9], [[1, 2], [3]], [[1, 2], [0, 0]], False), ValueError, r"cu_num_blocks\[1\].* = 1"),
    (([0, 1], [[1, 2], [2**30]], [[1, 1], [0, 1]], False), ValueError, r"cu_num_blocks\[0\]"),
    (([0, 1], [[1, 2], [3]], [[1, 2], [2**62, 1]], False), ValueError, r"cu_num_blocks\[1\]"),
    (([0, 0], [[1] * 9, [3]], [[4, 9], [0, 1]], False), IndexError, "group 0"),
    (([0, 1], [[1, 2], [3] * 5], [[1, 2], [0, 5]], False), IndexError, "group 1"),
    (([0, 1], [[1, 2], [2**30]], [[1, 2], [0, 1]], False), OverflowError, "group 1"),
    (([0, 1], [[1, 2**31], [3]], [[1, 2], [0, 1]], False), OverflowError, "int32"),
    (([0, 1], [[1, 0.5], [3]], [[1, 2], [0, 1]], False), TypeError, "float64"),
    (([0, 1.5], [[1, 2], [3]], [[1, 2], [0, 1]], False), TypeError, "req_indices"),
    (([0, 1], [[1, 2], [3]], [[1, 2.0], [0, 1]], False), TypeError, "cu_num_blocks"),
    (([0, 1], [[1, 2], [3]], [[1, 2], [0, 1]], [True]), ValueError, "overwrite"),
    (([0, 1], [[1, 2], [3]], [[1, 2], [0, 1]], [0, 1]), TypeError, "overwrite"),
    (([[0, 1]], [[1, 2], [3]], [[1, 2], [0, 1]], False), ValueError, "one dimension"),
]


@pytest.mark.parametrize(("args", "error", "message"), BAD_BATCHES)
def test_a_bad_batch_stages_nothing_in_any_group(place, args, error, message):
    tables, model = make(place, [16, 32], 4, [8, 4], kernel_block_sizes=[16, 16])
    append(tables, model, 0, [[5, 6], [7]], True)
    counts = np.array(tables.num_blocks.np)
    with pytest.raises(error, match=message):
        tables.append_block_ids_batch(*args)
    assert_tables_equal(np.array(tables.num_blocks.np), counts)
    append(tables, model, 1, [[8], []], False)
    apply(tables, model)
    check(place, tables, model)


@pytest.mark.parametrize(("totals", "error"), [([1], ValueError), ([1_000_000], IndexError)])
def test_a_refused_batch_reserves_nothing(host, totals, error):
    tables = host.make(BlockTables, [64], 4, 64, [8], kernel_block_sizes=[4])
    before = tables._staged.log.max_end
    with pytest.raises(error):
        tables.append_block_ids_batch([0], [np.zeros(1_000_000, np.int32)], [totals], True)
    assert tables._staged.log.max_end == before


def test_more_writes_and_values_than_there_is_room_for_at_once(host):
    tables, model = make(host, [16], 2, [5000])
    rows, ids = np.zeros(3000, np.int64), [np.arange(3000, dtype=np.int32)]
    tables.append_block_ids_batch(rows, ids, [np.arange(1, 3001)], False)
    model.append_block_ids_batch(rows, ids, [np.arange(1, 3001)], False)
    apply(tables, model)
    check(host, tables, model)


def test_an_iterable_of_ids_that_raises_stages_nothing(place):
    def ids():
        yield 1
        raise KeyError("midway")

    tables, model = make(place, [16, 32], 4, [8, 4])
    with pytest.raises(KeyError, match="midway"):
        tables.append_block_ids(1, [[1], ids()], overwrite=False)
    append(tables, model, 1, [[2], [3]], False)
    apply(tables, model)
    check(place, tables, model)


def test_a_row_filled_to_the_last_column(place):
    tables, model = make(place, [16], 3, [100])
    append(tables, model, 2, [list(range(99))], True)
    append(tables, model, 2, [[5]], False)
    with pytest.raises(IndexError, match="row length 100"):
        tables.append_block_ids(2, [[6]], overwrite=False)
    append(tables, model, 2, [[]], False)
    apply(tables, model)
    check(place, tables, model)


def test_tables_are_written_by_their_owner_only(place):
    tables, _ = make(place, [16], 3, [10])
    table = tables.block_tables[0]
    for call in (
        lambda: table.stage_write(0, 0, [1]),
        lambda: table.stage_write_elem(0, 1),
        lambda: table.stage_writes([0], [0], [1], [1]),
        table.apply_write,
        table.clear_staged_writes,
        lambda: table.reserve(1, 1),
    ):
        with pytest.raises(RuntimeError, match="belongs to a BlockTables"):
            call()
    with pytest.raises(ValueError, match="read-only"):
        tables.num_blocks.np[0, 0] = 3


def test_generations_behind_a_stall(place):
    """A ring of two slots, 30 steps in flight: each step's reader sees the tables and counts of that step."""
    tables, model = make(place, [16, 32, 64], 6, [500, 20, 3], max_concurrency=2)
    steps = 30
    outs = [place.asarray(np.full((steps, *t.table.shape), POISON, np.int32)) for t in model.tables]
    counts = place.asarray(np.full((steps, 3, 6), POISON, np.int32))
    wanted = [np.zeros(out.shape, np.int32) for out in outs]
    wanted_counts = np.zeros(counts.shape, np.int32)
    place.read(tables.num_blocks.gpu, counts[0])
    place.synchronize()
    place.stall(30)
    for step in range(steps):
        place.stall(1)
        ids = [[step * 10 + i for i in range((1, 17, 400)[step % 3])], [step] * (step % 7), [step]]
        append(tables, model, step % 6, ids, True)
        apply(tables, model)
        for group in range(3):
            place.read(tables.block_tables[group].gpu, outs[group][step])
            wanted[group][step] = model.tables[group].table
        place.read(tables.num_blocks.gpu, counts[step])
        wanted_counts[step] = model.applied_num_blocks
    for group in range(3):
        assert_tables_equal(place.asnumpy(outs[group]), wanted[group], group=group)
    assert_tables_equal(place.asnumpy(counts), wanted_counts)
    assert (tables.stats.waits > 0) == place.on_gpu


def test_steps_of_the_reserved_size_allocate_nothing(place):
    tables, model = make(place, [16] * 4, 64, [200] * 4)
    before = tables.stats.host_allocations, tables.stats.growths
    rows, totals = np.arange(64), np.arange(1, 65)
    for step in range(8):
        ids = [np.arange(64, dtype=np.int32) + 1000 * step + g for g in range(4)]
        tables.append_block_ids_batch(rows, ids, [totals] * 4, overwrite=step == 0)
        model.append_block_ids_batch(rows, ids, [totals] * 4, overwrite=step == 0)
        apply(tables, model)
    check(place, tables, model)
    assert (tables.stats.host_allocations, tables.stats.growths) == before


def test_a_group_can_be_rebound(place):
    tables, model = make(place, [16, 32], 4, [8, 5])
    append(tables, model, 1, [[1, 2], [3]], True)
    apply(tables, model)
    whole = place.asarray(np.full((4, 20), POISON, np.int32))
    tables.block_tables[1].rebind(whole[:, 3:8])
    model.tables[1].table[...] = POISON
    append(tables, model, 1, [[4], [5]], False)
    tables.refresh_pointers()
    apply(tables, model)
    check(place, tables, model)
    around = place.asnumpy(whole)
    assert (around[:, :3] == POISON).all()
    assert (around[:, 8:] == POISON).all()


@pytest.mark.parametrize(
    ("args", "options", "error"),
    [
        (([], 4, 64, []), {}, ValueError),
        (([16], 0, 64, [4]), {}, ValueError),
        (([16], 4, 0, [4]), {}, ValueError),
        (([16, 16], 4, 64, [4]), {}, ValueError),
        (([16], 4, 64, [0]), {}, ValueError),
        (([0], 4, 64, [4]), {}, ValueError),
        (([-16], 4, 64, [4]), {}, ValueError),
        (([16.0], 4, 64, [4]), {}, TypeError),
        (([16], 4.0, 64, [4]), {}, TypeError),
        (([16], 4, 64, ["4"]), {}, TypeError),
        (([16], 4, 64, [4]), {"kernel_block_sizes": [5]}, ValueError),
        (([16], 4, 64, [4]), {"kernel_block_sizes": [32]}, ValueError),
        (([16], 4, 64, [4]), {"kernel_block_sizes": [8, 8]}, ValueError),
        (([16], 4, 64, [4]), {"max_concurrency": 0}, ValueError),
    ],
)
def test_constructor_errors(place, args, options, error):
    with pytest.raises(error):
        place.make(BlockTables, *args, **options)


@st.composite
def steps(draw):
    """Draw a shape, and steps of good and bad appends."""
    groups = draw(st.integers(1, 4))
    factors = draw(st.lists(st.sampled_from([1, 1, 2, 5]), min_size=groups, max_size=groups))
    widths = draw(st.lists(st.integers(1, 40), min_size=groups, max_size=groups))
    rows = draw(st.integers(1, 6))
    one = st.tuples(
        st.integers(-1, rows),  # out of range now and then
        st.lists(st.lists(st.integers(0, 2**29), max_size=25), min_size=groups, max_size=groups),
        st.booleans(),
    )
    calls = st.one_of(
        st.tuples(st.just("append"), one),
        st.tuples(st.just("batch"), st.lists(one, max_size=6)),
        st.tuples(st.just("apply"), st.none()),
    )
    return factors, widths, rows, draw(st.lists(calls, max_size=25)), draw(st.integers(1, 3))


@settings(max_examples=60)
@given(steps())
def test_random_steps(place, case):
    factors, widths, rows, calls, slots = case
    sizes, kernel = [16 * f for f in factors], [16] * len(factors)
    tables, model = make(place, sizes, rows, widths, kernel_block_sizes=kernel, max_concurrency=slots)
    for name, args in [*calls, ("apply", None)]:
        if name == "apply":
            apply(tables, model)
            check(place, tables, model)
            continue
        if name == "batch":
            totals = [np.cumsum([len(ids[g]) for _, ids, _ in args]).tolist() for g in range(len(factors))]
            flat = [[i for _, ids, _ in args for i in ids[g]] for g in range(len(factors))]
            args = ([row for row, _, _ in args], flat, totals, np.array([o for _, _, o in args], bool))
        method = "append_block_ids_batch" if name == "batch" else "append_block_ids"
        try:
            getattr(model, method)(*args)
        except (IndexError, OverflowError):  # both may hold; which is found first is nobody's business
            with pytest.raises((IndexError, OverflowError)):
                getattr(tables, method)(*args)
        else:
            getattr(tables, method)(*args)
        assert_tables_equal(np.array(tables.num_blocks.np), model.num_blocks)
