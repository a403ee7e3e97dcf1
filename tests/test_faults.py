"""Faults from outside: allocations, launches, events and compilations that fail, completions that never come, Ctrl-C.

Whatever happens, the error is the one that was met, what was staged is still staged or was applied, and the next call
works. Interrupts are tried at every point of a call where CPython looks for signals, one after the other.
"""

import contextlib
import dis
import functools
import gc
import os
import sys
import threading

import numpy as np
import pytest

from cupy_staged import (
    BlockTables,
    CaptureError,
    DeviceParamTable,
    FusedStagedWriter,
    StagedWriteTensor,
    UvaBackedTensor,
    UvaBufferPool,
    backends,
    kernels,
    packing,
    ring,
)
from cupy_staged.device import get_backend
from cupy_staged.testing import assert_tables_equal

PACKAGE = os.path.dirname(os.path.abspath(kernels.__file__))
# Where CPython 3.11 and later look for signals: behind a call, at the start of a function, at a jump back.
CHECKED = {name for name in dis.opname if name.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))}


@functools.cache
def looks_for_signals(code, last, here):
    """Whether an interrupt can come behind the instruction at `last`, and be raised at `here` as well.

    CPython raises it at `last`. Where another handler is in charge at `here`, namely at the end of a `with` block, it
    cannot be shown by raising it there.
    """
    if dis.opname[code.co_code[last]] not in CHECKED:
        return False
    handlers = [(e.start, e.end, e.target) for e in dis._parse_exception_table(code)]
    last_target, target = (
        next((target for start, end, target in handlers if start <= at < end), None) for at in (last, here)
    )
    return last_target == target


def interrupt(call, at):
    """Make `call` with a KeyboardInterrupt at its `at`-th look for signals in the package; whether it came to that."""
    seen = -1
    before = {}

    def trace(frame, event, _arg):
        nonlocal seen
        if os.path.dirname(frame.f_code.co_filename) != PACKAGE and frame.f_code.co_filename != contextlib.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            last = before.get(frame)
            before[frame] = frame.f_lasti
            if last is not None and looks_for_signals(frame.f_code, last, frame.f_lasti):
                seen += 1
                if seen == at:
                    before.clear()
                    raise KeyboardInterrupt
        return trace

    old = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 asks, when it begins to trace, whether any frame wants that
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(old)
        before.clear()
    return False


def interrupted_everywhere(call, check, prepare=None):
    """Interrupt `call` at one point after the other until it comes through, and check after each; return their number.

    `prepare` comes before each, without an interrupt.
    """
    for at in range(2000):
        if prepare is not None:
            prepare()
        came = interrupt(call, at)
        check(at)
        if not came:
            return at
    raise AssertionError("the call does not end")


@contextlib.contextmanager
def patched(thing, **attributes):
    """Give one object attributes in front of those of its class."""
    vars(thing).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(thing)[name]


def backend_of(place):
    return get_backend(place.device)


def raising(error):
    def fail(*_args, **_kwargs):
        raise error

    return fail


def before_and_after(path, error):
    """Launchers that raise before the launch, and such that raise after it."""
    good = list(path._launch)

    def late(launch):
        def launch_and_raise(stream):
            launch(stream)
            raise error

        return launch_and_raise

    return {"before": [raising(error)] * len(good), "after": [late(launch) for launch in good]}, good


ALLOCATORS = ("pinned", "zeros", "array", "view", "new_event", "empty_on")


def failing_allocations(place, allow):
    """Let the backend's allocators succeed `allow` times and raise MemoryError from then on."""
    backend, left = backend_of(place), [allow]

    def limited(original):
        def allocate(*args):
            if left[0] == 0:
                raise MemoryError("injected")
            left[0] -= 1
            return original(*args)

        return allocate

    return patched(backend, **{name: limited(getattr(backend, name)) for name in ALLOCATORS})


def table_and_model(place, rows=6, columns=4000, **options):
    table = place.make(StagedWriteTensor, (rows, columns), "i4", **options)
    return table, np.zeros((rows, columns), np.int32)


def stage(table, want, row, start, values):
    table.stage_write(row, start, values)
    want[row, start : start + len(values)] = values


