"""Showing a job's progress on standard error: a live panel on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from doll.config import StopConfig
from doll.ledger.report import count

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from doll.monitor.progress import JobSnapshot

LINE_EVERY_S = 5.0
REFRESH_EVERY_S = 0.25
_WORKERS_SHOWN = 16


class Display(Protocol):
    """Shows what happens. `say` is for single messages; `show` is called often and draws when it is time."""

    def say(self, text: str) -> None: ...
    def show(self, snapshot: Callable[[], JobSnapshot]) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_display(stop: StopConfig) -> Display:
    """A live display where standard error is a terminal, else plain lines."""
    return LiveDisplay(stop) if sys.stderr.isatty() else LineDisplay(stop)


class LineDisplay:
    """One line per message and per `LINE_EVERY_S`."""

    def __init__(self, stop: StopConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._stop = stop
        self._clock = clock
        self._started_s = clock()
        self._next_s = 0.0

    def say(self, text: str) -> None:
        seconds = self._clock() - self._started_s
        for line in text.splitlines():
            sys.stderr.write(f"[{seconds:6.1f} s] {line}\n")
        sys.stderr.flush()

    def show(self, snapshot: Callable[[], JobSnapshot]) -> None:
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + LINE_EVERY_S
            self.say(one_line(snapshot(), self._stop))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveDisplay:
    """A panel that is redrawn in place; messages scroll above it."""

    def __init__(self, stop: StopConfig) -> None:
        self._stop = stop
        self._live: Live | None = None
        self._next_s = 0.0
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.live import Live

        # No refresh thread: whoever calls `show` decides when the panel is drawn.
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


def one_line(snapshot: JobSnapshot, stop: StopConfig) -> str:
    """The state of the job in one line.

    Every number says its unit; what is not known yet is left out.
    """
    parts = [f"update {of(snapshot.version, stop.updates)}", f"samples {of(snapshot.samples, stop.samples)}"]
    if known(snapshot.prequential.loss):
        parts.append(f"prequential loss {snapshot.prequential.loss:.3f}")
    if known(snapshot.held_out_accuracy):
        goal = "" if stop.accuracy is None else f" of {stop.accuracy:g}"
        parts.append(f"held-out accuracy {snapshot.held_out_accuracy:.3f}{goal}")
    elif known(snapshot.held_out_loss):
        parts.append(f"held-out loss {snapshot.held_out_loss:.3f}")
    if known(snapshot.rate_measured):
        parts.append(f"{snapshot.rate_measured:.2f} updates/s (theory {number(snapshot.rate_predicted)})")
    if snapshot.durable_version is not None:
        parts.append(f"durable {snapshot.durable_version}")
    if snapshot.waiting_batches is not None:
        parts.append(f"waiting batches {snapshot.waiting_batches}")
    if snapshot.lost:
        parts.append(f"{count(snapshot.lost)} records lost")
    if not snapshot.version:
        parts = ["waiting for the first update" + _readiness(snapshot)]
    if snapshot.costs:
        parts.append(snapshot.costs)
    return ", ".join(parts)


def _readiness(snapshot: JobSnapshot) -> str:
    up = sum(line.is_live is True for line in snapshot.workers)
    sent = "" if snapshot.sent is None else f", {snapshot.sent} samples sent"
    return f" ({up} of {len(snapshot.workers)} workers up{sent})"


def panel(snapshot: JobSnapshot, stop: StopConfig) -> RenderableType:
    """The live panel."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(no_wrap=True)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(no_wrap=True)
    for (left, left_value), (right, right_value) in _facts(snapshot, stop):
        facts.add_row(left, left_value, right, right_value)
    parts: list[RenderableType] = [facts]
    if stop.updates is not None:
        bar = Table.grid(expand=True)  # a bar alone ends without a new line, and the next line is cut off
        bar.add_row(ProgressBar(total=stop.updates, completed=min(snapshot.version, stop.updates)))
        parts.insert(0, bar)
    if snapshot.costs:
        parts.append(_escape(snapshot.costs))
    parts.append(_workers(snapshot))
    for at_s, text in snapshot.events[-4:]:
        parts.append(f"[yellow]{clock(at_s):>7}[/] {_escape(text)}")
    eta = "" if not known(snapshot.eta_s) else f", about {clock(snapshot.eta_s)} left"
    title = f"DOLL {snapshot.job}  {clock(snapshot.seconds)}{eta}"
    return Panel(Group(*parts), title=_escape(title), title_align="left", border_style="cyan")


