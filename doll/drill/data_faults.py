"""Faults in what a job's processes exchange and keep: its streams, its commands, its brokers' logs and its Redis."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final, Protocol

from doll.drill import second_run
from doll.drill.damage import truncate_log
from doll.drill.late_copies import LateCopies
from doll.drill.plan import Fault
from doll.drill.recovery import InjectedFault, PoisonTracker
from doll.drill.stream import SamplesTopic, poison_for
from doll.errors import DollError, ServiceUnavailableError
from doll.kafka import topics
from doll.kafka.reader import Partition
from doll.local.processes import end, tail
from doll.records.control import Grant, Settle
from doll.run.folder import JOB

if TYPE_CHECKING:
    from pathlib import Path

    from doll.config import JobConfig
    from doll.local.stack import Stack

_KEPT_SHARE: Final = 0.7  # of a log's newest segment
_END_S: Final = 90.0


class DrillError(DollError):
    """The job does not recover from a fault, or a replaced process does not exit."""


class Record(Protocol):
    """Notes that a fault is injected now."""

    def __call__(self, role: str, poison: PoisonTracker | None = None) -> InjectedFault: ...


class DataFaults:
    """Injects faults, and follows the faults that last.

    Args:
        copies: of the commands that were sent so far.
        on_offset: called with the offset of a poison record.
    """

    def __init__(
        self,
        config: JobConfig,
        stack: Stack,
        run_folder: Path,
        copies: LateCopies,
        on_offset: Callable[[InjectedFault, int], None],
    ) -> None:
        self._config = config
        self._stack = stack
        self._run_folder = run_folder
        self._on_offset = on_offset
        self._topic = SamplesTopic(config, stack.services, run_folder)
        self._copies = copies
        self._copies.open(stack.services)
        self._lasting: list[tuple[InjectedFault, Callable[[], bool]]] = []  # and whether all of it has been done
        self._second_runs: list[subprocess.Popen[bytes]] = []

    def poll(self, now: float) -> None:
        """Call it several times a second.

        Raises:
            DrillError: a second run has failed.
        """
        self._topic.poll()
        self._copies.poll(now)
        for entry in [entry for entry in self._lasting if entry[1]()]:
            self._lasting.remove(entry)
            entry[0].is_done, entry[0].done_s = True, now

    def close(self) -> None:
        """End what was started. It may be called again."""
        for run in self._second_runs:
            end(run, _END_S)
        self._copies.close()

    def inject(self, fault: Fault, suspended: Collection[str], record: Record, now: float) -> bool | None:
        """Inject the fault; False if its target is not there now, None if it is another kind of fault.

        Args:
            suspended: roles that are frozen or cut off. A request to a frozen service would keep it frozen.
        """
        is_kafka_frozen = any(role == "kafka" or role.startswith("broker-") for role in suspended)
        match fault.kind.action:
            case "truncate":
                return not is_kafka_frozen and self._truncate(fault, record)
            case "lose_tail":
                return not is_kafka_frozen and self._lose_tail(fault, record)
            case "poison" | "bomb":
                return self._poison(fault, record)
            case "late_grants" | "late_settles":
                return self._send_copies(fault, record, now)
            case "delete_streams":
                return "redis" not in suspended and self._delete_streams(fault, record)
            case "second_run":
                return self._start_second_run(fault, record)
            case _:
                return None

    def _truncate(self, fault: Fault, record: Record) -> bool:
        """Delete the records of a stream that are durable in the model."""
        until = self._topic.truncate(fault.worker)
        if until is None:
            return False  # nothing is durable yet, or Kafka does not answer
        record(f"{fault.role} below offset {until}")
        return True

    def _lose_tail(self, fault: Fault, record: Record) -> bool:
        """Kill a broker, and cut off the end of its copy of a partition that another broker leads."""
        assert self._stack.kafka is not None
        nodes = self._stack.kafka.nodes
        samples = self._config.topic("samples")
        try:
            followers = topics.followers(self._config, self._stack.services, samples, fault.worker)
        except ServiceUnavailableError:
            return False
        if not followers or any(node.pid is None for node in nodes):
            return False  # a copy is behind
        broker = fault.broker + 1 if fault.broker + 1 in followers else followers[0]
        nodes[broker - 1].kill()  # `doll up` restarts it
        partition = Partition(samples, fault.worker)
        truncate_log(nodes[broker - 1].log_path.parent, partition, _KEPT_SHARE)
        record(f"broker-{broker} of {partition}")
        return True

    def _poison(self, fault: Fault, record: Record) -> bool:
        """Send records to a stream that cannot be decoded, that would break the model, or that are too long."""

        def send(number_of_records: int, harmless: int, put: Callable[[Callable[[int], None]], None]) -> None:
            injected = record(fault.role, PoisonTracker(fault.worker, number_of_records, harmless))
            put(lambda offset: self._on_offset(injected, offset))

        if fault.kind.action == "bomb":
            send(1, 0, lambda on_offset: self._topic.put_bomb(fault.worker, fault.number, on_offset))
            return True
        poison = poison_for(self._config, fault.number)
        assert poison is not None, "the plan excludes this kind"

        def put(on_offset: Callable[[int], None]) -> None:
            for value in poison.records:
                self._topic.put(fault.worker, value, on_offset)

        send(len(poison.records), poison.harmless, put)
        return True

    def _send_copies(self, fault: Fault, record: Record, now: float) -> bool:
        kind = Grant if fault.kind.action == "late_grants" else Settle
        is_delivered = self._copies.send_later(fault.worker, kind, now + fault.hold_s, now, fault.number)
        if is_delivered is None:
            return False  # no such command has come yet
        self._lasting.append((record(fault.role), is_delivered))
        return True

    def _delete_streams(self, fault: Fault, record: Record) -> bool:
        """Delete the control streams of this job, and nothing else, from Redis."""
        from doll.control.redis_streams import streams_pattern
        from doll.storage.redis_client import delete_keys

        if not delete_keys(self._stack.services, streams_pattern(self._config.job)):
            return False  # Redis does not answer, or nobody has a link through it now
        record(fault.role)
        return True

    def _start_second_run(self, fault: Fault, record: Record) -> bool:
        """Start another run of the job name on this run's Redis; the fault ends when that run has succeeded."""
        folder = self._run_folder / f"second-run-{fault.number}"
        folder.mkdir()
        run = second_run.start(self._run_folder / JOB, folder, self._stack.services.redis)
        self._second_runs.append(run)

        def has_ended() -> bool:
            code = run.poll()
            if code:
                raise DrillError(
                    f"a second run of the job on the same Redis: expected exit code 0, got {code}; the end of "
                    f"its log:\n{tail(folder / 'second-run.log')}"
                )
            return code == 0

        self._lasting.append((record(fault.role), has_ended))
        return True
