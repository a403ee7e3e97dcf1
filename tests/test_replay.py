"""The scheduler's rules, and the replay of a trace through block tables on the host."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cupy_staged.replay
from cupy_staged.backends import HostBackend
from cupy_staged.block_tables import BlockTables
from cupy_staged.replay import Percentiles, ReplayMismatch, replay
from cupy_staged.replay_steps import padded_sizes
from cupy_staged.scheduler import HEADER, Request, Scheduler, generate_trace, read_trace

AZURE = Path(__file__).parents[2] / "shared" / "data" / "AzureLLMInferenceTrace_conv.csv"
SMALL = {"block_sizes": [4, 16], "num_blocks": [600, 160], "max_reqs": 12, "max_tokens": 96, "max_model_len": 2048}


def short_requests(count, seed=0):
    rng = np.random.default_rng(seed)
    return [Request(i + 2, int(rng.integers(1, 300)), int(rng.integers(0, 120))) for i in range(count)]


def lone(context, generated, **options):
    sizes = {"block_sizes": [4], "num_blocks": [64], "max_reqs": 2, "max_tokens": 32, "max_model_len": 200}
    return Scheduler([Request(2, context, generated)], **{**sizes, **options})


def test_a_long_prompt_is_prefilled_in_chunks_and_then_decoded():
    steps = list(lone(100, 3))
    assert [len(step.positions) for step in steps] == [32, 32, 32, 4, 1, 1]
    assert [step.overwrite.tolist() for step in steps] == [[True], [False], [False], [False], [False], []]
    assert [len(step.new_block_ids[0]) for step in steps] == [8, 8, 8, 1, 1, 0]
    assert np.concatenate([step.positions for step in steps]).tolist() == list(range(102))
    assert [step.num_finished for step in steps] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("generated", [0, 1])
def test_a_request_that_feeds_no_token_back_ends_with_its_prompt(generated):
    (step,) = lone(7, generated)
    assert step.positions.tolist() == list(range(7))
    assert step.query_start_loc.tolist() == [0, 7]


def test_no_requests_no_steps():
    assert list(Scheduler([], **SMALL)) == []


def test_every_step_keeps_the_rules():
    """Follow the steps with dictionaries of lists, which know nothing of the scheduler's arrays."""
    requests = short_requests(150)
    scheduler = Scheduler(requests, **SMALL)
    owned = {}  # row: one list of block ids a group
    computed = {}  # row: tokens
    for step in scheduler:
        rows = step.idx_mapping.tolist()
        assert 1 <= len(rows) == len(set(rows)) <= 12
        assert len(step.positions) == step.query_start_loc[-1] <= 96
        assert (np.diff(step.query_start_loc) >= 1).all()
        assert len(set(step.rows.tolist())) == len(step.rows)
        begins = [0, 0]
        for i, row in enumerate(step.rows.tolist()):
            if step.overwrite[i]:
                owned[row], computed[row] = [[], []], 0
            for g in range(2):
                end = int(step.cu_num_blocks[g][i])
                owned[row][g] += step.new_block_ids[g][begins[g] : end].tolist()
                begins[g] = end
        assert begins == [len(ids) for ids in step.new_block_ids]
        for row in set(owned) - set(rows):
            del owned[row], computed[row]  # preempted or done
        for i, row in enumerate(rows):
            positions = step.positions[step.query_start_loc[i] : step.query_start_loc[i + 1]].tolist()
            assert positions == list(range(computed[row], computed[row] + len(positions)))
            computed[row] += len(positions)
            assert [len(ids) for ids in owned[row]] == [-(-computed[row] // size) for size in (4, 16)]
        for g, pool in enumerate((600, 160)):
            ids = [block for row in rows for block in owned[row][g]]
            assert len(ids) == len(set(ids))
            assert min(ids) >= 1
            assert max(ids) <= pool
    assert scheduler.num_finished == len(requests)
    assert scheduler.num_preemptions > 0


def test_the_same_seed_gives_the_same_steps():
    def ids(seed):
        return [step.new_block_ids[0].tolist() for step in Scheduler(short_requests(20), seed=seed, **SMALL)]

    assert ids(1) == ids(1) != ids(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_reqs": 0}, "max_reqs >= 1"),
        ({"max_tokens": 11}, "max_tokens 11 is less than max_reqs 12"),
        ({"num_blocks": [600]}, "num_blocks each"),
        ({"block_sizes": [], "num_blocks": []}, "block sizes"),
        ({"block_sizes": [0, 16]}, "block sizes >= 1"),
        ({"num_blocks": [511, 160]}, r"num_blocks must be 512 .* for blocks of 4 tokens, got 511"),
        ({"num_blocks": [2**31, 160]}, "2147483647"),
    ],
)
def test_bad_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        Scheduler([], **{**SMALL, **options})


def test_a_request_that_is_too_long_is_named():
    with pytest.raises(ValueError, match=r"line 7: 2000 \+ 49 tokens exceed max_model_len 2048"):
        list(Scheduler([Request(7, 2000, 49)], **SMALL))


def write_trace(path, *lines, end="\n"):
    path.write_bytes(end.join((HEADER, *lines)).encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_trace_is_read(tmp_path, end):
    lines = ("2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:46.68059,1,0")
    assert list(read_trace(write_trace(tmp_path / "t.csv", *lines, end=end))) == [Request(2, 374, 44), Request(3, 1, 0)]


def test_a_byte_order_mark_and_time_zones_are_taken(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + HEADER.encode() + b"\n2024-05-10 00:00:00.009930+00:00,5,6\n")
    assert list(read_trace(path)) == [Request(2, 5, 6)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "line 3: expected 3 fields, got 1: ''"),
        ("2023-11-16 18:15:47,1", "line 3: expected 3 fields, got 2"),
        ("2023-11-16 18:15:47,1,2,3", "line 3: expected 3 fields, got 4"),
        ("yesterday,1,2", "line 3: bad TIMESTAMP 'yesterday'"),
        ("2023-11-16 18:15:47+00:00,1,2", "line 3: bad TIMESTAMP"),
        ("2023-11-16 18:15:45,1,2", "line 3: TIMESTAMP '2023-11-16 18:15:45' is before '2023-11-16 18:15:46'"),
        ("2023-11-16 18:15:47,0,2", "line 3: ContextTokens must be an integer from 1 .* got '0'"),
        ("2023-11-16 18:15:47,-4,2", "line 3: ContextTokens .* got '-4'"),
        ("2023-11-16 18:15:47,1.5,2", "line 3: ContextTokens .* got '1.5'"),
        ("2023-11-16 18:15:47, 1,2", "line 3: ContextTokens .* got ' 1'"),
        ("2023-11-16 18:15:47,1_0,2", "line 3: ContextTokens .* got '1_0'"),
        ("2023-11-16 18:15:47,1,", "line 3: GeneratedTokens .* got ''"),
        ("2023-11-16 18:15:47,1,²", "line 3: GeneratedTokens .* got '.xb2'"),
        ("2023-11-16 18:15:47,1,9999999999", "line 3: GeneratedTokens .* got '9999999999'"),
        ("2023-11-16 18:15:47,1," + "9" * 10000, r"line 3: GeneratedTokens .* got '9+\.\.\.'"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write_trace(tmp_path / "t.csv", "2023-11-16 18:15:46,1,2", line, "2023-11-16 18:15:48,1,2")
    with pytest.raises(ValueError, match=message):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: expected the header"),
        (b"a,b,c\n", "line 1: expected the header .* got 'a,b,c'"),
        (HEADER.encode(), "line 2: expected a request"),
        (HEADER.encode() + b"\n\xff\xfe\x00,1,2\n", r"line 2: bad TIMESTAMP '\\udcff"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path, content, message):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_trace(path))


def test_generated_traces():
    assert list(generate_trace(50, 3)) == list(generate_trace(50, 3)) != list(generate_trace(50, 4))
    assert all(r.context_tokens >= 2 and r.generated_tokens >= 1 for r in generate_trace(50))
    with pytest.raises(ValueError, match="at least 1"):
        next(generate_trace(0))


@pytest.mark.parametrize("staging", ["batch", "call"])
def test_replay_is_equal_to_the_model(staging):
    result = replay(short_requests(60), device="host", staging=staging, **SMALL)
    assert result.requests == 60
    assert result.preemptions > 0
    assert result.steps == result.steps_checked
    assert result.cells_checked == result.steps * (2 * 12 * (512 + 128) + 2 * 2 * 12 + 2 * 96)
    assert 0 < result.launches <= result.steps
    assert result.graphs == 0
    for times in (result.stage_us, result.apply_us, result.prepare_us):
        assert 0 < times.p50 <= times.p90 <= times.p99


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_block_sizes": [2, 16]},
        {"cp_size": 2, "cp_rank": 1},
        {"cp_size": 3, "cp_rank": 2, "cp_interleave": 4, "kernel_block_sizes": [4, 8], "staging": "call"},
    ],
)
def test_kernel_blocks_and_context_parallelism(options):
    result = replay(short_requests(60), device="host", **SMALL, **options)
    assert (result.requests, result.steps_checked) == (60, result.steps)
    assert {name: getattr(result, name) for name in options} == options


