"""What is replaced or dropped stays until its last reader is done; exit, fork and start of a process that uses CUDA."""

import gc
import subprocess
import sys

import numpy as np
import pytest
from common import POISON, STALL_SOURCE, distinct_values

from cupy_staged import FusedStagedWriter, StagedWriteTensor, UvaBufferPool, ring
from cupy_staged.backends import Pinned
from cupy_staged.testing import assert_tables_equal


def dropped_behind_a_stall(place, fill, contents="auto"):
    """Apply, drop everything but the target, and write over all pinned memory of the slots' size that comes free."""
    gc.collect()
    ring.sweep()
    values = distinct_values("i4", 3000, 1)
    table = place.make(StagedWriteTensor, (2, 4000), "i4", contents=contents)
    table.stage_write(0, 0, [1])
    table.apply_write()
    target, size = table.gpu, len(table._path._slots[0].array)
    place.asnumpy(target)
    place.synchronize()
    place.stall(400)  # collecting garbage may take a while
    table.stage_write(1, 7, values)
    table.stage_write(0, 3999, [5])
    table.apply_write()
    del table
    gc.collect()
    blocks = [place.cupy.cuda.alloc_pinned_memory(size) for _ in range(100)]
    for block in blocks:
        np.frombuffer(block, np.int32, size // 4)[:] = fill
    got = place.asnumpy(target)
    want = np.zeros((2, 4000), np.int32)
    want[0, 0], want[0, 3999], want[1, 7:3007] = 1, 5, values
    return got, want


@pytest.mark.parametrize("contents", ["auto", "h2d"])
def test_pinned_memory_is_not_recycled_before_it_was_read(gpu, contents):
    assert_tables_equal(*dropped_behind_a_stall(gpu, -7, contents))


def test_twin_pinned_memory_recycled_without_retirement(uva_gpu, monkeypatch):
    """The slots go back at once: an empty header is read, and nothing is written; -7 would be a wild address.

    Graphs, device memory and fence words stay, so that the slots are all that is missing.
    """
    alive = []

    def drop(core):
        alive.append((core._fences, [thing for kept in core._kept for thing in kept if not isinstance(thing, Pinned)]))

    monkeypatch.setattr(ring, "drop", drop)
    got, want = dropped_behind_a_stall(uva_gpu, 0, "uva")
    assert not (got == want).all()


def test_a_dropped_pool_behind_a_stall(gpu):
    outs = gpu.asarray(np.full((2, 3000), POISON, np.int32))
    pool = gpu.make(UvaBufferPool, 3000, "i4")
    size = len(pool._core._slots[0].block.array)
    gpu.read(pool.copy_to_uva(np.zeros(3000, np.int32)), outs[0])
    pool.fence()
    gpu.synchronize()
    gpu.stall(60)
    view = pool.copy_to_uva(distinct_values("i4", 3000, 1))
    gpu.read(view, outs[0])
    pool.fence()
    pool.copy_to_gpu(distinct_values("i4", 3000, 2), out=outs[1])
    del pool, view
    gc.collect()
    blocks = [gpu.cupy.cuda.alloc_pinned_memory(size) for _ in range(100)]
    for block in blocks:
        np.frombuffer(block, np.int32, size // 4)[:] = -7
    got = gpu.asnumpy(outs)
    assert got[0].tolist() == distinct_values("i4", 3000, 1).tolist()
    assert got[1].tolist() == distinct_values("i4", 3000, 2).tolist()


def test_a_dropped_target_is_not_given_to_another_before_it_was_written(gpu):
    """Tables dropped with an apply in flight: their memory must not come back, as zeros, as someone else's table."""
    for _ in range(5):
        gpu.stall(30)
        old = [gpu.make(StagedWriteTensor, (64, 1000), "i4") for _ in range(4)]
        writer = gpu.fuse(FusedStagedWriter, old)
        for table in old:
            table.stage_write(5, 0, np.full(1000, -7))
            table.stage_write(6, 0, [-7])
        writer.apply()
        old[0].stage_write(9, 0, [-7])
        old[0].apply_write()
        del old, writer, table
        gc.collect()
        with gpu.new_stream():
            new = [gpu.make(StagedWriteTensor, (64, 1000), "i4") for _ in range(8)]
        gpu.synchronize()
        assert [int(np.abs(gpu.asnumpy(table.gpu)).sum()) for table in new] == [0] * 8


def test_a_rebound_target_is_retired(gpu):
    table = gpu.make(StagedWriteTensor, (64, 1000), "i4")
    fresh = gpu.asarray(np.zeros((64, 1000), np.int32))
    gpu.stall(40)
    table.stage_write(5, 0, np.full(1000, -7))
    table.apply_write()
    table.rebind(fresh)
    gc.collect()
    others = [gpu.make(StagedWriteTensor, (64, 1000), "i4") for _ in range(8)]
    gpu.synchronize()
    assert not any(gpu.asnumpy(other.gpu).any() for other in others)
    assert not gpu.asnumpy(fresh).any()


def test_a_replaced_slot_is_retired(gpu):
    """Growth while the other slot is in flight, over and over."""
    table = gpu.make(StagedWriteTensor, (3, 100_000), "i4", max_concurrency=2)
    gpu.stall(30)
    want = np.zeros((3, 100_000), np.int32)
    for step, length in enumerate((100, 20_000, 40_000, 70_000, 100_000, 10, 100_000)):
        table.stage_write(step % 3, 0, distinct_values("i4", length, step))
        want[step % 3, :length] = distinct_values("i4", length, step)
        table.apply_write()
        blocks = [gpu.cupy.cuda.alloc_pinned_memory(1 << 16) for _ in range(4)]
        for block in blocks:
            np.frombuffer(block, np.int32, 1 << 14)[:] = -7
        del blocks, block
    assert_tables_equal(gpu.asnumpy(table.gpu), want)


def test_retired_things_are_let_go(gpu):
    gc.collect()
    gpu.synchronize()
    ring.sweep()
    before = len(ring._retired)
    for _ in range(30):
        table = gpu.make(StagedWriteTensor, (100, 1000), "i4")
        table.stage_write(1, 0, [1])
        table.apply_write()
        pool = gpu.make(UvaBufferPool, 100, "i4")
        pool.copy_to_uva([1])
        pool.fence()
    del table, pool
    gc.collect()
    gpu.synchronize()
    ring.sweep()
    assert len(ring._retired) <= before


def run(code, env):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300, check=False
    )
    return done.stdout, done.stderr, done.returncode


STEP = (
    "table.stage_write(1, 0, range(3000)); table.apply_write()\n"
    "view = pool.copy_to_uva(range(50)); out = view.copy(); pool.copy_to_gpu(range(70))\n"
)
USE = (
    "import cupy, cupy_staged as c, numpy as np\n"
    f"spin = cupy.RawKernel({STALL_SOURCE!r}, 'stall')\n"
    "table = c.StagedWriteTensor((4, 4000), 'i4')\n"
    "pool = c.UvaBufferPool(100, 'i4', max_concurrency=6)\n"
    "s = cupy.cuda.Stream(non_blocking=True); s.use()\n"
    f"spin((1,), (1,), (np.int64(0),))\n{STEP}s.synchronize()\n"  # what compiles or allocates would wait for the stall
    f"spin((1,), (1,), (np.int64(1_000_000_000),))\n{STEP}"
    "table.stage_write(2, 0, [1])\n"
)


@pytest.mark.parametrize(
    "end", ["", "import sys; sys.kept = (table, pool, view)", "table.me = table; del table", "import os; os._exit(0)"]
)
def test_exit_with_work_pending_is_quiet(process_env, end):
    assert run(USE + end, process_env) == ("", "", 0)


def test_dropping_objects_behind_a_stall_is_quick(process_env):
    """Finalizers only queue."""
    code = USE + (
        "import time, gc\n"
        "begin = time.perf_counter(); del table, pool, view; gc.collect()\n"
        "print(time.perf_counter() - begin < 0.1, s.done)\n"
    )
    assert run(code, process_env) == ("True False\n", "", 0)


def test_fork_after_use(process_env):
    """In the child: a clear error at the next call, finalizers that do nothing, and host objects that work."""
    code = USE + (
        "import os, sys, gc, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"  # Python warns of any fork beside threads
        "s.synchronize()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for call in (table.apply_write, lambda: pool.copy_to_uva([1]), pool.fence, table.clear_staged_writes):\n"
        "        try: call()\n"
        "        except RuntimeError as e: assert 'fork' in str(e), e\n"
        "        else: os._exit(3)\n"
        "    h = c.StagedWriteTensor(3, 'i4', device='host'); h.stage_write_elem(1, 5); h.apply_write()\n"
        "    del pool; gc.collect()\n"
        "    os._exit(0 if h.gpu.tolist() == [0, 5, 0] else 4)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "table.apply_write(); s.synchronize()\n"
        "print(status, int(table.gpu[2, 0]))\n"
    )
    assert run(code, process_env) == ("0 1\n", "", 0)


def test_four_processes_at_once_one_without_caches(process_env, tmp_path):
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "below")
    # CuPy alone cannot be imported where it cannot make its cache folder; after our first object it has one.
    ours = "import os, cupy_staged as c\nc.StagedWriteTensor(4, 'i4'); c.BlockTables([16], 2, 4, [2])\n"
    code = ours + USE + "print(int(table.gpu[1, 2999]), int(out[49]))"
    unwritable = {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "NUMBA_CACHE_DIR": nowhere, "CUPY_CACHE_DIR": nowhere}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        for env in (*[process_env] * 3, {**process_env, **unwritable})
    ]
    done = [(*p.communicate(timeout=300), p.returncode) for p in processes]
    assert [(out, status, error if status else "") for out, error, status in done] == [("2999 49\n", 0, "")] * 4
    assert [error for _, error, _ in done[:3]] == [""] * 3  # CuPy may warn of its own cache folder
