"""Staging and packing on the host backend: no device, nothing to synchronize."""

from __future__ import annotations

from . import common


class Staging:
    """One `stage_write` from a list or an array; the log is emptied after 4096 values. No device."""

    params = ((1, 4096, 65536), ("list", "ndarray"))
    param_names = ("values", "form")

    def setup(self, values: int, form: str) -> None:
        common.pick_core()
        self.work = common.once(
            ("staging", values, form), lambda: common.warmed(common.one_write(values, form, device="host"))
        )
        self.calls = max(4096 // values, 1)

    def time_stage(self, values: int, form: str) -> None:
        """Stage 4096 values (65536 in one call), then forget them; divide by the calls for one. No device."""
        for _ in range(self.calls):
            self.work.stage()
        self.work.owner.clear_staged_writes()


class Writes:
    """Writes of one value by a call each, and by one batch: in ascending or shuffled rows, rows twice, cells twice.

    No device.
    """

    params = ((1, 1024), ("call", "batch", "shuffled", "twice", "overlapping"))
    param_names = ("writes", "way")

    def setup(self, writes: int, way: str) -> None:
        common.pick_core()
        order = way if way in ("shuffled", "twice", "overlapping") else "ascending"
        self.work = common.once(
            ("writes", writes, way),
            lambda: common.warmed(
                common.many_writes(writes, "call" if way == "call" else "batch", order, device="host")
            ),
        )

    def time_stage_and_pack(self, writes: int, way: str) -> None:
        """Stage, pack, and apply by the host's stand-in for the kernel. No device."""
        self.work.both()


class Packed:
    """What one apply puts on the bus, which has no noise. No device: the packer is the same everywhere."""

    params = (1, 64, 512, 2048)
    param_names = ("writes",)

    def setup(self, writes: int) -> None:
        self.work = common.once(("packed", writes), lambda: common.many_writes(writes, device="host"))
        self.before = self.work.owner.stats
        self.work.both()
        self.after = self.work.owner.stats

    def track_launches(self, writes: int) -> int:
        """Count kernel launches of one apply. No device."""
        return self.after.launches - self.before.launches

    track_launches.unit = "launches"  # type: ignore[attr-defined]

    def track_bytes(self, writes: int) -> int:
        """Count bytes that one apply packs. No device."""
        return self.after.bytes - self.before.bytes

    track_bytes.unit = "bytes"  # type: ignore[attr-defined]


class Memory:
    """Peak memory of the whole process. No device."""

    def peakmem_batch(self) -> None:
        """Stage and apply 131072 values and 4096 writes. No device."""
        common.one_write(131072, device="host").both()
        common.many_writes(4096, "batch", "shuffled", device="host").both()
