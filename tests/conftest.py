"""The places that tests run on: the host, CUDA, and CUDA without UVA memory; the two latter on three kinds of stream.

`null` runs everything on the null stream, `nonblocking` on a non-blocking stream, `other` on a stream that was not
current when the objects were made. Without a GPU the CUDA ones are skipped, with the reason; with
CUPY_STAGED_REQUIRE_GPU=1 they fail instead.
"""

from __future__ import annotations

import gc
import os
import sys

import pytest
from common import CudaPlace, Place, number_of_gpus
from hypothesis import HealthCheck, settings

from cupy_staged import ring

STREAMS = ("null", "nonblocking", "other")
CUDA = tuple(f"cuda-{stream}" for stream in STREAMS)
NOUVA = tuple(f"nouva-{stream}" for stream in STREAMS)  # CUDA with CUPY_STAGED_UVA=0

# A place is the same for all examples of one test; the first example on a GPU compiles kernels.
settings.register_profile(
    "cupy_staged", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("cupy_staged")

GPUS, WHY_NONE = number_of_gpus()

# Tests that need two devices are not collected where there is one: there is nothing to switch on there, so they are no
# gap in a run that must not skip (CUPY_STAGED_REQUIRE_GPU=1). CUPY_STAGED_REQUIRE_GPU=2 collects them anyway, to fail.
collect_ignore = []
if GPUS < 2 and os.environ.get("CUPY_STAGED_REQUIRE_GPU") != "2":
    collect_ignore.append("gpu/test_two_gpus.py")


def need(is_there: bool, reason: str) -> None:
    """Skip the test, or fail it where a GPU is required, unless something is there."""
    if is_there:
        return
    if os.environ.get("CUPY_STAGED_REQUIRE_GPU", "0") not in ("", "0"):
        pytest.fail(reason)
    pytest.skip(reason)


def open_place(name, monkeypatch):
    """Give the place, with its stream current, and synchronize the device at the end, to show faults."""
    monkeypatch.delenv("CUPY_STAGED_DEVICE", raising=False)
    monkeypatch.delenv("CUPY_STAGED_UVA", raising=False)
    kind, _, mode = name.partition("-")
    if kind == "host":
        yield Place()
        return
    need(GPUS > 0, WHY_NONE)
    if kind == "nouva":
        monkeypatch.setenv("CUPY_STAGED_UVA", "0")
    else:
        from cupy_staged import uva_status

        status = uva_status("cuda:0")
        need(status.available, status.reason)
    place = CudaPlace(name, kind == "cuda", mode)
    try:
        with place.stream:
            yield place
    finally:
        place.synchronize()


@pytest.fixture
def collected():
    """Nothing that earlier tests dropped is left, and nothing that this one drops."""
    gc.collect()
    ring.sweep()
    yield
    gc.collect()
    ring.sweep()


@pytest.fixture(params=("host", *CUDA, *NOUVA))
def place(request, monkeypatch):
    """Every backend and stream."""
    yield from open_place(request.param, monkeypatch)


@pytest.fixture(params=("host", *CUDA))
def uva_place(request, monkeypatch):
    """Every backend that reaches UVA memory: `UvaBuffer`, ``contents="uva"``, UVA targets."""
    yield from open_place(request.param, monkeypatch)


@pytest.fixture(params=(*CUDA, *NOUVA))
def gpu(request, monkeypatch):
    """Every CUDA backend and stream: what only a GPU can show."""
    yield from open_place(request.param, monkeypatch)


@pytest.fixture(params=CUDA)
def uva_gpu(request, monkeypatch):
    """CUDA with UVA memory, on every stream; also for tests with a guard taken out, whose faults are known there."""
    yield from open_place(request.param, monkeypatch)


@pytest.fixture(params=NOUVA)
def nouva_gpu(request, monkeypatch):
    """CUDA without UVA memory."""
    yield from open_place(request.param, monkeypatch)


@pytest.fixture(params=["cuda-nonblocking", "nouva-nonblocking"], ids=["cuda", "nouva"])
def process_env(request, monkeypatch):
    """Give the environment of a fresh process on each CUDA backend, which makes its own streams."""
    for place in open_place(request.param, monkeypatch):
        env = {k: v for k, v in os.environ.items() if k != "CUPY_STAGED_DEVICE"}
        paths = os.pathsep.join(p for p in sys.path if p)
        yield {**env, "PYTHONPATH": paths, "CUPY_STAGED_UVA": "1" if place.uva else "0"}


@pytest.fixture
def host(monkeypatch):
    """Give the host backend alone, for what does not depend on the backend."""
    yield from open_place("host", monkeypatch)
