"""Random programs on one tensor and on a fused writer, against a plain NumPy table."""

import numpy as np
import pytest
from common import DTYPES, POISON, random_values
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_staged import FusedStagedWriter, StagedWriteTensor, UvaBufferPool
from cupy_staged.testing import TableModel, assert_tables_equal

LENGTHS = st.one_of(st.integers(0, 6), st.sampled_from([15, 16, 17, 33, 63, 64, 65, 120, 300]))


@st.composite
def programs(draw):
    """Shapes, and calls by name with raw numbers; they are fitted to the table when they run."""
    calls = st.one_of(
        st.tuples(st.just("write"), st.integers(0, 99), st.integers(0, 999), LENGTHS, st.booleans()),
        st.tuples(st.just("write"), st.integers(0, 99), st.integers(0, 999), LENGTHS, st.booleans()),
        st.tuples(st.just("batch"), st.integers(0, 40), st.integers(0, 30), st.integers(0, 2**32), st.booleans()),
        st.tuples(st.just("elem"), st.integers(0, 99), st.just(0), st.just(1), st.just(False)),
        st.tuples(st.just("outside"), st.integers(-3, 99), st.integers(-3, 999), LENGTHS, st.booleans()),
        st.tuples(st.just("bad"), st.integers(0, 99), st.integers(0, 999), LENGTHS, st.booleans()),
        st.tuples(st.sampled_from(["apply", "apply", "clear", "reserve", "rebind"]), *[st.integers(0, 999)] * 4),
    )
    return {
        "dtype": draw(st.sampled_from(DTYPES)),
        "shape": (draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 7, 64, 129, 400]))),
        "uva": draw(st.booleans()),
        "h2d": draw(st.booleans()),
        "slots": draw(st.integers(1, 3)),
        "calls": draw(st.lists(calls, max_size=40)),
        "seed": draw(st.integers(0, 2**32)),
    }


def fit(model, row, start, length):
    rows, columns = model.rows.shape
    start %= columns + 1
    return row % rows, start, min(length, columns - start)


def run(place, tensor, model, call, rng):
    """One call on both; returns whether the device changed."""
    name, row, start, length, as_list = call
    dtype, (rows, columns) = model.table.dtype, model.rows.shape
    if name in ("write", "elem"):
        row, start, length = fit(model, row, start, length)
        values = random_values(rng, dtype, length)
        if name == "elem":
            tensor.stage_write_elem(row, values[0].item())
            start = 0
        else:
            tensor.stage_write(row, start, values.tolist() if as_list else values)
        model.stage_write(row, start, values)
    elif name == "batch":
        count, longest = row, min(start, columns)
        lengths = rng.integers(0, longest + 1, count)
        starts = rng.integers(0, columns - lengths + 1)
        where = rng.integers(0, rows, count)
        values = random_values(rng, dtype, int(lengths.sum()))
        totals = np.cumsum(lengths)
        tensor.stage_writes(where, starts, values.tolist() if as_list else values, totals)
        for w in range(count):
            model.stage_write(where[w], starts[w], values[totals[w] - lengths[w] : totals[w]])
    elif name == "outside":
        values = random_values(rng, dtype, length)
        if 0 <= row < rows and 0 <= start <= columns - length:
            start = columns - length + 1
        with pytest.raises(IndexError):
            tensor.stage_write(row, start, values)
        with pytest.raises(IndexError):
            tensor.stage_writes([0, row], [0, start], np.concatenate([values[:0], values]), [0, length])
    elif name == "bad":
        row, start, length = fit(model, row, start, max(length, 1))
        if length:
            values = [*random_values(rng, dtype, length - 1).tolist(), None]
            with pytest.raises(TypeError):
                tensor.stage_write(row, start, values)
    elif name == "clear":
        tensor.clear_staged_writes()
        model.clear()
    elif name == "reserve":
        tensor.reserve(row, start)
    elif name == "rebind":
        fresh = random_values(rng, dtype, rows * (columns + 3)).reshape(rows, columns + 3)
        tensor.rebind(place.asarray(fresh)[:, 1 : 1 + columns])
        model.table[...] = fresh[:, 1 : 1 + columns]
        return True
    return False


@settings(max_examples=120)
@given(programs())
def test_one_tensor(place, program):
    rng = np.random.default_rng(program["seed"])
    options = {"uva_instead_of_gpu": program["uva"], "max_concurrency": program["slots"]}
    if program["h2d"] and not program["uva"]:
        options["contents"] = "h2d"
    tensor = place.make(StagedWriteTensor, program["shape"], program["dtype"], **options)
    model = TableModel(program["shape"], program["dtype"])
    launches = 0
    for call in [*program["calls"], ("apply", 0, 0, 0, 0)]:
        changed = run(place, tensor, model, call, rng)
        if call[0] == "apply":
            launches += any(len(values) for _, _, values in model.staged)
            tensor.apply_write()
            model.apply()
            changed = True
        assert tensor.num_staged == len(model.staged)
        if changed:
            assert_tables_equal(place.asnumpy(tensor.gpu), model.table)
    assert tensor.stats.launches == launches


@settings(max_examples=60)
@given(programs(), st.integers(1, 4))
def test_a_fused_writer(place, program, groups):
    rng = np.random.default_rng(program["seed"])
    rows, columns = program["shape"]
    shapes = [(rows, columns + group) for group in range(groups)]
    tensors = [place.make(StagedWriteTensor, s, program["dtype"], uva_instead_of_gpu=program["uva"]) for s in shapes]
    models = [TableModel(s, program["dtype"]) for s in shapes]
    writer = place.fuse(FusedStagedWriter, tensors, max_concurrency=program["slots"])
    for turn, call in enumerate([*program["calls"], ("apply", 0, 0, 0, 0)]):
        if call[0] != "apply":
            run(place, tensors[turn % groups], models[turn % groups], call, rng)
            continue
        if call[1] % 3 == 2:  # one member alone
            tensors[turn % groups].apply_write()
            models[turn % groups].apply()
        else:
            writer.apply()
            for model in models:
                model.apply()
        for group in range(groups):
            assert_tables_equal(place.asnumpy(tensors[group].gpu), models[group].table, group=group)


@settings(max_examples=60)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["view", "copy", "fence"]), LENGTHS, st.booleans()), max_size=40),
    st.integers(0, 2**32),
)
def test_a_pool(place, dtype, slots, calls, seed):
    """Views stay as they were handed out until their slot comes round; copies stay for ever."""
    rng = np.random.default_rng(seed)
    pool = place.make(UvaBufferPool, 1, dtype, max_concurrency=slots)
    views, copies = [], []
    for name, n, as_list in calls:
        if name == "fence":
            pool.fence()
            continue
        values = random_values(rng, dtype, n)
        given = values.tolist() if as_list else values
        if name == "view":
            views = [*views, (pool.copy_to_uva(given), values)]
        else:
            out = place.asarray(np.full(n, POISON % 128, np.int16).astype(dtype)) if as_list else None
            copies.append((pool.copy_to_gpu(given, out=out), values))
            views = [*views, None]
        views = views[-slots:]
        for pair in views:
            if pair is not None:
                assert_tables_equal(place.asnumpy(pair[0]), pair[1])
    for got, want in copies:
        assert_tables_equal(place.asnumpy(got), want)
