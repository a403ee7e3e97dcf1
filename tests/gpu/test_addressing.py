"""64-bit addresses, scalars and entry points that only a GPU can show."""

import numpy as np
import pytest
from common import POISON, random_values

from cupy_staged import FusedStagedWriter, StagedWriteTensor
from cupy_staged.testing import assert_tables_equal


@pytest.fixture
def room(gpu):
    """Give large blocks back to the device before and after."""
    gpu.cupy.get_default_memory_pool().free_all_blocks()
    yield gpu
    gpu.synchronize()
    gpu.cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("groups", [1, 2])
def test_int32_past_31_bits_of_elements(room, groups):
    """Offset 2 500 000 007 in elements, 10 000 000 028 in bytes, by both entry points; short writes and long ones."""
    tensors = [room.make(StagedWriteTensor, (50_001, 50_000), "i4") for _ in range(groups)]
    writer = room.fuse(FusedStagedWriter, tensors)
    rng = np.random.default_rng(1)
    short, long = random_values(rng, "i4", 3), random_values(rng, "i4", 20_000)
    for tensor in tensors:
        tensor.stage_write(50_000, 7, short)
        tensor.stage_write(50_000, 15_001, long)
        tensor.stage_write(42_950, 1, long)
    writer.apply()
    for tensor in tensors:
        want = np.zeros((2, 50_000), np.int32)
        want[1, 7:10], want[1, 15_001:35_001], want[0, 1:20_001] = short, long, long
        assert_tables_equal(room.asnumpy(tensor.gpu[[42_950, 50_000]]), want)
        assert int(room.cupy.count_nonzero(tensor.gpu)) == np.count_nonzero(want)


@pytest.mark.parametrize("dtype", ["u1", "f2", "i4", "f8", "c16"])
def test_a_target_that_starts_at_column_one(gpu, dtype):
    """Its base is aligned to an item and to no more; its neighbours stay."""
    rng = np.random.default_rng(2)
    for column in (1, 2, 3, 5):
        whole = random_values(rng, dtype, 6 * 2011).reshape(6, 2011)
        array = gpu.asarray(whole)
        tensor = gpu.make(StagedWriteTensor, (6, 2000), dtype, target=array[:, column : column + 2000])
        for row, (start, length) in enumerate(((0, 2000), (1, 17), (3, 1999 - 3), (1999, 1), (8, 100))):
            values = random_values(rng, dtype, length)
            tensor.stage_write(row, start, values)
            whole[row, column + start : column + start + length] = values
        tensor.apply_write()
        assert_tables_equal(gpu.asnumpy(array), whole)


def test_scalar_arguments_arrive_whole(gpu):
    """What the launchers pass: addresses as ints, sizes as wrapped scalars."""
    source = (
        'extern "C" __global__ void echo(long long a, unsigned int b, unsigned long long c, const long long* p, '
        "long long* out) { out[0] = a; out[1] = b; out[2] = (long long)c; out[3] = *p; }"
    )
    echo = gpu.cupy.RawKernel(source, "echo")
    given = gpu.asarray(np.array([2**40 + 3]))
    out = gpu.asarray(np.full(4, POISON, np.int64))
    echo((1,), (1,), (2**40 + 3, np.uint32(2**32 - 5), np.uint64(2**40 + 3), given.data.ptr, out))
    assert gpu.asnumpy(out).tolist() == [2**40 + 3, 2**32 - 5, 2**40 + 3, 2**40 + 3]


@pytest.mark.parametrize("kind", ["uva", "mixed"])
def test_a_uva_target_never_makes_a_copy(uva_gpu, monkeypatch, kind):
    """The copy function fails, and everything works."""
    tensors = [uva_gpu.make(StagedWriteTensor, (5, 60_000), "i4", uva_instead_of_gpu=True) for _ in range(2)]
    if kind == "mixed":
        tensors[1] = uva_gpu.make(StagedWriteTensor, (5, 60_000), "i4", contents="uva")
    writer = uva_gpu.fuse(FusedStagedWriter, tensors)

    def fail(*_args):
        raise AssertionError("a host-to-device copy")

    with monkeypatch.context() as patch:
        patch.setattr(uva_gpu.runtime, "memcpyAsync", fail)
        for step in range(6):
            for tensor in tensors:
                tensor.stage_write(step % 5, 0, [step] * 50_000)
                tensor.stage_write(4, step, [step])
            writer.apply()
            tensors[0].stage_write(3, 7, [70 + step])
            tensors[0].apply_write()
    uva_gpu.synchronize()
    for tensor in tensors:
        assert uva_gpu.asnumpy(tensor.gpu)[0, :3].tolist() == [5, 5, 5]
    assert tensors[0].np[3, 7] == 75
    assert writer.stats.copies == 0


@pytest.mark.parametrize("values", [1, 3000, 100_000])
def test_contents_by_copy_make_exactly_one(gpu, values):
    tensor = gpu.make(StagedWriteTensor, (2, 100_000), "i4", contents="h2d")
    tensor.reserve(2, 200_000)
    for step in range(3):
        tensor.stage_write(1, 0, np.full(values, step + 1, np.int32))
        tensor.stage_write(0, step, [step])
        with gpu.copies() as copies:
            tensor.apply_write()
        assert len(copies) == 1
        assert copies[0] >= 4 * values
        assert gpu.asnumpy(tensor.gpu)[1, :values].tolist() == [step + 1] * values
    assert tensor.stats.copies == tensor.stats.launches == 3


def test_one_launch_reaches_the_device(uva_gpu, monkeypatch):
    """Counted where it leaves the library, not in its own statistics."""
    launches = []
    original = uva_gpu.runtime.graphLaunch

    def launch(graph, stream):
        launches.append(graph)
        original(graph, stream)

    monkeypatch.setattr(uva_gpu.runtime, "graphLaunch", launch)
    tensors = [uva_gpu.make(StagedWriteTensor, (4, 100), "i4") for _ in range(8)]
    writer = uva_gpu.fuse(FusedStagedWriter, tensors)
    launches.clear()
    for group, tensor in enumerate(tensors):
        tensor.stage_write(1, group, [group] * 50)
        tensor.stage_write(2, group, [group])
    writer.apply()
    assert len(launches) == 1
    assert [int(uva_gpu.asnumpy(t.gpu)[1, 49]) for t in tensors] == list(range(8))
