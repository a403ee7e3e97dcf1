"""One machine of everything: random calls, good and bad, on two streams, against the plain NumPy models.

Each example makes a pool, a published array, tables in device memory, in UVA memory and of the caller's own, a fused
writer, block tables with their steps, and a parameter table; the rules call them in any order. The device is looked at
rarely, so that work piles up behind it, and wholly at the end. CUPY_STAGED_STATEFUL multiplies the number of examples.
"""

import os

import numpy as np
import pytest
from common import POISON, random_values
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from cupy_staged import (
    BlockTables,
    DeviceParamTable,
    FusedStagedWriter,
    StagedWriteTensor,
    UvaBackedTensor,
    UvaBufferPool,
)
from cupy_staged.testing import BlockTablesModel, TableModel, assert_tables_equal

STEPS = 60
EXAMPLES = {"host": 500, "cuda": 50, "nouva": 25}  # of STEPS rules each, for each kind of stream
LENGTHS = st.one_of(st.integers(0, 6), st.sampled_from([15, 16, 17, 33, 63, 64, 65, 120, 300, 1023, 1024, 1500]))
SEEDS = st.integers(0, 2**32 - 1)
ROWS, REQUESTS, TOKENS = 7, 5, 48
OPTIONS = (
    ([16], [6], {}),
    ([16, 32, 4], [6, 3, 9], {"kernel_block_sizes": [16, 8, 2]}),
    ([8, 16], [5, 4], {"cp_size": 2, "cp_rank": 1, "cp_interleave": 4, "dcp_sharded": [True, False]}),
    ([4] * 5, [7] * 5, {"slot_mapping_enabled": [True, False, True, True, True]}),
)


