"""Order between streams, and constructors that race with none."""

import time

import numpy as np
import pytest
from common import POISON, distinct_values

from cupy_staged import BlockTables, FusedStagedWriter, StagedWriteTensor, UvaBackedTensor, UvaBufferPool, warmup
from cupy_staged.testing import assert_tables_equal


def warm(gpu):
    """Load everything, so that what is measured is no compile."""
    warmup(gpu.device)
    gpu.asnumpy(gpu.make(StagedWriteTensor, (2, 2), "i4").gpu)
    gpu.synchronize()


def test_constructors_behind_a_stalled_null_stream(gpu):
    """Their memory is cleared and ready for any stream when they return."""
    warm(gpu)
    null = gpu.cupy.cuda.Stream.null
    work = gpu.new_stream()
    for _ in range(3):
        gpu.stall(60, null)
        with work:
            table = gpu.make(StagedWriteTensor, (300, 700), "i4")
            tensors = [gpu.make(StagedWriteTensor, (30, 70), "i4") for _ in range(2)]
            writer = gpu.fuse(FusedStagedWriter, tensors)
            tables = gpu.make(BlockTables, [16, 32], 8, 64, [8, 4])
            pool = gpu.make(UvaBufferPool, 16, "i4")
            backed = gpu.make(UvaBackedTensor, 16, "i4")
            table.stage_write(299, 1, [5])
            table.apply_write()
            tensors[1].stage_write(29, 69, [6])
            writer.apply()
            tables.append_block_ids(7, [[7], [8]], overwrite=True)
            tables.apply_staged_writes()
            view = pool.copy_to_uva([9])
            backed.np[:] = 3
            published = backed.copy_to_uva(2)
            found = [
                int(gpu.asnumpy(table.gpu)[299, 1]), int(gpu.asnumpy(table.gpu).sum()),
                int(gpu.asnumpy(tensors[1].gpu)[29, 69]), int(gpu.asnumpy(tables.block_tables[1].gpu)[7, 0]),
                int(gpu.asnumpy(tables.num_blocks.gpu).sum()), int(gpu.asnumpy(view)[0]),
                int(gpu.asnumpy(published).sum()),
            ]  # fmt: skip
        gpu.synchronize()
        assert found == [5, 5, 6, 8, 2, 9, 6]
        assert int(gpu.asnumpy(table.gpu).sum()) == 5  # nothing was cleared late


def test_rebind_and_reserve_behind_a_stalled_null_stream(gpu):
    warm(gpu)
    work = gpu.new_stream()
    table = gpu.make(StagedWriteTensor, (3, 5000), "i4")
    other = gpu.make(StagedWriteTensor, (3, 5000), "i4")
    writer = gpu.fuse(FusedStagedWriter, [table, other])
    fresh = gpu.asarray(np.full((3, 5000), POISON, np.int32))
    gpu.stall(60, gpu.cupy.cuda.Stream.null)
    with work:
        table.reserve(100, 20_000)
        writer.reserve(100, 20_000)
        table.rebind(fresh)
        table.stage_write(1, 1, distinct_values("i4", 4000, 1))
        other.stage_write(1, 1, [4])
        writer.apply()
        got = gpu.asnumpy(fresh)
    assert got[1, 1:4001].tolist() == distinct_values("i4", 4000, 1).tolist()
    assert (got[[0, 2]] == POISON).all()


