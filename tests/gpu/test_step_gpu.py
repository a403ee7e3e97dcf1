"""Steps and captures: what only a GPU can show about gather, slot mapping and parameter tables."""

import contextlib
import time

import numpy as np
import pytest

from cupy_staged import BlockTables, CaptureError, DeviceParamTable
from cupy_staged.testing import BlockTablesModel, assert_tables_equal

REQS, TOKENS = 8, 96
SHAPE = ([16, 4, 32], REQS, TOKENS, [6, 30, 4])
RANKS = {"cp_size": 2, "cp_rank": 1, "cp_interleave": 2, "dcp_sharded": [True, False, True]}
OPTIONS = {"kernel_block_sizes": [16, 2, 8]} | RANKS


class Inputs:
    """The fixed device buffers that a captured graph reads, as long as a step can be: the rest is padding."""

    def __init__(self, place):
        self.place = place
        self.rows = place.asarray(np.full(REQS, -1, np.int32))
        self.starts = place.asarray(np.zeros(REQS + 1, np.int32))
        self.positions = place.asarray(np.zeros(TOKENS, np.int64))

    def set(self, rows, starts, positions):
        full = np.full(REQS, -1, np.int32), np.full(REQS + 1, starts[-1], np.int32), np.full(TOKENS, 3, np.int64)
        for target, source, values in zip(self.arrays, full, (rows, starts, positions), strict=True):
            source[: len(values)] = values
            target.set(source)  # in the order of the current stream, which waits for it

    @property
    def arrays(self):
        return self.rows, self.starts, self.positions


@contextlib.contextmanager
def capturing(stream):
    """Capture what is launched on `stream`, which is current meanwhile; the list gets the graph."""
    graph = []
    with stream:
        stream.begin_capture()
        try:
            yield graph
        finally:
            graph.append(stream.end_capture())


def make(place):
    return place.make(BlockTables, *SHAPE, **OPTIONS), BlockTablesModel(*SHAPE, **OPTIONS)


