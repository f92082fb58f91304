"""A job that begins with weights of another run or of a file (`training.init_from`): once, in its version 0.

The first server takes them before it saves version 0. That checkpoint has them, and each later server goes on from a
checkpoint (docs/decisions/0085).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy.typing as npt

from doll.model.flat_model import FlatModel
from doll.model.initial_weights import WeightMatch, match
from doll.ps.checkpointing import encode_snapshot
from doll.ps.engine.assignment import first_snapshot
from doll.ps.start import Start, engine_settings
from doll.storage.checkpoints import Checkpoint
from doll.storage.weight_sources import read_source

if TYPE_CHECKING:
    from doll.config import JobConfig


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

    Args:
        source: as `InitReport.source`.
    """
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
