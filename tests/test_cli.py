"""The command line: exit codes, one line for an error, JSON, and what is printed where."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import cupy_staged.replay
from cupy_staged.cli import main
from cupy_staged.replay import ReplayMismatch
from cupy_staged.scheduler import HEADER

LINES = [f"2023-11-16 18:15:{46 + i}.5,{30 + 11 * i},{5 + i}" for i in range(9)]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace [1].csv"
    path.write_text("\n".join([HEADER, *LINES]) + "\n")
    return str(path)


def run(*args):
    return CliRunner().invoke(main, args)


def assert_one_line(result, code, *parts):
    assert result.exit_code == code
    assert result.stderr.startswith("cupy-staged: ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize("command", [(), ("info",), ("demo",), ("replay",)])
def test_help_has_examples(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Examples:\n" in result.stdout
    assert "cupy-staged " in result.stdout


def test_no_command_shows_the_help():
    result = run()
    assert result.exit_code == 2
    assert "Commands:" in result.stderr


def test_demo_on_the_host():
    result = run("demo", "--device", "host", "--requests", "20")
    assert result.exit_code == 0
    assert "20 generated requests, on host" in " ".join(result.stdout.split())
    assert ": equal" in result.stdout
    assert result.stderr == ""


def test_demo_says_why_it_is_on_the_host(monkeypatch):
    monkeypatch.setenv("CUPY_STAGED_DEVICE", "host")
    result = run("demo", "--requests", "3")
    assert "3 generated requests, on host (CUPY_STAGED_DEVICE=host)" in " ".join(result.stdout.split())


def test_replay_prints_a_table(trace):
    result = run("replay", trace, "--device", "host", "--block-sizes", "16,32", "--max-reqs", "4")
    assert result.exit_code == 0
    for name in (
        "steps",
        "requests",
        "tokens",
        "writes",
        "launches",
        "bytes",
        "growths",
        "waits",
        "p50",
        "p90",
        "prepare",
    ):
        assert name in result.stdout
    assert "trace [1].csv" in result.stdout.replace("\n", "")


@pytest.mark.parametrize("staging", ["batch", "call"])
@pytest.mark.parametrize("check", ["all", "sample", "none"])
def test_replay_prints_one_json_object(trace, staging, check):
    options = (
        "--block-sizes",
        "16,32",
        "--num-blocks",
        "64,32",
        "--max-reqs",
        "3",
        "--max-tokens",
        "64",
        "--seed",
        "5",
    )
    result = run("replay", trace, "--device", "host", "--check", check, "--staging", staging, "--json", *options)
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    answer = json.loads(result.stdout)
    assert answer["ok"] is True
    assert (answer["requests"], answer["groups"], answer["check"], answer["staging"]) == (9, 2, check, staging)
    for times in ("stage_us", "apply_us", "prepare_us"):
        assert set(answer[times]) == {"p50", "p90", "p99"}


def test_replay_with_ranks_kernel_blocks_and_a_part_of_the_trace(trace):
    ranks = ("--cp-size", "2", "--cp-rank", "1", "--cp-interleave", "2")
    blocks = ("--block-sizes", "16,32", "--kernel-block-sizes", "8", "--requests", "4")
    result = run("replay", trace, "--device", "host", "--json", *blocks, *ranks)
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert (answer["requests"], answer["block_sizes"], answer["kernel_block_sizes"]) == (4, [16, 32], [8, 8])
    assert (answer["cp_size"], answer["cp_rank"], answer["cp_interleave"], answer["graphs"]) == (2, 1, 2, 0)


def test_info_names_versions_and_what_is_missing(monkeypatch):
    monkeypatch.setenv("CUPY_STAGED_DEVICE", "host")
    result = run("info", "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["numba"]
    assert facts["devices"] == []
    assert "CUPY_STAGED_DEVICE=host" in facts["notes"][0]
    assert "numpy" in run("info").stdout


def test_info_says_how_to_get_cupy(monkeypatch):
    monkeypatch.delenv("CUPY_STAGED_DEVICE", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    for driver, extra in ((None, "cuda13"), ((12, 8), "cuda12"), ((13, 0), "cuda13")):
        monkeypatch.setattr("cupy_staged.info._driver_cuda_version", lambda driver=driver: driver)
        facts = json.loads(run("info", "--json").stdout)
        assert f'pip install "cupy-staged[{extra}]"' in " ".join(facts["missing"])
        assert ("No NVIDIA driver" in " ".join(facts["notes"])) == (driver is None)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--block-sizes", "16,0"), ("--block-sizes", "16,0")),
        (("--block-sizes", "16,x"), ("--block-sizes", "16,x")),
        (("--block-sizes", ""), ("--block-sizes",)),
        (("--num-blocks", "64,64"), ("num_blocks",)),
        (("--num-blocks", "2"), ("num_blocks must be 9", "got 2")),
        (("--max-reqs", "0"), ("--max-reqs",)),
        (("--max-reqs", "8", "--max-tokens", "4"), ("max_tokens 4",)),
        (("--check", "some"), ("--check",)),
        (("--staging", "slow"), ("--staging",)),
        (("--seed", "-1"), ("--seed",)),
        (("--graph",), ("the host backend has no graphs",)),
        (("--kernel-block-sizes", "5"), ("kernel_block_sizes[0] = 5", "16")),
        (("--kernel-block-sizes", "8,8"), ("kernel_block_sizes", "1 groups")),
        (("--cp-size", "0"), ("--cp-size",)),
        (("--cp-size", "2", "--cp-rank", "2"), ("cp_rank 0 to cp_size - 1",)),
        (("--cp-size", "2", "--cp-interleave", "3"), ("cp_interleave 3", "16")),
        (("--requests", "0"), ("--requests",)),
        (("--device", "gpu"), ("'gpu'",)),
        (("--device", "cuda:99"), ("'cuda:99'",)),
        (("--device", "99"), ("99",)),
        (("--bogus",), ("--bogus",)),
    ],
)
def test_bad_options_exit_2_with_one_line(monkeypatch, trace, options, parts):
    monkeypatch.delenv("CUPY_STAGED_DEVICE", raising=False)
    device = () if "--device" in options else ("--device", "host")
    assert_one_line(run("replay", trace, *device, *options), 2, *parts)


def test_an_unknown_setting_exits_2_with_one_line(monkeypatch, trace):
    monkeypatch.setenv("CUPY_STAGED_DEVICE", "HOST")
    for command in (("replay", trace), ("demo",), ("info",)):
        assert_one_line(run(*command), 2, "CUPY_STAGED_DEVICE must be 'host' or unset, got 'HOST'")


def test_bad_files_exit_2_with_one_line(tmp_path):
    assert_one_line(run("replay", str(tmp_path / "none.csv")), 2, "none.csv")
    assert_one_line(run("replay", str(tmp_path)), 2, "directory")
    assert_one_line(run("replay"), 2, "TRACE")


def test_a_bad_last_line_is_found_before_anything_runs(tmp_path, monkeypatch):
    path = tmp_path / "bad.csv"
    path.write_text("\n".join([HEADER, *LINES, "2023-11-16 18:16:00,12,many"]))
    monkeypatch.setattr(cupy_staged.replay, "BlockTables", None)
    assert_one_line(run("replay", str(path), "--device", "host"), 2, "line 11", "GeneratedTokens", "'many'")


def test_a_difference_exits_1_with_one_line(trace, monkeypatch):
    def differ(*args, **kwargs):
        raise ReplayMismatch(12, "block table", 1, 3, 5, want=7, got=9)

    monkeypatch.setattr(cupy_staged.replay.Checker, "compare", differ)
    where = ("step 12", "group 1", "row 3", "column 5", "want 7", "got 9")
    assert_one_line(run("replay", trace, "--device", "host"), 1, *where)
    result = run("replay", trace, "--device", "host", "--json")
    assert_one_line(result, 1, *where)
    difference = json.loads(result.stdout)
    assert difference["ok"] is False
    assert (difference["difference"]["group"], difference["difference"]["column"]) == (1, 5)


def test_a_corrupted_table_exits_1(trace, monkeypatch):
    class Corrupted(cupy_staged.replay.BlockTables):
        def apply_staged_writes(self, *args, **kwargs):
            super().apply_staged_writes(*args, **kwargs)
            self.block_tables[0].gpu[2, 1] = 12345

    monkeypatch.setattr(cupy_staged.replay, "BlockTables", Corrupted)
    result = run("replay", trace, "--device", "host", "--max-reqs", "4")
    assert_one_line(result, 1, "group 0", "row 2", "column 1", "got 12345")


def test_as_a_module_in_a_process_of_its_own(trace):
    command = [sys.executable, "-m", "cupy_staged", "replay", trace, "--device", "host", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["requests"] == 9
    command[4] += ".not"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_the_library_does_not_import_the_command_line():
    code = "import sys, cupy_staged; print(sorted({'click', 'rich', 'cupy_staged.cli'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
