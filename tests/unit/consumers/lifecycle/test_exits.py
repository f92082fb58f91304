"""The first request to end decides, and the process ends even where nothing else does."""

from __future__ import annotations

from doll.consumers.lifecycle.departure import ProcessExit


def test_the_first_request_decides() -> None:
    events: list[object] = []
    made = ProcessExit(
        5.0,
        flush=lambda: events.append("flush"),
        stop=lambda: events.append("stop"),
        end_within=lambda seconds, code: events.append((seconds, code)),
    )
    assert (made.is_requested, made.code) == (False, 0)
    made.request(4, "data are lost")
    assert events == ["flush", (5.0, 4), "stop"]
    made.request(0, "job ended")
    assert (made.is_requested, made.code, len(events)) == (True, 4, 3)
