"""Names for Nsight Systems around the parts of a step: stage, pack, apply, gather and slot mapping.

    nsys profile --trace cuda,nvtx python examples/profiler_ranges.py

`named_ranges` names the library's parts while its block runs; `cupyx.profiler.time_range` names the program's own. A
program without ranges pays nothing for them. Needs CuPy; in a profile of the host backend the ranges show too.
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
    with cs.named_ranges():
        for step in range(4):
            with time_range(f"step {step}", color_id=1):
                for row in range(8):
                    tables.append_block_ids(row, [[8 * step + row], [8 * step + row]], overwrite=step == 0)
                tables.apply_staged_writes()
                block_tables, slots = tables.prepare_step(rows, starts, np.full(8, 16 * step), 8, 8)

    assert slots.tolist()[0] == [16 * (24 + row) for row in range(8)]
    print(f"4 steps in named ranges; the last one mapped {slots.shape[1]} tokens in {len(block_tables)} groups")


if __name__ == "__main__":
    main()
