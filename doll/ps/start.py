"""The start of a parameter server (a checkpoint, or the origins of a new job), and the engine made from it.

A job may begin with the weights of another run or of a file (`training.init_from`). The first server loads these
weights before it saves version 0. Each later server continues from a checkpoint (docs/decisions/0085).
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
    """The start of a server. A server and a replay of its log make the same engine and weights from the same start.

    Attributes:
        now: time on the server's monotonic clock, in seconds.
        origins: first offset of the job in each partition; empty if there is a checkpoint.
        checkpoint: the checkpoint as `encode_checkpoint` writes it; b"" for a new job.
        generation: generation of a new job (`doll.ledger.lineage`); for a resumed job, the checkpoint has it.
        samples_id: Kafka's id of the samples topic, for a checkpoint that does not contain the id; "": not known.
        run_id: id of the run from the checkpoint, or a new random one if the checkpoint has none or `doll resume` has
            started the server (docs/decisions/0045).
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
    """Return the engine in its first state.

    Args:
        load: function that loads the tensors of the checkpoint.
        fingerprint: fingerprint of the job file and the model, which workers must have as well.

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
    policy = config.training.policy
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
        checkpoint_every_event_s=config.checkpoint.every_event_s,
        sum_reduction=_takes_sum(config.training),
        divides_steps=(policy.averages_workers and policy.sends_steps) or policy.sparse_push is not None,
        divides_lr=policy.averages_workers and not policy.sends_steps,
        stop=config.stop,
        on_bad_records=config.data.on_bad_records,
        drift_reaction=None if config.drift is None else config.drift.react,
        job=config.job,
        fingerprint=fingerprint,
    )


def _takes_sum(training: TrainingConfig) -> bool:
    """Return whether the server applies the sum of the contributions instead of their mean. Workers that send steps
    have already taken the mean or sum of their samples. An outer step uses the mean of these steps."""
    if training.policy.sends_steps:
        return training.policy.outer_step is None
    return training.reduction == "sum"


def matched(config: JobConfig, model: FlatModel) -> WeightMatch | None:
    """Compare the weights of `training.init_from` with this model, and return the match. Return None if the job file
    has no `init_from`. The model is not changed.

    Raises:
        ConfigError: there is no such file or run, or its weights do not fit the model.
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
    """Return the start of a new job with `tensors` as version 0. A replay of the job's events then begins with the same
    weights. `source`: as `InitReport.source`."""
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
