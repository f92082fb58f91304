"""Measures each checkpoint, judges it against the version of an alias, and moves the alias (`versions.gates`).

The verdict and the move are one change of the file with the aliases, so the alias never names a version without a
verdict, unless a person has moved it. A gate that ends in between repeats the verdict. Two gates write the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from doll.config import JobConfig
from doll.config.gates import GatesConfig
from doll.errors import ConfigError, VersionUnknownError
from doll.evaluation.gates import Judge, Measured
from doll.evaluation.heldout import HeldOut
from doll.evaluation.stored_weights import StoredWeights, newest_weights
from doll.model.flat_model import FlatModel
from doll.storage.stores import open_store
from doll.storage.version_marks import StoredVersion, Verdict
from doll.task.base import Task
from doll.telemetry import get_logger

log = get_logger(__name__)

_TIMED_AGAIN: Final = 5  # a version that is slow is measured again, in turn with the alias's


class GateKeeper:
    """Judges the newest checkpoint of a job.

    Args:
        model: loaded with each version that is measured.
        clock: Unix time.
    """

    def __init__(
        self, config: JobConfig, gates: GatesConfig, run_folder: Path, task: Task, model: FlatModel, held_out: HeldOut,
        *, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._config, self._gates, self._run_folder = config, gates, run_folder
        self._task, self._model, self._held_out, self._clock = task, model, held_out, clock
        self._store = open_store(config, run_folder)
        self._judge = Judge(gates)
        self._stable: tuple[Measured, StoredWeights] | None = None
        self._seen: tuple[int, int] | None = None

    def look(self) -> Verdict | None:
        """Judge the newest checkpoint; None: it has a verdict already, or there is none.

        Raises:
            CheckpointError: checkpoints or aliases cannot be read.
        """
        stored = self._store.stored()
        if not stored or stored[-1].key == self._seen:
            return None
        newest, marks = stored[-1], self._store.read_marks()
        named = marks.aliases.get(self._gates.alias)
        if marks.verdict_of(newest.version) is not None or named == newest.version:
            self._seen = newest.key
            return None
        try:
            verdict = self._verdict(newest, next((item for item in stored if item.version == named), None))
            self._store.change_marks(
                lambda marks: marks.judged(
                    self._gates.alias, verdict, [version for _, version in self._store.versions()],
                    min_interval_s=self._config.versions.min_interval_s,
                    keeps_before=self._config.versions.live is not None,
                )
            )  # fmt: skip
        except VersionUnknownError as exc:  # a newer checkpoint has replaced it
            log.info("version_not_judged", version=newest.version, reason=str(exc))
            return None
        self._seen = newest.key
        log.info("version_judged", version=verdict.version, passed=verdict.passed, verdict=verdict.text())
        return verdict

    def _verdict(self, newest: StoredVersion, stable: StoredVersion | None) -> Verdict:
        now_s = self._clock()
        if stable is None:
            self._stable = None
        elif self._stable is None or self._stable[0].version != stable.version:
            weights = self._weights(stable)
            self._stable = self._measured(stable, weights, None, with_answers=True), weights
        known = None if self._stable is None else self._stable[0]
        weights = self._weights(newest)
        candidate = self._measured(newest, weights, self._stable, with_answers=False)
        checks = self._judge.weights(candidate, known, now_s)
        if all(check.passed for check in checks):  # the others cost a pass over the held-out samples
            candidate = self._measured(newest, weights, self._stable, with_answers=True)
            if known is not None and self._judge.is_slow(candidate, known):
                candidate, known = self._timed_again(candidate, weights)
            checks += self._judge.answers(candidate, known)
        verdict = self._judge.verdict(candidate, known, checks, now_s)
        if verdict.passed:
            self._stable = candidate, weights
        return verdict

    def _weights(self, item: StoredVersion) -> StoredWeights:
        average = self._config.training.evaluates_average
        weights = newest_weights(
            self._config, self._run_folder, self._model, version=item.version, average=average, in_place=True
        )
        if weights is None:
            raise VersionUnknownError(f"version {item.version} was deleted while it was read")
        return weights

    def _measured(
        self, item: StoredVersion, weights: StoredWeights, stable: tuple[Measured, StoredWeights] | None, *,
        with_answers: bool,
    ) -> Measured:  # fmt: skip
        layout, before = self._model.layout, None if stable is None else stable[1].weights
        tensors, lengths = {}, {}
        old = None if before is None else layout.tensors(before)
        for name, values in layout.tensors(weights.weights).items():
            if values.dtype != np.float32:
                continue
            lengths[name] = float(np.linalg.norm(values))
            if old is not None:
                tensors[name] = float(np.linalg.norm(np.subtract(values, old[name])))
        facts = Measured(
            version=item.version, updates=item.version, size_bytes=self._store.whole_bytes(item), tensors=tensors,
            lengths=lengths,
            newest_event_s=weights.events.newest_ms / 1000 if weights.events.count else None,
        )  # fmt: skip
        return self._answered(facts, weights, stable) if with_answers else facts

    def _timed_again(self, candidate: Measured, weights: StoredWeights) -> tuple[Measured, Measured]:
        """Return both versions with the shortest of a few times that were taken in turn. Stable's first time is of
        another minute, and other processes of the machine make single times long."""
        assert self._stable is not None
        known, stable_weights = self._stable
        old_s = new_s = math.inf
        for _ in range(_TIMED_AGAIN):
            old_s, new_s = min(old_s, self._answers_s(stable_weights)), min(new_s, self._answers_s(weights))
            known, candidate = replace(known, answers_s=old_s), replace(candidate, answers_s=new_s)
            if not self._judge.is_slow(candidate, known):
                break
        self._stable = known, stable_weights
        return candidate, known

    def _answers_s(self, weights: StoredWeights) -> float:
        weights.load_into(self._model)
        try:
            return self._held_out.blocks(self._model.module)[2]
        finally:
            self._model.restore_buffers()

    def _answered(
        self, facts: Measured, weights: StoredWeights, stable: tuple[Measured, StoredWeights] | None
    ) -> Measured:
        weights.load_into(self._model)
        try:
            if len(self._held_out):
                blocks, outputs, seconds = self._held_out.blocks(self._model.module)
                facts = replace(facts, blocks=blocks, outputs=outputs, answers_s=seconds)
        except ConfigError as exc:  # metrics may refuse the outputs of a spoiled model
            return replace(facts, own=str(exc))
        finally:
            self._model.restore_buffers()
        try:
            own = self._task.check(facts, None if stable is None else stable[0])
        except Exception as exc:  # the user's code may raise anything
            own = f"{type(self._task).__name__}.check failed: {type(exc).__name__}: {exc}"
        return replace(facts, own=own or "")


def gate_keeper(
    config: JobConfig, run_folder: Path, task: Task, model: FlatModel, held_out: HeldOut
) -> GateKeeper | None:
    """Return the gate of a job; None: the job has no gates."""
    gates = config.versions.gates
    return None if gates is None else GateKeeper(config, gates, run_folder, task, model, held_out)
