"""Slots that a stalled stream still reads. Each test has a twin with the fence taken out, which must see the fault."""

import time

import numpy as np
import pytest
from common import POISON, distinct_values, take_fences_out

from cupy_staged import BlockTables, FusedStagedWriter, StagedWriteTensor, UvaBackedTensor, UvaBufferPool
from cupy_staged.testing import assert_tables_equal


def three_applies(place, contents="auto", uva_target=False):
    """Queue applies of 11, 22, 33 to rows 0, 1, 2 behind a stall, from a ring of two slots, without a host wait."""
    options = {"uva_instead_of_gpu": True} if uva_target else {"contents": contents}
    tensor = place.make(StagedWriteTensor, (3, 1), "i4", max_concurrency=2, **options)
    tensor.stage_write_elem(0, 1)
    tensor.apply_write()  # everything is loaded
    tensor.stage_write_elem(0, 1)
    tensor.apply_write()
    place.synchronize()
    place.stall(50)
    for row, value in enumerate((11, 22, 33)):
        tensor.stage_write_elem(row, value)
        tensor.apply_write()
    return tensor, place.asnumpy(tensor.gpu)[:, 0].tolist()


@pytest.mark.parametrize("contents", ["auto", "h2d"])
def test_a_slot_is_not_rewritten_while_it_is_read(gpu, contents):
    tensor, found = three_applies(gpu, contents)
    assert found == [11, 22, 33]
    assert tensor.stats.waits == 1
    assert tensor.stats.wait_s > 0.02


def test_a_slot_is_not_rewritten_while_it_is_read_for_a_uva_target(gpu):
    tensor, found = three_applies(gpu, uva_target=True)
    assert found == [11, 22, 33]
    assert tensor.stats.waits == 1


def test_twin_a_slot_rewritten_without_the_fence(uva_gpu, monkeypatch):
    take_fences_out(monkeypatch)
    _, found = three_applies(uva_gpu, "uva")
    assert found == [1, 22, 33]  # 11 was overwritten in its slot before the kernel read it


def fused_steps(place):
    tensors = [place.make(StagedWriteTensor, (3, 50), "i4") for _ in range(3)]
    writer = place.fuse(FusedStagedWriter, tensors, max_concurrency=2)
    for _ in range(2):
        tensors[0].stage_write(0, 0, [0])
        writer.apply()
    place.synchronize()
    place.stall(50)
    for row, value in enumerate((11, 22, 33)):
        for group, tensor in enumerate(tensors):
            tensor.stage_write(row, group, np.full(40, value + group))
        writer.apply()
    return [place.asnumpy(t.gpu)[:, 5].tolist() for t in tensors]


def test_fused_steps_behind_a_stall(gpu):
    assert fused_steps(gpu) == [[11, 22, 33], [12, 23, 34], [13, 24, 35]]


def test_twin_fused_steps_without_the_fence(uva_gpu, monkeypatch):
    take_fences_out(monkeypatch)
    assert fused_steps(uva_gpu) == [[0, 22, 33], [0, 23, 34], [0, 24, 35]]


def block_table_steps(place):
    tables = place.make(BlockTables, [16, 32], 4, 64, [8, 8], max_concurrency=2)
    for _ in range(2):
        tables.append_block_ids(3, [[1], [1]], overwrite=True)
        tables.apply_staged_writes()
    place.synchronize()
    place.stall(50)
    for row, value in enumerate((11, 22, 33)):
        tables.append_block_ids(row, [[value], [value, value]], overwrite=True)
        tables.apply_staged_writes()
    return place.asnumpy(tables.block_tables[1].gpu)[:3, 1].tolist(), place.asnumpy(tables.num_blocks.gpu)[
        1, :3
    ].tolist()


def test_block_tables_behind_a_stall(gpu):
    assert block_table_steps(gpu) == ([11, 22, 33], [2, 2, 2])