def handed_over(gpu, how):
    """Queue a reader on stream A, behind a stall, then an apply on the work stream; return what the reader saw."""
    a = gpu.new_stream()
    table = gpu.make(StagedWriteTensor, (1, 8), "i4")
    out = gpu.asarray(np.full((1, 8), POISON, np.int32))
    table.stage_write(0, 0, [1] * 8)
    table.apply_write()
    gpu.read(table.gpu, out)
    gpu.synchronize()
    gpu.stall(50, a)
    with a:
        gpu.read(table.gpu, out)
    event = gpu.cupy.cuda.Event(disable_timing=True)
    event.record(a)
    table.stage_write(0, 0, [2] * 8)
    wait_for = {"none": (), "stream": a, "list": [gpu.new_stream(), a], "event": event, "iterator": iter([event, a])}[
        how
    ]
    begin = time.perf_counter()
    table.apply_write(wait_for=wait_for)
    took = time.perf_counter() - begin
    gpu.stall(100, a)  # later work is not waited for
    gpu.stream.synchronize()
    still_running = not a.done
    after = gpu.asnumpy(table.gpu)[0].tolist()
    gpu.synchronize()
    return gpu.asnumpy(out)[0].tolist(), after, still_running, took


@pytest.mark.parametrize("how", ["stream", "list", "event", "iterator"])
def test_wait_for_orders_one_way(gpu, how):
    seen, after, still_running, took = handed_over(gpu, how)
    assert seen == [1] * 8
    assert after == [2] * 8
    assert still_running
    assert took < 20e-3  # the host does not wait


def test_twin_without_wait_for_the_reader_sees_the_new_owner(gpu):
    assert handed_over(gpu, "none")[0] == [2] * 8


def test_wait_for_something_else_is_refused(gpu):
    table = gpu.make(StagedWriteTensor, (1, 8), "i4")
    table.stage_write(0, 0, [1])
    for bad in (5, "stream", [None], object()):
        with pytest.raises(TypeError):
            table.apply_write(wait_for=bad)
        with pytest.raises(TypeError):
            table.apply_write(stream=bad if bad != [None] else 0.5)
    assert table.num_staged == 1
    table.apply_write()
    assert gpu.asnumpy(table.gpu)[0, 0] == 1


@pytest.mark.parametrize("kind", ["device", "uva"])
def test_two_streams_one_tensor_200_alternating_applies(gpu, kind):
    """Applies of one object are in order also over streams, whichever of them is slower."""
    table = gpu.make(StagedWriteTensor, (200, 40), "i4", uva_instead_of_gpu=kind == "uva")
    streams = [gpu.new_stream(), gpu.stream]
    want = np.zeros((200, 40), np.int32)
    for step in range(200):
        if step % 20 < 2:
            gpu.stall(3, streams[step % 2])
        table.stage_write(step, 0, distinct_values("i4", 40, step))
        table.stage_write(199 - step, 3, [step] * 5)
        want[step] = distinct_values("i4", 40, step)
        want[199 - step, 3:8] = step
        table.apply_write(stream=streams[step % 2])
    gpu.synchronize()
    assert_tables_equal(gpu.asnumpy(table.gpu), want)


def test_two_streams_one_pool_200_alternating_copies(gpu):
    pool = gpu.make(UvaBufferPool, 8, "i4", max_concurrency=2)
    streams = [gpu.new_stream(), gpu.stream]
    outs = gpu.asarray(np.full((400, 30), POISON, np.int32))
    gpu.read(outs[0], outs[1])
    gpu.synchronize()
    for step in range(200):
        stream = streams[step % 2]
        if step % 20 < 2:
            gpu.stall(3, stream)
        pool.copy_to_gpu(distinct_values("i4", 30, step), out=outs[2 * step], stream=stream)
        view = pool.copy_to_uva(distinct_values("i4", 30, 500 + step), stream=stream)
        with stream:
            gpu.read(view, outs[2 * step + 1])
        if step % 3:
            pool.fence(stream)
    gpu.synchronize()
    got = gpu.asnumpy(outs)
    for step in range(200):
        assert got[2 * step].tolist() == distinct_values("i4", 30, step).tolist(), step
        assert got[2 * step + 1].tolist() == distinct_values("i4", 30, 500 + step).tolist(), step


