"""The public names, and what importing them does not do."""

import doctest
import importlib
import inspect
import os
import subprocess
import sys

import pytest

import cupy_staged
from cupy_staged import device

NAMES = [
    "BlockTables",
    "CaptureError",
    "DeviceParamTable",
    "FusedStagedWriter",
    "StagedWriteTensor",
    "Stats",
    "UvaBackedTensor",
    "UvaBuffer",
    "UvaBufferPool",
    "UvaStatus",
    "UvaUnavailableError",
    "is_uva_available",
    "named_ranges",
    "set_default_max_concurrency",
    "uva_status",
    "warmup",
]


def test_public_names():
    """A snapshot: a name that comes or goes is a decision, and belongs into the CHANGELOG."""
    assert sorted(cupy_staged.__all__) == NAMES
    assert all(hasattr(cupy_staged, name) for name in NAMES)
    public = [n for n, v in vars(cupy_staged).items() if not n.startswith("_") and not inspect.ismodule(v)]
    assert sorted(public) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name):
    thing = getattr(cupy_staged, name)
    assert len(inspect.getdoc(thing)) > 40
    if inspect.isclass(thing):
        for method, function in inspect.getmembers(thing, inspect.isfunction):
            if not method.startswith("_") and function.__module__.startswith("cupy_staged"):
                assert inspect.getdoc(function), f"{name}.{method}"


def test_errors_are_runtime_errors():
    assert issubclass(cupy_staged.CaptureError, RuntimeError)
    assert issubclass(cupy_staged.UvaUnavailableError, RuntimeError)


@pytest.mark.parametrize("name", ["staged", "buffers", "block_tables", "testing"])
def test_examples_in_docstrings(name, monkeypatch):
    found = doctest.testmod(importlib.import_module(f"cupy_staged.{name}"))
    assert found.attempted > 0
    assert found.failed == 0


def python(code, **environment):
    """Run code in a fresh interpreter with this one's path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=False
    )


def test_import_brings_in_neither_cupy_nor_the_command_line():
    """No CUDA at import: CuPy is imported when the first CUDA object is made, click and rich by the command line."""
    done = python(
        "import sys, cupy_staged, cupy_staged.testing\n"
        "unwanted = {'cupy', 'cupy_backends', 'click', 'rich', 'matplotlib', 'hypothesis', 'pytest'}\n"
        "print(sorted(unwanted & set(sys.modules)))"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)


def test_host_objects_never_import_cupy():
    code = (
        "import sys, cupy_staged as c\n"
        "t = c.StagedWriteTensor((2, 2), 'i4'{0})\n"
        "t.stage_write(0, 0, [1]); t.apply_write()\n"
        "p = c.UvaBufferPool(4, 'i4'{0}); p.copy_to_uva([1]); c.warmup({1})\n"
        "print(type(t.gpu).__name__, 'cupy' in sys.modules)"
    )
    named = python(code.format(", device='host'", "'host'"))
    forced = python(code.format("", ""), CUPY_STAGED_DEVICE="host")
    for done in (named, forced):
        assert (done.stdout, done.stderr) == ("ndarray False\n", "")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("CUPY_STAGED_DEVICE", "HOST", "'host' or unset"), ("CUPY_STAGED_UVA", "no", "'0' or '1' or unset")],
)
def test_an_unknown_setting_is_refused(monkeypatch, name, value, rule):
    monkeypatch.setenv(name, value)
    if name == "CUPY_STAGED_UVA":  # asked of a CUDA device only
        monkeypatch.setattr(device, "resolve_id", lambda _device: 0)
    for make in (cupy_staged.uva_status, lambda: cupy_staged.UvaBuffer(4, "i4")):
        with pytest.raises(ValueError, match=f"{name} must be {rule}, got '{value}'"):
            make()


def test_import_starts_no_thread_and_warns_of_nothing():
    done = python(
        "import warnings; warnings.simplefilter('error')\n"
        "import threading, cupy_staged\nprint(threading.active_count())"
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
