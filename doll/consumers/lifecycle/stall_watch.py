"""Detection of records that exist but do not arrive. A worker in this state is useless; a restart helps. Pure."""

from __future__ import annotations


class StallWatch:
    """The progress of one worker in its two partitions, `samples` and `commands`. Times are monotonic seconds."""

    def __init__(self, stall_timeout_s: float, next_command: int, now: float) -> None:
        """Start the watch at time `now`. `next_command`: offset of the next command."""
        self._timeout_s = stall_timeout_s
        self.samples_at_s = now  # time of the last read or decoded record of `samples`, set by its reader
        self._commands_at_s = now
        self._next_command = next_command
        self._empty_until = 0  # `samples` holds no record from the next offset up to here

    def record_unreachable(self, now: float) -> None:
        """Note that Kafka does not answer, so no record can arrive."""
        self.samples_at_s = self._commands_at_s = now

    def record_empty(self, high: int, now: float) -> None:
        """Record that there are no further records below offset `high`, only transaction markers."""
        self.samples_at_s, self._empty_until = now, high

    def unread(self, next_offset: int, high: int) -> int:
        """Return the number of offsets of `samples` that may have a record and were not read."""
        return max(0, high - max(next_offset, self._empty_until))

    def observe(self, *, unread: int, is_waiting: bool, next_command: int, commands_high: int, now: float) -> None:
        """Note the ends of both logs. `is_waiting`: the worker does not want further records now."""
        if next_command != self._next_command or commands_high <= next_command:
            self._next_command, self._commands_at_s = next_command, now
        if not unread or is_waiting:
            self.samples_at_s = now

    def samples_stalled(self, now: float) -> bool:
        """Return whether records of `samples` seem to exist and have not arrived within the timeout."""
        return now - self.samples_at_s > self._timeout_s

    def problem(self, now: float) -> str:
        """Return the reason why this process must end; "" if it need not end."""
        stalled_s = now - min(self.samples_at_s, self._commands_at_s)
        if stalled_s <= self._timeout_s:
            return ""
        return f"records are there and none has come for {stalled_s:.0f} s (worker.stall_timeout_s): starting again"
