"""A Numba-CUDA kernel reads a table that staged writes change.

Numba takes a CuPy array as it is, and by default waits on the host for the array's stream each time that it does. So
the array is wrapped once, and the kernel is launched on CuPy's stream. Needs numba-cuda and a GPU.
"""

import importlib.util

import numpy as np

import cupy_staged as cs

ROWS, LENGTH, STEPS = 4096, 32, 20


def main() -> None:
    """Scale each row by the factor in its first column."""
    table = cs.StagedWriteTensor((ROWS, LENGTH), "float32")
    if isinstance(table.gpu, np.ndarray):
        print("nothing to show: this example needs a GPU, and the table lies on the host")
        return
    if importlib.util.find_spec("numba_cuda") is None:
        print("nothing to show: numba-cuda is not installed (pip install numba-cuda)")
        return
    import cupy
    from numba import cuda

    @cuda.jit
    def scale_rows(table, out):
        row, column = cuda.grid(2)
        if row < table.shape[0] and column < table.shape[1]:
            out[row, column] = table[row, 0] * table[row, column]

    out = cupy.zeros((ROWS, LENGTH), np.float32)
    seen, result = cuda.as_cuda_array(table.gpu), cuda.as_cuda_array(out)  # the same memory, wrapped once
    stream = cuda.external_stream(cupy.cuda.get_current_stream().ptr)
    model = np.zeros((ROWS, LENGTH), np.float32)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        row, values = int(rng.integers(ROWS)), rng.random(LENGTH, np.float32)
        table.stage_write(row, 0, values)
        model[row] = values
        table.apply_write()
        scale_rows[(ROWS // 8, LENGTH // 32), (8, 32), stream](seen, result)

    assert np.array_equal(out.get(), model[:, :1] * model)
    assert seen.__cuda_array_interface__["data"][0] == table.gpu.data.ptr
    print(f"{STEPS} steps: the Numba kernel read {ROWS} × {LENGTH} values in place, and they agree with NumPy")


if __name__ == "__main__":
    main()