def test_ranks_need_fewer_blocks():
    alone, shared = (replay(short_requests(20), device="host", check="none", cp_size=n, **SMALL) for n in (1, 4))
    assert alone.tokens - shared.tokens >= 0
    assert 3 * shared.values < alone.values


def test_steps_are_padded_to_powers_of_two():
    tables = BlockTables([4], 12, 96, [8], device="host")
    for step in Scheduler(short_requests(60), **SMALL):
        reqs, tokens = padded_sizes(step, tables)
        assert reqs in (1, 2, 4, 8, 12)
        assert tokens in (1, 2, 4, 8, 16, 32, 64, 96)
        assert reqs / 2 < len(step.idx_mapping) <= reqs
        assert tokens / 2 < len(step.positions) <= tokens


def test_the_host_has_no_graphs():
    with pytest.raises(ValueError, match="the host backend has no graphs"):
        replay([], device="host", graph=True)


class RecordedGraphs(HostBackend):
    """The host as a device with graphs: a capture keeps the arguments, a launch calls with what they hold by then."""

    def __init__(self):
        self.captured = []
        self.cupy = SimpleNamespace(cuda=SimpleNamespace(Stream=lambda non_blocking: Capture(self)))


class Capture(contextlib.nullcontext):
    def __init__(self, backend):
        super().__init__()
        self.backend = backend

    def begin_capture(self):
        self.backend.captured.append(None)

    def end_capture(self):
        call = self.backend.captured[-1]
        return SimpleNamespace(launch=lambda stream: call())


