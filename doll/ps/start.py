"""The start of a parameter server: a checkpoint, or the origins of a new job; and the engine made from it.

A job may begin with weights of another run or of a file (`training.init_from`): the first server takes them before it
saves version 0, and each later server goes on from a checkpoint (docs/decisions/0085).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy.typing as npt

from doll.config import JobConfig, TrainingConfig
from doll.errors import CheckpointError
from doll.model.flat_model import FlatModel
from doll.model.initial_weights import WeightMatch, match
from doll.ps.checkpointing import decode_snapshot, encode_snapshot
from doll.ps.engine.assignment import first_snapshot
from doll.ps.engine.engine import Engine
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies import make_policy
from doll.storage.checkpoints import Checkpoint, decode_checkpoint, encode_checkpoint
from doll.storage.weight_sources import read_source


class Start(msgspec.Struct, frozen=True, array_like=True):
    """The same start makes the same engine and weights, in a server and in a replay of its event log.

    Attributes:
        term: the server's own.
        now: its monotonic clock, seconds.
        origins: first offset of the job in each partition; empty if there is a checkpoint.
        checkpoint: as `encode_checkpoint` writes it, or b"" for a new job.
        generation: of a new job, see `doll.ledger.lineage`; a checkpoint has its own.
        samples_id: Kafka's id of the samples topic, for a job whose checkpoint has none; "": not known.
        run_id: of the run: the checkpoint's; or drawn, for one that has none and for a session of `doll resume`
            (docs/decisions/0045).
        job: in an event log, the job file that the server ran with, as in its run folder.
    """

    term: int
    now: float
    origins: tuple[int, ...] = ()
    checkpoint: bytes = b""
    generation: int = 0
    samples_id: str = ""
    run_id: str = ""
    job: str = ""

    @classmethod
    def resume(cls, term: int, now: float, checkpoint: Checkpoint, samples_id: str = "", run_id: str = "") -> Start:
        return cls(term, now, (), b"".join(encode_checkpoint(checkpoint)), samples_id=samples_id, run_id=run_id)


def make_engine(
    config: JobConfig, start: Start, load: Callable[[Mapping[str, npt.NDArray[Any]]], object], fingerprint: str = ""
) -> Engine:
    """The engine at its start.

    Args:
        load: takes over the checkpoint's tensors.
        fingerprint: of the job file and the model, which workers must have as well.

    Raises:
        CheckpointError: the checkpoint is torn, or does not fit the model, the policy or the number of workers.
    """
    settings, policy = engine_settings(config, fingerprint), make_policy(config.training.policy)
    if not start.checkpoint:
        return Engine(
            settings, policy, term=start.term, now=start.now, origins=start.origins,
            generation=start.generation, samples_id=start.samples_id, run_id=start.run_id,
        )  # fmt: skip
    checkpoint = decode_checkpoint(start.checkpoint)
    load(checkpoint.tensors)
    snapshot = decode_snapshot(checkpoint)
    snapshot = msgspec.structs.replace(
        snapshot, samples_id=snapshot.samples_id or start.samples_id, run_id=start.run_id or snapshot.run_id
    )
    try:
        return Engine(settings, policy, term=start.term, now=start.now, snapshot=snapshot)
    except ValueError as exc:
        raise CheckpointError(f"version {checkpoint.version} of job {checkpoint.job!r}: {exc}") from exc


def engine_settings(config: JobConfig, fingerprint: str = "") -> EngineSettings:
    return EngineSettings(
        num_workers=config.data.workers,
        max_workers=config.data.places,
        rebalance_s=config.data.rebalance_s,
        records_per_batch=config.data.records_per_batch,
        max_pending_batches=config.worker.max_pending_batches,
        lease_s=config.worker.lease_s,
        grant_timeout_s=config.worker.grant_timeout_s,
        set_limit_s=config.worker.set_limit_s,
        checkpoint_every_updates=config.checkpoint.every_updates,
        checkpoint_every_s=config.checkpoint.every_s,
        sum_reduction=_takes_sum(config.training),
        stop=config.stop,
        on_bad_records=config.data.on_bad_records,
        job=config.job,
        fingerprint=fingerprint,
    )


def _takes_sum(training: TrainingConfig) -> bool:
    """Workers that send steps have taken the mean or the sum of their samples themselves; an outer step is made of the
    mean of these."""
    if training.policy.sends_steps:
        return training.policy.outer_step is None
    return training.reduction == "sum"


def matched(config: JobConfig, model: FlatModel) -> WeightMatch | None:
    """The match of `training.init_from` with this model; None if the job file has none. The model stays as it is.

    Raises:
        ConfigError: there is no such file or run, or what it holds does not fit.
        CheckpointError: checkpoints cannot be read, or the version is not kept.
    """
    init = config.training.init_from
    if init is None:
        return None
    source = read_source(config, init.source)
    return match(model, source.tensors, source=source.name, strict=init.strict, rename=init.rename)


def begun_with(
    config: JobConfig, start: Start, tensors: Mapping[str, npt.NDArray[Any]], fingerprint: str, source: str
) -> Start:
    """The start of a new job, with the tensors of its model as version 0: a replay of its events begins with them too.
    `source`: as `InitReport.source`."""
    snapshot = first_snapshot(
        engine_settings(config, fingerprint), start.origins, policy=config.training.policy.name,
        generation=start.generation, samples_id=start.samples_id, run_id=start.run_id,
    )  # fmt: skip
    snapshot = msgspec.structs.replace(snapshot, init_from=source)
    checkpoint = Checkpoint(
        job=config.job, fingerprint=fingerprint, term=start.term, version=0, state=encode_snapshot(snapshot),
        tensors=tensors,
    )  # fmt: skip
    return Start.resume(start.term, start.now, checkpoint, start.samples_id, start.run_id)
