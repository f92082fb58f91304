"""One provisioner at a time: two would double the fleet. The newest claim wins; a provisioner with an older one stops.

Claims lie beside the job's checkpoints, and are made as a parameter server makes its own: a file created exclusively,
or an S3 object put on condition that it is not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from doll.errors import FencedError
from doll.storage.stores import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from doll.config import JobConfig
    from doll.storage.checkpoints import CheckpointStore


class Lease:
    """The right to act on the job's fleet, from its making on.

    Raises:
        CheckpointError: where claims are kept cannot be written.
    """

    def __init__(self, claims: CheckpointStore) -> None:
        self._claims = claims
        self.number = claims.claim_term()

    def check(self) -> None:
        """Return while it is still ours.

        Raises:
            FencedError: another provisioner has claimed the job since.
            CheckpointError: where claims are kept cannot be read.
        """
        newest = self._claims.newest_term()
        if newest > self.number:
            raise FencedError(
                f"provisioner {self.number} of this job is over: provisioner {newest} has taken its place; this "
                "process must stop (it leaves all instances as they are)"
            )


def claims_of(config: JobConfig, run_folder: Path) -> CheckpointStore:
    """Where the job's provisioners make their claims: `provision/` beside its checkpoints.

    Raises:
        CheckpointError: it is in S3 and boto3 cannot be set up.
    """
    return open_store(config, run_folder, "provision")