def test_graphs_are_captured_once_and_read_fixed_arrays(monkeypatch):
    class Captured(BlockTables):
        def prepare_step(self, *args):
            if None in self.backend.captured:
                self.backend.captured[-1] = lambda: super(Captured, self).prepare_step(*args)

    backend = RecordedGraphs()
    monkeypatch.setattr("cupy_staged.block_tables.get_backend", lambda device: backend)
    monkeypatch.setattr("cupy_staged.buffers.get_backend", lambda device: backend)
    monkeypatch.setattr("cupy_staged.replay_steps.HostBackend", type("NotThis", (), {}))
    monkeypatch.setattr("cupy_staged.replay_steps.synchronize", lambda backend: None)
    monkeypatch.setattr("cupy_staged.replay.synchronize", lambda backend: None)
    monkeypatch.setattr("cupy_staged.replay.BlockTables", Captured)
    result = replay(short_requests(60), device="host", graph=True, **SMALL)
    assert (result.requests, result.steps_checked) == (60, result.steps)
    assert len(backend.captured) == result.graphs
    assert 5 < result.graphs <= 5 * 8


def test_bad_ranks_are_explained():
    for options in ({"cp_size": 0}, {"cp_size": 2, "cp_rank": 2}, {"cp_size": 2, "cp_rank": -1}, {"cp_interleave": 0}):
        with pytest.raises(ValueError, match="cp_size and cp_interleave must be at least 1, cp_rank 0 to"):
            replay([], device="host", **options)


