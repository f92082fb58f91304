"""The assignment: which worker serves which partition of the samples topic. Pure.

In a new job, partition p is served by worker p modulo the number of workers. The assignment is in every checkpoint
(`EngineSnapshot.assignment`), and a resumed engine serves by that.
"""

from __future__ import annotations

from collections.abc import Sequence

from doll.ps.engine.partition_state import Partition


def first_assignment(num_partitions: int, num_workers: int) -> tuple[int, ...]:
    """The worker of each partition of a new job."""
    return tuple(number % num_workers for number in range(num_partitions))


def partitions_by_worker(
    assignment: Sequence[int], partitions: Sequence[Partition], num_workers: int
) -> list[dict[int, Partition]]:
    """The partitions that each worker serves, by number, in the order of the workers.

    Raises:
        ValueError: `assignment` does not name a worker for each partition.
    """
    if len(assignment) != len(partitions) or not all(0 <= worker < num_workers for worker in assignment):
        raise ValueError(
            f"expected a worker from 0 to {num_workers - 1} for each of {len(partitions)} partitions, got "
            f"{list(assignment)}"
        )
    served: list[dict[int, Partition]] = [{} for _ in range(num_workers)]
    for worker, partition in zip(assignment, partitions, strict=True):
        served[worker][partition.number] = partition
    return served
