"""The report: each target beside what was measured and the floors, from one run on a CUDA machine.

``python -m asv_bench.report --out DIR [--trace FILE] [--quick]`` writes ``report.json``, ``report.md`` and, with
matplotlib, ``size.png``, ``writes.png`` and ``groups.png``. ``--plot-only JSON`` makes page and pictures from an
earlier run's JSON, on any machine. ``--device host`` tries the logic without a GPU: its numbers are not a device's.

Enqueue time, GPU time and synchronized time are measured apart, on the null stream and on a non-blocking one. Arms and
floors alternate in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cupy_staged import writes

from . import measure
from .benchmarks import common
from .benchmarks.common import Work
from .experiments import apply_node
from .measure import Run, say, shown, slope, summary, table

Make = Callable[[int, Any], Work]  # slots, device

# Each work of the table: how to make it. The number of slots decides how many applies can be queued at once.
WORKS: dict[str, Make] = {
    "1 value, UVA target": lambda slots, device: common.one_write(1, "list", "uva", slots=slots, device=device),
    "1 value, device target": lambda slots, device: common.one_write(1, "list", slots=slots, device=device),
    "4096 values from a list": lambda slots, device: common.one_write(4096, "list", slots=slots, device=device),
    "4096 values from an ndarray": lambda slots, device: common.one_write(4096, slots=slots, device=device),
    "65536 values from an ndarray": lambda slots, device: common.one_write(65536, slots=slots, device=device),
    "131072 values from an ndarray": lambda slots, device: common.one_write(131072, slots=slots, device=device),
    "1024 writes of 1 value, a call each": lambda slots, device: common.many_writes(
        1024, "call", slots=slots, device=device
    ),
    "1024 writes of 1 value, one batch": lambda slots, device: common.many_writes(1024, slots=slots, device=device),
    "1024 writes of 1 value, one batch, shuffled": lambda slots, device: common.many_writes(
        1024, order="shuffled", slots=slots, device=device
    ),
    "1024 writes of 1 value, one batch, rows twice": lambda slots, device: common.many_writes(
        1024, order="twice", slots=slots, device=device
    ),
    "1024 writes of 1 value, one batch, overlapping": lambda slots, device: common.many_writes(
        1024, order="overlapping", slots=slots, device=device
    ),
    "8 groups × 256 requests × 1 block id, a call each": lambda slots, device: common.append_blocks(
        8, 256, "call", slots, device
    ),
    "8 groups × 256 requests × 1 block id, one batch": lambda slots, device: common.append_blocks(
        8, 256, slots=slots, device=device
    ),
    "gather and slot mapping, device arrays": lambda slots, device: common.prepare_step(
        8, 256, "device", slots, device
    ),
    "gather and slot mapping, NumPy arrays": lambda slots, device: common.prepare_step(8, 256, "host", slots, device),
}

# DESIGN.md §7: work, what is compared ("apply" is enqueue time, "total" is stage, apply, synchronize), peer, target in
# microseconds. A target of None is 3 above the empty graph launch and synchronize of the same run.
TARGETS: tuple[tuple[str, str, str, float | None], ...] = (
    ("1 value, UVA target", "apply", "51 to 55", 4),
    ("1 value, device target", "apply", "73 to 92", 4),
    ("1 value, UVA target", "total", "66", None),
    ("1 value, device target", "total", "89 to 110", None),
    ("4096 values from a list", "total", "207 to 251", 60),
    ("4096 values from an ndarray", "total", "64 to 69", 18),
    ("65536 values from an ndarray", "total", "122 to 196", 35),
    ("131072 values from an ndarray", "total", "183 to 360", 60),
    ("1024 writes of 1 value, a call each", "total", "580 to 734", 330),
    ("1024 writes of 1 value, one batch", "total", "–", 35),
    ("8 groups × 256 requests × 1 block id, a call each", "total", "1592 to 1616", 650),
    ("8 groups × 256 requests × 1 block id, one batch", "total", "–", 50),
    ("gather and slot mapping, device arrays", "apply", "55", 5),
    ("gather and slot mapping, NumPy arrays", "apply", "55 + three uploads", 9),
)
PARTS = {"apply": "host time of apply", "total": "stage, apply, synchronize"}
FLOORS = ("empty raw launch", "empty graph launch")
MARGIN_US, GPU_TARGET, DMA_TARGET = 3.0, 1.25, 0.9
LARGE = 1 << 20  # values of the apply whose share of the DMA rate is reported

SIZES = (1, 16, 256, 1024, 4096, 16384, 65536, 131072, 262144, 1048576)
WRITES = (1, 8, 64, 512, 4096)
GROUPS = (1, 2, 4, 8, 12, 16)


def floor_works(machine: Any, stream: str) -> dict[str, Work]:
    """Make the floors: nothing but a launch (on the host, nothing at all)."""
    if machine.gpu is None:
        return {name: Work(common.nothing, common.nothing) for name in FLOORS}
    launches = (machine.gpu.raw("empty"), machine.gpu.graph("empty", machine.streams[stream]))
    return {name: Work(common.nothing, launch) for name, launch in zip(FLOORS, launches, strict=True)}


def make_works(makers: dict[str, Make], slots: int, device: Any) -> tuple[dict[str, Work], dict[str, str]]:
    """Make works and try each once; say which are not available, and why."""
    works, missing = {}, {}
    for name, make in makers.items():
        try:
            work = make(slots, device)
            work.both()
        except Exception as error:  # noqa: BLE001 - one work that fails must not cost the others
            missing[name] = f"{type(error).__name__}: {error}"
        else:
            works[name] = work
    return works, missing


def gpu_time(machine: Any, make: Make, stream: str, slots: int, rounds: int) -> Any:
    """Measure the GPU time of one apply: as many as the ring has slots, queued behind a stalled stream."""
    if machine.gpu is None:
        return None
    work = make(slots, machine.device)
    try:
        return summary(machine.gpu.gpu_samples(work.both, slots, machine.streams[stream], rounds))
    except Exception as error:  # noqa: BLE001 - as in `make_works`
        say(f"no GPU time: {type(error).__name__}: {error}")
        return None


def rows_of(machine: Any, makers: dict[str, Make], quick: bool, budget_s: float, slots: int = 32) -> dict[str, Any]:
    """Measure host and synchronized times of works and floors, alternating, and the GPU time of each work."""
    arms, missing = {}, {}
    for stream in machine.streams:
        works, missing[stream] = make_works(makers, 2, machine.device)
        arms[stream] = {**floor_works(machine, stream), **works}
    out: dict[str, Any] = measure.measure(machine, arms, 4 if quick else 12, 10 if quick else 40, budget_s)
    for stream, rows in out.items():
        for name in [name for name in rows if name not in FLOORS and "missing" not in rows[name]]:
            rows[name]["gpu"] = gpu_time(machine, makers[name], stream, slots, 3 if quick else 5)
        if machine.gpu is not None:
            for name in FLOORS:
                samples = machine.gpu.gpu_samples(arms[stream][name].apply, 32, machine.streams[stream])
                rows[name]["gpu"] = summary(samples)
        rows.update({name: {"missing": why} for name, why in missing[stream].items()})
    return out


def run_bus(machine: Any, quick: bool) -> dict[str, Any]:
    """Measure a small apply in bus reads and a large one as a share of the DMA rate, by GPU time."""
    gpu, out = machine.gpu, {}
    for name, stream in gpu.streams.items():
        rounds = 3 if quick else 9
        small = common.one_write(1, "list", slots=32)
        large = common.one_write(LARGE, contents="uva", slots=8)
        out[name] = {
            "empty": summary(gpu.gpu_samples(gpu.graph("empty"), 32, stream, rounds)),
            "one bus read": summary(gpu.gpu_samples(gpu.graph("chain1"), 32, stream, rounds)),
            "one 512-byte bus read": summary(gpu.gpu_samples(gpu.graph("read_line"), 32, stream, rounds)),
            "three bus reads": summary(gpu.gpu_samples(gpu.graph("chain3"), 32, stream, rounds)),
            "small apply": summary(gpu.gpu_samples(small.both, 32, stream, rounds)),
            "large apply": summary(gpu.gpu_samples(large.both, 8, stream, rounds)),
            "DMA copy": summary(gpu.copy_samples(4 * LARGE, stream, rounds)),
        }
    return out


def run_nodes(machine: Any, quick: bool) -> dict[str, Any]:
    """Measure the same by kernels in a row in one graph, where launches do not show: a kernel's own bus reads."""
    gpu, out = machine.gpu, {}
    for name, stream in gpu.streams.items():
        rounds = 3 if quick else 9
        small = apply_node(lambda slots: common.one_write(1, "list", slots=slots), stream)
        large = apply_node(lambda slots: common.one_write(LARGE, contents="uva", slots=slots), stream)
        out[name] = {
            "empty": summary(gpu.node_samples(gpu.raw("empty"), stream, rounds)),
            "one bus read": summary(gpu.node_samples(gpu.raw("chain1"), stream, rounds)),
            "one 512-byte bus read": summary(gpu.node_samples(gpu.raw("read_line"), stream, rounds)),
            "three bus reads": summary(gpu.node_samples(gpu.raw("chain3"), stream, rounds)),
            "small apply": summary(gpu.node_samples(small, stream, rounds)),
            "large apply": summary(gpu.node_samples(large, stream, rounds)),
            "DMA copy": summary(gpu.copy_samples(4 * LARGE, stream, rounds)),
        }
    return out


