"""Tables come from CuPy's allocators, whichever are set: here a device pool and a pinned pool of our own, to watch.

After construction the pools stay as they are: a steady step allocates nothing. Needs a GPU.
"""

import importlib.util

import numpy as np

import cupy_staged as cs

ROWS, LENGTH, STEPS = 4096, 256, 200


def main() -> None:
    """Make a table from the two pools, step, and see that nothing more was taken."""
    probe = cs.StagedWriteTensor((1, 1), "int32")
    if importlib.util.find_spec("cupy") is None or isinstance(probe.gpu, np.ndarray):
        print("nothing to show: this example needs a GPU, and tables lie on the host")
        return
    import cupy

    device_pool, pinned_pool = cupy.cuda.MemoryPool(), cupy.cuda.PinnedMemoryPool()
    cupy.cuda.set_pinned_memory_allocator(pinned_pool.malloc)
    with cupy.cuda.using_allocator(device_pool.malloc):
        table = cs.StagedWriteTensor((ROWS, LENGTH), "float32")
        table.reserve(num_writes=8, num_values=8 * LENGTH)
    cupy.cuda.set_pinned_memory_allocator(cupy.get_default_pinned_memory_pool().malloc)

    taken, blocks = device_pool.used_bytes(), table.stats.host_allocations
    assert taken >= ROWS * LENGTH * 4
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        for row in rng.integers(0, ROWS, 8).tolist():
            table.stage_write(row, 0, rng.random(LENGTH, np.float32))
        table.apply_write()
    cupy.cuda.get_current_stream().synchronize()

    assert device_pool.used_bytes() == taken
    assert table.stats.host_allocations == blocks
    print(f"the table took {taken / 2**20:.1f} MiB from the pool; {STEPS} steps took no more, on the device or pinned")


if __name__ == "__main__":
    main()
