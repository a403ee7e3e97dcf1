"""The picture that `cupy-staged replay --plot` makes. Only this module imports matplotlib, and only when it draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from .replay import ReplayHistory

__all__ = ["SUFFIXES", "draw_replay", "is_matplotlib_installed"]

SUFFIXES: Final = (".pdf", ".png", ".svg")
_MAX_POINTS: Final = 2000  # more lie on top of each other


def is_matplotlib_installed() -> bool:
    """Whether `draw_replay` can work."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw_replay(history: ReplayHistory, title: str, path: Path) -> None:
    """Draw host time, writes and blocks in use over the steps of a replay, and save the picture.

    A long replay is drawn in stretches of equal length: the median of each, and its lowest and highest step as a band.
    The last stretch is left out where it would be shorter.

    Parameters
    ----------
    history
        Filled by `replay`.
    title
        One line above the picture.
    path
        With one of `SUFFIXES`.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    OSError
        The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    times, writes, blocks = figure.subplots(3, 1, sharex=True)
    figure.suptitle(title)
    _draw(times, "stage", np.array(history.stage_us))
    _draw(times, "apply", np.array(history.apply_us))
    _draw(times, "prepare", np.array(history.prepare_us))
    times.set(ylabel="host time, µs", yscale="log")
    _draw(writes, "writes", np.array(history.writes))
    writes.set(ylabel="writes a step", ylim=(0, None))
    for group, in_use in enumerate(np.array(history.blocks_in_use).reshape(len(history.writes), -1).T):
        _draw(blocks, f"group {group}", in_use)
    blocks.set(ylabel="blocks in use", ylim=(0, None), xlabel="step")
    for axes in (times, writes, blocks):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=8, frameon=False)
    if (stretch := _stretch(len(history.writes))) > 1:
        blocks.set_xlabel(f"step (lines: median of {stretch} steps; bands: lowest to highest)")
    figure.savefig(path, dpi=120)


def _stretch(num_steps: int) -> int:
    return -(-num_steps // _MAX_POINTS)


def _draw(axes: Any, label: str, values: np.ndarray) -> None:
    """Draw one line, `[steps]`; of a long one the median, lowest and highest of each stretch."""
    stretch = _stretch(len(values))
    if stretch <= 1:
        axes.plot(values, label=label, linewidth=1)
        return
    whole = values[: len(values) // stretch * stretch].reshape(-1, stretch)
    steps = np.arange(len(whole)) * stretch + stretch / 2
    (line,) = axes.plot(steps, np.median(whole, axis=1), label=label, linewidth=1)
    axes.fill_between(steps, whole.min(axis=1), whole.max(axis=1), color=line.get_color(), alpha=0.2, linewidth=0)
