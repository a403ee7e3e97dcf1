"""StagedWriteTensor on every backend: what is staged, applied, refused, and when the host waits."""

import itertools
import threading

import numpy as np
import pytest
from common import DTYPES, LENGTHS, POISON, distinct_values, random_values

from cupy_staged import StagedWriteTensor, kernels
from cupy_staged.testing import TableModel, assert_tables_equal

TARGETS = ("device", "uva", "own", "column", "one column", "one dimension")


def make_target(place, kind, dtype, num_rows=5, row_length=300, rng=None, **options):
    """Make a tensor, its model, and the whole array that it lies in, with random values that must stay around it."""
    dtype = np.dtype(dtype)
    shape = (num_rows, row_length)
    if kind == "one column":
        shape = (num_rows, 1)
    elif kind == "one dimension":
        shape = (num_rows,)
    model = TableModel(shape, dtype)
    if kind in ("device", "uva"):
        tensor = place.make(StagedWriteTensor, shape, dtype, uva_instead_of_gpu=kind == "uva", **options)
        return tensor, model, tensor.gpu, (...,)
    rng = rng or np.random.default_rng(1)
    whole = random_values(rng, dtype, (num_rows + 2) * (row_length + 9)).reshape(num_rows + 2, row_length + 9)
    at = (slice(1, -1), slice(1, 1 + row_length))
    if kind == "one column":
        at = (slice(1, -1), slice(3, 4))
    elif kind == "one dimension":
        at = (slice(1, -1), 3)
    elif kind == "own":
        whole, at = np.ascontiguousarray(whole[at]), (...,)
    array = place.asarray(whole)
    model.table[...] = whole[at]
    tensor = place.make(StagedWriteTensor, shape, dtype, target=array[at], **options)
    return tensor, model, array, at


def check(place, tensor, model, array, at, before):
    """See that the table is as the model says, and nothing around it changed."""
    assert_tables_equal(place.asnumpy(tensor.gpu), model.table)
    expected = before.copy()
    expected[at] = model.table
    assert_tables_equal(place.asnumpy(array), expected)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_writes_of_every_dtype_and_target(place, dtype, kind):
    rng = np.random.default_rng(2)
    tensor, model, array, at = make_target(place, kind, dtype, rng=rng)
    before = place.asnumpy(array)
    num_rows, row_length = model.rows.shape
    for _ in range(4):
        for _ in range(int(rng.integers(1, 40))):
            length = min(int(rng.choice(LENGTHS)), row_length)
            start = int(rng.integers(0, row_length - length + 1))
            row = int(rng.integers(0, num_rows))
            values = random_values(rng, dtype, length)
            as_list = rng.integers(0, 2)
            tensor.stage_write(row, start, values.tolist() if as_list else values)
            model.stage_write(row, start, values)
        assert tensor.num_staged == len(model.staged)
        tensor.apply_write()
        model.apply()
        assert tensor.num_staged == 0
        check(place, tensor, model, array, at, before)
    assert tensor.stats.launches == 4


@pytest.mark.parametrize("contents", ["auto", "uva", "h2d"])
@pytest.mark.parametrize("dtype", ["u1", "u2", "f4", "i8", "c16"])
def test_every_length_at_every_alignment(uva_place, dtype, contents):
    rng = np.random.default_rng(3)
    lengths = [n for n in LENGTHS if n <= 257]
    tensor, model, array, at = make_target(uva_place, "column", dtype, 20, 300, contents=contents)
    before = uva_place.asnumpy(array)
    for start in (0, 1, 2, 3, 5, 8, 15, 16, 17, 33):
        for row, length in enumerate(lengths):
            values = random_values(rng, dtype, length)
            tensor.stage_write(row, start, values)
            model.stage_write(row, start, values)
        tensor.apply_write()
        model.apply()
        check(uva_place, tensor, model, array, at, before)


def counts_around_every_shape():
    """Numbers of one-value writes and of long runs just below, at and above what each launch shape has room for."""
    cells, runs = {1, 2}, {1, 2, 7, 8, 9}
    for warps, per_line, most in kernels.shape_table().tolist():
        for lines, extra in itertools.product({warps, most}, (-1, 0, 1)):
            if per_line == 32:
                cells.add(lines * 31 + extra)
            else:
                runs.add(lines + extra)
    return sorted(cells), sorted(runs)


