"""Follows a run by its records, which update the progress model, the display and the hook."""

from __future__ import annotations

import time
from collections import Counter

from doll.kafka.reader import Partition, Tail
from doll.local.processes import describe_exit
from doll.local.processes import tail as last_lines
from doll.local.supervisor import Restart
from doll.monitor.state.folder_logs import append_event
from doll.monitor.state.progress import ProgressModel
from doll.monitor.state.watched_job import ProcessEvent
from doll.records.control import AnyRecord
from doll.run.local.context import LocalRun

POLL_S = 0.1
READ_ENDS_EVERY_S = 1.0


class RunFollower:
    """Collects the state of a run's job.

    Args:
        tail: reads the topics `updates` and `metrics`.

    Attributes:
        model: state of the job, from its records.
        finished: whether the parameter server has written `Finished` in this run.
        restarts: number of restarts of each role or service, by name.
        failures: for each role that ended with an error, the number of failures and the last line of its log.
    """

    def __init__(self, run: LocalRun, tail: Tail) -> None:
        self.model = ProgressModel(run.config, time.monotonic(), after_term=run.after_term)
        self.finished = False
        self.restarts: Counter[str] = Counter()
        self.failures: dict[str, tuple[int, str]] = {}
        self._run = run
        self._tail = tail
        self._read_ends_at_s = 0.0

    def follow(self) -> None:
        """Process new records and update the display; return after at most `POLL_S` seconds."""
        for entry in self._tail.poll(POLL_S):
            self._feed(entry.topic, entry.offset, entry.record)
        now_s = time.monotonic()
        if not self.model.rate_is_stated and now_s - self._read_ends_at_s > READ_ENDS_EVERY_S:
            self._read_ends_at_s = now_s
            ends = self._tail.partition_ends(self._run.config.topic("samples"))
            if ends is not None:
                self.model.observe_ends(time.monotonic(), ends)
        self._run.display.show(lambda: self._run.hook.with_status(self.model.snapshot(time.monotonic())))

    def read_to_end(self) -> None:
        """Process all records that exist now."""
        for entry in self._tail.read_to_end():
            self._feed(entry.topic, entry.offset, entry.record)

    def unlearned(self) -> int | None:
        """Return the number of records of the stream that no known update contains; None if Kafka does not answer."""
        ends = self._tail.partition_ends(self._run.config.topic("samples"))
        if ends is None:
            return None
        learned = self.model.next_offsets
        return sum(max(0, end - learned.get(partition, 0)) for partition, end in enumerate(ends))

    def add_event(self, text: str, *, restarted: str = "") -> None:
        """Show an event of a process, and store it for the report."""
        append_event(self._run.folder.path, ProcessEvent(time.time(), text, restarted))
        self.model.add_event(text, time.monotonic())
        self._run.display.say(text)

    @property
    def job_error(self) -> str:
        """Return the error with which the parameter server has ended the job; "" if there is none."""
        finished = self.model.history.finished
        return finished.error if self.finished and finished is not None else ""

    def role_restarted(self, restart: Restart) -> None:
        """Record that the supervisor restarts a role."""
        self.restarts[restart.name] += 1
        if restart.exit_code > 0:  # not killed by a signal
            count, _ = self.failures.get(restart.name, (0, ""))
            last_line = last_lines(self._run.folder.logs / f"{restart.name}.log", 1).strip()
            self.failures[restart.name] = (count + 1, last_line)
        self.add_event(
            f"{restart.name} ended with {describe_exit(restart.exit_code)}: restarted after {restart.backoff_s:g} s",
            restarted=restart.name,
        )

    def service_restarted(self, key: str, name: str) -> None:
        """Record that a local broker or Redis has died and is restarted."""
        self.restarts[key] += 1
        self.add_event(f"{name} died: restarting it", restarted=key)

    def _feed(self, topic: str, offset: int, record: AnyRecord) -> None:
        num_events = len(self.model.all_events)
        self.model.feed(record)
        self._run.hook.feed(record)
        for _, text in self.model.all_events[num_events:]:
            self._run.display.say(text)
        # On a shared broker, the topic may contain a Finished record of an earlier run.
        if topic == self._run.config.topic("updates") and offset >= self._tail.ends[Partition(topic)]:
            self.finished = self.model.history.finished is not None