# -- launches and events -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("injected"), MemoryError("injected"), KeyboardInterrupt("injected")])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("contents", ["auto", "h2d"])
def test_a_launch_that_raises(place, contents, when, error):
    table, want = table_and_model(place, contents=contents)
    faulty, good = before_and_after(table._path, error)
    launches = 0
    for turn in range(5):
        stage(table, want, turn, turn, [turn, 5, 6])
        stage(table, want, turn, 100, np.arange(2000 + turn, dtype=np.int32))  # long: read in place where that is done
        stats = table.stats
        table._path._launch[:] = faulty[when]
        with pytest.raises(type(error), match="injected"):
            table.apply_write()
        table._path._launch[:] = good
        if when == "before":
            assert table.num_staged == 2
            for name in ("launches", "writes", "values", "bytes", "copies"):
                assert getattr(table.stats, name) == getattr(stats, name), name
        launches += table.num_staged != 0 or when == "after"
        table.apply_write()
        assert table.num_staged == 0
        assert_tables_equal(place.asnumpy(table.gpu), want)
    assert table.stats.launches == launches
    assert table.stats.writes == 10


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fused_launch_that_raises(place, when):
    tables, wants = zip(*(table_and_model(place, columns=60) for _ in range(3)), strict=True)
    writer = place.fuse(FusedStagedWriter, tables)
    faulty, good = before_and_after(writer._path, OSError("injected"))
    for turn in range(4):
        for group in range(3):
            stage(tables[group], wants[group], turn, group, [turn + 1] * (20 + group))
        writer._path._launch[:] = faulty[when]
        with pytest.raises(OSError, match="injected"):
            writer.apply()
        writer._path._launch[:] = good
        assert len({table.num_staged for table in tables}) == 1  # all of it, or nothing
        writer.apply()
        for group in range(3):
            assert_tables_equal(place.asnumpy(tables[group].gpu), wants[group], group=group)


@pytest.mark.parametrize("when", ["before", "after"])
def test_counts_after_an_append_whose_launch_raised(place, when):
    """Appends go on behind what is staged again, and device counts follow."""
    tables = place.make(BlockTables, [16, 32], 4, 64, [8, 6])
    faulty, good = before_and_after(tables._path, OSError("injected"))
    want = [[], []]
    for turn in range(3):
        new = [[10 + turn], [20 + turn, 30 + turn]]
        tables.append_block_ids(2, new, overwrite=False)
        tables._path._launch[:] = faulty[when]
        with pytest.raises(OSError, match="injected"):
            tables.apply_staged_writes()
        tables._path._launch[:] = good
        if turn == 1:
            tables.append_block_ids(2, [[7], []], overwrite=False)
            new[0].append(7)
        tables.apply_staged_writes()
        for group in range(2):
            want[group] += new[group]
            count = len(want[group])
            assert place.asnumpy(tables.block_tables[group].gpu)[2, :count].tolist() == want[group]
            assert tables.num_blocks.np[group].tolist() == [0, 0, count, 0]
            assert place.asnumpy(tables.num_blocks.gpu)[group].tolist() == [0, 0, count, 0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_whose_launch_raises(place, when):
    """Often enough for every slot of the ring; the step after it is right, also one of host arrays."""
    tables = place.make(BlockTables, [16], 4, 64, [8], max_concurrency=1)
    tables.append_block_ids(1, [[5, 6]], overwrite=True)
    tables.apply_staged_writes()
    faulty, good = before_and_after(tables._step, OSError("injected"))
    rows, starts = np.array([1], np.int32), np.array([0, 2], np.int32)
    for turn in range(7):
        positions = np.array([turn, 16 + turn])
        tables._step._launch[:] = faulty[when]
        with pytest.raises(OSError, match="injected"):
            tables.prepare_step(rows, starts, positions + 1, 1, 2)
        tables._step._launch[:] = good
        gathered, slots = tables.prepare_step(rows, starts, positions, 1, 2)
        assert place.asnumpy(gathered[0])[0, :3].tolist() == [5, 6, 0]
        assert place.asnumpy(slots).tolist() == [[80 + turn, 96 + turn]]
    assert tables._step.is_idle()


@pytest.mark.parametrize("name", ["copy", "signal", "record"])
def test_refreshed_pointers_whose_enqueueing_raises(place, name):
    tables, wants = zip(*(table_and_model(place, columns=30) for _ in range(2)), strict=True)
    writer = place.fuse(FusedStagedWriter, tables, max_concurrency=2)
    fresh = place.asarray(np.zeros((6, 30), np.int32))
    stage(tables[0], wants[0], 1, 0, [1, 2])
    writer.apply()
    tables[0].rebind(fresh)
    wants[0][:] = 0
    stage(tables[0], wants[0], 2, 3, [7, 8, 9])
    for _ in range(5):
        faulty = patched(backend_of(place), **{name: raising(OSError("injected"))})
        with faulty, pytest.raises(OSError, match="injected"):
            writer.apply()
        assert tables[0].num_staged == 1
    writer.apply()
    for turn in range(4):
        stage(tables[1], wants[1], turn, turn, [turn])
        writer.apply()
    for table, want in zip(tables, wants, strict=True):
        assert_tables_equal(place.asnumpy(table.gpu), want)
    place.synchronize()
    assert writer._path.is_idle()


@pytest.mark.parametrize("name", ["copy", "signal"])
def test_a_pool_whose_enqueueing_raises(place, name):
    """Never a slot that is reused while a copy that was enqueued may still read it, and never one that is lost."""
    pool = place.make(UvaBufferPool, 300, "i4", max_concurrency=2)
    out = place.asarray(np.zeros(300, np.int32))
    for turn in range(20):  # more than there are fence words
        faulty = patched(backend_of(place), **{name: raising(OSError("injected"))})
        with faulty, pytest.raises(OSError, match="injected"):
            pool.copy_to_gpu(np.full(300, -1, np.int32), out=out)
        pool.copy_to_gpu(np.full(300, turn, np.int32), out=out)
        assert set(place.asnumpy(out).tolist()) == {turn}
        view = pool.copy_to_uva([turn, turn])
        assert place.asnumpy(view).tolist() == [turn, turn]
        pool.fence()
    place.synchronize()
    assert pool._core.is_idle()


@pytest.mark.parametrize("name", ["copy", "signal", "record"])
def test_a_sync_whose_enqueueing_raises(place, name):
    params = place.make(DeviceParamTable, 5, {"a": "i4", "b": "f8"})
    for turn in range(5):
        params["a"].np[:] = turn + 1
        params["b"].np[turn] = 0.5
        faulty = patched(backend_of(place), **{name: raising(OSError("injected"))})
        with faulty, pytest.raises(OSError, match="injected"):
            params.sync()
        assert params.stats.copies == turn
        params.sync()
        for field in ("a", "b"):
            assert place.asnumpy(params[field].gpu).tolist() == params[field].np.tolist()
    place.synchronize()
    assert params._core.is_idle()


# -- completions that never come ---------------------------------------------------------------------------------------


def nothing(*_args):
    """Launch nothing, and say nothing about it."""


def test_an_apply_that_was_lost(place):
    table, want = table_and_model(place, columns=10, max_concurrency=2)
    good = list(table._path._launch)
    table._path._launch[:] = [nothing] * len(good)
    for row in range(2):
        table.stage_write(row, 0, [99])
        table.apply_write()
    table._path._launch[:] = good
    stage(table, want, 4, 1, [3, 4])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="its fence word never came: a launch was lost"):
            table.apply_write()
        assert table.num_staged == 1
        table.apply_write()
        stage(table, want, 5, 1, [5, 6])
    table.apply_write()
    assert table.stats.waits == 2
    assert_tables_equal(place.asnumpy(table.gpu), want)


