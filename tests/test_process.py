"""A process's life: import where nothing can be written, many starting at once, fork, and a quiet exit."""

import os
import subprocess
import sys

import numpy as np
import pytest

USE = """
import cupy_staged as c
table = c.StagedWriteTensor((4, 4), "int32", device={device!r})
tables = c.BlockTables([16, 32], 4, 64, [8, 4], device={device!r})
table.stage_write(1, 0, [1, 2, 3]); table.apply_write()
tables.append_block_ids(2, [[5], [6]], overwrite=True); tables.apply_staged_writes()
pool = c.UvaBufferPool(8, "float32", device={device!r})
view = pool.copy_to_uva([0.5, 1.5])
print(table.gpu[1].tolist(), tables.block_tables[1].gpu[2, :2].tolist(), view.tolist())
"""
USED = "[1, 2, 3, 0] [6, 0] [0.5, 1.5]\n"


def environment(**changes):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CUPY_", "NUMBA_", "XDG_", "PYTEST_"))}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return {**env, **changes}


def start(code, **changes):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**changes),
    )


def finish(process):
    out, error = process.communicate(timeout=300)
    return out, error, process.returncode


@pytest.fixture
def nowhere(tmp_path):
    """Name a folder that nobody can make, root neither: its parent is a file."""
    (tmp_path / "file").write_text("")
    return str(tmp_path / "file" / "below")


def homes(nowhere):
    return {
        "HOME": nowhere,
        "XDG_CACHE_HOME": nowhere,
        "NUMBA_CACHE_DIR": nowhere,
        "CUPY_CACHE_DIR": nowhere,
        "TMPDIR": nowhere,
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def test_a_home_and_caches_that_cannot_be_written(nowhere):
    """Slower, never an error; nothing is printed about it."""
    assert finish(start(USE.format(device="host"), **homes(nowhere))) == (USED, "", 0)


def test_a_numba_cache_alone_that_cannot_be_written(nowhere):
    assert finish(start(USE.format(device="host"), NUMBA_CACHE_DIR=nowhere)) == (USED, "", 0)


def test_an_installation_that_cannot_be_written(nowhere, tmp_path):
    """As site-packages owned by root: the package's own folder takes no cache file, and the home neither."""
    import cupy_staged

    source = os.path.dirname(os.path.dirname(os.path.abspath(cupy_staged.__file__)))
    package = tmp_path / "site" / "cupy_staged"
    package.mkdir(parents=True)
    for name in os.listdir(os.path.join(source, "cupy_staged")):
        if name.endswith(".py"):
            os.symlink(os.path.join(source, "cupy_staged", name), package / name)
    (package / "__pycache__").write_text("")  # where Numba would put its cache, there is a file
    paths = os.pathsep.join([str(tmp_path / "site"), environment()["PYTHONPATH"]])
    done = finish(start(USE.format(device="host"), **{**homes(nowhere), "PYTHONPATH": paths}))
    assert done == (USED, "", 0)


@pytest.mark.parametrize("fresh", [True, False], ids=["empty cache", "cache as it is"])
def test_four_processes_starting_at_once(tmp_path, fresh):
    changes = {"NUMBA_CACHE_DIR": str(tmp_path)} if fresh else {}
    code = (
        "import cupy_staged as c\n"
        "table = c.StagedWriteTensor((4, 4), 'int32', device='host')\n"
        "table.stage_write(1, 0, [1, 2, 3]); table.apply_write()\n"
        "print(table.gpu[1].tolist())"
    )
    processes = [start(code, **changes) for _ in range(4)]
    assert [finish(p) for p in processes] == [("[1, 2, 3, 0]\n", "", 0)] * 4


def test_without_a_device_the_default_is_the_host():
    """With every GPU hidden: no error, no warning, NumPy arrays."""
    code = "import cupy_staged as c\nprint(type(c.StagedWriteTensor(3, 'i4').gpu).__name__, c.uva_status().available)"
    assert finish(start(code, CUDA_VISIBLE_DEVICES="")) == ("ndarray True\n", "", 0)
    code = "import cupy_staged as c\ntry: c.StagedWriteTensor(3, 'i4', device='cuda')\nexcept ValueError as e: print(e)"
    out, error, status = finish(start(code, CUDA_VISIBLE_DEVICES=""))
    assert "device 'cuda' is not there" in out
    assert (error, status) == ("", 0)


def test_fork_after_import_and_after_use_on_the_host():
    code = USE.format(device="host") + (
        "import os, sys, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"  # NumPy's threads: Python warns of any
        "sys.stdout.flush()\n"
        "child = os.fork()\n"
        "table.stage_write(2, 1, [7]); table.apply_write()\n"
        "fresh = c.StagedWriteTensor(2, 'i4', device='host'); fresh.stage_write_elem(1, 5); fresh.apply_write()\n"
        "pool.copy_to_uva([1.0])\n"
        "ok = table.gpu[2].tolist() == [0, 7, 0, 0] and fresh.gpu.tolist() == [0, 5]\n"
        "if child == 0:\n"
        "    sys.exit(0 if ok else 3)\n"
        "print(ok, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert finish(start(code)) == (USED + "True 0\n", "", 0)


def test_fork_before_the_first_object():
    code = (
        "import cupy_staged, os, sys, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n" + USE.format(device="host")
    )
    assert finish(start(code)) == (USED, "", 0)


@pytest.mark.parametrize("how", ["pending", "global", "cycle", "thread", "exception"])
def test_exit_is_quiet(how):
    """Objects with work staged, kept in module globals, in a cycle, in a running thread, or behind an exception."""
    ends = {
        "pending": "table.stage_write(0, 0, [9]); pool.copy_to_uva([3.0])",
        "global": "import sys; sys.kept = (table, tables, pool, view)",
        "cycle": "table.me = table; pool.me = [pool, table]; del table, pool",
        "thread": (
            "import threading, time\n"
            "def run():\n"
            "    while True:\n"
            "        table.stage_write(0, 0, [1]); table.apply_write()\n"
            "threading.Thread(target=run, daemon=True).start(); time.sleep(0.05)"
        ),
        "exception": "import sys\ntry: table.stage_write(9, 9, [9])\nexcept IndexError as e: sys.last = e",
    }
    assert finish(start(USE.format(device="host") + ends[how])) == (USED, "", 0)


def test_exit_of_the_interpreter_with_an_error_shows_that_error_alone():
    out, error, status = finish(start(USE.format(device="host") + "table.stage_write(9, 0, [1])"))
    assert (out, status) == (USED, 1)
    assert error.strip().splitlines()[-1].startswith("IndexError: row 9 is not one of the 4 rows")
    assert error.count("Traceback") == 1


def test_objects_are_freed():
    """Dropped objects go when their work is done: memory does not grow with the number of objects made."""
    import gc

    import cupy_staged
    from cupy_staged import ring

    def make():
        table = cupy_staged.StagedWriteTensor((50, 50), "i4", device="host")
        table.stage_write(0, 0, [1])
        table.apply_write()
        pool = cupy_staged.UvaBufferPool(50, "i4", device="host")
        pool.copy_to_uva(np.arange(50, dtype=np.int32))
        pool.fence()
        return table

    gc.collect()
    ring.sweep()
    before = len(ring._retired)
    for _ in range(50):
        make()
    gc.collect()
    ring.sweep()
    assert len(ring._retired) <= before