def test_twin_block_tables_without_the_fence(uva_gpu, monkeypatch):
    take_fences_out(monkeypatch)
    assert block_table_steps(uva_gpu) == ([0, 22, 33], [0, 2, 2])


def two_views(place, fence, reader=None):
    """Two views read by one kernel, on the pool's stream or another, then two more hand-outs; what the kernel saw."""
    pool = place.make(UvaBufferPool, 64, "i4", max_concurrency=2)
    add = place.cupy.ElementwiseKernel("int32 x, int32 y", "int64 z", "z = (long long)x * 100000 + y", "both_views")
    out = place.asarray(np.full(64, POISON, np.int64))
    for _ in range(2):
        a, b = pool.copy_to_uva(range(64)), pool.copy_to_uva(range(64))
        add(a, b, out)
        pool.fence()
    place.synchronize()
    late = pool.stats.late_fences
    place.stall(50, reader)
    a, b = pool.copy_to_uva([1] * 64), pool.copy_to_uva([2] * 64)
    with place.using(reader):
        add(a, b, out)
    if fence == "fence":
        pool.fence(reader)
    pool.copy_to_uva([3] * 64)
    pool.copy_to_uva([4] * 64)
    place.synchronize()
    return sorted(set(place.asnumpy(out).tolist())), pool.stats.late_fences - late


def test_two_views_in_one_kernel_then_a_third_hand_out(gpu):
    assert two_views(gpu, "fence") == ([100002], 0)


def test_views_that_nobody_fenced_are_fenced_late(gpu):
    assert two_views(gpu, "no fence") == ([100002], 2)


def test_views_read_on_another_stream_and_fenced_there(gpu):
    assert two_views(gpu, "fence", gpu.new_stream()) == ([100002], 0)


def test_twin_views_without_the_fence(uva_gpu, monkeypatch):
    take_fences_out(monkeypatch)
    assert two_views(uva_gpu, "fence")[0] == [300004]
    assert two_views(uva_gpu, "no fence")[0] == [300004]


def test_twin_a_reader_on_another_stream_needs_fence(uva_gpu):
    """What the documentation says: without `fence(stream)` the pool does not know of that reader."""
    assert two_views(uva_gpu, "no fence", uva_gpu.new_stream())[0] == [300004]


def test_several_streams_may_fence_the_same_views(gpu):
    pool = gpu.make(UvaBufferPool, 64, "i4", max_concurrency=1)
    readers = [gpu.new_stream() for _ in range(3)]
    outs = [gpu.asarray(np.full(64, POISON, np.int32)) for _ in readers]
    for reader, out in zip(readers, outs, strict=True):  # everything is loaded
        with reader:
            gpu.read(out, gpu.asarray(np.zeros(64, np.int32)))
    ready = gpu.cupy.cuda.Event(disable_timing=True)
    for delay, reader in zip((40, 5, 20), readers, strict=True):
        gpu.stall(delay, reader)
    view = pool.copy_to_uva([7] * 64)
    ready.record(gpu.stream)
    for reader, out in zip(readers, outs, strict=True):
        reader.wait_event(ready)
        with reader:
            gpu.read(view, out)
        pool.fence(reader)
    pool.copy_to_uva([9] * 64)
    gpu.synchronize()
    assert [sorted(set(gpu.asnumpy(out).tolist())) for out in outs] == [[7]] * 3
    assert pool.stats.late_fences == 0


def copies(place):
    n = 300_000  # too much to travel in the command itself
    pool = place.make(UvaBufferPool, n, "i4", max_concurrency=2)
    outs = place.asarray(np.full((3, n), POISON, np.int32))
    for _ in range(2):
        pool.copy_to_gpu(np.zeros(n, np.int32), out=outs[0])
    place.synchronize()
    place.stall(50)
    for i in range(3):
        pool.copy_to_gpu(np.full(n, i + 1, np.int32), out=outs[i])
    return [sorted(set(row.tolist())) for row in place.asnumpy(outs)]


def test_copies_behind_a_stall(gpu):
    assert copies(gpu) == [[1], [2], [3]]


