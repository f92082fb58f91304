"""Sources and names of `Metric` records that other processes read. Each process also sends metrics with further names.

These records also show that a process is alive, or that it has exited normally.
"""

from __future__ import annotations

from typing import Final

PRODUCER: Final = "producer"
EVALUATOR: Final = "evaluator"
PROVISIONER: Final = "provisioner"
GATE_VERSION: Final = "gate_version"  # version of the evaluator's newest verdict
GATE_PASSED: Final = "gate_passed"  # 1 if it has passed; `gate_passed_<check>`: one of the checks
MOVED_BACK: Final = "moved_back"  # version from which the gates' alias was moved back; `moved_back_to`: that before
MOVED_BACK_TO: Final = "moved_back_to"
DRIFT: Final = "drift"  # 1: a change; `drift_<fact>_<metric>`: before, after, since, version, index

TERM: Final = "term"  # the term of the parameter server whose model was measured
VERSION: Final = "version"
LOSS: Final = "loss"  # held-out loss
OF_EVALUATIONS: Final = frozenset({TERM, VERSION, LOSS, "evaluate_s", "prequential_loss"})
PREQUENTIAL_WINDOW: Final = "prequential_window_"
PREQUENTIAL_FADING: Final = "prequential_fading_"
HELD_OUT_RECORDS: Final = "held_out_records_"
"""The values of a version that the evaluator sends in addition to the task's own metrics, and the prefixes of further
ones."""
DELIVERED_TOTAL: Final = "delivered_total"  # samples of the producer that Kafka has acknowledged
RATE_PER_S: Final = "rate_per_s"  # samples per second that the producer sends
HISTORY_ROWS: Final = "history_rows"  # rows of the table that the producer has sent
HISTORY_TOTAL: Final = "history_total_rows"
HISTORY_LEFT_S: Final = "history_left_s"
JOINED_TOTALS: Final = ("samples_total", "corrections_total", "dropped_total", "refused_total")
"""The totals of a joiner: what it has decided since it joined its group."""
OPEN_KEYS: Final = "open_keys"  # of the partitions of a joiner
LOST_FROM: Final = "lost_from"
LOST_PARTITION: Final = "lost_partition"
LOST_UNTIL: Final = "lost_until"
"""Offsets [from, until) of a worker's partition that were deleted, so that the worker stops."""

CONTROL_REFUSED_TOTAL: Final = "control_refused_total"
"""Number of endpoints of the control link that a worker refused, because they belonged to another user."""
HEARTBEAT_EVERY_S: Final = 10.0  # interval of `Metric` records without values, from processes with nothing to measure
LEFT: Final = "left"
"""The value in a process's last `Metric` that states that it exits normally, so its silence is not a failure."""


def worker_source(worker: int) -> str:
    """Return the source of a worker's metrics."""
    return f"worker-{worker}"


def worker_of(source: str) -> int | None:
    """Return the worker of a source; None if the source is another role.

    >>> worker_of("worker-3"), worker_of("producer")
    (3, None)
    """
    return _number_of("worker", source)


def joiner_source(joiner: int) -> str:
    """Return the source of a joiner's metrics."""
    return f"joiner-{joiner}"


def joiner_of(source: str) -> int | None:
    """Return the joiner of a source; None if the source is another role.

    >>> joiner_of("joiner-3"), joiner_of("worker-3")
    (3, None)
    """
    return _number_of("joiner", source)


def _number_of(role: str, source: str) -> int | None:
    name, _, number = source.partition("-")
    return int(number) if name == role and number.isascii() and number.isdecimal() and len(number) <= 9 else None
