"""The errors that DOLL raises, by what the caller can do about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from doll.redaction import redacted


class DollError(Exception):
    """The base of all errors that DOLL raises. The command line prints it and exits with `exit_code`.

    URLs in its text show no credentials.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(DollError):
    """The job file, an override or a command-line value is invalid."""

    exit_code = 2


class ServiceUnavailableError(DollError):
    """Kafka, Redis or a tool that starts them is not available: start it, or correct the address."""


class RecordError(DollError):
    """Bytes from a topic are not a control record of this schema: they are counted and ignored."""


class SchemaVersionError(RecordError):
    """A control record of another schema version: another release of DOLL wrote it."""


class BlobError(DollError):
    """A blob of weights or gradients is missing, damaged, or belongs to another job or version."""


class NotFiniteError(BlobError):
    """A blob is whole, and a value in it is NaN or infinite: who computed it is at fault, not the way it came."""


class SampleError(DollError):
    """A record is not a sample of the task: it is dead-lettered with this message as the reason."""


class BadRecordsError(SampleError):
    """Some records of a `Task.decode_many` are not samples of the task.

    Attributes:
        positions: where they are in the values of that call.
    """

    def __init__(self, positions: Iterable[int]) -> None:
        self.positions = tuple(int(position) for position in positions)
        super().__init__(f"{len(self.positions)} bad records")


class SkipRecord(DollError):
    """A record that the task does not learn from, for this reason: it is counted, and is no dead letter."""


class RetryLater(DollError):
    """A task cannot decode a batch now, for this reason, and may be able to later: the worker waits and tries again."""


class TaskError(DollError):
    """The task or its model has failed, and a restart would fail again."""

    exit_code = 2


class BadStreamError(DollError):
    """Too many records of the stream are refused: the source or the task must be corrected."""

    exit_code = 2


class CheckpointError(DollError):
    """A checkpoint cannot be read, or belongs to another job or model."""


class VersionUnknownError(CheckpointError):
    """No checkpoint is kept of the version that was asked for, or nothing has its name."""

    exit_code = 2


class FencedError(DollError):
    """A newer process has taken over: exit, and write nothing more."""


class RolledBackError(DollError):
    """The model has a part of some batches that cannot be completed: exit; the next process starts from the
    checkpoint."""


class IllegalEventError(DollError):
    """An event, or an answer of a policy, that is a bug. The engine's state is invalid after it: exit; the next process
    starts from the checkpoint."""


class InfeasiblePlanError(DollError):
    """Deadline, error target and budget cannot be met together.

    Attributes:
        constraint: the binding one: "deadline", "budget", "error", "risk" or "stability"; "" if unknown.
        nearest: for each constraint, the nearest feasible value, all else equal; names have units.
    """

    exit_code = 3

    def __init__(self, message: str, *, constraint: str = "", nearest: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.constraint = constraint
        self.nearest: dict[str, float] = dict(nearest or {})


class DataLossError(DollError):
    """Records were deleted from Kafka before they were learned, and `data.on_data_loss` is stop."""

    exit_code = 4


class AuditError(DollError):
    """The audit failed: an offset is missing or was applied twice."""

    exit_code = 4
