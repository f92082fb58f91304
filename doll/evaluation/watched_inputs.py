"""Reads a part of the stream, and reports which features, labels and answers have changed (`drift.inputs`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from doll.config import JobConfig
from doll.errors import CheckpointError, ConfigError
from doll.evaluation.drift import Drift
from doll.evaluation.heldout import HeldOut
from doll.evaluation.input_drift import (
    ANSWER_SAMPLES,
    AnswerWatch,
    Columns,
    InputDrift,
    InputWatch,
    Reference,
    columns_of,
    columns_of_tree,
)
from doll.evaluation.stored_weights import newest_weights
from doll.model.flat_model import FlatModel
from doll.process.files import write_atomically
from doll.task.base import Task
from doll.task.batches import SampleBatch, joined
from doll.telemetry import get_logger

log = get_logger(__name__)

_REFERENCE: Final = "drift_reference.json"
_EVERY_S: Final = 1.0
_AGAIN_S: Final = 30.0  # after a call that failed


class InputSource(Protocol):
    """`doll.evaluation.live_records.LiveRecords`, or samples of a test."""

    @property
    def positions(self) -> Mapping[int, int]: ...
    def begin(self) -> None: ...
    def take(self, task: Task, most: int) -> SampleBatch: ...


class WatchedInputs:
    """The watch of a job with `drift.inputs`. `clock`: Unix time."""

    def __init__(
        self, config: JobConfig, run_folder: Path, task: Task, model: FlatModel, records: InputSource, *,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        assert config.drift is not None
        assert config.drift.inputs is not None
        self._config, self._inputs, self._run_folder = config, config.drift.inputs, run_folder
        self._task, self._model, self._records, self._clock = task, model, records, clock
        self._watch = InputWatch(self._inputs, _read_reference(run_folder / _REFERENCE))
        self._answers = AnswerWatch(self._inputs, self._answer_columns) if self._inputs.answers else None
        self._kept: list[SampleBatch] = []  # of this window, for the answers
        self._begun: tuple[int, Mapping[int, int]] | None = None  # version and positions at the window's begin
        self._count = 0
        self._next_s = -math.inf

    def look(self, term: int, version: int) -> list[Drift]:
        """Take the records that have come since the last call, at most once in a second. Return what has changed.

        Args:
            term, version: those of the newest update.

        Raises:
            ServiceUnavailableError: Kafka does not answer.
        """
        now_s = self._clock()
        if 0 < self._next_s - now_s <= _AGAIN_S:  # unless the clock was set back
            return []
        self._next_s = now_s + _AGAIN_S
        if self._begun is None:
            self._records.begin()
            self._begun = version, dict(self._records.positions)
        samples = self._records.take(self._task, self._inputs.records_per_s)
        self._next_s = now_s + _EVERY_S
        if not samples.num_samples:
            return []
        changes = self._watch.add(columns_of(samples))
        self._count += samples.num_samples
        self._keep(samples)
        if self._count >= self._inputs.window:
            changes += self._compare_answers()
            write_atomically(self._run_folder / _REFERENCE, msgspec.json.encode(self._watch.reference))
        drifts = [self._drift(change, term, version, now_s) for change in changes]
        if self._count >= self._inputs.window:
            self._begun, self._count, self._kept = (version, dict(self._records.positions)), 0, []
        return drifts

    def _keep(self, samples: SampleBatch) -> None:
        """Keep samples for the answers, evenly over the window."""
        missing = ANSWER_SAMPLES * self._count // self._inputs.window - sum(kept.num_samples for kept in self._kept)
        if self._answers is not None and (most := min(missing, samples.num_samples)) > 0:
            self._kept.append(samples.few(most))

    def _compare_answers(self) -> list[InputDrift]:
        if self._answers is None:
            return []
        try:
            return self._answers.compare(joined(self._kept))
        except (CheckpointError, ConfigError) as exc:
            log.warning("answers_not_watched", reason=str(exc))
            return []

    def _answer_columns(self, samples: SampleBatch) -> Columns:
        stored = newest_weights(self._config, self._run_folder, self._model, in_place=True)
        if stored is None:
            return {}
        stored.load_into(self._model)
        try:
            answers = HeldOut(self._task, samples.num_samples, samples).answers(self._model.module)
        finally:
            self._model.restore_buffers()
        columns = (columns_of_tree(name, answer) for name, answer in answers.items())
        return {name: column for part in columns for name, column in part.items()}

    def _drift(self, change: InputDrift, term: int, version: int, now_s: float) -> Drift:
        assert self._begun is not None
        since, begin = self._begun
        if change.is_last:
            log.warning("column_not_watched", column=change.column, reason="it changes all the time",
                        hint="name it in drift.inputs.leave_out")  # fmt: skip
        positions = self._records.positions
        return Drift(
            metric=change.column, detector="stability", before=change.before, after=change.after, since=since,
            version=version, time_s=now_s, term=term, index=change.index,
            offsets=tuple((at, begin.get(at, 0), end) for at, end in sorted(positions.items())),
        )  # fmt: skip


def _read_reference(path: Path) -> Reference | None:
    """Return the reference of an earlier process; None: there is none, or it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Reference)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as exc:
        log.warning(
            "drift_reference_not_read", path=str(path), reason=str(exc), hint="the next window becomes the reference"
        )
        return None