def test_a_step_that_was_lost(place):
    tables = place.make(BlockTables, [16], 4, 64, [8], max_concurrency=1)
    rows = np.array([1], np.int32)
    good = list(tables._step._launch)
    tables._step._launch[:] = [nothing] * len(good)
    for _ in range(2):
        tables.gather_block_tables(rows, 1)
    tables._step._launch[:] = good
    for _ in range(2):
        with pytest.raises(RuntimeError, match="never came"):
            tables.gather_block_tables(rows, 1)
        assert place.asnumpy(tables.gather_block_tables(rows, 1)[0]).tolist() == [[0] * 8]


def test_a_copy_that_was_lost(place):
    pool = place.make(UvaBufferPool, 4, "i4", max_concurrency=1)
    with patched(backend_of(place), signal=nothing):
        pool.copy_to_gpu([1, 2])
    with pytest.raises(RuntimeError, match="never came"):
        pool.copy_to_gpu([3, 4])
    assert place.asnumpy(pool.copy_to_gpu([5, 6])).tolist() == [5, 6]


def test_a_step_waits_for_the_stream_that_its_slot_is_read_on(gpu):
    """The ring is lapped from an idle stream while another still works: it waits, and takes nothing for lost."""
    tables = gpu.make(BlockTables, [16], 4, 64, [8], max_concurrency=1)
    tables.append_block_ids(1, [[5, 6]], overwrite=True)
    tables.apply_staged_writes()
    rows = np.array([1], np.int32)
    tables.gather_block_tables(rows, 1)
    gpu.synchronize()
    busy, out = gpu.new_stream(), [gpu.asarray(np.full((1, 8), -77, np.int32)) for _ in range(4)]
    gpu.stall(150, busy)
    with busy:
        for i in range(2):
            tables.gather_block_tables(rows, 1, out=[out[i]])
    for i in range(2, 4):
        tables.gather_block_tables(rows, 1, out=[out[i]])
    gpu.synchronize()
    assert [gpu.asnumpy(array)[0, :3].tolist() for array in out] == [[5, 6, 0]] * 4


# -- allocations and compilation ---------------------------------------------------------------------------------------

