"""Checks that a run with an event log is reproduced bit by bit: each term's log, with a new engine and updater."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from doll.errors import DollError
from doll.ps.engine.events import EngineSnapshot
from doll.ps.event_log import read_log, replay
from doll.storage.checkpoints import Checkpoint, checksum_of, decode_checkpoint

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.ps.model.updater import ModelParts


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay: the field `replay` of `report.json`.

    Attributes:
        terms: number of replayed logs.
        versions: number of versions that the replay has made.
        checkpoints: number of compared checkpoints: the first one of each term, and the newest one.
        differences: descriptions of what was not equal; empty if all is equal.
    """

    terms: int
    versions: int
    checkpoints: int
    differences: tuple[str, ...]


class _Replayed:
    """The checksums of the versions that a replay makes, by term and version."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[int, int], str] = {}
        self.states: dict[tuple[int, int], bytes] = {}

    def run(self, config: JobConfig, path: Path, term: int) -> None:
        """Replay one log.

        Raises:
            DollError: as in `check_replay`.
        """

        def note(version: int, parts: ModelParts) -> None:
            self.tensors[term, version] = checksum_of(parts.tensors())

        for checkpoint in replay(config, path, on_update=note):
            self.states[term, checkpoint.version] = checkpoint.state


def check_replay(config: JobConfig, events: Path, newest: Checkpoint | None) -> ReplayResult:
    """Replay the event logs in the folder `events` and compare them with the checkpoints of the run.

    Weights, optimizer state and the engine's state must be equal. A checkpoint that no event has ordered is made on
    SIGTERM and for version 0. If an event has ordered the same version before, only values that change without an
    update may differ: time, counters, and the identities of the workers.

    Args:
        config: the job file that the servers ran with.
        events: folder of the event logs.
        newest: newest checkpoint in the store.
    """
    stored: list[Checkpoint] = []
    differences: list[str] = []
    replayed = _Replayed()
    logs = sorted(path for path in events.glob("*.log") if path.stat().st_size)  # empty: killed at its start
    for path in logs:
        try:
            start, _ = read_log(path)
            if start.checkpoint:
                stored.append(decode_checkpoint(start.checkpoint))
            replayed.run(config, path, start.term)
        except DollError as exc:
            differences.append(f"{path.name}: {exc}")
    if newest is None:
        differences.append("there is no checkpoint to compare with")
    else:
        stored.append(newest)
    for checkpoint in stored:
        differences += _differences(checkpoint, replayed)
    return ReplayResult(len(logs), len(replayed.tensors), len(stored), tuple(differences))


def _differences(checkpoint: Checkpoint, replayed: _Replayed) -> list[str]:
    key = (checkpoint.term, checkpoint.version)
    name = f"version {checkpoint.version} of term {checkpoint.term}"
    if key not in replayed.tensors:
        return [f"the replay does not make {name}, which is in a checkpoint"]
    differences = []
    if replayed.tensors[key] != checksum_of(checkpoint.tensors):
        differences.append(f"the tensors of {name} differ")
    if key in replayed.states and not _is_same_or_later(checkpoint.state, replayed.states[key]):
        differences.append(f"the engine's state of {name} differs")
    return differences


def _is_same_or_later(stored: bytes, ordered: bytes) -> bool:
    if stored == ordered:
        return True
    try:
        ours, theirs = (msgspec.msgpack.decode(state, type=EngineSnapshot) for state in (ordered, stored))
    except msgspec.MsgspecError:
        return False
    later = msgspec.structs.replace(
        ours, elapsed_s=theirs.elapsed_s, counters=theirs.counters, sessions=theirs.sessions,
        processes=theirs.processes, incarnations=theirs.incarnations, restarts=theirs.restarts,
    )  # fmt: skip
    return later == theirs and theirs.elapsed_s > ours.elapsed_s
