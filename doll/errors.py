"""Errors, grouped by what the caller can do about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class DollError(Exception):
    """Root of all errors that DOLL raises on purpose; the command line prints it and exits with `exit_code`."""

    exit_code: ClassVar[int] = 1


class ConfigError(DollError):
    """The job file, an override or a command-line value is wrong: fix it."""

    exit_code = 2


class ServiceUnavailableError(DollError):
    """Kafka, Redis or a tool that is needed to start them is not there: start it, or correct the address."""


class RecordError(DollError):
    """Bytes from a topic are not a control record that this build reads: counted and refused."""


class SchemaVersionError(RecordError):
    """A control record of another schema version: another release of DOLL wrote it."""


class BlobError(DollError):
    """A parameter or gradient blob is missing, torn, or belongs to another job or version: refused."""


class SampleError(DollError):
    """One user record is not a sample of the task: it goes to the dead-letter topic with this message as its reason."""


class TaskError(DollError):
    """The task, its model or its learning rate cannot go on: starting the process again would not help."""

    exit_code = 2


class CheckpointError(DollError):
    """A checkpoint is unreadable, or belongs to another job or model."""


class FencedError(DollError):
    """A newer incarnation of this process is alive: stop at once and write nothing more."""


class IllegalEventError(DollError):
    """An event or a policy's answer that the engine must never see (a bug). The engine is of no use after it: end the
    process; its successor starts from the checkpoint."""


class InfeasiblePlanError(DollError):
    """Deadline, error target and budget cannot be met together: relax the constraint that binds.

    Attributes:
        constraint: what binds: "deadline", "budget", "error", "risk" or "stability"; "" where the raiser names none.
        nearest: values that would be feasible, each alone and all else equal, by their name with its unit.
    """

    exit_code = 3

    def __init__(self, message: str, *, constraint: str = "", nearest: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.constraint = constraint
        self.nearest: dict[str, float] = dict(nearest or {})


class DataLossError(DollError):
    """Records that were not learned are gone from Kafka, and the job file does not allow that (`data.on_data_loss`)."""

    exit_code = 4


class AuditError(DollError):
    """The ledger does not balance: an offset is missing or was applied twice."""

    exit_code = 4
