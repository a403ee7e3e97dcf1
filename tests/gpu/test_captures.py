"""Calls during a stream capture: CaptureError where a slot would be baked in, and no harm to captures elsewhere."""

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
from common import POISON, distinct_values

from cupy_staged import (
    BlockTables,
    CaptureError,
    FusedStagedWriter,
    StagedWriteTensor,
    UvaBackedTensor,
    UvaBuffer,
    UvaBufferPool,
    warmup,
)

BUMP = 'extern "C" __global__ void bump(int* x) { *x += 1; }'
MODES = ("streamCaptureModeGlobal", "streamCaptureModeThreadLocal", "streamCaptureModeRelaxed")


class Capture:
    """A capture of two kernels on a stream of its own; what happens between them must leave it whole."""

    def __init__(self, gpu, mode, stream=None):
        self.gpu = gpu
        self.mode = getattr(gpu.runtime, mode)
        self.stream = stream or gpu.new_stream()
        self.counter = gpu.asarray(np.zeros(1, np.int32))
        self.bump = gpu.cupy.RawKernel(BUMP, "bump")
        self.bump((1,), (1,), (self.counter,))  # compiled and loaded before
        gpu.synchronize()

    def begin(self):
        gc.collect()  # other tests' streams and graphs are not to be destroyed inside
        with self.stream:
            self.stream.begin_capture(self.mode)
            self.bump((1,), (1,), (self.counter,))

    def end(self):
        """End it, run the graph, and check that both kernels are in it."""
        with self.stream:
            self.bump((1,), (1,), (self.counter,))
            graph = self.stream.end_capture()
            graph.launch()
        self.stream.synchronize()
        assert int(self.gpu.asnumpy(self.counter)[0]) == 3


