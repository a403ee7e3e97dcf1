"""UvaBuffer and UvaBackedTensor on every backend, and the answers about UVA memory."""

import numpy as np
import pytest
from common import DTYPES, POISON, distinct_values, random_values

from cupy_staged import (
    StagedWriteTensor,
    UvaBackedTensor,
    UvaBuffer,
    UvaUnavailableError,
    is_uva_available,
    uva_status,
    warmup,
)
from cupy_staged.testing import assert_tables_equal


@pytest.mark.parametrize("size", [0, 1, 7, (5,), (3, 4), (2, 3, 5), (0, 4), np.int64(3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_buffer_is_one_memory_seen_twice(uva_place, dtype, size):
    buffer = uva_place.make(UvaBuffer, size, dtype)
    shape = size if isinstance(size, tuple) else (int(size),)
    assert buffer.np.shape == buffer.uva.shape == shape
    assert buffer.np.dtype == buffer.uva.dtype == dtype
    assert buffer.nbytes == buffer.np.nbytes
    assert not buffer.np.any()
    values = random_values(np.random.default_rng(1), dtype, buffer.np.size).reshape(shape)
    buffer.np[...] = values
    assert_tables_equal(uva_place.asnumpy(buffer.uva), values)


def test_the_device_writes_what_the_host_reads(uva_place):
    buffer = uva_place.make(UvaBuffer, (4, 5), "i4")
    values = np.arange(20, dtype=np.int32).reshape(4, 5) - 3
    uva_place.read(uva_place.asarray(values), buffer.uva)
    uva_place.synchronize()
    assert_tables_equal(buffer.np, values)


def test_the_view_keeps_the_memory_alive(uva_place):
    view = uva_place.make(UvaBuffer, 1000, "i4").uva
    others = []
    for _ in range(50):
        others.append(uva_place.make(UvaBuffer, 1000, "i4"))
        others[-1].np[...] = POISON
    assert not uva_place.asnumpy(view).any()


@pytest.mark.parametrize(
    ("size", "dtype", "error"),
    [
        (-1, "i4", ValueError),
        ((), "i4", ValueError),
        ("4", "i4", TypeError),
        (4, "O", TypeError),
        (4, ">f8", TypeError),
    ],
)
def test_a_buffer_that_cannot_be_is_refused(uva_place, size, dtype, error):
    with pytest.raises(error):
        uva_place.make(UvaBuffer, size, dtype)


def test_without_uva_memory(nouva_gpu):
    assert not is_uva_available(nouva_gpu.device)
    status = uva_status(nouva_gpu.device)
    assert (status.available, "CUPY_STAGED_UVA=0" in status.reason) == (False, True)
    for make in (
        lambda: nouva_gpu.make(UvaBuffer, 4, "i4"),
        lambda: nouva_gpu.make(StagedWriteTensor, 4, "i4", contents="uva"),
    ):
        with pytest.raises(UvaUnavailableError, match="CUPY_STAGED_UVA=0"):
            make()


def test_uva_memory_is_there(uva_place):
    assert is_uva_available(uva_place.device)
    assert uva_status(uva_place.device).available
    assert len(uva_status(uva_place.device).reason) > 10
    assert uva_status(uva_place.device) == uva_status(uva_place.device)


def test_warmup_takes_every_device_name(place):
    warmup(place.device)
    warmup(device=place.device)


@pytest.mark.parametrize("bad", ["cuda:", "cuda:x", "cuda:-1", "gpu", "", "cuda:²", "CUDA"])
def test_a_device_name_that_is_none_is_refused(host, bad):
    for call in (uva_status, warmup, lambda device: UvaBuffer(4, "i4", device=device)):
        with pytest.raises(ValueError, match="device must be"):
            call(bad)


@pytest.mark.parametrize("bad", [1.0, True, b"cuda", ["host"], np.float32(0)])
def test_a_device_of_another_type_is_refused(host, bad):
    with pytest.raises(TypeError, match="device must be"):
        StagedWriteTensor(4, "i4", device=bad)


def test_a_device_that_is_not_there_is_refused(host):
    for device in (4711, "cuda:4711", -1):
        with pytest.raises(ValueError, match="is not there"):
            StagedWriteTensor(4, "i4", device=device)


def test_the_host_can_be_forced(monkeypatch):
    monkeypatch.setenv("CUPY_STAGED_DEVICE", "host")
    for device in (None, "cuda", "cuda:7", 3, "host"):
        assert isinstance(StagedWriteTensor(4, "i4", device=device).gpu, np.ndarray)
        assert is_uva_available(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_backed_tensor_publishes_copies(place, dtype):
    rng = np.random.default_rng(3)
    tensor = place.make(UvaBackedTensor, (7, 3), dtype, max_concurrency=2)
    assert_tables_equal(place.asnumpy(tensor.gpu), np.zeros((7, 3), dtype))
    first, second = (random_values(rng, dtype, 21).reshape(7, 3) for _ in range(2))
    tensor.np[...] = first
    assert_tables_equal(place.asnumpy(tensor.gpu), np.zeros((7, 3), dtype))  # not published yet
    a = tensor.copy_to_uva()
    tensor.np[...] = second
    b = tensor.copy_to_uva(4)
    assert b is tensor.gpu
    assert_tables_equal(place.asnumpy(a), first)
    assert_tables_equal(place.asnumpy(b), second[:4])
    assert tensor.copy_to_uva(0).shape == (0, 3)
    assert_tables_equal(tensor.np, second)


def test_a_backed_tensor_gives_a_view_of_exactly_n(place):
    tensor = place.make(UvaBackedTensor, 5, "i4")
    tensor.np[...] = range(1, 6)
    for n in (5, 0, 3, np.int64(1), None, 5):
        view = tensor.copy_to_uva(n)
        assert place.asnumpy(view).tolist() == list(range(1, 1 + (5 if n is None else n)))
    for n, error, message in ((6, ValueError, "0 to 5, got 6"), (-1, ValueError, "got -1"), (2.0, TypeError, r"2\.0")):
        with pytest.raises(error, match=message):
            tensor.copy_to_uva(n)
    assert place.asnumpy(tensor.gpu).tolist() == [1, 2, 3, 4, 5]
    assert tensor.stats.growths == 0


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "not fenced"])
def test_generations_of_a_backed_tensor_behind_a_stall(place, fenced):
    tensor = place.make(UvaBackedTensor, 500, "f4", max_concurrency=2)
    outs = place.asarray(np.full((24, 500), POISON, np.float32))
    place.read(tensor.gpu, outs[0])
    place.synchronize()
    place.stall(30)
    for g in range(24):
        place.stall(1)
        tensor.np[...] = distinct_values("f4", 500, g)
        n = (500, 3, 77)[g % 3]
        place.read(tensor.copy_to_uva(n), outs[g, :n])
        tensor.np[...] = POISON  # the source of truth may go on at once
        if fenced:
            tensor.fence()
    got = place.asnumpy(outs)
    for g in range(24):
        n = (500, 3, 77)[g % 3]
        assert_tables_equal(got[g, :n], distinct_values("f4", n, g), group=g)
    assert (tensor.stats.late_fences > 2) == (not fenced)
    assert (tensor.stats.waits > 0) == place.on_gpu
