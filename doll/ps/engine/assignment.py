"""The assignment: which worker serves which partition of the samples topic. Pure.

The assignment is part of every checkpoint (`EngineSnapshot.assignment`); `doll.ps.engine.moves` changes it in a running
job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from doll.ps.engine.events import EngineSnapshot
from doll.ps.engine.membership import Worker
from doll.ps.engine.partition_state import PartitionState
from doll.ps.engine.settings import EngineSettings

# A move must lower the larger load of the two workers by at least this share of the mean load, so few partitions move.
_LEAST_GAIN: Final = 0.1
# Base load of each partition, as a share of the mean load of a partition, so that idle partitions are spread as well.
_BASE_LOAD: Final = 0.05


def first_assignment(num_partitions: int, num_workers: int) -> tuple[int, ...]:
    """Return the worker of each partition in a new job."""
    return tuple(number % num_workers for number in range(num_partitions))


def reassigned(current: Sequence[int | None], workers: Collection[int]) -> tuple[int, ...]:
    """Return the balanced assignment to these workers that needs the fewest moves. The numbers of partitions of two
    workers differ by at most one.

    Assigning the result again to the same workers moves nothing. `current` may name other workers, or None.

    >>> reassigned((0, 1, 2, 0, 1), range(2))
    (0, 1, 0, 0, 1)
    >>> reassigned((0, 1, 0, 1, None), range(3))
    (0, 1, 0, 1, 2)
    """
    served: dict[int, list[int]] = {worker: [] for worker in sorted(workers)}
    free: list[int] = []
    for partition, owner in enumerate(current):
        (free if owner is None else served.get(owner, free)).append(partition)
    least, more = divmod(len(current), len(served))
    fullest_first = sorted(served, key=lambda worker: (-len(served[worker]), worker))
    room = {worker: least + (rank < more) for rank, worker in enumerate(fullest_first)}
    for worker, partitions in served.items():
        free += partitions[room[worker] :]
        del partitions[room[worker] :]
    free.sort(reverse=True)
    for worker, partitions in served.items():
        while len(partitions) < room[worker]:
            partitions.append(free.pop())
    owners = {partition: worker for worker, partitions in served.items() for partition in partitions}
    return tuple(owners[partition] for partition in range(len(current)))


def reassigned_by_load(current: Sequence[int], workers: Collection[int], loads: Sequence[float]) -> tuple[int, ...]:
    """Return an assignment to these workers that balances the loads of the partitions with few moves.

    Partitions of other workers are assigned first, the largest first, each to the worker with the lowest load. Then
    partitions move from the worker with the highest load to the one with the lowest, as long as a move lowers the
    larger of the two loads by a tenth of the mean. If there are enough partitions, each worker has one. Assigning the
    result again by the same loads moves nothing.

    Args:
        loads: load of each partition, at least 0, in any unit.

    >>> reassigned_by_load((0, 1, 0, 1, 0, 1), range(2), (90, 1, 40, 1, 40, 1))
    (1, 1, 0, 1, 0, 1)
    >>> reassigned_by_load((0, 1, 0, 1), range(2), (90, 1, 1, 1))
    (0, 1, 0, 1)
    """
    base = _BASE_LOAD * (sum(loads) / len(loads) or 1.0)
    weights = [load + base for load in loads]
    owners = list(current)
    served: dict[int, set[int]] = {worker: set() for worker in sorted(workers)}
    totals = dict.fromkeys(served, 0.0)

    def give(number: int, taker: int) -> None:
        owners[number] = taker
        served[taker].add(number)
        totals[taker] += weights[number]

    for number, worker in enumerate(current):
        if worker in served:
            give(number, worker)
    free = [number for number, worker in enumerate(current) if worker not in served]
    for number in sorted(free, key=lambda number: (-weights[number], number)):
        give(number, min(served, key=totals.__getitem__))
    least_gain = _LEAST_GAIN * sum(weights) / len(served)
    givers = set(served)
    while givers:
        giver = min(givers, key=lambda worker: (-totals[worker], worker))
        taker = min(served, key=lambda worker: (totals[worker], worker))
        gap = totals[giver] - totals[taker]
        # The partition whose move makes the two loads most alike.
        number = min(served[giver], key=lambda number: (abs(gap / 2 - weights[number]), number), default=-1)
        gain = min(weights[number], gap - weights[number]) if number >= 0 else 0.0
        if giver == taker or len(served[giver]) < 2 or (gain < least_gain and served[taker]):
            givers.discard(giver)
            continue
        served[giver].discard(number)
        totals[giver] -= weights[number]
        give(number, taker)
    return tuple(owners)


def largest_load(assignment: Sequence[int], loads: Sequence[float]) -> float:
    totals: dict[int, float] = {}
    for worker, load in zip(assignment, loads, strict=True):
        totals[worker] = totals.get(worker, 0.0) + load
    return max(totals.values(), default=0.0)


def first_snapshot(
    settings: EngineSettings, origins: Sequence[int], *, policy: str, generation: int, samples_id: str, run_id: str
) -> EngineSnapshot:
    n, p = settings.num_workers, len(origins)
    return EngineSnapshot(
        version=0, origins=tuple(origins), records_per_batch=settings.records_per_batch, applied=(0,) * p,
        assignment=first_assignment(p, n), sessions=(0,) * n, processes=("",) * n, incarnations=(0,) * n,
        restarts=(0,) * n, samples_total=0, elapsed_s=0.0, counters={}, policy=policy, policy_state=None,
        generation=generation, samples_id=samples_id, run_id=run_id,
    )  # fmt: skip


def partitions_by_worker(
    assignment: Sequence[int], partitions: Sequence[PartitionState], num_workers: int
) -> list[dict[int, PartitionState]]:
    """Return the partitions that each worker serves, by number, in the order of the workers."""
    served: list[dict[int, PartitionState]] = [{} for _ in range(num_workers)]
    for worker, partition in zip(assignment, partitions, strict=True):
        served[worker][partition.number] = partition
    return served


def for_workers(snapshot: EngineSnapshot, num_workers: int, max_workers: int) -> EngineSnapshot:
    """Return the same state for another number of workers. The new number is the one that `doll scale` has set, unless
    the number in the job file has changed since; then it is the number in the job file. The state of workers with
    higher numbers is kept.

    Args:
        max_workers: number of worker slots, at least `num_workers`.

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
        released=snapshot.released if is_scaled else (),
        assignment=owners if wanted == before else reassigned(owners, range(wanted)),
        by_worker=(snapshot.by_worker or tuple(by_worker)) + (0,) * new,
        sessions=snapshot.sessions + (0,) * new,
        processes=snapshot.processes + ("",) * new,
        incarnations=snapshot.incarnations + (0,) * new,
        restarts=snapshot.restarts + (0,) * new,
    )


def as_they_stand(
    snapshot: EngineSnapshot, partitions: Sequence[PartitionState], owners: Sequence[Worker], workers: Sequence[Worker]
) -> EngineSnapshot:
    """Return `snapshot` with the current state of each partition, its current owner, and the state of each worker."""
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
    """Raise ValueError if the snapshot has no partitions, or has batches of another size."""
    if not snapshot.origins or len(snapshot.origins) != len(snapshot.applied):
        raise ValueError(f"expected partitions, got origins {snapshot.origins} and applied {snapshot.applied}")
    if snapshot.records_per_batch != records_per_batch:
        raise ValueError(f"expected {snapshot.records_per_batch} records per batch, got {records_per_batch}")
