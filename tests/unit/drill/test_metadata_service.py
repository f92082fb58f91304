"""Bad and good spot notices for single workers: who gets the bad one, asks on, and leaves on the good one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from doll.consumers.lifecycle.spot_notices import ENDPOINT_ENV, Imds, NoticeWatcher
from doll.drill.metadata_service import UNREADABLE, FakeMetadataService
from waiting import WAIT_TIMEOUT_S, until


@pytest.fixture
def metadata() -> Iterator[FakeMetadataService]:
    with FakeMetadataService() as metadata:
        yield metadata


def imds(metadata: FakeMetadataService, role: str) -> Imds:
    return Imds(metadata.environment(role)[ENDPOINT_ENV], timeout_s=WAIT_TIMEOUT_S)


@pytest.mark.slow
def test_a_notice_is_for_one_role_and_ends(metadata: FakeMetadataService) -> None:
    one, other = imds(metadata, "worker-1"), imds(metadata, "worker-2")
    path = "spot/instance-action"
    assert one.get(path) is None
    metadata.serve_notice("worker-1")
    assert "terminate" in (one.get(path) or "")
    assert other.get(path) is None
    metadata.clear_notice("worker-1")
    assert one.get(path) is None


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(UNREADABLE)))
def test_a_watcher_survives_each_notice_that_cannot_be_read(metadata: FakeMetadataService, number: int) -> None:
    """The watcher leaves on the bad notice, or asks on and leaves on the good one; it never ends without a message."""
    noticed = threading.Event()
    metadata.serve_bad_notice("worker-0", number)
    watcher = NoticeWatcher(imds(metadata, "worker-0"), lambda left_s: noticed.set(), every_s=0.01)
    watcher.start()
    try:
        until(lambda: metadata.num_bad_notices_served("worker-0") > 0, "the bad notice is asked for")
        metadata.serve_notice("worker-0")
        assert noticed.wait(WAIT_TIMEOUT_S), "the thread that watches for notices has ended"
    finally:
        watcher.close()
