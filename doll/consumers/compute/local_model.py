"""Port: which weights a worker computes on. `load` brings into the replica what a grant allows.

Policies of exact versions allow one; others the newest and those down to a minimum. Workers that see their own steps
add them there, on top of the published weights (docs/decisions/0020).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from doll.errors import BlobError
from doll.records.control import Grant, NewVersion
from doll.storage.blobs import Blobs, decode_blob
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.consumers.compute.gradient import GradientComputer

log = get_logger(__name__)

_NONE: Final = (-1, -1)  # (term, version)


class LocalModel(Protocol):
    """The weights of one worker's replica. Not thread-safe, except `offer`: the thread that computes owns it."""

    def offer(self, weights: NewVersion) -> None:
        """The server has published these for workers to use: `load` does not keep older ones."""

    def load(self, grant: Grant) -> int | None:
        """Bring weights that `grant` allows into the replica.

        Returns:
            The version they are of; None where the blob store does not hold them whole.

        Raises:
            ServiceUnavailableError: the blob store is unreachable, and waiting for it was given up.
        """


class Refreshed(NamedTuple):
    """What the replica holds now.

    Attributes:
        is_new: it was fetched, and nothing else is in the replica.
        included: of what was fetched: how many batches of this worker's stream it holds.
    """

    version: int
    is_new: bool = False
    included: int = 0


class CachedVersion:
    """`LocalModel` that keeps the version it fetched last, while grants allow it and no newer one was offered."""

    def __init__(self, job: str, blobs: Blobs, computer: GradientComputer) -> None:
        self._job = job
        self._blobs = blobs
        self._computer = computer
        self._cached = _NONE  # in the replica
        self._offered: NewVersion | None = None  # the newest that the server has sent; set by another thread

    def offer(self, weights: NewVersion) -> None:
        before = self._offered
        if before is None or (before.term, before.version) < (weights.term, weights.version):
            self._offered = weights

    def load(self, grant: Grant) -> int | None:
        refreshed = self.refresh(grant)
        return None if refreshed is None else refreshed.version

    def forget(self) -> None:
        """The replica is not what was fetched any more: the next `refresh` fetches."""
        self._cached = _NONE

    def refresh(self, grant: Grant) -> Refreshed | None:
        """As `load`: the newest weights that the worker knows of. What it has is never replaced by older ones."""
        offered = self._offered if self._offered is not None and self._offered.term == grant.term else None
        has, version = self._cached[0] == grant.term, self._cached[1]
        sources: list[Grant | NewVersion] = [grant]
        if offered is not None and offered.version > grant.version:
            sources.insert(0, offered)
        is_allowed = has and grant.min_version <= version <= sources[0].version
        if is_allowed and (offered is None or offered.version <= version):
            return Refreshed(version)
        for source in sources:
            if is_allowed and source.version <= version:
                break
            if self._read(source):
                self._cached = (source.term, source.version)
                return Refreshed(source.version, is_new=True, included=source.included)
        return Refreshed(version) if is_allowed else None

    def _read(self, source: Grant | NewVersion) -> bool:
        blob = self._blobs.get(source.key)
        if blob is None:
            return False
        numel = self._computer.weights.size
        try:
            weights = decode_blob(blob, job=self._job, kind="w", version=source.version, numel=numel)
        except BlobError as exc:
            log.warning("weights_refused", key=source.key, reason=str(exc))
            return False
        self._cached = _NONE
        self._computer.load(weights)
        return True
