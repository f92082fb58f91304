"""The evaluator: it follows the updates of a job, and measures published weights on held-out samples.

Order of effects: 1. Measure a version. 2. Append it to `evaluations.csv`. 3. Publish `Evaluated` and a `Metric`.
After a crash between 1 and 2, the next process repeats the evaluation. After a crash between 2 and 3, the topic lacks
one row of the file. Each process rebuilds `updates.csv` from the topic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from doll import telemetry
from doll.config import JobConfig
from doll.config.drift import DriftConfig
from doll.errors import BlobError, CheckpointError, ServiceUnavailableError
from doll.evaluation.gate_keeper import gate_keeper
from doll.evaluation.heldout import HeldOut, HeldOutError
from doll.evaluation.live_watch import LiveWatch, MovedBack, RecordSource
from doll.evaluation.stored_weights import Place, StoredWeights, place_of
from doll.evaluation.weight_follower import WeightFollower
from doll.extras import require
from doll.model.flat_model import FlatModel, build
from doll.monitor.state.csv_file import CsvFile, read_rows
from doll.monitor.state.history import History
from doll.records.control import AnyRecord
from doll.storage.blobs import Blobs
from doll.storage.stores import checkpoint_location
from doll.storage.version_marks import Verdict
from doll.task.base import Task, load_task
from doll.task.batches import SampleBatch

if TYPE_CHECKING:
    from doll.evaluation.drift import Drift, DriftWatch
    from doll.evaluation.watched_inputs import InputSource, WatchedInputs

log = telemetry.get_logger(__name__)

_DRIFTS: Final = "drifts.jsonl"  # which each process makes again from the topic
_INPUT_DRIFTS: Final = "input_drifts.jsonl"  # which all processes append to


def _drift_watch(config: DriftConfig, after_term: int) -> DriftWatch:
    """Raise ConfigError if River is not installed, or refuses an argument."""
    require("drift", "drift")
    from doll.evaluation.drift import DriftWatch

    return DriftWatch(config, after_term=after_term)


def _watched_inputs(
    config: JobConfig, run_folder: Path, task: Task, model: FlatModel, records: InputSource
) -> WatchedInputs:
    from doll.evaluation.watched_inputs import WatchedInputs

    return WatchedInputs(config, run_folder, task, model, records)


class Evaluation(NamedTuple):
    """The held-out error of one version."""

    term: int
    version: int
    error: HeldOutError
    seconds: float
    time_s: float


class Evaluator:
    """Keeps the history of a job and measures versions. It publishes nothing.

    Args:
        blobs: store of the published weights. If it raises `ServiceUnavailableError`, the evaluation is skipped.
        run_folder: folder of the checkpoints, unless `checkpoint.folder` is set, and of the files `updates.csv` and
            `evaluations.csv`.
        after_term: terms up to this one belong to earlier runs, see `History`.
        samples_of: returns the held-out samples for the task; None: those of `Task.holdout`.
        live_records: the newest records of the stream; None: the job has no `versions.live`.
        input_records: the same, read on its own; None: the job has no `drift.inputs`.

    Raises:
        ConfigError: the task cannot be loaded, or its model or held-out set fails.
        OSError: the run folder cannot be written.
    """

    def __init__(
        self,
        config: JobConfig,
        blobs: Blobs,
        run_folder: Path,
        *,
        after_term: int = 0,
        samples_of: Callable[[Task], SampleBatch] | None = None,
        live_records: RecordSource | None = None,
        input_records: InputSource | None = None,
    ) -> None:
        self._config = config
        task = load_task(config)
        self._model = build(config, task, with_rows=False)
        average = config.training.evaluates_average
        self._follower = WeightFollower(config, blobs, run_folder, self._model, average=average, after_term=after_term)
        if config.training.evaluates_average:
            log.info("evaluates_the_average", hint="training.ema.evaluate: false measures the weights")
        self._held_out = HeldOut(task, config.evaluation.max_samples, samples_of and samples_of(task))
        self._gate = gate_keeper(config, run_folder, task, self._model, self._held_out)
        self._live = None
        if live_records is not None:
            self._live = LiveWatch(config, run_folder, task, self._model, live_records)
        self._drift = None if config.drift is None else _drift_watch(config.drift, after_term)
        self._inputs = None
        if input_records is not None:
            self._inputs = _watched_inputs(config, run_folder, task, self._model, input_records)
        self._run_folder = run_folder
        self._redis_unavailable = self._reported_no_checkpoint = False
        self._last: Place | None = None
        self.history = History(after_term=after_term)
        run_folder.mkdir(parents=True, exist_ok=True)
        (run_folder / _DRIFTS).unlink(missing_ok=True)
        self._restore(run_folder / "evaluations.csv")
        self._updates_file = CsvFile(run_folder / "updates.csv", self.history.updates)
        self._evaluations_file = CsvFile(run_folder / "evaluations.csv", self.history.evaluations)
        if not len(self._held_out):
            log.info("no_held_out_samples", hint="there is only prequential error; give the task a holdout()")

    def _restore(self, path: Path) -> None:
        if not path.exists():
            return
        no_metrics = {"time_s", "term", "version", "loss", "void"}
        for row in read_rows(path):
            identity = (row.get("term", math.nan), row.get("version", math.nan))
            if {"time_s", "loss"} <= row.keys() and all(map(math.isfinite, identity)):
                self.history.evaluated(
                    time_s=row["time_s"],
                    term=int(row["term"]),
                    version=int(row["version"]),
                    loss=row["loss"],
                    metrics={name: value for name, value in row.items() if name not in no_metrics},
                )

    @property
    def has_held_out(self) -> bool:
        return len(self._held_out) > 0

    def feed(self, records: list[AnyRecord]) -> list[Drift]:
        """Process records of the `updates` topic, and update the files. Return the drifts that these records show."""
        drifts = [] if self._drift is None else [item for record in records for item in self._drift.feed(record)]
        self._append_drifts(_DRIFTS, drifts)
        changed = [self.history.feed(record) for record in records]
        for record in records:
            self._follower.feed(record)
        self._updates_file.sync(changed=any(changed))
        if any(changed):
            self._evaluations_file.sync(changed=True)
        return drifts

    def _append_drifts(self, name: str, drifts: list[Drift]) -> None:
        if drifts:
            with (self._run_folder / name).open("ab") as file:
                file.writelines(msgspec.json.encode(drift) + b"\n" for drift in drifts)

    def evaluate_newest(self) -> Evaluation | None:
        """Measure the newest published weights, or those of the newest checkpoint if the follower reads checkpoints.
        Return None if they were measured before or are not available now, or if there are no held-out samples."""
        if not self.has_held_out:
            return None
        if self._follower.reads_checkpoints:
            return self._evaluate_checkpoint()
        try:
            stored = self._follower.published(self._last)
        except ServiceUnavailableError as exc:
            self._log_redis_state(error=str(exc))
            return None
        except BlobError as exc:
            log.warning("blob_refused", reason=str(exc))
            return None
        self._log_redis_state(error="")
        return None if stored is None else self._measure(stored)

    def judge_newest(self) -> Verdict | None:
        """Judge the newest checkpoint, if the job has gates. Return the verdict; None: there is none, or it was known
        before. While checkpoints cannot be read, the alias stays."""
        if self._gate is None:
            return None
        try:
            return self._gate.look()
        except CheckpointError as exc:
            log.warning("version_not_judged", reason=str(exc))
            return None

    def watch_live(self) -> MovedBack | None:
        """Measure new records with the alias's version and the one before. Return a move back; None: there is none, or
        records, checkpoints or aliases cannot be read now."""
        if self._live is None:
            return None
        try:
            return self._live.look()
        except (CheckpointError, ServiceUnavailableError) as exc:
            log.warning("live_records_not_measured", reason=str(exc))
            return None

    def watch_inputs(self) -> list[Drift]:
        """Compare new records with earlier ones, and return what has changed. While Kafka does not answer, nothing is
        compared."""
        if self._inputs is None:
            return []
        try:
            drifts = self._inputs.look(self.history.term, self.history.version)
        except ServiceUnavailableError as exc:
            log.warning("inputs_not_watched", reason=str(exc))
            return []
        self._append_drifts(_INPUT_DRIFTS, drifts)
        return drifts

    def not_measured(self) -> Evaluation | None:
        """Return the newest version if the task has no held-out samples; None if it was returned before."""
        place = Place(self.history.term, self.history.version)
        if self.has_held_out or not place.version or place == self._last:
            return None
        self._last = place
        return Evaluation(*place, HeldOutError(math.nan, {}), 0.0, time.time())

    def _evaluate_checkpoint(self) -> Evaluation | None:
        try:
            stored = self._follower.checkpointed(self._last)
        except CheckpointError as exc:
            log.warning("checkpoint_refused", reason=str(exc))
            return None
        if stored is None and self._last is None and self.history.version > 0:
            self._log_no_checkpoint()
        if stored is None or place_of(stored) == self._last or stored.term < self.history.term:
            return None
        return self._measure(stored)

    def evaluate_final(self, term: int, version: int) -> Evaluation | None:
        """Measure the last version, from Redis or, if Redis does not have it, from the checkpoint.

        Return None without held-out samples, or if the version was measured before or is not found (which is logged).
        """
        if not self.has_held_out or self._last == (term, version):
            return None
        stored = None
        if not self._follower.reads_checkpoints:
            try:
                stored = self._follower.published_version(term, version)
            except (ServiceUnavailableError, BlobError) as exc:
                log.warning("final_weights_not_in_redis", reason=str(exc))
            if stored is not None:
                return self._measure(stored)
        try:
            stored = self._follower.checkpointed()
        except CheckpointError as exc:
            log.warning("checkpoint_refused", reason=str(exc))
        if stored is None or stored.version != version:
            log.warning("final_weights_not_found", version=version, checkpoint=stored and stored.version)
            return None
        return self._measure(stored._replace(term=term))

    def _measure(self, stored: StoredWeights) -> Evaluation:
        """Measure these weights. Raises ConfigError (`HeldOut.evaluate`) or TaskError (`FlatModel.restore_buffers`)."""
        stored.load_into(self._model)
        term, version = stored.term, stored.version
        started_s = time.monotonic()
        error = self._held_out.evaluate(self._model.module)
        self._model.restore_buffers()  # otherwise the next version is not loaded into a buffer that was replaced
        self._last = Place(term, version)
        evaluation = Evaluation(term, version, error, time.monotonic() - started_s, time.time())
        grown = self.history.evaluated(
            time_s=evaluation.time_s, term=term, version=version, loss=error.loss, metrics=error.metrics
        )
        self._evaluations_file.sync(changed=grown)
        return evaluation

    def _log_no_checkpoint(self) -> None:
        """Warn once that this folder has no checkpoint. The server has saved one, so it must be in another folder."""
        if not self._reported_no_checkpoint:
            self._reported_no_checkpoint = True
            log.warning(
                "no_checkpoint", folder=checkpoint_location(self._config, self._run_folder),
                hint="a model with tables, or an average, is evaluated at its checkpoints: set checkpoint.folder to a "
                "folder that this machine shares with the parameter server, or to s3://bucket/prefix",
            )  # fmt: skip

    def _log_redis_state(self, error: str) -> None:
        if bool(error) == self._redis_unavailable:
            return
        self._redis_unavailable = bool(error)
        if error:
            log.warning("redis_unavailable", reason=error, hint="held-out evaluation resumes when Redis is back")
        else:
            log.info("redis_available")
