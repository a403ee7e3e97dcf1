"""The plain NumPy model of staged writes and block tables: what the library must do, without how.

Everything here is host memory, written from the definitions with loops or arrays, and shares no code with packing
or kernels. Tests, `replay` and `demo` compare the library with it, cell by cell. Nothing is asynchronous.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["BlockTablesModel", "FastTablesModel", "TableModel", "assert_tables_equal", "converted", "first_difference"]

Ints: TypeAlias = Sequence[int] | NDArray[Any]
PADDING_BLOCK: Final = 0
PADDING_SLOT: Final = -1
_KINDS: Final = ((int, np.bool_, np.integer), (float, np.floating), (complex, np.complexfloating))
_KIND_OF_DTYPE: Final = {"b": 0, "i": 0, "u": 0, "f": 1, "c": 2}


def converted(values: Iterable[Any], dtype: DTypeLike) -> NDArray[Any]:
    """Return a copy of `values`, `[num_values]`, as `dtype`, converted one after the other.

    Raises
    ------
    TypeError
        A value of a wider kind than the dtype's (integer < float < complex; a bool is 0 or 1), or no number at all.
    OverflowError
        An integer outside the dtype's range, or a finite number that would become infinite.
    """
    dtype = np.dtype(dtype)
    items = values.tolist() if isinstance(values, np.ndarray) else list(values)
    if dtype.kind in "iu" and all(type(value) is int for value in items):
        return np.array(items, dtype)  # range-checked
    out = np.zeros(len(items), dtype)
    with np.errstate(over="ignore"):
        for i, value in enumerate(items):
            kind = next((k for k, types in enumerate(_KINDS) if isinstance(value, types)), len(_KINDS))
            if kind > _KIND_OF_DTYPE[dtype.kind]:
                raise TypeError(f"{dtype} does not hold value {value!r} (number {i})")
            number = int(value) if kind == 0 else value  # NumPy range-checks a Python int, and wraps a NumPy one
            if dtype.kind == "b" and number not in (0, 1):
                raise OverflowError(f"value {value!r} (number {i}) does not fit {dtype}")
            out[i] = number
            if dtype.kind in "fc" and not np.isfinite(out[i]) and (kind == 0 or np.isfinite(value)):
                raise OverflowError(f"value {value!r} (number {i}) does not fit {dtype}")
    return out


class TableModel:
    """One table, `size` `(num_rows, row_length)`, or an int (or 1-tuple): that many rows of one column.

    Examples
    --------
    >>> model = TableModel((2, 4), np.int32)
    >>> model.stage_write(0, 0, [1, 2, 3, 4])
    >>> model.stage_write(0, 1, [9, 9])
    >>> model.apply()
    >>> model.table.tolist()
    [[1, 9, 9, 4], [0, 0, 0, 0]]
    """

    def __init__(self, size: int | tuple[int, ...], dtype: DTypeLike) -> None:
        self.table: NDArray[Any] = np.zeros(size, dtype)
        if self.table.ndim not in (1, 2):
            raise ValueError(f"a table has one or two dimensions, got size {size}")
        self.rows = self.table if self.table.ndim == 2 else self.table[:, np.newaxis]
        self.staged: list[tuple[int, int, NDArray[Any]]] = []

    def check_row(self, row: int) -> None:
        """Raise IndexError unless there is that row."""
        if not 0 <= row < len(self.rows):
            raise IndexError(f"row {row} is outside a table of {len(self.rows)} rows")

    def check_write(self, index: int, start: int, x: Iterable[Any]) -> tuple[int, int, NDArray[Any]]:
        """Return `(row, start, values)` as they would be staged; raise what `stage_write` raises."""
        row, start, values = operator.index(index), operator.index(start), x if isinstance(x, np.ndarray) else list(x)
        self.check_row(row)
        row_length = self.rows.shape[1]
        if not 0 <= start <= row_length - len(values):
            raise IndexError(f"start {start} + length {len(values)} exceeds row length {row_length} (row {row})")
        return row, start, converted(values, self.table.dtype)

    def stage_write(self, index: int, start: int, x: Iterable[Any]) -> None:
        """Note that row `index` gets the values `x` from column `start` on.

        Raises
        ------
        IndexError, TypeError, OverflowError
            Outside the table, or values as in `converted`. Nothing is staged.
        """
        self.staged.append(self.check_write(index, start, x))

    def apply(self) -> None:
        """Carry out the staged writes in the order in which they were staged: the last one wins."""
        for row, start, values in self.staged:
            self.rows[row, start : start + len(values)] = values
        self.clear()

    def clear(self) -> None:
        """Drop the staged writes."""
        self.staged.clear()


class BlockTablesModel:
    """The block tables of all groups, with gather and slot mapping. Parameters as in `cupy_staged.BlockTables`.

    `num_blocks`, `[groups, max_num_reqs] int32`, counts kernel blocks and includes what is staged;
    `applied_num_blocks` is what a kernel sees, the counts at the last `apply`. Lists that disagree raise ValueError.

    Examples
    --------
    >>> model = BlockTablesModel([16], 2, 8, [4])
    >>> model.append_block_ids(1, [[7, 3]], overwrite=True)
    >>> model.apply()
    >>> model.compute_slot_mappings([1], [0, 3], [0, 17, 40], 3).tolist()
    [[112, 49, -1, -1, -1, -1, -1, -1]]
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: Sequence[int],
        *,
        kernel_block_sizes: Sequence[int] | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
        dcp_sharded: Sequence[bool] | None = None,
        slot_mapping_enabled: Sequence[bool] | None = None,
    ) -> None:
        groups = len(block_sizes)
        self.block_sizes, self.max_blocks = list(block_sizes), list(max_num_blocks_per_group)
        self.kernel_block_sizes = list(block_sizes if kernel_block_sizes is None else kernel_block_sizes)
        self.sharded = [True] * groups if dcp_sharded is None else list(dcp_sharded)
        self.enabled = [True] * groups if slot_mapping_enabled is None else list(slot_mapping_enabled)
        if {len(self.max_blocks), len(self.kernel_block_sizes), len(self.sharded), len(self.enabled)} != {groups}:
            raise ValueError(f"every list must have one entry a group ({groups})")
        if not 0 <= cp_rank < cp_size:
            raise ValueError(f"cp_rank {cp_rank} is outside cp_size {cp_size}")
        for size, kernel_size, is_sharded in zip(self.block_sizes, self.kernel_block_sizes, self.sharded, strict=True):
            if size % kernel_size or (is_sharded and size % cp_interleave):
                raise ValueError(f"block size {size}, kernel block size {kernel_size}, cp_interleave {cp_interleave}")
        self.cp_size, self.cp_rank, self.cp_interleave = cp_size, cp_rank, cp_interleave
        self.max_num_reqs, self.max_num_batched_tokens = max_num_reqs, max_num_batched_tokens
        self.split = [b // k for b, k in zip(self.block_sizes, self.kernel_block_sizes, strict=True)]
        widths = [n * k for n, k in zip(self.max_blocks, self.split, strict=True)]
        self.tables = [TableModel((max_num_reqs, width), np.int32) for width in widths]
        self.num_blocks: NDArray[np.int32] = np.zeros((groups, max_num_reqs), np.int32)
        self.applied_num_blocks = self.num_blocks.copy()

    def append_block_ids(self, req_index: int, new_block_ids: Sequence[Iterable[int]], overwrite: bool) -> None:
        """Append one list of KV block ids a group to a request's row, or overwrite it; raises as the batch does."""
        ids = [list(group_ids) for group_ids in new_block_ids]
        self.append_block_ids_batch([req_index], ids, [[len(group_ids)] for group_ids in ids], overwrite)

    def append_block_ids_batch(
        self,
        req_indices: Ints,
        new_block_ids: Sequence[Ints],
        cu_num_blocks: Sequence[Ints],
        overwrite: bool | Sequence[bool] | NDArray[np.bool_],
    ) -> None:
        """Append for many requests, in order: ids `[total]` and inclusive running totals `[num_reqs]`, a group each.

        Raises
        ------
        ValueError
            Another number of lists than groups, or running totals that do not fit. Nothing is staged.
        IndexError, TypeError, OverflowError
            A row or column outside a table, or an id that int32 does not hold once expanded. Nothing is staged.
        """
        if len(new_block_ids) != len(self.tables) or len(cu_num_blocks) != len(self.tables):
            raise ValueError(f"got block ids of {len(new_block_ids)} groups, there are {len(self.tables)}")
        rows = [operator.index(row) for row in req_indices]
        restart = [overwrite] * len(rows) if isinstance(overwrite, bool | np.bool_) else list(overwrite)
        ids = [list(map(int, converted(group_ids, np.int64))) for group_ids in new_block_ids]
        cuts = [[0, *map(int, totals)] for totals in cu_num_blocks]
        for g, ends in enumerate(cuts):
            if (
                len(ends) != len(rows) + 1
                or len(restart) != len(rows)
                or sorted(ends) != ends
                or ends[-1] != len(ids[g])
            ):
                raise ValueError(f"group {g}: {len(ids[g])} ids, running totals {ends[1:]}, {len(rows)} requests")
        counts, checked = self.num_blocks.copy(), []
        for g, (table, k, ends) in enumerate(zip(self.tables, self.split, cuts, strict=True)):
            for i, row in enumerate(rows):
                table.check_row(row)
                kernel_ids = [b * k + j for b in ids[g][ends[i] : ends[i + 1]] for j in range(k)]
                start = 0 if restart[i] else int(counts[g, row])
                checked.append((table, table.check_write(row, start, kernel_ids)))
                counts[g, row] = start + len(kernel_ids)
        for table, write in checked:
            table.staged.append(write)
        self.num_blocks = counts

    def apply(self) -> None:
        """Carry out what is staged and publish the counts."""
        for table in self.tables:
            table.apply()
        self.applied_num_blocks = self.num_blocks.copy()

    def block_at(self, group: int, row: int, column: int) -> int | None:
        """Return the kernel block id at a column of a request; None where it owns none: padding."""
        if not (0 <= row < self.max_num_reqs and 0 <= column < self.applied_num_blocks[group, row]):
            return None
        block = int(self.tables[group].rows[row, column])
        return block if block >= 0 else None

    def gather_block_tables(self, idx_mapping: Ints, num_reqs_padded: int) -> list[NDArray[np.int32]]:
        """Return one `[num_reqs_padded, width] int32` a group: the rows of the batch, in batch order, padded with 0.

        Raises
        ------
        ValueError
            Unless `len(idx_mapping) <= num_reqs_padded <= max_num_reqs`.
        """
        if not len(idx_mapping) <= num_reqs_padded <= self.max_num_reqs:
            raise ValueError(f"{len(idx_mapping)} requests padded to {num_reqs_padded}, at most {self.max_num_reqs}")
        gathered = []
        for g, table in enumerate(self.tables):
            out = np.full((num_reqs_padded, table.rows.shape[1]), PADDING_BLOCK, np.int32)
            for i, row in enumerate(idx_mapping):
                for column in range(out.shape[1]):
                    block = self.block_at(g, int(row), column)
                    if block is not None:
                        out[i, column] = block
            gathered.append(out)
        return gathered

    def slot(self, group: int, row: int, position: int) -> int:
        """Return where the KV of a request's token goes in a group; -1 where it goes nowhere on this rank."""
        if position < 0 or not self.enabled[group]:
            return PADDING_SLOT
        sharded = self.sharded[group]
        ranks, rank, interleave = (self.cp_size, self.cp_rank, self.cp_interleave) if sharded else (1, 0, 1)
        kv_column, o = divmod(position, self.block_sizes[group] * ranks)
        if o // interleave % ranks != rank:
            return PADDING_SLOT
        offset = o // (interleave * ranks) * interleave + o % interleave
        kernel_column, kernel_offset = divmod(offset, self.kernel_block_sizes[group])
        block = self.block_at(group, row, kv_column * self.split[group] + kernel_column)
        return PADDING_SLOT if block is None else block * self.kernel_block_sizes[group] + kernel_offset

    def compute_slot_mappings(
        self, idx_mapping: Ints, query_start_loc: Ints, positions: Ints, num_tokens_padded: int
    ) -> NDArray[np.int64]:
        """Return the whole buffer, `[groups, max_num_batched_tokens] int64`, with -1 wherever there is no token.

        Raises
        ------
        ValueError
            Unless `query_start_loc[-1] <= num_tokens_padded <= max_num_batched_tokens`, with one start more than
            requests.
        """
        if len(query_start_loc) != len(idx_mapping) + 1:
            raise ValueError(f"{len(query_start_loc)} query starts for {len(idx_mapping)} requests")
        if not query_start_loc[-1] <= num_tokens_padded <= self.max_num_batched_tokens:
            raise ValueError(f"{query_start_loc[-1]} tokens padded to {num_tokens_padded}")
        slots = np.full((len(self.tables), self.max_num_batched_tokens), PADDING_SLOT, np.int64)
        for g in range(len(self.tables)):
            for i, row in enumerate(idx_mapping):
                for token in range(int(query_start_loc[i]), int(query_start_loc[i + 1])):
                    slots[g, token] = self.slot(g, int(row), int(positions[token]))
        return slots


class FastTablesModel(BlockTablesModel):
    """The same model with gather and slot mapping as whole-array NumPy: the reference of long replays.

    Both follow the same definitions, and a test compares the two. What a step gathers is written to
    `input_block_tables`, one `[max_num_reqs, width] int32` a group, zeros at first; behind it, former steps' rows stay.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.input_block_tables = [np.full(table.rows.shape, PADDING_BLOCK, np.int32) for table in self.tables]

    def gather_block_tables(self, idx_mapping: Ints, num_reqs_padded: int) -> list[NDArray[np.int32]]:
        """Return the first `num_reqs_padded` rows of `input_block_tables`, as in `BlockTablesModel`."""
        rows, is_real = self._rows(idx_mapping)
        gathered = [out[:num_reqs_padded] for out in self.input_block_tables]
        for g, (out, table) in enumerate(zip(gathered, self.tables, strict=True)):
            out[len(rows) :], blocks = PADDING_BLOCK, out[: len(rows)]
            np.take(table.rows, rows, axis=0, out=blocks, mode="clip")  # any other mode copies once more
            owned = np.where(is_real, self.applied_num_blocks[g, rows], 0)
            is_padding = (np.arange(blocks.shape[1]) >= owned[:, np.newaxis]) | (blocks < 0)
            np.copyto(blocks, PADDING_BLOCK, where=is_padding)
        return gathered

    def compute_slot_mappings(
        self, idx_mapping: Ints, query_start_loc: Ints, positions: Ints, num_tokens_padded: int
    ) -> NDArray[np.int64]:
        """As in `BlockTablesModel`."""
        slots = np.full((len(self.tables), self.max_num_batched_tokens), PADDING_SLOT, np.int64)
        starts, tokens = np.asarray(query_start_loc, np.int64), slice(int(query_start_loc[0]), int(query_start_loc[-1]))
        rows, is_real = self._rows(np.repeat(np.asarray(idx_mapping, np.int64), np.diff(starts)))
        position = np.asarray(positions, np.int64)[tokens]  # from here on all arrays are [num_tokens]
        for g, table in enumerate(self.tables):
            ranks, rank, interleave = (self.cp_size, self.cp_rank, self.cp_interleave) if self.sharded[g] else (1, 0, 1)
            kv_column, o = np.divmod(position, self.block_sizes[g] * ranks)
            offset = o // (interleave * ranks) * interleave + o % interleave
            kernel_column, kernel_offset = np.divmod(offset, self.kernel_block_sizes[g])
            column = kv_column * self.split[g] + kernel_column
            is_local = is_real & (position >= 0) & (o // interleave % ranks == rank)
            is_local &= np.logical_and(column < self.applied_num_blocks[g, rows], self.enabled[g])
            block = np.full(len(rows), -1, np.int64)
            block[is_local] = table.rows[rows[is_local], column[is_local]]
            slots[g, tokens] = np.where(block >= 0, block * self.kernel_block_sizes[g] + kernel_offset, PADDING_SLOT)
        return slots

    def _rows(self, idx_mapping: Ints) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the rows, 0 for those of padding requests, and where they are real."""
        rows = np.asarray(idx_mapping, np.int64)
        is_real = (rows >= 0) & (rows < self.max_num_reqs)
        return np.where(is_real, rows, 0), is_real


def first_difference(got: NDArray[Any], want: NDArray[Any]) -> tuple[int, ...] | None:
    """Return the index of the first cell, in row order, whose bits differ, or None; other shapes: ValueError."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise ValueError(f"got {got.dtype} {got.shape}, want {want.dtype} {want.shape}")
    differs = got != want
    if got.dtype.kind in "fc":  # NaN equals NaN and 0.0 is not -0.0: the bits count
        got_bytes, want_bytes = (np.ascontiguousarray(a)[..., np.newaxis].view(np.uint8) for a in (got, want))
        differs = (got_bytes != want_bytes).any(axis=-1)
    if not differs.any():
        return None
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(differs)), got.shape))


def assert_tables_equal(got: NDArray[Any], want: NDArray[Any], *, group: int | None = None) -> None:
    """Raise AssertionError naming group, row and column of the first difference, unless the bits are equal."""
    where = "" if group is None else f"group {group}, "
    try:
        cell = first_difference(got, want)
    except ValueError as error:
        raise AssertionError(f"{where}{error}") from None
    if cell is not None:
        place = ", ".join(f"{name} {i}" for name, i in zip(("row", "column", "axis 2", "axis 3"), cell, strict=False))
        raise AssertionError(f"{where}{place}: got {got[cell]!r}, want {want[cell]!r}")
