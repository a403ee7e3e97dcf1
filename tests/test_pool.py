"""UvaBufferPool on every backend: growth, reuse, copies, values, and who may still be reading."""

import threading

import numpy as np
import pytest
from common import DTYPES, POISON, distinct_values, random_values

from cupy_staged import UvaBufferPool, set_default_max_concurrency
from cupy_staged.testing import assert_tables_equal

GROWTH = (1, 2, 3, 4, 5, 1023, 1024, 1025)


def power_of_two(n):
    size = 1
    while size < n:
        size *= 2
    return size


def capacities(pool):
    return [len(slot.host) for slot in pool._core._slots]


def blocks(pool):
    return [slot.block for slot in pool._core._slots]


@pytest.mark.parametrize("trailing", [(), (3,), (2, 5)], ids=str)
def test_growth_to_the_smallest_power_of_two(place, trailing):
    """Each slot grows alone, and the others' buffers stay the same objects."""
    rng = np.random.default_rng(1)
    pool = place.make(UvaBufferPool, (1, *trailing), "f4", max_concurrency=3)
    sizes = [1, 1, 1]
    for turn, n in enumerate(GROWTH):
        for again in (n, n - 1):  # and a shorter reuse after growth
            slot = pool._core._next
            before = blocks(pool)
            values = random_values(rng, "f4", again * int(np.prod(trailing))).reshape(again, *trailing)
            view = pool.copy_to_uva(values)
            assert view.shape == (again, *trailing)
            assert_tables_equal(place.asnumpy(view), values)
            sizes[slot] = max(sizes[slot], power_of_two(again))
            assert capacities(pool) == sizes, turn
            after = blocks(pool)
            assert [a is b for i, (a, b) in enumerate(zip(after, before, strict=True)) if i != slot] == [True, True]
            assert (after[slot] is before[slot]) == (len(before[slot].array) == len(after[slot].array))
    assert pool.size == (1, *trailing)
    assert pool.stats.host_allocations == pool.stats.growths + 4  # three slots and the fence words


def test_no_growth_at_exactly_full(place):
    pool = place.make(UvaBufferPool, 1000, "i4", max_concurrency=1)
    buffer = blocks(pool)[0]
    for n in (1000, 1, 0, 999, 1000):
        assert pool.copy_to_uva(np.arange(n, dtype=np.int32)).shape == (n,)
        assert blocks(pool)[0] is buffer
    assert pool.copy_to_uva(range(1001)).shape == (1001,)
    assert capacities(pool) == [1024]
    assert pool.stats.growths == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_from_lists_and_arrays(place, dtype):
    rng = np.random.default_rng(2)
    pool = place.make(UvaBufferPool, 4, dtype)
    table = place.make(UvaBufferPool, (4, 3), dtype)
    for n in (1, 5, 64, 300):
        values = random_values(rng, dtype, n)
        rows = random_values(rng, dtype, 3 * n).reshape(n, 3)
        for given in (values, values.tolist(), tuple(values.tolist()), iter(values.tolist())):
            assert_tables_equal(place.asnumpy(pool.copy_to_uva(given)), values)
        assert_tables_equal(place.asnumpy(pool.copy_to_gpu(values.tolist())), values)
        assert_tables_equal(place.asnumpy(table.copy_to_uva(rows)), rows)
        assert_tables_equal(place.asnumpy(table.copy_to_uva(rows.tolist())), rows)
        assert_tables_equal(place.asnumpy(table.copy_to_gpu(list(rows))), rows)
        strided = random_values(rng, dtype, 6 * n).reshape(2 * n, 3)
        assert_tables_equal(place.asnumpy(table.copy_to_uva(strided[::2])), strided[::2].copy())
        assert_tables_equal(place.asnumpy(pool.copy_to_gpu(strided[::-2, 1])), strided[::-2, 1].copy())


def test_zero_length_input(place):
    pool = place.make(UvaBufferPool, 0, "i4")
    for given in ([], (), np.empty(0, np.int32), range(0), iter(())):
        assert pool.copy_to_uva(given).shape == (0,)
        assert pool.copy_to_gpu(given).shape == (0,)
    table = place.make(UvaBufferPool, (2, 3), "i4")
    for given in ([], np.empty((0, 3), np.int32)):
        assert table.copy_to_uva(given).shape == (0, 3)
        assert table.copy_to_gpu(given).shape == (0, 3)
    out = place.asarray(np.empty(0, np.int32))
    with place.copies() as copies:
        assert pool.copy_to_gpu([], out=out) is out
    assert copies == []


def test_copy_to_gpu_returns_out_or_a_new_array(place):
    pool = place.make(UvaBufferPool, 2, "i8")
    out = place.asarray(np.full(5, POISON, np.int64))
    assert pool.copy_to_gpu([1, 2, 3, 4, 5], out=out) is out
    first = pool.copy_to_gpu([6, 7])
    second = pool.copy_to_gpu([8, 9])
    assert place.asnumpy(out).tolist() == [1, 2, 3, 4, 5]
    assert place.asnumpy(first).tolist() == [6, 7]
    assert place.asnumpy(second).tolist() == [8, 9]
    part = place.asarray(np.full((4, 3), POISON, np.int64))
    pool.copy_to_gpu([1, 2, 3], out=part[2])
    assert place.asnumpy(part).tolist() == [[POISON] * 3, [POISON] * 3, [1, 2, 3], [POISON] * 3]


