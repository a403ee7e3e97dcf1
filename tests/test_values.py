"""What a table takes: every kind of input into every dtype, with the same rules for lists, arrays and single values."""

import array
import fractions

import numpy as np
import pytest
from common import DTYPES

from cupy_staged import StagedWriteTensor, UvaBufferPool
from cupy_staged.testing import TableModel, assert_tables_equal, converted

NUMBERS = [
    0, 1, True, False, -1, 2, 127, 128, -128, -129, 255, 256, 32767, 32768, -32769, 65504, 65519, 65520, 65535, 65536,
    2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1,
    2**64 - 1, 2**64, 10**38, 10**39, -(10**309),
    0.0, -0.0, 0.5, 1.0, -2.75, 1e-320, 1e-45, 65503.9, 65519.99, 65520.0, 3.4028235677973362e38, 3.4028235677973366e38,
    1e39, -1e300, float("inf"), float("-inf"), float("nan"),
    1j, 1 + 0j, 1e39 + 0j, 1e300j, complex("inf"), complex(float("nan"), 1),
    None, "1", "", b"1", [1], (1,), {}, object(),
]  # fmt: skip
SCALARS = [
    np.dtype(d).type(v)
    for d in DTYPES
    for v in ((0, 1) if d == np.bool_ else (0, 1, 100) if d.kind in "iu" else (0.5, -3, np.inf, np.nan))
    if not (d.kind == "u" and v < 0)
] + [np.uint64(2**64 - 1), np.int64(-(2**63)), np.float64(1e300), np.complex64(1 + 2j), np.longdouble(0.25)]


def outcome(call):
    """Return the values, or the type of the error."""
    try:
        return call()
    except (TypeError, OverflowError) as error:
        return type(error)


def staged(values, dtype):
    tensor = StagedWriteTensor((1, 8), dtype, device="host")
    tensor.stage_write(0, 1, values)
    tensor.apply_write()
    return np.array(tensor.gpu[0, 1 : 1 + len(values)])


def compare(got, want, note):
    if isinstance(want, type):
        assert got is want, note
    else:
        assert not isinstance(got, type), note
        assert_tables_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_in_lists(dtype):
    """One value, and the same value behind others: both ways into the log."""
    for value in NUMBERS + SCALARS:
        for values in ([value], [1, value], (0, 1, value)):
            if dtype.kind == "b" and (
                isinstance(value, np.uint64) or (isinstance(value, int) and 2**63 <= value < 2**64)
            ):
                continue  # refused either way: NumPy makes a float of a uint64 beside an int
            if dtype.kind in "iu" and isinstance(value, np.bool_):
                continue  # see test_numpy_bools_in_a_list
            want = outcome(lambda values=values: converted(values, dtype))
            got = outcome(lambda values=values: staged(values, dtype))
            compare(got, want, f"{values!r} into {dtype}")


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind in "iu"], ids=str)
def test_numpy_bools_in_a_list(dtype):
    assert staged([np.True_, np.False_, 1], dtype).tolist() == [1, 0, 1]
    assert staged([np.True_], dtype).tolist() == [1]


