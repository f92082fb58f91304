"""How much of each partition a checkpoint holds, read from the engine's state in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from doll.errors import CheckpointError
from doll.records.bounds import Grid, ends_of
from doll.records.rollbacks import Rollback

if TYPE_CHECKING:
    from doll.config import JobConfig


class SnapshotCounts(msgspec.Struct, frozen=True):
    """The engine's snapshot as far as the ledger needs it; its other fields are ignored."""

    version: int
    applied: tuple[int, ...]  # per partition, the number of batches in the model, always the first ones
    origins: tuple[int, ...]  # per partition, the offset at which its first batch begins
    records_per_batch: int
    generation: int = 0
    samples_id: str = ""  # Kafka's id of the samples topic; "" if the broker has no ids
    run_id: str = ""  # of the run; "" in a checkpoint of an earlier release
    left_out: tuple[int, ...] = ()  # per partition, records that cuts of these batches have left out; (): none
    earlier_grids: tuple[Grid, ...] = ()  # `applied` and `origins` are of the present one
    rollbacks: tuple[Rollback, ...] = ()  # in their order

    @property
    def first_offsets(self) -> tuple[int, ...]:
        """Per partition, the offset at which the job began."""
        first = self.earlier_grids[0].origins if self.earlier_grids else self.origins
        return first + (0,) * (len(self.origins) - len(first))

    @property
    def read_until(self) -> tuple[int, ...]:
        """Per partition, the offset after the last record that the model has learned."""
        return ends_of(self.origins, self.records_per_batch, self.applied, self.left_out)


def decode_counts(state: bytes) -> SnapshotCounts | None:
    """The counts in an engine's state; None if it does not hold them."""
    try:
        return msgspec.msgpack.decode(state, type=SnapshotCounts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read_counts(config: JobConfig, state: bytes) -> SnapshotCounts:
    """How much of each stream a checkpoint with this engine state holds. It may be of more partitions than the job
    began with. Raises CheckpointError if it does not say so, or is of fewer partitions or another batch size than the
    job file."""
    least, per_batch = config.data.num_partitions, config.data.records_per_batch
    try:
        counts = msgspec.msgpack.decode(state, type=SnapshotCounts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(f"the newest checkpoint holds no engine state that this build reads: {exc}") from exc
    num = len(counts.origins)
    if len(counts.applied) != num or num < least or counts.records_per_batch != per_batch:
        raise CheckpointError(
            f"the newest checkpoint is of {len(counts.applied)} partitions with {counts.records_per_batch} records per "
            f"batch, the job file says {least} and {per_batch}: use the job file that the job ran with"
        )
    return counts