MAKERS = {
    "pool": lambda place: place.make(UvaBufferPool, (3, 2), "i4"),
    "backed": lambda place: place.make(UvaBackedTensor, 4, "i4"),
    "tensor": lambda place: place.make(StagedWriteTensor, (3, 8), "i4"),
    "UVA tensor": lambda place: place.make(StagedWriteTensor, (3, 8), "i4", uva_instead_of_gpu=True),
    "h2d tensor": lambda place: place.make(StagedWriteTensor, (3, 8), "i4", contents="h2d"),
    "block tables": lambda place: place.make(BlockTables, [16, 8], 3, 8, [4, 4]),
    "params": lambda place: place.make(DeviceParamTable, 3, {"a": "i4"}),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_constructor_that_cannot_allocate(place, name):
    """At every allocation that it makes, one after the other; then it can."""
    MAKERS[name](place)
    for allow in range(0, 300, 4 if place.on_gpu else 1):  # every few there, where it takes a while
        with failing_allocations(place, allow):
            try:
                made = MAKERS[name](place)
            except MemoryError:
                continue
        break
    assert allow > 0
    assert made.stats.launches == (1 if name == "backed" else 0)
    ring.sweep()


def test_a_fused_writer_that_cannot_allocate(place):
    """Its members are as before: staged, applied by themselves, and writable by the next writer."""
    for members in (1, 2):
        tables, wants = zip(*(table_and_model(place) for _ in range(members)), strict=True)
        for allow in range(100):
            stage(tables[0], wants[0], allow % 6, 3, np.arange(1500, dtype=np.int32) + allow)
            try:
                with failing_allocations(place, allow):
                    writer = place.fuse(FusedStagedWriter, tables)
            except MemoryError:
                tables[0].apply_write()
                assert_tables_equal(place.asnumpy(tables[0].gpu), wants[0])
                continue
            break
        assert allow > 0
        writer.apply()
        assert_tables_equal(place.asnumpy(tables[0].gpu), wants[0])


@pytest.mark.parametrize("contents", ["auto", "h2d"])
@pytest.mark.parametrize("way", ["apply", "reserve"])
def test_growth_that_cannot_allocate(place, way, contents):
    table, want = table_and_model(place, columns=60_000, contents=contents)
    stage(table, want, 0, 0, [1, 2, 3])
    for allow in range(100):
        if table.num_staged == 1:
            for row in range(1, 6):  # odd places, so that values are copied into the slot
                stage(table, want, row, row, np.arange(40_000, dtype=np.int32) + row)
        staged = table.num_staged
        try:
            with failing_allocations(place, allow):
                if way == "reserve":
                    table.reserve(100_000, 1_000_000)
                table.apply_write()
        except MemoryError:
            assert table.num_staged in (staged, 0)  # contents that could not be replaced: it was applied
            if table.num_staged == 0:
                assert_tables_equal(place.asnumpy(table.gpu), want)
                stage(table, want, 0, 0, [allow])
            continue
        break
    assert allow > 0
    assert_tables_equal(place.asnumpy(table.gpu), want)
    for turn in range(4):
        stage(table, want, turn, turn, np.full(50_000, turn, np.int32))
        table.apply_write()
        assert_tables_equal(place.asnumpy(table.gpu), want)


def test_a_pool_that_cannot_grow(place):
    """The slots that there are keep their size, on the host and on the device."""
    pool = place.make(UvaBufferPool, 4, "i4", max_concurrency=1)
    allow = 0
    while True:
        try:
            with failing_allocations(place, allow):
                pool.copy_to_uva(range(100))
        except MemoryError:
            for n in (4, 3):
                assert place.asnumpy(pool.copy_to_uva(range(n))).tolist() == list(range(n))
            with failing_allocations(place, 0), pytest.raises(MemoryError, match="injected"):
                pool.copy_to_uva(range(5))  # what does not fit still has to grow
            allow += 1
            continue
        break
    assert allow > 0
    assert place.asnumpy(pool.copy_to_uva(range(100))).tolist() == list(range(100))
    assert pool.stats.growths == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_rebind_that_cannot_allocate(gpu, fused):
    """All paths go over to the new target, or none does: no slot writes here and another there."""
    table, want = table_and_model(gpu, columns=30)
    other, _ = table_and_model(gpu, columns=30)
    writer = gpu.fuse(FusedStagedWriter, [table, other] if fused else [table])
    fresh = gpu.asarray(np.zeros((6, 30), np.int32))
    for allow in range(100):
        try:
            with failing_allocations(gpu, allow):
                table.rebind(fresh)
        except MemoryError:
            for turn in range(4):
                stage(table, want, turn, turn, [allow, turn])
                (writer.apply if turn % 2 else table.apply_write)()
            assert_tables_equal(gpu.asnumpy(table.gpu), want)
            assert table.gpu is not fresh
            continue
        break
    assert allow > 0
    assert not gpu.asnumpy(fresh).any()
    want[:] = 0
    for turn in range(4):
        stage(table, want, turn, turn, [9, turn])
        (writer.apply if turn % 2 else table.apply_write)()
    assert_tables_equal(gpu.asnumpy(fresh), want)


def test_a_rebind_while_another_path_is_in_use(place):
    tables, wants = zip(*(table_and_model(place, columns=30) for _ in range(2)), strict=True)
    writer = place.fuse(FusedStagedWriter, tables)
    fresh = place.asarray(np.zeros((6, 30), np.int32))
    with writer._path.entered(), pytest.raises(RuntimeError, match="in use"):
        tables[0].rebind(fresh)
    stage(tables[0], wants[0], 1, 1, [4])
    tables[0].apply_write()
    assert_tables_equal(place.asnumpy(tables[0].gpu), wants[0])
    assert not place.asnumpy(fresh).any()


def test_a_kernel_that_does_not_compile(gpu, monkeypatch):
    """The compiler's own error; once the kernel compiles, everything is as if it had at first."""
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "_functions", {})
        patch.setattr(kernels, "source_of", lambda _name: "this is no kernel")
        with pytest.raises(gpu.cupy.cuda.compiler.CompileException, match="error"):
            gpu.make(StagedWriteTensor, (2, 3), "i4")
        with pytest.raises(gpu.cupy.cuda.compiler.CompileException):
            gpu.make(BlockTables, [16], 2, 8, [4])
        assert kernels._functions == {}
    table = gpu.make(StagedWriteTensor, (2, 3), "i4")
    table.stage_write(1, 1, [5, 6])
    table.apply_write()
    assert gpu.asnumpy(table.gpu).tolist() == [[0, 0, 0], [0, 5, 6]]


