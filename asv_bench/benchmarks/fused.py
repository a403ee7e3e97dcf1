"""Many groups by one launch, against one launch a group."""

from __future__ import annotations

import numpy as np

from . import common
from .apply import OnDevice

SLOTS = 16  # of 16 groups: 256 launches are queued at once


class Groups(OnDevice):
    """One write of one value in each of 1 to 16 tables, on a non-blocking stream."""

    params = ((1, 4, 16), ("fused", "one launch a group"))
    param_names = ("groups", "way")

    def setup(self, groups: int, way: str) -> None:
        self.use_gpu()
        make = common.fused if way == "fused" else common.separate
        self.work = common.once(("groups", groups, way), lambda: common.warmed(make(groups)))
        self.queued = common.once(("groups queued", groups, way), lambda: make(groups, slots=SLOTS))

    def time_synchronized(self, groups: int, way: str) -> None:
        """Stage, apply, synchronize. Synchronized."""
        self.work.both()
        self.stream.synchronize()

    def track_enqueue(self, groups: int, way: str) -> float:
        """Measure the host time of apply. Not synchronized while timed."""
        return self.enqueue_us()

    track_enqueue.unit = "us"  # type: ignore[attr-defined]

    def track_gpu(self, groups: int, way: str) -> float:
        """Measure the GPU time of one step, by events around many queued ones. Synchronized after them."""
        return float(np.median(self.gpu.gpu_samples(self.queued.both, SLOTS, self.stream)))

    track_gpu.unit = "us"  # type: ignore[attr-defined]