def test_copy_to_gpu_makes_one_copy_and_copy_to_uva_none(place):
    pool = place.make(UvaBufferPool, 8, "i4")
    with place.copies() as copies:
        pool.copy_to_gpu([1, 2, 3])
        assert copies == [12]
        view = pool.copy_to_uva([1, 2])
        assert copies == ([12] if place.uva else [12, 8])
    assert place.asnumpy(view).tolist() == [1, 2]
    assert pool.stats.copies == len(copies)


def test_an_out_that_does_not_match_is_refused(place):
    pool = place.make(UvaBufferPool, 4, "i4", max_concurrency=1)
    kept = pool.copy_to_uva([7, 7, 7])
    for out, error, message in (
        (place.asarray(np.zeros(4, np.int32)), ValueError, r"shape \(3,\)"),
        (place.asarray(np.zeros(2, np.int32)), ValueError, r"shape \(3,\)"),
        (place.asarray(np.zeros((3, 1), np.int32)), ValueError, r"shape \(3,\)"),
        (place.asarray(np.zeros(3, np.int64)), ValueError, "dtype int32"),
        (place.asarray(np.zeros(6, np.int32))[::2], ValueError, "contiguous"),
        ([0, 0, 0], TypeError, "ndarray"),
    ):
        with pytest.raises(error, match=message):
            pool.copy_to_gpu([1, 2, 3], out=out)
    assert place.asnumpy(kept).tolist() == [7, 7, 7]


BAD = [
    ([1, 2**31], OverflowError, str(2**31)),
    ([1, -(2**31) - 1], OverflowError, str(2**31 + 1)),
    (np.array([1, 2**40]), OverflowError, str(2**40)),
    (np.array([2**32 - 1], np.uint32), OverflowError, str(2**32 - 1)),
    ([1, 0.5], TypeError, r"0\.5"),
    (np.array([1, 0.5]), TypeError, "float64"),
    ([9, 9, None], TypeError, "None"),
    ([9, 9, "1"], TypeError, "'1'"),
    ("123", TypeError, "str"),
    (None, TypeError, "NoneType"),
    (5, TypeError, "int"),
    (np.zeros((2, 2), np.int32), ValueError, r"\(2, 2\)"),
]


@pytest.mark.parametrize(("values", "error", "message"), BAD)
def test_bad_values_hand_out_nothing(place, values, error, message):
    """The view that was handed out last, from the only slot there is, keeps its values."""
    pool = place.make(UvaBufferPool, 4, "i4", max_concurrency=1)
    view = pool.copy_to_uva([5, 6, 7])
    for call in (pool.copy_to_uva, pool.copy_to_gpu):
        with pytest.raises(error, match=message):
            call(values)
    assert place.asnumpy(view).tolist() == [5, 6, 7]
    assert (pool.stats.launches, pool.stats.growths, pool.stats.late_fences) == (1, 0, 0)
    assert place.asnumpy(pool.copy_to_uva([1])).tolist() == [1]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([[1, 2]], ValueError, r"\(n, 3\).*\(1, 2\)"),
        ([1, 2, 3], ValueError, r"\(n, 3\)"),
        ([[1, 2, 3], [4, 5]], ValueError, "ragged"),
        (np.zeros((2, 3, 1), np.int32), ValueError, r"\(2, 3, 1\)"),
        (np.zeros(3, np.int32), ValueError, r"\(3,\)"),
        (np.int32(3), ValueError, r"\(\)"),
        ([[1, 2, 2**31]], OverflowError, str(2**31)),
        ([[1, 2, 0.5]], TypeError, r"0\.5"),
        ([[1, 2, None]], TypeError, "None"),
        ([["1", "2", "3"]], TypeError, "<U1"),
    ],
)
def test_bad_rows_hand_out_nothing(place, values, error, message):
    pool = place.make(UvaBufferPool, (4, 3), "i4", max_concurrency=1)
    view = pool.copy_to_uva([[5, 6, 7]])
    for call in (pool.copy_to_uva, pool.copy_to_gpu):
        with pytest.raises(error, match=message):
            call(values)
    assert place.asnumpy(view).tolist() == [[5, 6, 7]]
    assert pool.stats.launches == 1


