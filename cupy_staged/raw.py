"""What the jitted modules share: loads, stores and copies by raw address, and how functions are compiled.

An address costs a call a few hundredths of a microsecond, an array half of one. Numba's disk cache looks at the file of
the function alone: after an edit here, remove `__pycache__`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

WORD = types.int64
INT32S, INT64S = types.Array(types.int32, 1, "C"), types.Array(types.int64, 1, "C")
_compiling = threading.RLock()


def jit(function: Callable[..., Any]) -> Any:
    """Jit with the disk cache, or without it where no cache folder can be written."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        return njit(function)


def _loader(bits: int) -> Any:
    """A function for jitted code: the signed integer of `bits` at an address of any alignment, as int64."""

    @intrinsic
    def load(_context: Any, address: Any) -> Any:
        def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.PointerType(ir.IntType(bits)))
            value = builder.load(pointer, align=1)
            return value if bits == 64 else builder.sext(value, ir.IntType(64))

        return types.int64(types.int64), codegen

    return load


def _storer(bits: int) -> Any:
    """A function for jitted code: store the low `bits` of an int64 at an address of any alignment."""

    @intrinsic
    def store(_context: Any, address: Any, value: Any) -> Any:
        def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.PointerType(ir.IntType(bits)))
            value = args[1] if bits == 64 else builder.trunc(args[1], ir.IntType(bits))
            builder.store(value, pointer, align=1)
            return cgutils.get_null_value(ir.LiteralStructType([]))

        return types.void(types.int64, types.int64), codegen

    return store


load, load32, load8 = _loader(64), _loader(32), _loader(8)
store, store32 = _storer(64), _storer(32)


@jit
def load_item(address: int, item_bytes: int) -> int:
    """The int32 or int64 at `address`."""
    return load(address) if item_bytes == 8 else load32(address)


@intrinsic
def copy(_context: Any, to: Any, source: Any, num_bytes: Any) -> Any:
    """Copy `num_bytes` from `source` to `to`; they do not overlap."""

    def codegen(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = ir.PointerType(ir.IntType(8))
        cgutils.raw_memcpy(builder, builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte), args[2], 1)
        return cgutils.get_null_value(ir.LiteralStructType([]))

    return types.void(types.int64, types.int64, types.int64), codegen


@jit
def put_four(at: int, first: int, second: int, third: int, fourth: int) -> int:
    """Store four words, as a record of a log or a piece of the packer's; returns where the next ones go."""
    store(at, first)
    store(at + 8, second)
    store(at + 16, third)
    store(at + 24, fourth)
    return at + 32


def compile_for(function: Any, *arguments: Any) -> None:
    """Compile `function` for these types, once, and let it compile for no others by itself."""
    with _compiling:  # another thread would switch compiling off meanwhile
        if arguments not in function.signatures:
            function.disable_compile(False)
            function.compile(arguments)
            function.disable_compile()  # a call with other types raises TypeError
