"""The live panel on a terminal, redrawn in place; messages scroll above it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from doll.config import StopConfig
from doll.monitor.formats import clock, known, number, of
from doll.monitor.progress import JobSnapshot
from doll.monitor.text import TEXT_COLUMNS, WORKER_COLUMNS, verdict, worker_cells

REFRESH_EVERY_S = 0.25
_WORKERS_SHOWN = 16
_STATE_STYLES = {None: "dim", True: "green", False: "red"}


class LiveDisplay:
    """A panel that is redrawn in place; messages scroll above it."""

    def __init__(self, stop: StopConfig) -> None:
        self._stop = stop
        self._live: Live | None = None
        self._next_s = 0.0
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        # No refresh thread: `show` draws.
        self._live = Live(console=Console(stderr=True), auto_refresh=False, redirect_stdout=False)
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        if self._live is not None:
            seconds = time.monotonic() - self._started_s
            self._live.console.print(f"[{seconds:6.1f} s] {text}", markup=False, highlight=False)
            self._live.refresh()

    def show(self, snapshot: Callable[[], JobSnapshot]) -> None:
        now_s = time.monotonic()
        if self._live is not None and now_s >= self._next_s:
            self._next_s = now_s + REFRESH_EVERY_S
            self._live.update(panel(snapshot(), self._stop), refresh=True)


def panel(snapshot: JobSnapshot, stop: StopConfig) -> RenderableType:
    """The live panel."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(no_wrap=True)
    for (left, left_value), (right, right_value) in _fields(snapshot, stop):
        grid.add_row(left, left_value, right, right_value)
    parts: list[RenderableType] = [grid]
    if stop.updates is not None:
        bar = Table.grid(expand=True)  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=stop.updates, completed=min(snapshot.version, stop.updates)))
        parts.insert(0, bar)
    if snapshot.costs:
        parts.append(escape(snapshot.costs))
    parts.append(_workers(snapshot))
    for at_s, text in snapshot.events[-4:]:
        parts.append(f"[yellow]{clock(at_s):>7}[/] {escape(text)}")
    eta = "" if not known(snapshot.eta_s) else f", about {clock(snapshot.eta_s)} left"
    title = f"DOLL {snapshot.job}  {clock(snapshot.seconds)}{eta}"
    return Panel(Group(*parts), title=escape(title), title_align="left", border_style="cyan")


def _fields(snapshot: JobSnapshot, stop: StopConfig) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    goal = "" if stop.accuracy is None else f" of {stop.accuracy:g}"
    means = snapshot.prequential
    accuracy = means.metrics.get("accuracy", math.nan)
    version = "" if snapshot.held_out_version is None else f"  (version {snapshot.held_out_version})"
    source = "Nλ/(Kb)" if snapshot.rate_stated else "Nλ/(Kb), λ measured"
    return [
        (("updates", of(snapshot.version, stop.updates)), ("samples", of(snapshot.samples, stop.samples))),
        (
            ("prequential loss", number(means.loss)),
            ("held-out loss", number(snapshot.held_out_loss) + ("" if stop.loss is None else f" of {stop.loss:g}")),
        ),
        (
            ("prequential accuracy", number(accuracy)),
            ("held-out accuracy", number(snapshot.held_out_accuracy) + goal + version),
        ),
        (
            ("λ_U measured", f"{number(snapshot.rate_measured)} /s"),
            (source, f"{number(snapshot.rate_predicted)} /s"),
        ),
        (
            ("Prop. 1 margin", f"{number(snapshot.margin.sufficient)}  {verdict(snapshot)}"),
            ("batch μ_C", f"{number(1000 * snapshot.service_s)} ms"),
        ),
        (
            ("durable version", "?" if snapshot.durable_version is None else str(snapshot.durable_version)),
            ("waiting batches", "?" if snapshot.waiting_batches is None else str(snapshot.waiting_batches)),
        ),
        (
            ("samples sent", "?" if snapshot.sent is None else of(snapshot.sent, None)),
            ("send rate", f"{number(snapshot.send_rate_per_s)} /s"),
        ),
        (
            ("staleness", "?" if snapshot.policy is None else snapshot.policy.staleness_text),
            ("workers blocked", "?" if snapshot.policy is None else snapshot.policy.blocked_text),
        ),
    ]


def _workers(snapshot: JobSnapshot) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in WORKER_COLUMNS:
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right", no_wrap=True)
    machines = any(line.machine for line in snapshot.workers)
    if machines:
        table.add_column("USD", justify="right", no_wrap=True)
        table.add_column("machine", no_wrap=True)
    for line in snapshot.workers[:_WORKERS_SHOWN]:
        worker, state, *cells = worker_cells(line)
        more = (f"{line.usd:.3f}" if known(line.usd) else "", escape(line.machine)) if machines else ()
        style = _STATE_STYLES[line.is_live]
        table.add_row(worker, f"[{style}]{state}[/]", *map(escape, cells), *more)
    hidden = snapshot.workers[_WORKERS_SHOWN:]
    if hidden:
        live = sum(line.is_live is True for line in hidden)
        table.add_row("...", f"{live} of {len(hidden)} more live")
    return table
