"""What all checkpoint stores share: names, whose a checkpoint must be, who may save, which one is the newest whole."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from doll import telemetry
from doll.config.fingerprint import differences, parse, refused_changes
from doll.errors import CheckpointError, FencedError
from doll.storage.checkpoints import Checkpoint, DamagedError, decode_checkpoint

log = telemetry.get_logger(__name__)

_READ_ATTEMPTS: Final = 5  # a running server may delete what a tool has just listed
_CHECKPOINT: Final = re.compile(r"checkpoint-(\d{8,})-(\d{10,})\.doll")
_CLAIM: Final = re.compile(r"term-(\d+)\.claim")
_OF_TERM: Final = re.compile(r"term-(\d+)\.")
KEPT_CLAIMS: Final = 8


class BaseCheckpointStore(ABC):
    """Common part of `CheckpointStore`s.

    Attributes:
        location: of the store, for messages.

    Args:
        keep: newest checkpoints that are kept, at least 2, so that a damaged one has a predecessor.
    """

    def __init__(self, job: str, location: str, keep: int) -> None:
        if keep < 2:
            raise ValueError(f"expected keep >= 2, got {keep}")
        self._job = job
        self.location = location
        self._keep = keep

    @abstractmethod
    def versions(self) -> list[tuple[int, int]]:
        """(term, version) of each checkpoint held, oldest first."""

    @abstractmethod
    def _read(self, term: int, version: int) -> bytes:
        """The bytes of a checkpoint.

        Raises:
            FileNotFoundError: it was deleted since it was listed.
            CheckpointError: it cannot be read.
        """

    def load_newest(self, fingerprint: str | None) -> Checkpoint | None:
        """The newest checkpoint that is whole, past damaged ones (with a warning); None without any checkpoint.

        Raises:
            CheckpointError: it belongs to another job or fingerprint, none of them is whole, or they cannot be read.
        """
        for _ in range(_READ_ATTEMPTS):
            with suppress(FileNotFoundError):
                return self._newest_whole(fingerprint)
        raise CheckpointError(
            f"checkpoints vanish from {self.location} while they are read: is something else deleting them?"
        )

    def _newest_whole(self, fingerprint: str | None) -> Checkpoint | None:
        versions = self.versions()
        for term, version in reversed(versions):
            name = checkpoint_name(term, version)
            try:
                checkpoint = decode_checkpoint(self._read(term, version))
                if (checkpoint.term, checkpoint.version) != (term, version):
                    raise DamagedError(f"it holds term {checkpoint.term}, version {checkpoint.version}: renamed")
            except DamagedError as exc:
                log.warning("checkpoint_damaged", file=name, error=str(exc), hint="using the one before it")
                continue
            check_owner(checkpoint, job=self._job, fingerprint=fingerprint, location=f"{self.location}/{name}")
            return checkpoint
        if versions:
            raise CheckpointError(
                f"none of the {len(versions)} checkpoints in {self.location} is whole: restore one from a backup, or "
                "move them away to start the job over"
            )
        return None

    def _check_owner(self, checkpoint: Checkpoint) -> None:
        """Refuse to save another job's checkpoint.

        Raises:
            CheckpointError: it is.
        """
        check_owner(checkpoint, job=self._job, fingerprint=None, location=self.location)

    def _refuse_if_superseded(
        self, checkpoint: Checkpoint, newest_term: int, versions: Iterable[tuple[int, int]]
    ) -> None:
        """Return if `checkpoint` may be saved: its term is the newest one, and has not saved a higher version.

        Raises:
            FencedError: a higher term has been claimed.
            CheckpointError: this term has saved a higher version.
        """
        if newest_term > checkpoint.term:
            raise FencedError(
                f"parameter server term {checkpoint.term} is over: term {newest_term} has claimed {self.location}; "
                "this process must stop"
            )
        last = max((version for term, version in versions if term == checkpoint.term), default=0)
        if checkpoint.version < last:
            raise CheckpointError(
                f"expected version {last} or later of term {checkpoint.term}, got {checkpoint.version}"
            )


def check_owner(checkpoint: Checkpoint, *, job: str, fingerprint: str | None, location: str) -> None:
    """Refuse a checkpoint that another job, or another model of the same job, has written.

    Raises:
        CheckpointError: names both and says what to do.
    """
    if checkpoint.job != job:
        raise CheckpointError(
            f"{location}: expected a checkpoint of job {job!r}, got one of job {checkpoint.job!r}: give each job its "
            "own checkpoint.folder"
        )
    if fingerprint is None or fingerprint == checkpoint.fingerprint:
        return
    saved, wanted = parse(checkpoint.fingerprint), parse(fingerprint)
    if refused := refused_changes(saved, wanted):
        raise CheckpointError(
            f"{location}: {refused}: a run cannot be resumed with these changes (docs/operations.md, Resuming a run, "
            "lists those that it can); undo them, or rename the job to begin a new one"
        )
    log.info("resumed_with_changes", changes=differences(saved, wanted))


def checkpoint_name(term: int, version: int) -> str:
    """Name of a checkpoint in any store; names sort as the checkpoints do."""
    return f"checkpoint-{term:08d}-{version:010d}.doll"


def checkpoints_among(names: Iterable[str]) -> list[tuple[int, int]]:
    """(term, version) of each name that is a checkpoint's, oldest first."""
    return sorted((int(match[1]), int(match[2])) for name in names if (match := _CHECKPOINT.fullmatch(name)))


def claim_name(term: int) -> str:
    """Name of the file that says that `term` is taken. Those of the newest terms are kept: see `is_forgotten`."""
    return f"term-{term:08d}.claim"


def is_forgotten(term: int, newest_term: int) -> bool:
    """Whether the claim of `term` may be deleted, and is therefore no proof that nobody else has had it.

    A server that was suspended between its look and its claim may take a term whose claim was deleted meanwhile. It
    looks again when it has claimed: `newest_term` then tells, since it never falls.
    """
    return term <= newest_term - KEPT_CLAIMS


def old_claims(names: Iterable[str], newest_term: int) -> list[str]:
    """Names of claims, and of what they began from, that say nothing any more."""
    return [name for name in names if (match := _OF_TERM.match(name)) and is_forgotten(int(match[1]), newest_term)]


def claims_among(names: Iterable[str]) -> list[int]:
    """The term of each name that is a claim's."""
    return [int(match[1]) for name in names if (match := _CLAIM.fullmatch(name))]
