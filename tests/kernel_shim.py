"""Builds kernel sources as C++ with the shim of `tests/shim` and runs them on the CPU through ctypes.

A launch is synchronous and works on NumPy memory. What the shim finds (divergence, a race, an access outside the
buffers that the launch was given, ...) is raised as `KernelError`; `tests/shim/run_kernels.cpp` lists it.
"""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHIM = Path(__file__).parent / "shim"
KERNELS = Path(__file__).parent.parent / "kernels"
PRELUDE = "warp.cuh"

# The kernel's own code carries the hooks that check it; the scheduler must not.
# No warnings: which there are depends on the compiler found, and NVRTC's are checked in test_kernels_compile.py.
COMMON_FLAGS = ("-std=c++17", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-w")
KERNEL_FLAGS = (
    "-DCUPY_STAGED_SHIM",
    "-fsanitize=thread,undefined",
    "--param=tsan-distinguish-volatile=1",
    "-fno-strict-aliasing",  # kernels read the same bytes as cells and as elements, which CUDA's compiler lets pass
)
MAX_STEPS = 200_000_000
MAX_PUBLISHED = 16
READ, WRITE = 1, 2


class KernelError(Exception):
    """The shim stopped a launch."""


def find_compiler() -> str | None:
    """Return a GNU C++ compiler (its sanitizer hooks are the ones that the shim answers), or None."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        macros = subprocess.run([path, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True)
        if macros.returncode == 0 and "__GNUC__" in macros.stdout and "__clang__" not in macros.stdout:
            return path
    return None


def kernel_sources() -> list[Path]:
    """Every kernel source of the project."""
    return sorted(KERNELS.glob("*.cu"))


def takes_unit(source: str) -> bool:
    """Whether the source is compiled once for each element width."""
    return "UNIT_BYTES" in source


def kernel_names(source: str) -> list[str]:
    """Names of the kernels that the source exports."""
    head = r'extern\s+"C"\s+__global__\s+(?:void\s+|__launch_bounds__\s*\([^)]*\)\s*)+(\w+)\s*\('
    return re.findall(head, source)


@dataclass(frozen=True)
class Launch:
    """What one launch did, besides what it wrote."""

    loads: dict[int, int]  # by width in bytes
    stores: dict[int, int]
    published: list[int]  # address of each volatile store, in order
    accesses_after_publish: int  # plain loads and stores behind the last volatile store


class _Region(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_size_t),
        ("nbytes", ctypes.c_size_t),
        ("access", ctypes.c_uint),
        ("name", ctypes.c_char_p),
        ("shadow", ctypes.c_void_p),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("message", ctypes.c_char * 1024),
        ("loads", ctypes.c_uint64 * 5),
        ("stores", ctypes.c_uint64 * 5),
        ("num_published", ctypes.c_uint64),
        ("published_at", ctypes.c_uint64 * MAX_PUBLISHED),
        ("accesses_after_publish", ctypes.c_uint64),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("call", ctypes.c_void_p),
        ("num_params", ctypes.c_uint),
        ("param_bytes", ctypes.POINTER(ctypes.c_uint)),
        ("param_kinds", ctypes.POINTER(ctypes.c_ubyte)),
    )


class KernelLibrary:
    """The kernels of one source, built for the CPU."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.shim_find.restype = ctypes.POINTER(_Kernel)

    def launch(
        self,
        name: str,
        grid: int,
        block: int,
        *args: int | np.ndarray,
        reads: Iterable[np.ndarray] = (),
        writes: Iterable[np.ndarray] = (),
        order: int = 0,
        max_steps: int = MAX_STEPS,
    ) -> Launch:
        """Run one kernel.

        Parameters
        ----------
        *args
            One a kernel parameter. A contiguous array is passed as its address, and the kernel may read it, and write
            it unless the parameter points to const. An int is a value, or an address whose memory is given in `reads`
            or `writes`.
        reads, writes
            Further contiguous arrays that the kernel may read, or read and write. All else is out of bounds.
        order
            0: blocks and lanes run first to last; 1: last to first; else the seed of a shuffle.

        Raises
        ------
        KernelError
            The shim stopped the launch. What was written before stays written.
        """
        found = self._library.shim_find(name.encode())
        if not found:
            raise ValueError(f"no kernel {name!r}")
        kernel = found.contents
        if len(args) != kernel.num_params:
            raise TypeError(f"{name} takes {kernel.num_params} arguments, got {len(args)}")

        regions: list[_Region] = []
        values: list[ctypes.Array] = []
        for i, arg in enumerate(args):
            kind, nbytes = kernel.param_kinds[i], kernel.param_bytes[i]
            if isinstance(arg, np.ndarray):
                if kind == 0:
                    raise TypeError(f"{name}: argument {i} is a value, got an array")
                regions.append(_region(arg, kind, f"argument {i}"))
                arg = arg.ctypes.data
            values.append(ctypes.create_string_buffer(int(arg).to_bytes(nbytes, "little", signed=arg < 0), nbytes))
        regions += [_region(array, READ, f"reads[{i}]") for i, array in enumerate(reads)]
        regions += [_region(array, READ | WRITE, f"writes[{i}]") for i, array in enumerate(writes)]

        params = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        report = _Report()
        good = self._library.shim_run(
            found,
            ctypes.c_uint(grid),
            ctypes.c_uint(block),
            ctypes.c_uint(order),
            params,
            (_Region * len(regions))(*regions),
            ctypes.c_uint(len(regions)),
            ctypes.c_uint64(max_steps),
            ctypes.byref(report),
        )
        if not good:
            raise KernelError(report.message.decode())
        widths = (1, 2, 4, 8, 16)
        return Launch(
            loads=dict(zip(widths, report.loads, strict=True)),
            stores=dict(zip(widths, report.stores, strict=True)),
            published=list(report.published_at[: min(report.num_published, MAX_PUBLISHED)]),
            accesses_after_publish=report.accesses_after_publish,
        )


def _region(array: np.ndarray, access: int, name: str) -> _Region:
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous")
    if access & WRITE and not array.flags.writeable:
        raise ValueError(f"{name} is read only")
    return _Region(array.ctypes.data, array.nbytes, access, name.encode(), None)


class KernelBuilder:
    """Builds sources into a directory; equal sources are built once."""

    def __init__(self, compiler: str, directory: Path) -> None:
        self._compiler = compiler
        self._directory = directory
        self._scheduler: Path | None = None
        self._built: dict[tuple[str, str, int | None], KernelLibrary] = {}

    def file(self, name: str, unit_bytes: int | None = None) -> KernelLibrary:
        """Build `kernels/<name>`."""
        return self.text((KERNELS / name).read_text(), unit_bytes, name=name)

    def text(
        self, source: str, unit_bytes: int | None = None, *, name: str = "source.cu", prelude: str | None = None
    ) -> KernelLibrary:
        """Build a source, behind the project's prelude or another one."""
        if prelude is None:
            prelude = (KERNELS / PRELUDE).read_text()
        key = (prelude, source, unit_bytes)
        if key not in self._built:
            self._built[key] = KernelLibrary(self._build(prelude, source, unit_bytes, name))
        return self._built[key]

    def _build(self, prelude: str, source: str, unit_bytes: int | None, name: str) -> Path:
        if self._scheduler is None:
            scheduler = self._directory / "run_kernels.o"
            self._compile(COMMON_FLAGS, "-c", SHIM / "run_kernels.cpp", "-o", scheduler)
            self._scheduler = scheduler
        stem = self._directory / f"{Path(name).stem}_{len(self._built)}"
        table = ", ".join(f'shim_kernel("{kernel}", {kernel})' for kernel in kernel_names(source))
        whole = stem.with_suffix(".cpp")
        whole.write_text(
            f'#include "cuda_shim.h"\n#line 1 "{PRELUDE}"\n{prelude}\n#line 1 "{name}"\n{source}\n'
            f"extern const ShimKernel shim_kernels[] = {{{table}}};\n"
            f"extern const unsigned shim_num_kernels = sizeof shim_kernels / sizeof *shim_kernels;\n"
        )
        unit = () if unit_bytes is None else (f"-DUNIT_BYTES={unit_bytes}",)
        compiled, library = stem.with_suffix(".o"), stem.with_suffix(".so")
        self._compile((*COMMON_FLAGS, *KERNEL_FLAGS, *unit), "-I", SHIM, "-c", whole, "-o", compiled)
        # Linked without the sanitizer: its hooks are answered by the scheduler.
        self._compile(("-shared", "-Wl,-Bsymbolic", "-Wl,--no-undefined"), self._scheduler, compiled, "-o", library)
        return library

    def _compile(self, flags: Sequence[str], *args: str | Path) -> None:
        command = [self._compiler, *flags, *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
