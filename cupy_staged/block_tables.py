"""Block tables of a paged KV cache: which blocks each request owns, in every group, on the device.

The host stages block ids by request; one launch writes them into all groups' tables, and the number of blocks of each
request beside them. Requests are rows, recycled by an overwrite; a row is read only as far as its count says.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from . import packing, ring, staged, writes
from .buffers import check_size
from .device import Device, get_backend

INT32 = np.dtype(np.int32)


class _GroupTable(staged.StagedWriteTensor):
    """The block table of one group. It is written by its BlockTables, together with the counts."""

    def _make_path(self, max_concurrency: int | None) -> Any:
        return None  # one path writes all groups

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError("this table belongs to a BlockTables: stage with append_block_ids, apply with apply_staged_writes")

    stage_write = stage_write_elem = stage_writes = apply_write = clear_staged_writes = reserve = _refuse

    @property
    def stats(self) -> ring.Stats:
        """Nothing of its own: see `BlockTables.stats`."""
        return ring.Stats()


class BlockCounts:
    """How many kernel blocks each request has.

    Attributes
    ----------
    np : numpy.ndarray
        ``[groups, max_num_reqs] int32``, host: counts as staged. Read only.
    gpu : cupy.ndarray or numpy.ndarray
        ``[groups, max_num_reqs] int32``: counts as applied, at a fixed address.
    """

    def __init__(self, host: np.ndarray, device: Any) -> None:
        self.np = host[:]
        self.np.flags.writeable = False
        self.gpu = device


class BlockTables:
    """Block tables for one or many KV-cache groups, changed by staged appends and applied by one launch.

    Parameters
    ----------
    block_sizes : sequence of int
        ``[groups]``, tokens a KV block of each group holds.
    max_num_reqs : int
        Rows of every table.
    max_num_batched_tokens : int
        Length of each group's slot mapping.
    max_num_blocks_per_group : sequence of int
        ``[groups]``, KV blocks that a row has room for.
    kernel_block_sizes : sequence of int, optional
        ``[groups]``, tokens a block of the attention kernel holds; divides the KV block size. Tables then hold kernel
        blocks: KV block ``b`` becomes ``b * k .. b * k + k - 1`` with ``k = block_size // kernel_block_size``.
    cp_size, cp_rank, cp_interleave : int
        Decode context parallelism: number of ranks, this rank, tokens in a row on one rank.
    dcp_sharded : sequence of bool, optional
        ``[groups]``, whether a group is spread over the ranks; all are by default.
    slot_mapping_enabled : sequence of bool, optional
        ``[groups]``; all are by default. Others get ``-1``.
    max_concurrency : int, optional
        Slots in the ring; see `set_default_max_concurrency`.
    device : None, int or str

    Attributes
    ----------
    block_tables : tuple of StagedWriteTensor
        One a group, ``[max_num_reqs, width] int32``; staging on them directly raises.
    num_blocks : BlockCounts
    stats : Stats

    Raises
    ------
    TypeError, ValueError
        Sizes that are no ints, not positive, or do not fit each other.
    CaptureError
        The current stream is being captured.

    Examples
    --------
    >>> tables = BlockTables([16, 32], 4, 64, [8, 4], device="host")
    >>> tables.append_block_ids(2, [[5, 6], [9]], overwrite=True)
    >>> tables.append_block_ids(2, [[7], []], overwrite=False)
    >>> tables.apply_staged_writes()
    >>> tables.block_tables[0].gpu[2].tolist(), tables.num_blocks.np[:, 2].tolist()
    ([5, 6, 7, 0, 0, 0, 0, 0], [3, 1])
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
        max_concurrency: int | None = None,
        device: Device = None,
    ) -> None:
        self.block_sizes = positive(block_sizes, "block_sizes")
        groups = len(self.block_sizes)
        if not 1 <= groups < packing.MAX_GROUPS:
            raise ValueError(f"block_sizes must name 1 to {packing.MAX_GROUPS - 1} groups, got {groups}")
        widths = positive(max_num_blocks_per_group, "max_num_blocks_per_group", groups)
        self.kernel_block_sizes = (
            self.block_sizes
            if kernel_block_sizes is None
            else positive(kernel_block_sizes, "kernel_block_sizes", groups)
        )
        for group, (block, kernel_block) in enumerate(zip(self.block_sizes, self.kernel_block_sizes, strict=True)):
            if block % kernel_block:
                raise ValueError(f"kernel_block_sizes[{group}] = {kernel_block} must divide block_sizes[{group}] = {block}")
        (self.max_num_reqs,) = positive((max_num_reqs,), "max_num_reqs")
        (self.max_num_batched_tokens,) = positive((max_num_batched_tokens,), "max_num_batched_tokens")
        factors = [b // k for b, k in zip(self.block_sizes, self.kernel_block_sizes, strict=True)]

        self.backend = get_backend(device)
        self.block_tables = tuple(
            _GroupTable((self.max_num_reqs, width * factor), INT32, device=device)
            for width, factor in zip(widths, factors, strict=True)
        )
        shape = (groups, self.max_num_reqs)
        self._counts = np.zeros(shape, np.int32)
        counts = self.backend.zeros(shape, INT32)
        self.num_blocks = BlockCounts(self._counts, counts)
        self._log = writes.WriteLog(INT32)
        tables = [table._table for table in self.block_tables]
        tables.append(writes.Table(self.backend.check_array(counts, "counts"), 4 * self.max_num_reqs, counts))
        self._path = writes.WritePath(
            self.backend, INT32, [(self._log, 0)], tables, groups > 1, max_concurrency, writes.COPY_BYTES
        )
        for group, table in enumerate(self.block_tables):
            table._users.append((weakref.ref(self._path), group))
        weakref.finalize(self, ring.drop, self._path).atexit = False

        self._widths = np.array([w * f for w, f in zip(widths, factors, strict=True)], np.int64)
        self._factors = np.array(factors, np.int64)
        self._stamps = np.zeros((*shape, 2), np.int64)
        self._overwrite = np.zeros(1, np.uint8)
        self._row = np.zeros(1, np.int64)
        self._totals = np.zeros(groups, np.int64)
        self._inputs = np.zeros((groups, packing.INPUT_FIELDS), np.int64)
        self._one_inputs = np.zeros((groups, packing.INPUT_FIELDS), np.int64)
        self._one_inputs[:, 1] = 4
        self._one_inputs[:, 2] = self._totals.ctypes.data + 8 * np.arange(groups)
        self._one_inputs[:, 3] = 8
        self._ids = np.zeros(0, np.int32)
        self._old = np.zeros(0, np.int64)
        self._desc = np.zeros(packing.A_FIELDS, np.int64)
        self._words = memoryview(self._desc)  # type: ignore[arg-type]
        for field, value in {
            packing.A_GROUPS: groups,
            packing.A_MAX_REQS: self.max_num_reqs,
            packing.A_LOG: self._log.address,
            packing.A_COUNTS: self._counts.ctypes.data,
            packing.A_STAMPS: self._stamps.ctypes.data,
            packing.A_WIDTHS: self._widths.ctypes.data,
            packing.A_FACTORS: self._factors.ctypes.data,
        }.items():
            self._words[field] = value
        self._max_factor = max(factors)
        self.reserve(groups * self.max_num_reqs, groups * self.max_num_reqs)

    @property
    def stats(self) -> ring.Stats:
        """What the applies have done so far."""
        return self._path.read_stats()

    def append_block_ids(self, req_index: int, new_block_ids: Sequence[Any], overwrite: bool) -> None:
        """Stage new KV block ids of one request, in every group.

        Parameters
        ----------
        req_index : int
            Row of the request.
        new_block_ids : sequence
            ``[groups]`` lists or arrays of int, one a group, each of any length.
        overwrite : bool
            Write from column 0 on (a new owner of the row), instead of behind what the request has. An overwrite by
            nothing makes the count 0.

        Raises
        ------
        IndexError
            No such row, or more blocks than the row has room for.
        OverflowError
            A block id, expanded to kernel blocks, does not fit int32.
        TypeError
            Ids that are no ints.
        ValueError
            Not one entry a group.

        Notes
        -----
        Where it raises, in whatever group, nothing of the call is staged. Nothing reaches the device before
        `apply_staged_writes`; `num_blocks.np` counts at once.
        """
        with self._path.exclusive():
            self._append_one(req_index, new_block_ids, overwrite)

    def _append_one(self, req_index: int, new_block_ids: Sequence[Any], overwrite: bool) -> None:
        groups = len(self.block_sizes)
        if len(new_block_ids) != groups:
            raise ValueError(f"new_block_ids must have one entry for each of the {groups} groups, got {len(new_block_ids)}")
        try:
            lengths = list(map(list.__len__, new_block_ids))
            lists: Sequence[Any] = new_block_ids
        except TypeError:
            lists = [list_of(ids) for ids in new_block_ids]
            lengths = list(map(len, lists))
        total = sum(lengths)
        if total + 1 > len(self._ids):
            self._ids = np.zeros(ring.grown_size(total + 1), np.int32)
        address, inputs = self._ids.ctypes.data, self._one_inputs
        try:
            struct.pack_into(f"{total}i", self._ids, 0, *itertools.chain.from_iterable(lists))
            struct.pack_into("q", self._row, 0, req_index)
        except (struct.error, OverflowError):
            for ids in lists:
                writes.pack_values(ids, INT32, np.zeros(4 * len(ids) or 1, np.uint8), 0)
            raise TypeError(f"req_index must be an int, got {req_index!r}") from None
        for group, length in enumerate(lengths):
            self._totals[group] = length
            inputs[group, 0] = address
            address += 4 * length
        self._overwrite[0] = bool(overwrite)
        self._append(self._row, inputs, 1, total, self._overwrite, 0)

    def append_block_ids_batch(
        self, req_indices: Any, new_block_ids: Sequence[Any], cu_num_blocks: Sequence[Any], overwrite: Any
    ) -> None:
        """Stage new KV block ids of many requests; the fast way.

        Parameters
        ----------
        req_indices : array of int
            ``[n]``, host, rows; one may come more than once, and its entries are taken in order.
        new_block_ids : sequence of array of int
            ``[groups]`` arrays, each the ids of all requests back to back.
        cu_num_blocks : sequence of array of int
            ``[groups]`` arrays ``[n]``: inclusive running totals of each group's ids.
        overwrite : bool or array of bool
            One for all, or ``[n]``, one a request.

        Raises
        ------
        IndexError, OverflowError, TypeError, ValueError
            As `append_block_ids`; ValueError also for running totals that do not fit. Then nothing of the batch, in any
            group, is staged.

        Examples
        --------
        >>> tables = BlockTables([16], 4, 64, [8], device="host")
        >>> tables.append_block_ids_batch([0, 3], [[5, 6, 7]], [[2, 3]], overwrite=True)
        >>> tables.apply_staged_writes()
        >>> tables.block_tables[0].gpu[:, :3].tolist()
        [[5, 6, 0], [0, 0, 0], [0, 0, 0], [7, 0, 0]]
        """
        with self._path.exclusive():
            self._append_batch(req_indices, new_block_ids, cu_num_blocks, overwrite)

    def _append_batch(self, req_indices: Any, new_block_ids: Any, cu_num_blocks: Any, overwrite: Any) -> None:
        groups = len(self.block_sizes)
        if len(new_block_ids) != groups or len(cu_num_blocks) != groups:
            raise ValueError(
                f"new_block_ids and cu_num_blocks must have one entry for each of the {groups} groups, "
                f"got {len(new_block_ids)} and {len(cu_num_blocks)}"
            )
        rows = int_array(req_indices, "req_indices")
        kept, total = [rows], 0
        for group in range(groups):
            ids = int_array(new_block_ids[group], "new_block_ids")
            cu = int_array(cu_num_blocks[group], "cu_num_blocks")
            kept += (ids, cu)
            if len(cu) != len(rows):
                raise ValueError(f"cu_num_blocks[{group}] must have {len(rows)} entries, one a request, got {len(cu)}")
            self._inputs[group] = ids.ctypes.data, ids.itemsize, cu.ctypes.data, cu.itemsize
            bad = packing.check_totals(cu.ctypes.data, cu.itemsize, len(cu), len(ids))
            if bad >= 0:
                value = cu[bad] if bad < len(cu) else (cu[-1] if len(cu) else 0)
                raise ValueError(
                    f"cu_num_blocks[{group}] must rise to len(new_block_ids[{group}]) = {len(ids)}, got {value} at request {bad}"
                )
            total += len(ids)
        flags = np.asarray(overwrite)
        if flags.dtype != np.bool_:
            raise TypeError(f"overwrite must be a bool or an array of bool, got dtype {flags.dtype}")
        if flags.ndim and flags.shape != rows.shape:
            raise ValueError(f"overwrite must be one bool, or one for each of the {len(rows)} requests, got {flags.shape}")
        flags = np.ascontiguousarray(flags).view(np.uint8)
        self._append(rows, self._inputs, len(rows), total, flags, 1 if np.ndim(overwrite) else 0)

    def _append(
        self, rows: np.ndarray, inputs: np.ndarray, num_writes: int, num_ids: int, flags: np.ndarray, step: int
    ) -> None:
        """Make room, then check and stage in one jitted pass."""
        pairs = num_writes * len(self.block_sizes)
        header = self._log.header
        if header[0] + 2 * pairs > self._log.num_writes or header[1] + pairs + num_ids * self._max_factor > self._log.num_values:
            self._log.reserve(header[0] + 2 * pairs, header[1] + pairs + num_ids * self._max_factor)
        words = self._words
        if pairs > len(self._old):
            self._old = np.zeros(ring.grown_size(pairs), np.int64)
            words[packing.A_OLD] = self._old.ctypes.data
        words[packing.A_ROWS], words[packing.A_ROW_BYTES] = rows.ctypes.data, rows.itemsize
        words[packing.A_OVERWRITE], words[packing.A_OVERWRITE_STEP] = flags.ctypes.data, step
        words[packing.A_INPUTS] = inputs.ctypes.data
        bad = packing.append(self._desc.ctypes.data, num_writes)
        if bad >= 0:
            self._refuse(bad >> 48, bad & ((1 << 48) - 1), rows, inputs, flags, step)

    def _refuse(self, code: int, w: int, rows: np.ndarray, inputs: np.ndarray, flags: np.ndarray, step: int) -> NoReturn:
        """Raise what the jitted pass found; nothing is staged."""
        row, group = int(rows[w]), self._words[packing.A_BAD_GROUP]
        if code == packing.ROW_OUTSIDE:
            raise IndexError(f"request row {row} (entry {w}) is not one of the {self.max_num_reqs} rows")
        factor, width = int(self._factors[group]), int(self._widths[group])
        if code == packing.BLOCK_OVERFLOW:
            raise OverflowError(
                f"a block id of request row {row}, group {group}, does not fit int32 once expanded to {factor} kernel blocks each"
            )
        raise IndexError(
            f"request row {row} (entry {w}) would have more kernel blocks in group {group} than its row of {width}: "
            f"it has {self._counts[group, row]} in the ({self.max_num_reqs}, {width}) table, and each new KV block adds {factor}"
        )

    def apply_staged_writes(self, stream: Any = None, wait_for: Any = ()) -> None:
        """Carry all staged block ids and counts to the device with one launch; as `StagedWriteTensor.apply_write`."""
        self._path.apply(stream, wait_for)

    def refresh_pointers(self, stream: Any = None) -> None:
        """Rewrite the device's table addresses after a `rebind`; as `FusedStagedWriter.refresh_pointers`."""
        self._path.refresh_pointers(stream)

    def reserve(self, num_writes: int, num_blocks: int) -> None:
        """Make room for that many writes (request and group pairs) and KV block ids a step, over all groups.

        ``groups * max_num_reqs`` of each are reserved by the constructor.

        Raises
        ------
        CaptureError
            The current stream is being captured.
        """
        values = num_blocks * self._max_factor + num_writes
        self._path.reserve(2 * num_writes, values)
        self._log.reserve(2 * num_writes, values)


def positive(values: Any, name: str, count: int | None = None) -> tuple[int, ...]:
    """`values` as a tuple of ints of at least 1; TypeError or ValueError otherwise."""
    found = check_size(tuple(values)) if len(values) else ()
    if min(found, default=1) < 1:
        raise ValueError(f"{name} must be at least 1, got {found}")
    if count is not None and len(found) != count:
        raise ValueError(f"{name} must have one entry for each of the {count} groups, got {len(found)}")
    return found


def list_of(ids: Any) -> list[Any]:
    """Block ids as a list of ints; TypeError for anything that is not a sequence of ints."""
    found = writes.convert(ids, INT32)
    return found.tolist() if isinstance(found, np.ndarray) else list(found)


def int_array(values: Any, name: str) -> np.ndarray:
    """`values` as a contiguous int32 or int64 array of one dimension."""
    if type(values) is np.ndarray and values.dtype in (np.int32, np.int64) and values.ndim == 1 and values.flags.c_contiguous:
        return values
    return writes.as_int64(values, name)
