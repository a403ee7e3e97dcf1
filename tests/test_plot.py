"""`replay --plot`, and what the command line does at a terminal: colours and progress."""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from cupy_staged import plot
from cupy_staged.cli import main
from cupy_staged.replay import ReplayHistory, replay
from cupy_staged.scheduler import HEADER, generate_trace

LINES = [f"2023-11-16 18:15:{46 + i}.5,{30 + 11 * i},{5 + i}" for i in range(9)]
COLOURED = re.compile(r"\x1b\[[0-9;]*\b(?:3[0-8]|4[0-8]|9[0-7])[;m]")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([HEADER, *LINES]) + "\n")
    return str(path)


def run(*args, **env):
    return CliRunner().invoke(main, list(map(str, args)), env=env)


def test_history_has_an_entry_for_each_step():
    history = ReplayHistory()
    limits = {
        "block_sizes": [16, 32],
        "num_blocks": [600, 300],
        "max_reqs": 4,
        "max_tokens": 512,
        "max_model_len": 9000,
    }
    result = replay(generate_trace(12), device="host", history=history, **limits)
    assert {len(getattr(history, name)) for name in history.__slots__} == {result.steps}
    assert sum(history.writes) == result.writes
    assert min(history.stage_us) > 0
    assert min(history.apply_us) > 0
    for in_use in history.blocks_in_use:
        assert all(0 < n <= most for n, most in zip(in_use, limits["num_blocks"], strict=True))


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_a_picture_is_drawn(trace, tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed", exc_type=ImportError)
    path = tmp_path / f"out{suffix}"
    result = run("replay", trace, "--device", "host", "--block-sizes", "16,32", "--plot", path, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["requests"] == 9
    assert path.read_bytes().startswith({".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}[suffix])


def test_a_long_replay_is_drawn_in_stretches(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed", exc_type=ImportError)
    steps = 4500
    history = ReplayHistory([2.0] * steps, [1.0] * steps, [3] * steps, [[7, 5]] * steps)
    path = tmp_path / "out.svg"
    plot.draw_replay(history, "long", path)
    assert path.stat().st_size > 10_000


def test_without_matplotlib_it_exits_2_with_the_pip_line(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("replay", trace, "--device", "host", "--plot", tmp_path / "out.png")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == 'cupy-staged: --plot needs matplotlib: pip install "cupy-staged[plot]"\n'


@pytest.mark.parametrize(("name", "says"), [("out.gif", "'.png'|.png"), ("none/out.png", "is not a directory")])
def test_a_picture_that_cannot_be_is_refused_before_anything_runs(trace, tmp_path, monkeypatch, name, says):
    monkeypatch.setattr("cupy_staged.replay.BlockTables", None)
    result = run("replay", trace, "--device", "host", "--plot", tmp_path / name)
    assert result.exit_code == 2
    assert re.search(says, result.stderr)
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("no_color", ["", "1"])
def test_progress_goes_to_a_terminal_on_stderr_in_colours_that_obey_no_color(trace, no_color):
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "cupy_staged", "replay", trace, "--device", "host", "--json"]
    env = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    env |= {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env |= {"NO_COLOR": no_color} if no_color else {}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=env, timeout=120)
    os.close(theirs)
    shown = ""
    with contextlib.suppress(OSError):  # raised when all was read, and nobody holds the other end
        while part := os.read(ours, 65536):
            shown += part.decode()
    os.close(ours)
    assert (done.returncode, json.loads(done.stdout)["requests"]) == (0, 9)
    assert "\x1b" not in done.stdout
    assert "requests" in shown
    assert bool(COLOURED.search(shown)) == (not no_color)
