"""FusedStagedWriter on every backend: many tables, one launch."""

import numpy as np
import pytest
from common import POISON, distinct_values, random_values

from cupy_staged import BlockTables, FusedStagedWriter, StagedWriteTensor, kernels
from cupy_staged.testing import TableModel, assert_tables_equal


def make_group(place, widths, dtype="i4", rows=9, **options):
    tensors = [place.make(StagedWriteTensor, (rows, width), dtype, **options) for width in widths]
    return tensors, [TableModel((rows, width), dtype) for width in widths]


def check(place, tensors, models):
    for group, (tensor, model) in enumerate(zip(tensors, models, strict=True)):
        assert_tables_equal(place.asnumpy(tensor.gpu), model.table, group=group)


@pytest.mark.parametrize("contents", ["auto", "h2d"])
@pytest.mark.parametrize("groups", range(1, 9))
def test_one_launch_for_all_groups(place, groups, contents):
    rng = np.random.default_rng(groups)
    widths = [7, 1, 300, 64, 1025, 2, 16, 33][:groups]
    tensors, models = make_group(place, widths, contents=contents)
    writer = place.fuse(FusedStagedWriter, tensors)
    for step in range(5):
        for _ in range(int(rng.integers(1, 60))):
            group = int(rng.integers(groups))
            start = int(rng.integers(0, widths[group] + 1))
            length = int(rng.integers(0, widths[group] - start + 1))
            row, values = int(rng.integers(9)), random_values(rng, "i4", length)
            tensors[group].stage_write(row, start, values)
            models[group].stage_write(row, start, values)
        tensors[0].stage_write(0, 0, [step])
        models[0].stage_write(0, 0, [step])
        writer.apply()
        for model in models:
            model.apply()
        assert [t.num_staged for t in tensors] == [0] * groups
        check(place, tensors, models)
        assert writer.stats.launches == step + 1
    assert sum(t.stats.launches for t in tensors) == 0


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_one_group_uses_the_single_group_entry_point(place, monkeypatch, groups):
    """And several use the one that reads an array of addresses, for tensors and for block tables."""
    names = []
    original = kernels.get_function

    def get_function(backend, file, name, *rest):
        names.append(name)
        return original(backend, file, name, *rest)

    tensors, _ = make_group(place, [3] * groups)
    monkeypatch.setattr(kernels, "get_function", get_function)
    expected = "apply_write_groups" if groups > 1 else "apply_write"
    writer = place.fuse(FusedStagedWriter, tensors)
    tables = place.make(BlockTables, [16] * groups, 4, 64, [8] * groups)
    assert writer._path.targets.grouped == tables._path.targets.grouped == (groups > 1)
    if place.on_gpu:
        assert {name for name in names if name.startswith("apply_write")} == {expected}
    tables.append_block_ids(1, [[5]] * groups, overwrite=True)
    tables.apply_staged_writes()
    assert tables.stats.launches == 1
    assert [place.asnumpy(t.gpu)[1, 0] for t in tables.block_tables] == [5] * groups


def test_groups_with_nothing_staged(place):
    tensors, models = make_group(place, [4, 5, 6])
    writer = place.fuse(FusedStagedWriter, tensors)
    writer.apply()
    tensors[2].stage_write(8, 6, [])
    writer.apply()
    assert writer.stats.launches == 0
    tensors[1].stage_write(8, 4, [7])
    models[1].stage_write(8, 4, [7])
    writer.apply()
    models[1].apply()
    check(place, tensors, models)
    assert (writer.stats.launches, writer.stats.writes, writer.stats.values) == (1, 2, 1)


@pytest.mark.parametrize(
    "dtypes", [("i4", "f4", "u4"), ("u1", "bool", "i1"), ("f8", "i8", "c8"), ("f2", "u2"), ("c16", "c16")]
)
def test_dtypes_of_one_item_size(place, dtypes):
    rng = np.random.default_rng(11)
    tensors = [place.make(StagedWriteTensor, (3, 50), dtype) for dtype in dtypes]
    writer = place.fuse(FusedStagedWriter, tensors)
    wanted = [np.zeros((3, 50), dtype) for dtype in dtypes]
    for tensor, want, dtype in zip(tensors, wanted, dtypes, strict=True):
        for row, start, length in ((0, 3, 1), (1, 1, 40), (2, 0, 50)):
            values = random_values(rng, dtype, length)
            tensor.stage_write(row, start, values)
            want[row, start : start + length] = values
    writer.apply()
    for group, (tensor, want) in enumerate(zip(tensors, wanted, strict=True)):
        assert_tables_equal(place.asnumpy(tensor.gpu), want, group=group)


