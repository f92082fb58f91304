"""The same log makes the same model: an event log through a fresh engine and updater, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from doll.config import JobConfig
from doll.model.flat_model import build, fingerprint
from doll.ps.checkpointing import encode_snapshot
from doll.ps.engine import events as ev
from doll.ps.event_log import read_log
from doll.ps.model.model_parts import ModelParts, make_parts
from doll.ps.model.updater import ContributionBuffer
from doll.ps.start import make_engine
from doll.storage.blobs import blob_info, scope_of
from doll.storage.checkpoints import Checkpoint
from doll.storage.contributions import decode_contribution
from doll.task.base import load_task


def replay(
    config: JobConfig, path: Path, *, on_update: Callable[[int, ModelParts], Any] | None = None
) -> Iterator[Checkpoint]:
    """Each checkpoint that the server of the event log at `path` ordered, in order, bit for bit.

    The last ones may never have been stored, where the server was killed. A checkpoint made on SIGTERM is not among
    them: no event asked for it.

    Args:
        config: the job file that the server ran with.
        on_update: called for the first version and each later one, with its number and the model that is it; the model
            goes on, so copy what is kept.

    Raises:
        RecordError: not an event log of this build.
        DivergedError: the log ends where the model diverged.
        ConfigError: the task does not load.
    """
    start, entries = read_log(path)
    model = build(config, load_task(config))
    job_fingerprint = fingerprint(config, model)
    parts = make_parts(config.training, model)
    updater, tables = parts
    engine = make_engine(config, start, parts)
    contributions = ContributionBuffer(updater, tables)
    scope = scope_of(config.job, engine.run_id)
    if on_update is not None:
        on_update(engine.version, parts)
    for entry in entries:
        if isinstance(entry.event, ev.GradientFetched):
            version = blob_info(entry.gradient).version
            size = updater.weights.size
            decoded = decode_contribution(
                entry.gradient, updater.num_parameters, job=scope, version=version, numel=size,
                tables={} if tables is None else tables.shapes,
            )  # fmt: skip
            contributions.put(entry.event.grant_id, decoded.values, rows=decoded.rows)
        for action in engine.handle(entry.event, entry.now):
            match action:
                case ev.ApplyUpdate():
                    contributions.apply(action)
                    if on_update is not None:
                        on_update(action.version, parts)
                case ev.StoreCheckpoint():
                    yield Checkpoint(
                        job=config.job, fingerprint=job_fingerprint, term=start.term, version=action.version,
                        state=encode_snapshot(action.snapshot), tensors=parts.tensors(),
                    )  # fmt: skip
