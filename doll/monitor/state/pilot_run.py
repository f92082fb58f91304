"""The folder of a pilot run: its calibration, and a plan with the constants of the pilot run."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from doll.config import JobConfig, PlanConfig, load
from doll.errors import ConfigError
from doll.monitor.state.calibration import Calibration, Measure, calibrate
from doll.monitor.state.csv_file import read_rows

_JOB: Final = "job.yaml"  # in a run folder


def calibrate_run(folder: Path, measure: Measure | None = None, target_error: float | None = None) -> Calibration:
    """Return the constants of the run in `folder`.

    Args:
        measure: measure of the error. None: the measure of the job.
        target_error: target error in this measure. None: the target of the job, if it has one.

    Raises:
        ConfigError: there is no run, or it has no updates.
        InfeasiblePlanError: the fitted noise floor is above the target and the run did not reach it.
    """
    if not (folder / _JOB).is_file():
        raise ConfigError(f"{folder}: expected a run folder with {_JOB}")
    config = load(folder / _JOB)
    try:
        updates, evaluations = (read_rows(folder / f"{name}.csv") for name in ("updates", "evaluations"))
    except OSError as error:
        raise ConfigError(
            f"{folder}: expected the folder of a run with updates.csv and evaluations.csv: {error}"
        ) from error
    if not updates:
        raise ConfigError(f"{folder / 'updates.csv'}: no updates in it: run the pilot for longer")
    chosen = measure or _measure(config)
    return calibrate(
        updates,
        evaluations,
        group_size=config.group_size,
        batch_size=config.data.batch_size,
        samples_per_record=config.data.samples_per_record,
        measure=chosen,
        target_error=target_error if target_error is not None else _target(config, chosen),
        step_size=_step_size(config),
        # A fixed seed, so that the same run gives the same interval.
        rng=np.random.default_rng(config.seed),
    )


def with_pilot(config: JobConfig | None, section: PlanConfig) -> tuple[PlanConfig, list[str]]:
    """Return the plan with J and the service time of its pilot run, and notes; without a pilot run, the same plan.

    Args:
        config: the job of the plan; relative paths start from its folder.

    Raises:
        ConfigError, InfeasiblePlanError: see `calibrate_run`.
    """
    if section.pilot is None:
        return section, []
    path = config.path(section.pilot) if config is not None else section.pilot
    calibration = calibrate_run(path, section.measure, section.target_error)
    changes: dict[str, object] = {
        "pilot": None, "service_s": section.service_s or calibration.service_s,
        "mean_samples": section.mean_samples or calibration.mean_samples,
    }  # fmt: skip
    notes = []
    interval = calibration.updates_to_target
    if section.updates is None and section.target_error is not None:
        if interval is None:
            raise ConfigError(f"{path}: J cannot be estimated: {calibration.no_fit_reason}")
        changes["updates"] = interval.point
        notes.append(f"J = {interval.point:g} (90 % interval {interval.low:g} .. {interval.high:g}) from {path}")
    if section.mean_samples is None and calibration.mean_samples != 1:
        notes.append(f"{calibration.mean_samples:.4g} samples of each record, from {path}")
    return section.model_copy(update=changes), notes


def _measure(config: JobConfig) -> Measure:
    if config.plan.target_error is None and config.stop.accuracy is None and config.stop.loss is not None:
        return "loss"
    return config.plan.measure


def _target(config: JobConfig, measure: Measure) -> float | None:
    if config.plan.target_error is not None and config.plan.measure == measure:
        return config.plan.target_error
    if measure == "error_rate":
        accuracy = config.stop.accuracy
        return None if accuracy is None or accuracy >= 1 else 1 - accuracy
    return config.stop.loss


def _step_size(config: JobConfig) -> float | None:
    optimizer = config.training.optimizer
    if optimizer.name != "sgd" or config.training.reduction != "mean" or config.training.schedule:
        return None
    return optimizer.lr / (1 - optimizer.momentum)
