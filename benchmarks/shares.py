"""Gradient share and hops of a run, from the logs of its processes (`benchmarks.probes`). Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

GradientRow: TypeAlias = tuple[float, float, float]  # begin_s, end_s, cpu_s
MessageRow: TypeAlias = tuple[str, int, int, float]  # "grant" or "push", worker, last_grant_id, time_s


def gradient_share(logs: Sequence[Sequence[GradientRow]], from_s: float, to_s: float) -> float:
    """CPU time of gradients in [from_s, to_s], divided by the wall time of as many cores as there are logs.

    A gradient that lies only partly in the interval counts in proportion.

    Args:
        logs: one for each process that computes.
    """
    if not logs or to_s <= from_s:
        raise ValueError(f"expected logs and an interval, got {len(logs)} logs and {from_s} to {to_s}")
    used_s = sum(cpu_s * _part_within(begin_s, end_s, from_s, to_s) for log in logs for begin_s, end_s, cpu_s in log)
    return used_s / (len(logs) * (to_s - from_s))


def _part_within(begin_s: float, end_s: float, from_s: float, to_s: float) -> float:
    if end_s <= begin_s:
        return float(from_s <= begin_s < to_s)
    return max(0.0, min(end_s, to_s) - max(begin_s, from_s)) / (end_s - begin_s)


class Hops(NamedTuple):
    """What lies between the server and a gradient, in seconds; sorted.

    Attributes:
        grant_to_fetch_s: a grant is sent to a worker that owes nothing, until the thread that computes begins to fetch
            the weights: the control channel and the worker's queues.
        grant_to_gradient_s: until its first gradient begins.
        gradient_to_push_s: a worker's last gradient is done, until its push reaches the engine and it owes nothing.
    """

    grant_to_fetch_s: list[float]
    grant_to_gradient_s: list[float]
    gradient_to_push_s: list[float]


def hops(
    messages: Iterable[MessageRow],
    gradients: Sequence[Sequence[GradientRow]],
    fetches: Sequence[Sequence[GradientRow]],
    from_s: float,
    to_s: float,
) -> Hops:
    """The hops of grants and pushes in [from_s, to_s].

    A grant that finds its worker busy waits for the worker and not for the channel, so it is no hop; nor is a push
    after which the worker still owes batches. What is sent a second time is the same grant: a worker answers its grants
    in order, so a push settles all grants up to its own.

    Args:
        messages: of the server, in order.
        gradients: of each worker, in order.
        fetches: of weights, of each worker, in order.
    """
    fetched = [[begin_s for begin_s, _, _ in log] for log in fetches]
    begins = [[begin_s for begin_s, _, _ in log] for log in gradients]
    ends = [[end_s for _, end_s, _ in log] for log in gradients]
    granted, pushed = ([-1] * len(gradients) for _ in range(2))
    result = Hops([], [], [])
    for kind, worker, grant_id, time_s in messages:
        within = from_s <= time_s <= to_s
        owes = granted[worker] > pushed[worker]
        if kind == "grant" and grant_id > granted[worker]:
            granted[worker] = grant_id
            if within and not owes:
                for begin_s, hop_s in (
                    (fetched[worker], result.grant_to_fetch_s),
                    (begins[worker], result.grant_to_gradient_s),
                ):
                    at = bisect.bisect_left(begin_s, time_s)
                    if at < len(begin_s):
                        hop_s.append(begin_s[at] - time_s)
        elif kind == "push" and grant_id > pushed[worker]:
            pushed[worker] = grant_id
            at = bisect.bisect_right(ends[worker], time_s)
            if within and grant_id >= granted[worker] and at > 0:
                result.gradient_to_push_s.append(time_s - ends[worker][at - 1])
    result.grant_to_fetch_s.sort()
    result.grant_to_gradient_s.sort()
    result.gradient_to_push_s.sort()
    return result


def percentile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; NaN of none."""
    if not ascending:
        return math.nan
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]


def is_steady(values: Sequence[float], tolerance: float = 0.1) -> bool:
    """Whether the last value differs from the one before by no more than `tolerance` of it."""
    return len(values) >= 2 and abs(values[-1] - values[-2]) <= tolerance * values[-2]