def run_curves(machine: Any, quick: bool, budget_s: float) -> dict[str, Any]:
    """Measure latency over size, over writes, and over groups (fused, and by one launch a group)."""
    curves: dict[str, dict[int, dict[str, Make]]] = {"size": {}, "writes": {}, "groups": {}}
    for n in SIZES[::3] if quick else SIZES:
        curves["size"][n] = {
            f"{target} target": lambda slots, device, n=n, target=target: common.one_write(
                n, target=target, slots=slots, device=device
            )
            for target in ("device", "uva")
        }
    for n in WRITES:
        curves["writes"][n] = {
            order: lambda slots, device, n=n, order=order: common.many_writes(
                n, order=order, slots=slots, device=device
            )
            for order in ("ascending", "shuffled")
        }
    for n in GROUPS[::2] if quick else GROUPS:
        curves["groups"][n] = {
            "fused": lambda slots, device, n=n: common.fused(n, 1, slots, device),
            "one launch a group": lambda slots, device, n=n: common.separate(n, 1, slots, device),
        }
    out: dict[str, Any] = {}
    for curve, points in curves.items():
        for n, makers in points.items():
            slots = 8 if curve == "size" and n > 131072 else 16
            for stream, rows in rows_of(machine, makers, quick, budget_s, slots).items():
                out.setdefault(curve, {}).setdefault(stream, {})[str(n)] = rows
    return out


