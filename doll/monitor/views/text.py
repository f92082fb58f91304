"""A snapshot of a job as plain text: one line, and a table of its workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from doll.amounts import aligned, byte_size, clock, known, number, out_of
from doll.config import StopConfig
from doll.ledger.balance import count
from doll.metrics.states import ERROR_BOUND, STDERR
from doll.monitor.state.progress import JobSnapshot, WorkerLine

WORKER_COLUMNS = ("worker", "state", "market", "control", "restarts", "samples/s", "lag", "batches")
_MOST_SHARDS: Final = 16
TEXT_COLUMNS = ("state", "market", "control")  # left-aligned columns


def one_line(snapshot: JobSnapshot, stop: StopConfig) -> str:
    """Return the state of the job in one line; values that are not known yet are left out."""
    parts = [f"update {out_of(snapshot.updates, stop.updates)}", f"samples {out_of(snapshot.samples, stop.samples)}"]
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
        live = sum(line.is_live is True for line in snapshot.workers)
        sent = "" if snapshot.sent is None else f", {snapshot.sent} samples sent"
        parts = [f"waiting for the first update ({live} of {len(snapshot.workers)} workers live{sent})"]
    if dead := snapshot.dead.text():
        parts.append(dead)
    if snapshot.costs:
        parts.append(snapshot.costs)
    return ", ".join(parts)


def with_error(name: str, values: Mapping[str, float]) -> str:
    """Return a metric with its 95 % interval and the bound of its error, as far as `values` has them."""
    stderr, bound = (values.get(name + end, float("nan")) for end in (STDERR, ERROR_BOUND))
    text = number(values[name]) + (f" ± {number(1.96 * stderr)}" if known(stderr) else "")
    return text + (f", sketch error at most {number(bound)}" if known(bound) else "")


def verdict(snapshot: JobSnapshot) -> str:
    """Return the verdict of Proposition 1 on the job, in a few words."""
    margin = snapshot.margin
    if not known(margin.sufficient):
        return ""
    if margin.sufficient > 1:
        return "stable"
    return "stable only if batches run in parallel" if margin.necessary > 1 else "overloaded"


def worker_state(line: WorkerLine) -> str:
    """Return the state, such as `live 3:05`, `gone 12 s`, `spare` (no partition), or `starting` (not joined yet)."""
    if line.is_spare:
        return "spare"
    if line.is_live is None:
        return "starting"
    return f"{'live' if line.is_live else 'gone'} {clock(line.state_s)}".rstrip()


def worker_cells(line: WorkerLine) -> tuple[str, ...]:
    """Return the cells of a worker under `WORKER_COLUMNS`; "" for unknown values."""
    return (
        str(line.worker),
        worker_state(line),
        line.market.replace("_", "-"),
        line.control,
        "" if line.restarts is None else str(line.restarts),
        number(line.rate_per_s) if known(line.rate_per_s) else "",
        "" if line.lag_records is None else str(line.lag_records),
        "" if line.retained_batches is None else str(line.retained_batches),
    )


def table_lines(snapshot: JobSnapshot) -> list[str]:
    """Return one line for each bounded table."""
    return [
        f"table {item.name}: {item.rows:,} rows; {item.admitted:,} ids admitted, {item.evicted:,} evicted, "
        f"{item.expired:,} expired, {item.refused:,} gradients without a row"
        for item in snapshot.tables
    ]


def shard_lines(snapshot: JobSnapshot) -> list[str]:
    """Return one line for each shard of the model, lost ones first, and for at most 16 of them."""
    shown = sorted(snapshot.shards, key=lambda item: item.is_alive)[:_MOST_SHARDS]
    lines = [
        f"shard {item.shard}: {'live' if item.is_alive else 'lost'}, "
        + (f"process {item.pid} on {item.host}, version {item.version}, " if item.pid else "")
        + f"{byte_size(item.slice_bytes)} of the model, {byte_size(item.memory_bytes)} of memory, "
        + ("no part of a checkpoint in this term" if item.part_version < 0 else f"part of version {item.part_version}")
        for item in shown
    ]
    others = len(snapshot.shards) - len(shown)
    return [*lines, f"other shards: {others}"] if others else lines


def worker_table(snapshot: JobSnapshot) -> str:
    """Return a header and one plain line for each worker."""
    columns = "".join("<" if name in TEXT_COLUMNS else ">" for name in WORKER_COLUMNS)
    return "\n".join(aligned([WORKER_COLUMNS, *map(worker_cells, snapshot.workers)], columns))
