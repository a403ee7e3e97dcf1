"""Every example runs, each in a process of its own: here on the host, in `gpu/test_interop.py` on the GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))
# These work on the host as well; the others need a GPU, and say so.
ON_THE_HOST = {"feature_table", "grid_rows", "paged_kv_decode"}
NEEDS = {
    "cuda_core_stream": "GPU",
    "jax_dlpack": "jax",
    "memory_pool": "GPU",
    "numba_cuda_kernel": "GPU",
    "profiler_ranges": "cupy",
    "raw_cupy_kernel": "GPU",
    "torch_dlpack": "torch",
}
# What a site without the optional packages looks like to an example.
WITHOUT_PACKAGES = """
import importlib.util, runpy, sys
found = importlib.util.find_spec
hidden = ("cupy", "cuda", "jax", "numba_cuda", "torch")
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] in hidden else found(name, *more)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run(cwd, *arguments):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CUPY_STAGED_", "PYTEST_"))}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "CUPY_STAGED_DEVICE": "host"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") == 1, "one line says what was shown, or what is missing"
    return done.stdout


def test_the_lists_name_every_example():
    assert {p.stem for p in EXAMPLES} == ON_THE_HOST | NEEDS.keys()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_on_the_host(example, tmp_path):
    said = run(tmp_path, example)
    if example.stem in ON_THE_HOST:
        assert "NumPy" in said
    if NEEDS.get(example.stem) == "GPU":
        assert said.startswith("nothing to show: this example needs a GPU")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_without_the_optional_packages(example, tmp_path):
    said = run(tmp_path, "-c", WITHOUT_PACKAGES, example)
    assert said.startswith("nothing to show: ") == (example.stem in NEEDS)
    assert NEEDS.get(example.stem, "") in said


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_short_and_says_what_it_shows(example):
    text = example.read_text(encoding="utf-8")
    assert text.startswith('"""')
    assert text.count("\n") <= 170
