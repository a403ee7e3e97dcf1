"""A raw CuPy kernel reads a table that staged writes change at every step; stream order is all the order there is.

Needs a GPU.
"""

import numpy as np

import cupy_staged as cs

ROWS, LENGTH, STEPS = 1000, 64, 100

SOURCE = r"""
extern "C" __global__ void sum_rows(
    const int* __restrict__ table,  // [num_rows, length]
    long long length,
    long long num_rows,
    long long* __restrict__ sums)   // [num_rows]
{
    for (long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x; row < num_rows;
         row += (long long)gridDim.x * blockDim.x) {
        long long sum = 0;
        for (long long column = 0; column < length; ++column) sum += table[row * length + column];
        sums[row] = sum;
    }
}
"""


def main() -> None:
    """Stage, apply, launch, a hundred times, and compare the last sums with NumPy."""
    table = cs.StagedWriteTensor((ROWS, LENGTH), "int32")
    if isinstance(table.gpu, np.ndarray):
        print("nothing to show: this example needs a GPU, and the table lies on the host")
        return
    import cupy

    sum_rows = cupy.RawKernel(SOURCE, "sum_rows")
    sums = cupy.zeros(ROWS, np.int64)
    model = np.zeros((ROWS, LENGTH), np.int32)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        row, start = int(rng.integers(ROWS)), int(rng.integers(LENGTH - 8))
        values = rng.integers(0, 1000, 8, np.int32)
        table.stage_write(row, start, values)
        model[row, start : start + 8] = values
        table.apply_write()  # on the current stream, like the kernel: no event, no wait
        sum_rows((8,), (128,), (table.gpu, np.int64(LENGTH), np.int64(ROWS), sums))

    assert np.array_equal(sums.get(), model.sum(axis=1))
    print(f"{STEPS} steps, {table.stats.launches} launches, {table.stats.waits} waits; the sums agree with NumPy")


if __name__ == "__main__":
    main()
