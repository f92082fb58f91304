"""The assignment: which worker serves which partition of the samples topic. Pure.

Control records name the worker alone, so each worker serves one partition: in a new job worker n serves partition n.
The assignment is in every checkpoint (`EngineSnapshot.assignment`), and a resumed engine serves by that.
"""

from __future__ import annotations

from collections.abc import Sequence

from doll.ps.engine.partition_state import Partition


def first_assignment(num_workers: int) -> tuple[int, ...]:
    """The worker of each partition of a new job."""
    return tuple(range(num_workers))


def partitions_by_worker(assignment: Sequence[int], partitions: Sequence[Partition]) -> list[Partition]:
    """The partition that each worker serves, in the order of the workers.

    Raises:
        ValueError: `assignment` does not name each worker once.
    """
    if sorted(assignment) != list(range(len(partitions))):
        raise ValueError(f"expected each of {len(partitions)} workers once, got {list(assignment)}")
    served = dict(zip(assignment, partitions, strict=True))
    return [served[number] for number in range(len(partitions))]
