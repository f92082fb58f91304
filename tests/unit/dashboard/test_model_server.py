"""The model server of a job, by its metrics."""

from __future__ import annotations

import http.client

import pytest
from doll.dashboard.model_server import WithModelServer, metrics_of, reading_of
from doll.errors import ConfigError
from doll.monitor.views.page import page
from doll.serving.metrics import ServeMetrics
from page_feed import MadeUpJob

pytestmark = pytest.mark.slow  # loads torch


def test_a_reading_is_what_the_server_has_counted() -> None:
    metrics = ServeMetrics("clicks", 2)
    for seconds in (0.0005, 0.004, 0.004, 7.0):
        metrics.answered(200, seconds)
    metrics.answered(429, 0.0001)
    metrics.count("swaps")
    reading = reading_of(metrics.page().decode(), 3.0)
    assert {code: count for code, count in reading.requests.items() if count} == {"200": 4, "429": 1}
    assert (reading.total, reading.swaps, reading.versions, reading.is_stale) == (5, 1, [], False)
    assert (reading.buckets[0], reading.buckets[2]) == ((0.001, 2.0), (0.005, 4.0))
    assert reading.buckets[-1] == (float("inf"), 5.0)


def test_answers_that_were_not_logged_are_said() -> None:
    metrics = ServeMetrics("clicks", 2)
    texts = [metrics.page().decode()]
    source = WithModelServer(MadeUpJob(), lambda: texts[0])
    source.look(1.0)
    assert "not logged" not in dict(source.read(page)["served"]["facts"])
    metrics.count("unlogged_answers")
    metrics.use_row(1)
    metrics.count("unlogged_answers")
    texts[0] = metrics.page().decode()
    source.look(3.0)
    assert dict(source.read(page)["served"]["facts"])["not logged"] == "2 answers"


@pytest.mark.parametrize("text", ["", "<html>", "doll_serve_version 1\n", "up 1\n"])
def test_what_is_no_model_server_is_said_and_the_page_goes_on(text: str) -> None:
    made_up = MadeUpJob()
    source = WithModelServer(made_up, lambda: text)
    source.look(1.0)
    shown = source.read(page)
    assert shown["served"]["problem"].startswith("the model server does not answer")
    assert shown["job"]["name"] == "clicks"


@pytest.mark.parametrize("error", [ConnectionRefusedError("away"), http.client.BadStatusLine("away")])
def test_a_server_that_is_away_keeps_what_it_said_last(error: Exception) -> None:
    metrics = ServeMetrics("clicks", 1)
    metrics.answered(200, 0.1)
    texts = [metrics.page().decode()]

    def read() -> str:
        if not texts:
            raise error
        return texts.pop()

    source = WithModelServer(MadeUpJob(), read)
    source.look(1.0)
    source.look(3.0)
    shown = source.read(page)["served"]
    assert shown["problem"] == "the model server does not answer: away"
    assert dict(shown["facts"])["requests"] == "1"


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "ftp://x", "http://", "file:///etc/passwd"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="--model-server: expected an address"):
        metrics_of(address, "")
