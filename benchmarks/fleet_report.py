"""What `benchmarks.fleets` measures, as a table, a picture, and a section of docs/benchmarks.md."""

from __future__ import annotations

import pstats
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEASE_S = 8.0  # worker.lease_s
POLICIES = {"doll K=N/4": 0.25, "doll K=N": 1.0, "doll K=4N": 4.0, "bsp": 0.0}
TOP_FUNCTIONS = 16


@dataclass(frozen=True)
class Fleet:
    """What is run."""

    workers: int
    policy: str  # a key of POLICIES
    compute_s: float
    blobs: str = "redis"
    control: str = "kafka"

    @property
    def group_size(self) -> int:
        """Batches per update while all workers are there."""
        return max(1, round(self.workers * POLICIES[self.policy])) or self.workers

    @property
    def offered(self) -> float:
        """Batches per second if nothing but gradients took time."""
        busy = min(self.workers, self.group_size) if self.policy != "bsp" else self.workers
        return busy / self.compute_s


@dataclass
class Row:
    """One run. Rates are per second of its steady state, processor times milliseconds per batch."""

    fleet: Fleet
    batches_per_s: float
    updates_per_s: float
    offered_per_s: float
    loop_busy: float  # share of one core that the main thread of the server used
    server_other: float  # its other threads: Kafka's client, checkpoints
    cores_busy: float  # share of the machine, everything included
    others: float
    cpu_ms: dict[str, float]  # by process
    loop_ms: float  # of the server's main thread
    update_ms: float  # of the server's process, per update
    latency_p50_ms: float  # from the first grant of a group to the new weights
    latency_p99_ms: float
    set_size: float  # batches per push
    workers_per_update: float
    min_live: int  # least number of live workers
    joined_s: float  # from the start signal to the last Welcome
    first_update_s: float  # from the start signal
    faults: dict[str, float] = field(default_factory=dict)


