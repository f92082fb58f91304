"""Port: which weights a worker computes on. `load` brings into the replica what a grant asks for.

Today a worker computes at exactly the version that its grant names. Policies that allow older versions keep a cache
behind the same call and fetch only where it is too old; those that let a worker see its own steps add them there, on
top of the published weights (docs/decisions/0020).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from doll.errors import BlobError
from doll.records import Grant
from doll.storage.blobs import Blobs, decode_blob
from doll.telemetry import get_logger

if TYPE_CHECKING:
    from doll.consumers.gradient import GradientComputer

log = get_logger(__name__)


class LocalModel(Protocol):
    """The weights of one worker's replica. Not thread-safe: the thread that computes owns it."""

    def load(self, grant: Grant) -> int | None:
        """Bring weights that `grant` allows into the replica.

        Returns:
            The version they are of; None where the blob store does not hold them whole.

        Raises:
            ServiceUnavailableError: the blob store is unreachable, and waiting for it was given up.
        """


class GrantedVersion:
    """`LocalModel` that holds exactly the version that was granted; it is fetched once."""

    def __init__(self, job: str, blobs: Blobs, computer: GradientComputer) -> None:
        self._job = job
        self._blobs = blobs
        self._computer = computer
        self._key: str | None = None  # of the weights in the replica

    def load(self, grant: Grant) -> int | None:
        if self._key == grant.key:
            return grant.version
        blob = self._blobs.get(grant.key)
        if blob is None:
            return None
        numel = self._computer.weights.size
        try:
            weights = decode_blob(blob, job=self._job, kind="w", version=grant.version, numel=numel)
        except BlobError as exc:
            log.warning("weights_refused", key=grant.key, reason=str(exc))
            return None
        self._key = None
        self._computer.load(weights)
        self._key = grant.key
        return grant.version