def test_what_is_handed_out_is_a_snapshot(place):
    pool = place.make(UvaBufferPool, 4, "i4")
    values, more = np.array([1, 2, 3], np.int32), np.array([4, 5, 6], np.int32)
    place.stall(20)
    view, copied = pool.copy_to_uva(values), pool.copy_to_gpu(more)
    values[...] = more[...] = POISON
    assert place.asnumpy(view).tolist() == [1, 2, 3]
    assert place.asnumpy(copied).tolist() == [4, 5, 6]


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "not fenced"])
def test_two_views_read_by_one_step_then_a_third_hand_out(place, fenced):
    pool = place.make(UvaBufferPool, 100, "i4", max_concurrency=2)
    outs = [place.asarray(np.full(100, POISON, np.int32)) for _ in range(4)]
    place.read(pool.copy_to_uva(np.zeros(100, np.int32)), outs[0])  # compile the reader
    pool.fence()
    place.synchronize()
    given = [distinct_values("i4", 100, salt) for salt in range(4)]
    place.stall(30)
    a, b = pool.copy_to_uva(given[0]), pool.copy_to_uva(given[1])
    place.read(b, outs[1])
    place.read(a, outs[0])
    if fenced:
        pool.fence()
    late = pool.stats.late_fences
    place.read(pool.copy_to_uva(given[2]), outs[2])
    place.read(pool.copy_to_uva(given[3]), outs[3])
    assert pool.stats.late_fences == late + (0 if fenced else 2)
    for out, want in zip(outs, given, strict=True):
        assert_tables_equal(place.asnumpy(out), want)
    assert (pool.stats.waits > 0) == place.on_gpu


def test_a_fenced_ring_counts_no_late_fence(place):
    pool = place.make(UvaBufferPool, 10, "i4", max_concurrency=2)
    out = place.asarray(np.full((50, 10), POISON, np.int32))
    for step in range(50):
        place.read(pool.copy_to_uva(range(step, step + 10)), out[step])
        pool.fence()
    assert place.asnumpy(out).tolist() == [list(range(step, step + 10)) for step in range(50)]
    assert pool.stats.late_fences == 0
    assert pool.stats.launches == 50


@pytest.mark.parametrize("slots", [1, 2, 3, 20])
def test_generations_of_copies_and_views_behind_a_stall(place, slots):
    """24 generations of every length, half of them copies, half of them views that nobody fences."""
    pool = place.make(UvaBufferPool, 1, "f4", max_concurrency=slots)
    lengths = [(3, 17, 1500, 4090)[g % 4] for g in range(24)]
    outs = [place.asarray(np.full(n, POISON, np.float32)) for n in lengths]
    place.read(outs[0])
    place.synchronize()
    place.stall(30)
    for g, n in enumerate(lengths):
        place.stall(1)
        values = distinct_values("f4", n, g)
        if g % 2:
            pool.copy_to_gpu(values, out=outs[g])
        else:
            place.read(pool.copy_to_uva(values.tolist()), outs[g])
    for g, n in enumerate(lengths):
        assert_tables_equal(place.asnumpy(outs[g]), distinct_values("f4", n, g), group=g)


def test_many_fences_in_flight(place):
    """More fences than the pool keeps: it waits for the oldest, and forgets none."""
    pool = place.make(UvaBufferPool, 4, "i4", max_concurrency=3)
    outs = place.asarray(np.full((900, 4), POISON, np.int32))
    place.stall(20)
    for step in range(900):
        if step % 3 == 0:
            pool.copy_to_gpu([step] * 4, out=outs[step])
        else:
            place.read(pool.copy_to_uva([step] * 4), outs[step])
            for _ in range(step % 4):
                pool.fence()
    assert place.asnumpy(outs)[:, 3].tolist() == list(range(900))


def test_size_dtype_and_slots_are_checked(place):
    for size, dtype, error in (
        (-1, "i4", ValueError),
        ((), "i4", ValueError),
        (1.5, "i4", TypeError),
        (4, "S3", TypeError),
    ):
        with pytest.raises(error):
            place.make(UvaBufferPool, size, dtype)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        place.make(UvaBufferPool, 4, "i4", max_concurrency=0)


def test_the_default_number_of_slots_can_be_set(place):
    try:
        set_default_max_concurrency(4)
        assert place.make(UvaBufferPool, 4, "i4").stats.slots == 4
        assert place.make(UvaBufferPool, 4, "i4", max_concurrency=1).stats.slots == 1
        for bad, error in ((0, ValueError), (-1, ValueError), (1.0, TypeError), ("2", TypeError), (None, TypeError)):
            with pytest.raises(error):
                set_default_max_concurrency(bad)
        assert place.make(UvaBufferPool, 4, "i4").stats.slots == 4
    finally:
        set_default_max_concurrency(2)
    assert place.make(UvaBufferPool, 4, "i4").stats.slots == 2


def test_a_pool_in_use_refuses_a_second_thread(place):
    pool = place.make(UvaBufferPool, 4, "i4")
    errors = []

    def intrude():
        for call in (lambda: pool.copy_to_uva([1]), lambda: pool.copy_to_gpu([1]), pool.fence):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))

    with pool._core.entered():
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert len(errors) == 3
    assert all("in use by another thread" in error for error in errors)
    assert place.asnumpy(pool.copy_to_uva([1])).tolist() == [1]
