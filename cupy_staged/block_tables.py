"""Block tables of a paged KV cache: which blocks each request owns, in every group, on the device.

The host stages block ids by request; one launch writes them into all groups' tables, and the number of blocks of each
request beside them. Requests are rows, recycled by an overwrite; a row is read only as far as its count says.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from . import appends, packing, ring, staged, step, step_inputs, writes
from .buffers import check_size
from .device import Device, get_backend, refuse_entry
from .values import check_capacity

INT32 = np.dtype(np.int32)


class _GroupTable(staged.StagedWriteTensor):
    """The block table of one group. It is written by its BlockTables, together with the counts."""

    _reader: weakref.ref[step.StepPath]

    def _go_over(self, prepared: list[Callable[[], None]], table: Any, array: Any) -> None:
        """As that of a StagedWriteTensor; a step that still reads the old table keeps it."""
        reader = self._reader()
        if reader is not None:
            ring.retire(reader.is_idle, self._table)
            reader.stale = True
        super()._go_over(prepared, table, array)

    def _make_path(self, max_concurrency: int | None) -> Any:
        return None  # one path writes all groups

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "this table belongs to a BlockTables: stage with append_block_ids, apply with apply_staged_writes"
        )

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


class BlockTables(step_inputs.StepInputs):
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
    input_block_tables : tuple of cupy.ndarray or numpy.ndarray
        ``[groups]`` arrays ``[max_num_reqs, width] int32``: what `gather_block_tables` wrote last. Zeros at first.
    slot_mappings : cupy.ndarray or numpy.ndarray
        ``[groups, max_num_batched_tokens] int64``: what `compute_slot_mappings` wrote last. ``-1`` at first.
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
                raise ValueError(
                    f"kernel_block_sizes[{group}] = {kernel_block} must divide block_sizes[{group}] = {block}"
                )
        (self.max_num_reqs,) = positive((max_num_reqs,), "max_num_reqs")
        (self.max_num_batched_tokens,) = positive((max_num_batched_tokens,), "max_num_batched_tokens")
        factors = [b // k for b, k in zip(self.block_sizes, self.kernel_block_sizes, strict=True)]
        facts = step_inputs.group_facts(
            self.block_sizes,
            self.kernel_block_sizes,
            widths,
            (cp_size, cp_rank, cp_interleave),
            dcp_sharded,
            slot_mapping_enabled,
        )

        self.backend = get_backend(device)
        self.block_tables = tuple(
            _GroupTable((self.max_num_reqs, width * factor), INT32, device=device)
            for width, factor in zip(widths, factors, strict=True)
        )
        shape = (groups, self.max_num_reqs)
        self._staged = appends.BlockLog(
            self.max_num_reqs, [w * f for w, f in zip(widths, factors, strict=True)], factors
        )
        counts = self.backend.zeros(shape, INT32)
        self.num_blocks = BlockCounts(self._staged.counts, counts)
        tables = [table._table for table in self.block_tables]
        row_bytes = 4 * self.max_num_reqs
        address = self.backend.check_array(counts, "counts")
        tables.append(writes.Table(address, row_bytes, counts, groups, row_bytes, 4))
        self._path = writes.WritePath(
            self.backend, INT32, [(self._staged.log, 0)], tables, groups > 1, max_concurrency, writes.AUTO_COPIES
        )
        for group, table in enumerate(self.block_tables):
            table._users.append((weakref.ref(self._path), group))
        weakref.finalize(self, ring.drop, self._path).atexit = False

        self.reserve(groups * self.max_num_reqs, groups * self.max_num_reqs)
        self._make_step(self._path, facts)
        for table in self.block_tables:
            table._reader = weakref.ref(self._step)

    @property
    def stats(self) -> ring.Stats:
        """What the applies have done so far; waits and host allocations are those of the steps too."""
        stats, more = self._path.read_stats(), self._step.stats
        stats.waits, stats.wait_s = stats.waits + more.waits, stats.wait_s + more.wait_s
        stats.host_allocations += more.host_allocations
        return stats

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
        lock = self._path.lock  # as `entered`, which costs a call more
        if lock.locked():
            refuse_entry()
        with lock:
            self._staged.append(req_index, new_block_ids, overwrite)

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
        with self._path.entered():
            self._staged.append_batch(req_indices, new_block_ids, cu_num_blocks, overwrite)

    def apply_staged_writes(self, stream: Any = None, wait_for: Any = ()) -> None:
        """Carry all staged block ids and counts to the device with one launch; as `StagedWriteTensor.apply_write`."""
        self._path.apply(stream, wait_for)

    def refresh_pointers(self, stream: Any = None) -> None:
        """Rewrite the device's table addresses after a `rebind`; as `FusedStagedWriter.refresh_pointers`."""
        self._path.refresh_pointers(stream)
        self._step.stale = False

    def reserve(self, num_writes: int, num_blocks: int) -> None:
        """Make room for that many writes (request and group pairs) and KV block ids a step, over all groups.

        ``groups * max_num_reqs`` of each are reserved by the constructor.

        Raises
        ------
        CaptureError
            The current stream is being captured.
        """
        check_capacity(num_writes, num_blocks)
        with self._path.entered():
            sizes = self._staged.reserve(num_writes, num_blocks)
        self._path.reserve(*sizes)


def positive(values: Any, name: str, count: int | None = None) -> tuple[int, ...]:
    """`values` as a tuple of ints of at least 1; TypeError or ValueError otherwise."""
    found = check_size(tuple(values)) if len(values) else ()
    if min(found, default=1) < 1:
        raise ValueError(f"{name} must be at least 1, got {found}")
    if count is not None and len(found) != count:
        raise ValueError(f"{name} must have one entry for each of the {count} groups, got {len(found)}")
    return found