@contextlib.contextmanager
def contents_policy(contents: str) -> Iterator[None]:
    """Let objects that are made meanwhile use this policy where "auto" would decide."""
    before = writes.AUTO_COPIES
    writes.AUTO_COPIES = contents == "h2d"
    try:
        yield
    finally:
        writes.AUTO_COPIES = before


def run_replay(machine: Any, trace: Path | None, requests: int, runs: int) -> dict[str, Any]:
    """Replay a trace with `uva` and with `h2d` contents, alternating."""
    from cupy_staged.replay import replay
    from cupy_staged.scheduler import generate_trace, read_trace

    out: dict[str, Any] = {"trace": trace.name if trace else "generated", "uva": [], "h2d": []}
    for _, contents in itertools.product(range(runs), ("uva", "h2d")):
        source = read_trace(trace) if trace else generate_trace(requests)
        with contents_policy(contents):
            found = replay(
                itertools.islice(source, requests), block_sizes=(16, 16, 32), device=machine.device, check="none"
            )
        out[contents].append(
            {
                "steps": found.steps,
                "requests": found.requests,
                "stage_p50": found.stage_us.p50,
                "apply_p50": found.apply_us.p50,
                "apply_p99": found.apply_us.p99,
                "growths": found.growths,
                "waits": found.waits,
                "seconds": found.seconds,
            }
        )
    return out


# -- the page ----------------------------------------------------------------------------------------------------------


def verdict(measured: Any, target: float, stream: str) -> str:
    """Say whether a median meets its target, which is one for a device."""
    if stream == "host":
        return "no device"
    return "met" if measured["median"] <= target else f"missed by {measured['median'] - target:.2f}"


