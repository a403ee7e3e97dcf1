"""What `cupy-staged info` shows: versions, driver, devices, the UVA probe's result, and what is missing.

CUDA is started only by `gather_facts`, and not when `CUPY_STAGED_DEVICE=host` says so. The measured copies run on a
stream of their own and are waited for.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Any, Final

__all__ = ["gather_facts"]

_BANDWIDTH_BYTES: Final = 64 << 20


def gather_facts() -> dict[str, Any]:
    """Return everything `info` shows, ready for JSON. A thing that is absent is None or named in `missing`.

    `missing` is a list of sentences, each with the `pip install` line where there is one; `notes`, what else to know.
    Rates are in GB/s, measured with 64 MiB copies; this blocks until they are done.
    """
    import numba
    import numpy as np

    from . import __version__, device

    facts: dict[str, Any] = {
        "cupy_staged": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "cupy": None,
        "driver": None,
        "devices": [],
        "missing": [],
        "notes": [],
    }
    if device.is_host_forced():
        facts["notes"].append("CUPY_STAGED_DEVICE=host: CUDA was not looked at.")
        return facts
    driver = _driver_cuda_version()
    facts["driver"] = driver and f"CUDA {driver[0]}.{driver[1]}"
    extra = "cuda12" if driver and driver[0] < 13 else "cuda13"
    install = f'pip install "cupy-staged[{extra}]"'
    device.prepare_cupy_import()
    try:
        import cupy
    except ImportError as error:
        facts["missing"].append(f"CuPy does not import ({error}). For CUDA: {install}")
    else:
        facts["cupy"] = cupy.__version__
        _add_cuda_facts(cupy, facts, driver, install)
    if driver is None:
        facts["notes"].append("No NVIDIA driver (libcuda.so.1): everything runs on the host backend.")
    return facts


def _driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, without starting CUDA; None without a driver."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if libcuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None  # the stub library that toolkits ship for linking
    return version.value // 1000, version.value % 1000 // 10


def _add_cuda_facts(cupy: Any, facts: dict[str, Any], driver: tuple[int, int] | None, install: str) -> None:
    from . import uva_status

    runtime = cupy.cuda.runtime
    if runtime.is_hip:
        facts["missing"].append(f"This CuPy is built for ROCm; the host backend is used. For CUDA: {install}")
        return
    built_for = runtime.runtimeGetVersion() // 1000
    if driver and built_for > driver[0]:
        facts["missing"].append(
            f"CuPy is built for CUDA {built_for}, the driver supports {driver[0]}.{driver[1]}: "
            f"pip uninstall -y cupy-cuda{built_for}x && {install}"
        )
    try:
        cupy.cuda.nvrtc.getVersion()
    except (RuntimeError, ImportError, OSError):
        facts["missing"].append(f"NVRTC, which compiles the kernels, is not found: {install}")
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if driver is not None:
            facts["missing"].append(f"CUDA reports no device: {error}")
        return
    for i in range(count):
        properties = runtime.getDeviceProperties(i)
        device: dict[str, Any] = {
            "device": f"cuda:{i}",
            "name": properties["name"].decode(),
            "compute_capability": f"{properties['major']}.{properties['minor']}",
            "memory_bytes": properties["totalGlobalMem"],
        }
        try:
            status = uva_status(i)
            device |= {"uva": bool(status.available), "uva_reason": str(status.reason)}
            device |= _pinned_bandwidth(cupy, i)
        except (RuntimeError, MemoryError) as error:
            device["error"] = str(error)
        facts["devices"].append(device)


def _pinned_bandwidth(cupy: Any, device_id: int) -> dict[str, float]:
    """Return GB/s both ways between pinned and device memory: the best of five 64 MiB copies, timed on the device."""
    runtime = cupy.cuda.runtime
    rates: dict[str, float] = {}
    with cupy.cuda.Device(device_id), cupy.cuda.Stream(non_blocking=True) as stream:
        host, device = cupy.cuda.alloc_pinned_memory(_BANDWIDTH_BYTES), cupy.cuda.alloc(_BANDWIDTH_BYTES)
        for name, to, source, kind in (
            ("pinned_to_device_gb_s", device.ptr, host.ptr, runtime.memcpyHostToDevice),
            ("device_to_pinned_gb_s", host.ptr, device.ptr, runtime.memcpyDeviceToHost),
        ):
            times = []
            for _ in range(5):
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                begin.record(stream)
                runtime.memcpyAsync(to, source, _BANDWIDTH_BYTES, kind, stream.ptr)
                end.record(stream)
                end.synchronize()
                times.append(cupy.cuda.get_elapsed_time(begin, end))
            rates[name] = round(_BANDWIDTH_BYTES / min(times) / 1e6, 1)
    return rates
