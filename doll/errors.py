"""The errors that DOLL raises, grouped by what the caller can do about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from doll.redaction import redacted


class DollError(Exception):
    """The base of all errors that DOLL raises. The command line prints it and exits with `exit_code`.

    Credentials are removed from URLs in its message.
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
    """A blob is complete, but a value in it is NaN or infinite. The process that computed it is at fault, not the
    transport."""


class SampleError(DollError):
    """A record is not a sample of the task. It gets a dead letter with this message as the reason."""


class BadRecordsError(SampleError):
    """Some records of a `Task.decode_many` are not samples of the task.

    Attributes:
        positions: indices of the bad records in the values of that call.
    """

    def __init__(self, positions: Iterable[int]) -> None:
        self.positions = tuple(int(position) for position in positions)
        super().__init__(f"{len(self.positions)} bad records")


class SkipRecord(DollError):
    """The task skips a record, for the reason in the message. The record is counted, but gets no dead letter."""


class RetryLater(DollError):
    """The task cannot decode a batch now, but may be able to later: the worker waits and tries again."""


class TaskError(DollError):
    """The task or its model has failed, and a restart would fail again."""

    exit_code = 2


class BadStreamError(DollError):
    """Too many records of the stream are refused: the source or the task must be corrected."""

    exit_code = 2


class CheckpointError(DollError):
    """A checkpoint cannot be read, or it belongs to another job or model."""


class VersionUnknownError(CheckpointError):
    """The requested version has no checkpoint, or no version has the requested name."""

    exit_code = 2


class FencedError(DollError):
    """A newer process has taken over: this process must exit, and must not write anything."""


class RolledBackError(DollError):
    """The model contains parts of some batches that cannot be completed: the process must exit. The next process starts
    from the checkpoint."""


class IllegalEventError(DollError):
    """An event, or an answer of a policy, shows a bug. The engine's state is invalid afterwards: the process must exit.
    The next process starts from the checkpoint."""


class InfeasiblePlanError(DollError):
    """The deadline, the error target and the budget cannot all be met.

    Attributes:
        constraint: violated constraint: "deadline", "budget", "error", "risk" or "stability"; "" if unknown.
        nearest: nearest feasible value of each constraint with the others unchanged; the keys include the unit.
    """

    exit_code = 3

    def __init__(self, message: str, *, constraint: str = "", nearest: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.constraint = constraint
        self.nearest: dict[str, float] = dict(nearest or {})


class DataLossError(DollError):
    """Records were deleted from Kafka before they were learned, and `data.on_data_loss` is `stop`."""

    exit_code = 4


class StageLostError(DollError):
    """A stage of a virtual worker has ended or does not run any more. Its worker therefore ends, too."""

    exit_code = 5


class AuditError(DollError):
    """The audit failed: an offset is missing or was applied twice."""

    exit_code = 4
