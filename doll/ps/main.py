"""`doll ps`: one parameter server process, from start to end of the job."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from doll.config import JobConfig
from doll.kafka import topics
from doll.kafka.range_reader import RangeReader
from doll.kafka.samples_topic import describe_samples
from doll.ledger.admission import admit
from doll.ledger.snapshot_counts import read_counts
from doll.model import build, fingerprint
from doll.process.fault_points import fault_point
from doll.process.health import Heartbeat, heartbeat_of
from doll.process.memory import keep_freed_memory
from doll.ps.control_channel import ControlChannel, open_links
from doll.ps.event_log import FileEventLog
from doll.ps.kafka_channel import KafkaChannel
from doll.ps.local_host import LocalModelHost
from doll.ps.loop import Signals, deliver, serve
from doll.ps.server import ParameterServer
from doll.ps.standby import LeaderCheck, wait_for_lease
from doll.ps.start import Start, make_engine
from doll.ps.updaters import make_parts
from doll.service_checks import require_services
from doll.services import Services
from doll.storage.checkpoints import Checkpoint
from doll.storage.stores import checkpoint_location, open_blobs, open_store
from doll.task import load_task
from doll.telemetry import get_logger

log = get_logger(__name__)


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
        standby: begin when no other server has written anything for `ps.lease_s`.
        leader_check: has watched for another leader since the start of this process; None: there is none, or it is to
            be replaced.
        after_term: where there is no checkpoint: terms up to this one are known to be of earlier runs on the same
            topics, and a new generation may begin beside them.

    Raises:
        ConfigError: the topics hold another run than the checkpoints, or another stream.
        DollError: services do not answer, the task does not load, the checkpoint is of another job or model, another
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
    signals = Signals()
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
        heartbeat.set_waiting_for("the end of the leader's lease (standby)")
    if standby and not wait_for_lease(config, services, lambda: signals.leave):
        return 0
    if leader_check is not None:
        heartbeat.set_waiting_for("the check for another leader")
        if not leader_check.require_no_leader(lambda: signals.leave):
            return 0
    lineage = admit(config, services, store, checkpoint_location(config, run_folder), after_term)
    term = store.claim_term(lineage.newest_term)
    fault_point("ps.after_claim")
    checkpoint = store.load_newest(job_fingerprint)  # from here on no earlier server can add one
    kafka = KafkaChannel(config, services)

    def give_up() -> bool:
        heartbeat.beat("loop")  # the loop waits for Redis here, and a restart would not help
        return signals.leave

    blobs = open_blobs(config, services, give_up=give_up)
    start = _start(config, services, checkpoint, term, term if lineage.newest_term else 0)
    updater, tables = make_parts(config.training, model)
    host = LocalModelHost(config, term, updater, blobs, tables)
    engine = make_engine(config, start, host)
    log_path = run_folder / "events" / f"ps-{term:06d}.log"
    event_log = FileEventLog(log_path, start) if config.checkpoint.event_log else None
    channel = ControlChannel(kafka, open_links(config, services, term))
    server = ParameterServer(
        config, engine=engine, host=host, store=store, outbox=channel, fingerprint=job_fingerprint, event_log=event_log,
        channel_report=channel.report,
    )  # fmt: skip
    log.info("started", term=term, version=engine.version, policy=engine.policy.name, parameters=model.num_parameters)
    try:
        server.open()
        heartbeat.expect("loop")
        heartbeat.expect("kafka", vital=False)
        heartbeat.set_waiting_for("")
        serve(server, channel, signals, config.ps.lease_s, heartbeat)
        heartbeat.set_waiting_for("the delivery of the last records")
        deliver(channel, signals, heartbeat)
    finally:
        server.close()
        channel.close()
        blobs.close()
        if event_log is not None:
            event_log.close()
    return 0


def _start(config: JobConfig, services: Services, checkpoint: Checkpoint | None, term: int, generation: int) -> Start:
    """Continue from the checkpoint, or begin `generation` at `data.start`.

    Raises:
        ConfigError: the samples topic is not the checkpoint's.
    """
    now = time.monotonic()
    counts = None if checkpoint is None else read_counts(config, checkpoint)
    # A consumer of its own: on the channel's, each request would wait behind the fetch of events (0.5 s a partition).
    with RangeReader(config, services) as reader:
        samples = describe_samples(
            config,
            services,
            reader.bounds,
            expected_id="" if counts is None else counts.samples_id,
            read_until=None if counts is None else counts.read_until,
        )
    if checkpoint is not None:
        log.info("resumed", version=checkpoint.version, from_term=checkpoint.term)
        return Start.resume(term, now, checkpoint, samples.topic_id)
    origins = samples.low if config.data.start == "earliest" else samples.high
    if generation:
        log.warning("generation_started", generation=generation, data_start=config.data.start, origins=list(origins))
    return Start(term, now, origins, generation=generation, samples_id=samples.topic_id)
