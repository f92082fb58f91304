"""The number of batches and records of each partition in a checkpoint, read from the engine's state."""

from __future__ import annotations

import msgspec

from doll.config import JobConfig
from doll.errors import CheckpointError
from doll.records.bounds import Grid, ends_of
from doll.records.rollbacks import Rollback


class SnapshotCounts(msgspec.Struct, frozen=True):
    """The fields of the engine's snapshot that the ledger needs. Other fields are ignored."""

    version: int
    applied: tuple[int, ...]  # for each partition, the number of batches in the model, always the first ones
    origins: tuple[int, ...]  # for each partition, the offset at which its first batch begins
    records_per_batch: int
    generation: int = 0
    samples_id: str = ""  # Kafka's id of the samples topic; "" if the broker has no ids
    run_id: str = ""  # id of the run; "" in a checkpoint of an earlier release
    left_out: tuple[int, ...] = ()  # for each partition, records left out by cuts of these batches; (): no cuts
    earlier_grids: tuple[Grid, ...] = ()  # grids before the present one, which `applied` and `origins` belong to
    rollbacks: tuple[Rollback, ...] = ()  # in chronological order

    @property
    def first_offsets(self) -> tuple[int, ...]:
        """The offset at which the job began, for each partition."""
        first = self.earlier_grids[0].origins if self.earlier_grids else self.origins
        return first + (0,) * (len(self.origins) - len(first))

    @property
    def read_until(self) -> tuple[int, ...]:
        """The offset after the last record that the model has learned, for each partition."""
        return ends_of(self.origins, self.records_per_batch, self.applied, self.left_out)


def decode_counts(state: bytes) -> SnapshotCounts | None:
    """Return the counts in an engine's state; None if the state does not contain them."""
    try:
        return msgspec.msgpack.decode(state, type=SnapshotCounts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read_counts(config: JobConfig, state: bytes) -> SnapshotCounts:
    """Return the counts of each partition in the engine's state of a checkpoint. The checkpoint may have more
    partitions than the job had at its start. Raise CheckpointError if the state has no counts, fewer partitions than
    the job file, or another number of records per batch."""
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
