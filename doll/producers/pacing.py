"""When to send the next sample. Arrival times are absolute: a late sender catches up and never drifts. Pure."""

from __future__ import annotations

from typing import Final

# Shortest sleep: samples that fall due within it are sent together, at most this much late, which keeps the CPU idle.
BURST_S: Final = 0.01


class Pacer:
    """The clock of one run: arrival time t is due at `start_s` + t."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s

    def wait_s(self, time_s: float, now_s: float) -> float:
        """Seconds to sleep before the sample with arrival time `time_s`; 0 when it is due."""
        ahead_s = self._start_s + time_s - now_s
        return max(ahead_s, BURST_S) if ahead_s > 0 else 0.0

    def behind_s(self, time_s: float, now_s: float) -> float:
        """How late the sample with arrival time `time_s` is."""
        return max(0.0, now_s - self._start_s - time_s) if time_s else 0.0

    def idle(self, time_s: float, now_s: float) -> None:
        """The source had nothing for arrival time `time_s`: shift the schedule, so that no backlog builds up."""
        self._start_s = max(self._start_s, now_s - time_s)
