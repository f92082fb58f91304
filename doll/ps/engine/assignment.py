"""The assignment: which worker serves which partition of the samples topic. Pure.

In a new job, partition p is served by worker p modulo the number of workers. The assignment is in every checkpoint
(`EngineSnapshot.assignment`), and a resumed engine serves by that; for another number of workers it moves a few, and
`doll.ps.engine.moves` does so while a job runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from doll.ps.engine.events import EngineSnapshot
from doll.ps.engine.membership import Worker
from doll.ps.engine.partition_state import Partition


def first_assignment(num_partitions: int, num_workers: int) -> tuple[int, ...]:
    """The worker of each partition of a new job."""
    return tuple(number % num_workers for number in range(num_partitions))


def reassigned(current: Sequence[int], num_workers: int) -> tuple[int, ...]:
    """The assignment to `num_workers` workers with the fewest moves by which no worker has two more than another.

    It is its own: assigned again to as many workers, nothing moves. A partition of a worker from `num_workers` on is
    given to another.

    >>> reassigned((0, 1, 2, 0, 1), 2)
    (0, 1, 0, 0, 1)
    >>> reassigned((0, 1, 0, 1, 0), 3)
    (0, 1, 0, 1, 2)
    """
    served: list[list[int]] = [[] for _ in range(num_workers)]
    free: list[int] = []
    for partition, worker in enumerate(current):
        (served[worker] if worker < num_workers else free).append(partition)
    least, more = divmod(len(current), num_workers)
    fullest_first = sorted(range(num_workers), key=lambda worker: (-len(served[worker]), worker))
    room = {worker: least + (rank < more) for rank, worker in enumerate(fullest_first)}
    for worker, partitions in enumerate(served):
        free += partitions[room[worker] :]
        del partitions[room[worker] :]
    free.sort(reverse=True)
    for worker, partitions in enumerate(served):
        while len(partitions) < room[worker]:
            partitions.append(free.pop())
    owners = {partition: worker for worker, partitions in enumerate(served) for partition in partitions}
    return tuple(owners[partition] for partition in range(len(current)))


def partitions_by_worker(
    assignment: Sequence[int], partitions: Sequence[Partition], num_workers: int
) -> list[dict[int, Partition]]:
    """The partitions that each worker serves, by number, in the order of the workers."""
    served: list[dict[int, Partition]] = [{} for _ in range(num_workers)]
    for worker, partition in zip(assignment, partitions, strict=True):
        served[worker][partition.number] = partition
    return served


def for_workers(snapshot: EngineSnapshot, num_workers: int, max_workers: int) -> EngineSnapshot:
    """The same state for the number of workers of a job file, or for that to which a job was scaled since it began with
    this number. What is known of workers that are left out stays.

    Args:
        num_workers: of the job file.
        max_workers: for how many there is place, at least as many.

    Raises:
        ValueError: the assignment does not name a worker for each partition.
    """
    known, owners = len(snapshot.sessions), snapshot.assignment
    new, before = max(0, max_workers - known), snapshot.num_workers or known
    if len(owners) != len(snapshot.applied) or not all(0 <= worker < known for worker in owners):
        raise ValueError(
            f"expected a worker from 0 to {known - 1} for each of {len(snapshot.applied)} partitions, got "
            f"{list(owners)}"
        )
    is_scaled = snapshot.job_workers == num_workers and before <= max_workers
    wanted = before if is_scaled else num_workers
    by_worker = [0] * known
    for worker, applied in zip(owners, snapshot.applied, strict=True):
        by_worker[worker] += applied
    return msgspec.structs.replace(
        snapshot,
        num_workers=wanted,
        job_workers=num_workers,
        assignment=owners if wanted == before else reassigned(owners, wanted),
        by_worker=(snapshot.by_worker or tuple(by_worker)) + (0,) * new,
        sessions=snapshot.sessions + (0,) * new,
        processes=snapshot.processes + ("",) * new,
        incarnations=snapshot.incarnations + (0,) * new,
        restarts=snapshot.restarts + (0,) * new,
    )


def as_they_stand(
    snapshot: EngineSnapshot, partitions: Sequence[Partition], owners: Sequence[Worker], workers: Sequence[Worker]
) -> EngineSnapshot:
    """`snapshot` with what is known of each partition and of each worker now.

    Args:
        owners: the worker that serves each partition.
    """
    return msgspec.structs.replace(
        snapshot,
        assignment=tuple(worker.number for worker in owners),
        origins=tuple(partition.origin for partition in partitions),
        applied=tuple(partition.applied for partition in partitions),
        leader_epochs=tuple(partition.leader_epoch for partition in partitions),
        left_out=tuple(partition.cuts.before(partition.applied) for partition in partitions),
        by_worker=tuple(worker.applied for worker in workers),
        sessions=tuple(worker.session for worker in workers),
        processes=tuple(worker.process for worker in workers),
        incarnations=tuple(worker.incarnation for worker in workers),
        restarts=tuple(worker.restarts for worker in workers),
    )


def require_fit(snapshot: EngineSnapshot, records_per_batch: int) -> None:
    """
    Raises:
        ValueError: the snapshot has no partitions, or batches of another size.
    """
    if not snapshot.origins or len(snapshot.origins) != len(snapshot.applied):
        raise ValueError(f"expected partitions, got origins {snapshot.origins} and applied {snapshot.applied}")
    if snapshot.records_per_batch != records_per_batch:
        raise ValueError(f"expected {snapshot.records_per_batch} records per batch, got {records_per_batch}")