def test_both_ways_of_staging_write_the_same():
    batch, call = (replay(short_requests(40), device="host", staging=how, **SMALL) for how in ("batch", "call"))
    assert (batch.steps, batch.tokens, batch.writes, batch.values) == (
        call.steps,
        call.tokens,
        call.writes,
        call.values,
    )


def test_a_sample_ends_with_the_last_step():
    seen = []
    result = replay(short_requests(60), device="host", check="sample", on_step=seen.append, **SMALL)
    assert [step.index for step in seen] == list(range(result.steps))
    assert result.steps_checked == -(-result.steps // 100) + (result.steps % 100 != 1)


def test_unchecked():
    result = replay(short_requests(5), device="host", check="none", **SMALL)
    assert (result.requests, result.steps_checked, result.cells_checked) == (5, 0, 0)


def corrupt(monkeypatch, at_apply, change):
    """Let the tables that `replay` makes be changed after one of their applies."""

    class Corrupted(BlockTables):
        applies = 0

        def apply_staged_writes(self, *args, **kwargs):
            super().apply_staged_writes(*args, **kwargs)
            self.applies += 1
            if self.applies == at_apply:
                change(self)

    monkeypatch.setattr(cupy_staged.replay, "BlockTables", Corrupted)


@pytest.mark.parametrize(("group", "row", "column"), [(0, 0, 0), (1, 11, 127), (0, 5, 511)])
def test_one_wrong_cell_is_found_at_once(monkeypatch, group, row, column):
    def change(tables):
        tables.block_tables[group].gpu[row, column] = -7

    corrupt(monkeypatch, 4, change)
    with pytest.raises(
        ReplayMismatch, match=rf"step 3: .* group {group}, row {row}, column {column}: .* got -7"
    ) as found:
        replay(short_requests(60), device="host", **SMALL)
    assert (found.value.group, found.value.row, found.value.column, found.value.got) == (group, row, column, -7)


def test_a_wrong_count_is_found(monkeypatch):
    def change(tables):
        tables.num_blocks.gpu[1, 2] += 1

    corrupt(monkeypatch, 2, change)
    with pytest.raises(ReplayMismatch, match=r"step 1: num_blocks differs at group 1, row 2: want \d+, got \d+"):
        replay(short_requests(60), device="host", **SMALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.input_block_tables[1].__setitem__((2, 5), 77),
            "step 3: gathered .* group 1, row 2, column 5: .* 77",
        ),
        # Behind what the step wrote: the last row is that of the fullest batch only, the last slot never a token's.
        (lambda t: t.input_block_tables[0].__setitem__((11, 1), 77), "step 3: gathered .* group 0, row 11, column 1"),
        (lambda t: t.slot_mappings.__setitem__((1, 3), 77), "step 3: slot mapping differs at group 1, column 3: .* 77"),
        (lambda t: t.slot_mappings.__setitem__((0, 95), 0), "step 3: slot mapping differs at group 0, column 95"),
    ],
)
def test_a_wrong_cell_of_a_prepared_step_is_found(monkeypatch, change, message):
    class Corrupted(BlockTables):
        steps = 0

        def prepare_step(self, *args):
            super().prepare_step(*args)
            self.steps += 1
            if self.steps == 4:
                change(self)

    monkeypatch.setattr(cupy_staged.replay, "BlockTables", Corrupted)
    with pytest.raises(ReplayMismatch, match=message):
        replay(short_requests(60), device="host", **SMALL)


def test_unknown_ways():
    for options in ({"check": "some"}, {"staging": "slow"}):
        with pytest.raises(ValueError, match="one of"):
            replay([], device="host", **options)


def test_percentiles():
    assert Percentiles.of([1.0, 2.0, 3.0]).p50 == 2.0
    assert Percentiles.of([]) == Percentiles(0, 0, 0)


def test_the_start_of_a_real_trace():
    if not AZURE.exists():
        pytest.skip("the Azure LLM inference trace 2023 (AzurePublicDataset, conversation) is not beside the checkout")
    requests = [request for request, _ in zip(read_trace(AZURE), range(200), strict=False)]
    result = replay(requests, device="host", block_sizes=[16, 32, 64, 128], max_reqs=32, num_blocks=2048)
    assert result.requests == 200
