"""A replay on a GPU: eager and by captured graphs, compared with the plain NumPy model after every step."""

import pytest

from cupy_staged.replay import replay
from cupy_staged.scheduler import generate_trace

SIZES = {"block_sizes": [4, 16], "num_blocks": [2500, 640], "max_reqs": 12, "max_tokens": 96, "max_model_len": 9000}
RANKS = {"cp_size": 2, "cp_rank": 1, "cp_interleave": 2, "kernel_block_sizes": [2, 16]}


@pytest.mark.parametrize("options", [{}, RANKS], ids=["alone", "ranks"])
@pytest.mark.parametrize("graph", [False, True])
def test_replay_is_equal_to_the_model(gpu, graph, options):
    result = replay(generate_trace(12, seed=1), device="cuda", graph=graph, **SIZES, **options)
    assert (result.requests, result.steps_checked) == (12, result.steps)
    assert (result.graphs > 0) == graph
    assert result.late_fences == 0


def test_unchecked_and_sampled(gpu):
    for check in ("none", "sample"):
        for graph in (False, True):
            assert replay(generate_trace(6), device="cuda", check=check, graph=graph, **SIZES).requests == 6
