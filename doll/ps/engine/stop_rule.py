"""When a job has reached the end that its job file names. Pure."""

from __future__ import annotations

from doll.config import StopConfig
from doll.records.control import Evaluated


def progress_reached(stop: StopConfig, *, updates: int, samples_total: int) -> str | None:
    """Why the job ends after these updates, each of at least one sample, and samples; None: it goes on."""
    if stop.updates is not None and updates >= stop.updates:
        return f"updates: {updates} reached"
    if stop.samples is not None and samples_total >= stop.samples:
        return f"samples: {samples_total} reached"
    return None


def time_reached(stop: StopConfig, elapsed_s: float) -> str | None:
    """Why the job ends after these seconds since its first update with a sample; None: it goes on."""
    if stop.seconds is not None and elapsed_s >= stop.seconds:
        return f"seconds: {elapsed_s:.1f} passed"
    return None


def target_reached(stop: StopConfig, evaluation: Evaluated) -> str | None:
    """Why the job ends with this evaluation; None: it goes on."""
    accuracy, loss, version = evaluation.accuracy, evaluation.loss, evaluation.version
    if stop.accuracy is not None and accuracy is not None and accuracy >= stop.accuracy:
        return f"accuracy: {accuracy:.4f} at version {version} reached {stop.accuracy}"
    if stop.loss is not None and loss <= stop.loss:
        return f"loss: {loss:.4f} at version {version} reached {stop.loss}"
    return None
