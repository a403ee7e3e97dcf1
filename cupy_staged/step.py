"""The launch path of one step: where its inputs lie, the ring its descriptors travel in, and the launch.

A `StepPath` belongs to one BlockTables and reads the tables of its `WritePath`. Outside captures a descriptor, and
inputs that lie on the host, go through a fenced slot and a graph with fixed arguments, on the current stream; the first
kernel of the graph brings the slot to the device. In a capture one kernel is launched that holds its descriptor by
value: a slot would be rewritten behind the captured graph's back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from . import kernels, packing, ring, step_packing, writes
from .backends import Backend, drain
from .device import guard_against_fork, refuse_entry
from .errors import CaptureError

INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
SLOTS_A_CALL = 2  # a step may take two: gather and slot mapping by a call each


class StepPath:
    """Launches gather and slot mapping, from device arrays or host arrays.

    Parameters
    ----------
    path : WritePath
        Whose tables are read; the last one holds the counts.
    facts : numpy.ndarray
        ``[groups, step_packing.F_FIELDS] int64``.
    max_num_reqs, max_num_tokens : int
        The most requests and tokens of a step.
    kept : object
        What the kernels write by default; lives until the last launch is done.
    """

    def __init__(
        self, path: writes.WritePath, facts: np.ndarray, max_num_reqs: int, max_num_tokens: int, kept: Any
    ) -> None:
        step_packing.compile_step()
        backend: Backend = path.backend
        self.backend = backend
        self.lock = threading.Lock()
        self.stats = ring.Stats()
        self.stale = False  # a table was exchanged, and the addresses on the device may be old
        self._path = path
        self._kept = kept
        self._class: Any = np.ndarray if backend.id is None else backend.cupy.ndarray
        num_slots = SLOTS_A_CALL * path.stats.slots
        self._fences = ring.FenceWords(backend, num_slots, self.stats)
        self._done = self._fences.words
        widths, columns = facts[:, step_packing.F_WIDTH].tolist(), step_packing.GATHER_COLUMNS
        chunks = [group << 40 | first for group, width in enumerate(widths) for first in range(0, width, columns)]
        self._chunks = np.array(chunks, np.int64)
        on_device = [backend.array(facts), backend.array(self._chunks)]
        facts_address, self._chunks_address = (backend.check_array(array, "facts") for array in on_device)

        desc = np.zeros(step_packing.P_SLOTS + step_packing.P_SLOT_FIELDS * (num_slots + 1), np.int64)
        self._words = memoryview(desc)  # type: ignore[arg-type]
        self._address = desc.ctypes.data
        desc[step_packing.P_CONSTANTS : step_packing.P_CONSTANTS + 7] = (
            path.targets.device_address,
            facts_address,
            self._chunks_address,
            len(facts),
            len(facts) + 1,
            max_num_reqs,
            len(self._chunks),
        )
        desc[step_packing.P_NUM_SLOTS] = num_slots
        desc[step_packing.P_SMALL_UNITS] = kernels.STEP_GRIDS[0] * kernels.STEP_THREADS // 32
        num_bytes = self._words[step_packing.P_BYTES : step_packing.P_BYTES + 1]
        slot_bytes = step_packing.STEP_BYTES + -(-4 * max_num_reqs // 16) * 16 + -(-4 * (max_num_reqs + 1) // 16) * 16
        slot_bytes += -(-8 * max_num_tokens // 16) * 16
        twins = backend.zeros((num_slots, slot_bytes), np.dtype(np.uint8))
        scratch = backend.zeros((num_slots, 2), np.dtype(np.uint64))
        twin, words = backend.check_array(twins, "twins"), backend.check_array(scratch, "scratch")
        self._launch: list[kernels.Launcher] = []
        self._on_device = [*on_device, twins, scratch]
        self._states: list[int] = []
        self._streams: list[Any] = [None] * num_slots  # where each slot is read
        self._blocks: list[Any] = []
        for slot in range(num_slots):
            block = backend.pinned(slot_bytes)
            fence = (self._fences.block, 8 * slot)
            twin_here = twin + slot * slot_bytes if backend.id is not None else block.address
            launchers, graphs = kernels.make_step_launchers(
                backend, block, twin_here, words + 16 * slot, fence, num_bytes
            )
            self._launch += launchers
            self._blocks.append(block)
            self._on_device.append(graphs)
            state = step_packing.P_SLOTS + step_packing.P_SLOT_FIELDS * slot
            self._states.append(state)
            desc[state : state + 4] = block.address, twin_here, 0, self._fences.block.address + 64 * slot
            self.stats.host_allocations += 1
        self._by_value = np.zeros(step_packing.STEP_BYTES // 8, np.int64)
        desc[step_packing.P_SLOTS + step_packing.P_SLOT_FIELDS * num_slots] = self._by_value.ctypes.data
        self._record = kernels.make_step_recorder(backend, self._by_value)
        if backend.id is not None:
            guard_against_fork(self)

    def is_idle(self) -> bool:
        """Whether all that this path has launched outside captures is done."""
        return all(self._done[8 * slot] == self._words[state + 2] for slot, state in enumerate(self._states))

    def run(
        self,
        idx_mapping: Any,
        query_start_loc: Any,
        positions: Any,
        num_rows: int,
        num_tokens: int,
        slots: tuple[int, int, int],
        gathered: int,
        out: Sequence[int] = (),
    ) -> None:
        """Launch one step on the current stream of the device.

        `num_rows` is rows to gather, `num_tokens` the most real tokens, `slots` the address, length and stride of the
        slot mapping (length 0: none), `gathered` where the addresses to gather to lie on the device, `out` (where it is
        0) those addresses themselves.
        """
        if self.lock.locked():
            refuse_entry()
        with self.lock:
            if self.backend.elsewhere():
                with self.backend.current():
                    self._run(idx_mapping, query_start_loc, positions, num_rows, num_tokens, slots, gathered, out)
            else:
                self._run(idx_mapping, query_start_loc, positions, num_rows, num_tokens, slots, gathered, out)

    def _run(
        self,
        idx_mapping: Any,
        query_start_loc: Any,
        positions: Any,
        num_rows: int,
        num_tokens: int,
        slots: tuple[int, int, int],
        gathered: int,
        out: Sequence[int],
    ) -> None:
        try:
            stream = self.backend.stream(None)
        except CaptureError:
            stream = None
            if isinstance(idx_mapping, np.ndarray) or not self._captures():
                raise
        if self.stale and stream is not None:
            self._path.refresh_pointers(stream)
            self.stale = False
        first = 0
        while True:
            slot = self._words[step_packing.P_NEXT]
            try:
                if isinstance(idx_mapping, np.ndarray):
                    number = self._pack(idx_mapping, query_start_loc, positions, num_rows, num_tokens, slots, gathered)
                else:
                    number = self._note(
                        1 if stream is None else 0, idx_mapping, query_start_loc, positions, num_rows, slots, gathered
                    )
                if out:
                    self._redirect(number // step_packing.STEP_SHAPES, first, out)
                if stream is None:
                    self._record(number & 1, self.backend.cupy.cuda.get_current_stream(self.backend.id).ptr)  # type: ignore[union-attr]
                else:
                    self._streams[slot] = stream
                    self._launch[number](stream.ptr)
            except BaseException:
                if self._words[step_packing.P_NEXT] != slot:  # the slot was taken
                    drain(self.backend, stream)
                    self._words[self._states[slot] + 2] = self._done[8 * slot]  # nobody reads it
                raise
            first += step_packing.OUT_GROUPS
            if first >= len(out):
                return

    def _captures(self) -> bool:
        """Whether the current stream is being captured itself, and not only kept from work by another capture."""
        backend = self.backend
        try:
            return bool(backend.runtime.streamIsCapturing(backend.cupy.cuda.get_current_stream(backend.id).ptr))  # type: ignore[union-attr]
        except backend._error:  # type: ignore[union-attr]
            return False

    def _pack(
        self,
        idx: Any,
        starts: Any,
        positions: Any,
        num_rows: int,
        num_tokens: int,
        slots: tuple[int, int, int],
        gathered: int,
    ) -> int:
        """Lay host arrays out in the next slot; returns the launcher's number."""
        address, length, stride = slots
        try:
            number: int = step_packing.pack_step(
                self._address, idx, starts, positions, num_rows, num_tokens, address, stride, length, gathered
            )
        except (TypeError, ValueError):  # Numba's, also for what it cannot tell the type of
            idx = _host_array(idx, INT32, "idx_mapping")
            starts = _host_array(starts, INT32, "query_start_loc")
            positions = _host_array(positions, INT64, "positions")
            number = step_packing.pack_step(
                self._address, idx, starts, positions, num_rows, num_tokens, address, stride, length, gathered
            )
        while number < 0:
            if number != packing.BUSY:
                self._explain(number, idx, starts, positions, num_tokens)
            self._wait()
            number = step_packing.pack_step(
                self._address, idx, starts, positions, num_rows, num_tokens, address, stride, length, gathered
            )
        return number

    def _note(
        self,
        direct: int,
        idx: Any,
        starts: Any,
        positions: Any,
        num_rows: int,
        slots: tuple[int, int, int],
        gathered: int,
    ) -> int:
        """Put the addresses of device arrays into the next slot's descriptor; returns the launcher's number."""
        address, length, stride = slots
        num_reqs = num_positions = at_idx = at_starts = at_positions = 0
        if idx is not None:  # None: no requests, all is padding
            at_idx, num_reqs = self._device_array(idx, INT32, "idx_mapping")
            if length:
                at_starts, num_starts = self._device_array(starts, INT32, "query_start_loc")
                at_positions, num_positions = self._device_array(positions, INT64, "positions")
                if num_starts != num_reqs + 1:
                    _refuse_count(num_starts, num_reqs)
        while True:
            number: int = step_packing.note_step(
                self._address, direct, at_idx, at_starts, at_positions, num_reqs, num_rows, num_positions,
                address, stride, length, gathered, step_packing.STEP_BYTES,
            )  # fmt: skip
            if number >= 0:
                return number
            self._wait()

    def _device_array(self, array: Any, dtype: np.dtype, name: str) -> tuple[int, int]:
        """Address and length of a device array, checked."""
        if type(array) is self._class and array.dtype is dtype and array.ndim == 1 and array._c_contiguous:
            data = array.data
            if data.device_id == self.backend.id:
                return data.ptr, array.size
        address = self.backend.check_array(array, name)
        _check_layout(array, dtype, name)
        return address, array.size

    def _redirect(self, slot: int, first: int, out: Sequence[int]) -> None:
        """Let the step in `slot` gather to `out`, only groups from `first` on, as many as a descriptor has room for."""
        step = self._by_value
        if slot < len(self._states):
            step = self._blocks[slot].array[: step_packing.STEP_BYTES].view(np.int64)
        here = out[first : first + step_packing.OUT_GROUPS]
        step[step_packing.S_OUT : step_packing.S_OUT + len(here)] = here
        step[step_packing.S_FIRST_GROUP] = first
        begin, end = np.searchsorted(self._chunks, [first << 40, (first + len(here)) << 40])
        step[step_packing.S_CHUNKS] = self._chunks_address + 8 * begin
        step[step_packing.S_NUM_CHUNKS] = end - begin

    def _wait(self) -> None:
        slot = self._words[step_packing.P_NEXT]
        self._fences.wait(slot, self._words[self._states[slot] + 2], self._streams[slot])

    def _explain(self, code: int, idx: Any, starts: Any, positions: Any, num_tokens: int) -> NoReturn:
        """Raise what the jitted pass found; nothing was launched."""
        if code == step_packing.WRONG_COUNT:
            _refuse_count(len(starts), len(idx))
        if code == step_packing.NOT_RISING:
            bad = self._words[step_packing.P_BAD]
            raise ValueError(f"query_start_loc must rise from 0 or more, got {starts[bad]} at entry {bad}")
        if code == step_packing.TOO_FEW_POSITIONS:
            raise ValueError(f"positions has {len(positions)} entries, query_start_loc ends at {starts[-1]}")
        raise ValueError(f"query_start_loc ends at {starts[-1]}: more tokens than num_tokens_padded {num_tokens}")


def _refuse_count(num_starts: int, num_reqs: int) -> NoReturn:
    raise ValueError(f"query_start_loc must have {num_reqs + 1} entries for {num_reqs} requests, got {num_starts}")


def _check_layout(array: Any, dtype: np.dtype, name: str) -> None:
    if array.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous, got strides {array.strides}")


def _host_array(array: Any, dtype: np.dtype, name: str) -> np.ndarray:
    """`array` as the jitted pass takes it: it knows no read-only, misaligned or derived ones."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy.ndarray as idx_mapping is, got {type(array).__name__}")
    _check_layout(array, dtype, name)
    return np.array(array, dtype)
