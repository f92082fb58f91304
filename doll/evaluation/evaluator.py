"""The evaluator: follows the updates of a job, and measures published weights on held-out samples.

Order of effects: 1. measure a version; 2. append it to `evaluations.csv`; 3. publish `Evaluated` and a `Metric`. If a
crash follows 1, the next process repeats the evaluation; if it follows 2, the topic lacks one row of the file.
`updates.csv` is rebuilt from the topic by each process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from doll import telemetry
from doll.config import JobConfig
from doll.errors import BlobError, CheckpointError, ServiceUnavailableError
from doll.evaluation.heldout import HeldOut, HeldOutError
from doll.evaluation.stored_weights import StoredWeights
from doll.model.flat_model import FlatModel, build
from doll.monitor.state.csv_file import CsvFile, read_rows
from doll.monitor.state.history import History
from doll.records.control import AnyRecord
from doll.storage.blobs import Blobs, decode_blob, decode_latest, latest_key, scope_of, weights_key
from doll.storage.stores import checkpoint_location
from doll.task.base import load_task

log = telemetry.get_logger(__name__)

CheckpointedWeights = Callable[[FlatModel, tuple[int, int] | None], StoredWeights | None]


class Evaluation(NamedTuple):
    """Held-out error of one version."""

    term: int
    version: int
    error: HeldOutError
    seconds: float
    time_s: float


class Evaluator:
    """Keeps the history of a job and measures versions. It publishes nothing.

    Args:
        blobs: where weights are published; a round in which they raise `ServiceUnavailableError` is skipped.
        checkpointed: reads the weights of the newest checkpoint, for a last version whose blob is gone, for models
            with tables, and for the moving average (`training.ema`); None where it is the one whose term and version
            are given.
        run_folder: gets `updates.csv` and `evaluations.csv`.
        after_term: terms up to this one belong to earlier runs, see `History`.

    Raises:
        ConfigError: the task cannot be loaded, or its model or held-out set fails.
        OSError: the run folder cannot be written.
    """

    def __init__(
        self,
        config: JobConfig,
        blobs: Blobs,
        checkpointed: CheckpointedWeights,
        run_folder: Path,
        *,
        after_term: int = 0,
    ) -> None:
        self._config = config
        self._blobs = blobs
        self._checkpointed = checkpointed
        task = load_task(config)
        self._model = build(config, task, with_rows=False)
        # Rows of tables and the average are published with checkpoints only.
        self._reads_checkpoints = self._model.tables is not None or config.training.evaluates_average
        if config.training.evaluates_average:
            log.info("evaluates_the_average", hint="training.ema.evaluate: false measures the weights")
        self._held_out = HeldOut(task, config.evaluation.max_samples)
        self._run_folder = run_folder
        self._redis_unavailable = self._reported_no_checkpoint = False
        self._last: tuple[int, int] | None = None
        self.history = History(after_term=after_term)
        run_folder.mkdir(parents=True, exist_ok=True)
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
    def _scope(self) -> str:
        """What the blobs of this run are named by."""
        return scope_of(self._config.job, self.history.run_id)

    @property
    def has_held_out(self) -> bool:
        return len(self._held_out) > 0

    def feed(self, records: list[AnyRecord]) -> None:
        """Process records of the `updates` topic, and update the files."""
        changed = [self.history.feed(record) for record in records]
        self._updates_file.sync(changed=any(changed))
        if any(changed):
            self._evaluations_file.sync(changed=True)

    def evaluate_newest(self) -> Evaluation | None:
        """Measure the newest published weights; None if they have been measured, or are not available now."""
        if not self.has_held_out:
            return None
        if self._reads_checkpoints:
            return self._evaluate_checkpoint()
        try:
            pointer = self._blobs.get(latest_key(self._scope))
            if pointer is None:
                return None
            latest = decode_latest(pointer)
            if (latest.term, latest.version) == self._last or latest.term < self.history.term:
                return None
            if not self.history.is_current(latest.term):
                return None  # Redis still has the weights of an earlier run
            weights = self._fetch(latest.key, latest.version)
        except ServiceUnavailableError as exc:
            self._log_redis_state(error=str(exc))
            return None
        except BlobError as exc:
            log.warning("blob_refused", reason=str(exc))
            return None
        self._log_redis_state(error="")
        return None if weights is None else self._measure(latest.term, latest.version, weights)

    def _evaluate_checkpoint(self) -> Evaluation | None:
        try:
            stored = self._checkpointed(self._model, self._last)
        except CheckpointError as exc:
            log.warning("checkpoint_refused", reason=str(exc))
            return None
        if stored is None and self._last is None and self.history.version > 0:
            self._log_no_checkpoint()
        if stored is None or (stored.term, stored.version) == self._last or stored.term < self.history.term:
            return None
        return self._measure_stored(stored) if self.history.is_current(stored.term) else None

    def evaluate_final(self, term: int, version: int) -> Evaluation | None:
        """Measure the last version, from Redis, else from the checkpoint.

        None if there are no held-out samples, it has been measured, or neither has it (which is logged).
        """
        if not self.has_held_out or self._last == (term, version):
            return None
        if not self._reads_checkpoints:
            try:
                weights = self._fetch(weights_key(self._scope, term, version), version)
            except (ServiceUnavailableError, BlobError) as exc:
                log.warning("final_weights_not_in_redis", reason=str(exc))
                weights = None
            if weights is not None:
                return self._measure(term, version, weights)
        try:
            stored = self._checkpointed(self._model, None)
        except CheckpointError as exc:
            log.warning("checkpoint_refused", reason=str(exc))
            stored = None
        if stored is None or stored.version != version:
            log.warning("final_weights_not_found", version=version, checkpoint=stored and stored.version)
            return None
        return self._measure_stored(stored._replace(term=term))

    def _fetch(self, key: str, version: int) -> npt.NDArray[np.float32] | None:
        data = self._blobs.get(key)
        if data is None:
            return None
        return decode_blob(data, job=self._scope, kind="w", version=version, numel=self._model.flat.numel())

    def _measure(self, term: int, version: int, weights: npt.NDArray[np.float32]) -> Evaluation:
        self._model.load_weights(weights)
        return self._evaluate(term, version)

    def _measure_stored(self, stored: StoredWeights) -> Evaluation:
        stored.load_into(self._model)
        return self._evaluate(stored.term, stored.version)

    def _evaluate(self, term: int, version: int) -> Evaluation:
        started_s = time.monotonic()
        error = self._held_out.evaluate(self._model.module)
        self._last = (term, version)
        evaluation = Evaluation(term, version, error, time.monotonic() - started_s, time.time())
        grown = self.history.evaluated(
            time_s=evaluation.time_s, term=term, version=version, loss=error.loss, metrics=error.metrics
        )
        self._evaluations_file.sync(changed=grown)
        return evaluation

    def _log_no_checkpoint(self) -> None:
        """A server has one before its first update: it is elsewhere."""
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