# -- interrupts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contents", ["auto", "h2d"])
def test_an_apply_interrupted_anywhere(place, contents):
    table, want = table_and_model(place, contents=contents)
    values = np.arange(3000, dtype=np.int32)
    turn = 0

    def prepare():
        nonlocal turn
        turn += 1
        stage(table, want, turn % 6, turn % 7, values[: 5 if turn % 2 else 3000] + turn)

    def check(at):
        assert table.num_staged in (0, 1), at
        table.apply_write()
        assert_tables_equal(place.asnumpy(table.gpu), want)

    for long in (0, 1):  # each point of a short and of a long one
        turn += long
        assert interrupted_everywhere(table.apply_write, check, prepare) > 5
    place.synchronize()
    assert table._path.is_idle()


def test_growth_interrupted_anywhere(place):
    """A fresh table each time, so that the same apply grows logs, slots and scratch."""
    table, want = None, None
    longest = np.arange(1900, dtype=np.int32) + 1
    totals = np.arange(500) + 1
    full = np.zeros((6, 4000), np.int32)
    full[:, 1:1901] = longest
    full[0, 2000:2500] = totals

    def apply():
        for row in range(6):
            table.stage_write(row, 1, longest)
        table.stage_writes(np.zeros(500, np.int64), totals + 1999, totals, totals)
        table.apply_write()

    def check(at):
        table.apply_write()
        got = place.asnumpy(table.gpu)
        whole = [not got[row].any() or (got[row, :1999] == full[row, :1999]).all() for row in range(6)]
        assert all(whole), (at, whole)
        assert not got[0, 2000:2500].any() or (got == full).all(), at
        for turn in range(3):
            stage(table, want, turn, 0, np.full(4000, turn + at, np.int32))
            table.apply_write()
        assert_tables_equal(place.asnumpy(table.gpu)[:3], want[:3])

    at = -1
    while True:
        at += 1
        table, want = table_and_model(place)
        came = interrupt(apply, at)
        check(at)
        if not came:
            break
        if place.on_gpu:  # tables take a while there
            at += 18
    assert at > 20


def test_a_fused_apply_interrupted_anywhere(place):
    tables, wants = zip(*(table_and_model(place, columns=50) for _ in range(2)), strict=True)
    writer = place.fuse(FusedStagedWriter, tables)
    turn = 0

    def prepare():
        nonlocal turn
        turn += 1
        for group in range(2):
            stage(tables[group], wants[group], turn % 6, group, [turn] * (20 + turn % 20))

    def check(at):
        writer.apply()
        for group in range(2):
            assert tables[group].num_staged == 0
            assert_tables_equal(place.asnumpy(tables[group].gpu), wants[group], group=at)

    assert interrupted_everywhere(writer.apply, check, prepare) > 5


def test_block_tables_interrupted_anywhere(place):
    tables = place.make(BlockTables, [16, 32], 4, 64, [8, 8], max_concurrency=1)
    turn = 0

    def step():
        nonlocal turn
        turn += 1
        tables.append_block_ids(turn % 4, [[turn], [turn, turn + 1]], overwrite=True)
        tables.apply_staged_writes()
        tables.prepare_step(np.array([turn % 4], np.int32), np.array([0, 1], np.int32), np.array([3]), 1, 1)

    def check(_at):
        tables.apply_staged_writes()
        assert (place.asnumpy(tables.num_blocks.gpu) == tables.num_blocks.np).all()
        for _ in range(3):  # all slots of the ring
            row = np.array([turn % 4], np.int32)
            gathered, slots = tables.prepare_step(row, np.array([0, 1], np.int32), np.array([3]), 1, 1)
            if tables.num_blocks.np[1, turn % 4]:
                first = int(place.asnumpy(gathered[0])[0, 0])
                assert first % 4 == turn % 4  # of this append, or of one before that was not interrupted
                assert place.asnumpy(gathered[1])[0, :3].tolist() == [first, first + 1, 0]
                assert int(place.asnumpy(slots)[0, 0]) == 16 * first + 3

    for _ in range(4):
        step()
    assert interrupted_everywhere(step, check) > 10
    place.synchronize()
    assert tables._step.is_idle()
    assert tables._path.is_idle()


