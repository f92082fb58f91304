"""`doll ps`: one parameter server process, from start to end of the job."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType

from doll.config import JobConfig
from doll.errors import CheckpointError, RecordError
from doll.kafka import topics
from doll.kafka.samples_topic import describe_samples
from doll.ledger.admission import admit
from doll.ledger.audit import read_counts
from doll.model import build, fingerprint
from doll.process.fault_points import fault_point
from doll.process.health import Heartbeat, heartbeat_of
from doll.process.memory import keep_freed_memory
from doll.ps import events as ev
from doll.ps.event_log import FileEventLog
from doll.ps.kafka_channel import KafkaChannel
from doll.ps.optimizer import Optimizer
from doll.ps.server import ParameterServer
from doll.ps.standby import LeaderCheck, wait_for_lease
from doll.ps.start import Start, make_engine
from doll.records import Alive, Announce, Evaluated, Join, Leave, Nack, Push, decode
from doll.service_checks import require_services
from doll.services import Services
from doll.storage.checkpoints import Checkpoint
from doll.storage.stores import checkpoint_location, open_blobs, open_store
from doll.task import load_task
from doll.telemetry import get_logger

log = get_logger(__name__)

_FROM_WORKERS = (Join, Announce, Push, Nack, Alive, Leave, Evaluated)
# Ticks decide leases (seconds) and checkpoints (seconds): twenty a second are plenty and cost nothing.
_POLL_S = 0.05
_LEAVE_S = 2.0  # for the last records to be delivered: whoever sent SIGTERM will not wait long


class _Signals:
    """SIGINT asks for the end of the job; SIGTERM only for the end of this process: a successor may go on."""

    def __init__(self) -> None:
        self.end_job = False
        self.leave = False
        signal.signal(signal.SIGINT, self._on_int)
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_int(self, number: int, frame: FrameType | None) -> None:
        self.end_job = True

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self.leave = True


def run_ps(
    config: JobConfig,
    services: Services,
    run_folder: Path,
    *,
    standby: bool = False,
    leader_check: LeaderCheck | None = None,
    after_term: int = 0,
) -> int:
    """Serve the job until its stop rule is met (0), or until SIGTERM (0, after a checkpoint; the job can be resumed).

    Args:
        standby: begin when nothing has been heard of another server for `ps.lease_s`.
        leader_check: looks since the start of this process whether another server leads; None: none does, or it shall be
            replaced.
        after_term: where there is no checkpoint: terms up to this one are known to be of earlier runs on the same topics,
            and a new generation may begin beside them.

    Raises:
        ConfigError: the topics hold another run than the checkpoints, or another stream.
        DollError: services are not there, the task does not load, the checkpoint is of another job or model, another
            server leads, a newer server has claimed the job, or the model diverged.
    """
    with heartbeat_of("ps-standby" if standby else "ps", config) as heartbeat:
        return _run(config, services, run_folder, standby, leader_check, heartbeat, after_term)


def _run(
    config: JobConfig,
    services: Services,
    run_folder: Path,
    standby: bool,
    leader_check: LeaderCheck | None,
    heartbeat: Heartbeat,
    after_term: int,
) -> int:
    import torch

    signals = _Signals()
    keep_freed_memory()
    torch.set_num_threads(1)
    require_services(config, services)
    topics.ensure(config, services)
    topics.check(config, services)
    model = build(config, load_task(config))
    job_fingerprint = fingerprint(config, model)
    store = open_store(config, run_folder)
    store.load_newest(job_fingerprint)  # refused before the claim: a wrong job file must not fence the server that runs
    if standby:
        heartbeat.set_waiting_for("the silence of the parameter server (standby)")
    if standby and not wait_for_lease(config, services, lambda: signals.leave):
        return 0
    if leader_check is not None:
        heartbeat.set_waiting_for("a look whether another parameter server leads")
        if not leader_check.require_no_leader(lambda: signals.leave):
            return 0
    seen = admit(config, services, store, checkpoint_location(config, run_folder), after_term)
    term = store.claim_term(seen.newest_term)
    fault_point("ps.after_claim")
    checkpoint = store.load_newest(job_fingerprint)  # from here on no earlier server can add one
    channel = KafkaChannel(config, services)

    def give_up() -> bool:
        heartbeat.beat("loop")  # while Redis is away the loop stands still, and a restart would not help
        return signals.leave

    blobs = open_blobs(config, services, give_up=give_up)
    channel.open()
    start = _start(config, services, channel, checkpoint, term, term if seen.newest_term else 0)
    optimizer = Optimizer(model, config.training.optimizer, config.training.clip_norm)
    engine = make_engine(config, start, optimizer)
    log_path = run_folder / "events" / f"ps-{term:06d}.log"
    event_log = FileEventLog(log_path, start) if config.checkpoint.event_log else None
    server = ParameterServer(
        config, engine=engine, optimizer=optimizer, blobs=blobs, store=store, outbox=channel, fingerprint=job_fingerprint,
        event_log=event_log,
    )  # fmt: skip
    log.info("started", term=term, version=engine.version, policy=engine.policy.name, parameters=model.num_parameters)
    try:
        server.open()
        heartbeat.expect("loop")
        heartbeat.expect("kafka", vital=False)
        heartbeat.set_waiting_for("")
        _serve(server, channel, signals, config.ps.lease_s, heartbeat)
        heartbeat.set_waiting_for("the delivery of the last records")
        _deliver(channel, signals, heartbeat)
    finally:
        server.close()
        channel.close()
        blobs.close()
        if event_log is not None:
            event_log.close()
    return 0


def _serve(
    server: ParameterServer, channel: KafkaChannel, signals: _Signals, lease_s: float, heartbeat: Heartbeat
) -> None:
    engine = server.engine
    looped_s = checked_s = time.monotonic()
    while engine.finished is None:
        values = channel.poll(_POLL_S)
        now = time.monotonic()
        heartbeat.beat("loop")
        if channel.had_traffic():
            heartbeat.beat("kafka")
        if now - checked_s > lease_s:
            # A standby may have taken over from one that was frozen, waited for Redis or was cut off from Kafka.
            _check_fencing(server, away_s=now - looped_s, lease_s=lease_s)
            checked_s = now
        looped_s = now
        for value in values:
            try:
                record = decode(value)
            except RecordError as exc:
                engine.counters["refused_record"] += 1
                log.warning("record_refused", topic="events", reason=str(exc))
                continue
            if isinstance(record, _FROM_WORKERS):
                server.feed(record)
            else:
                engine.counters["refused_record"] += 1
                log.warning(
                    "record_refused", topic="events", reason=f"{type(record).__name__} does not belong on this topic"
                )
        if signals.end_job:
            server.feed(ev.StopRequested(reason="interrupted"))
        if signals.leave:
            channel.flush(_LEAVE_S)
            server.save_now()
            log.info("leaving", version=engine.version, reason="SIGTERM; the job can be resumed")
            return
        server.turn()


def _check_fencing(server: ParameterServer, *, away_s: float, lease_s: float) -> None:
    """End this process if it has a successor: one with nothing to save would not find out.

    Raises:
        FencedError: it has one.
        CheckpointError: it was away for longer than its lease, and the store does not say.
    """
    if away_s > lease_s:
        log.warning("paused_beyond_lease", seconds=round(away_s, 1))
    try:
        server.stop_if_superseded()
    except CheckpointError as exc:
        if away_s > lease_s:
            raise  # nothing may be written before it is known
        log.warning("store_unavailable", error=str(exc), action="trying again")


def _deliver(channel: KafkaChannel, signals: _Signals, heartbeat: Heartbeat) -> None:
    """Hand everything to Kafka before this process ends; without it nobody would learn that the job has ended."""
    warned = False
    while (left := channel.flush(_LEAVE_S)) and not signals.leave:
        heartbeat.beat("loop")
        if not warned:
            log.warning(
                "kafka_unavailable", undelivered=left, hint="waiting until it is back, to say that the job has ended"
            )
        warned = True


def _start(
    config: JobConfig,
    services: Services,
    channel: KafkaChannel,
    checkpoint: Checkpoint | None,
    term: int,
    generation: int,
) -> Start:
    """Go on from the checkpoint, or begin `generation` where `data.start` says.

    Raises:
        ConfigError: the samples topic is not the one that the checkpoint is about.
    """
    now = time.monotonic()
    counts = None if checkpoint is None else read_counts(config, checkpoint)
    samples = describe_samples(config, services, channel.watermarks, counts)
    if checkpoint is not None:
        log.info("resumed", version=checkpoint.version, from_term=checkpoint.term)
        return Start.resume(term, now, checkpoint, samples.topic_id)
    origins = samples.low if config.data.start == "earliest" else samples.high
    if generation:
        log.warning("generation_started", generation=generation, data_start=config.data.start, origins=list(origins))
    return Start(term, now, origins, generation=generation, samples_id=samples.topic_id)
