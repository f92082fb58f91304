"""A page of a job with 1,000 workers sends what has changed. docs/benchmarks.md has what a second of it takes."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
import pytest
from doll.dashboard.merge_patch import merge_patch
from doll.monitor.views.page import page
from doll.records.control import decode, encode
from page_feed import MadeUpJob

pytestmark = pytest.mark.slow


class Recorded(MadeUpJob):
    """Its records wait, encoded, until they are asked for."""

    def __init__(self, workers: int, *, members: int) -> None:
        self.encoded: list[bytes] = []
        super().__init__(workers, members=members)

    def feed(self, record: Any) -> None:
        self.encoded.append(encode(record))


def test_a_second_of_a_thousand_workers_sends_what_has_changed() -> None:
    made_up = Recorded(1_000, members=250)
    sent: dict[str, Any] = {}
    sizes = []
    for _ in range(40):
        made_up.run(1)
        for data in made_up.encoded:
            made_up.watched.feed(decode(data))
        state = made_up.read(page)
        event = msgspec.json.encode(merge_patch(sent, state))
        sizes.append(len(event))
        made_up.encoded.clear()
        sent = state
    assert statistics.median(sizes) < sizes[0] / 2
