"""The assignment: which worker serves which partition of the samples topic. Pure.

In a new job, partition p is served by worker p modulo the number of workers. The assignment is in every checkpoint
(`EngineSnapshot.assignment`), and a resumed engine serves by that; for another number of workers it moves a few.
"""

from __future__ import annotations

from collections.abc import Sequence

from doll.ps.engine.partition_state import Partition


def first_assignment(num_partitions: int, num_workers: int) -> tuple[int, ...]:
    """The worker of each partition of a new job."""
    return tuple(number % num_workers for number in range(num_partitions))


def reassigned(current: Sequence[int], num_workers: int) -> tuple[int, ...]:
    """The assignment to `num_workers` workers with the fewest moves by which no worker has two more than another.

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
