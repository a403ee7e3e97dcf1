"""What a step's attention kernels read: block tables in batch order, and the slot of each token, at fixed addresses.

`StepInputs` is the half of `BlockTables` that reads the tables. It owns the arrays that a step writes by default; work
goes to the current stream of the device, and nothing here waits for the device.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from . import ring, step, step_packing, writes
from .backends import Backend

NO_STARTS, NO_POSITIONS = np.zeros(1, np.int32), np.zeros(0, np.int64)
NO_SLOTS = (0, 0, 0)
MAX_SPAN = (1 << 31) - 1  # the kernel divides by spans of 31 bits


class StepInputs:
    """Gather and slot mapping of `BlockTables`.

    Attributes
    ----------
    input_block_tables : tuple of cupy.ndarray or numpy.ndarray
        ``[groups]`` arrays ``[max_num_reqs, width] int32``, device: the rows of the last batch. Zeros at first.
    slot_mappings : cupy.ndarray or numpy.ndarray
        ``[groups, max_num_batched_tokens] int64``, device: ``-1`` at first.
    """

    backend: Backend
    max_num_reqs: int
    max_num_batched_tokens: int

    def _make_step(self, path: writes.WritePath, facts: np.ndarray) -> None:
        """Allocate what a step writes, and its launch path."""
        self._groups = len(facts)
        self._widths = facts[:, step_packing.F_WIDTH].tolist()
        self.input_block_tables = tuple(
            self.backend.zeros((self.max_num_reqs, width), step.INT32) for width in self._widths
        )
        self.slot_mappings = self.backend.array(np.full((self._groups, self.max_num_batched_tokens), -1, np.int64))
        addresses = [self.backend.check_array(array, "input_block_tables") for array in self.input_block_tables]
        gathered = self.backend.array(np.array(addresses, np.int64))
        self._gathered = self.backend.check_array(gathered, "addresses")
        length = self.max_num_batched_tokens
        self._slots = (self.backend.check_array(self.slot_mappings, "slot_mappings"), length, length)
        self._table_views: dict[int, tuple[Any, ...]] = {}
        self._slot_views: dict[int, Any] = {}
        kept = (path, self.input_block_tables, self.slot_mappings, gathered)
        self._step = step.StepPath(path, facts, self.max_num_reqs, self.max_num_batched_tokens, kept)
        weakref.finalize(self, ring.drop, self._step).atexit = False

    def gather_block_tables(
        self, idx_mapping: Any, num_reqs_padded: int, out: Sequence[Any] | None = None
    ) -> tuple[Any, ...]:
        """Copy the rows of the batch, in batch order, into the input block tables of all groups, with one launch.

        Parameters
        ----------
        idx_mapping : cupy.ndarray or numpy.ndarray
            ``[num_reqs] int32``: row of each request; ``-1``, or any row outside the table, is a padding request. A
            numpy.ndarray on a CUDA device travels in a slot and may be changed when the call returns.
        num_reqs_padded : int
            Rows to write: ``num_reqs <= num_reqs_padded <= max_num_reqs``.
        out : sequence of cupy.ndarray, optional
            ``[groups]`` contiguous arrays ``[num_reqs_padded, width] int32`` to write instead of `input_block_tables`;
            one launch for every 16 groups.

        Returns
        -------
        tuple of cupy.ndarray or numpy.ndarray
            ``[groups]`` arrays ``[num_reqs_padded, width] int32``: the kernel blocks that the request owns, then zeros;
            padding rows are zero, and so is a negative block id. The first `num_reqs_padded` rows of
            `input_block_tables` (the same objects for the same number), or `out`.

        Raises
        ------
        TypeError
            An array of another dtype or kind.
        ValueError
            Sizes outside the limits, an array that is not contiguous or lies on another device, an `out` that does not
            fit.
        CaptureError
            The current stream is being captured, and `idx_mapping` lies on the host. Device arrays may be captured: the
            graph reads them where they are, and sees exchanged tables after `refresh_pointers`. Keep this object alive
            as long as the graph.
        RuntimeError
            Another thread prepares a step, or the process was forked.

        Examples
        --------
        >>> import numpy as np
        >>> from cupy_staged import BlockTables
        >>> tables = BlockTables([16], 4, 64, [3], device="host")
        >>> tables.append_block_ids(2, [[5, 6]], overwrite=True)
        >>> tables.apply_staged_writes()
        >>> tables.gather_block_tables(np.array([2], np.int32), 2)[0].tolist()
        [[5, 6, 0], [0, 0, 0]]
        """
        if not len(idx_mapping) <= num_reqs_padded <= self.max_num_reqs:
            self._refuse_sizes(len(idx_mapping), num_reqs_padded, 0)
        views = self._table_views.get(num_reqs_padded) or self._view_tables(num_reqs_padded)
        if out is not None:
            addresses = [self._check_out(array, (num_reqs_padded, w), step.INT32) for array, w in self._pairs(out)]
            views = tuple(out)
            if num_reqs_padded:
                self._step.run(idx_mapping, NO_STARTS, NO_POSITIONS, num_reqs_padded, 0, NO_SLOTS, 0, addresses)
        elif num_reqs_padded:
            self._step.run(idx_mapping, NO_STARTS, NO_POSITIONS, num_reqs_padded, 0, NO_SLOTS, self._gathered)
        return views

    def compute_slot_mappings(
        self, idx_mapping: Any, query_start_loc: Any, positions: Any, num_tokens_padded: int, out: Any = None
    ) -> Any:
        """Find the slot of each token of the batch, for all groups, with one launch.

        Parameters
        ----------
        idx_mapping : cupy.ndarray or numpy.ndarray
            ``[num_reqs] int32``, as in `gather_block_tables`.
        query_start_loc : cupy.ndarray or numpy.ndarray
            ``[num_reqs + 1] int32``: first token of each request; the last entry is the number of real tokens.
        positions : cupy.ndarray or numpy.ndarray
            ``[at least query_start_loc[-1]] int64``: position of each token in its sequence.
        num_tokens_padded : int
            Tokens of the view that is returned, at most `max_num_batched_tokens`.
        out : cupy.ndarray, optional
            ``[groups, at least num_tokens_padded] int64``, contiguous, to write instead of `slot_mappings`.

        Returns
        -------
        cupy.ndarray or numpy.ndarray
            ``[groups, num_tokens_padded] int64``: ``block * kernel_block_size + offset``, or ``-1`` for a token that
            has no place (on this rank): a padding request, a negative position, one past the width or past the blocks
            of the request, a group with slot mapping off. It is the start of `slot_mappings` or `out`, which are ``-1``
            from the last real token to their end.

        Raises
        ------
        TypeError, ValueError, CaptureError, RuntimeError
            As `gather_block_tables`. ValueError also where host arrays do not fit each other: a `query_start_loc` that
            falls, or ends past `positions` or `num_tokens_padded`. Values on the device are not read back: tokens that
            no request, position or slot belongs to are left out.

        Examples
        --------
        >>> import numpy as np
        >>> from cupy_staged import BlockTables
        >>> tables = BlockTables([16], 4, 64, [3], device="host")
        >>> tables.append_block_ids(2, [[5, 6]], overwrite=True)
        >>> tables.apply_staged_writes()
        >>> rows, starts = np.array([2], np.int32), np.array([0, 3], np.int32)
        >>> tables.compute_slot_mappings(rows, starts, np.array([0, 17, 40]), 4).tolist()
        [[80, 97, -1, -1]]
        """
        if not len(idx_mapping) <= self.max_num_reqs or not 0 <= num_tokens_padded <= self.max_num_batched_tokens:
            self._refuse_sizes(len(idx_mapping), self.max_num_reqs, num_tokens_padded)
        slots, view = self._slots, self._slot_views.get(num_tokens_padded)
        if out is not None:
            if getattr(out, "ndim", 2) != 2 or not out.shape[1] >= num_tokens_padded:
                raise ValueError(f"out must have shape ({self._groups}, at least {num_tokens_padded}), got {out.shape}")
            slots = self._check_out(out, (self._groups, out.shape[1]), step.INT64), out.shape[1], out.shape[1]
            view = out[:, :num_tokens_padded]
        elif view is None:
            view = self._view_slots(num_tokens_padded)
        if slots[1]:
            self._step.run(idx_mapping, query_start_loc, positions, 0, num_tokens_padded, slots, self._gathered)
        return view

    def prepare_step(
        self, idx_mapping: Any, query_start_loc: Any, positions: Any, num_reqs_padded: int, num_tokens_padded: int
    ) -> tuple[tuple[Any, ...], Any]:
        """Gather and map slots with one launch.

        Parameters
        ----------
        idx_mapping, query_start_loc, positions : cupy.ndarray or numpy.ndarray
            As in `compute_slot_mappings`: all on the device, or all on the host. Host arrays travel in a fenced slot;
            they may be changed when the call returns.
        num_reqs_padded, num_tokens_padded : int
            As in `gather_block_tables` and `compute_slot_mappings`.

        Returns
        -------
        tuple of tuple and array
            What both return.

        Raises
        ------
        TypeError, ValueError, CaptureError, RuntimeError
            As both.

        Notes
        -----
        Enqueued on the device's current stream. The host waits only where all slots of the ring are still being read.

        Examples
        --------
        >>> import numpy as np
        >>> from cupy_staged import BlockTables
        >>> tables = BlockTables([16], 4, 64, [3], device="host")
        >>> tables.append_block_ids(2, [[5, 6]], overwrite=True)
        >>> tables.apply_staged_writes()
        >>> rows, starts = np.array([2], np.int32), np.array([0, 2], np.int32)
        >>> block_tables, slots = tables.prepare_step(rows, starts, np.array([30, 31]), 1, 2)
        >>> block_tables[0].tolist(), slots.tolist()
        ([[5, 6, 0]], [[110, 111]])
        """
        if (
            not len(idx_mapping) <= num_reqs_padded <= self.max_num_reqs
            or not 0 <= num_tokens_padded <= self.max_num_batched_tokens
        ):
            self._refuse_sizes(len(idx_mapping), num_reqs_padded, num_tokens_padded)
        tables = self._table_views.get(num_reqs_padded) or self._view_tables(num_reqs_padded)
        slots = self._slot_views.get(num_tokens_padded)
        if slots is None:
            slots = self._view_slots(num_tokens_padded)
        self._step.run(
            idx_mapping, query_start_loc, positions, num_reqs_padded, num_tokens_padded, self._slots, self._gathered
        )
        return tables, slots

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[Any, ...]:
        """Write padding (zeros) to the first `num_reqs` rows of the input block tables and return them.

        For warm-up and captures: the addresses are those of a real step, the tables themselves are not touched.

        Raises
        ------
        ValueError, RuntimeError
            As `gather_block_tables`. May be captured.
        """
        if not 0 <= num_reqs <= self.max_num_reqs:
            self._refuse_sizes(0, num_reqs, 0)
        views = self._table_views.get(num_reqs) or self._view_tables(num_reqs)
        if num_reqs:
            self._step.run(None, None, None, num_reqs, 0, NO_SLOTS, self._gathered)
        return views

    def get_dummy_slot_mappings(self, num_tokens: int) -> Any:
        """Write padding (``-1``) to all of `slot_mappings` and return the first `num_tokens` columns.

        Raises
        ------
        ValueError, RuntimeError
            As `compute_slot_mappings`. May be captured.
        """
        if not 0 <= num_tokens <= self.max_num_batched_tokens:
            self._refuse_sizes(0, 0, num_tokens)
        view = self._slot_views.get(num_tokens)
        if view is None:
            view = self._view_slots(num_tokens)
        self._step.run(None, None, None, 0, 0, self._slots, self._gathered)
        return view

    def _view_tables(self, num_reqs: int) -> tuple[Any, ...]:
        num_reqs = operator.index(num_reqs)
        views = self._table_views[num_reqs] = tuple(array[:num_reqs] for array in self.input_block_tables)
        return views

    def _view_slots(self, num_tokens: int) -> Any:
        num_tokens = operator.index(num_tokens)
        view = self._slot_views[num_tokens] = self.slot_mappings[:, :num_tokens]
        return view

    def _pairs(self, out: Sequence[Any]) -> zip[tuple[Any, int]]:
        if len(out) != self._groups:
            raise ValueError(f"out must have one array for each of the {self._groups} groups, got {len(out)}")
        return zip(out, self._widths, strict=True)

    def _check_out(self, array: Any, shape: tuple[int, int], dtype: np.dtype) -> int:
        address = self.backend.check_array(array, "out")
        if array.dtype != dtype:
            raise TypeError(f"out must have dtype {dtype}, got {array.dtype}")
        if array.shape != shape or not array.flags.c_contiguous:
            raise ValueError(
                f"out must be contiguous and of shape {shape}, got shape {array.shape}, strides {array.strides}"
            )
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ValueError("out must be writeable")
        return address

    def _refuse_sizes(self, num_reqs: int, num_reqs_padded: int, num_tokens_padded: int) -> NoReturn:
        if not 0 <= num_tokens_padded <= self.max_num_batched_tokens:
            limit = self.max_num_batched_tokens
            raise ValueError(f"num_tokens_padded must be 0 to max_num_batched_tokens {limit}, got {num_tokens_padded}")
        if num_reqs <= num_reqs_padded:
            raise ValueError(f"num_reqs_padded must be 0 to max_num_reqs {self.max_num_reqs}, got {num_reqs_padded}")
        raise ValueError(f"num_reqs_padded {num_reqs_padded} must be at least len(idx_mapping) = {num_reqs}")


def group_facts(
    block_sizes: Sequence[int],
    kernel_block_sizes: Sequence[int],
    max_blocks: Sequence[int],
    cp: tuple[int, int, int],
    sharded: Sequence[bool] | None,
    enabled: Sequence[bool] | None,
) -> np.ndarray:
    """Return what the kernels know of each group, ``[groups, F_FIELDS] int64``; ValueError where it clashes.

    `cp` is size, rank and interleave; None for the last two means all groups.
    """
    groups = len(block_sizes)
    names = ("cp_size", "cp_rank", "cp_interleave")
    size, rank, interleave = (_integer(value, name) for value, name in zip(cp, names, strict=True))
    if size < 1 or interleave < 1 or not 0 <= rank < size:
        raise ValueError(
            f"cp_size and cp_interleave must be at least 1, cp_rank 0 to cp_size - 1; "
            f"got cp_size {size}, cp_rank {rank}, cp_interleave {interleave}"
        )
    for flags, name in ((sharded, "dcp_sharded"), (enabled, "slot_mapping_enabled")):
        if flags is not None and len(flags) != groups:
            raise ValueError(f"{name} must have one entry for each of the {groups} groups, got {len(flags)}")
    facts = np.zeros((groups, step_packing.F_FIELDS), np.int64)
    sizes = zip(block_sizes, kernel_block_sizes, max_blocks, strict=True)
    for group, (block, kernel_block, columns) in enumerate(sizes):
        is_sharded = sharded is None or bool(sharded[group])
        if is_sharded and block % interleave:
            raise ValueError(f"cp_interleave {interleave} must divide block_sizes[{group}] = {block}, which is sharded")
        ranks = size if is_sharded else 1
        if block * ranks > MAX_SPAN:
            raise ValueError(f"a block of group {group} spans {block * ranks} tokens: at most {MAX_SPAN}")
        facts[group, step_packing.F_SPAN] = block * ranks
        facts[group, step_packing.F_RANKS], facts[group, step_packing.F_RANK] = ranks, rank
        facts[group, step_packing.F_INTERLEAVE] = interleave
        facts[group, step_packing.F_SPLIT], facts[group, step_packing.F_KERNEL_BLOCK] = (
            block // kernel_block,
            kernel_block,
        )
        facts[group, step_packing.F_COLUMNS] = columns if enabled is None or enabled[group] else 0
        facts[group, step_packing.F_WIDTH] = columns * (block // kernel_block)
    return facts


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return int(value)
