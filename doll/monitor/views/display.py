"""The progress of a job on standard error: a live panel on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from doll.amounts import clock, known, number, out_of, usd
from doll.config import StopConfig
from doll.monitor.state.progress import JobSnapshot
from doll.monitor.views.text import TEXT_COLUMNS, WORKER_COLUMNS, one_line, verdict, worker_cells

LINE_EVERY_S = 5.0
REFRESH_EVERY_S = 0.25
_WORKERS_SHOWN = 16
# Below this inner width of the panel, a table that names machines has no room for these columns.
_WIDE = 96
_LEFT_OUT = frozenset({"control", "restarts", "batches"})
_STATE_STYLES = {None: "dim", True: "green", False: "red"}


def make_display(stop: StopConfig) -> Display:
    """Return a live panel if standard error is a terminal, otherwise plain lines."""
    return LiveDisplay(stop) if sys.stderr.isatty() else Display(stop)


class Display:
    """Shows the progress of a job: one line for each message, and one every `LINE_EVERY_S`."""

    _every_s = LINE_EVERY_S

    def __init__(self, stop: StopConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop = stop
        self._clock = clock
        self._started_s = clock()
        self._next_s = 0.0

    def say(self, text: str) -> None:
        """Print a message with the time."""
        for line in text.splitlines():
            self._print(f"[{self._clock() - self._started_s:6.1f} s] {line}")

    def show(self, snapshot: Callable[[], JobSnapshot]) -> None:
        """Draw a snapshot if it is due; may be called often."""
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + self._every_s
            self._draw(snapshot())

    def _print(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def _draw(self, snapshot: JobSnapshot) -> None:
        self.say(one_line(snapshot, self._stop))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class LivePanel:
    """A panel that is redrawn in place on standard error; messages scroll above it."""

    def __enter__(self) -> Self:
        # No refresh thread: `show` draws the panel.
        self._live = Live(console=Console(stderr=True), auto_refresh=False, redirect_stdout=False)
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def _print(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)
        self._live.refresh()


class LiveDisplay(LivePanel, Display):
    """Shows the progress of a job in a panel."""

    _every_s = REFRESH_EVERY_S

    def _draw(self, snapshot: JobSnapshot) -> None:
        self._live.update(panel(snapshot, self._stop), refresh=True)


def panel(snapshot: JobSnapshot, stop: StopConfig) -> RenderableType:
    """Return the live panel."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()  # on a narrow terminal, a long value takes two lines and is not cut off
    fields = _fields(snapshot, stop)
    for left, right in zip(fields[::2], fields[1::2], strict=True):
        grid.add_row(*left, *right)
    parts: list[RenderableType] = [grid]
    if stop.updates is not None:
        bar = Table.grid(expand=True)  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=stop.updates, completed=min(snapshot.updates, stop.updates)))
        parts.insert(0, bar)
    if snapshot.costs:
        parts.append(escape(snapshot.costs))
    if snapshot.limit and not snapshot.finished:
        parts.append(f"[yellow]limits[/] {escape(snapshot.limit)}")
    if snapshot.join is not None:
        parts.append(escape(snapshot.join.text()))
    if snapshot.history:
        parts.append(escape(f"history: {snapshot.history}"))
    if dead := snapshot.dead.text():
        parts.append(f"[red]{escape(dead)}[/]")
    parts.append(_Workers(snapshot))
    for at_s, text in snapshot.events[-4:]:
        parts.append(f"[yellow]{clock(at_s):>7}[/] {escape(text)}")
    eta = "" if not known(snapshot.eta_s) else f", about {clock(snapshot.eta_s)} left"
    title = f"DOLL {snapshot.job}  {clock(snapshot.seconds)}{eta}"
    return Panel(Group(*parts), title=escape(title), title_align="left", border_style="cyan")


def _fields(snapshot: JobSnapshot, stop: StopConfig) -> list[tuple[str, str]]:
    accuracy_goal = "" if stop.accuracy is None else f" of {stop.accuracy:g}"
    loss_goal = "" if stop.loss is None else f" of {stop.loss:g}"
    version = "" if snapshot.held_out_version is None else f" (v{snapshot.held_out_version})"
    source = "" if snapshot.rate_stated else " (λ measured)"
    means, policy = snapshot.prequential, snapshot.policy
    return [
        ("updates", out_of(snapshot.updates, stop.updates)),
        ("samples", out_of(snapshot.samples, stop.samples)),
        ("preq. loss", number(means.loss)),
        ("held-out loss", number(snapshot.held_out_loss) + loss_goal),
        ("preq. accuracy", number(means.metrics.get("accuracy", math.nan))),
        ("held-out accuracy", number(snapshot.held_out_accuracy) + accuracy_goal + version),
        ("λ_U measured", f"{number(snapshot.rate_measured)} /s"),
        ("theory Nλ/(Kb)", f"{number(snapshot.rate_predicted)} /s{source}"),
        ("Prop. 1 margin", f"{number(snapshot.margin.sufficient)}  {verdict(snapshot)}"),
        ("batch μ_C", f"{number(1000 * snapshot.service_s)} ms"),
        ("durable version", "?" if snapshot.durable_version is None else str(snapshot.durable_version)),
        ("waiting batches", "?" if snapshot.waiting_batches is None else str(snapshot.waiting_batches)),
        ("samples sent", "?" if snapshot.sent is None else f"{snapshot.sent:,}"),
        ("send rate", f"{number(snapshot.send_rate_per_s)} /s"),
        ("staleness", "?" if policy is None else policy.staleness_text),
        ("workers blocked", "?" if policy is None else policy.blocked_text + policy.void_text),
    ]


class _Workers:
    """The table of the workers, with as many columns as fit."""

    def __init__(self, snapshot: JobSnapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _workers(self._snapshot, is_narrow=options.max_width < _WIDE)


def _workers(snapshot: JobSnapshot, *, is_narrow: bool) -> RenderableType:
    machines = any(line.machine for line in snapshot.workers)
    hidden_columns = _LEFT_OUT if is_narrow and machines else frozenset[str]()
    table = Table(box=None, padding=(0, 1 if is_narrow else 2, 0, 0), header_style="dim")
    for name in WORKER_COLUMNS:
        if name not in hidden_columns:
            table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right", no_wrap=True)
    if machines:
        table.add_column("USD", justify="right", no_wrap=True)
        table.add_column("machine", overflow="fold")
    for line in snapshot.workers[:_WORKERS_SHOWN]:
        style = _STATE_STYLES[line.is_live]
        named_cells = zip(WORKER_COLUMNS, worker_cells(line), strict=True)
        cells = {name: escape(cell) for name, cell in named_cells if name not in hidden_columns}
        cells["state"] = f"[{style}]{cells['state']}[/]"
        more = (usd(line.usd) if known(line.usd) else "", escape(line.machine)) if machines else ()
        table.add_row(*cells.values(), *more)
    hidden = snapshot.workers[_WORKERS_SHOWN:]
    if hidden:
        live = sum(line.is_live is True for line in hidden)
        table.add_row("...", f"{live} of {len(hidden)} more live")
    return table
