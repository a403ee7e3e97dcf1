"""Overlapping writes of one apply: the last staged wins, as if they were applied one after the other."""

import itertools
import time

import numpy as np
import pytest
from common import distinct_values

from cupy_staged import FusedStagedWriter, StagedWriteTensor, packing, writes
from cupy_staged.testing import TableModel, assert_tables_equal


def test_the_example(place):
    for _ in range(20):
        tensor = place.make(StagedWriteTensor, (2, 4), "i4")
        tensor.stage_write(0, 0, [1, 2, 3, 4])
        tensor.stage_write(0, 1, [9, 9])
        tensor.stage_write(0, 2, [5])
        tensor.apply_write()
        assert place.asnumpy(tensor.gpu).tolist() == [[1, 9, 5, 4], [0] * 4]
        assert tensor.stats.launches == 1


def test_every_order_of_four_writes(place):
    """Nested, crossing, touching and equal pieces, short and long, over the 64-cell words of the check."""
    pieces = [(0, 200), (60, 70), (100, 64), (63, 2)]
    tensor = place.make(StagedWriteTensor, (24, 200), "i4")
    model = TableModel((24, 200), "i4")
    for row, order in enumerate(itertools.permutations(pieces)):
        for salt, (start, length) in enumerate(order):
            values = distinct_values("i4", length, salt)
            tensor.stage_write(row, start, values)
            model.stage_write(row, start, values)
    tensor.apply_write()
    model.apply()
    assert_tables_equal(place.asnumpy(tensor.gpu), model.table)


@pytest.mark.parametrize("dtype", ["u1", "u2", "f4", "i8", "c16"])
def test_random_overlaps(place, dtype):
    rng = np.random.default_rng(7)
    tensor = place.make(StagedWriteTensor, (4, 400), dtype)
    model = TableModel((4, 400), dtype)
    for step in range(12):
        for w in range(int(rng.integers(2, 120))):
            length = int(rng.choice([1, 2, 5, 16, 17, 64, 65, 130, 400]))
            start = int(rng.integers(0, 400 - length + 1))
            row = int(rng.integers(0, 4))
            values = (
                rng.integers(1, 200, length).astype(dtype) if dtype == "u1" else distinct_values(dtype, length, w % 6)
            )
            tensor.stage_write(row, start, values)
            model.stage_write(row, start, values)
        tensor.apply_write()
        model.apply()
        assert_tables_equal(place.asnumpy(tensor.gpu), model.table, group=step)


def test_overlaps_inside_a_batch_and_with_what_came_before(place):
    tensor = place.make(StagedWriteTensor, (2, 6), "i4")
    tensor.stage_write(1, 0, [1, 1, 1, 1, 1, 1])
    tensor.stage_writes([1, 1, 0, 1], [1, 2, 0, 5], [2, 2, 2, 3, 4, 5, 5, 6], [3, 4, 7, 8])
    tensor.stage_write(1, 4, [7])
    tensor.apply_write()
    assert place.asnumpy(tensor.gpu).tolist() == [[4, 5, 5, 0, 0, 0], [1, 2, 3, 2, 7, 6]]


def test_the_same_cell_many_times(place):
    tensor = place.make(StagedWriteTensor, 3, "i8")
    for value in range(1000):
        tensor.stage_write_elem(1, value)
    tensor.stage_write(2, 0, [])
    tensor.apply_write()
    assert place.asnumpy(tensor.gpu).tolist() == [0, 999, 0]


def test_equal_cells_of_different_groups_do_not_overlap(place):
    tables = [place.make(StagedWriteTensor, (2, 70), "i4") for _ in range(3)]
    writer = place.fuse(FusedStagedWriter, tables)
    for salt, table in enumerate(tables):
        table.stage_write(1, 3, np.full(60, salt + 1))
        table.stage_write(1, 0, [50 + salt])
        table.stage_write(1, 2, [60 + salt] * 2)
    writer.apply()
    for salt, table in enumerate(tables):
        want = [50 + salt, 0, 60 + salt, 60 + salt] + [salt + 1] * 59 + [0] * 7
        assert place.asnumpy(table.gpu).tolist() == [[0] * 70, want]


