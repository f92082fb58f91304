"""How much of each partition a checkpoint says it holds."""

from __future__ import annotations

import msgspec
import pytest
from doll.config import parse
from doll.errors import CheckpointError
from doll.ledger.snapshot_counts import read_counts
from doll.storage.checkpoints import Checkpoint

CONFIG = parse("job: j\ntask: {class: 'a:B'}\ndata: {workers: 2, batch_size: 4}\n")


def checkpoint(**state: object) -> Checkpoint:
    return Checkpoint(
        job="j", fingerprint="f", term=1, version=3, state=msgspec.msgpack.encode(state), tensors={}
    )  # fmt: skip


def test_what_is_read_of_each_partition_is_its_origin_and_its_batches() -> None:
    state = {"version": 3, "applied": [2, 1], "origins": [10, 0], "records_per_batch": 4, "other": "ignored"}
    counts = read_counts(CONFIG, checkpoint(**state).state)
    assert counts.read_until == (18, 4)
    assert (counts.generation, counts.samples_id) == (0, "")


def test_a_state_that_is_not_the_engines_is_refused() -> None:
    with pytest.raises(CheckpointError, match="holds no engine state"):
        read_counts(CONFIG, checkpoint(version="x").state)


def test_a_checkpoint_of_another_batch_size_is_refused() -> None:
    state = {"version": 3, "applied": [2, 1], "origins": [10, 0], "records_per_batch": 8}
    with pytest.raises(CheckpointError, match="8 records per batch, the job file says 2 and 4"):
        read_counts(CONFIG, checkpoint(**state).state)


def test_a_checkpoint_may_be_of_more_partitions_than_the_job_began_with_and_not_of_fewer() -> None:
    state = {"version": 3, "records_per_batch": 4}
    more = read_counts(CONFIG, checkpoint(applied=[2, 1, 5], origins=[10, 0, 0], **state).state)
    assert more.read_until == (18, 4, 20)
    with pytest.raises(CheckpointError, match="of 1 partitions with 4 records per batch, the job file says 2 and 4"):
        read_counts(CONFIG, checkpoint(applied=[2], origins=[10], **state).state)
    with pytest.raises(CheckpointError, match="of 2 partitions"):
        read_counts(CONFIG, checkpoint(applied=[2, 1], origins=[10, 0, 0], **state).state)