class Objects:
    """One of each, with something staged and something handed out."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.table = gpu.make(StagedWriteTensor, (4, 40), "i4")
        self.empty = gpu.make(StagedWriteTensor, (4, 40), "i4")
        members = [gpu.make(StagedWriteTensor, (4, 40), "i4") for _ in range(2)]
        self.members = members
        self.writer = gpu.fuse(FusedStagedWriter, members)
        self.tables = gpu.make(BlockTables, [16, 32], 4, 64, [8, 4])
        self.pool = gpu.make(UvaBufferPool, 8, "i4")
        self.backed = gpu.make(UvaBackedTensor, 8, "i4")
        self.other = gpu.new_stream()
        self.out = gpu.asarray(np.full(3, POISON, np.int32))
        self.fresh = gpu.asarray(np.full((4, 40), POISON, np.int32))
        self.table.stage_write(1, 0, [5])
        members[1].stage_write(2, 0, [6])
        self.tables.append_block_ids(3, [[7], [8]], overwrite=True)
        self.pool.copy_to_uva([1])
        gpu.synchronize()

    def check_unharmed(self):
        """Nothing was launched or handed out, and what is staged is still staged."""
        assert self.pool.stats.launches == 1
        assert self.backed.stats.launches == 1
        assert (self.gpu.asnumpy(self.out) == POISON).all()
        assert [t.num_staged for t in (self.table, self.empty, *self.members)] == [1, 0, 0, 1]
        for thing in (self.table, self.writer, self.tables):
            assert thing.stats.launches == 0
        self.table.apply_write()
        self.writer.apply()
        self.tables.apply_staged_writes()
        assert int(self.gpu.asnumpy(self.table.gpu)[1, 0]) == 5
        assert int(self.gpu.asnumpy(self.members[1].gpu)[2, 0]) == 6
        assert int(self.gpu.asnumpy(self.tables.block_tables[1].gpu)[3, 0]) == 8


# Each call uses the stream that is current, or the one that it is given.
CALLS = {
    "copy_to_uva": lambda o: o.pool.copy_to_uva([1, 2, 3]),
    "copy_to_gpu": lambda o: o.pool.copy_to_gpu([1, 2, 3], out=o.out),
    "copy_to_gpu without out": lambda o: o.pool.copy_to_gpu([1, 2, 3]),
    "copy_to_uva that grows": lambda o: o.pool.copy_to_uva(range(1000)),
    "pool fence": lambda o: o.pool.fence(),
    "backed copy_to_uva": lambda o: o.backed.copy_to_uva(),
    "backed fence": lambda o: o.backed.fence(),
    "apply_write": lambda o: o.table.apply_write(),
    "apply_write of nothing": lambda o: o.empty.apply_write(),
    "fused apply": lambda o: o.writer.apply(),
    "fused refresh_pointers": lambda o: o.writer.refresh_pointers(),
    "apply_staged_writes": lambda o: o.tables.apply_staged_writes(),
    "tables refresh_pointers": lambda o: o.tables.refresh_pointers(),
    "reserve": lambda o: o.table.reserve(1, 1),
    "large reserve": lambda o: o.table.reserve(10_000, 100_000),
    "fused reserve": lambda o: o.writer.reserve(1, 1),
    "tables reserve": lambda o: o.tables.reserve(1, 1),
    "rebind": lambda o: o.table.rebind(o.fresh),
    "rebind of a member": lambda o: o.members[0].rebind(o.fresh),
    "rebind of a group": lambda o: o.tables.block_tables[0].rebind(o.tables.block_tables[0].gpu),
    "new UvaBufferPool": lambda o: UvaBufferPool(8, "i4", device=o.gpu.device),
    "new UvaBackedTensor": lambda o: UvaBackedTensor(8, "i4", device=o.gpu.device),
    "new StagedWriteTensor": lambda o: StagedWriteTensor(8, "i4", device=o.gpu.device),
    "new FusedStagedWriter": lambda o: FusedStagedWriter(o.members),
    "new BlockTables": lambda o: BlockTables([16], 4, 64, [8], device=o.gpu.device),
    "warmup": lambda o: warmup(o.gpu.device),
}
GIVEN = {
    "copy_to_uva": lambda o, s: o.pool.copy_to_uva([1, 2, 3], stream=s),
    "copy_to_gpu": lambda o, s: o.pool.copy_to_gpu([1, 2, 3], out=o.out, stream=s),
    "pool fence": lambda o, s: o.pool.fence(s),
    "backed copy_to_uva": lambda o, s: o.backed.copy_to_uva(stream=s),
    "backed fence": lambda o, s: o.backed.fence(s),
    "apply_write": lambda o, s: o.table.apply_write(stream=s),
    "apply_write waiting": lambda o, s: o.table.apply_write(wait_for=s),
    "apply_write waiting for several": lambda o, s: o.table.apply_write(wait_for=[o.other, s]),
    "fused apply": lambda o, s: o.writer.apply(stream=s),
    "fused apply waiting": lambda o, s: o.writer.apply(wait_for=[s]),
    "fused refresh_pointers": lambda o, s: o.writer.refresh_pointers(s),
    "apply_staged_writes": lambda o, s: o.tables.apply_staged_writes(stream=s),
    "apply_staged_writes waiting": lambda o, s: o.tables.apply_staged_writes(wait_for=(s,)),
    "tables refresh_pointers": lambda o, s: o.tables.refresh_pointers(s),
}


def is_refused(call, *args):
    """Say whether a call raises CaptureError; the capture is ended before that is asserted."""
    try:
        call(*args)
    except CaptureError as error:
        return "captur" in str(error)
    return False


@pytest.mark.parametrize("mode", MODES)
def test_calls_on_the_capturing_stream_are_refused(gpu, mode):
    objects, capture = Objects(gpu), Capture(gpu, mode)
    for name, call in CALLS.items():
        capture.counter.fill(1)
        gpu.synchronize()
        capture.begin()
        with capture.stream:
            refused = is_refused(call, objects)
        capture.end()
        assert refused, name
    objects.check_unharmed()


def test_a_new_buffer_in_a_capture_is_refused(uva_gpu):
    UvaBuffer(8, "i4", device=uva_gpu.device)
    capture = Capture(uva_gpu, "streamCaptureModeGlobal")
    capture.begin()
    with capture.stream, pytest.raises(CaptureError):
        UvaBuffer(8, "i4", device=uva_gpu.device)
    capture.end()


@pytest.mark.parametrize("mode", MODES)
def test_calls_that_are_given_the_capturing_stream_are_refused(gpu, mode):
    objects, capture = Objects(gpu), Capture(gpu, mode)
    for name, call in GIVEN.items():
        capture.counter.fill(1)
        gpu.synchronize()
        capture.begin()
        refused = is_refused(call, objects, capture.stream)
        capture.end()
        assert refused, name
    objects.check_unharmed()


def test_a_late_fence_on_a_capturing_stream_is_refused(gpu):
    """The view's stream is being captured when its slot is taken back: the fence would be baked in."""
    reader = gpu.new_stream()
    pool = gpu.make(UvaBufferPool, 4, "i4", max_concurrency=1)
    pool.copy_to_uva([1], stream=reader)
    capture = Capture(gpu, "streamCaptureModeRelaxed", reader)
    capture.begin()
    with pytest.raises(CaptureError):
        pool.copy_to_uva([2])
    capture.end()
    assert gpu.asnumpy(pool.copy_to_uva([3])).tolist() == [3]