@pytest.mark.parametrize("count", counts_around_every_shape()[0])
def test_many_one_value_writes(place, count):
    rng = np.random.default_rng(count)
    rows, columns = 41, 997
    tensor = place.make(StagedWriteTensor, (rows, columns), "i4")
    cells = rng.choice(rows * columns, count, replace=False)
    values = rng.integers(1, 2**31, count)
    tensor.stage_writes(cells // columns, cells % columns, values, np.arange(1, count + 1))
    tensor.apply_write()
    want = np.zeros((rows, columns), np.int32)
    want.reshape(-1)[cells] = values
    assert_tables_equal(place.asnumpy(tensor.gpu), want)
    assert tensor.stats.launches == 1
    assert tensor.stats.writes == tensor.stats.values == count


@pytest.mark.parametrize("short", [0, 5, 40], ids=lambda n: f"{n} short")
@pytest.mark.parametrize("count", counts_around_every_shape()[1])
def test_many_long_writes(place, count, short):
    rng = np.random.default_rng(count)
    rows, columns = max(count, 50), 60
    tensor = place.make(StagedWriteTensor, (rows, columns), "i4")
    want = np.zeros((rows, columns), np.int32)
    lengths = rng.integers(17, 51, count)
    starts = rng.integers(0, 3, count)
    values = rng.integers(1, 2**31, lengths.sum())
    totals = np.cumsum(lengths)
    tensor.stage_writes(np.arange(count), starts, values, totals)
    for row in range(count):
        want[row, starts[row] : starts[row] + lengths[row]] = values[totals[row] - lengths[row] : totals[row]]
    for row in range(short):
        tensor.stage_write(row, 55, [row + 1])
        want[row, 55] = row + 1
    tensor.apply_write()
    assert_tables_equal(place.asnumpy(tensor.gpu), want)


def test_every_launch_shape_is_taken(place):
    """From one write to more than the largest grid has warps for, so that blocks go round."""
    tensor = place.make(StagedWriteTensor, (70_000, 40), "i4")
    seen = set()

    def noting(number, launcher):
        def launch(stream):
            seen.add(number % len(kernels.SHAPES))
            launcher(stream)

        return launch

    rng = np.random.default_rng(3)
    want = np.zeros((70_000, 40), np.int32)
    for again in (False, True):
        if again:  # slots are as large as they get
            tensor._path._launch[:] = [noting(i, launcher) for i, launcher in enumerate(tensor._path._launch)]
        for length in (1, 17):
            for writes in (1, 9, 40, 500, 3000, 7000, 70_000):
                rows = rng.permutation(70_000)[:writes]
                values = rng.integers(1, 2**31, writes * length)
                for _ in range(1 if again else 2):  # in both slots
                    tensor.stage_writes(rows, np.full(writes, 3), values, np.arange(1, writes + 1) * length)
                    tensor.apply_write()
                want[rows, 3 : 3 + length] = values.reshape(writes, length)
                assert_tables_equal(place.asnumpy(tensor.gpu), want)
    assert seen == set(range(len(kernels.SHAPES)))


@pytest.mark.parametrize("dtype", ["u1", "i4", "c16"])
@pytest.mark.parametrize("length", [4095, 4096, 4097, 65536, 131072, 1 << 20])
def test_one_long_write(place, dtype, length):
    for start in (0, 3):
        tensor = place.make(StagedWriteTensor, (2, length + 5), dtype)
        values = random_values(np.random.default_rng(length), dtype, length)
        tensor.stage_write(1, start, values)
        tensor.apply_write()
        want = np.zeros((2, length + 5), dtype)
        want[1, start : start + length] = values
        assert_tables_equal(place.asnumpy(tensor.gpu), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_is_the_same_as_its_writes(place, dtype):
    rng = np.random.default_rng(4)
    lengths = rng.choice([n for n in LENGTHS if n < 100], 60)
    rows, starts = rng.integers(0, 7, 60), rng.integers(0, 20, 60)
    values = random_values(rng, dtype, lengths.sum())
    totals = np.cumsum(lengths)
    tensor = place.make(StagedWriteTensor, (7, 120), dtype)
    model = TableModel((7, 120), dtype)
    tensor.stage_write(0, 0, values[:1])  # a batch comes behind what is staged
    model.stage_write(0, 0, values[:1])
    kinds = (np.int32, np.int64, np.uint8, list)
    for kind in kinds:
        given = [a.tolist() if kind is list else a.astype(kind) for a in (rows, starts)]
        total = totals.tolist() if kind is list else totals.astype(np.int64)
        tensor.stage_writes(*given, values.tolist() if kind is list else values, total)
    for row, start, length, end in zip(rows, starts, lengths, totals, strict=True):
        model.stage_write(row, start, values[end - length : end])
    assert tensor.num_staged == 1 + len(kinds) * 60
    tensor.apply_write()
    model.apply()
    assert_tables_equal(place.asnumpy(tensor.gpu), model.table)


def test_an_empty_batch_stages_nothing(place):
    tensor = place.make(StagedWriteTensor, (3, 4), "i4")
    tensor.stage_writes([], [], [], [])
    tensor.stage_writes(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64))
    assert tensor.num_staged == 0
    tensor.apply_write()
    assert tensor.stats.launches == 0


def test_elements_go_to_column_zero(place):
    for size in (4, (4,), (4, 3)):
        tensor = place.make(StagedWriteTensor, size, "f4")
        tensor.stage_write_elem(3, 2.5)
        tensor.stage_write_elem(0, np.float32(-1.25))
        tensor.stage_write_elem(0, 7)
        with pytest.raises(IndexError, match=r"row 4 .*4 rows"):
            tensor.stage_write_elem(4, 1)
        with pytest.raises(TypeError):
            tensor.stage_write_elem(1, None)
        with pytest.raises(TypeError):
            tensor.stage_write_elem(1, [1.0])
        tensor.apply_write()
        got = place.asnumpy(tensor.gpu).reshape(4, -1)
        assert got[:, 0].tolist() == [7, 0, 0, 2.5]
        assert not got[:, 1:].any()


def test_nothing_staged_launches_nothing(place):
    tensor = place.make(StagedWriteTensor, (2, 4), "i4")
    with place.copies() as copies:
        tensor.apply_write()
        tensor.stage_write(1, 4, [])  # no values: legal up to the end of the row
        tensor.stage_write(0, 0, np.empty(0, np.int32))
        assert tensor.num_staged == 2
        tensor.apply_write()
    assert tensor.num_staged == 0
    assert (tensor.stats.launches, tensor.stats.values, copies) == (0, 0, [])


def test_clear_forgets_what_is_staged(place):
    tensor = place.make(StagedWriteTensor, (2, 4), "i4")
    tensor.stage_write(0, 0, [1, 2, 3, 4])
    tensor.stage_writes([1], [1], [5, 6], [2])
    tensor.clear_staged_writes()
    assert tensor.num_staged == 0
    tensor.stage_write(0, 3, [9])
    tensor.apply_write()
    assert place.asnumpy(tensor.gpu).tolist() == [[0, 0, 0, 9], [0] * 4]


def test_what_is_staged_is_a_snapshot(place):
    """Contents, rows, starts and totals may be changed when the call has returned, also while the device is behind."""
    tensor = place.make(StagedWriteTensor, (4, 400), "i4", max_concurrency=1)
    short, long = np.arange(3, dtype=np.int32) + 1, np.arange(300, dtype=np.int32) + 100
    rows, starts, totals = np.array([2, 3]), np.array([7, 50]), np.array([3, 303])
    both = np.concatenate([short, long])
    place.stall(30)
    tensor.stage_write(0, 1, short)
    tensor.stage_write(1, 5, long)
    tensor.stage_writes(rows, starts, both, totals)
    for array in (short, long, both, rows, starts, totals):
        array[...] = 1
    tensor.apply_write()
    tensor.stage_write(0, 200, [55])  # the next step
    assert tensor.num_staged == 1
    want = np.zeros((4, 400), np.int32)
    want[0, 1:4] = want[2, 7:10] = [1, 2, 3]
    want[1, 5:305] = want[3, 50:350] = np.arange(300) + 100
    assert_tables_equal(place.asnumpy(tensor.gpu), want)
    tensor.apply_write()
    want[0, 200] = 55
    assert_tables_equal(place.asnumpy(tensor.gpu), want)


@pytest.mark.parametrize(
    ("row", "start", "values", "message"),
    [
        (1, 3, [7, 8], r"start 3 \+ length 2 exceeds row length 4 \(row 1 of a \(2, 4\) table\)"),
        (1, 4, [7], r"start 4 \+ length 1 exceeds row length 4 \(row 1"),
        (0, 5, [], r"start 5 \+ length 0 exceeds row length 4 \(row 0"),
        (0, 0, [1] * 5, r"start 0 \+ length 5 exceeds row length 4"),
        (2, 0, [7], r"row 2 is not one of the 2 rows .*length 1"),
        (-1, 0, [7], r"row -1 is not one of the 2 rows"),
        (2, 0, [], r"row 2 is not one of the 2 rows"),
        (0, -1, [7], r"start -1 is negative"),
        (2**40, 0, [7], rf"row {2**40} is not one"),
        (0, 2**40, [7], rf"start {2**40} \+ length 1"),
        (2**70, 0, [7], rf"row {2**70} is not one"),
    ],
)
def test_a_write_outside_the_table_is_refused_and_the_rest_stays(place, row, start, values, message):
    tensor = place.make(StagedWriteTensor, (2, 4), "i4")
    tensor.stage_write(0, 1, [5, 6])
    for given in (values, np.array(values, np.int32), tuple(values)):
        with pytest.raises(IndexError, match=message):
            tensor.stage_write(row, start, given)
    assert tensor.num_staged == 1
    tensor.apply_write()
    assert place.asnumpy(tensor.gpu).tolist() == [[0, 5, 6, 0], [0] * 4]


@pytest.mark.parametrize(("row", "start"), [(1.0, 0), (0, 1.0), ("1", 0), (None, 0), (0, None), ([1], 0)])
def test_a_row_or_start_that_is_no_int_is_refused(host, row, start):
    tensor = host.make(StagedWriteTensor, (2, 4), "i4")
    with pytest.raises(TypeError):
        tensor.stage_write(row, start, [1])
    assert tensor.num_staged == 0


BAD_BATCHES = [
    (([0, 2], [0, 0], [1, 2], [1, 2]), IndexError, r"write 1: row 2 is not one of the 2 rows"),
    (([0, -1], [0, 0], [1, 2], [1, 2]), IndexError, r"write 1: row -1"),
    (([0, 1], [0, 3], [1, 2, 3], [1, 3]), IndexError, r"write 1: start 3 \+ length 2 exceeds row length 4 \(row 1"),
    (([0, 1], [0, -1], [1, 2], [1, 2]), IndexError, r"write 1: start -1 is negative"),
    (([0, 1], [0, 0], [1, 2], [2, 1]), ValueError, r"cu_lens.*write 1"),
    (
        ([0, 1, 0], [0, 0, 0], [1] * 9, [8, 5, 9]),
        ValueError,
        r"cu_lens.*got 5 after 8 at write 1",
    ),  # and 8 are too many
    (([0, 9], [0, 0], [1, 2], [1, 1]), ValueError, r"cu_lens must rise to len\(contents\) = 2"),
    (([0, 1], [0, 0], [1, 2], [-1, 2]), ValueError, r"cu_lens.*write 0"),
    (([0, 1], [0, 0], [1, 2, 3], [1, 2]), ValueError, r"cu_lens must rise to len\(contents\) = 3"),
    (([0, 1], [0, 0], [1], [1, 2]), ValueError, r"cu_lens must rise to len\(contents\) = 1"),
    (([], [], [1], []), ValueError, r"cu_lens must rise to len\(contents\) = 1"),
    (([0, 1], [0], [1, 2], [1, 2]), ValueError, r"2, 1 and 2"),
    (([0, 1], [0, 0], [1, 2], [1, 2, 2]), ValueError, r"2, 2 and 3"),
    (([0, 1], [0, 0], [1, 2**31], [1, 2]), OverflowError, str(2**31)),
    (([0, 1], [0, 0], np.array([1, 2**31]), [1, 2]), OverflowError, str(2**31)),
    (([0, 1], [0, 0], [1, 2.5], [1, 2]), TypeError, r"2\.5"),
    (([0, 1], [0, 0], np.array([1, 2.5]), [1, 2]), TypeError, r"float64"),
    (([0, 1], [0, 0], [1, None], [1, 2]), TypeError, r"None"),
    (([0, 1.0], [0, 0], [1, 2], [1, 2]), TypeError, r"indices must be ints"),
    (([0, 1], [0, 0.5], [1, 2], [1, 2]), TypeError, r"starts must be ints"),
    (([0, 1], [0, 0], [1, 2], [1, 2.0]), TypeError, r"cu_lens must be ints"),
    (([[0, 1]], [0, 0], [1, 2], [1, 2]), ValueError, r"indices must have one dimension"),
    ((np.array([0, 2**63], np.uint64), [0, 0], [1, 2], [1, 2]), OverflowError, rf"indices holds {2**63}"),
]


@pytest.mark.parametrize(("batch", "error", "message"), BAD_BATCHES)
def test_a_bad_batch_stages_nothing_of_itself(place, batch, error, message):
    tensor = place.make(StagedWriteTensor, (2, 4), "i4")
    tensor.stage_write(1, 2, [5, 6])
    with pytest.raises(error, match=message):
        tensor.stage_writes(*batch)
    assert tensor.num_staged == 1
    tensor.stage_writes([0], [0], [9], [1])
    tensor.apply_write()
    assert place.asnumpy(tensor.gpu).tolist() == [[9, 0, 0, 0], [0, 0, 5, 6]]
    assert tensor.stats.values == 3


def test_a_batch_whose_last_write_is_bad_stages_nothing(place):
    count = 5000
    tensor = place.make(StagedWriteTensor, (count, 2), "i4")
    starts = np.zeros(count, np.int64)
    starts[-1] = 2
    with pytest.raises(IndexError, match=rf"write {count - 1}: start 2 \+ length 1"):
        tensor.stage_writes(np.arange(count), starts, np.ones(count, np.int32), np.arange(1, count + 1))
    assert tensor.num_staged == 0
    tensor.apply_write()
    assert not place.asnumpy(tensor.gpu).any()


def test_an_iterable_that_raises_midway_stages_nothing(place):
    def values():
        yield 1
        yield 2
        raise KeyError("midway")

    tensor = place.make(StagedWriteTensor, (2, 4), "i4")
    tensor.stage_write(0, 0, [3])
    with pytest.raises(KeyError, match="midway"):
        tensor.stage_write(1, 0, values())
    with pytest.raises(KeyError, match="midway"):
        tensor.stage_writes([1], [0], values(), [2])
    assert tensor.num_staged == 1
    tensor.apply_write()
    assert place.asnumpy(tensor.gpu).tolist() == [[3, 0, 0, 0], [0] * 4]


@pytest.mark.parametrize("use_uva_target", [False, True], ids=["device target", "uva target"])
@pytest.mark.parametrize("dtype", ["i4", "i8", "f4"])
def test_generations_in_flight_each_seen_by_its_consumer(place, dtype, use_uva_target):
    """24 applies and 24 readers queued on one stream, a ring of two slots, always behind the host."""
    generations, columns = 24, 4100
    tensor = place.make(StagedWriteTensor, (3, columns), dtype, uva_instead_of_gpu=use_uva_target, max_concurrency=2)
    model = TableModel((3, columns), dtype)
    outs = place.asarray(np.full((generations, 3, columns), POISON, dtype))
    wanted = np.zeros((generations, 3, columns), dtype)
    place.read(tensor.gpu, outs[0])  # compile the reader
    outs[0] = POISON
    place.synchronize()
    place.stall(60)
    for g in range(generations):
        place.stall(1)
        length = (3, 17, 1500, 4090)[g % 4]
        start = 1 + 2 * (g % 5)
        values = distinct_values(dtype, length, g)
        tensor.stage_write(1, start, values if g % 2 else values.tolist())
        tensor.stage_write(2 * (g % 2), 1 + 2 * g, values[:1])
        model.stage_write(1, start, values)
        model.stage_write(2 * (g % 2), 1 + 2 * g, values[:1])
        tensor.apply_write()
        model.apply()
        wanted[g] = model.table
        place.read(tensor.gpu, outs[g])
    got = place.asnumpy(outs)
    for g in range(generations):
        assert_tables_equal(got[g], wanted[g], group=g)
    assert tensor.stats.launches == generations
    if place.on_gpu:
        assert tensor.stats.waits > 0
        assert tensor.stats.wait_s > 0.01


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_a_ring_lapped_behind_a_stall(place, slots):
    tensor = place.make(StagedWriteTensor, (11, 1), "i4", max_concurrency=slots)
    place.stall(30)
    for row in range(11):
        tensor.stage_write_elem(row, 11 * (row + 1))
        tensor.apply_write()
    assert place.asnumpy(tensor.gpu)[:, 0].tolist() == [11 * (row + 1) for row in range(11)]
    stats = tensor.stats
    assert (stats.slots, stats.launches, stats.writes, stats.values) == (slots, 11, 11, 11)
    assert (stats.waits > 0) == place.on_gpu


def test_an_apply_without_a_value_does_not_wait(host):
    """A slot that is still being read keeps nobody back who has nothing to write."""
    tensor = host.make(StagedWriteTensor, (2, 3), "i4", max_concurrency=1)
    tensor.stage_write(0, 0, [1])
    tensor.apply_write()
    tensor._path._done[0] -= 1  # the slot's fence has not passed
    tensor.stage_write(1, 3, [])
    tensor.apply_write()
    assert (tensor.num_staged, tensor.stats.launches, tensor.stats.waits) == (0, 1, 0)


def test_several_applies_in_one_step_are_in_order(place):
    tensor = place.make(StagedWriteTensor, (1, 8), "i4")
    place.stall(5)
    for value in range(100):
        tensor.stage_write(0, value % 3, [value] * 6)
        tensor.apply_write()
    want = np.zeros(8, np.int32)
    for value in range(100):
        want[value % 3 : value % 3 + 6] = value
    assert place.asnumpy(tensor.gpu)[0].tolist() == want.tolist()


def test_more_writes_than_rows_and_growth_of_everything(place):
    tensor = place.make(StagedWriteTensor, (2, 3), "i8")
    model = TableModel((2, 3), "i8")
    before = tensor.stats.host_allocations
    rng = np.random.default_rng(5)
    for count in (1, 100, 5000, 10, 40000):
        for _ in range(count if count < 5000 else 0):
            row, start, value = int(rng.integers(2)), int(rng.integers(3)), int(rng.integers(2**60))
            tensor.stage_write(row, start, [value])
            model.stage_write(row, start, [value])
        if count >= 5000:
            rows, starts, values = (
                rng.integers(0, 2, count),
                rng.integers(0, 2, count),
                rng.integers(0, 2**60, 2 * count),
            )
            tensor.stage_writes(rows, starts, values, np.arange(2, 2 * count + 2, 2))
            for w in range(count):
                model.rows[rows[w], starts[w] : starts[w] + 2] = values[2 * w : 2 * w + 2]
        tensor.apply_write()
        model.apply()
        assert_tables_equal(place.asnumpy(tensor.gpu), model.table)
    assert tensor.stats.growths == tensor.stats.host_allocations - before


def test_slots_grow_and_keep_what_is_in_flight(place):
    """A slot is replaced alone: the other one is still being read."""
    tensor = place.make(StagedWriteTensor, (2, 200_000), "i4", max_concurrency=2)
    kept = tensor._path._slots[0]
    place.stall(30)
    want = np.zeros((2, 200_000), np.int32)
    for step, length in enumerate((10, 100_000, 20, 200_000)):
        tensor.stage_write(step % 2, 0, np.full(length, step + 1, np.int32))
        want[step % 2, :length] = step + 1
        tensor.apply_write()
    assert_tables_equal(place.asnumpy(tensor.gpu), want)
    assert tensor._path._slots[0] is kept
    assert tensor.stats.growths == 2  # both of slot 1


def test_reserve_makes_steady_steps_allocate_nothing(place):
    tensor = place.make(StagedWriteTensor, (64, 4096), "i4", max_concurrency=3)
    tensor.stage_write(3, 0, [1])
    tensor.reserve(2000, 60_000)
    reserved = tensor.stats.host_allocations
    rng = np.random.default_rng(6)
    model = TableModel((64, 4096), "i4")
    model.stage_write(3, 0, [1])  # what was staged before is kept
    for writes, values in ((1, 1), (2000, 2000), (2000, 60_000), (15, 60_000), (900, 60_000), (1, 4096)):
        for _ in range(3):
            lengths = np.full(writes, values // writes)
            rows, starts = rng.integers(0, 64, writes), rng.integers(0, 4097 - lengths[0], writes)
            given = rng.integers(0, 2**31, lengths.sum())
            tensor.stage_writes(rows, starts, given, np.cumsum(lengths))
            for w in range(writes):
                model.stage_write(rows[w], starts[w], given[w * lengths[0] : (w + 1) * lengths[0]])
            tensor.apply_write()
            model.apply()
    assert_tables_equal(place.asnumpy(tensor.gpu), model.table)
    assert tensor.stats.host_allocations == reserved
    assert tensor.stats.launches == 18


def test_reserve_smaller_than_there_is_does_nothing(place):
    tensor = place.make(StagedWriteTensor, (4, 4), "i4")
    tensor.reserve(100, 5000)
    before = tensor.stats.host_allocations
    tensor.reserve(0, 0)
    tensor.reserve(1, 1)
    tensor.reserve(100, 5000)
    assert tensor.stats.host_allocations == before


def test_a_row_far_past_31_bits(place):
    """Row 50 000 of stride 50 000: offset 2 500 000 007, in short and long writes."""
    size = (50_001, 50_000)
    if place.on_gpu:
        place.cupy.get_default_memory_pool().free_all_blocks()
    tensor = place.make(StagedWriteTensor, size, "u1")
    short, long = np.arange(3, dtype=np.uint8) + 1, np.arange(1000, dtype=np.int64) % 250 + 1
    tensor.stage_write(50_000, 7, short)
    tensor.stage_write(50_000, 101, long.astype(np.uint8))
    tensor.stage_write(50_000, 49_999, [9])
    tensor.stage_write(0, 0, [4])
    tensor.apply_write()
    want = np.zeros(50_000, np.uint8)
    want[7:10], want[101:1101], want[49_999] = short, long, 9
    assert_tables_equal(place.asnumpy(tensor.gpu[50_000]), want)
    wrapped = (2_500_000_007 - 2**31) // 50_000
    assert place.asnumpy(tensor.gpu[0, :3]).tolist() == [4, 0, 0]
    assert not place.asnumpy(tensor.gpu[wrapped - 1 : wrapped + 2]).any()


def test_a_uva_target_is_seen_by_the_host(place):
    tensor = place.make(StagedWriteTensor, (3, 5), "f4", uva_instead_of_gpu=True)
    tensor.stage_write(2, 1, [0.5, 1.5])
    tensor.apply_write()
    place.synchronize()
    assert place.asnumpy(tensor.gpu)[2].tolist() == [0, 0.5, 1.5, 0, 0]
    if place.uva:
        assert tensor.np.shape == (3, 5)
        assert tensor.np[2].tolist() == [0, 0.5, 1.5, 0, 0]
        assert tensor.np.ctypes.data % 64 == 0
    else:
        assert tensor.np is None


def test_a_device_target_has_no_host_view(place):
    assert place.make(StagedWriteTensor, 3, "f4").np is None


@pytest.mark.parametrize("size", [0, (0,), (0, 4), (4, 0), (0, 0)])
def test_empty_tables(place, size):
    tensor = place.make(StagedWriteTensor, size, "i4")
    with pytest.raises(IndexError):
        tensor.stage_write(0, 0, [1])
    if size == (4, 0):
        tensor.stage_write(3, 0, [])
    tensor.apply_write()
    assert tensor.stats.launches == 0
    assert tensor.gpu.size == 0


def test_rebind_goes_to_the_new_target_and_leaves_the_old(place):
    tensor = place.make(StagedWriteTensor, (2, 40), "i4", uva_instead_of_gpu=True)
    tensor.stage_write(0, 0, [1] * 30)
    place.stall(10)
    tensor.apply_write()
    old = tensor.gpu
    tensor.stage_write(0, 1, [2] * 30)
    tensor.stage_write(1, 1, [3])
    whole = place.asarray(np.full((4, 50), POISON, np.int32))
    tensor.rebind(whole[1:3, 5:45])
    assert tensor.np is None
    assert place.address(tensor.gpu) == place.address(whole[1:3, 5:45])
    tensor.apply_write()
    assert place.asnumpy(old).tolist() == [[1] * 30 + [0] * 10, [0] * 40]
    want = np.full((4, 50), POISON, np.int32)
    want[1, 6:36], want[2, 6] = 2, 3
    assert_tables_equal(place.asnumpy(whole), want)
    for _ in range(5):  # every slot of the ring knows the new target
        tensor.stage_write(1, 39, [7])
        tensor.apply_write()
    want[2, 44] = 7
    assert_tables_equal(place.asnumpy(whole), want)


def bad_targets(place):
    array = place.asarray(np.zeros((4, 8), np.int32))
    return [
        (array[:, :7], ValueError, r"shape \(4, 8\)"),
        (array[0], ValueError, "shape"),
        (place.asarray(np.zeros((4, 8), np.int64)), ValueError, "dtype int32"),
        (place.asarray(np.zeros((4, 8), np.float32)), ValueError, "dtype int32"),
        (place.asarray(np.zeros((4, 16), np.int32))[:, ::2], ValueError, "contiguous"),
        (place.asarray(np.zeros((8, 4), np.int32)).T, ValueError, "contiguous"),
        (array[::-1], ValueError, "rows overlap or run backwards"),
        ([[0] * 8] * 4, TypeError, "ndarray"),
        (array.tolist(), TypeError, "ndarray"),
        (place.asnumpy(array) if place.on_gpu else memoryview(array), TypeError, "ndarray"),
    ]


def test_a_target_that_does_not_fit_is_refused(place):
    tensor = place.make(StagedWriteTensor, (4, 8), "i4")
    tensor.stage_write(3, 0, [5])
    old = tensor.gpu
    for target, error, message in bad_targets(place):
        with pytest.raises(error, match=message):
            place.make(StagedWriteTensor, (4, 8), "i4", target=target)
        with pytest.raises(error, match=message):
            tensor.rebind(target)
    assert tensor.gpu is old
    tensor.apply_write()
    assert place.asnumpy(old)[3, 0] == 5


def test_host_targets_that_cannot_be_written(host):
    frozen = np.zeros((4, 8), np.int32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        host.make(StagedWriteTensor, (4, 8), "i4", target=frozen)
    with pytest.raises(ValueError, match="overlap"):
        host.make(
            StagedWriteTensor, (4, 8), "i4", target=np.lib.stride_tricks.as_strided(np.zeros(20, "i4"), (4, 8), (8, 4))
        )
    shifted = np.zeros(4 * 8 * 4 + 1, np.uint8)[1:].view(np.int32).reshape(4, 8)
    with pytest.raises(ValueError, match="not aligned"):
        host.make(StagedWriteTensor, (4, 8), "i4", target=shifted)


@pytest.mark.parametrize(
    ("size", "dtype", "options", "error", "message"),
    [
        ((2, 3, 4), "i4", {}, ValueError, r"\(2, 3, 4\)"),
        ((), "i4", {}, ValueError, "1 to 2 dimensions"),
        (-1, "i4", {}, ValueError, "-1"),
        ((2, -3), "i4", {}, ValueError, "-3"),
        (2.0, "i4", {}, TypeError, r"2\.0"),
        ((2, "3"), "i4", {}, TypeError, "'3'"),
        (True, "i4", {}, TypeError, "True"),
        (None, "i4", {}, TypeError, "None"),
        (4, "S4", {}, TypeError, "S4"),
        (4, "O", {}, TypeError, "object"),
        (4, "M8[s]", {}, TypeError, "datetime64"),
        (4, ">i4", {}, TypeError, "byte order"),
        (4, "c32" if hasattr(np, "complex256") else "O", {}, TypeError, "not supported"),
        (4, np.longdouble, {}, TypeError, "not supported"),
        (4, np.dtype([("a", "i4")]), {}, TypeError, "not supported"),
        (4, "nonsense", {}, TypeError, "nonsense"),
        (4, "i4", {"contents": "device"}, ValueError, "'device'"),
        (4, "i4", {"contents": "h2d", "uva_instead_of_gpu": True}, ValueError, "never fed by a copy"),
        (4, "i4", {"max_concurrency": 0}, ValueError, "at least 1, got 0"),
        (4, "i4", {"max_concurrency": -2}, ValueError, "at least 1, got -2"),
        (4, "i4", {"max_concurrency": 2.0}, TypeError, r"2\.0"),
        (4, "i4", {"max_concurrency": True}, TypeError, "True"),
    ],
)
def test_constructor_errors_name_the_value(place, size, dtype, options, error, message):
    with pytest.raises(error, match=message):
        place.make(StagedWriteTensor, size, dtype, **options)


def test_a_target_excludes_a_uva_target(place):
    with pytest.raises(ValueError, match="exclude each other"):
        place.make(StagedWriteTensor, 4, "i4", target=place.asarray(np.zeros(4, "i4")), uva_instead_of_gpu=True)


def test_numpy_ints_are_sizes(place):
    tensor = place.make(StagedWriteTensor, (np.int64(3), np.uint8(4)), np.int16, max_concurrency=np.int32(3))
    assert (tensor.gpu.shape, tensor.gpu.dtype, tensor.stats.slots) == ((3, 4), np.int16, 3)


def test_an_object_in_use_refuses_a_second_thread(place):
    tensor = place.make(StagedWriteTensor, (2, 2), "i4")
    tensor.stage_write(0, 0, [3])
    errors = []

    def intrude(call):
        try:
            with place.using(place.stream):
                call()
        except RuntimeError as error:
            errors.append(str(error))

    calls = (
        tensor.apply_write,
        tensor.clear_staged_writes,
        lambda: tensor.stage_writes([0], [0], [1], [1]),
        lambda: tensor.reserve(1, 1),
        lambda: tensor.rebind(tensor.gpu),
    )
    with tensor._path.entered():  # as if this thread were in a call
        for call in calls:
            thread = threading.Thread(target=intrude, args=(call,))
            thread.start()
            thread.join()
    assert len(errors) == len(calls)
    assert all("in use by another thread" in error for error in errors)
    tensor.apply_write()
    assert place.asnumpy(tensor.gpu).tolist() == [[3, 0], [0, 0]]


def test_objects_work_in_parallel_threads(place):
    tensors = [place.make(StagedWriteTensor, (16, 300), "i4") for _ in range(4)]
    failures = []

    def work(tensor, salt):
        try:
            with place.using(place.new_stream()):
                for step in range(100):
                    tensor.stage_write(step % 16, step % 7, np.full(1 + 2 * step, 1000 * salt + step, np.int32))
                    tensor.apply_write()
                got = place.asnumpy(tensor.gpu)
            want = np.zeros((16, 300), np.int32)
            for step in range(100):
                want[step % 16, step % 7 : step % 7 + 1 + 2 * step] = 1000 * salt + step
            assert_tables_equal(got, want)
        except Exception as error:  # noqa: BLE001 - shown by the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=work, args=(t, i + 1)) for i, t in enumerate(tensors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_failed_launch_leaves_the_writes_staged(place):
    tensor = place.make(StagedWriteTensor, (2, 400), "i4")
    tensor.stage_write(0, 0, [1, 2])
    tensor.apply_write()
    launchers = list(tensor._path._launch)

    def fail(_stream):
        raise MemoryError("injected")

    tensor.stage_write(1, 1, [5])
    tensor.stage_write(1, 2, np.arange(300))
    tensor._path._launch[:] = [fail] * len(launchers)
    for _ in range(3):
        with pytest.raises(MemoryError, match="injected"):
            tensor.apply_write()
        assert tensor.num_staged == 2
    tensor.stage_write(0, 399, [9])
    tensor._path._launch[:] = launchers
    tensor.apply_write()
    want = np.zeros((2, 400), np.int32)
    want[0, :2], want[0, 399], want[1, 1], want[1, 2:302] = (1, 2), 9, 5, np.arange(300)
    assert_tables_equal(place.asnumpy(tensor.gpu), want)
    assert tensor.stats.launches == 2


class StagesAnother:
    """A value that stages a write of its own while it is converted, as a second thread would between two bytecodes."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __index__(self):
        self.tensor.stage_write(1, 0, [9])
        return 5


@pytest.mark.parametrize("more", [[], [6]])
def test_torn_writes_are_found(host, more):
    tensor = host.make(StagedWriteTensor, (2, 4), "i4")
    tensor.stage_write(0, 0, [1, 2])
    with pytest.raises(RuntimeError, match="torn"):
        tensor.stage_write(0, 2, [StagesAnother(tensor), *more])
    with pytest.raises(RuntimeError, match="torn"):  # whose record is in the log is not known any more
        tensor.apply_write()
    assert not tensor.gpu.any()
    tensor.clear_staged_writes()
    tensor.stage_write(0, 3, [4])
    tensor.apply_write()
    assert tensor.gpu.tolist() == [[0, 0, 0, 4], [0, 0, 0, 0]]