def show(rows: Sequence[Row]) -> None:
    """The rows as a table for the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Fleets: rates per second; processor milliseconds per batch; shares")
    left = ("N", "policy", "control, blobs")
    columns = ("compute", "batches", "of offered", "updates", "p50", "p99", "server", "(loop)", "Kafka",
               "Redis", "stubs", "set", "workers", "live", "per update", "loop busy", "cores busy",
               "others", "joined")  # fmt: skip
    for column in (*left, *columns):
        table.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        cpu = {name: f"{row.cpu_ms.get(name, 0.0):.2f}" for name in ("ps", "kafka", "redis", "stubs")}
        table.add_row(
            str(row.fleet.workers), row.fleet.policy, f"{row.fleet.control}, {row.fleet.blobs}",
            f"{1e3 * row.fleet.compute_s:.0f} ms", f"{row.batches_per_s:,.0f}",
            f"{row.batches_per_s / row.offered_per_s:.2f}", f"{row.updates_per_s:.2f}", f"{row.latency_p50_ms:.0f} ms",
            f"{row.latency_p99_ms:.0f} ms", cpu["ps"], f"{row.loop_ms:.2f}", cpu["kafka"], cpu["redis"], cpu["stubs"],
            f"{row.set_size:.1f}", f"{row.workers_per_update:.0f}", str(row.min_live),
            f"{row.update_ms:.1f}", f"{row.loop_busy:.0%}", f"{row.cores_busy:.0%}", f"{row.others:.0%}",
            f"{row.joined_s:.1f} s",
        )  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(table)
    for row in rows:
        if row.faults:
            console.print(faults_line(row))


def profile_table(path: Path, top: int = TOP_FUNCTIONS) -> str:
    """The functions of a profile of the server's loop with the most time of their own, as Markdown.

    Shares are of the time outside the wait for records. Times of calls include what they wait for.
    """
    stats: Any = pstats.Stats(str(path))
    entries = [(*key, calls, own_s, total_s) for key, (_, calls, own_s, total_s, _) in stats.stats.items()]
    waiting = ("'poll' of 'cimpl.Consumer'", "method 'poll' of 'select", "time.sleep")
    waits_s = sum(entry[4] for entry in entries if any(name in entry[2] for name in waiting))
    serve_s = max((entry[5] for entry in entries if entry[2] == "serve"), default=0.0)
    busy_s = max(serve_s - waits_s, 1e-9)
    inside = _under(stats.stats, "serve")
    lines = [
        f"busy {busy_s:.1f} s of {serve_s:.1f} s",
        "",
        "| function | calls | own | with callees |",
        "|---|---|---|---|",
    ]
    chosen = [entry for entry in entries if entry[:3] in inside and not any(name in entry[2] for name in waiting)]
    for file, line, name, calls, own_s, total_s in sorted(chosen, key=lambda entry: -entry[4])[:top]:
        parts = Path(file).parts
        place = f"{'/'.join(parts[-2:])}:{line} " if line else ""
        lines.append(f"| `{place}{name}` | {calls:,} | {own_s / busy_s:.1%} | {total_s / busy_s:.1%} |")
    return "\n".join(lines)


def _under(stats: dict[Any, Any], name: str) -> set[Any]:
    """`name` and everything that it calls, directly or not."""
    callees: dict[Any, list[Any]] = {}
    for function, (*_, callers) in stats.items():
        for caller in callers:
            callees.setdefault(caller, []).append(function)
    inside: set[Any] = set()
    pending = [function for function in stats if function[2] == name]
    while pending:
        function = pending.pop()
        if function not in inside:
            inside.add(function)
            pending += callees.get(function, [])
    return inside


def draw(rows: Sequence[Row], path: Path) -> None:
    """Batches and updates per second, what a batch costs, and what is busy, over the number of workers; a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 7.0), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    ((batches, updates), (cost, busy)) = figure.subplots(2, 2)
    kinds = dict.fromkeys((row.fleet.policy, row.fleet.control, row.fleet.blobs) for row in rows)
    for kind in kinds:
        mine = sorted(
            (row for row in rows if (row.fleet.policy, row.fleet.control, row.fleet.blobs) == kind),
            key=lambda row: row.fleet.workers,
        )
        sizes = [row.fleet.workers for row in mine]
        label = ", ".join(part for part in kind if part)
        (line,) = batches.plot(sizes, [row.batches_per_s for row in mine], "o-", label=label)
        batches.plot(sizes, [row.offered_per_s for row in mine], ":", color=line.get_color(), linewidth=0.8)
        updates.plot(sizes, [row.updates_per_s for row in mine], "o-", color=line.get_color())
        cost.plot(sizes, [row.cpu_ms["ps"] for row in mine], "o-", color=line.get_color())
        busy.plot(sizes, [row.loop_busy for row in mine], "o-", color=line.get_color())
        busy.plot(sizes, [row.cores_busy for row in mine], "x--", color=line.get_color(), linewidth=0.8)
    for axes, title, label, scale in (
        (batches, "Batches (dotted: if only gradients took time)", "per second", "log"),
        (updates, "Updates", "per second", "log"),
        (cost, "The server's processor time", "ms per batch", "linear"),
        (busy, "Busy: the server's loop (of a core), the machine (dashed)", "share", "linear"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_yscale(scale)
        axes.set_ylabel(label, fontsize=9)
        axes.set_xlabel("workers", fontsize=9)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8)
    for axes in (cost, busy):
        axes.set_ylim(bottom=0)
    batches.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def faults_line(row: Row) -> str:
    """How the fleet started, and how long updates paused after each fault."""
    begin = (
        f"{row.fleet.workers} workers, {row.fleet.policy}, control {row.fleet.control}: all joined "
        f"{row.joined_s:.1f} s after the start, first update {row.first_update_s:.1f} s. "
    )
    if "kills" in row.faults:
        return begin + (
            f"Then {row.faults['kills']:g} kills in {row.faults['kills_s']:.0f} s, of the server and of a process of "
            f"workers in turns: {row.faults['batches_per_s_with_kills']:,.0f} batches/s; updates paused at most "
            f"{row.faults['ps_killed_pause_s']:.1f} s and {row.faults.get('stubs_killed_pause_s', 0.0):.1f} s."
        )
    return begin + (
        "A worker lost: updates paused "
        f"{row.faults['worker_lost_pause_s']:.1f} s (lease {LEASE_S:g} s). Server killed: successor open after "
        f"{row.faults['server_open_s']:.1f} s, next update after {row.faults['server_pause_s']:.1f} s."
    )


def markdown(rows: Sequence[Row], facts: str) -> str:
    """The section of the document.

    Args:
        facts: when and where it was measured.
    """
    lines = [
        facts,
        "",
        "| N | policy | control | batches/s | updates/s | p50, p99 | batches per push | server per batch | its loop "
        "| Kafka | Redis | stubs | server per update | loop busy | cores busy | others |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cpu = [f"{row.cpu_ms.get(name, 0.0):.2f}" for name in ("kafka", "redis", "stubs")]
        cells = (
            str(row.fleet.workers), row.fleet.policy, row.fleet.control, f"{row.batches_per_s:,.0f}",
            f"{row.updates_per_s:.2f}", f"{row.latency_p50_ms:,.0f}, {row.latency_p99_ms:,.0f} ms",
            f"{row.set_size:.1f}", f"{row.cpu_ms.get('ps', 0.0):.2f} ms", f"{row.loop_ms:.2f}", *cpu,
            f"{row.update_ms:,.1f} ms", f"{row.loop_busy:.0%}", f"{row.cores_busy:.0%}", f"{row.others:.0%}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "![Fleets](fleets.png)"]
    lines += [text for row in rows if row.faults for text in ("", faults_line(row))]
    return "\n".join(lines)