def test_two_streams_one_fused_writer_with_rebinds(gpu):
    tensors = [gpu.make(StagedWriteTensor, (4, 50), "i4") for _ in range(3)]
    writer = gpu.fuse(FusedStagedWriter, tensors)
    streams = [gpu.new_stream(), gpu.stream]
    wanted = [np.zeros((4, 50), np.int32) for _ in tensors]
    for step in range(60):
        stream = streams[step % 2]
        if step % 10 < 2:
            gpu.stall(2, stream)
        if step % 15 == 14:
            tensors[1].rebind(gpu.asarray(np.zeros((4, 50), np.int32)))
            wanted[1][...] = 0
            if step % 2:
                writer.refresh_pointers(stream)
        for group, tensor in enumerate(tensors):
            tensor.stage_write(step % 4, group, distinct_values("i4", 40, step))
            wanted[group][step % 4, group : group + 40] = distinct_values("i4", 40, step)
        writer.apply(stream=stream)
    gpu.synchronize()
    for group, tensor in enumerate(tensors):
        assert_tables_equal(gpu.asnumpy(tensor.gpu), wanted[group], group=group)


def test_the_stream_given_beats_the_current_one(gpu):
    """Work goes to the stream given: a stall there delays it, a stall on the current one does not."""
    table = gpu.make(StagedWriteTensor, (1, 4), "i4")
    given = gpu.new_stream()
    table.stage_write(0, 0, [1])
    table.apply_write(stream=given)
    out = gpu.asarray(np.full((1, 4), POISON, np.int32))
    gpu.read(table.gpu, out)
    gpu.synchronize()
    gpu.stall(80)
    table.stage_write(0, 0, [7])
    table.apply_write(stream=given)
    with given:
        gpu.read(table.gpu, out)
    given.synchronize()
    assert not gpu.stream.done
    gpu.synchronize()
    assert gpu.asnumpy(out)[0, 0] == 7


def test_a_stream_of_another_library(gpu):
    """Anything with the CUDA stream protocol, as cuda.core and PyTorch have it."""

    class Foreign:
        def __init__(self, stream):
            self.kept = stream

        def __cuda_stream__(self):
            return (0, self.kept.ptr)

    stream = gpu.new_stream()
    table = gpu.make(StagedWriteTensor, (1, 4), "i4")
    table.stage_write(0, 0, [7])
    table.apply_write(stream=Foreign(stream), wait_for=[Foreign(gpu.new_stream())])
    stream.synchronize()
    assert gpu.asnumpy(table.gpu)[0, 0] == 7


def test_per_thread_default_streams(gpu):
    ptds = gpu.cupy.cuda.Stream.ptds
    table = gpu.make(StagedWriteTensor, (2, 4), "i4")
    for step in range(6):
        with ptds if step % 2 else gpu.stream:
            table.stage_write(step % 2, 0, [step])
            table.apply_write()
    gpu.synchronize()
    assert gpu.asnumpy(table.gpu)[:, 0].tolist() == [4, 5]


def test_a_stream_in_use_stays_current(gpu):
    """`Stream.use` is not undone by anything that works on a stream of its own."""
    cupy = gpu.cupy
    mine = cupy.cuda.Stream(non_blocking=True)
    before = cupy.cuda.get_current_stream()
    try:
        mine.use()

        def check():
            assert cupy.cuda.get_current_stream() is mine

        table = StagedWriteTensor((4, 64), "i4")
        check()
        table.stage_write(1, 0, range(60))
        table.apply_write()
        table.reserve(500, 5000)
        check()
        table.rebind(cupy.zeros((4, 64), cupy.int32))
        table.apply_write()
        check()
        pool = UvaBufferPool(4, "i4")
        pool.copy_to_uva(range(9))
        pool.copy_to_gpu(range(7))
        check()
        tables = BlockTables([4], 2, 8, [3])
        tables.append_block_ids(1, [[5]], True)
        tables.apply_staged_writes()
        rows, starts, positions = np.array([1], np.int32), np.array([0, 1], np.int32), np.array([2])
        tables.prepare_step(rows, starts, positions, 1, 1)
        check()
        mine.synchronize()
    finally:
        before.use()
