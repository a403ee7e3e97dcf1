"""A generated serving trace driven through BlockTables, 3 groups; nothing is compared, so nothing waits."""

from __future__ import annotations

import importlib.util
from typing import Any

from . import common

REQUESTS = 200


def run(device: str) -> Any:
    """Replay the trace."""
    from cupy_staged.replay import replay
    from cupy_staged.scheduler import generate_trace

    return replay(generate_trace(REQUESTS), block_sizes=(16, 16, 32), device=device, check="none")


class Replay:
    """200 requests. The device is not synchronized between steps."""

    params = ("host", "cuda")
    param_names = ("device",)

    def setup(self, device: str) -> None:
        if importlib.util.find_spec("cupy_staged.replay") is None:
            raise NotImplementedError("no replay in this version")
        if device == "cuda":
            common.require_cuda()
        self.found = common.once(("replay", device), lambda: (run(device), run(device))[1])  # the first one compiles

    def track_steps_per_second(self, device: str) -> float:
        """Measure throughput, the trace's own scheduler included. Not synchronized."""
        return float(self.found.steps / self.found.seconds)

    track_steps_per_second.unit = "steps/s"  # type: ignore[attr-defined]

    def track_apply_p50(self, device: str) -> float:
        """Measure the median host time of apply. Not synchronized."""
        return float(self.found.apply_us.p50)

    track_apply_p50.unit = "us"  # type: ignore[attr-defined]

    def track_apply_p99(self, device: str) -> float:
        """Measure the 99th percentile of the host time of apply. Not synchronized."""
        return float(self.found.apply_us.p99)

    track_apply_p99.unit = "us"  # type: ignore[attr-defined]

    def track_launches(self, device: str) -> int:
        """Count kernel launches. Not synchronized."""
        return int(self.found.launches)

    track_launches.unit = "launches"  # type: ignore[attr-defined]

    def peakmem_replay(self, device: str) -> None:
        """Measure peak host memory of the process after two replays. Not synchronized."""