def stage(rng, tables, model):
    """Append to some rows, or hand them to a new owner."""
    for row in rng.permutation(REQS)[:3].tolist():
        fresh = rng.random() < 0.5
        owned = [0] * 3 if fresh else (model.num_blocks[:, row] // model.split).tolist()
        room = [most - n for most, n in zip(model.max_blocks, owned, strict=True)]
        ids = [rng.integers(0, 5000, rng.integers(0, n + 1)).tolist() for n in room]
        tables.append_block_ids(row, ids, fresh)
        model.append_block_ids(row, ids, fresh)


def random_step(rng):
    num_reqs = int(rng.integers(0, REQS + 1))
    rows = rng.integers(-1, REQS + 1, num_reqs).astype(np.int32)
    starts = np.sort(rng.integers(0, (TOKENS if num_reqs else 0) + 1, num_reqs + 1)).astype(np.int32)
    return rows, starts, rng.integers(-1, 260, int(starts[-1]))


def check(place, tables, model, rows, starts, positions):
    for group, want in enumerate(model.gather_block_tables(rows, REQS)):
        assert_tables_equal(place.asnumpy(tables.input_block_tables[group]), want, group=group)
    want = model.compute_slot_mappings(rows, starts, positions, TOKENS)
    assert_tables_equal(place.asnumpy(tables.slot_mappings), want)


@pytest.mark.parametrize("fused", [False, True])
def test_a_graph_is_replayed_over_100_steps(gpu, fused):
    rng = np.random.default_rng(1)
    tables, model = make(gpu)
    inputs = Inputs(gpu)
    with capturing(gpu.new_stream()) as graph:
        if fused:
            tables.prepare_step(*inputs.arrays, REQS, TOKENS)
        else:
            tables.gather_block_tables(inputs.rows, REQS)
            tables.compute_slot_mappings(*inputs.arrays, TOKENS)
    for _ in range(100):
        stage(rng, tables, model)
        tables.apply_staged_writes()
        model.apply()
        step = random_step(rng)
        inputs.set(*step)
        graph[0].launch(gpu.stream)
        check(gpu, tables, model, *step)


def test_graph_and_eager_steps_alternate(gpu):
    rng = np.random.default_rng(2)
    tables, model = make(gpu)
    inputs = Inputs(gpu)
    with capturing(gpu.new_stream()) as graph:
        found, slots = tables.prepare_step(*inputs.arrays, REQS, TOKENS)
    for _ in range(20):
        stage(rng, tables, model)
        tables.apply_staged_writes()
        model.apply()
        step = random_step(rng)
        inputs.set(*step)
        graph[0].launch(gpu.stream)
        check(gpu, tables, model, *step)
        step = random_step(rng)
        eager = tables.prepare_step(*step, REQS, TOKENS)
        assert eager[0] is found
        assert eager[1] is slots
        check(gpu, tables, model, *step)


def test_a_graph_sees_exchanged_tables(gpu):
    rng = np.random.default_rng(3)
    tables, model = make(gpu)
    inputs = Inputs(gpu)
    with capturing(gpu.new_stream()) as graph:
        tables.prepare_step(*inputs.arrays, REQS, TOKENS)
    step = np.arange(REQS, dtype=np.int32), np.arange(REQS + 1, dtype=np.int32), rng.integers(0, 64, REQS)
    inputs.set(*step)
    for _ in range(4):
        stage(rng, tables, model)
        tables.apply_staged_writes()
        model.apply()
        for group, table in enumerate(tables.block_tables):
            wide = gpu.asarray(np.full((REQS, table.gpu.shape[1] + 5), -9, np.int32))
            home = wide[:, 2:-3]  # another address, and another stride
            home[...] = gpu.asarray(model.tables[group].table)
            gpu.synchronize()
            table.rebind(home)
        tables.refresh_pointers()
        graph[0].launch(gpu.stream)
        check(gpu, tables, model, *step)


def test_out_in_a_capture(gpu):
    rng = np.random.default_rng(4)
    tables, model = make(gpu)
    stage(rng, tables, model)
    tables.apply_staged_writes()
    model.apply()
    inputs = Inputs(gpu)
    out = [gpu.asarray(np.full((REQS, t.gpu.shape[1]), -5, np.int32)) for t in tables.block_tables]
    slots = gpu.asarray(np.full((3, TOKENS), -5, np.int64))
    with capturing(gpu.new_stream()) as graph:
        tables.gather_block_tables(inputs.rows, REQS, out)
        tables.compute_slot_mappings(*inputs.arrays, TOKENS, slots)
    step = random_step(rng)
    inputs.set(*step)
    graph[0].launch(gpu.stream)
    for group, want in enumerate(model.gather_block_tables(step[0], REQS)):
        assert_tables_equal(gpu.asnumpy(out[group]), want, group=group)
    assert_tables_equal(gpu.asnumpy(slots), model.compute_slot_mappings(*step, TOKENS))
    assert not gpu.asnumpy(tables.input_block_tables[0]).any()


def test_dummies_in_a_capture(gpu):
    rng = np.random.default_rng(5)
    tables, model = make(gpu)
    with capturing(gpu.new_stream()) as graph:
        tables.get_dummy_block_tables(REQS)
        tables.get_dummy_slot_mappings(TOKENS)
    stage(rng, tables, model)
    tables.apply_staged_writes()
    model.apply()
    step = random_step(rng)
    tables.prepare_step(*step, REQS, TOKENS)
    check(gpu, tables, model, *step)
    graph[0].launch(gpu.stream)
    assert not any(gpu.asnumpy(array).any() for array in tables.input_block_tables)
    assert (gpu.asnumpy(tables.slot_mappings) == -1).all()


def test_what_needs_a_slot_raises_in_a_capture_which_ends_well(gpu):
    rng = np.random.default_rng(6)
    tables, model = make(gpu)
    params = gpu.make(DeviceParamTable, 4, {"x": "i4"})
    inputs = Inputs(gpu)
    step = random_step(rng)
    with capturing(gpu.new_stream()) as graph:
        stage(rng, tables, model)  # staging is allowed
        params["x"].np[:] = 7
        for call in (
            tables.apply_staged_writes,
            tables.refresh_pointers,
            params.sync,
            lambda: tables.prepare_step(*step, REQS, TOKENS),
            lambda: tables.gather_block_tables(step[0], REQS),
            lambda: tables.compute_slot_mappings(*step, TOKENS),
        ):
            with pytest.raises(CaptureError):
                call()
        tables.prepare_step(*inputs.arrays, REQS, TOKENS)
    tables.apply_staged_writes()
    model.apply()
    params.sync()
    inputs.set(*step)
    graph[0].launch(gpu.stream)
    check(gpu, tables, model, *step)
    assert (gpu.asnumpy(params["x"].gpu) == 7).all()


def test_steps_do_not_break_a_capture_on_another_stream(gpu):
    """A capture in global mode dies from an allocation or an event query on any stream: a steady step makes neither."""
    rng = np.random.default_rng(7)
    tables, model = make(gpu)
    inputs = Inputs(gpu)
    steps = [random_step(rng) for _ in range(2)]
    inputs.set(*steps[0])
    tables.prepare_step(*steps[1], REQS, TOKENS)
    gpu.synchronize()
    stream = gpu.new_stream()
    stream.begin_capture(gpu.runtime.streamCaptureModeGlobal)
    try:
        tables.prepare_step(*inputs.arrays, REQS, TOKENS)
        tables.prepare_step(*steps[1], REQS, TOKENS)
    finally:
        stream.end_capture()
    check(gpu, tables, model, *steps[1])


def test_a_step_returns_at_once_behind_a_stalled_stream(gpu):
    tables, _ = make(gpu)
    inputs = Inputs(gpu)
    step = random_step(np.random.default_rng(8))
    tables.prepare_step(*step, REQS, TOKENS)
    gpu.synchronize()
    gpu.stall(100)
    begin = time.perf_counter()
    tables.prepare_step(*step, REQS, TOKENS)
    tables.prepare_step(*inputs.arrays, REQS, TOKENS)
    assert time.perf_counter() - begin < 0.005
    assert tables.stats.waits == 0


def test_inputs_of_another_stream_are_used_in_stream_order(gpu):
    """What the current stream writes to the input arrays before the call is what the step reads."""
    rng = np.random.default_rng(9)
    tables, model = make(gpu)
    stage(rng, tables, model)
    tables.apply_staged_writes()
    model.apply()
    inputs = Inputs(gpu)
    step = np.arange(REQS, dtype=np.int32), np.arange(REQS + 1, dtype=np.int32), rng.integers(0, 64, REQS)
    later = [gpu.asarray(array) for array in step]
    gpu.stall(20)
    inputs.rows[...], inputs.starts[...], inputs.positions[:REQS] = later
    tables.prepare_step(*inputs.arrays, REQS, TOKENS)
    check(gpu, tables, model, *step)


def test_arrays_of_another_kind_raise(gpu):
    tables, _ = make(gpu)
    inputs = Inputs(gpu)
    with pytest.raises(TypeError, match="idx_mapping must have dtype int32, got int64"):
        tables.prepare_step(inputs.rows.astype(np.int64), inputs.starts, inputs.positions, REQS, TOKENS)
    with pytest.raises(ValueError, match="contiguous"):
        tables.prepare_step(inputs.rows, inputs.starts, inputs.positions[::-1], REQS, TOKENS)
