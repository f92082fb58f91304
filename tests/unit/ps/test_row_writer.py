"""Rows that a version has changed are published while somebody follows them, and not else."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from doll.errors import BlobError
from doll.ps.model.row_writer import RowWriter
from doll.ps.tables.store import TableStore
from doll.storage.blobs import followed_key, row_changes_key
from doll.storage.row_changes import RowChanges, decode_row_changes
from doll.tables.rows import Rows
from memory_stores import MemoryBlobs
from waiting import until

pytestmark = pytest.mark.slow  # loads torch

SCOPE = "job:r1"


class FarBlobs(MemoryBlobs):
    """A round trip away: the server's thread asks for nothing."""

    is_far = True  # type: ignore[misc]

    def get(self, key: str) -> bytes | None:
        assert threading.current_thread() is not threading.main_thread()
        return super().get(key)


class Rig:
    def __init__(
        self, kept_bytes: int = 10**6, *, term_begins: bool = False, blobs: type[MemoryBlobs] = MemoryBlobs
    ) -> None:
        self.now_s = 0.0
        self._words = itertools.count(1)
        self.blobs = blobs(clock=lambda: self.now_s)
        self.tables = TableStore({"t": np.zeros((10, 2), np.float32)}, None)
        self.writer = RowWriter(
            SCOPE, 3, self.blobs, 60.0, self.tables, clock=lambda: self.now_s, kept_bytes=kept_bytes
        )
        self.publish(0)
        if not term_begins:
            self.now_s += 10.0
            self.publish(0)

    def publish(self, version: int) -> list[str]:
        stores, unused = self.writer.publish(version)
        for store in stores:
            store()
        return unused

    def follow(self) -> None:
        """A reader says that it is there, and the writer has looked before."""
        self.blobs.put(followed_key(SCOPE), [b"%d" % next(self._words)], 600.0)

    def update(self, version: int, *ids: int) -> list[str]:
        self.now_s += 1.0
        self.tables.add({"t": Rows(np.array(ids), np.full((len(ids), 2), 1, np.float32))})
        self.tables.apply(1.0, version)
        return self.publish(version)

    def changes(self, version: int) -> RowChanges | None:
        data = self.blobs.get(row_changes_key(SCOPE, 3, version))
        return None if data is None else decode_row_changes(data, self.tables.shapes, job=SCOPE, version=version)


def test_nothing_is_published_unless_somebody_follows() -> None:
    rig = Rig()
    rig.update(1, 1, 2)
    assert rig.blobs.keys() == [followed_key(SCOPE)]
    rig.follow()
    rig.update(2, 2)
    assert rig.changes(2) is None, "what had changed before nobody knows"
    rig.update(4, 2, 5)
    changes = rig.changes(4)
    assert changes is not None
    assert (changes.since, changes.version, changes.began) == (2, 4, 0)
    np.testing.assert_array_equal(changes.rows["t"].ids, [2, 5])
    np.testing.assert_array_equal(changes.rows["t"].values[:, 0], [3, 1])
    rig.now_s += 10.0
    rig.update(5, 1)
    rig.update(6, 1)
    assert (rig.changes(5), rig.changes(6)) == (None, None), "nobody follows any more"
    rig.follow()
    rig.update(7, 7)
    rig.update(8, 8)
    after = rig.changes(8)
    assert after is not None
    assert (after.since, after.rows["t"].ids.tolist()) == (7, [8])


def test_a_term_begins_as_if_somebody_followed() -> None:
    """Whoever has followed the one before goes on with its checkpoint."""
    rig = Rig(term_begins=True)
    for version in range(1, 20):
        rig.update(version, 1)
        changes = rig.changes(version)
        assert (changes is not None) == (version < 10)
        assert changes is None or (changes.since, changes.began) == (version - 1, 0)


def test_nobody_waits_for_a_far_store() -> None:
    rig = Rig(blobs=FarBlobs)
    rig.follow()
    versions = itertools.count(1)

    def is_published() -> bool:
        rig.update(version := next(versions), 1)
        keys = rig.blobs.keys()
        return row_changes_key(SCOPE, 3, version) in keys

    until(is_published, "changes of rows")


def test_a_version_that_changes_no_row_is_a_link_of_the_chain() -> None:
    rig = Rig()
    rig.follow()
    rig.update(1)
    rig.update(2)
    changes = rig.changes(2)
    assert changes is not None
    assert (changes.since, len(changes.rows["t"].ids)) == (1, 0)


def test_the_oldest_changes_are_deleted() -> None:
    rig = Rig(kept_bytes=1000)
    unused = []
    for version in range(1, 20):
        rig.follow()
        unused += rig.update(version, *range(10))
    assert unused == [row_changes_key(SCOPE, 3, version) for version in range(2, 2 + len(unused))]
    assert 10 < len(unused) < 18


def test_expired_changes_are_not_deleted_once_more() -> None:
    rig = Rig(kept_bytes=1000)
    for version in range(1, 4):
        rig.follow()
        assert rig.update(version, *range(10)) == []
    rig.now_s += 61.0
    for version in range(4, 9):
        rig.follow()
        unused = rig.update(version, *range(10))
        assert unused == [], "the older ones have expired"


def test_the_word_of_readers_is_always_there() -> None:
    """A store in shared memory asks Redis for a key that it lacks."""
    rig = Rig()
    published = []
    for version in range(1, 2000):
        if 400 < version < 500:
            rig.follow()
        rig.update(version, 1)
        assert rig.blobs.get(followed_key(SCOPE)) is not None
        if rig.changes(version) is not None:
            published.append(version)
    assert published == list(range(published[0], published[-1] + 1))
    assert 400 < published[0] < 405
    assert 500 < published[-1] < 512


def test_changes_of_other_tables_are_refused() -> None:
    rig = Rig()
    rig.follow()
    rig.update(1, 1)
    rig.update(2, 1)
    data = rig.blobs.get(row_changes_key(SCOPE, 3, 2))
    assert data is not None
    with pytest.raises(BlobError):
        decode_row_changes(data, {**rig.tables.shapes, "u": rig.tables.shapes["t"]}, job=SCOPE, version=2)
    with pytest.raises(BlobError):
        decode_row_changes(data, rig.tables.shapes, job=SCOPE, version=3)
