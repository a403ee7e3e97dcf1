"""A server's step: 8 groups, 256 requests, one new KV block each; then gather and slot mapping."""

from __future__ import annotations

from typing import Any

from . import common

GROUPS, REQUESTS = 8, 256


def synchronizer(device: str) -> Any:
    """Take a core and return what waits for the device; NotImplementedError where it is not there."""
    stream = None if device == "host" else common.require_cuda().streams["non-blocking"]
    common.pick_core()
    if stream is None:
        return common.nothing
    stream.use()
    return stream.synchronize


class Append:
    """Stage and apply new block ids, by a call a request from lists and by one batch from arrays."""

    params = (("call", "batch"), ("host", "cuda"))
    param_names = ("way", "device")

    def setup(self, way: str, device: str) -> None:
        self.synchronize = synchronizer(device)
        self.work = common.once(
            ("append", way, device),
            lambda: common.warmed(common.append_blocks(GROUPS, REQUESTS, way, device=device)),
        )

    def time_synchronized(self, way: str, device: str) -> None:
        """Stage, apply, synchronize. Synchronized on CUDA."""
        self.work.both()
        self.synchronize()

    def track_enqueue(self, way: str, device: str) -> float:
        """Measure the host time of apply. Not synchronized while timed."""
        return common.enqueue_us(self.work, self.synchronize, 100)

    track_enqueue.unit = "us"  # type: ignore[attr-defined]


class PrepareStep:
    """Gather and slot mapping in one launch, its inputs on the device or in NumPy arrays."""

    params = (("device", "host"), ("host", "cuda"))
    param_names = ("inputs", "device")

    def setup(self, inputs: str, device: str) -> None:
        self.synchronize = synchronizer(device)
        self.work = common.once(
            ("prepare", inputs, device),
            lambda: common.warmed(common.prepare_step(GROUPS, REQUESTS, inputs, device=device)),
        )

    def time_synchronized(self, inputs: str, device: str) -> None:
        """Prepare one decode step and synchronize. Synchronized on CUDA."""
        self.work.apply()
        self.synchronize()

    def track_enqueue(self, inputs: str, device: str) -> float:
        """Measure the host time of the call. Not synchronized while timed."""
        return common.enqueue_us(self.work, self.synchronize)

    track_enqueue.unit = "us"  # type: ignore[attr-defined]