class Machine(RuleBasedStateMachine):
    """All objects of one place, and a model of each. Where streams change, `wait_for` keeps the order."""

    place = None  # set by the test

    @initialize(
        dtype=st.sampled_from(["i4", "u4", "f4"]),
        slots=st.integers(1, 3),
        columns=st.sampled_from([3, 64, 301, 1700]),
        option=st.sampled_from(OPTIONS),
        h2d=st.booleans(),
        seed=SEEDS,
    )
    def make(self, dtype, slots, columns, option, h2d, seed):
        place = self.place
        self.dtype, self.columns, self.slots = np.dtype(dtype), columns, slots
        self.streams = [place.stream, place.new_stream()]
        self.last = [None] * 4  # stream of the last work on each table, on the block tables
        self.rng = np.random.default_rng(seed)
        shape = (ROWS, columns)
        self.backing = place.asarray(np.full((ROWS, columns + 5), POISON % 128).astype(dtype))
        options = {"max_concurrency": slots}
        self.tensors = [
            place.make(StagedWriteTensor, shape, dtype, contents="h2d" if h2d else "auto", **options),
            place.make(StagedWriteTensor, shape, dtype, uva_instead_of_gpu=True, **options),
            place.make(StagedWriteTensor, shape, dtype, target=self.backing[:, 1 : 1 + columns], **options),
        ]
        self.models = [TableModel(shape, dtype) for _ in self.tensors]
        self.models[2].table[...] = POISON % 128
        self.writer = place.fuse(FusedStagedWriter, self.tensors, **options)
        self.pool = place.make(UvaBufferPool, 2, dtype, **options)
        self.views = []  # (view, values) of the hand-outs that are still valid
        self.backed = place.make(UvaBackedTensor, 33, dtype, **options)
        self.params = place.make(DeviceParamTable, REQUESTS, {"x": dtype, "flag": "bool"})
        self.published = np.zeros(REQUESTS, dtype)
        sizes, blocks, more = option
        self.block_tables = place.make(BlockTables, sizes, REQUESTS, TOKENS, blocks, **more, **options)
        self.block_model = BlockTablesModel(sizes, REQUESTS, TOKENS, blocks, **more)
        self.launches = [0] * 5  # of each tensor, the writer, the block tables

    # -- what the rules share

    def order(self, which, second):
        """The stream for the next work on tables `which`, and the streams that it has to wait for."""
        stream = self.streams[second]
        before = [
            s for s in {id(self.last[w]): self.last[w] for w in which}.values() if s is not None and s is not stream
        ]
        for w in which:
            self.last[w] = stream
        return stream, before

    def values(self, n):
        return random_values(self.rng, self.dtype, n)

    def compare(self, which):
        place, stream = self.place, self.last[which]
        with place.using(stream):
            assert_tables_equal(place.asnumpy(self.tensors[which].gpu), self.models[which].table, group=which)

    def compare_blocks(self):
        place = self.place
        with place.using(self.last[3]):
            for group, model in enumerate(self.block_model.tables):
                got = place.asnumpy(self.block_tables.block_tables[group].gpu)
                for row in range(REQUESTS):  # behind its count a row may hold anything
                    count = self.block_model.applied_num_blocks[group, row]
                    assert got[row, :count].tolist() == model.table[row, :count].tolist()
            counts = place.asnumpy(self.block_tables.num_blocks.gpu)
        assert_tables_equal(counts, self.block_model.applied_num_blocks)
        assert_tables_equal(self.block_tables.num_blocks.np, self.block_model.num_blocks)

    # -- tables

    @rule(
        which=st.integers(0, 2),
        row=st.integers(-1, ROWS),
        start=st.integers(-2, 2000),
        n=LENGTHS,
        kind=st.integers(0, 9),
    )
    def write(self, which, row, start, n, kind):
        """One write: good mostly, sometimes outside, of the wrong kind, or raising midway."""
        tensor, model = self.tensors[which], self.models[which]
        if kind:  # fit it
            start = start % (self.columns + 1)
            n = min(n, self.columns - start)
        values = self.values(n)
        given = values.tolist() if kind < 6 else values
        if kind == 1 and n:
            given[-1] = None
        elif kind == 2:
            with pytest.raises(ZeroDivisionError):
                tensor.stage_write(row, start, (value if i < n else 1 // 0 for i, value in enumerate([*given, 0])))
            return
        try:
            model.stage_write(row, start, given)
        except (IndexError, TypeError) as error:
            with pytest.raises(type(error)):
                tensor.stage_write(row, start, given)
            return
        tensor.stage_write(row, start, given)
        values[:] = 0  # both took a snapshot

    @rule(
        which=st.integers(0, 2),
        count=st.integers(0, 40),
        longest=st.sampled_from([1, 5, 70, 1200]),
        bad=st.integers(0, 7),
    )
    def batch(self, which, count, longest, bad):
        """A batch as arrays; one in eight has one bad write, at any place, and stages nothing."""
        rng, longest = self.rng, min(longest, self.columns)
        lengths = rng.integers(0, longest + 1, count)
        starts = rng.integers(0, self.columns - lengths + 1)
        rows = rng.integers(0, ROWS, count)
        values, totals = self.values(int(lengths.sum())), np.cumsum(lengths)
        if bad == 0 and count:
            (rows if count % 2 else starts)[rng.integers(0, count)] = self.columns + ROWS
            with pytest.raises(IndexError):
                self.tensors[which].stage_writes(rows, starts, values, totals)
            return
        self.tensors[which].stage_writes(rows, starts, values, totals)
        for w in range(count):
            self.models[which].stage_write(rows[w], starts[w], values[totals[w] - lengths[w] : totals[w]])

    @rule(which=st.integers(0, 2), second=st.integers(0, 1), look=st.integers(0, 3))
    def apply(self, which, second, look):
        stream, before = self.order([which], second)
        self.launches[which] += any(len(values) for _, _, values in self.models[which].staged)
        self.tensors[which].apply_write(stream, wait_for=before)
        self.models[which].apply()
        assert self.tensors[which].num_staged == 0
        if look == 0:
            self.compare(which)

    @rule(second=st.integers(0, 1), look=st.integers(0, 3))
    def apply_fused(self, second, look):
        stream, before = self.order([0, 1, 2], second)
        self.launches[3] += any(len(values) for model in self.models for _, _, values in model.staged)
        self.writer.apply(stream, wait_for=before)
        for model in self.models:
            model.apply()
        if look == 0:
            self.compare(int(self.rng.integers(0, 3)))

    @rule(which=st.integers(0, 2), what=st.integers(0, 5))
    def now_and_then(self, which, what):
        tensor, model = self.tensors[which], self.models[which]
        if what < 2:
            tensor.clear_staged_writes()
            model.clear()
        elif what == 2:
            tensor.reserve(int(self.rng.integers(0, 300)), int(self.rng.integers(0, 5000)))
        elif what == 3:
            self.writer.reserve(int(self.rng.integers(0, 300)), int(self.rng.integers(0, 5000)))
        elif what == 4 and which != 1:
            fresh = self.values(ROWS * (self.columns + 2)).reshape(ROWS, -1)
            tensor.rebind(self.place.asarray(fresh)[:, 1 : 1 + self.columns])
            model.table[...] = fresh[:, 1 : 1 + self.columns]
        else:
            with pytest.raises((ValueError, TypeError)):
                tensor.rebind(self.place.asarray(np.zeros((ROWS + 1, self.columns), self.dtype)))
            with pytest.raises(TypeError):
                tensor.stage_writes([0.5], [0], [1], [1])

    # -- pool and published array

    @rule(n=LENGTHS, as_list=st.booleans(), second=st.integers(0, 1), fence=st.booleans())
    def hand_out(self, n, as_list, second, fence):
        stream, values = self.streams[second], self.values(n)
        view = self.pool.copy_to_uva(values.tolist() if as_list else values, stream=stream)
        with self.place.using(stream):
            got = self.place.read(view)
        if fence:
            self.pool.fence(stream)
        self.views = [*self.views, (stream, view, got, values)][-self.slots :]
        for its_stream, handed_out, read, want in self.views:
            with self.place.using(its_stream):
                assert len(handed_out) == len(want)
                if n % 4 == 0:
                    assert_tables_equal(self.place.asnumpy(read), want)
                    assert_tables_equal(self.place.asnumpy(handed_out), want)

    @rule(n=LENGTHS, second=st.integers(0, 1))
    def copy(self, n, second):
        stream, values = self.streams[second], self.values(n)
        with self.place.using(stream):
            got = self.pool.copy_to_gpu(values)
            self.views = [*self.views, (stream, got, got, values)][-self.slots :]

    @rule(bad=st.sampled_from([[None], ["a"], [1, "b"], [2**70], [1j]]))
    def hand_out_badly(self, bad):
        launches = self.pool.stats.launches
        with pytest.raises((TypeError, OverflowError)):
            self.pool.copy_to_uva(bad if self.dtype.kind != "f" or bad != [2**70] else [1e300])
        assert self.pool.stats.launches == launches

    @rule(n=st.integers(-1, 34), second=st.integers(0, 1))
    def publish(self, n, second):
        stream = self.streams[second]
        self.backed.np[:] = self.values(33)
        if not 0 <= n <= 33:
            with pytest.raises(ValueError, match="n must be"):
                self.backed.copy_to_uva(n, stream=stream)
            return
        view = self.backed.copy_to_uva(n, stream=stream)
        assert view is self.backed.gpu
        with self.place.using(stream):
            assert_tables_equal(self.place.asnumpy(view), self.backed.np[:n])
        self.backed.fence(stream)

    # -- parameters

    @rule(row=st.integers(0, REQUESTS - 1), second=st.integers(0, 1), change=st.booleans())
    def sync(self, row, second, change):
        stream, copies = self.streams[second], self.params.stats.copies
        if change:
            self.params["x"].np[row] = self.values(1)[0]
            self.params["flag"].np[row] ^= True
        self.params.sync(stream)
        assert self.params.stats.copies == copies + change
        with self.place.using(stream):
            for name in ("x", "flag"):
                assert_tables_equal(self.place.asnumpy(self.params[name].gpu), self.params[name].np)

    # -- block tables

    @rule(row=st.integers(-1, REQUESTS), seed=SEEDS, overwrite=st.booleans(), bad=st.integers(0, 11))
    def append(self, row, seed, overwrite, bad):
        """One request; too many blocks, a bad row and ids that do not fit come too, and stage nothing in any group."""
        rng = np.random.default_rng(seed)
        top = 2**31 // max(self.block_model.split) - 1
        ids = [
            rng.integers(0, top, rng.integers(0, 1 + blocks // 2)).tolist() for blocks in self.block_model.max_blocks
        ]
        if bad == 0:
            ids[-1].append(2**31)
        elif bad == 1:
            ids[-1].append(0.5)
        elif bad == 2:
            ids.append([1])
        try:
            self.block_model.append_block_ids(row, ids, overwrite)
        except (IndexError, OverflowError, TypeError, ValueError) as error:
            with pytest.raises((type(error), OverflowError) if bad == 0 else type(error)):
                self.block_tables.append_block_ids(row, ids, overwrite)
        else:
            self.block_tables.append_block_ids(row, ids, overwrite)
        assert_tables_equal(self.block_tables.num_blocks.np, self.block_model.num_blocks)

    @rule(seed=SEEDS, count=st.integers(0, 9), bad=st.booleans())
    def append_batch(self, seed, count, bad):
        rng = np.random.default_rng(seed)
        rows = rng.integers(0, REQUESTS, count)
        overwrite = rng.random(count) < 0.5
        if bad and count:
            rows[-1] = REQUESTS
        lengths = [rng.integers(0, 3, count) for _ in self.block_model.max_blocks]
        ids = [rng.integers(0, 1000, n.sum()).astype(np.int32) for n in lengths]
        totals = [np.cumsum(n) for n in lengths]
        try:
            self.block_model.append_block_ids_batch(rows, ids, totals, overwrite)
        except (IndexError, OverflowError) as error:
            with pytest.raises(type(error)):
                self.block_tables.append_block_ids_batch(rows, ids, totals, overwrite)
        else:
            self.block_tables.append_block_ids_batch(rows, ids, totals, overwrite)
        assert_tables_equal(self.block_tables.num_blocks.np, self.block_model.num_blocks)

    @rule(second=st.integers(0, 1), look=st.integers(0, 3))
    def apply_blocks(self, second, look):
        stream, before = self.order([3], second)
        self.block_tables.apply_staged_writes(stream, wait_for=before)
        self.block_model.apply()
        if look == 0:
            self.compare_blocks()

    @rule(seed=SEEDS, on_device=st.booleans(), way=st.integers(0, 2), look=st.booleans())
    def step(self, seed, on_device, way, look):
        """A batch with padding, rows that are none, positions past the end; on the stream that wrote the tables."""
        rng, place, tables, model = np.random.default_rng(seed), self.place, self.block_tables, self.block_model
        num_reqs = int(rng.integers(0, REQUESTS + 1))
        rows = rng.integers(-2, REQUESTS + 2, num_reqs).astype(np.int32)
        tokens = int(rng.integers(0, TOKENS + 1)) if num_reqs else 0
        starts = np.sort(rng.integers(0, tokens + 1, num_reqs + 1)).astype(np.int32)
        positions = rng.integers(-3, 200, tokens + 2)
        padded = int(rng.integers(num_reqs, REQUESTS + 1))
        tokens_padded = int(rng.integers(starts[-1], TOKENS + 1))
        arrays = [rows, starts, positions]
        gathered = slots = None
        with place.using(self.last[3]):
            if on_device:
                arrays = [place.asarray(array) for array in arrays]
                place.synchronize()
            if way == 0:
                gathered, slots = tables.prepare_step(*arrays, padded, tokens_padded)
            elif way == 1:
                gathered = tables.gather_block_tables(arrays[0], padded)
            else:
                slots = tables.compute_slot_mappings(*arrays, tokens_padded)
            with pytest.raises(ValueError, match="num_reqs_padded"):
                tables.gather_block_tables(arrays[0], REQUESTS + 1)
            if not on_device:
                rows[:], positions[:] = 0, 0  # snapshots were taken
            if not look:
                return
            rng = np.random.default_rng(seed)  # the same again, for the model
            num_reqs = int(rng.integers(0, REQUESTS + 1))
            rows = rng.integers(-2, REQUESTS + 2, num_reqs).astype(np.int32)
            tokens = int(rng.integers(0, TOKENS + 1)) if num_reqs else 0
            starts = np.sort(rng.integers(0, tokens + 1, num_reqs + 1)).astype(np.int32)
            positions = rng.integers(-3, 200, tokens + 2)
            if gathered is not None:
                for group, want in enumerate(model.gather_block_tables(rows, padded)):
                    assert_tables_equal(place.asnumpy(gathered[group]), want, group=group)
            if slots is not None:
                want = model.compute_slot_mappings(rows, starts, positions, tokens_padded)
                assert_tables_equal(place.asnumpy(slots), want[:, :tokens_padded])
                assert_tables_equal(place.asnumpy(tables.slot_mappings), want)

    @precondition(lambda self: hasattr(self, "pool"))
    @rule(milliseconds=st.sampled_from([0.2, 1, 3]), second=st.integers(0, 1))
    def stall(self, milliseconds, second):
        """Let work pile up behind a busy stream."""
        if self.place.on_gpu:
            self.place.stall(milliseconds, self.streams[second])

    def teardown(self):
        if not hasattr(self, "launches"):
            return
        self.place.synchronize()
        for which in range(3):
            self.compare(which)
        self.compare_blocks()
        for which, thing in enumerate([*self.tensors, self.writer]):
            assert thing.stats.launches == self.launches[which]
        assert self.writer._path.is_idle()
        assert self.block_tables._path.is_idle()
        assert self.block_tables._step.is_idle()


def test_everything_at_random(place):
    """Of this kind of place as many steps as it takes: see EXAMPLES."""
    examples = EXAMPLES[place.name.partition("-")[0]] * int(os.environ.get("CUPY_STAGED_STATEFUL", "1"))
    machine = type("Machine", (Machine,), {"place": place})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
