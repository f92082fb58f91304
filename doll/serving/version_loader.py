"""Keeps the served versions current. One thread reads the job's topics, and another thread reads weights.

If a service is unavailable, both threads continue: the last good version stays, and each lane states why it may be
stale. `model_copies.ModelCopies.load` swaps a version in.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final

from doll.config import JobConfig
from doll.errors import CheckpointError, ConfigError, SampleError, ServiceUnavailableError
from doll.evaluation.stored_weights import StoredWeights, rollbacks_in
from doll.evaluation.weight_follower import BLOBS, CHECKPOINTS, ROWS, WeightFollower
from doll.kafka.publisher import Publisher
from doll.kafka.reader import Partition, Reader
from doll.ledger.lineage import UpdatesRecord
from doll.records.control import ServedStatus
from doll.records.rollbacks import Rollback
from doll.services import Services
from doll.serving.job_facts import JobFacts, ServedEvents
from doll.serving.model_copies import Lane, ModelCopies, ModelCopy
from doll.storage.checkpoints import resolve_version
from doll.storage.stores import open_blobs, open_store
from doll.storage.version_marks import LATEST
from doll.telemetry import get_logger

log = get_logger(__name__)

POLL_S: Final = 0.02
_AWAY_S: Final = 0.5  # pause while a service does not answer
_MARKS_EVERY_S: Final = 0.25
_ROLLBACKS_EVERY_S: Final = 2.0
_BLOBS_TIMEOUT_S: Final = 2.0
_RECONNECT_S: Final = 2.0
_READ_S: Final = 0.2
_LOOKUP_S: Final = 5.0
_END_S: Final = 1.0
_REPORT_EVERY_S: Final = 1.0
_QUEUE: Final[dict[str, Any]] = {"queue_buffering_max_messages": 10}  # while Kafka is away, reports are dropped
_MAX_SHARE: Final = 0.25  # maximum share of a CPU for reading versions


class VersionLoader:
    """Loads versions into `copies`; a context manager.

    Args:
        find_services: returns the job's current services; None if none are known. A resumed run has other services.
        has_ended: returns whether the run folder shows that the job has ended.
        check: see `ModelCopies.load`.
        row_bytes: memory for changed rows of tables.
        on_swap: called when a lane has got another version.

    Attributes:
        newest_samples: number of usable samples in the newest known version; -1: not known.
    """

    def __init__(
        self, config: JobConfig, run_folder: Path, copies: ModelCopies, *,
        find_services: Callable[[], Services | None], has_ended: Callable[[], bool],
        check: Callable[[ModelCopy], None], row_bytes: int, on_swap: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._config = config
        self._copies = copies
        self._find_services = find_services
        self._has_ended = has_ended
        self._check = check
        self._on_swap = on_swap
        self._store = open_store(config, run_folder)
        self._follower = WeightFollower(config, None, run_folder, copies.model, row_bytes=row_bytes)
        self.facts = JobFacts(2 * config.ps.lease_s, time.monotonic())
        self._records: deque[UpdatesRecord] = deque()  # read, but not yet processed by the follower
        self._kafka_problem = "Kafka has not answered yet"
        self._services: Services | None = None  # the services of the follower's blobs
        self._reconnect_at_s = float("-inf")
        self._look_at_s = dict.fromkeys(copies.lanes, float("-inf"))
        self.newest_samples = -1
        self._events = ServedEvents(config.freshness)
        self._name = secrets.token_hex(4)
        self._rollbacks: tuple[Rollback, ...] = ()
        self._rollbacks_of_term = -1
        self._rollbacks_at_s = float("-inf")
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=target.__name__.strip("_"), daemon=True)
            for target in (self._read_topics, self._read_versions)
        ]

    def __enter__(self) -> VersionLoader:
        # First read the checkpoints: their version is served at once, and they identify the run.
        self._refresh_all()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_END_S)  # a thread may wait for an answer of a service
        self._use_services(None)

    @property
    def row_bytes(self) -> int:
        """The memory in use for table rows that have changed since the checkpoint."""
        return self._follower.row_bytes

    # --- versions

    def _read_versions(self) -> None:
        pause_s = POLL_S
        while not self._stop.wait(pause_s):
            began_s = time.thread_time()
            while self._records:
                record = self._records.popleft()
                self._follower.feed(record)
                self._events.feed(record)
            if time.monotonic() >= self._reconnect_at_s:
                self._reconnect_at_s = time.monotonic() + _RECONNECT_S
                self._use_services(self._find_services())
            self._refresh_all()
            busy_s = time.thread_time() - began_s
            is_away = self._follower.unavailable or any(lane.problem for lane in self._copies.lanes)
            pause_s = max(_AWAY_S if is_away else POLL_S, busy_s / _MAX_SHARE)

    def _use_services(self, services: Services | None) -> None:
        """Read blobs from these services."""
        if services == self._services:
            return
        if (blobs := self._follower.blobs) is not None:
            self._follower.blobs = None
            blobs.close()  # type: ignore[attr-defined]  # the stores of `open_blobs` have it
        self._services = services
        if services is not None and services.redis:
            # A missing address is an error for workers; a model server then uses checkpoints.
            with suppress(ConfigError, ServiceUnavailableError):
                self._follower.blobs = open_blobs(
                    self._config, services, give_up=lambda: True, timeout_s=_BLOBS_TIMEOUT_S
                )

    def _look_for_rollbacks(self) -> None:
        """Read the rollbacks in the newest checkpoint, if a new parameter server has written this checkpoint."""
        try:
            newest = max(self._store.versions(), default=None)
            if newest is not None and newest[0] != self._rollbacks_of_term:
                self._rollbacks = rollbacks_in(self._store.read_head(*newest).state)
                self._rollbacks_of_term = newest[0]
        except CheckpointError:
            return  # keep the known rollbacks

    def _refresh_all(self) -> None:
        now_s = time.monotonic()
        # `latest` never selects a version that was rolled back.
        if now_s >= self._rollbacks_at_s and any(lane.wanted != LATEST for lane in self._copies.lanes):
            self._rollbacks_at_s = now_s + _ROLLBACKS_EVERY_S
            self._look_for_rollbacks()
        for lane in self._copies.lanes:
            if lane.wanted == LATEST or now_s >= self._look_at_s[lane]:
                self._look_at_s[lane] = now_s + _MARKS_EVERY_S
                self._refresh(lane)
            lane.stale = self._staleness(lane, now_s)
            if (copy := lane.copy) is None:
                continue
            place = copy.version.place
            if (made := self.facts.origin(place)) is not None:
                copy.version.made_s, copy.version.samples, copy.version.events = made
            lane.left = next((each.text() for each in self._rollbacks if each.leaves(*place)), "")
        served = [lane.copy.version for lane in self._copies.lanes if lane.copy is not None]
        newest = max(served, key=lambda version: version.place, default=None)
        # A version that was saved while no server ran is not in the job's records.
        is_ahead = newest is not None and newest.place.term > self.facts.term > 0 and newest.samples >= 0
        self.newest_samples = newest.samples if newest is not None and is_ahead else self.facts.samples

    def _refresh(self, lane: Lane) -> None:
        """Load the version that `lane` wants, if the lane has another one. If this fails, set the reason."""
        try:
            stored = self._newer(lane)
            if stored is not None:
                self._load(lane, stored)
            problem = ""
            if lane.copy is None:
                problem = self._follower.unavailable.get(CHECKPOINTS) or "no version has been learned yet"
        except Exception as exc:  # also from the user's code: keep serving the last good version
            problem = str(exc) or type(exc).__name__
        if problem != lane.problem:
            lane.problem = problem
            if problem:
                log.warning("version_not_served", wanted=lane.wanted, reason=problem, serving=lane.place)

    def _newer(self, lane: Lane) -> StoredWeights | None:
        """Return the version that `lane` wants; None if the lane already has it."""
        if lane.wanted == LATEST:
            back = None if lane.place is None else self._follower.rolled_back(lane.place)
            return back or self._follower.newest(lane.place)
        is_number = lane.wanted.isdecimal()
        if is_number and lane.place is not None:
            return None
        version = int(lane.wanted) if is_number else resolve_version(self._store, lane.wanted)
        return None if lane.place is not None and lane.place.version == version else self._follower.load(version)

    def _load(self, lane: Lane, stored: StoredWeights) -> None:
        try:
            copy = self._copies.load(lane, stored, self._check)
        except SampleError as exc:
            raise CheckpointError(f"version {stored.version} is not served: {exc}") from exc
        if lane.wanted == LATEST:
            self._events.swapped(copy.version.place, time.time())
        else:  # `latest` changes many times per second
            log.info("version_served", wanted=lane.wanted, version=copy.version.place.version)
        self._on_swap()

    def _staleness(self, lane: Lane, now_s: float) -> str:
        if lane.wanted.isdecimal() or self._has_ended() or self.facts.is_finished:
            return ""
        if lane.wanted != LATEST:
            return lane.problem
        unavailable = self._follower.unavailable
        reasons = [
            self._kafka_problem or self.facts.silence(now_s),
            unavailable.get(BLOBS),
            unavailable.get(ROWS),
            lane.problem,
        ]
        if self._follower.reads_checkpoints:
            reasons.append(unavailable.get(CHECKPOINTS))
        return "; ".join(reason for reason in reasons if reason)

    # --- topics

    def _read_topics(self) -> None:
        while not self._stop.is_set():
            services = self._find_services()
            if services is None:
                self._kafka_problem = "no address of Kafka is known"
            elif not self._has_ended():
                try:
                    self._read_topics_of(services)
                except Exception as exc:  # this thread continues after any exception of the client
                    self._kafka_problem = str(exc) or type(exc).__name__
            self._stop.wait(_RECONNECT_S)

    def _read_topics_of(self, services: Services) -> None:
        """Read until this server stops, or until the job has other services.

        Raises:
            ServiceUnavailableError: Kafka does not answer at the start.
        """
        updates, metrics = (Partition(self._config.topic(kind)) for kind in ("updates", "metrics"))
        knows_run = bool(self._follower.run_id)

        def start(partition: Partition, low: int, high: int) -> int:
            if partition == metrics:
                return high
            # If a checkpoint identifies the run, the last record shows its progress; otherwise read the history.
            return max(low, high - 1) if knows_run else low

        check_at_s = report_at_s = 0.0
        reader = Reader(self._config, services, "serve", (updates, metrics), start, lookup_timeout_s=_LOOKUP_S)
        with closing(reader), ExitStack() as opened:
            publisher = Publisher(self._config, services, **_QUEUE)
            opened.callback(publisher.discard)
            self._kafka_problem = ""
            while not self._stop.is_set():
                for entry in reader.poll(_READ_S):
                    self.facts.feed(entry.record, time.monotonic())
                    if isinstance(entry.record, UpdatesRecord):
                        self._records.append(entry.record)
                if time.monotonic() >= report_at_s:
                    report_at_s = time.monotonic() + _REPORT_EVERY_S
                    self._report(publisher, metrics.topic)
                if time.monotonic() < check_at_s:
                    continue
                check_at_s = time.monotonic() + _RECONNECT_S
                answers = reader.partition_ends(updates.topic, 1) is not None
                self._kafka_problem = "" if answers else f"Kafka at {services.kafka} does not answer"
                if not answers and self._find_services() not in (services, None):
                    return

    def _report(self, publisher: Publisher, topic: str) -> None:
        """Report to the job how fresh the served versions are, if it can be told."""
        publisher.poll()
        place = next((lane.place for lane in self._copies.lanes if lane.wanted == LATEST), None)
        if place is not None:
            served, now_s = self._events.served, time.time()
            publisher.try_send(topic, ServedStatus(server=self._name, time_s=now_s, term=place.term, served=served))
