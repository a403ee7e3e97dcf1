"""What a replay compares: tables, counts, gathered tables and slot mappings, with the plain NumPy model, cell by cell.

A comparison waits for the device's current stream, after one enqueued copy of each array into pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from .backends import HostBackend, host_view
from .block_tables import BlockTables
from .replay_steps import synchronize
from .scheduler import Step
from .testing import FastTablesModel, first_difference

__all__ = ["Checker", "ReplayMismatch"]


class ReplayMismatch(Exception):
    """The first cell in which the device, or the host's counts, differ from the model.

    `what` is `"block table"`; `"num_blocks"`, which has no `column`; `"gathered block table"`, whose `row` counts the
    requests of the batch; or `"slot mapping"`, which has no `row`, and whose `column` is the token.
    """

    def __init__(
        self, step: int, what: str, group: int, row: int | None, column: int | None, want: int, got: int
    ) -> None:
        self.step, self.what, self.want, self.got = step, what, want, got
        self.group, self.row, self.column = group, row, column
        places = (("group", group), ("row", row), ("column", column))
        at = ", ".join(f"{name} {i}" for name, i in places if i is not None)
        super().__init__(f"step {step}: {what} differs at {at}: want {want}, got {got}")


class Checker:
    """Follows the steps of `tables` with a model, and compares.

    Parameters
    ----------
    tables
        As made: nothing staged, nothing prepared.
    model
        Of the same shape.
    is_every_step
        Whether each step is compared: then also rows of the gathered tables behind `num_reqs_padded`, which must be
        what earlier steps left there.
    """

    def __init__(self, tables: BlockTables, model: FastTablesModel, is_every_step: bool) -> None:
        self._tables, self._model, self._is_every_step = tables, model, is_every_step
        self._arrays: list[Any] = [table.gpu for table in tables.block_tables]
        self._arrays += [*tables.input_block_tables, tables.num_blocks.gpu, tables.slot_mappings]
        backend, self._on_host = tables.backend, self._arrays
        if not isinstance(backend, HostBackend):
            # Pageable memory would be copied in pieces, with a wait for each.
            self._on_host = [host_view(backend.pinned(a.nbytes), a.shape, a.dtype) for a in self._arrays]
        self.steps = self.cells = 0

    def follow(self, step: Step) -> None:
        """Let the model stage and apply a step."""
        self._model.append_block_ids_batch(step.rows, step.new_block_ids, step.cu_num_blocks, step.overwrite)
        self._model.apply()

    def compare(self, step: Step, sizes: tuple[int, int]) -> None:
        """Compare all that there is after the step that was followed last, prepared with these padded sizes.

        Raises
        ------
        ReplayMismatch
            At the first cell that differs.
        """
        for what, group, got, want in self._pairs(step, sizes):
            self.cells += got.size
            if (cell := first_difference(got, want)) is None:
                continue
            row: int | None
            column: int | None
            if group is not None:
                row, column = cell
            elif what == "num_blocks":
                (group, row), column = cell, None
            else:
                (group, column), row = cell, None
            raise ReplayMismatch(step.index, what, group, row, column, int(want[cell]), int(got[cell]))
        self.steps += 1

    def _pairs(
        self, step: Step, sizes: tuple[int, int]
    ) -> Iterator[tuple[str, int | None, NDArray[Any], NDArray[Any]]]:
        """Yield what is compared: its name, the group of a table (other arrays are `[groups, n]`), got and want."""
        self._copy_to_host()
        model, num_groups = self._model, len(self._model.tables)
        num_reqs, num_tokens = sizes
        *tables, counts, slots = self._on_host
        for group, table in enumerate(model.tables):
            yield "block table", group, tables[group], table.table
        yield "num_blocks", None, counts, model.applied_num_blocks
        yield "num_blocks", None, self._tables.num_blocks.np, model.num_blocks
        model.gather_block_tables(step.idx_mapping, num_reqs)
        until = None if self._is_every_step else num_reqs
        for group, want in enumerate(model.input_block_tables):
            yield "gathered block table", group, tables[num_groups + group][:until], want[:until]
        want_slots = model.compute_slot_mappings(step.idx_mapping, step.query_start_loc, step.positions, num_tokens)
        yield "slot mapping", None, slots, want_slots

    def _copy_to_host(self) -> None:
        if self._on_host is self._arrays:
            return
        backend = self._tables.backend
        with backend.current():
            for array, out in zip(self._arrays, self._on_host, strict=True):
                array.get(out=out, blocking=False)
        synchronize(backend)