def test_a_rebind_interrupted_anywhere(place):
    """All writers of the table are at the old target or at the new one, whose rows lie otherwise."""
    table, _ = table_and_model(place, columns=30)
    other, _ = table_and_model(place, columns=30)
    writer = place.fuse(FusedStagedWriter, [other, table])
    fresh = turn = 0

    def prepare():
        nonlocal fresh, turn
        turn += 1
        fresh = place.asarray(np.zeros((6, 40 + turn % 7 * 100), np.int32))[:, 5:35]

    def check(at):
        want = place.asnumpy(table.gpu).copy()
        for apply in (table.apply_write, writer.apply):
            for row, column in ((5, 29), (2, 1), (5, 3)):  # looked at cell by cell
                want[row, column] = 1000 * turn + row
                table.stage_write(row, column, [1000 * turn + row])
            apply()
        assert_tables_equal(place.asnumpy(table.gpu), want, group=at)
        if table.gpu is not fresh:
            assert not place.asnumpy(fresh).any()
        return table.gpu is fresh

    assert interrupted_everywhere(lambda: table.rebind(fresh), check, prepare) > 20
    assert table.gpu is fresh


def test_a_rebind_of_a_group_interrupted_anywhere(place):
    """Appends and steps are at the old table or at the new one, and what a step may read stays alive."""
    tables = place.make(BlockTables, [16, 16], 4, 64, [8, 8])
    fresh = turn = 0

    def prepare():
        nonlocal fresh, turn
        turn += 1
        fresh = place.asarray(np.full((4, 20 + turn % 5), turn, np.int32))[:, 3:11]

    def check(at):
        tables.append_block_ids(turn % 4, [[turn], [turn]], overwrite=True)
        tables.apply_staged_writes()
        row = np.array([turn % 4], np.int32)
        gathered, _ = tables.prepare_step(row, np.array([0, 1], np.int32), np.array([3]), 1, 1)
        assert int(place.asnumpy(gathered[0])[0, 0]) == turn, at
        assert place.asnumpy(tables.block_tables[0].gpu)[turn % 4, 0] == turn, at

    def reads_what_is_bound(at):
        """Before the next apply."""
        row = np.array([2], np.int32)
        gathered = tables.gather_block_tables(place.asarray(row), 1)
        owned = int(tables.num_blocks.np[0, 2])
        bound = place.asnumpy(tables.block_tables[0].gpu)[2, :owned]
        assert place.asnumpy(gathered[0])[0, :owned].tolist() == bound.tolist(), at
        check(at)

    assert interrupted_everywhere(lambda: tables.block_tables[0].rebind(fresh), reads_what_is_bound, prepare) > 20
    assert tables.block_tables[0].gpu is fresh


@pytest.mark.parametrize("times", [3, 1000])
def test_a_rebind_interrupted_over_and_over(place, times):
    """Interrupts are held back; should there be no end of them, nothing is launched until a rebind comes to its end."""
    table, _ = table_and_model(place, columns=30)
    other, _ = table_and_model(place, columns=30)
    writer = place.fuse(FusedStagedWriter, [other, table])
    fresh = place.asarray(np.zeros((6, 900), np.int32))[:, 100:130]
    came = []

    def interrupted(path):
        def note_tables():
            type(path)._note_tables(path)
            if len(came) < times:
                came.append(path)
                raise KeyboardInterrupt

        return note_tables

    for path in (table._path, writer._path):
        with patched(path, _note_tables=interrupted(path)), pytest.raises(KeyboardInterrupt):
            table.rebind(fresh)
        table.stage_write(5, 29, [7])
        if times > 3:
            assert table.gpu is not fresh
            with pytest.raises(RuntimeError, match="rebind once more"):
                (table if path is table._path else writer)._path.apply()
            assert table.num_staged == 1
            came.clear()
            table.rebind(fresh)
        assert table.gpu is fresh
        for apply in (table.apply_write, writer.apply):
            apply()
            assert place.asnumpy(fresh)[5, 29] == 7
            fresh[...] = 0
            table.stage_write(5, 29, [7])
        table.clear_staged_writes()
        fresh = place.asarray(np.zeros((6, 700), np.int32))[:, 10:40]
        came.clear()


def test_a_pool_interrupted_anywhere(place):
    pool = place.make(UvaBufferPool, 8, "i4", max_concurrency=2)
    out = place.asarray(np.zeros(8, np.int32))
    turn = 0

    def call():
        nonlocal turn
        turn += 1
        pool.copy_to_uva([turn] * 8)
        pool.fence()
        pool.copy_to_gpu([turn] * 8, out=out)
        pool.copy_to_uva([turn] * 4)

    def check(at):
        for value in range(3):
            view = pool.copy_to_uva([value] * 8)
            assert place.asnumpy(view).tolist() == [value] * 8, at
            pool.copy_to_gpu([value] * 8, out=out)
            assert place.asnumpy(out).tolist() == [value] * 8, at

    assert interrupted_everywhere(call, check) > 10
    pool.fence()
    place.synchronize()
    assert pool._core.is_idle()


def test_a_sync_interrupted_anywhere(place):
    params = place.make(DeviceParamTable, 5, {"a": "i4"})

    def call():
        params["a"].np[:] += 1
        params.sync()

    def check(at):
        params.sync()
        assert place.asnumpy(params["a"].gpu).tolist() == params["a"].np.tolist(), at

    assert interrupted_everywhere(call, check) > 3
    place.synchronize()
    assert params._core.is_idle()


