"""The part of `doll forget` that changes the checkpoint store: it saves a model without some records as the newest one.

The model gets the next version number, so a number never means two models. Its lineage names the records that it has
not learned, and the audit counts them apart. As after `doll rollback`, a new grid begins, at the offsets at which the
model ends: no batch is learned again (docs/decisions/0134).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy.typing as npt

from doll.config import JobConfig
from doll.errors import FencedError
from doll.process.fault_points import fault_point
from doll.ps.checkpointing import decode_snapshot
from doll.ps.engine.events import EngineSnapshot
from doll.ps.regrid import converted
from doll.ps.rollback import rolled_back
from doll.storage.checkpoints import Checkpoint, CheckpointStore
from doll.telemetry import get_logger

log = get_logger(__name__)

Spans = Sequence[tuple[int, int]]


def save_without(
    config: JobConfig, store: CheckpointStore, before: Checkpoint, tensors: Mapping[str, npt.NDArray[Any]],
    forgot: Sequence[Spans], num_samples: int, *, above_term: int = 0,
) -> Checkpoint:  # fmt: skip
    """Save `tensors` as the version after `before`, the newest checkpoint, and return the new one. No server may serve
    the job during this call.

    Args:
        tensors: as `ModelParts.tensors`, of the model without the records.
        forgot: by partition, the ranges of the records' offsets.
        num_samples: number of the samples that `before` has learned from these records.
        above_term: highest term that is known from elsewhere.

    Raises:
        ConfigError: the job file does not fit the checkpoint.
        CheckpointError: the store cannot be read or written.
        FencedError: a server has claimed the job or saved a checkpoint since `before` was read. Nothing is changed.
    """
    term = store.claim_term(above_term)
    fault_point("forget.after_claim")
    newest = store.versions()[-1]
    if newest != (before.term, before.version):
        raise FencedError(
            f"version {newest[1]} of job {config.job} was saved while version {before.version} was computed again: end "
            "the parameter server, and run doll forget again"
        )
    state = without(
        decode_snapshot(before), forgot, num_samples, term=term, records_per_batch=config.data.records_per_batch,
        policy=config.training.policy.name,
    )  # fmt: skip
    model = dataclasses.replace(before, tensors=tensors)
    checkpoint, _ = converted(config, store, model, state, term=term, command="doll forget")
    store.save(checkpoint)
    fault_point("forget.after_checkpoint")
    log.info("forgot", version=state.version, term=term, grid=state.grid, samples=num_samples)
    return checkpoint


def without(
    newest: EngineSnapshot, forgot: Sequence[Spans], num_samples: int, *, term: int, records_per_batch: int, policy: str
) -> EngineSnapshot:
    """Return the state of the version after `newest` without some of its records, in a new grid. Pure.

    Refused records remain counted, but without their reasons: a task's reason may quote the record.
    """
    state = rolled_back(newest, newest, records_per_batch, policy, term=term, skip=False)
    removed = msgspec.structs.replace(state.rollbacks[-1], forgot=tuple(tuple(spans) for spans in forgot))
    return msgspec.structs.replace(
        state,
        samples_total=newest.samples_total - num_samples,
        rollbacks=(*state.rollbacks[:-1], removed),
        refusals=newest.refusals.without_reasons(),
        reached=newest.reached,
        raised_until=newest.raised_until,
    )
