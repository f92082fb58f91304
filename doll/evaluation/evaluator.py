"""The evaluator: follows a job's updates, measures published weights on held-out samples, and says what it found.

Order of its effects, and what a crash between any two does: 1. measure a version; 2. append it to `evaluations.csv`;
3. publish `Evaluated` and a `Metric`. A crash after 1 loses a number that the next incarnation measures again; after 2
the topic lacks one row of the file. `updates.csv` is rebuilt from the topic by each incarnation.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from doll import telemetry
from doll.errors import BlobError, CheckpointError, ServiceUnavailableError
from doll.evaluation.heldout import HeldOut, HeldOutError
from doll.model import FlatModel, build
from doll.monitor.csv_file import CsvFile, read_rows
from doll.monitor.history import History
from doll.records import AnyRecord
from doll.storage.blobs import Blobs, decode_blob, decode_latest, latest_key, weights_key
from doll.task import load_task

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from doll.config import JobConfig

    CheckpointedWeights = Callable[[FlatModel], tuple[int, npt.NDArray[np.float32]] | None]

log = telemetry.get_logger(__name__)


class Evaluation(NamedTuple):
    """Held-out error of one version."""

    term: int
    version: int
    error: HeldOutError
    seconds: float
    time_s: float


class Evaluator:
    """Keeps the history, measures versions. It reads Redis; it publishes nothing itself.

    Args:
        blobs: where weights are published; its calls may raise `ServiceUnavailableError`: that round is then left out.
        checkpointed: reads (version, weights) of the newest checkpoint, for a last version whose blob is gone.
        run_folder: gets `updates.csv` and `evaluations.csv`.
        after_term: terms up to this one are of earlier runs, see `History`.

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
        self._model = build(config, task)
        self._held_out = HeldOut(task, config.evaluation.max_samples)
        self._redis_unavailable = False
        self._last: tuple[int, int] | None = None
        self.history = History(after_term=after_term)
        run_folder.mkdir(parents=True, exist_ok=True)
        self._restore(run_folder / "evaluations.csv")
        self._updates_file = CsvFile(run_folder / "updates.csv", self.history.updates)
        self._evaluations_file = CsvFile(run_folder / "evaluations.csv", self.history.evaluations)
        if not len(self._held_out):
            log.info("no_held_out_samples", hint="only prequential error is shown; give the task a holdout()")

    def _restore(self, path: Path) -> None:
        if not path.exists():
            return
        for row in read_rows(path):
            whole = (row.get("term", math.nan), row.get("version", math.nan))
            if {"time_s", "loss"} <= row.keys() and all(map(math.isfinite, whole)):
                self.history.evaluated(
                    time_s=row["time_s"],
                    term=int(row["term"]),
                    version=int(row["version"]),
                    loss=row["loss"],
                    accuracy=row.get("accuracy"),
                )

    @property
    def has_held_out(self) -> bool:
        return len(self._held_out) > 0

    def feed(self, records: list[AnyRecord]) -> None:
        """Take in records of the `updates` topic and bring the files up to them."""
        changed = [self.history.feed(record) for record in records]
        self._updates_file.sync(changed=any(changed))
        if any(changed):
            self._evaluations_file.sync(changed=True)

    def evaluate_newest(self) -> Evaluation | None:
        """Measure the newest published weights; None when they are measured already, or cannot be had now."""
        if not self.has_held_out:
            return None
        try:
            pointer = self._blobs.get(latest_key(self._config.job))
            if pointer is None:
                return None
            latest = decode_latest(pointer)
            if (latest.term, latest.version) == self._last or latest.term < self.history.term:
                return None
            if not self.history.is_current(latest.term):
                return None  # Redis still has the weights of the run before
            weights = self._fetch(latest.key, latest.version)
        except ServiceUnavailableError as exc:
            self._log_redis_state(away=str(exc))
            return None
        except BlobError as exc:
            log.warning("blob_refused", reason=str(exc))
            return None
        self._log_redis_state(away="")
        return None if weights is None else self._measure(latest.term, latest.version, weights)

    def evaluate_final(self, term: int, version: int) -> Evaluation | None:
        """Measure exactly `version`, the last one: from Redis, else from the checkpoint that must hold it.

        None when there is nothing to measure on, it is measured already, or neither has it (logged).
        """
        if not self.has_held_out or self._last == (term, version):
            return None
        try:
            weights = self._fetch(weights_key(self._config.job, term, version), version)
        except (ServiceUnavailableError, BlobError) as exc:
            log.warning("final_weights_not_in_redis", reason=str(exc))
            weights = None
        if weights is None:
            try:
                stored = self._checkpointed(self._model)
            except CheckpointError as exc:
                log.warning("checkpoint_refused", reason=str(exc))
                stored = None
            if stored is None or stored[0] != version:
                log.warning("final_weights_not_found", version=version, checkpoint=stored and stored[0])
                return None
            weights = stored[1]
        return self._measure(term, version, weights)

    def _fetch(self, key: str, version: int) -> npt.NDArray[np.float32] | None:
        data = self._blobs.get(key)
        if data is None:
            return None
        return decode_blob(data, job=self._config.job, kind="w", version=version, numel=self._model.flat.numel())

    def _measure(self, term: int, version: int, weights: npt.NDArray[np.float32]) -> Evaluation:
        started_s = time.monotonic()
        self._model.load_weights(weights)
        error = self._held_out.evaluate(self._model.module)
        self._last = (term, version)
        found = Evaluation(term, version, error, time.monotonic() - started_s, time.time())
        self.history.evaluated(
            time_s=found.time_s, term=term, version=version, loss=error.loss, accuracy=error.accuracy
        )
        self._evaluations_file.sync()
        return found

    def _log_redis_state(self, away: str) -> None:
        if bool(away) == self._redis_unavailable:
            return
        self._redis_unavailable = bool(away)
        if away:
            log.warning("redis_unavailable", reason=away, hint="held-out evaluation goes on when it is back")
        else:
            log.info("redis_available")