def test_twin_copies_without_the_fence(gpu, monkeypatch):
    """An asynchronous copy reads its source when it runs, not when it was queued."""
    take_fences_out(monkeypatch)
    assert copies(gpu) == [[3], [2], [3]]


def test_a_published_tensor_behind_a_stall(gpu):
    tensor = gpu.make(UvaBackedTensor, 64, "i4", max_concurrency=2)
    outs = gpu.asarray(np.full((3, 64), POISON, np.int32))
    gpu.read(tensor.gpu, outs[0])
    gpu.synchronize()
    gpu.stall(50)
    for i in range(3):
        tensor.np[...] = i + 1
        gpu.read(tensor.copy_to_uva(), outs[i])
        tensor.fence()
    assert gpu.asnumpy(outs)[:, 0].tolist() == [1, 2, 3]


def quick(call, place, times=4):
    """Return the shortest time of a few calls, each behind a stall of 100 ms that outlasts it."""
    took = []
    for _ in range(times):
        place.synchronize()
        place.stall(100)
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
        assert not place.stream.done
    place.synchronize()
    return min(took)


@pytest.mark.parametrize("values", [1, 40_000])
@pytest.mark.parametrize("contents", ["auto", "h2d"])
def test_apply_returns_at_once_behind_a_stall(gpu, contents, values):
    tensor = gpu.make(StagedWriteTensor, (2, 50_000), "i4", contents=contents)
    tensor.reserve(10, 50_000)
    given = np.arange(values, dtype=np.int32)

    def step():
        tensor.stage_write(1, 3, given)
        tensor.apply_write()

    step()
    step()
    assert quick(step, gpu) < 5e-3
    assert gpu.asnumpy(tensor.gpu)[1, 3 : 3 + values].tolist() == given.tolist()


def test_pools_return_at_once_behind_a_stall(gpu):
    pool = gpu.make(UvaBufferPool, 5000, "i4")
    out = gpu.asarray(np.zeros(5000, np.int32))
    given = np.arange(5000, dtype=np.int32)

    def copy():
        pool.copy_to_gpu(given, out=out)

    def view():
        pool.copy_to_uva(given)
        pool.fence()

    for call in (copy, view):
        call()
        call()
        assert quick(call, gpu) < 5e-3


def test_a_lost_launch_is_reported_and_does_not_hang(uva_gpu):
    """A slot whose kernel never ran: the wait looks at the stream now and then, and says so."""
    tensor = uva_gpu.make(StagedWriteTensor, (3, 1), "i4", max_concurrency=1)
    good = list(tensor._path._launch)
    tensor._path._launch[:] = [lambda _stream: None] * len(good)
    tensor.stage_write_elem(0, 1)
    tensor.apply_write()
    tensor._path._launch[:] = good
    tensor.stage_write_elem(1, 2)
    with pytest.raises(RuntimeError, match="fence word never came"):
        tensor.apply_write()
    assert tensor.num_staged == 1


def test_many_long_generations_on_a_busy_device(gpu):
    """The copy engine, other streams and the tables' stream at once."""
    tensor = gpu.make(StagedWriteTensor, (4, 70_000), "f4", max_concurrency=3)
    other = gpu.new_stream()
    outs = [gpu.asarray(np.full((4, 70_000), POISON, np.float32)) for _ in range(12)]
    want = np.zeros((4, 70_000), np.float32)
    wanted = []
    for g, out in enumerate(outs):
        gpu.stall(2, other)
        gpu.stall(1)
        length = (65_537, 3, 12_345)[g % 3]
        tensor.stage_write(g % 4, g, distinct_values("f4", length, g))
        want[g % 4, g : g + length] = distinct_values("f4", length, g)
        tensor.apply_write()
        gpu.read(tensor.gpu, out)
        wanted.append(want.copy())
    for g, out in enumerate(outs):
        assert_tables_equal(gpu.asnumpy(out), wanted[g], group=g)
