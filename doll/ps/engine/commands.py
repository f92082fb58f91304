"""The engine's records for workers: their partitions, their grants, and the weights that the grants name. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from doll.ps.engine.batch_queue import ActiveGrant, left_out_of
from doll.ps.engine.ending import Ending
from doll.ps.engine.events import EngineAction, EngineSnapshot, PublishWeights, RepublishWeights
from doll.ps.engine.membership import Membership, Worker
from doll.records.control import Grant, NewVersion, Welcome
from doll.storage.blobs import scope_of, weights_key


class WorkerCommands:
    """Commands of one engine. Weights are published with the first command that names them."""

    def __init__(
        self, *, job: str, fingerprint: str, term: int, start: EngineSnapshot, members: Membership, ending: Ending,
        takes_sets: bool,
    ) -> None:  # fmt: skip
        """`takes_sets`: consecutive batches of one worker are granted in one message."""
        self._scope = scope_of(job, start.run_id)
        self._fingerprint = fingerprint
        self._term = term
        self._start = start
        self._members = members
        self._ending = ending
        self._takes_sets = takes_sets
        self._published = -1  # the newest version that is in the blob store, by this server

    def welcome(self, worker: Worker, incarnation: int) -> Welcome:
        """The Welcome of this worker, which may have joined before."""
        served = tuple(part.served(self._ending.end_of(at)) for at, part in sorted(worker.queue.partitions.items()))
        return Welcome(
            term=self._term, worker=worker.number, process=worker.process, session=worker.session, served=served,
            fingerprint=self._fingerprint, incarnation=incarnation, samples_id=self._start.samples_id,
            generation=self._start.generation, run_id=self._start.run_id, usual=self._members.usual,
            grid=self._start.grid,
        )  # fmt: skip

    def grants(self, worker: Worker, grants: Sequence[ActiveGrant]) -> Iterator[EngineAction]:
        """Grants of consecutive batches of one worker. One sent again is the same message: its weights still live."""
        size = max(1, len(grants)) if self._takes_sets else 1
        for at in range(0, len(grants), size):
            first, sent = grants[at], grants[at : at + size]
            yield from self.publish(first.version)
            yield Grant(
                term=self._term, worker=worker.number, session=worker.session, first=first.batch,
                grant_ids=tuple(grant.number for grant in sent), batches=tuple(grant.batch_id for grant in sent),
                version=first.version, min_version=first.min_version, key=self._key(first.version),
                included=first.included, left_out=left_out_of(sent),
            )  # fmt: skip

    def offer(self, worker: Worker, version: int) -> Iterator[EngineAction]:
        """Send a version to a worker before a grant names it."""
        yield from self.publish(version)
        yield NewVersion(
            term=self._term, worker=worker.number, version=version, key=self._key(version),
            included=worker.queue.applied,
        )  # fmt: skip

    def publish(self, version: int) -> Iterator[EngineAction]:
        """Each version is published once; an older one is already, or was."""
        if version > self._published:
            self._published = version
            yield PublishWeights(version)

    def republish(self, version: int) -> RepublishWeights:
        """The current version is missing in the blob store."""
        self._published = version
        return RepublishWeights(version)

    def _key(self, version: int) -> str:
        return weights_key(self._scope, self._term, version)
