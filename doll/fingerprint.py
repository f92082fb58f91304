"""The fingerprint of a job: what checkpoint, parameter server and workers must agree on, as `key=value` fields. Pure.

It contains the batch size, because batches are identified by their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from doll.config import JobConfig


_HINTS: Final = {
    "frozen": "build_model() must give the same frozen parameters in every process: load them from one file, or draw "
    "them with torch's own random numbers"
}


def make_fingerprint(
    config: JobConfig, *, parameters: int, buffers: int, shapes: int, others: int | None = None,
    frozen: int | None = None, tables: int | None = None,
) -> str:  # fmt: skip
    """The fingerprint of a job and its model.

    Args:
        parameters: number of trainable parameters of the model.
        buffers: number of floats in its buffers.
        shapes: checksum of the names and shapes of these tensors.
        others: checksum of the names, shapes and types of the other buffers; None if there are none.
        frozen: checksum of the values of frozen parameters; None if there are none.
        tables: checksum of the names and shapes of the tables; None if there are none.
    """
    job, model = job_fields(config), {"parameters": parameters, "buffers": buffers, "shapes": f"{shapes:08x}"}
    given = (("others", others), ("frozen", frozen), ("tables", tables))
    model |= {key: f"{value:08x}" for key, value in given if value is not None}
    first = {key: job.pop(key) for key in ("job", "task")}
    return " ".join(f"{key}={value}" for key, value in {**first, **model, **job}.items())


def job_fields(config: JobConfig) -> dict[str, str]:
    """The part of a fingerprint that comes from the job file, without the model."""
    return {
        "job": config.job,
        "task": config.task.cls,
        "workers": str(config.data.workers),
        "batch_size": str(config.data.batch_size),
        "samples_per_record": str(config.data.samples_per_record),
        "optimizer": config.training.optimizer.name,
    }


def parse(fingerprint: str) -> dict[str, str]:
    """The fields of a fingerprint by key."""
    return dict(word.partition("=")[::2] for word in fingerprint.split())


def difference(expected: str, got: str) -> str:
    """The fields in which two fingerprints differ, for an error message."""
    return differences(parse(expected), parse(got))


def differences(expected: dict[str, str], got: dict[str, str]) -> str:
    """As `difference`, for fields; empty if they agree."""
    keys = [key for key in {**expected, **got} if expected.get(key) != got.get(key)]
    return ", ".join(
        f"{key}: expected {expected.get(key, 'nothing')}, got {got.get(key, 'nothing')}"
        + (f" ({_HINTS[key]})" if key in _HINTS else "")
        for key in keys
    )