def test_members_of_every_kind(place):
    """Device, UVA and the caller's own strided and one-dimensional targets in one launch."""
    whole = place.asarray(np.full((5, 40), POISON, np.int32))
    tensors = [
        place.make(StagedWriteTensor, (5, 30), "i4"),
        place.make(StagedWriteTensor, (5, 30), "i4", uva_instead_of_gpu=True),
        place.make(StagedWriteTensor, (5, 10), "i4", target=whole[:, 1:11]),
        place.make(StagedWriteTensor, (5, 25), "i4", target=whole[:, 12:37]),
        place.make(StagedWriteTensor, 5, "i4", target=whole[:, 39]),
    ]
    writer = place.fuse(FusedStagedWriter, tensors)
    for salt, tensor in enumerate(tensors):
        tensor.stage_write(4, 0, distinct_values("i4", tensor.row_length, salt))
        tensor.stage_write(1, 0, [salt])
    writer.apply()
    for salt, tensor in enumerate(tensors):
        got = place.asnumpy(tensor.gpu).reshape(5, -1)
        assert got[4].tolist() == distinct_values("i4", tensor.row_length, salt).tolist()
        assert got[1, 0] == salt
    around = place.asnumpy(whole)
    assert (around[:, [0, 11, 37, 38]] == POISON).all()
    assert (around[[0, 2, 3]] == POISON).all()


def test_a_member_can_be_applied_alone(place):
    tensors, models = make_group(place, [4, 6])
    writer = place.fuse(FusedStagedWriter, tensors)
    for step in range(6):
        for group in (0, 1):
            tensors[group].stage_write(step, group, [step + 1, 10 * group])
            models[group].stage_write(step, group, [step + 1, 10 * group])
        if step % 2:
            tensors[0].apply_write()
            models[0].apply()
            check(place, tensors[:1], models[:1])
            assert tensors[1].num_staged == 1
        writer.apply()
        for model in models:
            model.apply()
        check(place, tensors, models)
    assert (writer.stats.launches, tensors[0].stats.launches) == (6, 3)


def test_a_bad_write_in_the_last_group_leaves_all_others_staged(place):
    tensors, models = make_group(place, [4, 6, 2])
    writer = place.fuse(FusedStagedWriter, tensors)
    tensors[0].stage_write(0, 1, [5])
    models[0].stage_write(0, 1, [5])
    for bad, error in (([1, 2, 3], IndexError), ([2**31], OverflowError), ([0.5], TypeError)):
        with pytest.raises(error):
            tensors[2].stage_write(1, 0, bad)
    assert [t.num_staged for t in tensors] == [1, 0, 0]
    writer.apply()
    models[0].apply()
    check(place, tensors, models)


def test_generations_of_many_groups_behind_a_stall(place):
    groups, steps = 5, 20
    tensors, models = make_group(place, [50, 400, 3, 120, 2000])
    writer = place.fuse(FusedStagedWriter, tensors, max_concurrency=2)
    outs = [place.asarray(np.full((steps, 9, m.table.shape[1]), POISON, np.int32)) for m in models]
    wanted = [np.zeros(out.shape, np.int32) for out in outs]
    place.read(tensors[0].gpu)
    place.stall(30)
    for step in range(steps):
        place.stall(1)
        for group, (tensor, model) in enumerate(zip(tensors, models, strict=True)):
            width = model.table.shape[1]
            values = distinct_values("i4", (step * 37 + group) % width + 1, step)
            tensor.stage_write(step % 9, width - len(values), values)
            model.stage_write(step % 9, width - len(values), values)
        writer.apply()
        for group in range(groups):
            models[group].apply()
            wanted[group][step] = models[group].table
            place.read(tensors[group].gpu, outs[group][step])
    for group in range(groups):
        assert_tables_equal(place.asnumpy(outs[group]), wanted[group], group=group)
    assert writer.stats.launches == steps
    assert (writer.stats.waits > 0) == place.on_gpu


