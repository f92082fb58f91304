"""What must agree between a checkpoint, the parameter server and its workers, as `key=value` words. Pure.

The batch grid is in it: a batch is identified by its number, so its size cannot change under a running ledger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from doll.config import JobConfig


# Words that older checkpoints do not have: there is nothing to compare with.
_OPTIONAL_KEYS: Final = ("others", "frozen")
_HINTS: Final = {
    "frozen": "build_model() must give the same frozen parameters in every process: load them from one file, or draw "
    "them with torch's own random numbers"
}


def join(
    config: JobConfig, *, parameters: int, buffers: int, shapes: int, others: int | None = None,
    frozen: int | None = None,
) -> str:  # fmt: skip
    """The fingerprint of a job and its model.

    Args:
        parameters: how many trainable numbers the model has; `buffers`: how many floats in its buffers.
        shapes: checksum of the names and shapes of these tensors.
        others: checksum of the names, shapes and types of the other buffers; None where there are none.
        frozen: checksum of the values of frozen parameters; None where there are none.
    """
    job, model = words(config), {"parameters": parameters, "buffers": buffers, "shapes": f"{shapes:08x}"}
    model |= {key: f"{value:08x}" for key, value in (("others", others), ("frozen", frozen)) if value is not None}
    first = {key: job.pop(key) for key in ("job", "task")}
    return " ".join(f"{key}={value}" for key, value in {**first, **model, **job}.items())


def words(config: JobConfig) -> dict[str, str]:
    """The part of a fingerprint that the job file says, without the model."""
    return {
        "job": config.job,
        "task": config.task.cls,
        "workers": str(config.data.workers),
        "batch_size": str(config.data.batch_size),
        "samples_per_record": str(config.data.samples_per_record),
        "optimizer": config.training.optimizer.name,
    }


def parse(fingerprint: str) -> dict[str, str]:
    """The words of a fingerprint by key."""
    return dict(word.partition("=")[::2] for word in fingerprint.split())


def fits(expected: str, got: str) -> bool:
    """Whether what was written with the fingerprint `got`, perhaps by an older build, belongs to `expected`."""
    if expected == got:
        return True
    wanted, found = parse(expected), parse(got)
    return {key: value for key, value in wanted.items() if key in found or key not in _OPTIONAL_KEYS} == found


def difference(expected: str, got: str) -> str:
    """The words in which two fingerprints differ, for an error message."""
    return differences(parse(expected), parse(got))


def differences(expected: dict[str, str], got: dict[str, str]) -> str:
    """As `difference`, of words; empty where they agree."""
    keys = [key for key in {**expected, **got} if expected.get(key) != got.get(key)]
    return ", ".join(
        f"{key}: expected {expected.get(key, 'nothing')}, got {got.get(key, 'nothing')}"
        + (f" ({_HINTS[key]})" if key in _HINTS else "")
        for key in keys
    )
