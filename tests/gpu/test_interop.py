"""Other libraries read a table in place, and their streams and allocators are taken as CuPy's own."""

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from cupy_staged import BlockTables, FusedStagedWriter, StagedWriteTensor, UvaBackedTensor, UvaBufferPool

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))
PACKAGES = {
    "cuda_core_stream": "cuda.core",
    "jax_dlpack": "jax",
    "numba_cuda_kernel": "numba_cuda",
    "torch_dlpack": "torch",
}
ROWS, LENGTH = 4096, 32  # Numba warns of a grid that is small for the device

SUM_ROWS = r"""
extern "C" __global__ void sum_rows(const int* table, long long length, long long num_rows, long long* sums) {
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (row >= num_rows) return;
    long long sum = 0;
    for (long long column = 0; column < length; ++column) sum += table[row * length + column];
    sums[row] = sum;
}
"""


class ProtocolStream:
    """Nothing but the CUDA stream protocol."""

    def __init__(self, stream):
        self._stream = stream

    def __cuda_stream__(self):
        return 0, self._stream.ptr


def is_installed(name):
    return all(importlib.util.find_spec(".".join(name.split(".")[:n])) for n in range(1, name.count(".") + 2))


def need_package(name):
    if not is_installed(name):
        pytest.skip(f"{name} is not installed")
    if name == "numba_cuda":
        code = "from numba import cuda; cuda.jit('void(int32[:])')(lambda x: None)"
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"numba-cuda does not work with this NumPy: {done.stderr.strip().splitlines()[-1]}")


def written(gpu, rng, table):
    """Stage some rows; returns what the table then holds."""
    model = np.zeros(table.shape, table.dtype)
    for row in rng.integers(0, table.shape[0], 20).tolist():
        model[row] = rng.integers(0, 1000, table.shape[1]).astype(table.dtype)
        table.stage_write(row, 0, model[row])
    return model


