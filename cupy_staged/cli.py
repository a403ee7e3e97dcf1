"""The command line: `cupy-staged info`, `demo` and `replay`; also `python -m cupy_staged`.

Results go to stdout, progress and errors to stderr. Exit codes: 0 all is well, 1 the tables differ from the model,
2 bad input, 130 interrupted. Only this module and `console` import click and rich; a command imports the library when
it runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Never

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .console import print_result, progress

if TYPE_CHECKING:
    from .scheduler import Request

_EXIT_DIFFERENT: Final = 1
_EXIT_BAD_INPUT: Final = 2
_EXIT_INTERRUPTED: Final = 130


def _fail(message: str, code: int) -> Never:
    click.echo(f"cupy-staged: {' '.join(message.split())}", err=True)
    sys.exit(code)


class _OneLineErrors(click.Group):
    """A group that reports every foreseen error in one line, where click prints usage and Python a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(_EXIT_BAD_INPUT)
        except click.ClickException as error:
            _fail(error.format_message(), _EXIT_BAD_INPUT)
        except click.Abort:
            _fail("interrupted", _EXIT_INTERRUPTED)
        except BrokenPipeError:
            # Whoever read stdout has gone; a closed descriptor would make the interpreter complain while it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(_EXIT_DIFFERENT)
        except (ValueError, OSError, MemoryError) as error:
            _fail(str(error) or type(error).__name__, _EXIT_BAD_INPUT)
        sys.exit(code if isinstance(code, int) else 0)


