"""Sources of a page's state: the topics of a running job, or the folder of a run that has ended.

`doll.monitor.views.page` computes what the page shows from this state.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

from doll import telemetry
from doll.config import JobConfig
from doll.dashboard.ended_run import ended_run
from doll.errors import ConfigError, DollError
from doll.kafka.reader import Tail
from doll.monitor.state.folder_logs import DecisionLog, EventLog
from doll.monitor.state.watched_job import KeptVersions, PageState, WatchedJob
from doll.records.bounded import short
from doll.services import Services
from doll.storage.stores import open_store

log = telemetry.get_logger(__name__)
T = TypeVar("T")

_POLL_S: Final = 0.2
_ASK_EVERY_S: Final = 5.0  # interval for requesting the ends of partitions, to check that Kafka answers
_AWAY_S: Final = 12.0


class JobSource(Protocol):
    """A source of a page's state; thread-safe."""

    is_live: bool

    def read(self, view: Callable[[PageState], T]) -> T:
        """Return the result of the function `view` of the state. The state does not change during the call."""

    def kept_versions(self) -> KeptVersions | None:
        """Return the versions in the job's current checkpoints; None if these cannot be read."""


class EndedRun:
    """The state of a run that has ended. If its report has changed, it is read again.

    Raises:
        ConfigError: the files do not have the format of this release.
    """

    is_live = False

    def __init__(self, config: JobConfig, folder: Path) -> None:
        self._stamp = file_stamp(folder / "report.json")
        self._state = ended_run(config, folder)
        self._folder = folder

    def read(self, view: Callable[[PageState], T]) -> T:
        if (stamp := file_stamp(self._folder / "report.json")) != self._stamp:
            if stamp is None:
                return view(replace(self._state, problem="this run goes on: open its page again (doll dashboard)"))
            self._stamp, self._state = stamp, ended_run(self._state.config, self._folder)
        return view(self._state)

    def kept_versions(self) -> KeptVersions | None:
        return _kept_versions(self._state.config, self._folder)


class RunningJob:
    """The state of a job from its topics, which a thread follows, and from its provisioner's journal if available.

    When the run has written its report to the folder, the state is read from the folder. The state counts as current
    only while Kafka answers and the thread runs.
    """

    is_live = True

    def __init__(self, config: JobConfig, folder: Path, *, after_term: int = 0) -> None:
        self._config = config
        self._folder = folder
        self._job = WatchedJob(config, time.monotonic(), after_term=after_term)
        self._decisions = DecisionLog(folder, config.job)
        self._events = EventLog(folder)
        self._lock = threading.Lock()
        self._stopped = ""  # the reason why the thread has ended
        self._looked_s = self._answered_s = math.nan  # monotonic seconds; NaN before the history has been read
        self._ended: EndedRun | None = None

    def read(self, view: Callable[[PageState], T]) -> T:
        with self._lock:
            now_s = time.monotonic()
            live = self._job.state(now_s, time.time(), problem=self._problem(now_s))
            if (ended := self._found_ended()) is None:
                return view(live)
            # A report contains no events of workers.
            return ended.read(
                lambda state: view(replace(state, events=live.events or state.events, last_events=live.last_events))
            )

    def _found_ended(self) -> EndedRun | None:
        if file_stamp(self._folder / "report.json") is None:
            self._ended = None
        elif self._ended is None:
            try:
                self._ended = EndedRun(self._config, self._folder)
            except ConfigError as error:
                log.warning("report_not_read", reason=str(error))
        return self._ended

    def _problem(self, now_s: float) -> str:
        """Return the reason why the state may not be current; "" if it is current."""
        if self._stopped:
            return self._stopped
        if math.isnan(self._looked_s):
            return "reading the history of the job"
        if now_s - self._looked_s > _AWAY_S:
            return f"this page has not followed the job for {now_s - self._looked_s:.0f} s"
        if now_s - self._answered_s > _AWAY_S:
            return f"Kafka has not answered for {now_s - self._answered_s:.0f} s"
        return ""

    def kept_versions(self) -> KeptVersions | None:
        return _kept_versions(self._config, self._folder)

    @contextmanager
    def followed(self, services: Services) -> Iterator[None]:
        """Follow the job within the context.

        Raises:
            ServiceUnavailableError: Kafka does not answer at the start. Later failures only make the thread wait.
        """
        topics = [self._config.topic(name) for name in ("updates", "metrics", "dead")]
        with Tail(self._config, services, topics) as tail, thread_within(partial(self._follow, tail), "follow"):
            yield

    def _follow(self, tail: Tail, stopped: threading.Event) -> None:
        try:
            self._follow_until(tail, stopped)
        except Exception as error:  # after any error, the page says that its state is old
            log.error("page_stopped", exc_info=error)
            self._stopped = f"the page has stopped following the job: {short(error)}"

    def _follow_until(self, tail: Tail, stopped: threading.Event) -> None:
        samples, progress = self._config.topic("samples"), self._job.progress
        ask_at_s = answered_s = time.monotonic()
        while not stopped.is_set():
            entries = tail.poll(_POLL_S)
            now_s = time.monotonic()
            with self._lock:
                for entry in entries:
                    self._job.feed(entry.record)
                for decision in self._decisions.read():
                    self._job.decisions.add(decision)
                for event in self._events.read():
                    self._job.note(event)
            if entries:
                answered_s = now_s
            if now_s >= ask_at_s and (ends := tail.partition_ends(samples)) is not None:
                answered_s, ask_at_s = now_s, now_s + _ASK_EVERY_S
                if not progress.rate_is_stated:
                    with self._lock:
                        progress.observe_ends(now_s, ends)
            if all(map(tail.has_read_history, tail.ends)):
                self._answered_s, self._looked_s = answered_s, time.monotonic()


@contextmanager
def thread_within(target: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run a thread of `target` within the context; `target` must return when the event is set."""
    stopped = threading.Event()
    thread = threading.Thread(target=target, args=(stopped,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def file_stamp(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the file is written again; None if the file does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _kept_versions(config: JobConfig, folder: Path) -> KeptVersions | None:
    try:
        store = open_store(config, folder)
        return KeptVersions(frozenset(version for _, version in store.versions()), store.read_marks())
    except DollError as error:
        log.warning("checkpoints_not_read", reason=str(error))
        return None
