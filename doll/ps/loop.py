"""The parameter server's loop: records in, periodic work, and the two ways out: the job's end and SIGTERM."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import Final

from doll.errors import CheckpointError, RecordError
from doll.process.health import Heartbeat
from doll.ps.channels.control_channel import ControlChannel
from doll.ps.engine import events as ev
from doll.ps.server import ParameterServer
from doll.records.control import Alive, Announce, Evaluated, GetRows, Join, Leave, Nack, Push, Skip, decode
from doll.telemetry import get_logger

log = get_logger(__name__)

_EVENT_RECORDS: Final = (Join, Announce, Skip, Push, Nack, GetRows, Alive, Leave, Evaluated)
# Leases and checkpoints fall due within seconds: twenty ticks a second are enough and cost nothing.
_POLL_S: Final = 0.05
_FLUSH_S: Final = 2.0  # for the last records to be delivered: whoever sent SIGTERM will not wait long


class Signals:
    """SIGINT asks for the end of the job; SIGTERM only for the end of this process: a successor may continue."""

    def __init__(self) -> None:
        self.end_job = False
        self.leave = False
        signal.signal(signal.SIGINT, self._on_sigint)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self.end_job = True

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.leave = True


def serve(
    server: ParameterServer, channel: ControlChannel, signals: Signals, lease_s: float, heartbeat: Heartbeat
) -> None:
    """Run the server until the job has finished, or until SIGTERM (after a checkpoint).

    Raises:
        FencedError: a newer server has claimed the job.
        CheckpointError: checkpoints cannot be saved, or this process paused for longer than its lease and the store
            does not answer.
        DivergedError: the model diverged.
    """
    engine = server.engine
    looped_s = checked_s = time.monotonic()
    while engine.finished is None:
        incoming = channel.poll(_POLL_S)
        now = time.monotonic()
        heartbeat.beat("loop")
        if channel.had_traffic():
            heartbeat.beat("kafka")
        if now - checked_s > lease_s:
            # A standby may have taken over from a server that was frozen, waited for Redis or was cut off from Kafka.
            _check_fencing(server, paused_s=now - looped_s, lease_s=lease_s)
            checked_s = now
        looped_s = now
        events: list[ev.Event | GetRows] = [
            *incoming.records,
            *(ev.GrantsLost(worker=worker) for worker in incoming.changed),
            *_decode(server, incoming.values),
        ]
        server.prefetch(events)
        for event in events:
            if isinstance(event, GetRows):
                server.send_rows(event)
            else:
                server.feed(event)
        if signals.end_job:
            server.feed(ev.StopRequested(reason="interrupted"))
        if signals.leave:
            channel.flush(_FLUSH_S)
            server.save_now()
            log.info("leaving", version=engine.version, reason="SIGTERM; the job can be resumed")
            return
        server.run_periodic()


def deliver(channel: ControlChannel, signals: Signals, heartbeat: Heartbeat) -> None:
    """Wait until Kafka has every record, or until SIGTERM: without the last one nobody learns of the job's end."""
    warned = False
    while (undelivered := channel.flush(_FLUSH_S)) and not signals.leave:
        heartbeat.beat("loop")
        if not warned:
            log.warning(
                "kafka_unavailable", undelivered=undelivered, hint="waiting for it, to report that the job has ended"
            )
        warned = True


def _decode(server: ParameterServer, values: Sequence[bytes | None]) -> list[ev.Event | GetRows]:
    """Records of `events`; what does not belong there is counted and refused."""
    events: list[ev.Event | GetRows] = []
    for value in values:
        try:
            record = decode(value)
            if not isinstance(record, _EVENT_RECORDS):
                raise RecordError(f"{type(record).__name__} does not belong on this topic")
        except RecordError as exc:
            server.engine.counters["refused_record"] += 1
            log.warning("record_refused", topic="events", reason=str(exc))
            continue
        events.append(record)
    return events


def _check_fencing(server: ParameterServer, *, paused_s: float, lease_s: float) -> None:
    """End this process if it has a successor.

    Raises:
        FencedError: it has one.
        CheckpointError: it paused for longer than its lease, and the store does not answer.
    """
    if paused_s > lease_s:
        log.warning("paused_beyond_lease", seconds=round(paused_s, 1))
    try:
        server.stop_if_superseded()
    except CheckpointError as exc:
        if paused_s > lease_s:
            raise  # nothing may be written before it is known
        log.warning("store_unavailable", error=str(exc), action="trying again")
