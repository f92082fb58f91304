"""Compares the version that got the alias last with the one before, on records that come now, and moves the alias back
if the new one is worse (`versions.live`).

Both versions compute the same records, which neither has learned. The difference of their metrics has a confidence
sequence (`doll.theory.sequences`), so one may look at it each second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np

from doll.config import JobConfig
from doll.errors import ConfigError
from doll.evaluation.heldout import block_means
from doll.evaluation.stored_weights import StoredWeights, newest_weights
from doll.model.flat_model import FlatModel
from doll.storage.stores import open_store
from doll.storage.version_marks import Check, VersionMarks, before
from doll.task.base import Task
from doll.task.batches import SampleBatch
from doll.telemetry import get_logger
from doll.theory.checks import Floats
from doll.theory.sequences import MeanSequence

log = get_logger(__name__)

_FIRST_BLOCKS: Final = 40  # of some samples each, before the first look: their means are nearly normal
_EVERY_S: Final = 1.0
_AGAIN_S: Final = 30.0  # after a call that failed


class RecordSource(Protocol):
    """`doll.evaluation.live_records.LiveRecords`, or samples of a test."""

    def begin(self) -> None: ...
    def take(self, task: Task, most: int) -> SampleBatch: ...


class MovedBack(NamedTuple):
    """A move of the alias from `version` back to version `to`."""

    alias: str
    version: int
    to: int
    reason: str
    time_s: float


class LiveWatch:
    """The watch of a job with `versions.live`. `clock`: Unix time."""

    def __init__(
        self, config: JobConfig, run_folder: Path, task: Task, model: FlatModel, records: RecordSource, *,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        live, gates = config.versions.live, config.versions.gates
        assert live is not None
        assert gates is not None
        self._config, self._live, self._alias = config, live, gates.alias
        self._run_folder, self._task, self._model = run_folder, task, model
        self._records, self._clock = records, clock
        self._store = open_store(config, run_folder)
        self._pair: tuple[int, int] | None = None
        self._weights: tuple[StoredWeights, StoredWeights] | None = None
        self._sequence = MeanSequence(_FIRST_BLOCKS, live.error)
        self._next_s = -math.inf

    def look(self) -> MovedBack | None:
        """Measure the records that have come since the last call, at most once in a second. Return the move if the
        alias was moved back.

        Raises:
            CheckpointError: checkpoints or aliases cannot be read.
            ServiceUnavailableError: Kafka does not answer.
        """
        now_s = self._clock()
        if 0 < self._next_s - now_s <= _AGAIN_S:  # unless the clock was set back
            return None
        self._next_s = now_s + _AGAIN_S
        moved = self._look(now_s)
        self._next_s = now_s + _EVERY_S
        return moved

    def _look(self, now_s: float) -> MovedBack | None:
        pair = self._watched(self._store.read_marks())
        if pair != self._pair:
            self._begin(pair)
            return None
        if pair is None or self._weights is None:
            return None
        samples = self._records.take(self._task, self._live.max_records_per_s)
        if not samples.num_samples:
            return None
        differences = self._differences(samples)
        if differences is None:
            return None
        if np.isfinite(differences).all():
            self._sequence.add(differences)
            low, high = self._sequence.interval()
            if not low > self._live.tolerance:
                return None
            text = f"{self._live.metric} is worse by {low:.3g} to {high:.3g} on live records"
        else:
            text = f"{self._live.metric} is not a finite number on live records"
        return self._move_back(pair, Check("live", False, text), now_s)

    def _watched(self, marks: VersionMarks) -> tuple[int, int] | None:
        """Return the version to watch and the one before; None if people have moved or frozen the alias, or gates have
        not moved it yet."""
        version, earlier = marks.aliases.get(self._alias), marks.aliases.get(before(self._alias))
        if version is None or earlier is None or version == earlier:
            return None
        if self._alias in marks.frozen or self._alias in marks.reasons:
            return None
        verdict = marks.verdict_of(version)
        return (version, earlier) if verdict is not None and verdict.against == earlier else None

    def _begin(self, pair: tuple[int, int] | None) -> None:
        self._pair, self._weights = None, None
        if pair is not None:
            self._weights = self._read(pair[0]), self._read(pair[1])
            self._sequence = MeanSequence(_FIRST_BLOCKS, self._live.error)
            self._records.begin()
        self._pair = pair

    def _read(self, version: int) -> StoredWeights:
        average = self._config.training.evaluates_average
        stored = newest_weights(
            self._config, self._run_folder, self._model, version=version, average=average, in_place=True
        )
        assert stored is not None
        return stored

    def _differences(self, samples: SampleBatch) -> Floats | None:
        """Return by how much the new version is worse in each block of the samples; None: it cannot be computed."""
        assert self._weights is not None
        try:
            older = self._measured(samples, self._weights[1])
        except ConfigError as exc:  # metrics may refuse samples that losses accept
            log.warning("live_records_not_measured", reason=str(exc))
            return None
        try:
            newer = self._measured(samples, self._weights[0])
        except ConfigError as exc:  # or the outputs of a spoiled model
            log.warning("live_records_not_measured", reason=str(exc))
            newer = [math.nan] * len(older)
        pairs = [(a, b) for a, b in zip(newer, older, strict=True) if math.isfinite(b)]
        return self._live.sign * np.array([a - b for a, b in pairs]) if pairs else None

    def _measured(self, samples: SampleBatch, weights: StoredWeights) -> list[float]:
        return block_means(self._task, self._model, weights, samples, self._live.metric)

    def _move_back(self, pair: tuple[int, int], check: Check, now_s: float) -> MovedBack | None:
        version, to = pair
        kept = [version for _, version in self._store.versions()]
        marks = self._store.change_marks(lambda marks: marks.moved_back(self._alias, version, check, kept))
        self._begin(None)
        if marks.aliases.get(self._alias) != to:
            return None
        log.error(
            "version_moved_back", alias=self._alias, version=version, to=to, reason=check.text,
            hint=f"gates leave the alias until `doll versions freeze ... {self._alias} --end`; if training has been "
            f"spoiled too: doll rollback ... --to {to}",
        )  # fmt: skip
        return MovedBack(self._alias, version, to, check.text, now_s)