def _to_ints(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    """Convert `16,32` to integers of at least 1."""
    if value is None:
        return None
    parts = value.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 12 and int(part) >= 1 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of integers of at least 1, such as 16,32", ctx, param)
    return [int(part) for part in parts]


def _to_device(ctx: click.Context, param: click.Parameter, value: str | None) -> str | int | None:
    """Convert a device number; the library checks what it means."""
    return int(value) if value is not None and value.isascii() and value.isdigit() else value


_at_least_1 = click.IntRange(min=1)
_device_option = click.option(
    "--device",
    metavar="DEVICE",
    callback=_to_device,
    help="host, cuda, cuda:1 or 1.  [default: the current CUDA device, else the host]",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
_seed_option = click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
_staging_option = click.option(
    "--staging",
    type=click.Choice(["batch", "call"]),
    default="batch",
    show_default=True,
    help="Stage a step's block ids with one call, from arrays, or with one call a request, from lists.",
)


def _to_picture(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Find out before anything runs whether the picture can be drawn and where it goes."""
    if value is None:
        return None
    from .plot import SUFFIXES, is_matplotlib_installed

    if value.suffix.lower() not in SUFFIXES:
        raise click.BadParameter(f"{str(value)!r} must end with one of {', '.join(SUFFIXES)}", ctx, param)
    if not value.parent.is_dir():
        raise click.BadParameter(f"{str(value.parent)!r} is not a directory", ctx, param)
    if not is_matplotlib_installed():
        raise click.UsageError('--plot needs matplotlib: pip install "cupy-staged[plot]"', ctx)
    return value


_INFO_EXAMPLES: Final = """\b
Examples:
  cupy-staged info
  cupy-staged info --json | jq .missing"""
_DEMO_EXAMPLES: Final = """\b
Examples:
  cupy-staged demo
  cupy-staged demo --device host --requests 1000 --seed 7

Exit codes: 0 all is well, 1 the tables differ, 2 bad input."""
_REPLAY_EXAMPLES: Final = """\b
Examples:
  cupy-staged replay trace.csv
  cupy-staged replay trace.csv --block-sizes 16,32,64,128 --max-reqs 256
  cupy-staged replay trace.csv --block-sizes 32,128 --kernel-block-sizes 16 --cp-size 2 --cp-rank 1
  cupy-staged replay trace.csv --device cuda --graph --requests 5000
  cupy-staged replay trace.csv --check none --plot replay.png
  cupy-staged replay trace.csv --device host --check sample --json > result.json

Exit codes: 0 all is well, 1 the tables differ, 2 bad input."""


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cupy-staged", prog_name="cupy-staged")
def main() -> None:
    """Stage row writes on the host, apply them to large device tables with one kernel.

    \b
    Examples:
      cupy-staged info                  what is here, what is missing, how to get it
      cupy-staged demo                  a small replay, checked cell by cell
      cupy-staged replay trace.csv      a serving trace, checked cell by cell

    Exit codes: 0 all is well, 1 the tables differ from the plain NumPy model, 2 bad input, 130 interrupted.
    """  # noqa: D301  (\b is click's mark for text that keeps its lines)


@main.command(epilog=_INFO_EXAMPLES)
@_json_option
def info(as_json: bool) -> None:
    """Show what is here and what is missing.

    Devices, driver, versions, the UVA probe's result with its reason, pinned bandwidth, and the pip line for the rest.
    """
    from .info import gather_facts

    facts = gather_facts()
    if as_json:
        click.echo(json.dumps(facts))
        return
    table = Table(show_header=False, title="cupy_staged", title_justify="left")
    for name in ("cupy_staged", "python", "numpy", "numba", "cupy", "driver"):
        table.add_row(name, Text(str(facts[name] or "none")))
    for device in facts["devices"]:
        table.add_section()
        for name, value in device.items():
            table.add_row(name, Text(str(value)))
    console = Console()
    console.print(table)
    for line in (*facts["missing"], *facts["notes"]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@main.command(epilog=_DEMO_EXAMPLES)
@_device_option
@click.option("--requests", "num_requests", type=click.IntRange(1, 1_000_000), default=400, show_default=True)
@_staging_option
@_seed_option
@_json_option
def demo(device: str | int | None, num_requests: int, staging: str, seed: int, as_json: bool) -> None:
    """Replay a small generated trace, checked.

    Three groups of block tables, compared with plain NumPy cell by cell after every step.
    """
    from .scheduler import generate_trace

    requests = list(generate_trace(num_requests, seed))
    # The pools hold about two thirds of what 64 rows want, so that preemption is part of it.
    options: dict[str, Any] = {
        "block_sizes": [16, 32, 64],
        "num_blocks": [2048, 1024, 512],
        "max_reqs": 64,
        "max_tokens": 1024,
    }
    _replay(
        f"demo: {num_requests} generated requests", requests, requests, as_json,
        **options, device=device, check="all", staging=staging, seed=seed,
    )  # fmt: skip


@main.command(epilog=_REPLAY_EXAMPLES)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--max-reqs", type=_at_least_1, default=256, show_default=True, help="Rows of the tables.")
@click.option("--max-tokens", type=_at_least_1, default=2048, show_default=True, help="Tokens a step.")
@click.option(
    "--num-blocks",
    metavar="N,N,…",
    callback=_to_ints,
    default="16384",
    show_default=True,
    help="KV blocks in the pool of a group: one number for all, or one a group.",
)
@click.option(
    "--block-sizes",
    metavar="N,N,…",
    callback=_to_ints,
    default="16",
    show_default=True,
    help="Tokens a KV block: one number a group, so that 16,32 makes two groups.",
)
@click.option(
    "--kernel-block-sizes",
    metavar="N,N,…",
    callback=_to_ints,
    help="Tokens a block of the attention kernel: one number for all, or one a group.  [default: as the KV blocks]",
)
@click.option(
    "--cp-size", type=click.IntRange(1, 65536), default=1, show_default=True, help="Ranks of context parallelism."
)
@click.option("--cp-rank", type=click.IntRange(min=0), default=0, show_default=True, help="The rank to be.")
@click.option("--cp-interleave", type=_at_least_1, default=1, show_default=True, help="Tokens in a row on one rank.")
@click.option("--requests", "num_requests", type=_at_least_1, help="Replay only that many, the first of the trace.")
@_device_option
@click.option(
    "--check",
    type=click.Choice(["all", "sample", "none"]),
    default="all",
    show_default=True,
    help="Compare every cell with plain NumPy after every step, after every 100th and the last, or never.",
)
@_staging_option
@click.option("--graph", is_flag=True, help="Prepare steps with CUDA graphs that are captured once. Not on the host.")
@_seed_option
@click.option(
    "--plot",
    metavar="PICTURE",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_to_picture,
    help="Draw host time, writes and blocks in use over the steps; .png, .svg or .pdf.",
)
@_json_option
def replay(
    trace: Path,
    num_blocks: list[int],
    block_sizes: list[int],
    kernel_block_sizes: list[int] | None,
    num_requests: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay a serving trace, checked.

    Drives block tables as a continuous-batching server does: requests are admitted, prefilled in chunks, decoded,
    preempted when blocks run out, and their rows and blocks recycled. Each step stages its new blocks, applies them,
    and prepares block tables and slot mappings, padded to the next power of two.

    TRACE is a CSV file: TIMESTAMP,ContextTokens,GeneratedTokens, in order of arrival.
    """
    from .scheduler import read_trace

    # Read twice, so that a bad last line is reported at once and the file is never held; a pipe can be read only once.
    held = list(itertools.islice(read_trace(trace), num_requests)) if not trace.is_file() else None
    scan, requests = (held or itertools.islice(read_trace(trace), num_requests) for _ in range(2))
    options["block_sizes"], options["num_blocks"] = block_sizes, _for_all(num_blocks, block_sizes)
    options["kernel_block_sizes"] = kernel_block_sizes and _for_all(kernel_block_sizes, block_sizes)
    _replay(str(trace), scan, requests, as_json, **options)


def _for_all(values: list[int], groups: list[int]) -> list[int]:
    return values * len(groups) if len(values) == 1 else values


def _replay(title: str, scan: Any, requests: Any, as_json: bool, *, plot: Path | None = None, **options: Any) -> None:
    from .replay import ReplayHistory, ReplayMismatch
    from .replay import replay as run

    num_requests, longest = _extent(scan)
    _require_device(options["device"])
    history = ReplayHistory() if plot is not None else None
    try:
        with progress(num_requests) as on_step:
            result = run(requests, max_model_len=longest, on_step=on_step, history=history, **options)
    except ReplayMismatch as difference:
        if as_json:
            names = ("step", "what", "group", "row", "column", "want", "got")
            click.echo(json.dumps({"ok": False, "difference": {name: getattr(difference, name) for name in names}}))
        _fail(str(difference), _EXIT_DIFFERENT)
    if plot is not None and history is not None:
        from .plot import draw_replay

        draw_replay(history, f"{title}, on {result.device}", plot)
    if as_json:
        click.echo(json.dumps({"ok": True, "trace": title, **dataclasses.asdict(result)}))
    else:
        where = result.device
        if where == "host" and options["device"] is None:
            where += f" ({_why_host()})"
        print_result(f"{title}, on {where}", result)


def _why_host() -> str:
    from .device import count_devices, is_host_forced

    # Where the host is forced, CUDA is not even asked.
    return "CUPY_STAGED_DEVICE=host" if is_host_forced() else count_devices()[1]


def _extent(requests: Iterable[Request]) -> tuple[int, int]:
    """Return how many requests there are, and the tokens of the longest."""
    count = longest = 0
    for request in requests:
        count += 1
        longest = max(longest, request.context_tokens + request.generated_tokens)
    return count, longest


def _require_device(device: str | int | None) -> None:
    """Find out before the tables are made whether the device can be used; a fault after that is not the user's."""
    from . import uva_status

    try:
        uva_status(device)
    except (RuntimeError, ImportError, TypeError) as error:
        raise click.UsageError(f"device {device!r}: {error}") from error
