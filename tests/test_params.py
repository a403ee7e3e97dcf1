"""DeviceParamTable: one copy of all fields, from a fenced slot, only when something changed."""

import threading

import numpy as np
import pytest
from common import DTYPES, random_values
from hypothesis import given
from hypothesis import strategies as st

from cupy_staged import DeviceParamTable

FIELDS = {"temperature": "float32", "top_k": "int32", "seed": "uint64", "greedy": "bool", "bias": "float16"}


def check(place, table, wanted):
    for name, want in wanted.items():
        got = place.asnumpy(table[name].gpu)
        assert got.dtype == want.dtype
        assert got.tobytes() == want.tobytes(), name


def test_every_dtype(place):
    rng = np.random.default_rng(0)
    table = place.make(DeviceParamTable, 33, {str(dtype): dtype for dtype in DTYPES})
    wanted = {str(dtype): np.zeros(33, dtype) for dtype in DTYPES}
    check(place, table, wanted)
    for _ in range(3):
        for dtype in DTYPES:
            wanted[str(dtype)] = random_values(rng, dtype, 33)
            table[str(dtype)].np[:] = wanted[str(dtype)]
        table.sync()
        check(place, table, wanted)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 511, 512, 513, 5000])
def test_one_copy_for_every_change_and_none_without(place, num_rows):
    table = place.make(DeviceParamTable, num_rows, FIELDS)
    with place.copies() as copies:
        table.sync()
        assert copies == []  # zeros on both sides
        for name in FIELDS:
            for row in {0, num_rows // 2, num_rows - 1}:
                table[name].np[row] = 1
                table.sync()
                assert len(copies) == 1, (name, row)
                copies.clear()
                table.sync()
                table[name].np[row] = 1  # the same value is no change
                table.sync()
                assert copies == []
                assert place.asnumpy(table[name].gpu)[row] == 1
    assert table.stats.copies == len(FIELDS) * len({0, num_rows // 2, num_rows - 1})


def test_what_only_bits_tell_apart_is_a_change(place):
    table = place.make(DeviceParamTable, 2, {"x": "float64"})
    for bits in (0x8000000000000000, 0x7FF8000000000000, 0x7FF8000000000001):  # -0.0, two NaNs
        table["x"].np.view(np.uint64)[0] = bits
        table.sync()
        assert place.asnumpy(table["x"].gpu).view(np.uint64)[0] == bits
    assert table.stats.copies == 3
    table.sync()
    assert table.stats.copies == 3  # a NaN that stays is none


def test_addresses_are_fixed_and_aligned(place):
    table = place.make(DeviceParamTable, 5, FIELDS)
    before = [place.address(table[name].gpu) for name in FIELDS]
    table["top_k"].np[:] = 3
    table.sync()
    assert [place.address(table[name].gpu) for name in FIELDS] == before
    assert len(set(before)) == len(before)
    assert list(table) == list(FIELDS)
    assert len(table) == len(FIELDS)
    for name, dtype in FIELDS.items():
        assert table[name].np.shape == table[name].gpu.shape == (5,)
        assert table[name].np.dtype == table[name].gpu.dtype == np.dtype(dtype)
        assert place.address(table[name].gpu) % 16 == 0


def test_values_may_change_as_soon_as_sync_returns(place):
    table = place.make(DeviceParamTable, 64, FIELDS)
    place.stall(30)
    kept = []
    for step in range(1, 8):
        table["top_k"].np[:] = step
        table["seed"].np[:] = 1000 * step
        table.sync()
        kept.append((place.read(table["top_k"].gpu), place.read(table["seed"].gpu)))
        table["top_k"].np[:] = -1
        table["seed"].np[:] = 0
    for step, (top_k, seed) in enumerate(kept, 1):
        assert (place.asnumpy(top_k) == step).all()
        assert (place.asnumpy(seed) == 1000 * step).all()
    assert (table.stats.waits > 0) == place.on_gpu
    assert table.stats.copies == 7


def test_copies_are_in_order_over_streams(place):
    table = place.make(DeviceParamTable, 1024, {"x": "int64"})
    other = place.new_stream()
    place.synchronize()
    for step in range(1, 6):
        place.stall(5)
        table["x"].np[:] = 2 * step
        table.sync(place.stream)
        table["x"].np[:] = 2 * step + 1
        table.sync(other)
        with place.using(other):
            assert (place.asnumpy(table["x"].gpu) == 2 * step + 1).all()
    place.synchronize()
    assert (place.asnumpy(table["x"].gpu) == 11).all()


def test_the_table_may_go_while_its_copy_waits(place, collected):
    table = place.make(DeviceParamTable, 64, FIELDS)
    table["top_k"].np[:] = 8
    place.stall(20)
    table.sync()
    gpu = table["top_k"].gpu
    del table
    assert (place.asnumpy(gpu) == 8).all()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 255)), max_size=30))
def test_random_changes(host, changes):
    table = host.make(DeviceParamTable, 10, FIELDS)
    wanted = {name: np.zeros(10, dtype) for name, dtype in FIELDS.items()}
    for field, row, value in changes:
        name = list(FIELDS)[field]
        table[name].np[row] = wanted[name][row] = value
        if value % 3 == 0:
            table.sync()
            check(host, table, wanted)
    table.sync()
    check(host, table, wanted)


@pytest.mark.parametrize(
    ("num_rows", "fields", "error", "match"),
    [
        (0, FIELDS, ValueError, "num_rows must be at least 1, got 0"),
        (-1, FIELDS, ValueError, "at least 1"),
        (2.0, FIELDS, TypeError, r"num_rows must be an int, got 2\.0"),
        (True, FIELDS, TypeError, "num_rows must be an int"),
        (2, {}, ValueError, "at least one field"),
        (2, {"x": "O"}, TypeError, "dtype object is not supported"),
        (2, {"x": "no such"}, TypeError, "is not a NumPy dtype"),
        (2, {"x": ">i4"}, TypeError, "not in native byte order"),
        (2, {3: "i4"}, TypeError, "name of a field must be a str, got 3"),
    ],
)
def test_wrong_arguments_raise(host, num_rows, fields, error, match):
    with pytest.raises(error, match=match):
        host.make(DeviceParamTable, num_rows, fields)


def test_an_unknown_field_raises(host):
    table = host.make(DeviceParamTable, 2, {"x": "i4", "y": "i4"})
    with pytest.raises(KeyError, match="no field 'z'; there are x, y"):
        table["z"]


def test_two_threads_at_once_raise(host):
    table = host.make(DeviceParamTable, 2, {"x": "i4"})
    found = []

    def call():
        try:
            table.sync()
        except RuntimeError as error:
            found.append(str(error))

    with table._core.lock:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert found
    assert "another thread" in found[0]
    table.sync()


def test_an_unchanged_table_orders_another_stream_too(place):
    """The copy waits on one stream; a reader on another comes after a sync there that has nothing to copy."""
    table = place.make(DeviceParamTable, 64, FIELDS)
    table.sync()
    place.synchronize()
    table["top_k"].np[:] = 8
    place.stall(50)
    table.sync()
    other = place.new_stream()
    with place.using(other):
        table.sync()
        copied = table["top_k"].gpu.copy()
        assert (place.asnumpy(copied) == 8).all()
