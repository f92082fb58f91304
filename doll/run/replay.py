"""`doll replay`: rebuilds a version, bit for bit, from the event log of the parameter server that made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from doll.config import JobConfig, StopConfig, load, parse
from doll.config.fingerprint import difference
from doll.errors import ConfigError, VersionUnknownError
from doll.evaluation.stored_weights import weights_of
from doll.model.flat_model import build, fingerprint
from doll.process.files import refuse_unwritable
from doll.ps.event_log import read_log, replay
from doll.ps.model.updater import ModelParts
from doll.ps.start import Start
from doll.run.export import ExportOptions, write_model
from doll.run.folder import RunFolder
from doll.storage.checkpoints import Checkpoint, checksum_of, decode_checkpoint, resolve_version
from doll.storage.stores import open_store
from doll.task.base import load_task

Tensors = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class ReplayOutcome:
    """A version that was rebuilt.

    Attributes:
        sha256: checksum of all its tensors, including the optimizer state.
        is_kept: whether a checkpoint of the version is kept. If so, its tensors are the same, bit for bit.
    """

    version: int
    term: int
    log: str
    sha256: str
    is_kept: bool
    content: dict[str, Any]

    def text(self) -> str:
        equal = "equal to its checkpoint to the bit" if self.is_kept else "its checkpoint is not kept any more"
        return f"version {self.version} from {self.log} (sha256 {self.sha256[:16]}): {equal}"


class _VersionMade(Exception):
    """Raised with the tensors of the requested version as soon as the model is at this version."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.tensors = tensors


def replay_version(run: RunFolder, to: str, out_folder: Path) -> ReplayOutcome:
    """Rebuild version `to` from the event logs of a run, and write it to `out_folder` in the format of `doll export`.

    Args:
        to: `latest`, a number (the version need not be kept), or an alias.

    Raises:
        VersionUnknownError: no log contains the version.
        ConfigError: the run has no event log, or its checkpoint differs from the rebuilt version.
        RecordError: a log was not written by this build.
        CheckpointError: the checkpoints cannot be read.
    """
    with refuse_unwritable(out_folder):
        out_folder.mkdir(parents=True, exist_ok=True)
    logs = sorted(path for path in (run.path / "events").glob("*.log") if path.stat().st_size)
    if not logs:
        raise ConfigError(
            f"{run.path}: expected event logs in events/, got none: a run keeps them with checkpoint.event_log: true"
        )
    store = open_store(load(run.job), run.path)
    version = int(to) if to.isascii() and to.isdigit() and len(to) < 19 else resolve_version(store, to)
    marks = {term: store.read_head(term, at).fingerprint for term, at in store.versions()}
    # The newest server that made the version: versions of this number by earlier servers are void.
    for path in reversed(logs):
        start, _ = read_log(path)
        begun = decode_checkpoint(start.checkpoint) if start.checkpoint else None
        if begun is not None:
            marks.setdefault(begun.term, begun.fingerprint)
        if begun is not None and begun.version > version:
            continue
        config = parse(start.job, origin=f"{path}: its job file", base_folder=run.path)
        config = config.model_copy(update={"stop": StopConfig()})  # a later session may have another stop rule
        _require_same_job(config, path, marks.get(start.term))
        tensors = _made_again(config, path, version)
        if tensors is None:
            break
        is_kept = any(key[1] == version for key in store.versions())
        checkpoint = store.load_newest(None, version) if is_kept else None
        if checkpoint is not None and checksum_of(checkpoint.tensors) != checksum_of(tensors):
            raise ConfigError(
                f"{path}: version {version} of the log differs from the checkpoint of term {checkpoint.term}: are the "
                "task, the libraries and the kind of processor the same?"
            )
        return _written(config, path, start, version, tensors, out_folder, is_kept=checkpoint is not None)
    raise VersionUnknownError(
        f"{run.path}: expected a version that its event logs make, got {version}: it is above the last one, or was "
        "lost with its server and made again under later numbers"
    )


def _require_same_job(config: JobConfig, path: Path, saved: str | None) -> None:
    """Refuse a job file that differs from the job file of the server that wrote a log, according to its checkpoints.

    Raises:
        ConfigError: the job file differs.
    """
    wanted = fingerprint(config, build(config, load_task(config), with_rows=False))
    if saved is not None and (changed := difference(saved, wanted)):
        raise ConfigError(
            f"{path}: expected the job file that the server of this log ran with; since then was changed: {changed}"
        )


def _made_again(config: JobConfig, path: Path, version: int) -> Tensors | None:
    def note(made: int, parts: ModelParts) -> None:
        if made == version:
            raise _VersionMade({name: np.array(tensor) for name, tensor in parts.tensors().items()})

    try:
        for _ in replay(config, path, on_update=note):
            pass
    except _VersionMade as made:
        return made.tensors
    return None


def _written(
    config: JobConfig, path: Path, start: Start, version: int, tensors: Tensors, out_folder: Path, *, is_kept: bool
) -> ReplayOutcome:  # fmt: skip
    task = load_task(config)
    model = build(config, task, with_rows=False)
    made = Checkpoint(
        job=config.job, fingerprint=fingerprint(config, model), term=start.term, version=version, state=b"",
        tensors=tensors,
    )  # fmt: skip
    content = write_model(
        config, task, model, weights_of(made, model, location=str(path)), out_folder, ExportOptions()
    )  # fmt: skip
    return ReplayOutcome(version, start.term, path.name, checksum_of(tensors), is_kept, content)