def target_rows(rows: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the rows of the targets' table."""
    for name, part, peer, fixed in TARGETS:
        cells, aims = [], []
        for stream in rows:
            found = rows[stream].get(name, {})
            aim = fixed
            if aim is None:
                aim = rows[stream]["empty graph launch"]["total"]["median"] + MARGIN_US
            aims.append(f"{aim:g}" if fixed is not None else f"{aim:.1f}")
            value = found.get(part)
            cells += [
                shown(value),
                verdict(value, aim, stream) if value else found.get("missing", "not measured").replace("|", " "),
            ]
        yield [name, PARTS[part], peer, " / ".join(dict.fromkeys(aims)), *cells]


def bus_rows(bus: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the last two targets: GPU time in bus reads, and the share of the DMA rate."""
    cells: dict[str, list[str]] = {"small": [], "large": []}
    for found in bus.values():
        small = found["small apply"]["median"] / found["one bus read"]["median"]
        share = found["DMA copy"]["median"] / found["large apply"]["median"]
        cells["small"] += [f"{small:.2f}", "met" if small <= GPU_TARGET else "missed"]
        cells["large"] += [f"{share:.0%}", "met" if share >= DMA_TARGET else "missed"]
    yield ["1 value, device target", "GPU time / one bus read", "–", f"{GPU_TARGET:g}", *cells["small"]]
    yield [f"{LARGE} values, uva contents", "share of the DMA rate", "–", f"{DMA_TARGET:.0%}", *cells["large"]]


def slopes(curves: dict[str, Any]) -> list[list[str]]:
    """Fit a line through each curve: the cost of one more write, or of one more group, in nanoseconds."""
    out = []
    for curve, unit in (("writes", "write"), ("groups", "group"), ("size", "value")):
        for stream, points in curves.get(curve, {}).items():
            arms = [arm for arm in next(iter(points.values())) if arm not in FLOORS]
            for arm, part in itertools.product(arms, ("stage", "apply", "gpu", "total")):
                known = [(int(n), rows[arm][part]["median"]) for n, rows in points.items() if rows[arm].get(part)]
                if len(known) > 1:
                    per, base = slope(*zip(*known, strict=True))
                    out.append([curve, arm, stream, part, f"{per * 1e3:.2f} ns a {unit}", f"{base:.2f}"])
    return out


def markdown(data: dict[str, Any], pictures: list[str]) -> str:
    """Write the page, from the JSON."""
    found, sections = data["environment"], data["sections"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    text = [
        f"{found.get('gpu', 'No GPU')}, {found['cpu']}, Python {found['python']}, {versions}, commit {found['commit']}."
    ]
    text += ["Microseconds, median [quartiles].", ""]
    bus = sections.get("nodes") or sections.get("bus")
    if rows := sections.get("rows"):
        streams = list(rows)
        head = ["work", "what", "peer", "target", *itertools.chain(*((f"{s} stream", "") for s in streams))]
        lines = list(target_rows(rows)) + (list(bus_rows(bus)) if bus else [])
        text += ["### Targets", "", table(head, lines), ""]
        for stream in streams:
            lines = [
                [name, *(shown(r.get(part)) for part in ("stage", "apply", "gpu", "total"))]
                for name, r in rows[stream].items()
                if "missing" not in r
            ]
            head = ["work", "stage (host)", "apply (enqueue)", "GPU time", "stage, apply, synchronize"]
            text += [f"### All parts, {stream} stream", "", table(head, lines), ""]
    for section, what in (("nodes", "kernels in a row in one graph"), ("bus", "queued launches")):
        if timed := sections.get(section):
            names = list(next(iter(timed.values())))
            lines = [[name, *(shown(of_stream[name]) for of_stream in timed.values())] for name in names]
            text += [f"### GPU time, {what}", "", table(["work", *timed], lines), ""]
    if curves := sections.get("curves"):
        text += ["### Slopes (least squares)", ""]
        text += [table(["curve", "work", "stream", "part", "slope", "intercept, µs"], slopes(curves)), ""]
    text += [f"![{name}]({name})" for name in pictures] + ([""] if pictures else [])
    if replayed := sections.get("replay"):
        head = ["contents", "run", "steps", "apply p50", "apply p99", "stage p50", "growths", "waits", "seconds"]
        keys = ("steps", "apply_p50", "apply_p99", "stage_p50", "growths", "waits", "seconds")
        lines = [
            [contents, str(i + 1), *(str(run[key]) for key in keys)]
            for contents in ("uva", "h2d")
            for i, run in enumerate(replayed[contents])
        ]
        text += [f"### Replay of the trace ({replayed['trace']})", "", table(head, lines), ""]
    for name, why in data["failed"].items():
        text += [f"Section {name} has no result: {why.strip().splitlines()[-1]}", ""]
    return "\n".join(text)


def plot(data: dict[str, Any], out: Path) -> list[str]:
    """Draw each curve, a panel a stream, and return the file names; none without matplotlib."""
    curves = data["sections"].get("curves")
    if not curves:
        return []
    if importlib.util.find_spec("matplotlib") is None:
        say('no pictures: matplotlib is not installed (pip install "cupy-staged[plot]")')
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = {"size": "int32 values in one write", "writes": "writes of one value", "groups": "groups, one write each"}
    names = []
    for curve, streams in curves.items():
        size = (5.2 * len(streams) + 2.6, 4.5)
        figure, axes = pyplot.subplots(1, len(streams), figsize=size, sharey=True, squeeze=False)
        for axis, (stream, points) in zip(axes[0], streams.items(), strict=True):
            arms = [arm for arm in next(iter(points.values())) if arm not in FLOORS]
            for color, arm in zip(("tab:blue", "tab:orange"), arms, strict=False):
                for part, style in (("stage", ":"), ("apply", "--"), ("gpu", "-."), ("total", "-")):
                    known = [(int(n), r[arm][part]["median"]) for n, r in points.items() if r[arm].get(part)]
                    if known:
                        xs, ys = zip(*known, strict=True)
                        axis.plot(xs, ys, style, color=color, marker=".", label=f"{arm}: {part}")
            for color, name in zip(("0.6", "0.3"), FLOORS, strict=True):
                known = [(int(n), r[name]["total"]["median"]) for n, r in points.items()]
                xs, ys = zip(*known, strict=True)
                axis.plot(xs, ys, color=color, linewidth=1, label=f"{name} and synchronize")
            log = curve != "groups"
            axis.set(xscale="log" if log else "linear", yscale="log", xlabel=labels[curve], title=f"{stream} stream")
            axis.grid(alpha=0.3, which="both")
        axes[0][0].set_ylabel("µs (median)")
        axes[0][-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
        figure.tight_layout()
        figure.savefig(out / f"{curve}.png", dpi=110)
        pyplot.close(figure)
        names.append(f"{curve}.png")
    return names


def main() -> None:
    """Run, and write JSON, page and pictures."""
    parser = argparse.ArgumentParser(prog="python -m asv_bench.report", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "host"))
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds")
    parser.add_argument("--trace", type=Path, help="a serving trace; by default one is generated")
    parser.add_argument("--requests", type=int, default=2000, help="requests of the trace to replay")
    parser.add_argument("--limit-s", type=float, default=200.0, help="no section begins after so many seconds")
    parser.add_argument("--plot-only", type=Path, metavar="JSON", help="make page and pictures from an earlier run")
    options = parser.parse_args()
    if options.plot_only:
        options.out.mkdir(parents=True, exist_ok=True)
        data = json.loads(options.plot_only.read_text())
    else:
        machine, quick = measure.machine_of(options.device), options.quick
        run = Run(options.out, "report", options.limit_s)
        requests, runs = (200, 1) if quick else (options.requests, 3)
        run.section("rows", lambda: rows_of(machine, WORKS, quick, 6.0 if quick else 40.0))
        if machine.gpu is not None:
            run.section("nodes", lambda: run_nodes(machine, quick))
            run.section("bus", lambda: run_bus(machine, quick))
        run.section("replay", lambda: run_replay(machine, options.trace, requests, runs))
        run.section("curves", lambda: run_curves(machine, quick, 0.6 if quick else 2.0))
        data = run.data
    page = markdown(data, plot(data, options.out))
    (options.out / "report.md").write_text(page + "\n")
    if not options.plot_only:
        say("\n" + page)


if __name__ == "__main__":
    main()
