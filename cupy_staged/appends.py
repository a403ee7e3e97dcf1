"""Staging of block ids: lists or arrays of one or many requests, checked and noted by one jitted pass over all groups.

`BlockLog` owns the write log that `BlockTables` applies, and the host's count of blocks a request has. Host only.
"""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from . import append_packing, packing, ring
from .log import WriteLog
from .values import as_int64, convert, pack_values

INT32 = np.dtype(np.int32)
_flatten = itertools.chain.from_iterable
_list_length = list.__len__
# Writers of so many int32; a request seldom gets more blocks at once.
_PUT_IDS = [struct.Struct(f"{n}i").pack_into for n in range(257)]


class BlockLog:
    """The staged block ids and counts of all groups.

    Parameters
    ----------
    max_num_reqs : int
    widths, factors : list of int
        ``[groups]``: kernel blocks a row has room for; kernel blocks in a KV block.

    Attributes
    ----------
    log : WriteLog
        Writes to the groups' tables, and to the table of counts, which comes behind them as one group more.
    counts : numpy.ndarray
        ``[groups, max_num_reqs] int32``: kernel blocks a request has, as staged.
    """

    def __init__(self, max_num_reqs: int, widths: list[int], factors: list[int]) -> None:
        groups = len(widths)
        self.num_groups = groups
        self.max_num_reqs = max_num_reqs
        self.max_factor = max(factors)
        self.log = WriteLog(INT32, jitted=True)
        self.counts = np.zeros((groups, max_num_reqs), np.int32)
        self._stamps = np.zeros((groups, max_num_reqs), np.int64)
        self.num_chunks = -(-max_num_reqs // append_packing.CHUNK)
        self._chunks = np.zeros((groups, self.num_chunks, 2), np.int64)
        self._widths, self._factors = np.array(widths, np.int64), np.array(factors, np.int64)
        self._one = np.zeros(2 + groups, np.int64)
        self._flag = np.zeros(1, np.bool_)
        self._inputs = np.zeros(groups * append_packing.INPUT_FIELDS, np.int64)
        self._put_lengths = struct.Struct(f"{groups}q").pack_into
        self._lengths = memoryview(self._one[2:]).cast("B")  # type: ignore[arg-type]
        desc = np.zeros(append_packing.A_FIELDS, np.int64)
        self._address = desc.ctypes.data
        for field, value in {
            append_packing.A_GROUPS: groups,
            append_packing.A_MAX_REQS: max_num_reqs,
            append_packing.A_LOG: self.log.address,
            append_packing.A_MAX_FACTOR: self.max_factor,
            append_packing.A_COUNTS: self.counts.ctypes.data,
            append_packing.A_STAMPS: self._stamps.ctypes.data,
            append_packing.A_CHUNKS: self._chunks.ctypes.data,
            append_packing.A_WIDTHS: self._widths.ctypes.data,
            append_packing.A_FACTORS: self._factors.ctypes.data,
            append_packing.A_INPUTS: self._inputs.ctypes.data,
            append_packing.A_ONE: self._one.ctypes.data,
        }.items():
            desc[field] = value
        self._words = memoryview(desc)  # type: ignore[arg-type]
        append_packing.compile_appends(groups)
        self._grow_ids(256)
        self._grow_old(max_num_reqs * groups)

    def _grow_ids(self, num_ids: int) -> None:
        ids = np.zeros(ring.grown_size(num_ids), np.int32)
        address = ids.ctypes.data  # told before the old ones go: an interrupt may come between
        self._words[append_packing.A_IDS] = address
        self._ids = ids

    def _grow_old(self, pairs: int) -> None:
        old = np.zeros(ring.grown_size(pairs), np.int64)
        address, capacity = old.ctypes.data, len(old)
        self._words[append_packing.A_OLD], self._words[append_packing.A_OLD_CAPACITY] = address, capacity
        self._old = old

    def reserve(self, num_writes: int, num_blocks: int) -> tuple[int, int]:
        """Make room for that many (request, group) pairs and block ids; returns the writes and values they become."""
        self._grow_old(max(num_writes, len(self._old)))
        chunks = min(num_writes, self.num_groups * self.num_chunks)
        sizes = 2 * num_writes, num_blocks * self.max_factor + append_packing.CHUNK * chunks
        self.log.reserve(*sizes)
        return sizes

    def append(self, req_index: int, new_block_ids: Sequence[Any], overwrite: bool) -> None:
        """Stage the ids of one request: a list or array a group."""
        try:
            lengths = [*map(_list_length, new_block_ids)]  # lists alone: others are checked with more care
            ids = [*_flatten(new_block_ids)]
            self._put_lengths(self._lengths, 0, *lengths)
            _PUT_IDS[len(ids)](self._ids, 0, *ids)  # type: ignore[arg-type]
        except (IndexError, TypeError, struct.error, OverflowError):
            self._put_any(new_block_ids)
        row = operator.index(req_index)
        if not 0 <= row < self.max_num_reqs:
            self._refuse_row(row)
        bad = append_packing.append_one(self._address, row, 1 if overwrite else 0)
        while bad >= 0:
            if bad >> 48 != append_packing.NO_ROOM:
                self._refuse(bad, [row])
            self._make_room(1)
            bad = append_packing.append_one(self._address, row, 1 if overwrite else 0)

    def append_batch(self, req_indices: Any, new_block_ids: Any, cu_num_blocks: Any, overwrite: Any) -> None:
        """Stage the ids of many requests: an array of ids and one of running totals a group."""
        if len(new_block_ids) != self.num_groups or len(cu_num_blocks) != self.num_groups:
            raise ValueError(
                f"new_block_ids and cu_num_blocks must have one entry for each of the {self.num_groups} groups, "
                f"got {len(new_block_ids)} and {len(cu_num_blocks)}"
            )
        rows = as_int64(req_indices, "req_indices")
        ids = tuple(new_block_ids)
        if not _all_int32(ids):
            ids = tuple([self._ids_of(values) for values in ids])
        totals = tuple(cu_num_blocks)
        if not _all_int32(totals):
            totals = tuple([as_int64(values, "cu_num_blocks") for values in totals])
        if isinstance(overwrite, (bool, np.bool_)):
            flag, step = self._flag, 0
            flag[0] = overwrite
        else:
            flag = np.asarray(overwrite, np.bool_ if np.size(overwrite) == 0 else None, order="C")
            if flag.dtype != np.bool_:
                raise TypeError(f"overwrite must be a bool or an array of bool, got dtype {flag.dtype}")
            if flag.shape not in ((), rows.shape):
                raise ValueError(
                    f"overwrite must be one bool, or one for each of the {len(rows)} requests, got {flag.shape}"
                )
            step = flag.ndim
        self._words[append_packing.A_OVERWRITE], self._words[append_packing.A_OVERWRITE_STEP] = flag.ctypes.data, step
        append_batch = (
            append_packing.append_batch if self.num_groups <= append_packing.MAX_TUPLE else self._append_many_groups
        )
        bad = append_batch(self._address, rows, ids, totals)
        while bad >= 0 and bad >> 48 == append_packing.NO_ROOM:
            self._make_room(len(rows))
            bad = append_batch(self._address, rows, ids, totals)
        if bad < -1:
            group = -2 - bad
            raise ValueError(
                f"cu_num_blocks[{group}] must have {len(rows)} entries, one a request, got {len(totals[group])}"
            )
        if bad >= 0:
            self._refuse(bad, rows, ids, totals)

    def _append_many_groups(self, desc: int, rows: np.ndarray, ids: Any, totals: Any) -> int:
        """As `append_packing.append_batch`, without a tuple of arrays for Numba."""
        for group in range(self.num_groups):
            if len(totals[group]) != len(rows):
                return -2 - group
        fields = [(i.ctypes.data, 4, t.ctypes.data, t.itemsize, len(i)) for i, t in zip(ids, totals, strict=True)]
        self._inputs[:] = np.ravel(fields)
        self._words[append_packing.A_ROWS] = rows.ctypes.data
        return append_packing.append(desc, len(rows))  # type: ignore[no-any-return]

    @staticmethod
    def _ids_of(values: Any) -> np.ndarray:
        """Block ids as a contiguous int32 array."""
        if _all_int32((values,)):
            return values  # type: ignore[no-any-return]
        wide = as_int64(values, "new_block_ids")
        if wide.size and not (int(wide.min()) >= -(2**31) and int(wide.max()) < 2**31):
            raise OverflowError("a block id in new_block_ids does not fit int32")
        return wide.astype(np.int32)

    def _make_room(self, num_writes: int) -> None:
        pairs, header = num_writes * self.num_groups, self.log.header
        self._grow_old(max(pairs, len(self._old)))
        self.log.reserve(
            header[packing.LOG_WRITES] + 2 * pairs,
            header[packing.LOG_VALUES] + self._words[append_packing.A_NEED_VALUES],
        )

    def _put_any(self, new_block_ids: Sequence[Any]) -> None:
        """Note ids and lengths of one request, whatever holds them; raises what is wrong with them."""
        if len(new_block_ids) != self.num_groups:
            raise ValueError(
                f"new_block_ids must have one entry for each of the {self.num_groups} groups, got {len(new_block_ids)}"
            )
        found = [convert(ids, INT32) for ids in new_block_ids]
        lengths = [len(ids) for ids in found]
        if sum(lengths) > len(self._ids):
            self._grow_ids(sum(lengths))
        self._put_lengths(self._lengths, 0, *lengths)
        at = 0
        for ids, length in zip(found, lengths, strict=True):
            if isinstance(ids, np.ndarray):
                self._ids[at : at + length] = ids
            else:
                pack_values(ids, INT32, self._ids, at)
            at += length

    def _refuse_row(self, row: int) -> NoReturn:
        raise IndexError(f"request row {row} is not one of the {self.max_num_reqs} rows")

    def _refuse(self, bad: int, rows: Any, ids: Any = (), totals: Any = ()) -> NoReturn:
        """Raise what the jitted pass found; nothing is staged."""
        code, w, group = bad >> 48, bad & ((1 << 48) - 1), self._words[append_packing.A_BAD_GROUP]
        if code == packing.LENGTHS_WRONG:
            found = totals[group][min(w, len(totals[group]) - 1)] if len(totals[group]) else "no entries"
            raise ValueError(
                f"cu_num_blocks[{group}] must rise to len(new_block_ids[{group}]) = {len(ids[group])}, "
                f"got {found} at entry {w}"
            )
        factor, width = int(self._factors[group]), int(self._widths[group])
        if code == append_packing.BLOCK_OVERFLOW:
            raise OverflowError(
                f"a block id of group {group} does not fit int32 once expanded "
                f"(each KV block is {factor} kernel blocks)"
            )
        row = int(rows[w])
        if code == packing.ROW_OUTSIDE:
            self._refuse_row(row)
        raise IndexError(
            f"request row {row} has {self.counts[group, row]} kernel blocks in group {group}; the new ones, {factor} "
            f"for each KV block, exceed its row length {width} (a ({self.max_num_reqs}, {width}) table)"
        )


def _all_int32(arrays: tuple[Any, ...]) -> bool:
    """Whether all are one-dimensional int32 arrays as the jitted function takes them."""
    for array in arrays:
        if type(array) is not np.ndarray or array.dtype is not INT32 or array.ndim != 1 or not array.flags.carray:
            return False
    return True
