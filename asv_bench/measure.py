"""Fair timing for the report and the experiments: arms alternate in one process, and what comes out is a spread.

An arm is a `Work`. Its times are kept apart: staging (host), applying (host, enqueue only), and all of it until the
stream is synchronized. GPU time is measured on its own, behind a stalled stream.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .benchmarks import common
from .benchmarks.common import Work, require_cuda

Summary = dict[str, float]


def summary(samples: Iterable[float]) -> Summary | None:
    """Return median, quartiles, 99th percentile, maximum and count; None where nothing was measured."""
    found = np.array([s for s in samples if not math.isnan(s)])
    if not found.size:
        return None
    q1, median, q3, p99 = np.percentile(found, (25, 50, 75, 99))
    numbers = {"median": median, "q1": q1, "q3": q3, "p99": p99, "max": found.max()}
    return {**{name: round(float(value), 3) for name, value in numbers.items()}, "n": int(found.size)}


def shown(found: Summary | None) -> str:
    """Write a summary as text: median [quartiles]."""
    if found is None:
        return "–"
    digits = 2 if found["median"] < 100 else 0
    return f"{found['median']:.{digits}f} [{found['q1']:.{digits}f}–{found['q3']:.{digits}f}]"


def slope(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Fit a line by least squares; return slope and intercept."""
    fitted = np.polyfit(np.array(xs, float), np.array(ys, float), 1)
    return float(fitted[0]), float(fitted[1])


class Host:
    """The host backend as a machine: no streams to wait for, no GPU time."""

    device = "host"
    gpu: Any = None

    def __init__(self) -> None:
        self.streams: dict[str, Any] = {"host": contextlib.nullcontext()}

    def synchronize(self, stream: Any) -> None:
        """Nothing to wait for."""


class Cuda:
    """The current CUDA device."""

    device = "cuda"

    def __init__(self) -> None:
        self.gpu = require_cuda()
        self.streams = self.gpu.streams

    def synchronize(self, stream: Any) -> None:
        """Wait for the stream."""
        stream.synchronize()


def machine_of(device: str) -> Host | Cuda:
    """Return the machine that `device` ("cuda" or "host") names; SystemExit where there is none."""
    if device == "host":
        return Host()
    try:
        return Cuda()
    except NotImplementedError as error:
        raise SystemExit(f"{error}; --device host tries the logic without one") from None


def measure(
    machine: Host | Cuda, arms: Mapping[str, Mapping[str, Work]], rounds: int, count: int, budget_s: float = 5.0
) -> dict[str, dict[str, dict[str, Any]]]:
    """Time the arms of every stream: in each round each arm runs `count` times in a row, then the next one.

    Returns for each stream and arm `stage`, `apply` (enqueue) and `total` (stage, apply, synchronize), in microseconds;
    or `missing`, why an arm failed. An arm stops at its share of `budget_s`, after one round at least.
    """
    works = {(stream, name): work for stream, named in arms.items() for name, work in named.items()}
    raw: dict[tuple[str, str], list[tuple[int, int, int]]] = {key: [] for key in works}
    broken: dict[tuple[str, str], str] = {}
    spent, share_ns = dict.fromkeys(works, 0), budget_s * 1e9 / len(works)
    with quiet():
        for turn in range(rounds + 1):  # the first is to warm up
            common.pick_core()
            for key, work in works.items():
                if key in broken or spent[key] > share_ns:
                    continue
                begun, current = time.perf_counter_ns(), machine.streams[key[0]]
                try:
                    with current:
                        found = _time_in_a_row(machine, work, current, count if turn else 4, share_ns / 4)
                except Exception as error:  # noqa: BLE001 - one arm that fails must not cost the others
                    broken[key] = f"{type(error).__name__}: {error}"
                else:
                    raw[key] += found if turn else []
                spent[key] += time.perf_counter_ns() - begun if turn else 0
    out: dict[str, dict[str, dict[str, Any]]] = {stream: {} for stream in arms}
    for key, rows in raw.items():
        stream, name = key
        out[stream][name] = (
            {"missing": broken[key]}
            if key in broken
            else {
                part: summary(column)
                for part, column in zip(("stage", "apply", "total"), np.array(rows).T / 1e3, strict=True)
            }
        )
    return out


def _time_in_a_row(
    machine: Host | Cuda, work: Work, stream: Any, count: int, limit_ns: float
) -> list[tuple[int, int, int]]:
    """Do one work `count` times, or until `limit_ns`; nanoseconds of stage, apply and all of it for each time."""
    now, stage, apply, found = time.perf_counter_ns, work.stage, work.apply, []
    begun = now()
    while len(found) < count and now() - begun < limit_ns:
        t0 = now()
        stage()
        t1 = now()
        apply()
        t2 = now()
        machine.synchronize(stream)
        found.append((t1 - t0, t2 - t1, now() - t0))
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While something is timed: no garbage collection, and the thread on cores that `common.pick_core` picks."""
    cores = common.usable_cores()
    gc.collect()
    gc.disable()
    try:
        common.pick_core()
        yield
    finally:
        gc.enable()
        if cores:
            os.sched_setaffinity(0, cores)


class Run:
    """One run's results: written to disk after every section, so that a run cut short loses nothing.

    Parameters
    ----------
    out : Path
        Folder of the results.
    name : str
        Of the JSON file.
    limit_s : float
        Sections that would begin after so many seconds are left out, and named.
    """

    def __init__(self, out: Path, name: str, limit_s: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / f"{name}.json"
        self.begin, self.limit_s = time.perf_counter(), limit_s
        self.data: dict[str, Any] = {"environment": environment(), "sections": {}, "failed": {}, "seconds": {}}

    def section(self, name: str, make: Callable[[], Any]) -> None:
        """Run one section and keep what it returns; a failure is kept as well, and the run goes on."""
        begun = time.perf_counter()
        if begun - self.begin > self.limit_s:
            self.data["failed"][name] = f"not run: {self.limit_s:.0f} s were over"
        else:
            try:
                self.data["sections"][name] = make()
            except Exception:  # noqa: BLE001 - GPU time is scarce: one broken section must not cost the others
                self.data["failed"][name] = traceback.format_exc()
        self.data["seconds"][name] = round(time.perf_counter() - begun, 2)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")
        state = "FAILED" if name in self.data["failed"] else "done"
        say(f"{name}: {state} in {self.data['seconds'][name]} s")
        if name in self.data["failed"]:
            say(self.data["failed"][name])


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def environment() -> dict[str, Any]:
    """Name machine and versions, for the head of a report; no host name and no paths."""
    versions = {}
    for name in ("numpy", "numba", "cupy-cuda13x", "cupy-cuda12x", "cuda-core", "cupy-staged"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    found: dict[str, Any] = {"python": platform.python_version(), "versions": versions}
    found |= {"cpu": cpu_name(), "commit": commit()}
    with contextlib.suppress(NotImplementedError):
        runtime = require_cuda().runtime
        found["gpu"] = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
        found["driver_cuda"], found["runtime_cuda"] = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    return found


def cpu_name() -> str:
    """Return the processor's model name, where it can be read."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def commit() -> str:
    """Return the checkout's commit, and whether it was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        folder = Path(__file__).resolve().parent
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
    return "unknown"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
