"""What `replay` and `demo` show: progress on stderr, a table of the result on stdout."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .replay import ReplayResult
    from .scheduler import Step

__all__ = ["print_result", "progress"]

_REDRAW_S: Final = 0.1


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[Step], None] | None]:
    """Show a bar on stderr where that is a terminal; yield what is to be called after each step."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
    # Drawn between steps: a drawing thread would hold the interpreter while a step is timed.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("replay", total=total)
        due = 0.0

        def on_step(step: Step) -> None:
            nonlocal due
            if time.monotonic() >= due:
                bar.update(task, completed=step.num_finished, refresh=True)
                due = time.monotonic() + _REDRAW_S

        yield on_step


def print_result(title: str, result: ReplayResult) -> None:
    """Print what a replay did as a table, to stdout."""
    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name in ("groups", "steps", "requests", "tokens", "preemptions"):
        table.add_row(name, f"{getattr(result, name):,}")
    table.add_section()
    for name in ("writes", "values", "launches", "bytes", "growths", "waits", "late_fences", "host_allocations"):
        table.add_row(name.replace("_", " "), f"{getattr(result, name):,}")
    table.add_row("graphs", f"{result.graphs:,}")
    table.add_section()
    for name, times in (("stage", result.stage_us), ("apply", result.apply_us), ("prepare", result.prepare_us)):
        for percentile, value in dataclasses.asdict(times).items():
            table.add_row(f"{name} host time {percentile}", f"{value:,.1f} µs")
    table.add_section()
    table.add_row("wall time", f"{result.seconds:,.1f} s")
    checked = f"{result.cells_checked:,} cells in {result.steps_checked:,} steps: equal"
    table.add_row(f"check {result.check}", checked if result.steps_checked else "nothing compared")
    Console().print(table)