def _facts(snapshot: JobSnapshot, stop: StopConfig) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    goal = "" if stop.accuracy is None else f" of {stop.accuracy:g}"
    means = snapshot.prequential
    accuracy = means.metrics.get("accuracy", math.nan)
    held = "" if snapshot.held_out_version is None else f"  (version {snapshot.held_out_version})"
    source = "Nλ/(Kb)" if snapshot.rate_stated else "Nλ/(Kb), λ measured"
    return [
        (("updates", of(snapshot.version, stop.updates)), ("samples", of(snapshot.samples, stop.samples))),
        (
            ("prequential loss", number(means.loss)),
            ("held-out loss", number(snapshot.held_out_loss) + ("" if stop.loss is None else f" of {stop.loss:g}")),
        ),
        (
            ("prequential accuracy", number(accuracy)),
            ("held-out accuracy", number(snapshot.held_out_accuracy) + goal + held),
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
    ]


def verdict(snapshot: JobSnapshot) -> str:
    """What Proposition 1 says about the job, in a word."""
    margin = snapshot.margin
    if not known(margin.sufficient):
        return ""
    if margin.sufficient > 1:
        return "stable"
    return "stable only if batches run in parallel" if margin.necessary > 1 else "overloaded"


def _workers(snapshot: JobSnapshot) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("worker", "state", "session", "queue (batches)", "lag (records)"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    machines = any(line.machine for line in snapshot.workers)
    if machines:
        table.add_column("USD", justify="right", no_wrap=True)
        table.add_column("machine", no_wrap=True)
    for line in snapshot.workers[:_WORKERS_SHOWN]:
        state = {None: "[dim]starting[/]", True: "[green]up[/]", False: "[red]down[/]"}[line.is_live]
        cells = (line.session, line.retained_batches, line.lag_records)
        more = (f"{line.usd:.3f}" if known(line.usd) else "", _escape(line.machine)) if machines else ()
        table.add_row(str(line.worker), state, *("" if cell is None else str(cell) for cell in cells), *more)
    hidden = snapshot.workers[_WORKERS_SHOWN:]
    if hidden:
        up = sum(line.is_live is True for line in hidden)
        table.add_row("...", f"{up} of {len(hidden)} more up")
    return table


def known(value: float) -> bool:
    """Whether there is a number to show."""
    return math.isfinite(value)


def number(value: float) -> str:
    """Three significant digits; `?` where it is not known, `unlimited` where it is infinite."""
    if math.isnan(value):
        return "?"
    return "unlimited" if math.isinf(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def of(count: int, total: int | None) -> str:
    """`45 of 300`, with thin groups of thousands."""
    text = f"{count:,}".replace(",", " ")
    return text if total is None else f"{text} of {total:,}".replace(",", " ")


def clock(seconds: float) -> str:
    """`12 s`, `3:05` or `2:03:05`."""
    if not known(seconds):
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def worker_table(snapshot: JobSnapshot) -> str:
    """One plain line per worker."""
    lines = ["worker  state     session  queue (batches)  lag (records)"]
    for line in snapshot.workers:
        state = {None: "unknown", True: "up", False: "down"}[line.is_live]
        cells = ["" if cell is None else str(cell) for cell in (line.session, line.retained_batches, line.lag_records)]
        lines.append(f"{line.worker:>6}  {state:<8}  {cells[0]:>5}  {cells[1]:>15}  {cells[2]:>13}")
    return "\n".join(lines)