def test_overlaps_by_way_of_the_row_stride(place):
    """A one-column table and a wide one: cells are told apart by row and column, not by the order of the calls."""
    tensor = place.make(StagedWriteTensor, (300, 3), "i2")
    model = TableModel((300, 3), "i2")
    rng = np.random.default_rng(8)
    for row in rng.permutation(300).tolist() * 2:
        start, length = int(rng.integers(0, 3)), 1
        length = int(rng.integers(1, 4 - start))
        values = rng.integers(1, 2**15, length)
        tensor.stage_write(row, start, values)
        model.stage_write(row, start, values)
    tensor.apply_write()
    model.apply()
    assert_tables_equal(place.asnumpy(tensor.gpu), model.table)


@pytest.mark.parametrize("applies", [600])
def test_the_scratch_table_is_right_when_its_epoch_comes_round(host, applies):
    tensor = host.make(StagedWriteTensor, (1, 80), "i4")
    want = np.zeros(80, np.int32)
    for step in range(1, applies):
        first, second = (step * 7) % 60, (step * 13) % 60
        tensor.stage_write(0, max(first, second), [step] * 20)
        tensor.stage_write(0, min(first, second), [-step] * 20)  # descending, so that the table is used
        tensor.apply_write()
        want[max(first, second) : max(first, second) + 20] = step
        want[min(first, second) : min(first, second) + 20] = -step
        assert tensor.gpu[0].tolist() == want.tolist()


def test_twenty_thousand_overlapping_writes_on_one_row(host):
    """They take O(w log w + values): a quadratic search would take minutes. The bound is loose for slow machines."""
    rng = np.random.default_rng(9)
    count, columns = 20_000, 5000
    starts = rng.integers(0, columns - 40, count)
    lengths = rng.integers(1, 41, count)
    totals = np.cumsum(lengths)
    values = rng.integers(0, 2**31, totals[-1]).astype(np.int32)
    want = np.zeros(columns, np.int32)
    for start, length, total in zip(starts, lengths, totals, strict=True):
        want[start : start + length] = values[total - length : total]
    tensor = host.make(StagedWriteTensor, (1, columns), "i4")
    took = []
    for _ in range(3):
        tensor.stage_writes(np.zeros(count, np.int64), starts, values, totals)
        begin = time.perf_counter()
        tensor.apply_write()
        took.append(time.perf_counter() - begin)
        assert_tables_equal(tensor.gpu[0], want)
        tensor.gpu[...] = 0
    assert min(took) < 0.25


def test_the_table_has_room_for_the_pieces_of_a_log_that_rules_overlaps_out(host):
    """All pieces go through the hash table, those of its neighbour's log too."""
    tables = [host.make(StagedWriteTensor, (100, 64), "i4") for _ in range(2)]
    writer = host.fuse(FusedStagedWriter, tables)
    tables[0]._log.header[packing.LOG_MAY_OVERLAP] = 0
    for row in range(100):
        tables[0].stage_write(row, 0, [row, row])
    for start in (5, 4):
        tables[1].stage_write(0, start, [start, start])
    writer.apply()
    assert writer._path._words[packing.NUM_BLOCKS] >= 102
    assert tables[0].gpu[:, :2].tolist() == [[row, row] for row in range(100)]
    assert tables[1].gpu[0, 4:7].tolist() == [4, 4, 5]


def found(tensor):
    return tensor._path._words[packing.FOUND]


