"""PyTorch takes a table through DLPack without a copy, and sees every later write in it.

On the GPU, both must work on one stream, or be ordered: here the writes are applied on PyTorch's stream. On the host
the same program shares the memory of a NumPy array. Needs torch, 2.10 or newer for a table on the GPU.
"""

import contextlib
import importlib.util

import numpy as np

import cupy_staged as cs

ROWS, LENGTH, STEPS = 256, 16, 20


def main() -> None:
    """Write rows, and let PyTorch multiply the table by a vector."""
    if importlib.util.find_spec("torch") is None:
        print("nothing to show: torch is not installed (pip install torch)")
        return
    import torch

    table = cs.StagedWriteTensor((ROWS, LENGTH), "float32")
    on_gpu = not isinstance(table.gpu, np.ndarray)
    if on_gpu and not torch.cuda.is_available():
        print("nothing to show: this torch is built without CUDA, and the table lies on the GPU")
        return
    stream = torch.cuda.Stream() if on_gpu else None
    model = np.zeros((ROWS, LENGTH), np.float32)
    rng = np.random.default_rng(0)
    with torch.cuda.stream(stream) if on_gpu else contextlib.nullcontext():
        shared = torch.from_dlpack(table.gpu)
        weights = torch.linspace(-1, 1, LENGTH, device=shared.device)
        for _ in range(STEPS):
            row, values = int(rng.integers(ROWS)), rng.random(LENGTH, np.float32)
            table.stage_write(row, 0, values)
            model[row] = values
            table.apply_write(stream=stream)
            scores = shared @ weights
        scores = scores.cpu().numpy()

    address = table.gpu.data.ptr if on_gpu else table.gpu.ctypes.data
    assert shared.data_ptr() == address, "PyTorch made a copy"
    np.testing.assert_allclose(scores, model @ np.linspace(-1, 1, LENGTH), atol=1e-4)
    print(f"{STEPS} steps: PyTorch ({shared.device}) read the table in place, and the scores agree with NumPy")


if __name__ == "__main__":
    main()
