"""Values and indices that callers give, converted and checked: once, when they are staged.

Nothing wraps, nothing loses its fraction, no finite value becomes infinite; whatever does not fit raises and names the
value.
"""

from __future__ import annotations

import numbers
import operator
import struct
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

# What struct can pack; it checks kind and range of each value, and is the fastest way measured from a list. Only the
# standard formats ("=") refuse a finite number that would become infinite.
_PLAIN = {float, int, bool}
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
FORMATS = {np.dtype(c): c for c in "bBhHiIqQefd"}


def convert(values: Any, dtype: np.dtype) -> np.ndarray | list[Any] | tuple[Any, ...] | range:
    """`values` as a list, tuple or range for struct, or as a 1-D contiguous array of `dtype` with every value checked.

    Raises
    ------
    TypeError
        `values` is text, None, a device array, no iterable, or of a kind that the table does not hold.
    OverflowError
        A value does not fit `dtype`.
    ValueError
        An array has more or fewer than one dimension.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError("values must not be masked: fill them first")
    if not isinstance(values, np.ndarray):
        if hasattr(values, "__cuda_array_interface__"):
            raise TypeError("values must lie on the host: a device array would have to be read back")
        if isinstance(values, (str, bytes, bytearray, dict)) or not (
            isinstance(values, Iterable) or hasattr(values, "__array__")
        ):
            raise TypeError(
                f"values must be a list, tuple, range, array or iterable of numbers, got {type(values).__name__}"
            )
        if hasattr(values, "__array__") or hasattr(values, "typecode"):
            values = np.asarray(values)
        else:
            if not isinstance(values, (list, tuple, range)):
                values = list(values)
            if dtype in FORMATS:
                return values  # type: ignore[no-any-return]
            values = _array_of(values, dtype)
    if values.ndim != 1:
        raise ValueError(f"values must have one dimension, got shape {values.shape}")
    if values.dtype == dtype:
        return np.ascontiguousarray(values)
    return _cast(values, dtype)


def _array_of(values: Any, dtype: np.dtype, first: int = 0) -> np.ndarray:
    """A list as an array, for the dtypes that struct does not know (bool, complex); `first` is its first position."""
    for position, value in enumerate(values, first):
        number = isinstance(value, (numbers.Number, np.generic)) and not isinstance(value, (str, bytes))
        if not number or (dtype.kind == "f" and isinstance(value, (complex, np.complexfloating))):
            raise TypeError(f"value {value!r} at position {position} cannot go into a table of {dtype}")
    if dtype.kind in "fc":  # a Python int may be larger than any integer dtype
        as_kind = complex if dtype.kind == "c" else float
        values = [value if isinstance(value, np.generic) else as_kind(value) for value in values]
    return np.array(values) if len(values) else np.empty(0, dtype)


def _cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`values` converted to `dtype`; nothing wraps, nothing loses its fraction, no finite value becomes infinite."""
    kind, wanted = values.dtype.kind, dtype.kind
    if kind == "O":
        values = _array_of(values.tolist(), dtype)
        kind = values.dtype.kind
        if kind == "O":  # ints beyond 64 bits
            raise OverflowError(f"a value does not fit {dtype}")
    order = "biufc"
    if kind not in order:
        raise TypeError(f"values of dtype {values.dtype} cannot go into a table of {dtype}")
    if (kind == "c" and wanted != "c") or (kind == "f" and wanted in "biu"):
        raise TypeError(
            f"values of dtype {values.dtype} cannot go into a table of {dtype}: round or convert them first"
        )
    if values.size == 0:
        return np.empty(0, dtype)
    if wanted in "biu":
        low, high = (0, 1) if wanted == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        smallest, largest = int(values.min()), int(values.max())
        if smallest < low or largest > high:
            bad = smallest if smallest < low else largest
            raise OverflowError(f"value {bad} does not fit {dtype} ({low} to {high})")
        return values.astype(dtype)
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    if kind in "fc" or values.dtype.itemsize >= dtype.itemsize:
        lost = _is_infinite(cast) & ~_is_infinite(values)  # a bit a part
        if lost.any():
            raise OverflowError(f"value {values[int(lost.argmax())]!r} does not fit {dtype}: it would become infinite")
    return cast


def _is_infinite(values: np.ndarray) -> np.ndarray:
    """Bit 0: the value (or its real part) is infinite; bit 1: its imaginary part is."""
    if values.dtype.kind == "c":
        return np.isinf(values.real) * 1 + np.isinf(values.imag) * 2  # type: ignore[no-any-return]
    return np.isinf(values) * 1  # type: ignore[no-any-return]


