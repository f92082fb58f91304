"""`doll lineage`: the runs of a job as events of OpenLineage (spec 2-0-2), printed or posted to a receiver.

A run begins with the first server of a generation, or with a server that resumes after the end, and ends with the job.
Its identifier is computed from the records, so each process that follows the job names the same runs. An event has the
counts since the model began, so the newest event replaces all earlier ones.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from doll import __version__
from doll.config import HistorySource, JobConfig
from doll.credentials import secret
from doll.ledger.lineage import Lineage, LineageChange, UpdatesRecord
from doll.monitor.follow import follow
from doll.monitor.outbox import Outbox, checked_url
from doll.monitor.state.run_counts import RunCounts
from doll.records.control import AnyRecord, Finished, ServerStatus, TermStarted
from doll.redaction import redacted
from doll.services import Services
from doll.telemetry import get_logger

log = get_logger(__name__)

TOKEN_ENV: Final = "OPENLINEAGE_API_KEY"
DEFAULT_INTERVAL_S: Final = 60.0
_PRODUCER: Final = f"https://github.com/doll-online/doll/tree/v{__version__}"
_OWN_SCHEMA: Final = f"https://raw.githubusercontent.com/doll-online/doll/v{__version__}/docs/openlineage.json#/$defs/"
_SPEC: Final = "https://openlineage.io/spec/"

Event = dict[str, Any]
EventType = Literal["START", "RUNNING", "COMPLETE", "FAIL", "ABORT"]


@dataclass(frozen=True)
class Run:
    """A run: the first record of its first server, and the type, the Unix time and the reason of its end."""

    started: TermStarted
    end_type: EventType | None = None  # None: it has not ended
    end_s: float = 0.0
    reason: str = ""
    error: str = ""

    def run_id(self, job: str) -> str:
        """Return the identifier of the run, a UUID."""
        first = self.started
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"doll:{job}:{first.run_id}:{first.term}:{first.time_s!r}"))


class EventForm:
    """The form of a job's events.

    Args:
        model: folder or URL of the checkpoints.
        namespace: namespace of the job.
    """

    def __init__(self, config: JobConfig, services: Services, model: Path | str, namespace: str) -> None:
        self._job, self._namespace, self._model = config.job, namespace, _data_set(str(model))
        kafka = f"kafka://{services.kafka.partition(',')[0].strip()}"
        topics, source = list[str](), config.source
        self._others = list[Event]()
        if config.data.join is not None:
            topics = config.data.join.topics
        elif isinstance(source, HistorySource):
            topics = [source.topic]
            table = source.table if "://" in source.table else str(config.path(Path(source.table)).resolve())
            self._others = [_data_set(table)]
        self._others += [{"namespace": kafka, "name": topic} for topic in topics]
        self._samples: Event = {"namespace": kafka, "name": config.topic("samples")}

    def event(self, event_type: EventType, time_s: float, run: Run, counts: RunCounts | None) -> Event:
        """Return an event as a JSON object. `time_s`: Unix time of the event. `counts`: None in the first event of a
        run, whose time is before the counts."""
        training: Event = {"runId": run.started.run_id, "generation": run.started.generation}
        samples, model = dict(self._samples), dict(self._model)
        if counts is not None:
            training |= {"version": counts.version, "samples": counts.samples}
            partitions = [
                {
                    "partition": partition, "applied": list(map(list, each.applied)), "samples": each.samples,
                    "deadLetters": each.dead_letters, "heldOut": each.held_out, "lost": each.lost,
                }
                for partition, each in sorted(counts.partitions.items())
            ]  # fmt: skip
            offsets = _own_facet("DollOffsetsInputDatasetFacet", version=counts.version, partitions=partitions)
            version = _facet("facets/1-0-1", "DatasetVersionDatasetFacet", datasetVersion=str(counts.version))
            samples["inputFacets"], model["facets"] = {"doll_offsets": offsets}, {"version": version}
        if run.end_type is not None:
            training["endReason"] = redacted(run.reason)
        engine = _facet("facets/1-1-1", "ProcessingEngineRunFacet", name="DOLL", version=__version__)
        run_facets = {"processing_engine": engine, "doll_training": _own_facet("DollTrainingRunFacet", **training)}
        if run.error:
            run_facets["errorMessage"] = _facet(
                "facets/1-0-1", "ErrorMessageRunFacet", message=redacted(run.error), programmingLanguage="PYTHON"
            )
        job_type = _facet(
            "facets/2-0-4", "JobTypeJobFacet", processingType="STREAMING", integration="DOLL", jobType="TRAINING",
            emissionPattern={"eventTrigger": "PERIODIC", "eventCompleteness": "ACCUMULATIVE"},
        )  # fmt: skip
        return {
            "eventType": event_type,
            "eventTime": datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds"),
            "producer": _PRODUCER,
            "schemaURL": f"{_SPEC}2-0-2/OpenLineage.json#/$defs/RunEvent",
            "run": {"runId": run.run_id(self._job), "facets": run_facets},
            "job": {"namespace": self._namespace, "name": self._job, "facets": {"jobType": job_type}},
            "inputs": [samples, *self._others],
            "outputs": [model],
        }


def _facet(place: str, schema: str, **fields: Any) -> Event:
    return {"_producer": _PRODUCER, "_schemaURL": f"{_SPEC}{place}/{schema}.json#/$defs/{schema}", **fields}


def _own_facet(schema: str, **fields: Any) -> Event:
    return {"_producer": _PRODUCER, "_schemaURL": _OWN_SCHEMA + schema, **fields}


def _data_set(place: str) -> Event:
    """Return the namespace and the name of a path or URL, by the naming rules of OpenLineage."""
    scheme, is_url, rest = redacted(place).partition("://")
    if not is_url:
        return {"namespace": "file", "name": place}
    authority, _, path = rest.partition("/")
    return {"namespace": f"{scheme}://{authority}", "name": path.rstrip("/") or "/"}


class RunFollower:
    """Turns the records of a job into events of its newest run, and of later ones. `begin` ends the history.

    Args:
        generation: follow only this generation. None: the newest one.

    Attributes:
        has_ended: the last event of a run was put, and no other run has begun.
    """

    def __init__(
        self, job: str, form: EventForm, put: Callable[[Event], object], generation: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._job, self._form, self._put, self._generation, self._clock = job, form, put, generation, clock
        self._counts = RunCounts()
        self._last = "", ""  # identifier and type of the last event, without RUNNING
        self._rewind()

    def _rewind(self) -> None:
        self._counts.begin()
        self._lineage = Lineage()
        self._run: Run | None = None
        self._has_begun = self.has_ended = False

    def begin(self) -> None:
        """Put the first event of the newest run, and the last one if it has ended."""
        self._has_begun = True
        self._announce()

    def progress(self) -> None:
        """Put the present counts, if a run has begun and not ended."""
        if self._has_begun and self._run is not None and self._run.end_type is None:
            self._put(self._form.event("RUNNING", self._clock(), self._run, self._counts))

    def feed(self, record: AnyRecord) -> bool:
        """Process a record of `updates` or `metrics`. Return False if all records must be fed again, from the first
        one; then `begin` must be called again."""
        if isinstance(record, ServerStatus):
            self._counts.saved(record.term, record.durable_version)
        if not isinstance(record, UpdatesRecord) or self._is_over:
            return True
        change = self._lineage.feed(record)
        if change is LineageChange.GENERATION:
            if self._run is not None and self._run.end_type is None:
                self._end("ABORT", record.time_s, f"generation {self._lineage.generation} has begun")
            if self._is_over:
                return True
            self._counts.begin()
        if change is LineageChange.FENCED:
            return True
        if not self._counts.feed(record):
            self._rewind()
            return False
        if isinstance(record, TermStarted) and (self._run is None or self._run.end_type is not None):
            self._run, self.has_ended = Run(record), False
            self._announce()
        elif isinstance(record, Finished):
            self._counts.saved(record.term, record.version)
            self._end("FAIL" if record.error else "COMPLETE", record.time_s, record.reason, record.error)
        return True

    @property
    def _is_over(self) -> bool:
        return self._generation is not None and self._lineage.generation > self._generation

    def _end(self, end_type: EventType, end_s: float, reason: str, error: str = "") -> None:
        if self._run is not None:
            self._run = Run(self._run.started, end_type, end_s, reason, error)
            self._announce()

    def _announce(self) -> None:
        """Put the events of the present run that were not put yet, after the history."""
        if self._run is None or not self._has_begun:
            return
        run, run_id = self._run, self._run.run_id(self._job)
        if self._last[0] != run_id:
            self._put(self._form.event("START", run.started.time_s, Run(run.started), None))
            self._last = run_id, "START"
        if run.end_type is not None:
            if self._last[1] == "START":
                self._put(self._form.event(run.end_type, run.end_s, run, self._counts))
                self._last = run_id, run.end_type
            self.has_ended = True


def send_lineage(
    config: JobConfig, services: Services, model: Path | str, *, url: str | None, write: Callable[[str], object],
    namespace: str, interval_s: float, generation: int | None = None,
) -> int:  # fmt: skip
    """Send the events of a job until its end, and until they are accepted or refused, or until SIGTERM or SIGINT.
    Return the exit code, 0.

    Args:
        model: folder or URL of the checkpoints.
        url: address of the receiver. None: each event is passed to `write`, as one line of JSON.
        namespace: namespace of the job.
        interval_s: seconds between two events of type RUNNING. None is sent while earlier events wait.
        generation: see `RunFollower`.

    Raises:
        ConfigError: the URL or the secret is not accepted.
        ServiceUnavailableError: Kafka does not answer at the start.
    """
    outbox = None if url is None else Outbox(checked_url(url, TOKEN_ENV), secret(TOKEN_ENV) or "")
    put = outbox.put if outbox is not None else lambda event: write(json.dumps(event))
    follower = RunFollower(config.job, EventForm(config, services, model, namespace), put, generation)
    try:
        while not _follow_run(config, services, follower, outbox, interval_s):
            log.info("lineage_read_again", reason="a rollback has made counted updates void")
    finally:
        if outbox is not None:
            outbox.close()
            log.info("lineage_sent", sent=outbox.sent, dropped=outbox.dropped)
    return 0


def _follow_run(
    config: JobConfig, services: Services, follower: RunFollower, outbox: Outbox | None, interval_s: float
) -> bool:
    """Feed the records of the job from the first one. Return False if they must be fed again."""
    topics, next_s = (config.topic("updates"), config.topic("metrics")), math.inf
    with closing(follow(config, services, "lineage", topics)) as polls:
        for poll in polls:
            if not all(follower.feed(entry.record) for entry in poll.entries):
                return False
            num_waiting = 0 if outbox is None else outbox.num_waiting
            if poll.has_read_history and next_s == math.inf:
                follower.begin()
                follower.progress()
                next_s = time.monotonic() + interval_s
            elif follower.has_ended and not num_waiting:
                return True
            elif time.monotonic() >= next_s and not num_waiting:
                follower.progress()
                next_s = time.monotonic() + interval_s
    return True
