"""The names that a profiler shows."""

import numpy as np
import pytest

from cupy_staged import BlockTables, StagedWriteTensor, named_ranges


def test_names_nest_and_go_away(monkeypatch):
    nvtx = pytest.importorskip("cupy.cuda.nvtx", reason="CuPy is not installed")
    seen = []
    depth = []
    monkeypatch.setattr(nvtx, "RangePush", lambda name: (seen.append((len(depth), name)), depth.append(name)))
    monkeypatch.setattr(nvtx, "RangePop", depth.pop)
    tensor = StagedWriteTensor((2, 4), "int32", device="host")
    tables = BlockTables([4], 2, 8, [4], device="host")
    rows, starts, positions = np.array([1], np.int32), np.array([0, 1], np.int32), np.array([2])
    with named_ranges():
        tensor.stage_write(0, 1, [3])
        tensor.apply_write()
        tables.append_block_ids(1, [[5]], True)
        tables.apply_staged_writes()
        tables.prepare_step(rows, starts, positions, 1, 1)
        with pytest.raises(IndexError):
            tensor.stage_write(5, 0, [1])
    assert not depth
    names = [(level, name.removeprefix("cupy_staged: ")) for level, name in seen]
    assert names[:6] == [(0, "stage"), (0, "apply"), (1, "pack"), (0, "stage"), (0, "apply"), (1, "pack")]
    assert names[6] == (0, "gather and slot mapping")
    assert names[-1] == (0, "stage")
    before = len(seen)
    tensor.stage_write(0, 1, [3])
    tensor.apply_write()
    assert len(seen) == before
