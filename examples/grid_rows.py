"""Heat on a plate: the host moves burners and opens windows at every step, and a kernel simulates in between.

Two grids are written in sparse rows, where the heat comes in and which cells are held at a fixed temperature, and both
travel in one launch. The same program runs on the host in NumPy; on the GPU it is checked against that.
"""

import numpy as np

import cupy_staged as cs

ROWS, COLUMNS, STEPS = 96, 128, 200
FREE = np.float32(-1)  # a cell that is not held

SOURCE = r"""
extern "C" __global__ void diffuse(
    const float* __restrict__ before,  // [rows, columns] temperature
    const float* __restrict__ heat,    // [rows, columns] what a cell gets in one step
    const float* __restrict__ held,    // [rows, columns] fixed temperature, or -1
    int rows, int columns,
    float* __restrict__ after)         // [rows, columns]
{
    int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= rows || column >= columns) return;
    long long at = (long long)row * columns + column;
    if (held[at] >= 0) { after[at] = held[at]; return; }
    float up = before[row > 0 ? at - columns : at], down = before[row < rows - 1 ? at + columns : at];
    float left = before[column > 0 ? at - 1 : at], right = before[column < columns - 1 ? at + 1 : at];
    after[at] = before[at] + 0.2f * (up + down + left + right - 4.0f * before[at]) + heat[at];
}
"""


def diffuse_on_host(before, heat, held, after):
    """Do the same step in NumPy."""
    edge = np.pad(before, 1, mode="edge")
    around = edge[:-2, 1:-1] + edge[2:, 1:-1] + edge[1:-1, :-2] + edge[1:-1, 2:]
    after[...] = np.where(held >= 0, held, before + np.float32(0.2) * (around - 4 * before) + heat)


def changes(step):
    """Yield what the host changes before a step: (grid, row, column, values) each."""
    row = step % (ROWS - 8)
    yield "heat", row, 40, np.zeros(16, np.float32)  # the burner moves on by one row
    yield "heat", row + 1, 40, np.full(16, 0.5, np.float32)
    if step % 25 == 0:  # a window at the right edge opens or closes
        yield "held", 10 + step // 25, COLUMNS - 6, np.full(6, 0.0 if step % 50 == 0 else FREE, np.float32)


def main() -> None:
    """Simulate, with the grids on the GPU where there is one, and compare with NumPy."""
    heat, held = (cs.StagedWriteTensor((ROWS, COLUMNS), "float32") for _ in range(2))
    grids, writer = {"heat": heat, "held": held}, cs.FusedStagedWriter([heat, held])
    starts, ends = np.zeros(ROWS, int), np.arange(1, ROWS + 1) * COLUMNS
    held.stage_writes(np.arange(ROWS), starts, np.full(ROWS * COLUMNS, FREE), ends)
    on_gpu = not isinstance(heat.gpu, np.ndarray)
    if on_gpu:
        import cupy as xp

        kernel = xp.RawKernel(SOURCE, "diffuse")
        sizes = (
            np.int32(ROWS),
            np.int32(COLUMNS),
        )  # wrapped: a kernel argument must have the width that it is declared with

        def diffuse(before, after):
            kernel((COLUMNS // 32, ROWS // 8), (32, 8), (before, heat.gpu, held.gpu, *sizes, after))
    else:
        xp = np

        def diffuse(before, after):
            diffuse_on_host(before, heat.gpu, held.gpu, after)

    before, after = xp.zeros((2, ROWS, COLUMNS), np.float32)
    for step in range(STEPS):
        for grid, row, column, values in changes(step):
            grids[grid].stage_write(row, column, values)
        writer.apply()  # both grids, one launch, in order before the kernel
        diffuse(before, after)
        before, after = after, before

    plate = before.get() if on_gpu else before
    model = {"heat": np.zeros((ROWS, COLUMNS), np.float32), "held": np.full((ROWS, COLUMNS), FREE, np.float32)}
    was, now = np.zeros((2, ROWS, COLUMNS), np.float32)
    for step in range(STEPS):
        for grid, row, column, values in changes(step):
            model[grid][row, column : column + len(values)] = values
        diffuse_on_host(was, model["heat"], model["held"], now)
        was, now = now, was
    np.testing.assert_allclose(plate, was, rtol=1e-3, atol=1e-3)
    stats = writer.stats
    print(f"{stats.writes} row writes in {stats.launches} launches; hottest cell {plate.max():.2f}, as in NumPy")


if __name__ == "__main__":
    main()