def test_a_sweep_interrupted_anywhere(host):
    """What is not idle stays retired, whatever happens: nobody frees it by mistake."""
    ring.sweep()
    kept = [object() for _ in range(4)]
    idle = [False, True, False, True]
    before = len(ring._retired)
    for i, thing in enumerate(kept):
        ring.retire(lambda i=i: idle[i], thing)

    def check(_at):
        assert [thing for _, thing in ring._retired[before:] if thing in (kept[0], kept[2])] == [kept[0], kept[2]]

    interrupted_everywhere(ring.sweep, check)
    idle[:] = [True] * 4
    ring.sweep()
    assert not any(thing in kept for _, thing in ring._retired)


def test_an_interrupt_while_waiting_for_a_slot(place):
    table, want = table_and_model(place, columns=20, max_concurrency=1)
    stage(table, want, 0, 0, [1])
    table.apply_write()
    stage(table, want, 1, 0, [2])
    with patched(table._path._fences, wait=raising(KeyboardInterrupt())):
        place.synchronize()
        table._path._done[0] ^= 1 << 40  # as if it were still being read
        with pytest.raises(KeyboardInterrupt):
            table.apply_write()
        table._path._done[0] ^= 1 << 40
    assert table.num_staged == 1
    assert table.stats.launches == 1
    table.apply_write()
    assert_tables_equal(place.asnumpy(table.gpu), want)


# -- threads -----------------------------------------------------------------------------------------------------------


def test_a_second_thread_is_refused_by_every_object(place):
    """A thread inside a call, held there, and another that calls: one RuntimeError each, and both objects work on."""
    table, _ = table_and_model(place, columns=20)
    tables = place.make(BlockTables, [16], 4, 64, [8])
    pool = place.make(UvaBufferPool, 8, "i4")
    params = place.make(DeviceParamTable, 4, {"a": "i4"})
    writer = place.fuse(FusedStagedWriter, [table])
    row = np.zeros(1, np.int32)
    cases = [
        (table._path.lock, [table.apply_write, table.clear_staged_writes, lambda: table.reserve(1, 1)]),
        (writer._path.lock, [writer.apply, writer.refresh_pointers, lambda: writer.reserve(1, 1)]),
        (tables._path.lock, [tables.apply_staged_writes, lambda: tables.append_block_ids(0, [[1]], True)]),
        (tables._step.lock, [lambda: tables.gather_block_tables(row, 1), lambda: tables.get_dummy_slot_mappings(1)]),
        (pool._core.lock, [lambda: pool.copy_to_uva([1]), lambda: pool.copy_to_gpu([1]), pool.fence]),
        (params._core.lock, [params.sync]),
    ]
    for lock, calls in cases:
        inside, leave, refused = threading.Event(), threading.Event(), []

        def hold(lock=lock, inside=inside, leave=leave):
            with lock:
                inside.set()
                leave.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait(60)
        try:
            for call in calls:
                with pytest.raises(RuntimeError, match="in use by another thread") as caught:
                    call()
                refused.append(caught.type)
        finally:
            leave.set()
            thread.join()
        assert refused == [RuntimeError] * len(calls)
        for call in calls:
            call()


def test_different_objects_in_parallel_threads(place):
    """Each thread its own objects of every kind, all at once, each on a stream of its own."""
    failures = []

    def work(salt):
        try:
            rng = np.random.default_rng(salt)
            with place.using(place.new_stream()):
                table, want = table_and_model(place, columns=300)
                tables = place.make(BlockTables, [16], 4, 64, [8])
                pool = place.make(UvaBufferPool, 8, "i4")
                params = place.make(DeviceParamTable, 4, {"a": "i4"})
            with place.using(place.new_stream()):
                for turn in range(40):
                    stage(table, want, turn % 6, turn, rng.integers(0, 99, 1 + 6 * turn).astype(np.int32))
                    table.apply_write()
                    tables.append_block_ids(turn % 4, [[salt, turn]], overwrite=True)
                    tables.apply_staged_writes()
                    copied = pool.copy_to_gpu([salt, turn])
                    params["a"].np[:] = turn
                    params.sync()
                    if turn % 10 == 9:
                        assert_tables_equal(place.asnumpy(table.gpu), want)
                        assert place.asnumpy(tables.block_tables[0].gpu)[turn % 4, :2].tolist() == [salt, turn]
                        assert place.asnumpy(copied).tolist() == [salt, turn]
                        assert place.asnumpy(params["a"].gpu).tolist() == [turn] * 4
        except Exception as error:  # noqa: BLE001 - shown by the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=work, args=(salt + 1,)) for salt in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- the core's own corners --------------------------------------------------------------------------------------------


