"""Two devices in one process. Not collected where there is one: see `collect_ignore` in conftest."""

import threading

import numpy as np
import pytest
from common import CudaPlace, distinct_values

from cupy_staged import (
    BlockTables,
    CaptureError,
    FusedStagedWriter,
    StagedWriteTensor,
    UvaBackedTensor,
    UvaBuffer,
    UvaBufferPool,
    warmup,
)
from cupy_staged.testing import assert_tables_equal


@pytest.fixture(params=["uva", "nouva"])
def pair(request, monkeypatch):
    """Give a place on each of two devices; device 0 is current."""
    cupy = pytest.importorskip("cupy")
    assert cupy.cuda.runtime.getDeviceCount() >= 2
    monkeypatch.delenv("CUPY_STAGED_DEVICE", raising=False)
    monkeypatch.setenv("CUPY_STAGED_UVA", "1" if request.param == "uva" else "0")
    with cupy.cuda.Device(0):
        yield [CudaPlace(request.param, request.param == "uva", "nonblocking", i) for i in (0, 1)]
        for i in (0, 1):
            with cupy.cuda.Device(i):
                cupy.cuda.runtime.deviceSynchronize()


def on(place):
    return place.cupy.cuda.Device(int(place.device[5:]))


def read(place, array):
    """Read the values, with the array's device current."""
    with on(place):
        place.synchronize()
        return place.cupy.asnumpy(place.read(array))


def objects(place):
    table = StagedWriteTensor((4, 500), "i4", device=place.device)
    members = [StagedWriteTensor((4, 50), "i4", device=place.device) for _ in range(2)]
    return {
        "table": table,
        "members": members,
        "writer": FusedStagedWriter(members),
        "tables": BlockTables([16, 32], 4, 64, [8, 4], device=place.device),
        "pool": UvaBufferPool(4, "i4", device=place.device),
        "backed": UvaBackedTensor(4, "i4", device=place.device),
    }


def step(o, salt):
    o["table"].stage_write(salt % 4, 1, distinct_values("i4", 400, salt))
    o["table"].apply_write()
    for member in o["members"]:
        member.stage_write(salt % 4, 2, [salt])
    o["writer"].apply()
    o["tables"].append_block_ids(salt % 4, [[salt], [salt]], overwrite=True)
    o["tables"].apply_staged_writes()
    o["backed"].np[:] = salt
    return o["pool"].copy_to_uva([salt] * 20), o["pool"].copy_to_gpu([salt] * 30), o["backed"].copy_to_uva()


def check(place, o, made, salt):
    assert read(place, o["table"].gpu)[salt % 4, 1:401].tolist() == distinct_values("i4", 400, salt).tolist()
    assert read(place, o["members"][1].gpu)[salt % 4, 2] == salt
    assert read(place, o["tables"].block_tables[1].gpu)[salt % 4, 0] == salt
    assert [int(read(place, array)[-1]) for array in made] == [salt] * 3
    assert {array.device.id for array in (*made, o["table"].gpu, o["tables"].num_blocks.gpu)} == {int(place.device[5:])}


@pytest.mark.parametrize("current", [0, 1])
def test_objects_of_two_devices_interleaved(pair, current):
    """Whichever device is current, each object works on its own, on that device's current stream."""
    with on(pair[current]):
        made = [objects(place) for place in pair]
        for salt in range(8):
            results = [step(o, salt + 100 * i) for i, o in enumerate(made)]
            for i, (place, o) in enumerate(zip(pair, made, strict=True)):
                check(place, o, results[i], salt + 100 * i)
        assert pair[0].runtime.getDevice() == current


def test_slots_grow_on_their_own_device(pair):
    table = StagedWriteTensor((2, 200_000), "i4", device=1)
    writer = FusedStagedWriter([table])
    pool = UvaBufferPool(2, "i4", device=1)
    table.stage_write(1, 0, distinct_values("i4", 150_000, 1))
    writer.apply()
    view = pool.copy_to_uva(range(5000))
    writer.reserve(1000, 200_000)
    table.stage_write(0, 5, [7])
    table.apply_write()
    assert read(pair[1], table.gpu)[1, :150_000].tolist() == distinct_values("i4", 150_000, 1).tolist()
    assert read(pair[1], table.gpu)[0, 5] == 7
    assert read(pair[1], view).tolist() == list(range(5000))


def test_a_rebind_with_another_device_current(pair):
    table = StagedWriteTensor((2, 50), "i4", device=1)
    writer = FusedStagedWriter([table, StagedWriteTensor((2, 50), "i4", device=1)])
    with on(pair[1]):
        fresh = pair[1].cupy.zeros((2, 50), np.int32)
        pair[1].synchronize()
    table.rebind(fresh)
    table.stage_write(1, 1, [9])
    writer.apply()
    table.stage_write(1, 2, [8])
    table.apply_write()
    assert read(pair[1], fresh)[1, :3].tolist() == [0, 9, 8]


