"""Detects that records are there and do not arrive: such a worker is of no use, and a restart helps. Pure."""

from __future__ import annotations


class StallWatch:
    """Progress of one worker on its two partitions, `samples` and `commands`. Times are monotonic seconds."""

    def __init__(self, stall_timeout_s: float, next_command: int, now: float) -> None:
        """`next_command`: offset of the next command."""
        self._timeout_s = stall_timeout_s
        self.samples_at_s = now  # when a record of `samples` was last read or decoded; whoever does it writes it here
        self._commands_at_s = now
        self._next_command = next_command
        self._empty_until = 0  # `samples` holds no record from the next one up to here

    def record_unreachable(self, now: float) -> None:
        """Kafka does not answer, so nothing can arrive."""
        self.samples_at_s = self._commands_at_s = now

    def record_empty(self, high: int, now: float) -> None:
        """Note that no record is left below offset `high`, only markers of transactions."""
        self.samples_at_s, self._empty_until = now, high

    def unread(self, next_offset: int, high: int) -> int:
        """Records of `samples` that may be there and have not been read."""
        return max(0, high - max(next_offset, self._empty_until))

    def observe(self, *, unread: int, is_waiting: bool, next_command: int, commands_high: int, now: float) -> None:
        """The ends of both logs are known again. `is_waiting`: the worker does not want more records now."""
        if next_command != self._next_command or commands_high <= next_command:
            self._next_command, self._commands_at_s = next_command, now
        if not unread or is_waiting:
            self.samples_at_s = now

    def samples_stalled(self, now: float) -> bool:
        """Records of `samples` seem to be there and have not arrived for the length of the timeout."""
        return now - self.samples_at_s > self._timeout_s

    def problem(self, now: float) -> str:
        """The reason why this process must end; "" while it need not."""
        stalled_s = now - min(self.samples_at_s, self._commands_at_s)
        if stalled_s <= self._timeout_s:
            return ""
        return f"records are there and none has come for {stalled_s:.0f} s (worker.stall_timeout_s): starting again"
