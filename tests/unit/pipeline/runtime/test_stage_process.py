"""A stage's process while nobody listens to it."""

from __future__ import annotations

import selectors
import threading
from typing import Any

import pytest
from doll.pipeline.links.link import StageLink, socket_pair
from doll.pipeline.runtime import stage_process
from doll.pipeline.runtime.messages import Ready, StopStage, decode, encode
from doll.pipeline.runtime.stage_process import Links, SharedVectors, StageProcess
from doll.pipeline.runtime.vectors import VectorFile
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.slow  # loads torch


def has_room(link: StageLink) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_WRITE)
        return bool(selector.select(0))


def test_a_stage_outlives_a_coordinator_that_does_not_read_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that waits for the parameter server gets more messages of a stage than its socket holds."""
    monkeypatch.setattr(stage_process, "ALIVE_EVERY_S", 0.0)
    (control, own), (chain, before) = socket_pair(), socket_pair()
    own.limit_sending(1.0)
    make: Any = lambda: None  # noqa: E731
    process = StageProcess(
        make, Links(own, before, None), SharedVectors(VectorFile(0), VectorFile(0)), number=0, fingerprint="f"
    )
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(process.run()))
    thread.start()
    until(lambda: not has_room(own), "a full socket")
    control.send(encode(StopStage()))
    thread.join(WAIT_TIMEOUT_S)
    assert codes == [0]
    assert decode(control.receive()[0]) == Ready(stage=0, fingerprint="f")
    for link in (control, own, chain, before):
        link.close()