def test_staging_is_allowed_in_a_capture(gpu):
    objects, capture = Objects(gpu), Capture(gpu, "streamCaptureModeGlobal")
    capture.begin()
    with capture.stream:
        objects.table.stage_write(0, 1, [3])
        objects.table.stage_writes([0], [2], [4], [1])
        objects.table.stage_write_elem(3, 9)
        objects.empty.stage_write(0, 0, range(40))
        objects.empty.clear_staged_writes()
        objects.tables.append_block_ids(0, [[1], [2]], overwrite=False)
        objects.tables.append_block_ids_batch([1], [[1], [2]], [[1], [1]], overwrite=False)
    capture.end()
    objects.table.apply_write()
    objects.tables.apply_staged_writes()
    assert gpu.asnumpy(objects.table.gpu)[0, :3].tolist() == [0, 3, 4]
    assert gpu.asnumpy(objects.tables.num_blocks.gpu)[0].tolist() == [1, 1, 0, 1]


def test_the_null_stream_beside_a_blocking_capture(gpu):
    """Work on the null stream would break a capture on a blocking stream: refused, and the capture goes on."""
    table = gpu.make(StagedWriteTensor, (2, 2), "i4")
    table.stage_write(0, 0, [1])
    capture = Capture(gpu, "streamCaptureModeRelaxed", gpu.cupy.cuda.Stream())
    capture.begin()
    with pytest.raises(CaptureError):
        table.apply_write(stream=gpu.cupy.cuda.Stream.null)
    capture.end()
    assert table.num_staged == 1
    table.apply_write()
    assert int(gpu.asnumpy(table.gpu)[0, 0]) == 1


def steady_steps(gpu, objects, steps=6):
    """Do what a server does each step, with slots that have to be waited for."""
    gpu.stall(5)
    for step in range(steps):
        objects.table.stage_write(step % 4, 0, distinct_values("i4", 30, step))
        objects.table.apply_write()
        for member in objects.members:
            member.stage_write(step % 4, 1, [step + 1])
        objects.writer.apply()
        objects.tables.append_block_ids(step % 4, [[step], [step]], overwrite=True)
        objects.tables.apply_staged_writes()
        objects.pool.copy_to_uva([step, step])
        if step % 2:
            objects.pool.fence()
        objects.pool.copy_to_gpu([step] * 3, out=objects.out)
        objects.backed.np[:] = step
        objects.backed.copy_to_uva(5)


