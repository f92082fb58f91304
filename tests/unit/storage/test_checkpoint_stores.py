"""What all checkpoint stores share, without a store: names, owners, and checkpoints that vanish while they are read."""

from __future__ import annotations

import pytest
from doll.errors import CheckpointError, FencedError
from doll.storage.checkpoints import (
    Checkpoint,
    CheckpointStore,
    checkpoint_name,
    checkpoints_among,
    claim_name,
    claims_among,
    encode_checkpoint,
)
from memory_stores import MemoryCheckpointStore


def checkpoint(term: int, version: int, job: str = "digits") -> Checkpoint:
    return Checkpoint(job=job, fingerprint="f", term=term, version=version, state=b"", tensors={})


class Store(MemoryCheckpointStore):
    """Lists `listed`; each read of what is not in `held` finds nothing."""

    def __init__(self, *listed: tuple[int, int], held: dict[tuple[int, int], Checkpoint] | None = None) -> None:
        CheckpointStore.__init__(self, "digits", "here", 2)
        self.listed = list(listed)
        self.held = held or {}
        self.reads = 0

    def versions(self) -> list[tuple[int, int]]:
        return self.listed

    def _read_file(self, name: str, size: int | None = None) -> bytes:
        self.reads += 1
        (key,) = checkpoints_among([name])
        if key not in self.held:
            raise FileNotFoundError
        return b"".join(encode_checkpoint(self.held[key]))


def test_names_sort_as_checkpoints_do_and_are_read_back() -> None:
    keys = [(1, 2), (1, 10), (2, 1), (123456789, 12345678901)]
    names = [checkpoint_name(*key) for key in keys]
    assert checkpoints_among([*reversed(names), "checkpoint-1-2.doll", f"{names[0]}.tmp"]) == keys
    assert claims_among([claim_name(7), "term-8.claim", "term-x.claim", "term-9.base-00000001-0000000001"]) == [7, 8]


def test_a_store_keeps_at_least_two() -> None:
    with pytest.raises(ValueError, match="expected keep >= 2, got 1"):
        CheckpointStore.__init__(Store(), "digits", "here", 1)


def test_checkpoints_that_vanish_each_time_they_are_read_are_an_error() -> None:
    store = Store((1, 1))
    with pytest.raises(CheckpointError, match="vanish from here while they are read"):
        store.load_newest(None)
    assert store.reads == 5


def test_another_jobs_checkpoint_is_named_with_its_file() -> None:
    store = Store((1, 1), held={(1, 1): checkpoint(1, 1, job="other")})
    with pytest.raises(CheckpointError, match=r"here/checkpoint-00000001-0000000001\.doll: .*'digits', .*'other'"):
        store.load_newest(None)


def test_only_the_newest_term_saves_and_never_a_lower_version() -> None:
    store = Store()
    store._refuse_if_superseded(checkpoint(2, 5), 2, [(1, 9), (2, 5)])
    with pytest.raises(FencedError, match="term 2 is over: term 3 has claimed here"):
        store._refuse_if_superseded(checkpoint(2, 5), 3, [])
    with pytest.raises(CheckpointError, match="expected version 6 or later of term 2, got 5"):
        store._refuse_if_superseded(checkpoint(2, 5), 2, [(2, 6)])
