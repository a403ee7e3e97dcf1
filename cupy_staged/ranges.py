"""NVTX names for the parts of a step, as Nsight Systems shows them. Where they are off, nothing is wrapped."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from . import packing, step_packing
from .block_tables import BlockTables
from .staged import FusedStagedWriter, StagedWriteTensor
from .step_inputs import StepInputs

_NAMES: tuple[tuple[Any, tuple[str, ...], str], ...] = (
    (StagedWriteTensor, ("stage_write", "stage_writes"), "stage"),
    (BlockTables, ("append_block_ids", "append_block_ids_batch"), "stage"),
    (packing, ("pack",), "pack"),
    (step_packing, ("pack_step", "note_step"), "pack"),
    (StagedWriteTensor, ("apply_write",), "apply"),
    (FusedStagedWriter, ("apply",), "apply"),
    (BlockTables, ("apply_staged_writes",), "apply"),
    (StepInputs, ("gather_block_tables",), "gather"),
    (StepInputs, ("compute_slot_mappings",), "slot mapping"),
    (StepInputs, ("prepare_step",), "gather and slot mapping"),
)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    from cupy.cuda import nvtx

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nvtx.RangePush(f"cupy_staged: {name}")
        try:
            return function(*args, **kwargs)
        finally:
            nvtx.RangePop()

    return wrapper


@contextlib.contextmanager
def named_ranges() -> Iterator[None]:
    """Give stage, pack, apply, gather and slot mapping NVTX ranges of the calling thread while the block runs.

    Ranges cost about 0.1 us each where no profiler listens, and nothing outside the block. Use it in one thread at a
    time.

    Raises
    ------
    ImportError
        CuPy is not installed.

    Examples
    --------
    ``nsys profile --trace cuda,nvtx python program.py`` shows them:

    >>> with named_ranges():  # doctest: +SKIP
    ...     table.stage_write(0, 1, [3])
    ...     table.apply_write()
    """
    originals = [(owner, method, vars(owner)[method], name) for owner, methods, name in _NAMES for method in methods]
    wrapped = [(owner, method, _named(function, name)) for owner, method, function, name in originals]
    try:
        for owner, method, wrapper in wrapped:
            setattr(owner, method, wrapper)
        yield
    finally:
        for owner, method, function, _ in originals:
            setattr(owner, method, function)
