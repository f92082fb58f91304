"""Leave records for workers that were killed with their machine: faster than waiting for the end of their lease."""

from __future__ import annotations

from collections.abc import Sequence

from doll.kafka.publisher import Publisher
from doll.provisioner.fleets.processes import Machine
from doll.records.control import AnyRecord, Leave, Welcome


class LeaveReporter:
    """Sends Leave for workers whose machine was killed; the owner of the machine knows it before the lease ends."""

    def __init__(self, publisher: Publisher, topic: str) -> None:
        """
        Args:
            topic: the job's `events`.
        """
        self._publisher = publisher
        self._topic = topic
        self._sessions: dict[str, tuple[int, int]] = {}  # worker and its session, by the name of its machine
        self._reported: set[str] = set()

    def feed(self, record: AnyRecord) -> None:
        """A record of the job: Welcome names the worker of a machine."""
        if isinstance(record, Welcome):
            self._sessions[record.process.partition(":")[0]] = (record.worker, record.session)

    def report(self, machines: Sequence[Machine]) -> None:
        """Send Leave for machines that were killed since the last call."""
        for machine in machines:
            id_ = machine.instance.id
            if machine.killed and machine.instance.ended_s is not None and id_ not in self._reported:
                self._reported.add(id_)
                if id_ in self._sessions:
                    worker, session = self._sessions[id_]
                    leave = Leave(worker=worker, session=session, cause="machine taken")
                    self._publisher.send(self._topic, leave, key=str(worker).encode())
        self._publisher.poll()

    def close(self) -> None:
        self._publisher.close()