def test_a_raw_kernel(gpu):
    table = gpu.make(StagedWriteTensor, (ROWS, LENGTH), "int32")
    model = written(gpu, np.random.default_rng(0), table)
    sums = gpu.asarray(np.zeros(ROWS, np.int64))
    kernel = gpu.cupy.RawKernel(SUM_ROWS, "sum_rows")
    gpu.stall(20)
    table.apply_write()
    kernel((ROWS // 128,), (128,), (table.gpu, np.int64(LENGTH), np.int64(ROWS), sums))
    assert np.array_equal(gpu.asnumpy(sums), model.sum(axis=1))


def test_a_numba_kernel(gpu):
    need_package("numba_cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        from numba import cuda

    @cuda.jit
    def twice(table, out):
        row, column = cuda.grid(2)
        if row < table.shape[0] and column < table.shape[1]:
            out[row, column] = 2 * table[row, column]

    table = gpu.make(StagedWriteTensor, (ROWS, LENGTH), "int32")
    out = gpu.asarray(np.zeros((ROWS, LENGTH), np.int32))
    seen, result = cuda.as_cuda_array(table.gpu), cuda.as_cuda_array(out)
    assert seen.__cuda_array_interface__["data"][0] == gpu.address(table.gpu)
    stream = cuda.external_stream(gpu.stream.ptr)
    twice[(ROWS // 8, LENGTH // 32), (8, 32), stream](seen, result)  # compiled before the stream is stalled
    model = written(gpu, np.random.default_rng(1), table)
    gpu.stall(20)
    table.apply_write()
    twice[(ROWS // 8, LENGTH // 32), (8, 32), stream](seen, result)
    assert np.array_equal(gpu.asnumpy(out), 2 * model)


def test_torch_takes_a_table_without_a_copy(gpu):
    need_package("torch")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("this torch is built without CUDA")
    table = gpu.make(StagedWriteTensor, (ROWS, LENGTH), "int32")
    ptr = gpu.stream.ptr
    with torch.cuda.stream(torch.cuda.ExternalStream(ptr) if ptr else torch.cuda.default_stream()):
        shared = torch.from_dlpack(table.gpu)
        assert shared.data_ptr() == gpu.address(table.gpu)
        model = written(gpu, np.random.default_rng(2), table)
        gpu.stall(20)
        table.apply_write()
        found = (2 * shared).cpu().numpy()
    assert np.array_equal(found, 2 * model)


def test_a_torch_stream_is_taken_as_a_stream(gpu):
    need_package("torch")
    import torch

    if not torch.cuda.is_available() or not hasattr(torch.cuda.Stream, "__cuda_stream__"):
        pytest.skip("this torch has no CUDA, or streams without __cuda_stream__ (before 2.10)")
    table = gpu.make(StagedWriteTensor, (ROWS, LENGTH), "int32")
    shared, stream = torch.from_dlpack(table.gpu), torch.cuda.Stream()
    model = written(gpu, np.random.default_rng(3), table)
    table.apply_write(stream=stream)
    with torch.cuda.stream(stream):
        found = shared.clone().cpu().numpy()
    assert np.array_equal(found, model)


def test_jax_takes_a_table_without_a_copy(gpu, monkeypatch):
    need_package("jax")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("this jax is built without CUDA")
    table = gpu.make(StagedWriteTensor, (ROWS, LENGTH), "int32")
    rng = np.random.default_rng(4)
    model = written(gpu, rng, table)
    gpu.stall(20)
    table.apply_write()
    shared = jax.dlpack.from_dlpack(table.gpu)  # orders JAX's stream behind the current one
    assert shared.unsafe_buffer_pointer() == gpu.address(table.gpu)
    assert np.array_equal(np.asarray(2 * shared), 2 * model)


@pytest.fixture(params=["protocol", "cuda.core"])
def foreign_streams(request, gpu):
    """Two streams of another library, and the CuPy streams that they are."""
    if request.param == "protocol":
        streams = [gpu.new_stream() for _ in range(2)]
        return [ProtocolStream(s) for s in streams], streams
    need_package("cuda.core")
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    streams = [device.create_stream() for _ in range(2)]
    return streams, [gpu.cupy.cuda.Stream.from_external(s) for s in streams]


def test_a_foreign_stream_carries_an_apply(gpu, foreign_streams):
    (stream, _), (same, _) = foreign_streams
    table = gpu.make(StagedWriteTensor, (8, 4), "int32")
    gpu.stall(30, same)
    table.stage_write(1, 0, [5, 6])
    table.apply_write(stream=stream)
    with gpu.using(same):
        assert gpu.cupy.asnumpy(table.gpu)[1].tolist() == [5, 6, 0, 0]


def test_a_foreign_stream_is_waited_for(gpu, foreign_streams):
    (stream, other), (same, other_same) = foreign_streams
    table = gpu.make(StagedWriteTensor, (8, 4), "int32")
    with gpu.using(same):
        gpu.stall(30, same)
        table.gpu[1] = 9  # a write of the caller's own, queued on the first stream
    table.stage_write(1, 0, [5, 6])
    table.apply_write(stream=other, wait_for=[stream])
    with gpu.using(other_same):
        assert gpu.cupy.asnumpy(table.gpu)[1].tolist() == [5, 6, 9, 9]


def test_a_foreign_stream_goes_wherever_a_stream_goes(gpu, foreign_streams):
    (stream, other), (same, _) = foreign_streams
    tensors = [gpu.make(StagedWriteTensor, (4, 4), "int32") for _ in range(2)]
    writer = gpu.fuse(FusedStagedWriter, tensors)
    tables = gpu.make(BlockTables, [16, 32], 4, 64, [4, 2])
    pool = gpu.make(UvaBufferPool, 8, "int32")
    published = gpu.make(UvaBackedTensor, 8, "int32")
    tensors[1].stage_write(3, 1, [7])
    writer.apply(stream=stream, wait_for=other)
    writer.refresh_pointers(stream)
    tables.append_block_ids(2, [[5], [6]], overwrite=True)
    tables.apply_staged_writes(stream, wait_for=(other,))
    tables.refresh_pointers(stream)
    view = pool.copy_to_uva([1, 2], stream=stream)
    out = pool.copy_to_gpu([3, 4], stream=stream)
    published.np[:] = 8
    last = published.copy_to_uva(stream=stream)
    with gpu.using(same):
        found = [
            gpu.cupy.asnumpy(a).tolist() for a in (tensors[1].gpu[3], tables.block_tables[1].gpu[2], view, out, last)
        ]
    pool.fence(stream)
    published.fence(stream)
    assert found == [[0, 7, 0, 0], [6, 0], [1, 2], [3, 4], [8] * 8]


@pytest.mark.parametrize("stream", [7, "stream", object()])
def test_what_is_no_stream_is_refused(gpu, stream):
    table = gpu.make(StagedWriteTensor, (4, 4), "int32")
    table.stage_write(0, 0, [1])
    with pytest.raises(TypeError, match="__cuda_stream__"):
        table.apply_write(stream=stream)
    assert table.num_staged == 1


@pytest.mark.parametrize("kind", ["MemoryPool", "MemoryAsyncPool"])
def test_tables_come_from_the_allocator_that_is_set(gpu, kind):
    if kind == "MemoryAsyncPool" and not gpu.runtime.deviceGetAttribute(gpu.runtime.cudaDevAttrMemoryPoolsSupported, 0):
        pytest.skip("the device has no stream-ordered allocator")
    pool = getattr(gpu.cupy.cuda, kind)()
    before = pool.used_bytes()
    with gpu.cupy.cuda.using_allocator(pool.malloc):
        table = gpu.make(StagedWriteTensor, (ROWS, LENGTH), "int32")
    table.reserve(20, 20 * LENGTH)
    model = written(gpu, np.random.default_rng(5), table)
    table.apply_write()
    taken = pool.used_bytes()
    assert taken - before >= ROWS * LENGTH * 4
    assert np.array_equal(gpu.asnumpy(table.gpu), model)
    for _ in range(20):
        written(gpu, np.random.default_rng(5), table)
        table.apply_write()
    assert pool.used_bytes() == taken


def test_named_ranges_around_the_calls(gpu):
    from cupyx.profiler import profile, time_range

    table = gpu.make(StagedWriteTensor, (4, 4), "int32")
    with profile():
        with time_range("stage"):
            table.stage_write(0, 1, [3])
        with time_range("apply"):
            table.apply_write()
    assert gpu.asnumpy(table.gpu)[0].tolist() == [0, 3, 0, 0]


@pytest.mark.parametrize("uva_gpu", ["cuda-null"], indirect=True)  # the process has streams of its own
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_the_example(uva_gpu, example, tmp_path):
    package = PACKAGES.get(example.stem)
    if package is not None:
        need_package(package)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CUPY_STAGED_", "PYTEST_"))}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, str(example)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout.startswith("nothing to show: this example needs a GPU")
    assert done.stdout.strip()