@pytest.mark.parametrize("dtype", ["u1", "f2", "i4", "f8", "c16"])
@pytest.mark.parametrize("entries", [1 << 20, 2], ids=["noted", "too large"])
def test_rows_twice_but_not_their_cells(place, monkeypatch, dtype, entries):
    """Neighbouring cells in any order, of one cell to three notes of 32; one more makes them overlap, and only that."""
    monkeypatch.setattr(writes, "MAX_NOTED", entries)
    rng = np.random.default_rng(10)
    tensor = place.make(StagedWriteTensor, (5, 300), dtype)
    model = TableModel((5, 300), dtype)
    for step in range(12):
        overlapping = step % 3 == 2
        pieces = []
        for row in range(5):
            cuts = np.unique(np.concatenate([[0, 300], rng.integers(0, 300, rng.integers(2, 40))]))
            pieces += [(row, int(a), int(b - a)) for a, b in itertools.pairwise(cuts)]
        order = rng.permutation(len(pieces)).tolist()
        again = [pieces[int(rng.integers(len(pieces)))]] if overlapping else []
        for salt, (row, start, length) in enumerate([*again, *(pieces[w] for w in order)]):
            values = distinct_values(dtype, length, salt % 6)
            tensor.stage_write(row, start, values)
            model.stage_write(row, start, values)
        tensor.apply_write()
        model.apply()
        assert_tables_equal(place.asnumpy(tensor.gpu), model.table, group=step)
        if overlapping:
            assert found(tensor) == packing.CELLS_TWICE
        elif entries > 2:
            assert found(tensor) == packing.ROWS_TWICE


def test_any_two_writes_of_a_row(host):
    """Whether they overlap is found to the cell, over the 32-cell notes of the look."""
    tensor = host.make(StagedWriteTensor, (2, 140), "i4")
    tensor.stage_write(0, 1, [1])
    tensor.stage_write(0, 0, [1])
    tensor.apply_write()  # from now on, cells are looked at
    rng = np.random.default_rng(12)
    counts = [0, 0]
    for _ in range(3000):
        (first, one), (second, two) = ((int(rng.integers(0, 70)), int(rng.integers(1, 71))) for _ in range(2))
        tensor.stage_write(1, first, range(one))
        tensor.stage_write(1, second, range(100, 100 + two))
        tensor.apply_write()
        overlaps = second < first + one and first < second + two
        assert (found(tensor) == packing.CELLS_TWICE) == overlaps, (first, one, second, two)
        assert tensor.gpu[1, second : second + two].tolist() == list(range(100, 100 + two))
        counts[overlaps] += 1
    assert min(counts) > 200


def test_the_packer_goes_back_to_the_cheapest_look(host):
    """Where no row comes twice any more, it goes on looking at cells, but not for long."""
    tensor = host.make(StagedWriteTensor, (4, 8), "i4")

    def apply(*cells):
        for row, column in cells:
            tensor.stage_write(row, column, [1])
        tensor.apply_write()
        return found(tensor)

    assert apply((1, 0), (0, 0)) == packing.APART
    assert apply((1, 1), (1, 0)) == packing.ROWS_TWICE
    assert apply((1, 1), (1, 0), (1, 1)) == packing.CELLS_TWICE
    assert apply((1, 1), (1, 0)) == packing.ROWS_TWICE
    seen = [apply((1, 0), (0, 0)) for _ in range(64)]
    assert seen[0] == packing.ROWS_TWICE
    assert seen[-1] == packing.APART
    often = [apply((1, 1), (0, 1), *[(1, 1)] * (turn % 3 == 0)) for turn in range(200)]
    assert often.count(packing.APART) >= 2  # of those between the overlapping ones, each time it tried
    assert apply((1, 1), (1, 0), (1, 1)) == packing.CELLS_TWICE
    tensor.stage_write(0, 0, [])
    tensor.apply_write()
    assert found(tensor) == packing.CELLS_TWICE  # nothing was looked at


def test_two_writers_of_one_table_and_what_each_noted(host):
    """Both count their packs from 1, and note into one place: what the other noted only makes a pack slower."""
    tensor = host.make(StagedWriteTensor, (3, 70), "i4")
    other = host.make(StagedWriteTensor, (3, 70), "i4")
    writer = host.fuse(FusedStagedWriter, [tensor, other])
    want = np.zeros((3, 70), np.int32)
    rng = np.random.default_rng(11)
    for step in range(1, 60):
        cells = rng.permutation(70)[:6].tolist()
        for column in [*cells, *cells[:2]] if step % 3 == 0 else cells:
            want[1, column] = rng.integers(1, 1000)
            tensor.stage_write(1, column, want[1, column : column + 1])
        if step % 2:
            tensor.apply_write()
        else:
            writer.apply()
        assert_tables_equal(tensor.gpu, want, group=step)
