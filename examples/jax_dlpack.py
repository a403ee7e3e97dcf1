"""JAX takes a table through DLPack without a copy.

JAX trusts that an array never changes. So a step takes the table anew, computes, and lets go of it before the next
write: taking it costs no copy, and orders JAX's stream behind CuPy's. The way back is not ordered by DLPack: the step
ends with `block_until_ready`. Needs jax, with CUDA for a table on the GPU.
"""

import importlib.util

import numpy as np

import cupy_staged as cs

ROWS, LENGTH, STEPS = 256, 16, 20


def main() -> None:
    """Write rows, and let JAX multiply the table by a vector."""
    if importlib.util.find_spec("jax") is None:
        print("nothing to show: jax is not installed (pip install jax, or jax[cuda13] for the GPU)")
        return
    import jax

    table = cs.StagedWriteTensor((ROWS, LENGTH), "float32")
    on_gpu = not isinstance(table.gpu, np.ndarray)
    if on_gpu and jax.default_backend() != "gpu":
        print("nothing to show: this jax has no CUDA (pip install jax[cuda13]), and the table lies on the GPU")
        return
    address = table.gpu.data.ptr if on_gpu else table.gpu.ctypes.data
    score = jax.jit(lambda rows, weights: rows @ weights)
    weights = jax.numpy.linspace(-1, 1, LENGTH)

    model = np.zeros((ROWS, LENGTH), np.float32)
    rng = np.random.default_rng(0)
    copies = 0
    for _ in range(STEPS):
        row, values = int(rng.integers(ROWS)), rng.random(LENGTH, np.float32)
        table.stage_write(row, 0, values)
        model[row] = values
        table.apply_write()
        shared = jax.dlpack.from_dlpack(table.gpu)
        copies += shared.unsafe_buffer_pointer() != address
        scores = score(shared, weights).block_until_ready()
        del shared

    assert not (on_gpu and copies), "JAX made a copy"
    np.testing.assert_allclose(np.asarray(scores), model @ np.linspace(-1, 1, LENGTH), atol=1e-2)  # TF32 on the GPU
    how = f"by {copies} copies (on the host JAX shares only aligned memory)" if copies else "in place"
    print(f"{STEPS} steps: JAX ({scores.device}) read the table {how}, and the scores agree with NumPy")


if __name__ == "__main__":
    main()
