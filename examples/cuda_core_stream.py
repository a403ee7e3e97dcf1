"""Streams of cuda.core, or of anything else that has `__cuda_stream__`, go wherever a CuPy stream goes.

Needs cuda-core and a GPU.
"""

import importlib.util

import numpy as np

import cupy_staged as cs


def main() -> None:
    """Apply on one cuda.core stream, and let another wait for it."""
    table = cs.StagedWriteTensor((4, 8), "int32")
    if isinstance(table.gpu, np.ndarray):
        print("nothing to show: this example needs a GPU, and the table lies on the host")
        return
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        print("nothing to show: cuda.core is not installed (pip install cuda-core)")
        return
    import cupy
    from cuda.core import Device

    device = Device()
    device.set_current()
    writer, reader = device.create_stream(), device.create_stream()

    table.stage_write(1, 2, [7, 8, 9])
    table.apply_write(stream=writer)
    with cupy.cuda.Stream.from_external(reader):
        # Later work on `reader` sees both writes: this apply waits for what is on `writer`, on the device.
        table.stage_write(2, 0, [5])
        table.apply_write(wait_for=writer)
        seen = table.gpu.copy()
    reader.sync()

    assert seen.get()[1:3].tolist() == [[0, 0, 7, 8, 9, 0, 0, 0], [5, 0, 0, 0, 0, 0, 0, 0]]
    print("two cuda.core streams, two applies, one order:", seen[1:3, :5].get().tolist())


if __name__ == "__main__":
    main()
