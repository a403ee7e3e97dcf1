"""Names for Nsight Systems around the parts of a step: stage, apply, gather and slot mapping.

    nsys profile --trace cuda,nvtx python examples/profiler_ranges.py

`cupyx.profiler.time_range` marks host time; the profile shows below it what it launched. A program without ranges pays
nothing for them. Needs CuPy; in a profile of the host backend the ranges show too.
"""

import importlib.util

import numpy as np

import cupy_staged as cs


def main() -> None:
    """Run a few steps of block tables with named parts."""
    if importlib.util.find_spec("cupy") is None:
        print("nothing to show: cupy is not installed (pip install 'cupy-staged[cuda13]', or cuda12)")
        return
    from cupyx.profiler import time_range

    with time_range("warm-up", color_id=0):
        cs.warmup()
        tables = cs.BlockTables([16, 32], max_num_reqs=8, max_num_batched_tokens=64, max_num_blocks_per_group=[8, 4])
    rows = np.arange(8, dtype=np.int32)
    starts = np.arange(9, dtype=np.int32)
    for step in range(4):
        with time_range(f"step {step}", color_id=1):
            with time_range("stage", color_id=2):
                for row in range(8):
                    tables.append_block_ids(row, [[8 * step + row], [8 * step + row]], overwrite=step == 0)
            with time_range("apply", color_id=3):
                tables.apply_staged_writes()
            with time_range("gather and slot mapping", color_id=4):
                block_tables, slots = tables.prepare_step(rows, starts, np.full(8, 16 * step), 8, 8)

    assert slots.tolist()[0] == [16 * (24 + row) for row in range(8)]
    print(f"4 steps in named ranges; the last one mapped {slots.shape[1]} tokens in {len(block_tables)} groups")


if __name__ == "__main__":
    main()