def test_arguments_of_another_device_are_refused(pair):
    here, there = pair
    table = StagedWriteTensor((2, 2), "i4", device=1)
    pool = UvaBufferPool(4, "i4", device=1)
    wrong = here.cupy.zeros((2, 2), np.int32)
    table.stage_write(0, 0, [1])
    for call in (
        lambda: table.apply_write(stream=here.stream),
        lambda: table.rebind(wrong),
        lambda: StagedWriteTensor((2, 2), "i4", target=wrong, device=1),
        lambda: pool.copy_to_gpu([1, 2], out=wrong[0]),
        lambda: pool.copy_to_uva([1, 2], stream=here.stream),
        lambda: pool.fence(here.stream),
        lambda: FusedStagedWriter([table, StagedWriteTensor((2, 2), "i4", device=0)]),
    ):
        with pytest.raises(ValueError, match="device"):
            call()
    assert table.num_staged == 1
    table.apply_write(stream=there.stream)
    assert read(there, table.gpu)[0, 0] == 1


def test_waiting_for_a_stream_of_the_other_device(pair):
    here, there = pair
    table = StagedWriteTensor((1, 4), "i4", device=1)
    with on(here):
        here.stall(50, here.stream)
        table.stage_write(0, 0, [7])
        table.apply_write(stream=there.stream, wait_for=here.stream)
        here_was_done = here.cupy.cuda.Event(disable_timing=True)
        here_was_done.record(here.stream)
    there.stream.synchronize()
    assert here_was_done.done
    assert read(there, table.gpu)[0, 0] == 7


def test_an_event_of_a_capture_on_the_other_device(pair):
    """It is refused before it draws anything into the capture."""
    here, there = pair
    table = StagedWriteTensor(4, "i4", device=here.device)
    table.stage_write_elem(1, 7)
    with on(there):
        capturing, event = there.new_stream(), there.cupy.cuda.Event(disable_timing=True)
        counter = there.cupy.zeros(1, "i4")
        counter += 1
        there.synchronize()
        capturing.begin_capture()
        with capturing:
            counter += 1
        event.record(capturing)
    ours = here.new_stream()
    with pytest.raises(CaptureError, match="recorded in a capture"):
        table.apply_write(stream=ours, wait_for=event)
    assert not ours.is_capturing()
    with on(there):
        capturing.end_capture().launch(capturing)
        capturing.synchronize()
    assert read(there, counter).tolist() == [2]
    table.apply_write()
    assert read(here, table.gpu).tolist() == [0, 7, 0, 0]


def test_names_of_devices(pair):
    for device, expected in (("cuda:1", 1), (1, 1), ("cuda:0", 0), (0, 0), ("cuda", 0), (None, 0)):
        assert StagedWriteTensor(3, "i4", device=device).gpu.device.id == expected
    with on(pair[1]):
        assert StagedWriteTensor(3, "i4").gpu.device.id == 1
        assert StagedWriteTensor(3, "i4", device="cuda").gpu.device.id == 1
        warmup("cuda:0")
        if pair[0].uva:
            assert UvaBuffer(3, "i4", device=0).uva.device.id == 0


def test_a_thread_for_each_device(pair):
    made = [objects(place) for place in pair]
    failures = []

    def run(place, o, salt):
        try:
            with on(place):
                for i in range(50):
                    results = step(o, salt + i)
                check(place, o, results, salt + 49)
        except Exception as error:  # noqa: BLE001 - shown by the thread that waits
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(p, o, 1000 * i)) for i, (p, o) in enumerate(zip(pair, made, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_generations_on_two_devices_at_once(pair):
    tables = [StagedWriteTensor((2, 3000), "i4", device=place.device) for place in pair]
    wanted = [np.zeros((2, 3000), np.int32) for _ in pair]
    for place in pair:
        with on(place):
            place.stall(30, place.stream)
    for g in range(24):
        for i, (place, table) in enumerate(zip(pair, tables, strict=True)):
            values = distinct_values("i4", (3, 17, 1500, 2900)[g % 4], g + 50 * i)
            table.stage_write(g % 2, 1 + 2 * (g % 5), values)
            wanted[i][g % 2, 1 + 2 * (g % 5) : 1 + 2 * (g % 5) + len(values)] = values
            table.apply_write(stream=place.stream)
    for place, table, want in zip(pair, tables, wanted, strict=True):
        assert_tables_equal(read(place, table.gpu), want)