def without_numpy_bools(values: Any) -> list[Any] | None:
    """`values` with ints for NumPy bools, which struct does not take; None where there are none."""
    if not any(isinstance(value, np.bool_) for value in values):
        return None
    return [int(value) if isinstance(value, np.bool_) else value for value in values]


def explain(values: Any, dtype: np.dtype) -> NoReturn:
    """Say which value of a list was refused, and why."""
    for position, value in enumerate(values):
        if dtype.kind == "f" and type(value) not in _PLAIN:
            _cast(_array_of([value], dtype, position), dtype)
        try:
            struct.pack("=" + FORMATS[dtype], value)
        except OverflowError:
            raise OverflowError(f"value {value!r} at position {position} does not fit {dtype}") from None
        except struct.error:
            if hasattr(value, "__index__"):
                raise OverflowError(f"value {value!r} at position {position} does not fit {dtype}") from None
            raise TypeError(f"value {value!r} at position {position} cannot go into a table of {dtype}") from None
    raise TypeError(f"values cannot go into a table of {dtype}")


def pack_values(values: Any, dtype: np.dtype, into: Any, at: int) -> None:
    """Write a list, tuple or range into the bytes of `into` from element `at` on, checking every value."""
    if dtype.kind == "f" and not _PLAIN.issuperset(map(type, values)):  # struct would take a complex scalar's real part
        values = _cast(_array_of(values, dtype), dtype).tolist()
    try:
        struct.pack_into(f"={len(values)}{FORMATS[dtype]}", into, at * dtype.itemsize, *values)
    except (struct.error, OverflowError, DeprecationWarning):  # older NumPy warns where its bools serve as ints
        others = without_numpy_bools(values)
        if others is None:
            explain(values, dtype)
        pack_values(others, dtype, into, at)


def check_ints(row: Any, start: Any) -> None:
    """Raise TypeError where `row` or `start` is no int."""
    for value in (row, start):
        try:
            operator.index(value)
        except TypeError:
            raise TypeError(f"row and start must be ints, got {row!r} and {start!r}") from None


def check_capacity(num_writes: Any, num_values: Any) -> None:
    """Raise TypeError or ValueError where what `reserve` is given is no count."""
    for count in (num_writes, num_values):
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
            raise TypeError(f"reserve takes two ints, got {num_writes!r} and {num_values!r}")
        if count < 0:
            raise ValueError(f"reserve takes counts of at least 0, got {num_writes} and {num_values}")


def refuse(row: int, start: int, length: int, num_rows: int, row_length: int, which: str = "") -> NoReturn:
    """Raise the IndexError of a write outside its table; TypeError where row or start is no int."""
    check_ints(row, start)
    if not 0 <= row < num_rows:
        rule = f"row {row} is not one of the {num_rows} rows (start {start}, length {length}"
    elif start < 0:
        rule = f"start {start} is negative (length {length}"
    else:
        rule = f"start {start} + length {length} exceeds row length {row_length} (row {row}"
    raise IndexError(f"{which}{rule} of a ({num_rows}, {row_length}) table)")


def as_int64(values: Any, name: str) -> np.ndarray:
    """`values` as a contiguous ``[n] int64`` array; TypeError for anything but ints, ValueError for other shapes."""
    if type(values) is np.ndarray and values.dtype is _INT64 and values.strides == (8,) and values.flags.writeable:
        return values
    if type(values) is np.ndarray and values.dtype is _INT32 and values.ndim == 1:
        return values.astype(np.int64)
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be masked: fill it first")
    if hasattr(values, "__cuda_array_interface__"):
        raise TypeError(f"{name} must lie on the host, got a device array")
    found = np.asarray(values)
    if found.size == 0:
        found = found.astype(np.int64)
    if found.dtype.kind == "O" and found.ndim == 1 and all(isinstance(value, int) for value in found.tolist()):
        raise OverflowError(f"{name} holds an int that does not fit int64")
    if found.dtype.kind not in "iu":
        raise TypeError(f"{name} must be ints, got dtype {found.dtype}")
    if found.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {found.shape}")
    if found.dtype == np.uint64 and found.size and int(found.max()) > np.iinfo(np.int64).max:
        raise OverflowError(f"{name} holds {found.max()}, which does not fit int64")
    return np.require(found, np.int64, ["C", "A", "W"])  # as the jitted functions take it