def test_a_log_that_grew_keeps_the_facts_that_the_packer_has(place):
    """Contents outgrown between two applies: the packer still looks up where the old block lay."""
    table, want = table_and_model(place)
    log = table._log
    facts = log.contents, log.ring[log.turn]
    for row in range(6):
        stage(table, want, row, 3, np.full(3500, row, np.int32))
    if facts[1].direct:
        assert log.ring[log.turn].replaced is facts[1]
        assert table._path._words[packing.DIRECT] == facts[1].direct
    for _ in range(4):
        table.apply_write()
        assert_tables_equal(place.asnumpy(table.gpu), want)
        for row in range(6):
            stage(table, want, row, row, np.full(3500, row, np.int32))
    assert log.ring[log.turn].replaced is None


def test_a_writer_of_one_member_leaves_the_members_blocks_alone(place):
    """Long writes are read where they were staged, and only the member's own path knows until when."""
    table, want = table_and_model(place, max_concurrency=1)
    blocks = list(table._log.ring)
    writer = place.fuse(FusedStagedWriter, [table], max_concurrency=1)
    assert table._log.ring == blocks
    other = place.new_stream()
    place.stall(20)
    for turn in range(12):
        stage(table, want, turn % 6, 0, np.full(3000, turn, np.int32))
        if turn % 3 == 0:
            table.apply_write()
        else:
            with place.using(other):
                writer.apply(wait_for=() if place.stream is None else place.stream)
            if place.on_gpu:
                place.stream.wait_event(other.record())
    assert_tables_equal(place.asnumpy(table.gpu), want)


def test_an_event_is_asked_whether_a_capture_recorded_it(monkeypatch):
    """The driver's other answers, for events that have no time or are not done, say nothing of a capture."""
    asked = []

    class Event:
        ptr = 0x1230

    class Driver:
        answer = 0

        def cuEventElapsedTime(self, _time, start, end):
            asked.append((start, end))
            return self.answer

    driver = Driver()
    monkeypatch.setattr(backends, "driver", lambda: driver)
    event = Event()
    for driver.answer in (0, 400, 600):
        assert backends.refuse_captured(event) is event
    driver.answer = 907
    with pytest.raises(CaptureError, match="recorded in a capture that is under way"):
        backends.refuse_captured(event)
    assert asked == [(0x1230, 0x1230)] * 4


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_an_event_of_a_capture_is_refused(gpu, mode, timed):
    """Before anything is drawn into the capture, which goes on and ends well; the writes stay staged."""
    table, want = table_and_model(gpu, columns=20)
    counter = gpu.asarray(np.zeros(1, np.int32))
    capturing, ours, other = gpu.new_stream(), gpu.new_stream(), gpu.new_stream()
    for stream in (None, ours):
        stage(table, want, 1, 0, [5])
        table.apply_write(stream=stream)
    stage(table, want, 2, 0, [6])
    event = gpu.cupy.cuda.Event(disable_timing=not timed)
    add = gpu.cupy.RawKernel('extern "C" __global__ void add(int* at) { at[0] += 1; }', "add")
    add((1,), (1,), (counter,))
    gpu.synchronize()
    capturing.begin_capture(getattr(gpu.runtime, f"streamCaptureMode{mode}"))
    with gpu.using(capturing):
        add((1,), (1,), (counter,))
    event.record(capturing)
    for waiting in (event, [other, event]):
        for stream in (None, ours):
            with pytest.raises(CaptureError, match="recorded in a capture"):
                table.apply_write(stream=stream, wait_for=waiting)
    assert not ours.is_capturing()
    assert not other.is_capturing()
    with gpu.using(capturing):
        add((1,), (1,), (counter,))
    graph = capturing.end_capture()
    assert table.num_staged == 1
    graph.launch(ours)
    event.record(ours)
    table.apply_write(wait_for=event)
    assert_tables_equal(gpu.asnumpy(table.gpu), want)
    assert int(gpu.asnumpy(counter)[0]) == 3


def test_a_pool_dropped_with_a_view_that_nobody_fenced(gpu):
    """Its kernel still reads: the buffer is fenced when what was dropped is looked through, and kept until then."""
    out, values = gpu.asarray(np.full(3000, -77, np.int32)), np.arange(3000, dtype=np.int32)
    pool = gpu.make(UvaBufferPool, 3000, "i4")
    size = len(pool._core._slots[0].block.array)
    gpu.read(pool.copy_to_uva(values + 1), out)
    pool.fence()
    gpu.synchronize()
    gpu.stall(100)
    gpu.read(pool.copy_to_uva(values), out)
    del pool
    gc.collect()
    ring.sweep()
    blocks = [gpu.cupy.cuda.alloc_pinned_memory(size) for _ in range(100)]
    for block in blocks:
        np.frombuffer(block, np.int32, size // 4)[:] = -7
    assert gpu.asnumpy(out).tolist() == values.tolist()


def test_more_fenced_views_than_there_were_fence_words(place):
    """A pool of many slots waits for the slot that it takes, and for no other."""
    pool = place.make(UvaBufferPool, 2, "i4", max_concurrency=40)
    for turn in range(90):
        view = pool.copy_to_uva([turn, turn])
        pool.fence()
        if turn % 30 == 29:
            assert place.asnumpy(view).tolist() == [turn, turn]
    assert pool._core._num_words == 80
