"""Which backend a `device=` means, whether it has UVA memory, and what a forked child may not do.

A backend is chosen once, when an object is made. Importing this module touches no CUDA.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import weakref
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from .backends import Backend, CudaBackend, HostBackend
from .errors import UvaUnavailableError

Device = int | str | None


@dataclass(frozen=True)
class UvaStatus:
    """Whether a device reads and writes pinned host memory in place, and why (not).

    Attributes
    ----------
    available : bool
    reason : str
        One sentence.
    """

    available: bool
    reason: str


_host = HostBackend()
_cuda: dict[tuple[int, bool], CudaBackend] = {}
_statuses: dict[int, UvaStatus] = {}


def prepare_cupy_import() -> None:
    """Give CuPy a folder for its compile cache where its own cannot be made: it makes it when it is imported."""
    if "cupy" in sys.modules:
        return
    folder = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        os.environ["CUPY_CACHE_DIR"] = tempfile.mkdtemp(prefix="cupy_cache_")


def count_devices() -> tuple[int, str]:
    """How many CUDA devices there are, and why none where there is none; other CUDA errors are raised."""
    if importlib.util.find_spec("cupy") is None:
        return 0, "CuPy is not installed"
    prepare_cupy_import()
    from cupy.cuda import runtime

    if runtime.is_hip:
        return 0, "CuPy was built for ROCm"
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        no_driver = error.status == 35 and runtime.driverGetVersion() == 0  # cudaErrorInsufficientDriver
        if error.status != 100 and not no_driver:  # cudaErrorNoDevice
            raise
        return 0, "there is no CUDA driver" if no_driver else "CUDA reports no device"
    return count, "" if count else "CUDA reports no device"


def setting(name: str, *known: str) -> str:
    """What the environment variable says: one of `known`, or nothing; ValueError for anything else."""
    value = os.environ.get(name, "")
    if value not in ("", *known):
        raise ValueError(f"{name} must be {' or '.join(map(repr, known))} or unset, got {value!r}")
    return value


def is_host_forced() -> bool:
    """Whether CUPY_STAGED_DEVICE asks for the host."""
    return setting("CUPY_STAGED_DEVICE", "host") == "host"


def resolve_id(device: Device) -> int | None:
    """The CUDA device id that `device` names, or None for the host."""
    if isinstance(device, bool) or not (device is None or isinstance(device, (int, str))):
        raise TypeError(f"device must be None, 'cuda', 'cuda:N', an int or 'host', got {device!r}")
    wanted: int | None = None
    if isinstance(device, int):
        wanted = device
    elif isinstance(device, str) and device.startswith("cuda:") and device[5:].isascii() and device[5:].isdigit():
        wanted = int(device[5:])
    elif device not in (None, "cuda", "host"):
        raise ValueError(f"device must be None, 'cuda', 'cuda:N', an int or 'host', got {device!r}")
    if is_host_forced() or device == "host":
        return None
    refuse_in_forked_child()
    count, reason = count_devices()
    if count == 0:
        if device is None:
            return None
        raise ValueError(f"device {device!r} is not there: {reason}; use 'host'")
    if wanted is None:
        from cupy.cuda import runtime

        return int(runtime.getDevice())
    if not 0 <= wanted < count:
        raise ValueError(f"device {device!r} is not there: this machine has CUDA devices 0 to {count - 1}")
    return wanted


def get_backend(device: Device) -> Backend:
    """The backend for `device`, made once; CaptureError where the device's current stream is being captured."""
    device_id = resolve_id(device)
    if device_id is None:
        return _host
    uva = uva_status(device_id).available
    backend = _cuda.get((device_id, uva)) or _cuda.setdefault((device_id, uva), CudaBackend(device_id, uva))
    backend.check_current()
    return backend


def uva_status(device: Device = None) -> UvaStatus:
    """Whether the device reads and writes pinned host memory in place, by trying it.

    The probe writes after the memory was mapped, lets a kernel read and answer, twice. A definite answer is kept; an
    error is raised and asked again. ``CUPY_STAGED_UVA=0`` answers no.

    Parameters
    ----------
    device : None, int or str
        As in every constructor.

    Returns
    -------
    UvaStatus
        `available` and `reason`. The host is always available.

    Raises
    ------
    ValueError
        The device is not there, or the environment variable is neither 0 nor 1.
    CaptureError
        The device's current stream is being captured.
    """
    device_id = resolve_id(device)
    if device_id is None:
        return UvaStatus(True, "host and device are the same memory")
    if setting("CUPY_STAGED_UVA", "0", "1") == "0":
        return UvaStatus(False, "switched off by CUPY_STAGED_UVA=0")
    if device_id not in _statuses:
        _statuses[device_id] = _probe(device_id)
    return _statuses[device_id]


def is_uva_available(device: Device = None) -> bool:
    """Whether the device reads and writes pinned host memory in place; `uva_status` says why (not)."""
    return uva_status(device).available


def require_uva(backend: Backend, what: str) -> None:
    """Raise UvaUnavailableError where `what` needs UVA memory and there is none."""
    if not backend.uva:
        raise UvaUnavailableError(f"{what} needs UVA memory: {uva_status(backend.id).reason}")


def _probe(device_id: int) -> UvaStatus:
    from . import kernels

    backend = CudaBackend(device_id, uva=True)
    backend.check_current()
    try:
        block = backend.pinned(64)
    except backend._error as error:
        return UvaStatus(False, f"pinned memory cannot be had or mapped: {error}")
    if not block.device_address:
        return UvaStatus(False, "pinned memory has no device address")
    words = block.array.view(np.uint64)
    kernel = kernels.get_function(backend, "uva_probe", "uva_probe")
    with backend.current():
        for request in (0x0123456789ABCDEF, 0xFEDCBA9876543210):
            words[0] = request  # after mapping: a frozen copy would not show it
            with backend.using(backend.setup):
                kernel((1,), (1,), (block.device_address, block.device_address + 8))
            backend.setup.synchronize()
            if int(words[1]) != request ^ 0xFFFFFFFFFFFFFFFF:
                return UvaStatus(False, f"the device sees a copy of pinned memory: {request:#x} became {words[1]:#x}")
    return UvaStatus(True, "a kernel read what the host wrote after mapping, and the host read its answer")


# A forked child cannot use CUDA. Every object that does registers here; the child takes all locks and seals all write
# logs, so that the next call on such an object is refused by a check that each call makes anyway.
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_forked = False


def guard_against_fork(owner: Any) -> None:
    """Let calls of `owner` (which has a `lock`, and maybe `logs`) be refused in a forked child."""
    _locks.add(owner)


def is_forked_child() -> bool:
    """Whether this process was forked from one that used CUDA."""
    return _forked


def refuse_in_forked_child() -> None:
    """Raise where CUDA cannot be used because this process was forked."""
    if _forked:
        raise RuntimeError("CUDA was in use when this process was forked: make new objects in a spawned process")


def refuse_entry() -> NoReturn:
    """Say why a call may not enter an object whose lock is taken."""
    refuse_in_forked_child()
    raise RuntimeError("this object is in use by another thread: give each thread its own, or lock around the calls")


def _after_fork() -> None:
    global _forked
    if _cuda:
        _forked = True
        for owner in list(_locks):
            owner.lock.acquire(False)
            for log in getattr(owner, "logs", ()):
                log.seal()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
