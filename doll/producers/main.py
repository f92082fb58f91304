"""The producer process: it sends the source's samples at their arrival times, and reports once per second."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from doll.config import FeedSource, HistorySource, JobConfig
from doll.errors import ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.foreign_topic import require_own_topic
from doll.kafka.reader import Tail, has_finished, on_finish
from doll.process.files import write_json
from doll.process.health import Heartbeat, heartbeat_of
from doll.process.metric_names import DELIVERED_TOTAL, LEFT, RATE_PER_S
from doll.process.signals import stop_requested
from doll.producers.arrivals import Pacer
from doll.producers.feed import Feed
from doll.producers.position import find_positions, position_headers, source_name
from doll.producers.schedule import ScheduledSample, scheduled_samples
from doll.producers.sender import SampleSender
from doll.records import packing
from doll.records.control import ServerStatus
from doll.services import Services
from doll.telemetry import get_logger

_REPORT_S: Final = 1.0
_LONGEST_SLEEP_S: Final = 0.25
_DRAIN_S: Final = 8.0
_READ_S: Final = 60.0  # limit for one sample from the source, because a file may be on a slow disk
_NEW_TOPIC_S: Final = 10.0


def run_producer(
    config: JobConfig,
    services: Services,
    run_folder: Path | None = None,
    *,
    stop: threading.Event | None = None,
    say: Callable[[str], None] | None = None,
    until_finished: bool = False,
) -> int:
    """Send the job's source until it ends, `source.limit_samples` is reached, or `stop` is set.

    Without `stop`, SIGTERM and SIGINT end it (in the main thread). However it ends, all sent samples are flushed and
    counted.

    Args:
        run_folder: folder for `producer.json`, the final counts of samples. None: the file is not written.
        stop: event that ends the producer. None: signals end it.
        say: function that is called with messages for people. None: messages are logged.
        until_finished: whether to end also when the parameter server reports, or has reported, that the job has
            finished.

    Returns:
        The exit code of the process: 0 if every sample that was taken from the source was delivered, otherwise 1.

    Raises:
        ConfigError: the samples topic belongs to another job, or the source is not valid. In the second case, samples
            that were sent before are flushed first.
        ServiceUnavailableError: Kafka does not answer at the start, or refused the producer permanently.
    """
    require_own_topic(config, "the producer")
    say = say or (lambda text: get_logger(__name__).info("producer", text=text))
    topics.ensure(config, services)
    sender = SampleSender(config, services, say)
    with (
        stop_requested() if stop is None else contextlib.nullcontext(stop) as stopped,
        heartbeat_of("producer", config) as heartbeat,
        contextlib.closing(LiveWorkers(config, services))
        if config.arrivals.while_down == "pause"
        else contextlib.nullcontext() as workers,
        on_finish(config, services, stopped.set) if until_finished else contextlib.nullcontext(),
    ):
        if until_finished and has_finished(config, services, stopped.is_set):
            say("the job has finished: nothing is sent")
            return 0
        if isinstance(config.source, HistorySource):
            from doll.producers.history import send_history

            if send_history(config, services, sender, stopped, heartbeat, say):
                _report_end(config, services, sender)
            sender.send_metric({LEFT: 1.0}, time.time())
            sender.drain(stopped.is_set, _DRAIN_S)
            return 0
        positions = find_positions(config, services)
        with _fed_by(config, positions, sender) as feed:
            samples = scheduled_samples(
                config,
                starts=_samples_in_topic(config, services),
                positions=positions,
                feed=feed,
                paused=(lambda stream: not workers.is_live(stream)) if workers else (lambda stream: False),
            )
            run = _PacedLoop(config, sender, stopped, heartbeat, workers, positions)
            ended = False
            try:
                run.send_all(samples)
                ended = True
            finally:
                sender.drain(run.stop_requested, _DRAIN_S)
                if ended and not run.stop_requested():
                    _report_end(config, services, sender)
                run.report(time.monotonic(), last=ended)
                sender.drain(run.stop_requested, _DRAIN_S)
                counts = sender.counts
                unsent = f", {run.unsent} read from the source and not sent" if run.unsent else ""
                say(f"{counts.delivered} samples delivered, {counts.failed} failed{unsent}")
                if run_folder is not None:
                    write_json(run_folder / "producer.json", {**dataclasses.asdict(counts), "unsent": run.unsent})
            if feed is not None and not counts.failed:
                feed.acknowledge(now=True)
    return 1 if counts.failed or run.unsent else 0


@contextlib.contextmanager
def _fed_by(config: JobConfig, positions: Sequence[int], sender: SampleSender) -> Iterator[Feed | None]:
    """If the source of the job is a program, yield the connection to this program; otherwise yield None."""
    if not isinstance(config.source, FeedSource):
        yield None
        return
    with Feed(config.path(config.source.socket), positions, config.data.max_record_bytes) as feed:
        feed.settled = lambda: sender.settled
        yield feed


class LiveWorkers:
    """The live workers, as the parameter server reports them every second, for streams that pause with their worker.

    The class reads the `metrics` topic. A worker that was never reported is not live. The streams of a released worker
    continue, because other workers take them over.

    Raises:
        ServiceUnavailableError: the topic does not exist, or the broker does not answer.
    """

    def __init__(self, config: JobConfig, services: Services) -> None:
        self._tail = Tail(config, services, (config.topic("metrics"),))
        self._num_workers = config.data.workers
        self._live: frozenset[int] = frozenset()

    def poll(self) -> None:
        """Read the reports that arrived since the last call; does not wait."""
        for timed in self._tail.poll(0.0):
            if isinstance(timed.record, ServerStatus):
                live = (status.worker for status in timed.record.workers if status.is_live)
                self._live = frozenset(live).union(timed.record.released)

    def is_live(self, stream: int) -> bool:
        """Return whether the worker that this stream was first assigned to is live, or released."""
        return stream % self._num_workers in self._live

    def close(self) -> None:
        self._tail.close()


class _PacedLoop:
    """The loop that sends each sample at its time, and the reports of the producer.

    Attributes:
        unsent: number of samples that were taken from the source, but could not be put into the queue before the end.
    """

    def __init__(
        self,
        config: JobConfig,
        sender: SampleSender,
        stop: threading.Event,
        heartbeat: Heartbeat,
        workers: LiveWorkers | None,
        positions: Sequence[int],
    ) -> None:
        self.unsent = 0
        self._workers = workers
        self._heartbeat = heartbeat
        self._sender = sender
        self._stop = stop
        self._per_record = config.data.samples_per_record
        self._limit = config.source.limit_samples if config.source else None
        self._source = source_name(config.source)
        self._positions = list(positions)  # position in the file: samples sent to each stream, or packed for it
        self._packs: list[list[bytes]] = [[] for _ in range(config.data.num_partitions)]
        self._behind_s = 0.0
        self._reported_s = time.monotonic()
        self._reported_sent = 0

    def stop_requested(self) -> bool:
        """Return whether the end was requested. All waits call this method, so it also sends the heartbeat."""
        self._heartbeat.beat("loop")
        self._heartbeat.set_waiting_for("Kafka" if self._sender.unreachable else "")
        return self._stop.is_set()

    def send_all(self, samples: Iterator[ScheduledSample]) -> None:
        self._heartbeat.expect("loop", within_s=_READ_S)
        self._heartbeat.set_waiting_for("")
        pacer = Pacer(time.monotonic())
        taken = sum(self._positions)
        if self._limit is not None and taken >= self._limit:
            return
        try:
            for time_s, stream, value in samples:
                now_s = time.monotonic()
                if value is None and self._workers is None:
                    pacer.idle(time_s, now_s)
                while (wait_s := pacer.wait_s(time_s, now_s)) > 0 and not self._stop.is_set():
                    self._stop.wait(min(wait_s, _LONGEST_SLEEP_S))
                    now_s = self._tick()
                if self._stop.is_set():
                    return
                self._behind_s = pacer.behind_s(time_s, now_s)
                if now_s - self._reported_s >= _REPORT_S or value is None:
                    self._tick()
                if value is None:
                    continue
                self._add(stream, value)
                taken += 1
                if taken == self._limit:
                    return
        finally:
            for stream, pack in enumerate(self._packs):
                if pack:
                    self._send_pack(stream, pack)

    def report(self, now_s: float, *, last: bool = False) -> None:
        """Send the counts to the `metrics` topic. `last` states that this process now ends normally."""
        counts = self._sender.counts
        elapsed_s = now_s - self._reported_s
        rate_per_s = (counts.sent - self._reported_sent) / elapsed_s if elapsed_s > 0 else 0.0
        self._reported_s, self._reported_sent = now_s, counts.sent
        self._sender.send_metric(
            {
                "sent_total": counts.sent,
                DELIVERED_TOTAL: counts.delivered,
                "failed_total": counts.failed,
                RATE_PER_S: rate_per_s,
                "behind_s": self._behind_s,
                **({LEFT: 1.0} if last else {}),
            },
            time.time(),
        )

    def _tick(self) -> float:
        self._sender.poll()
        if self._workers is not None:
            self._workers.poll()
        self.stop_requested()
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_S:
            self.report(now_s)
        return now_s

    def _add(self, stream: int, value: bytes) -> None:
        self._positions[stream] += 1
        if self._per_record == 1:
            self._send(stream, value, 1)
            return
        pack = self._packs[stream]
        pack.append(value)
        if len(pack) == self._per_record:
            self._send_pack(stream, pack)

    def _send_pack(self, stream: int, pack: list[bytes]) -> None:
        self._send(stream, packing.pack(pack), len(pack))
        pack.clear()

    def _send(self, stream: int, record: bytes, samples: int) -> None:
        headers = position_headers(self._source, self._positions[stream])
        if not self._sender.send(stream, record, samples, self.stop_requested, headers):
            self.unsent += samples


def _report_end(config: JobConfig, services: Services, sender: SampleSender) -> None:
    """Report the end of the source, so that all samples are learned, also those of an incomplete batch.

    If Kafka does not return the end offsets, the samples of an incomplete batch wait for more samples.
    """
    try:
        sender.send_end(_log_ends(config, services))
    except ServiceUnavailableError as exc:
        get_logger(__name__).warning(
            "end_not_reported", reason=str(exc), hint="records that fill no batch wait for more"
        )


def _log_ends(config: JobConfig, services: Services) -> list[int]:
    """Return the end offset of each partition of the samples topic.

    Raises:
        ServiceUnavailableError: Kafka does not answer.
    """
    name = config.topic("samples")
    (info,) = (topic for topic in topics.describe(config, services) if topic.name == name)
    return list(info.high)


def _samples_in_topic(config: JobConfig, services: Services) -> list[int]:
    """Return the number of samples that each stream already contains (too many if a packed record was not full).

    Raises:
        ServiceUnavailableError: Kafka does not answer.
    """
    deadline_s = time.monotonic() + _NEW_TOPIC_S
    while True:
        try:
            ends = _log_ends(config, services)
        except ServiceUnavailableError:
            # The leader of a topic that was just created may not know the topic yet.
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
            continue
        return [records * config.data.samples_per_record for records in ends]