@pytest.mark.parametrize("groups", [1, 3])
def test_rebind_of_a_member(place, groups):
    tensors, models = make_group(place, [40, 5, 7][:groups])
    writer = place.fuse(FusedStagedWriter, tensors)
    for step in range(6):
        for tensor, model in zip(tensors, models, strict=True):
            tensor.stage_write(step, 0, [step + 1, step + 2])
            model.stage_write(step, 0, [step + 1, step + 2])
        if step % 2 == 0:
            place.stall(2)
        writer.apply()
        for model in models:
            model.apply()
        if step % 2:
            old = tensors[-1].gpu
            kept = models[-1].table.copy()
            fresh = np.full(kept.shape, POISON - step, np.int32)
            tensors[-1].rebind(place.asarray(fresh))
            models[-1].table[...] = fresh
            if step == 3:
                writer.refresh_pointers()
            assert_tables_equal(place.asnumpy(old), kept)
        check(place, tensors, models)
    tensors[-1].stage_write(8, 0, [9])  # the member's own path knows the new target too
    models[-1].stage_write(8, 0, [9])
    tensors[-1].apply_write()
    models[-1].apply()
    check(place, tensors, models)


def test_refresh_pointers_with_nothing_changed(place):
    tensors, models = make_group(place, [4, 5])
    writer = place.fuse(FusedStagedWriter, tensors)
    for step in range(5):
        writer.refresh_pointers()
        tensors[1].stage_write(step, 0, [step])
        models[1].stage_write(step, 0, [step])
        writer.apply()
        models[1].apply()
    check(place, tensors, models)


def test_reserve_makes_steady_steps_allocate_nothing(place):
    tensors, models = make_group(place, [4000, 500])
    writer = place.fuse(FusedStagedWriter, tensors)
    writer.reserve(300, 20_000)
    before = writer.stats.host_allocations
    for step in range(6):
        for tensor, model in zip(tensors, models, strict=True):
            for w in range(100):
                values = distinct_values("i4", 80, step)
                tensor.stage_write(w % 9, w, values)
                model.stage_write(w % 9, w, values)
        writer.apply()
        for model in models:
            model.apply()
    check(place, tensors, models)
    assert writer.stats.host_allocations == before


def test_members_are_checked(place):
    a = place.make(StagedWriteTensor, (4, 8), "i4")
    whole = place.asarray(np.zeros((4, 8), np.int32))
    left = place.make(StagedWriteTensor, (4, 4), "i4", target=whole[:, :4])
    right = place.make(StagedWriteTensor, (4, 4), "i4", target=whole[:, 4:])
    middle = place.make(StagedWriteTensor, (4, 4), "i4", target=whole[:, 3:7])
    low = place.make(StagedWriteTensor, (2, 8), "i4", target=whole[2:])
    with pytest.raises(ValueError, match="at least one"):
        FusedStagedWriter([])
    with pytest.raises(TypeError, match=r"tensors\[1\].*8 bytes, tensors\[0\] of 4"):
        FusedStagedWriter([a, place.make(StagedWriteTensor, 3, "i8")])
    with pytest.raises(TypeError, match=r"tensors\[1\].*ndarray"):
        FusedStagedWriter([a, a.gpu])
    for members in ([a, a], [left, middle], [middle, right], [left, right, low], [low, left]):
        with pytest.raises(ValueError, match="share memory"):
            FusedStagedWriter(members)
    with pytest.raises(ValueError, match="at least 1"):
        FusedStagedWriter([a], max_concurrency=0)
    for members in ([left, right], [right, a, left], [a]):
        place.fuse(FusedStagedWriter, members)


def test_many_groups(place):
    groups = 64
    tensors, models = make_group(place, [1 + g % 7 for g in range(groups)], rows=2)
    writer = place.fuse(FusedStagedWriter, tensors)
    for step in range(3):
        for group in range(groups):
            tensors[group].stage_write(1, group % 7, [groups * step + group])
            models[group].stage_write(1, group % 7, [groups * step + group])
        writer.apply()
        for model in models:
            model.apply()
    check(place, tensors, models)
    assert writer.stats.launches == 3