@pytest.mark.parametrize(
    "value",
    [
        np.complex64(1 + 2j),
        np.complex128(1),
        np.timedelta64(3, "s"),
        np.str_("1"),
        1j,
    ],
)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.filterwarnings("ignore")  # NumPy warns and goes on: the error has to be ours
def test_numpy_scalars_that_only_look_like_floats_are_refused(dtype, value):
    for values in ([value], [0.5, value]):
        with pytest.raises(TypeError):
            staged(values, dtype)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_a_wide_float_in_a_list_does_not_become_infinite(dtype):
    if np.finfo(np.longdouble).max <= np.finfo(np.float64).max:
        pytest.skip("long double is double here")
    for values in ([np.longdouble("1e400")], [1.0, np.longdouble("1e400")]):
        with pytest.raises(OverflowError):
            staged(values, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_every_dtype(dtype):
    for source in DTYPES:
        if source.kind == "b":
            samples = [[0, 1, 1]]
        elif source.kind in "iu":
            info = np.iinfo(source)
            samples = [[0, 1, 1], [info.max, 0], [info.min, 1], [0, 5, 2]]
        else:
            info = np.finfo(source)
            samples = [[0.0, 0.5, -1.5], [info.max, 1], [info.min], [np.inf, -np.inf, np.nan, -0.0], [info.tiny]]
        for sample in samples:
            values = np.array(sample, source)
            want = outcome(lambda values=values: converted(values, dtype))
            for given in (values, np.repeat(values, 2)[::2], values[::-1][::-1]):
                note = f"{given!r} into {dtype}"
                compare(outcome(lambda given=given: staged(given, dtype)), want, note)
            pool = UvaBufferPool(4, dtype, device="host")
            compare(
                outcome(lambda values=values, pool=pool: np.array(pool.copy_to_uva(values))), want, f"{source} by pool"
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_iterable(dtype):
    values = [1, 0, 1]
    want = converted(values, dtype)
    for given in (
        values, tuple(values), np.array(values, np.uint8), np.array(values, object), array.array("b", values),
        array.array("Q", values), memoryview(bytes(values)), np.array([1, 0, 1], bool),
    ):  # fmt: skip
        assert_tables_equal(staged(given, dtype), want)
    tensor = StagedWriteTensor((4, 3), dtype, device="host")
    tensor.stage_write(0, 0, iter(values))
    tensor.stage_write(1, 0, (v for v in values))
    tensor.stage_write(2, 0, range(2))
    tensor.stage_write(3, 0, {1})
    tensor.apply_write()
    assert_tables_equal(tensor.gpu, np.array([values, values, [0, 1, 0], [1, 0, 0]]).astype(dtype))


@pytest.mark.parametrize(
    ("typecode", "values"), [("d", [1e300]), ("f", [0.5]), ("q", [2**40]), ("b", [-1]), ("B", [255])]
)
def test_typed_arrays_never_wrap(typecode, values):
    """``array('f')`` turns 1e300 into inf, and a NumPy cast wraps: neither happens here."""
    given = array.array(typecode, values)
    for dtype in DTYPES:
        want = outcome(lambda dtype=dtype: converted(np.asarray(given), dtype))
        compare(outcome(lambda dtype=dtype: staged(given, dtype)), want, f"{given!r} into {dtype}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_inputs_of_any_numeric_kind(dtype):
    for given in ([], (), range(0), np.empty(0, dtype), array.array("b"), np.empty(0, bool)):
        assert staged(given, dtype).size == 0


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ("12", TypeError), (b"12", TypeError), (bytearray(b"12"), TypeError), (None, TypeError), (5, TypeError),
        (1.5, TypeError), ({1: 2}, TypeError), (object(), TypeError), (np.array(5), ValueError),
        (np.int32(5), ValueError), (np.zeros((1, 1), "i1"), ValueError), (np.array(["1"]), TypeError),
        (np.array([b"1"]), TypeError), (np.array([np.datetime64("2020-01-01")]), TypeError),
        (np.zeros(2, [("a", "i4")]), TypeError), (np.array([1, None]), TypeError), ([[1, 2], [3]], TypeError),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bool", "i4", "f4", "c8"])
def test_what_is_no_row_of_numbers_is_refused(dtype, values, error):
    tensor = StagedWriteTensor((1, 8), dtype, device="host")
    with pytest.raises(error):
        tensor.stage_write(0, 0, values)
    with pytest.raises(error):
        tensor.stage_writes([0], [0], values, [2 if isinstance(values, list) else 1])
    assert tensor.num_staged == 0


def test_a_device_array_is_refused():
    """It would have to be read back. Anything with the interface counts; no GPU is needed to say no."""

    class OnDevice:
        __cuda_array_interface__ = {"shape": (1,), "typestr": "<i4", "data": (0, False), "version": 3}  # noqa: RUF012

        def __iter__(self):
            raise AssertionError("read back")

    tensor = StagedWriteTensor((1, 8), "i4", device="host")
    for call in (
        lambda: tensor.stage_write(0, 0, OnDevice()),
        lambda: tensor.stage_writes(OnDevice(), [0], [1], [1]),
        lambda: tensor.stage_writes([0], [0], OnDevice(), [1]),
        lambda: UvaBufferPool(4, "i4", device="host").copy_to_uva(OnDevice()),
        lambda: UvaBufferPool((4, 2), "i4", device="host").copy_to_uva(OnDevice()),
    ):
        with pytest.raises(TypeError, match="host"):
            call()


@pytest.mark.parametrize(
    ("dtype", "values", "shown"),
    [
        ("i1", [1, 300], r"300 at position 1.*int8"), ("u8", [-5], r"-5.*uint64"),
        ("i4", np.array([7, 2**40]), rf"{2**40}.*int32"),
        ("f4", [0.5, 1e39], r"1e\+39 at position 1.*float32"), ("f4", np.array([1e39]), r"1e\+39.*float32.*infinite"),
        ("f2", [70000], r"70000.*float16"), ("f2", np.array([70000]), r"70000.*float16"), ("bool", [0, 2], r"2.*bool"),
        ("c8", [1e300], r"1e\+300.*complex64"), ("u1", np.array([-1, 5]), r"-1.*uint8 \(0 to 255\)"),
    ],
)  # fmt: skip
def test_an_overflow_names_the_value_and_the_dtype(place, dtype, values, shown):
    tensor = place.make(StagedWriteTensor, (1, 8), dtype)
    with pytest.raises(OverflowError, match=shown):
        tensor.stage_write(0, 0, values)
    with pytest.raises(OverflowError, match=shown):
        tensor.stage_writes([0], [0], values, [len(values)])
    assert tensor.num_staged == 0


@pytest.mark.parametrize(
    ("dtype", "values", "shown"),
    [
        ("i4", [1, 0.5], r"0\.5 at position 1.*int32"), ("i4", np.array([1.0]), r"float64.*int32"),
        ("f4", [1j], r"1j.*float32"),
        ("f4", np.array([1j]), r"complex128.*float32"), ("f8", [1.0, None], r"None at position 1.*float64"),
        ("i8", ["7"], r"'7' at position 0.*int64"), ("bool", [1.0], r"float64|1\.0"),
        ("c8", ["1"], r"'1' at position 0.*complex64"),
    ],
)  # fmt: skip
def test_a_wrong_kind_names_the_value_and_the_dtype(place, dtype, values, shown):
    tensor = place.make(StagedWriteTensor, (1, 8), dtype)
    with pytest.raises(TypeError, match=shown):
        tensor.stage_write(0, 0, values)
    assert tensor.num_staged == 0


def test_fractions_and_big_ints_are_rounded_as_numpy_rounds_them(place):
    tensor = place.make(StagedWriteTensor, (1, 4), "f4")
    given = [2**24 + 1, 0.1, fractions.Fraction(1, 4).numerator, 1e-46]
    tensor.stage_write(0, 0, given)
    tensor.apply_write()
    assert_tables_equal(place.asnumpy(tensor.gpu)[0], np.array(given, np.float32))


def test_conversion_happens_once_when_staged(place):
    """Equal bits on every backend: NaN, infinities, -0.0, and what lies between two float16."""
    values = [0.1, -0.0, float("nan"), float("inf"), 65519.99, 5.96e-8, 2.98e-8, 1 / 3]
    for dtype in ("f2", "f4", "f8"):
        for given in (values, np.array(values)):
            tensor = place.make(StagedWriteTensor, (1, 8), dtype)
            model = TableModel((1, 8), dtype)
            tensor.stage_write(0, 0, given)
            model.stage_write(0, 0, values)
            tensor.apply_write()
            model.apply()
            assert_tables_equal(place.asnumpy(tensor.gpu), model.table)
