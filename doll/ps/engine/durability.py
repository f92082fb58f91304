"""When a checkpoint is due, and what is durable once it is stored. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from doll.ps.engine.partition_state import Partition


class Durability:
    """The checkpoints of one engine: one at a time is under way.

    Attributes:
        version: of the newest stored checkpoint.
        max_unsaved: of any partition: batches in the model that are not durable.
    """

    def __init__(
        self, partitions: Sequence[Partition], *, version: int, now: float, every_updates: int, every_s: float,
        max_pending_batches: int,
    ) -> None:  # fmt: skip
        self.version = version
        self.max_unsaved = 0
        self._partitions = partitions
        self._every_updates = every_updates
        self._every_s = every_s
        # Half of what a worker may hold: it must not come to a halt only because a checkpoint is not due yet.
        self._crowded = max(1, max_pending_batches // 2)
        self._ordered: tuple[int, tuple[int, ...]] | None = None  # (version, applied) of the checkpoint under way
        self._ordered_at_s = now

    def applied(self, partition: Partition) -> None:
        """A batch of `partition` has been applied."""
        self.max_unsaved = max(self.max_unsaved, partition.unsaved)

    def is_due(self, version: int, now: float, *, final: bool) -> bool:
        """Whether `version`, the current one, is to be stored now; `final`: the job ends with it."""
        unsaved = version - self.version
        if self._ordered is not None or not (unsaved or final):
            return False
        overdue = now - self._ordered_at_s >= self._every_s
        return final or overdue or self.max_unsaved >= self._crowded or unsaved >= self._every_updates

    def order(self, version: int, now: float) -> None:
        """A checkpoint of `version` is being stored."""
        self._ordered = (version, tuple(partition.applied for partition in self._partitions))
        self._ordered_at_s = now

    def stored(self, version: int) -> list[Partition] | None:
        """The partitions that have more durable batches with the checkpoint of `version`; None: it was not ordered."""
        if self._ordered is None or self._ordered[0] != version:
            return None
        applied = self._ordered[1]
        self._ordered = None
        self.version = version
        advanced = []
        self.max_unsaved = 0
        for partition, until in zip(self._partitions, applied, strict=True):
            if until > partition.durable:
                partition.durable = until
                advanced.append(partition)
            self.max_unsaved = max(self.max_unsaved, partition.unsaved)
        return advanced
