"""Sources and names of `Metric` records that other processes read; a process adds names of its own beside them.

A process shows with them, too, that it is alive, and that it has exited normally.
"""

from __future__ import annotations

from typing import Final

PRODUCER: Final = "producer"
EVALUATOR: Final = "evaluator"
PROVISIONER: Final = "provisioner"

TERM: Final = "term"  # the term of the parameter server whose model was measured
VERSION: Final = "version"
LOSS: Final = "loss"  # held-out loss
OF_EVALUATIONS: Final = frozenset({TERM, VERSION, LOSS, "evaluate_s", "prequential_loss", "prequential_window_loss"})
"""The values of a version that the evaluator sends beside the task's own metrics."""
DELIVERED_TOTAL: Final = "delivered_total"  # samples of the producer that Kafka has acknowledged
RATE_PER_S: Final = "rate_per_s"  # samples per second that the producer sends
LOST_FROM: Final = "lost_from"
LOST_PARTITION: Final = "lost_partition"
LOST_UNTIL: Final = "lost_until"
"""Offsets [from, until) of its partition that a worker stops for, because they were deleted."""

CONTROL_REFUSED_TOTAL: Final = "control_refused_total"
"""Endpoints of the control link that a worker refused, because another user had them."""
HEARTBEAT_EVERY_S: Final = 10.0  # a process that has nothing to measure sends a `Metric` without values this often
LEFT: Final = "left"
"""The value in a process's last `Metric` that says: it exits normally, so its silence is no failure."""


def worker_source(worker: int) -> str:
    """The source of a worker's metrics."""
    return f"worker-{worker}"


def worker_of(source: str) -> int | None:
    """The worker of a source; None if it is another role's.

    >>> worker_of("worker-3"), worker_of("producer")
    (3, None)
    """
    role, _, number = source.partition("-")
    return int(number) if role == "worker" and number.isascii() and number.isdecimal() and len(number) <= 9 else None
