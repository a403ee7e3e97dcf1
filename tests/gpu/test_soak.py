"""A long run of random applies: right all the way, and neither host nor device memory grows once it is warm.

CUPY_STAGED_SOAK is the number of applies in all (20 000 by default, a million for a release).
"""

import gc
import os

import numpy as np
from common import random_values

from cupy_staged import BlockTables, DeviceParamTable, FusedStagedWriter, StagedWriteTensor, UvaBufferPool
from cupy_staged.testing import BlockTablesModel, assert_tables_equal

APPLIES = int(os.environ.get("CUPY_STAGED_SOAK", "20000"))
PLACES = 6  # three streams, with UVA memory and without
LOOK_EVERY = 1000
ROWS, COLUMNS, REQUESTS, BLOCKS = 64, 3000, 32, 24


def resident_bytes():
    """Host memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """The objects, their plain NumPy likenesses, and one random round of four applies and a step."""

    def __init__(self, place, seed=7):
        self.place, self.rng = place, np.random.default_rng(seed)
        self.tables = [place.make(StagedWriteTensor, (ROWS, COLUMNS + group), "i4") for group in range(3)]
        self.alone = place.make(StagedWriteTensor, (ROWS, COLUMNS), "f4", uva_instead_of_gpu=True, max_concurrency=3)
        self.writer = place.fuse(FusedStagedWriter, self.tables)
        self.blocks = place.make(BlockTables, [16, 32], REQUESTS, 256, [BLOCKS] * 2, kernel_block_sizes=[16, 16])
        self.pool = place.make(UvaBufferPool, 4096, "i4")
        self.params = place.make(DeviceParamTable, REQUESTS, {"x": "f4", "k": "i4"})
        self.out = place.asarray(np.zeros(4096, np.int32))
        self.wants = [np.zeros(table.shape, np.int32) for table in self.tables]
        self.want_alone = np.zeros((ROWS, COLUMNS), np.float32)
        self.model = BlockTablesModel([16, 32], REQUESTS, 256, [BLOCKS] * 2, kernel_block_sizes=[16, 16])
        self.copied = np.zeros(0, np.int32)
        self.streams = [place.stream, place.new_stream()]
        self.last = place.stream
        for thing in (*self.tables, self.alone, self.writer):
            thing.reserve(200, 40_000)
        self.objects = (*self.tables, self.alone, self.writer, self.blocks, self.pool, self.params)

    def lengths(self, count):
        """Mostly short, a few long."""
        rng = self.rng
        longest = np.where(rng.random(count) < 0.02, 2500, np.where(rng.random(count) < 0.2, 100, 4))
        return rng.integers(0, longest + 1)

    def stage(self, table, want):
        rng, dtype = self.rng, want.dtype
        lengths = self.lengths(int(rng.integers(1, 12)))
        rows, starts = rng.integers(0, ROWS, len(lengths)), rng.integers(0, COLUMNS - lengths + 1)
        values, totals = random_values(rng, dtype, int(lengths.sum())), np.cumsum(lengths)
        table.stage_writes(rows, starts, values, totals)
        for row, start, end, length in zip(rows, starts, totals, lengths, strict=True):
            want[row, start : start + length] = values[end - length : end]

    def round(self):
        """Four applies; returns that. They change streams now and then, in order by `wait_for`."""
        rng = self.rng
        stream = self.streams[int(rng.random() < 0.1)]
        before = () if stream is self.last else self.last
        for table, want in zip(self.tables, self.wants, strict=True):
            if rng.random() < 0.7:
                self.stage(table, want)
        if rng.random() < 0.2:
            self.tables[0].apply_write(stream, wait_for=before)
        self.writer.apply(stream, wait_for=before)
        self.stage(self.alone, self.want_alone)
        self.alone.apply_write(stream, wait_for=before)
        row = int(rng.integers(0, REQUESTS))
        restart = bool(self.model.num_blocks[:, row].max() > BLOCKS - 4)
        ids = [rng.integers(0, 10_000, rng.integers(0, 3)).tolist() for _ in range(2)]
        self.blocks.append_block_ids(row, ids, restart)
        self.model.append_block_ids(row, ids, restart)
        self.blocks.apply_staged_writes(stream, wait_for=before)
        self.model.apply()
        self.copied = rng.integers(0, 99, rng.integers(1, 4096)).astype(np.int32)
        with self.place.using(stream):
            self.pool.copy_to_gpu(self.copied, out=self.out[: len(self.copied)])
            self.params["x"].np[row] = rng.random()
            self.params.sync()
            self.rows = rng.integers(-1, REQUESTS, 8).astype(np.int32)
            self.starts = np.arange(9, dtype=np.int32) * 2
            self.positions = rng.integers(0, 16 * BLOCKS, 16)
            self.step = self.blocks.prepare_step(self.rows, self.starts, self.positions, 8, 32)
        self.last = stream
        return 4

    def check(self):
        place = self.place
        with place.using(self.last):
            for group, (table, want) in enumerate(zip(self.tables, self.wants, strict=True)):
                assert_tables_equal(place.asnumpy(table.gpu), want, group=group)
            assert_tables_equal(place.asnumpy(self.alone.gpu), self.want_alone)
            assert_tables_equal(place.asnumpy(self.blocks.num_blocks.gpu), self.model.applied_num_blocks)
            for group, want in enumerate(self.model.gather_block_tables(self.rows, 8)):
                assert_tables_equal(place.asnumpy(self.step[0][group]), want, group=group)
            want = self.model.compute_slot_mappings(self.rows, self.starts, self.positions, 32)
            assert_tables_equal(place.asnumpy(self.blocks.slot_mappings), want)
            assert_tables_equal(place.asnumpy(self.out)[: len(self.copied)], self.copied)
            assert_tables_equal(place.asnumpy(self.params["x"].gpu), self.params["x"].np)

    def allocations(self):
        return [thing.stats.host_allocations for thing in self.objects]


def test_a_long_run(place):
    """The host runs it too, but for the memory of a device that it does not have."""
    soak = Soak(place)
    applies, target = 0, APPLIES // PLACES if place.on_gpu else min(APPLIES, 8000)
    next_look, warm = 500, None
    while applies < target or warm is None:
        applies += soak.round()
        if applies < next_look:
            continue
        next_look += LOOK_EVERY
        soak.check()
        place.synchronize()
        if warm is None:  # a few rounds to warm up: sizes have been met, CuPy's pools have what they need
            gc.collect()
            warm = soak.allocations()
            host, free = resident_bytes(), device_bytes_free(place)
    soak.check()
    assert soak.allocations() == warm
    gc.collect()
    place.synchronize()
    assert resident_bytes() - host < 24 << 20
    assert free - device_bytes_free(place) < 24 << 20
    assert soak.writer.stats.launches > target // 8


def device_bytes_free(place):
    """Device memory that nobody has; 0 on the host."""
    if not place.on_gpu:
        return 0
    return int(place.runtime.memGetInfo()[0])
