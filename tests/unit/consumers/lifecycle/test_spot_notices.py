"""What a worker learns from its EC2 machine, against a metadata service on loopback that speaks IMDSv2."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from doll.cli.app import app
from doll.config import JobConfig, parse
from doll.consumers.lifecycle.departure import Departure
from doll.consumers.lifecycle.spot_notices import (
    Imds,
    NoticeWatcher,
    set_identity_from_tags,
    slot_of_this_machine,
    watch_spot_notices,
)
from doll.errors import ConfigError, ServiceUnavailableError
from imds_stub import ImdsStub, imds_stub
from typer.testing import CliRunner

NOW_S = 1_800_000_000.0  # 2027-01-15T08:00:00Z
TAGS = {
    "tags/instance/doll:worker": "3",
    "tags/instance/doll:incarnation": "7",
    "tags/instance/doll:market": "spot",
}
NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens


@pytest.fixture
def stub() -> Iterator[ImdsStub]:
    with imds_stub() as made:
        yield made


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("job: digits\ntask: {class: 'examples.digits.task:Digits'}\n")
    return path


def job(*overrides: str) -> JobConfig:
    return parse("job: digits\ntask: {class: 'examples.digits.task:Digits'}\n", overrides)


def watcher(stub: ImdsStub, reported: list[float]) -> NoticeWatcher:
    return NoticeWatcher(Imds(stub.endpoint), reported.append, wall=lambda: NOW_S)


def test_reads_with_a_token_and_takes_a_new_one_when_it_expires(stub: ImdsStub) -> None:
    imds = Imds(stub.endpoint)
    assert imds.get("instance-id") == "i-0abc"
    assert imds.get("instance-id") == "i-0abc"
    assert stub.tokens == 1
    stub.expire_tokens()
    assert imds.get("instance-id") == "i-0abc"
    assert imds.get("spot/instance-action") is None


def test_no_metadata_service_is_an_error_that_names_it(stub: ImdsStub) -> None:
    with pytest.raises(ServiceUnavailableError, match=r"metadata service at http://127\.0\.0\.1:9 does not answer"):
        Imds(NOWHERE).get("instance-id")
    stub.broken = True
    with pytest.raises(ServiceUnavailableError, match="instance-id: HTTP 500"):
        Imds(stub.endpoint).get("instance-id")


def test_the_endpoint_comes_from_the_variable_that_boto3_reads_and_no_proxy_is_asked(
    stub: ImdsStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", stub.endpoint + "/")
    monkeypatch.setenv("http_proxy", NOWHERE)
    assert Imds().get("instance-id") == "i-0abc"


def test_a_machine_is_identified_by_its_tags(stub: ImdsStub) -> None:
    stub.paths.update(TAGS)
    environment: dict[str, str] = {}
    set_identity_from_tags(Imds(stub.endpoint), environment)
    assert environment == {
        "DOLL_WORKER": "3",
        "DOLL_INCARNATION": "7",
        "DOLL_MARKET": "spot",
        "DOLL_INSTANCE": "i-0abc",
        "DOLL_SPOT_NOTICES": "imds",
    }


def test_what_stands_in_the_environment_counts_more_than_a_tag(stub: ImdsStub) -> None:
    stub.paths.update(TAGS)
    environment = {"DOLL_WORKER": "5", "DOLL_SPOT_NOTICES": "none"}
    set_identity_from_tags(Imds(stub.endpoint), environment)
    assert (environment["DOLL_WORKER"], environment["DOLL_INCARNATION"]) == ("5", "7")
    assert environment["DOLL_SPOT_NOTICES"] == "none"


def test_a_machine_without_tags_reports_what_is_missing(stub: ImdsStub) -> None:
    with pytest.raises(ConfigError, match=r"no tag doll:worker: .*InstanceMetadataTags=enabled"):
        set_identity_from_tags(Imds(stub.endpoint), {})


def test_no_notice_is_no_notice(stub: ImdsStub) -> None:
    reported: list[float] = []
    assert not watcher(stub, reported).poll()
    assert reported == []


def test_a_notice_tells_how_much_time_is_left(stub: ImdsStub) -> None:
    reported: list[float] = []
    stub.interrupt("2027-01-15T08:02:00Z")
    assert watcher(stub, reported).poll()
    assert reported == [120.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        '{"action": "terminate"}',
        '{"time": "soon"}',
        '{"time": null}',
        "[" * 60_000,
        '{"time": "0001-01-01T00:00:00"}',
    ],
)
def test_a_notice_that_names_no_time_is_one_all_the_same(stub: ImdsStub, text: str) -> None:
    reported: list[float] = []
    stub.paths["spot/instance-action"] = text
    assert watcher(stub, reported).poll()
    assert reported == [0.0]


def test_the_thread_outlives_an_answer_that_nobody_foresaw(stub: ImdsStub) -> None:
    """A thread that ends would never hear the notice, and the worker would never leave."""

    class Odd(Imds):
        asked = 0

        def get(self, path: str) -> str | None:
            self.asked += 1
            if self.asked == 1:
                raise RecursionError("maximum recursion depth exceeded")
            return super().get(path)

    reported: list[float] = []
    has_notice = threading.Event()
    stub.interrupt("2027-01-15T08:02:00Z")
    watch = NoticeWatcher(
        Odd(stub.endpoint), lambda left_s: (reported.append(left_s), has_notice.set()), every_s=0.01, wall=lambda: NOW_S
    )
    watch.start()
    assert has_notice.wait(60.0)
    watch.close()
    assert reported == [120.0]


@pytest.mark.parametrize("value", ["3\0", "x" * 300, "a\nb"])
def test_a_tag_that_is_no_word_is_refused(stub: ImdsStub, value: str) -> None:
    class Tags(Imds):
        def get(self, path: str) -> str | None:
            return value

    with pytest.raises(ConfigError, match="tag doll:worker: expected at most 256 printable characters"):
        set_identity_from_tags(Tags(stub.endpoint), {})


def test_a_notice_of_the_past_leaves_no_time(stub: ImdsStub) -> None:
    reported: list[float] = []
    stub.interrupt("2027-01-15T07:59:00Z")
    assert watcher(stub, reported).poll()
    assert reported == [0.0]


def test_a_rebalance_recommendation_is_said_once_and_does_nothing(stub: ImdsStub) -> None:
    reported: list[float] = []
    stub.paths["events/recommendations/rebalance"] = '{"noticeTime": "2027-01-15T08:00:00Z"}'
    notices = watcher(stub, reported)
    with structlog.testing.capture_logs() as logs:
        assert not notices.poll()
        assert not notices.poll()
    assert [entry["event"] for entry in logs] == ["rebalance_recommended"]
    assert reported == []


def test_a_service_that_is_silent_is_said_once_and_asked_on(stub: ImdsStub) -> None:
    reported: list[float] = []
    notices = watcher(stub, reported)
    with structlog.testing.capture_logs() as logs:
        for stub.broken in (True, True, False, True):
            assert not notices.poll()
    assert [entry["event"] for entry in logs] == ["spot_notices_unavailable", "spot_notices_unavailable"]
    stub.broken = False
    stub.interrupt("2027-01-15T08:02:00Z")
    assert notices.poll()


def test_a_notice_makes_the_worker_leave_within_what_the_job_file_allows(
    stub: ImdsStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", stub.endpoint)
    stub.interrupt("2999-01-01T00:00:00Z")
    left = threading.Event()
    ends: list[float] = []

    def end_within(seconds: float, code: int) -> None:
        ends.append(seconds)
        assert code == 0
        left.set()

    departure = Departure(end_within=end_within)
    with watch_spot_notices(job("worker.spot_notices=imds", "worker.notice_s=20"), departure):
        assert left.wait(60)
    assert departure.cause == "notice"
    assert 0 < ends[0] <= 20


def test_nobody_is_asked_unless_somebody_wants_it(stub: ImdsStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", stub.endpoint)
    monkeypatch.delenv("DOLL_SPOT_NOTICES", raising=False)
    stub.interrupt("2999-01-01T00:00:00Z")
    departure = Departure(end_within=lambda seconds, code: None)
    with watch_spot_notices(job(), departure):
        pass
    monkeypatch.setenv("DOLL_SPOT_NOTICES", "imds")
    with watch_spot_notices(job("worker.spot_notices=none"), departure):
        pass
    assert stub.tokens == 0
    assert not departure()
    monkeypatch.setenv("DOLL_SPOT_NOTICES", "always")
    with (
        pytest.raises(ConfigError, match="DOLL_SPOT_NOTICES: expected none or imds, got 'always'"),
        watch_spot_notices(job(), departure),
    ):
        pass


def test_doll_worker_takes_its_slot_from_the_machine(stub: ImdsStub, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("DOLL_WORKER", "DOLL_INCARNATION", "DOLL_MARKET", "DOLL_INSTANCE", "DOLL_SPOT_NOTICES")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", stub.endpoint)
    stub.paths.update(TAGS)
    assert slot_of_this_machine(None) == 3
    assert [os.environ[name] for name in names] == ["3", "7", "spot", "i-0abc", "imds"]
    assert slot_of_this_machine(1) == 1, "what the command line says counts more"
    monkeypatch.setenv("DOLL_WORKER", "")
    stub.paths["tags/instance/doll:worker"] = "first"
    with pytest.raises(ConfigError, match="tag doll:worker: expected a slot, 0 or more, got 'first'"):
        slot_of_this_machine(None)


def test_off_ec2_the_command_says_so(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", NOWHERE)
    for name in ("DOLL_WORKER", "DOLL_SPOT_NOTICES"):
        monkeypatch.setenv(name, "")
    answer = CliRunner().invoke(app, ["worker", "--job", str(job_file), "--from-imds"])
    assert answer.exit_code == 1
    assert "the instance metadata service at http://127.0.0.1:9 does not answer" in answer.output
    both = CliRunner().invoke(app, ["worker", "--job", str(job_file), "--from-imds", "--any-slot"])
    assert both.exit_code == 2
    assert "expected --from-imds or --any-slot, got both" in both.output
