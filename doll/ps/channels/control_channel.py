"""The parameter server's channels as one: Kafka, and control links for grants and pushes if there are any (ADR 0026).

If there are links, the main loop waits for their data in a selector, and a thread reads `events` from Kafka. So the
thread that receives a push on a link also handles the push. Messages of the two channels may overtake one another.
Therefore, when a worker's channel changes, the worker's unanswered grants are sent again (`GrantsLost`): the new
channel then carries all of them, in order.
"""

from __future__ import annotations

import queue
import selectors
import threading
from collections.abc import Mapping
from typing import Final

import msgspec

from doll.config import JobConfig
from doll.control.local_socket import LocalSocket
from doll.errors import ServiceUnavailableError
from doll.process.platform import WakeUp
from doll.ps.channels.control_links import ControlLinks, LocalListener
from doll.ps.channels.kafka_channel import KafkaChannel
from doll.ps.channels.stream_listener import StreamListener
from doll.records.control import AnyRecord, GetRows, Grant, Nack, NewVersion, Push, RowsStored, ServerStatus, Welcome
from doll.services import Services
from doll.storage.blobs import scope_of
from doll.telemetry import get_logger

log = get_logger(__name__)

_MAX_POLLS_AHEAD: Final = 4  # maximum number of Kafka polls in the queue; further records stay in librdkafka
_POLL_S: Final = 0.2  # maximum time until the thread that reads `events` notices that it must stop


class Incoming(msgspec.Struct, frozen=True):
    """The events of one poll, to be handled in this order.

    Attributes:
        records: records from links.
        changed: workers whose link was opened or closed.
        values: values from `events`. They are handled after the records, because a worker sends its last push before
            its Leave.
    """

    records: list[Push | Nack | GetRows]
    changed: list[int]
    values: list[bytes | None]


class ControlChannel:
    """The `Outbox` and inbox of the server. Not thread-safe: only the main loop may use it."""

    def __init__(self, kafka: KafkaChannel, links: ControlLinks | None = None) -> None:
        """`links`: control links; None: all records go through Kafka."""
        self._kafka = kafka
        self._links = links
        self._closed = threading.Event()
        if links is None:
            return
        self._values: queue.Queue[list[bytes | None] | Exception] = queue.Queue(_MAX_POLLS_AHEAD)
        self._wake = WakeUp()
        links.selector.register(self._wake, selectors.EVENT_READ, self._wake.clear)
        self._thread = threading.Thread(target=self._read_events, name="events", daemon=True)
        self._thread.start()

    def report(self) -> tuple[Mapping[int, str], Mapping[str, int]]:
        """Return each linked worker's kind of link, and the counts of opened, broken and refused links."""
        return ({}, {}) if self._links is None else (self._links.kinds(), self._links.counters)

    def poll(self, timeout_s: float) -> Incoming:
        """Wait at most `timeout_s` seconds for events, and return the received ones. Raises ServiceUnavailableError if
        Kafka refuses to serve this process."""
        if self._links is None:
            return Incoming([], [], self._kafka.poll(timeout_s))
        self._kafka.poll_deliveries()
        changed, records = self._links.take()  # workers whose link broke during a send
        if not changed and not records:
            self._links.poll(timeout_s if self._values.empty() else 0.0)
            changed, records = self._links.take()
        return Incoming(records, changed, self._take_values())

    def send_command(self, worker: int, record: AnyRecord) -> None:
        if self._links is not None:
            if isinstance(record, Welcome):
                self._links.welcome(record)
                record = msgspec.structs.replace(record, endpoints=self._links.endpoints)
            elif isinstance(record, Grant | NewVersion | RowsStored) and self._links.send(worker, record):
                return
        self._kafka.send_command(worker, record)

    def send_update(self, record: AnyRecord) -> None:
        self._kafka.send_update(record)

    def send_status(self, record: ServerStatus) -> None:
        self._kafka.send_status(record)

    def updates_acknowledged(self) -> int:
        return self._kafka.updates_acknowledged()

    def had_traffic(self) -> bool:
        return self._kafka.had_traffic()

    def flush(self, timeout_s: float) -> int:
        return self._kafka.flush(timeout_s)

    def close(self) -> None:
        self._closed.set()
        if self._links is not None:
            # The rest of the queue is not read: an error there must not hide the error that ends this process.
            self._thread.join()
            self._links.close()
            self._wake.close()
        self._kafka.close()

    def _take_values(self) -> list[bytes | None]:
        values: list[bytes | None] = []
        while True:
            try:
                polled = self._values.get_nowait()
            except queue.Empty:
                return values
            if isinstance(polled, Exception):
                raise polled
            values += polled

    def _read_events(self) -> None:
        while not self._closed.is_set():
            polled: list[bytes | None] | Exception
            try:
                polled = self._kafka.read(_POLL_S)
            except Exception as exc:  # the main loop's next poll raises this error
                polled = exc
            if not polled:
                continue
            while not self._closed.is_set():
                try:
                    self._values.put(polled, timeout=_POLL_S)
                except queue.Full:
                    continue
                self._wake.set()
                break
            if isinstance(polled, Exception):
                return


def open_links(config: JobConfig, services: Services, term: int, run_id: str) -> ControlLinks | None:
    """Return the links that `control.kind` allows, or None if it allows only Kafka. Raises ServiceUnavailableError if
    `control.kind` is local and the socket cannot be created."""
    kind = config.control.kind
    if kind == "kafka":
        return None
    links = ControlLinks(term, run_id=run_id)
    max_links = 2 * config.data.places + 16  # a worker's earlier link may still be open
    if kind in ("auto", "local"):
        try:
            listening = LocalSocket(services.control, f"{services.kafka} {config.job}")
        except ServiceUnavailableError as exc:
            if kind == "local":
                raise
            log.warning("control_socket_unavailable", reason=str(exc), action="offering Redis only")
        else:
            links.add(LocalListener(links, listening, max_links))
    if kind in ("auto", "redis"):
        links.add(StreamListener(links, services, scope_of(config.job, run_id), term, max_links))
    return links
