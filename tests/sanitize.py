"""Run CUDA tests for compute-sanitizer: a short selection, or a part of most of them.

`make sanitize`, or

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python tests/sanitize.py [PART/PARTS]

Every allocation is one of its own, since CuPy's pools would hide a step over its end. After CUPY_STAGED_SANITIZE
seconds (80) no further test starts. With PART/PARTS (as 0/16) it is that share of the tests of a non-blocking stream
(see UNFIT for those left out), for many processes side by side. No kernel uses shared memory, so there is nothing for
racecheck; slot races are what the twins show.
"""

import os
import sys
import time

import cupy
import pytest

SECONDS = float(os.environ.get("CUPY_STAGED_SANITIZE", "80"))
# Every kernel, launch shape, item size and way of copying: the tests are slower by an order of magnitude here.
SELECTION = " or ".join(
    [
        "test_every_launch_shape_is_taken",
        "(test_many_long_writes and (129 or 1057))",
        "test_a_target_that_starts_at_column_one",
        "(test_many_one_value_writes and (993 or 16369))",
        "test_random_steps",
        "test_out",
        "test_dummies_are_padding",
        "test_negative_block_ids",
        "(test_one_copy_for_every_change and 513)",
        "test_counts_after_an_append",
        "test_two_views_in_one_kernel",
        "test_copies_behind_a_stall",
        "test_a_batch_is_the_same_as_its_writes",
    ]
)
# Other processes; work that would take minutes here; and what needs CuPy's pool: an allocation of its own waits for a
# stalled stream, breaks a capture in global mode, and is not handed out again.
UNFIT = " or ".join(
    [
        *("test_process", "test_addressing", "test_soak", "test_replay", "test_cli", "test_examples", "test_stateful"),
        *("test_wait_for_orders_one_way", "test_the_stream_given_beats_the_current_one"),
        *("test_a_capture_on_another_thread_survives_steady_steps", "test_twin_pinned_memory_recycled"),
    ]
)


class Deadline:
    """Take every `parts`-th test from `part` on, start none after the time is over, and say how many ran."""

    def __init__(self, part, parts):
        self.part, self.parts = part, parts
        self.begin, self.ran, self.left = time.monotonic(), 0, 0

    @pytest.hookimpl(trylast=True)  # after `-k`
    def pytest_collection_modifyitems(self, config, items):
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % self.parts != self.part])
        items[:] = items[self.part :: self.parts]

    def pytest_runtest_setup(self, item):
        if time.monotonic() - self.begin > SECONDS:
            self.left += 1
            pytest.skip("out of time")
        self.ran += 1

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(f"{self.ran} tests under the sanitizer, {self.left} left out for time")


def main():
    cupy.cuda.set_allocator(None)
    cupy.cuda.set_pinned_memory_allocator(None)
    os.environ["CUPY_STAGED_REQUIRE_GPU"] = "1"
    places, which, part, parts = "(cuda-nonblocking or nouva-nonblocking)", SELECTION, 0, 1
    if len(sys.argv) > 1:
        which, (part, parts) = f"not ({UNFIT})", map(int, sys.argv[1].split("/"))
    here = os.path.dirname(os.path.abspath(__file__))
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "-k", f"{places} and ({which})", here]
    return pytest.main(options, plugins=[Deadline(part, parts)])


if __name__ == "__main__":
    sys.exit(main())