def check_steady(gpu, objects, steps=6):
    last = steps - 1
    assert gpu.asnumpy(objects.table.gpu)[last % 4, :30].tolist() == distinct_values("i4", 30, last).tolist()
    assert int(gpu.asnumpy(objects.members[0].gpu)[last % 4, 1]) == last + 1
    assert int(gpu.asnumpy(objects.tables.block_tables[1].gpu)[last % 4, 0]) == last
    assert gpu.asnumpy(objects.out).tolist() == [last] * 3


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_on_another_stream_survives_steady_steps(gpu, mode):
    """Also one in global mode, which forbids this very thread all unsafe calls; and one of our objects is collected."""
    objects, dropped, capture = Objects(gpu), Objects(gpu), Capture(gpu, mode)
    steady_steps(gpu, objects)
    steady_steps(gpu, dropped)
    gpu.synchronize()
    capture.counter.fill(1)
    gpu.synchronize()
    capture.begin()
    steady_steps(gpu, objects)
    del dropped
    gc.collect()
    steady_steps(gpu, objects)
    capture.end()
    check_steady(gpu, objects)


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_on_another_thread_survives_steady_steps(gpu, mode):
    objects, dropped, capture = Objects(gpu), Objects(gpu), Capture(gpu, mode)
    steady_steps(gpu, objects)
    gpu.synchronize()
    capture.counter.fill(1)
    gpu.synchronize()
    begun, stepped, failures = threading.Event(), threading.Event(), []

    def run():
        try:
            capture.begin()
            begun.set()
            stepped.wait(60)
            capture.end()
        except Exception as error:  # noqa: BLE001 - shown by the thread that waits
            failures.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait(60)
    try:
        steady_steps(gpu, objects)
        del dropped
        gc.collect()
        steady_steps(gpu, objects)
    finally:
        stepped.set()
        thread.join()
    assert failures == []
    check_steady(gpu, objects)


def test_a_long_wait_beside_a_global_capture(gpu):
    """A wait so long that the stream's health is looked at, which is a query that a global capture forbids."""
    table = gpu.make(StagedWriteTensor, (4, 2), "i4", max_concurrency=1)
    table.stage_write(0, 0, [1])
    table.apply_write()
    capture = Capture(gpu, "streamCaptureModeGlobal")
    capture.counter.fill(1)
    gpu.synchronize()
    gpu.stall(400)
    table.stage_write(1, 0, [2])
    table.apply_write()
    capture.begin()
    table.stage_write(2, 0, [3])
    table.apply_write()
    capture.end()
    assert table.stats.wait_s > 0.1
    assert gpu.asnumpy(table.gpu)[:, 0].tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize(
    "make", ["c.StagedWriteTensor(4, 'i4')", "c.UvaBufferPool(4, 'i4')", "c.warmup()", "c.uva_status()"]
)
def test_the_very_first_call_of_a_process_in_a_capture(process_env, make):
    """No backend is there yet, and no answer of the UVA probe: CaptureError all the same, and the capture goes on."""
    code = (
        "import cupy, cupy_staged as c\n"
        f"bump = cupy.RawKernel({BUMP!r}, 'bump')\n"
        "x = cupy.zeros(1, cupy.int32); bump((1,), (1,), (x,)); cupy.cuda.runtime.deviceSynchronize()\n"
        "s = cupy.cuda.Stream(non_blocking=True)\n"
        "with s:\n"
        "    s.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)\n"
        "    bump((1,), (1,), (x,))\n"
        f"    try: {make}\n"
        "    except c.CaptureError: print('refused')\n"
        "    s.end_capture().launch()\n"
        "s.synchronize()\n"
        f"print(int(x[0])); {make}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=process_env, timeout=300, check=False
    )
    needs_no_cuda = make == "c.uva_status()" and process_env["CUPY_STAGED_UVA"] == "0"
    expected = "2\n" if needs_no_cuda else "refused\n2\n"
    assert (done.stdout, done.stderr, done.returncode) == (expected, "", 0)
