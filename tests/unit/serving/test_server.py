"""A model server as its clients see it, while versions come, go, and are given names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from doll.errors import ConfigError
from doll.process.connections import BoundedProtocol, ServerAccess, find_access
from doll.process.http_access import Tokens
from doll.serving.main import ServeOptions
from doll.storage.version_marks import VersionMarks
from doll.task.base import Task
from serving_app import CalledApp
from serving_rig import ServingRig, output_of
from structlog.testing import capture_logs
from waiting import until

pytestmark = pytest.mark.slow  # loads torch
TOKEN = "0123456789abcdef"
X = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ServingRig]:
    with ServingRig(tmp_path) as rig:
        rig.save(1, samples=10)
        yield rig.start()


def test_a_version_of_a_checkpoint_answers_and_says_what_it_is(rig: ServingRig) -> None:
    status, answer = rig.infer([[1, 2], [3, 4]], id="a")
    assert status == 200
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("line", "1", "a")
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("output", "FP32", [2, 1])
    assert output["data"] == output_of(1, [[1, 2], [3, 4]])
    facts = answer["parameters"]
    assert facts["term"] == 1
    assert facts["age_s"] >= 0
    assert facts["samples_behind"] is None, "nobody says how far the job is"
    assert rig.get("/v2/models/line")[1] == {
        "name": "line",
        "versions": ["1", "latest"],
        "platform": "doll",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 1]}],
    }
    assert rig.get("/v2")[1]["extensions"] == ["binary_tensor_data"]
    assert rig.get("/v2/health/live") == (200, {"live": True})
    assert rig.get("/v2/models/line/ready") == (200, {"name": "line", "ready": True})
    assert rig.get("/v2/models/line/versions/1/ready")[0] == 200


def test_a_version_that_is_published_answers_at_once_and_no_answer_mixes_two(rig: ServingRig) -> None:
    seen: set[int] = set()
    wrong: list[object] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            status, answer = rig.infer([[1, 2], [3, 4]])
            version = int(answer.get("model_version", -1))
            if status != 200 or answer["outputs"][0]["data"] != output_of(version, [[1, 2], [3, 4]]):
                wrong.append((status, answer))
            seen.add(version)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, 40):
        rig.publish(version)
        until(lambda version=version: version in seen, f"an answer of version {version}")  # type: ignore[misc]
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert seen == set(range(1, 40))


def test_a_later_term_takes_over_also_with_a_lower_version(rig: ServingRig) -> None:
    rig.publish(9)
    until(lambda: rig.version() == 9, "version 9")
    rig.store.claim_term()
    rig.publish(5, term=2)
    until(lambda: rig.version() == 5, "version 5 of term 2")


def test_what_does_not_answer_is_said_and_the_last_good_version_stays(rig: ServingRig) -> None:
    until(lambda: rig.infer()[1]["parameters"]["stale"], "somebody to notice that Kafka is away")
    assert "Kafka" in rig.infer()[1]["parameters"]["stale_because"]
    rig.publish(2)
    until(lambda: rig.version() == 2, "version 2")
    rig.has_ended = True
    until(lambda: not rig.infer()[1]["parameters"]["stale"], "the end of the run: nothing newer is missed then")


def test_an_alias_is_followed_and_a_number_is_not(tmp_path: Path) -> None:
    with ServingRig(tmp_path, wanted={"stable": 50.0, "latest": 50.0}) as rig:
        rig.save(1)
        rig.save(2)
        rig.begin()
        until(lambda: rig.get("/v2/models/line/versions/latest/ready")[0] == 200, "the newest version")
        status, answer = rig.get("/v2/health/ready")
        assert status == 503
        assert "stable" in answer["reasons"]
        assert rig.infer(version="stable")[0] == 503
        rig.store.change_marks(lambda marks: marks.with_alias("stable", 1))
        until(lambda: rig.infer(version="stable")[0] == 200, "the version that the alias names")
        assert rig.infer(version="stable")[1]["model_version"] == "1"
        assert rig.infer(version="1")[1]["model_version"] == "1"
        assert rig.infer(version="latest")[1]["model_version"] == "2"
        answers = {rig.infer()[1]["model_version"] for _ in range(40)}
        assert answers == {"1", "2"}
        began_s = time.monotonic()
        rig.store.change_marks(lambda marks: marks.with_alias("stable", 2))
        until(lambda: rig.infer(version="stable")[1]["model_version"] == "2", "the other version")
        assert time.monotonic() - began_s < 60
        assert rig.infer(version="1")[0] == 404
        assert isinstance(rig.store.read_marks(), VersionMarks)


def test_of_several_lanes_the_one_that_follows_the_newest_version_logs_no_line_for_each(tmp_path: Path) -> None:
    with ServingRig(tmp_path, wanted={"stable": 50.0, "latest": 50.0}) as rig, capture_logs() as logs:
        rig.save(1)
        rig.store.change_marks(lambda marks: marks.with_alias("stable", 1))
        rig.start()
        for version in (2, 3, 4):
            rig.publish(version)
            until(lambda: rig.infer(version="latest")[1]["model_version"] == str(version), f"version {version}")  # noqa: B023
    served = [(entry["wanted"], entry["version"]) for entry in logs if entry["event"] == "version_served"]
    assert served == [("stable", 1)]


@pytest.mark.parametrize(
    ("path", "content", "status", "said"),
    [
        ("/v2/models/line/infer", b"{", 400, "in JSON"),
        ("/v2/models/line/infer", {"inputs": []}, 422, "expected the inputs x, got none"),
        ("/v2/models/other/infer", {}, 404, "expected the model line"),
        ("/v2/models/line/versions/99/infer", {}, 404, "expected one of the versions 3, latest"),
        ("/v2/models/line/versions/..%2f..%2fetc/infer", {}, 404, ""),
        ("/v2/../../etc/passwd", {}, 404, "Not Found"),
        ("/v2/health/live", {}, 405, "Method Not Allowed"),
        ("/predict", {"x": ["1", "2"]}, 422, "expected numbers"),
        ("/v2/models/line/infer", {"inputs": [{**X, "data": ["1", "2"]}]}, 422, "expected numbers of FP32"),
        ("/v2/models/line/infer", {"inputs": [{**X, "shape": [0, 2**62]}]}, 422, "that a body can have"),
        ("/v2/models/line/infer", {"inputs": [X], "id": 201 * "a"}, 422, "at most 200 characters"),
        ("/predict", b"", 400, "a record in JSON"),
        ("/predict", [], 422, "at least one record"),
        ("/predict", {"y": [1, 2]}, 422, "NotImplementedError"),
        ("/predict", {"x": [1, 2, 3]}, 422, "expected shape"),
        ("/predict", {"x": [13, 1]}, 422, "13 is not a number that this model computes"),
        ("/predict", b'{"x": [1e39, 1]}', 422, "finite"),
        ("/predict", b'{"x": [3e38, 3e38]}', 422, "not finite"),
        ("/predict", b"x" * 2_000_001, 413, "at most 2000000 bytes"),
    ],
)
def test_bad_requests_get_a_status_and_a_reason(
    server: ServingRig, path: str, content: object, status: int, said: str
) -> None:
    got, answer = server.post(path, content)
    assert (got, said in answer["error"]) == (status, True), answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingRig]:
    """One that tests of requests share."""
    with ServingRig(tmp_path_factory.mktemp("serving"), max_body_bytes=2_000_000, time_limit_s=1.0) as rig:
        rig.save(3)
        yield rig.start()


def test_predict_takes_records_of_the_task(server: ServingRig) -> None:
    status, answer = server.post("/predict", {"x": [1, 2]})
    assert status == 200
    assert answer["predictions"] == [{"value": 10.5}]
    assert (answer["model"], answer["version"], answer["term"]) == ("line", 3, 1)
    both = server.post("/predict", [{"x": [1, 2]}, {"x": [0, 0]}])[1]
    assert both["predictions"] == [{"value": 10.5}, {"value": 1.5}]


def test_a_request_is_answered_as_if_it_had_come_alone(server: ServingRig) -> None:
    answers: list[tuple[int, object]] = []

    def ask(x: list[list[float]]) -> None:
        for _ in range(20):
            status, answer = server.infer(x)
            answers.append((status, answer["outputs"][0]["data"] == output_of(3, x) if status == 200 else "13"))

    rng = random.Random(0)
    samples = [[[float(rng.randint(0, 9)), 13.0 if at == 2 else 1.0]] for at in range(5)]
    threads = [threading.Thread(target=ask, args=(x,)) for x in samples]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers, key=repr) == [(200, True)] * 80 + [(422, "13")] * 20


def test_more_samples_than_a_batch_are_answered_whole(server: ServingRig) -> None:
    x = np.random.default_rng(0).integers(0, 10, (1000, 2))
    status, answer = server.infer(x)
    assert status == 200
    assert answer["outputs"][0]["data"] == output_of(3, x)


def raw(server: ServingRig, data: bytes) -> bytes:
    """What comes back, to the end."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):  # what is not read resets the connection
            connection.sendall(data)
            while piece := connection.recv(65536):
                answer += piece
        return answer


def test_a_body_that_does_not_come_is_not_waited_for(server: ServingRig) -> None:
    answer = raw(server, b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"expected the body within 1 s" in answer


def test_a_body_without_a_length_is_bounded(server: ServingRig) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%b\r\n" % (1_000_000, b" " * 1_000_000)
    assert raw(server, head + 3 * chunk + b"0\r\n\r\n").startswith(b"HTTP/1.1 413")


def test_a_head_without_an_end_is_bounded(server: ServingRig) -> None:
    head = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX-Long: "
    until(lambda: raw(server, head + 70_000 * b"x").startswith(b"HTTP/1.1 431"), "the refusal of a long head")


def test_a_head_behind_a_long_body_is_counted_by_itself(server: ServingRig) -> None:
    body = b'{"x": [1, 2]}'.ljust(120_000)
    first = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 120000\r\n\r\n" + body
    second = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n"
    answer = raw(server, first + second + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == 2, answer
    long = first + second + b"X-Long: " + 100_000 * b"x"
    until(lambda: raw(server, long).count(b"HTTP/1.1 431") == 1, "the refusal of a long head behind a body")
    whole = second + b"X-Long: " + 100_000 * b"x" + b"\r\nConnection: close\r\n\r\n"
    until(lambda: raw(server, whole).startswith(b"HTTP/1.1 431"), "the refusal of a long head that comes at once")


def test_a_client_that_asks_first_is_not_told_to_send_a_body_that_is_too_long(server: ServingRig) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    assert raw(server, head % 3_000_000).startswith(b"HTTP/1.1 413")
    body = b'{"x": [1, 2]}'
    answer = raw(server, (head % len(body)).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")


def test_a_connection_without_a_request_is_kept_for_longer_than_load_balancers_keep_theirs(tmp_path: Path) -> None:
    assert ServeOptions({}, "m").keep_alive_s > 60
    with ServingRig(tmp_path, keep_alive_s=1.0) as rig:
        rig.save(1)
        rig.start()
        with socket.create_connection(("127.0.0.1", rig.port), timeout=60) as connection:
            connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            assert connection.recv(65536) == b"", "it is closed"


def test_bodies_of_all_requests_together_are_bounded(tmp_path: Path) -> None:
    with ServingRig(tmp_path, max_body_bytes=1000) as rig:
        rig.save(1)
        rig.start()
        part = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n" + 990 * b" "
        held = [socket.create_connection(("127.0.0.1", rig.port)) for _ in range(8)]
        for connection in held:
            connection.sendall(part)
        until(lambda: rig.infer()[0] == 429, "no room for another body")
        for connection in held:
            connection.close()
        until(lambda: rig.infer()[0] == 200, "room again")


def test_a_foreign_name_of_this_machine_is_not_answered_without_a_token(server: ServingRig) -> None:
    """A page of a foreign web site cannot ask through a browser, whatever its name points to."""
    assert server.get("/v2", Host="example.org:8000")[0] == 421
    assert server.get("/v2", Host="localhost:8000")[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://example.org", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}, 403),
        ({"Origin": "https://example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({}, 200),
    ],
)
def test_a_page_of_a_web_site_has_nothing_computed(
    server: ServingRig, headers: dict[str, str], status: int
) -> None:  # fmt: skip
    """Its browser sends a form, or a request without CORS, also where the page is not to see the answer."""
    own = {name: value.format(port=server.port) for name, value in headers.items()}
    got, _, body = server.request("POST", "/predict", b'{"x": [1, 2]}', own)
    assert got == status, body


def test_requests_of_a_web_site_are_refused_also_with_a_certificate_and_not_with_a_token() -> None:
    assert _refused(ServerAccess(by_certificate=True))
    assert not _refused(ServerAccess(Tokens(TOKEN)))


class Nothing(Task):
    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)


def _refused(access: ServerAccess) -> bool:
    app = CalledApp(Nothing(), access)
    headers = {"Origin": "https://example.org", "Authorization": f"Bearer {TOKEN}"}
    return asyncio.run(app.post("/predict", b"", headers))[0] == 403


def test_a_compressed_body_is_refused(server: ServingRig) -> None:
    status, _, body = server.request("POST", "/predict", b"x", {"Content-Encoding": "gzip"})
    assert (status, json.loads(body)["error"]) == (415, "expected a body that is not compressed")


def test_connections_beyond_the_limit_are_told_so(server: ServingRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "max_connections", 3)
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
    until(lambda: raw(server, b"").startswith(b"HTTP/1.1 503"), "a connection too many")
    for connection in held:
        connection.close()
    until(lambda: server.infer()[0] == 200, "room for another one")


def test_prometheus_counts_what_was_answered(server: ServingRig) -> None:
    assert server.infer()[0] == 200
    _, _, body = server.request("GET", "/metrics")
    lines = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))
    assert float(lines['doll_serve_requests_total{code="200",job_name="line"}']) > 0
    assert float(lines['doll_serve_version{job_name="line",process="0"}']) in (0.0, 3.0)
    assert float(lines['doll_serve_request_seconds_count{job_name="line"}']) > 0


def test_a_token_is_asked_for_but_not_by_health(tmp_path: Path) -> None:
    with ServingRig(tmp_path, access=ServerAccess(Tokens(TOKEN))) as rig:
        rig.save(1)
        rig.start()
        assert rig.infer()[0] == 401
        assert rig.get("/v2/models/line", Authorization=f"Bearer {TOKEN[:-1]}")[0] == 401
        assert rig.get("/v2/models/line", Authorization=TOKEN)[0] == 401
        assert rig.get("/v2/models/line", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert rig.request("GET", "/metrics")[0] == 401


def test_a_version_whose_checkpoint_is_deleted_meanwhile_goes_on_answering(tmp_path: Path) -> None:
    with ServingRig(tmp_path, wanted={"2": 100.0}) as rig:
        for version in (1, 2, 3):
            rig.save(version)
        rig.start()
        for version in (4, 5, 6, 7):
            rig.save(version)
        assert 2 not in [version for _, version in rig.store.versions()]
        assert rig.version() == 2


def test_a_server_without_any_version_waits_for_one(tmp_path: Path) -> None:
    with ServingRig(tmp_path) as rig:
        rig.begin()
        until(lambda: rig.get("/v2/health/live")[0] == 200, "the server")
        status, answer = rig.infer()
        assert (status, answer["error"]) == (503, "no version can answer: no version has been learned yet")
        rig.save(1)
        until(lambda: rig.infer()[0] == 200, "the first version")


def test_what_the_environment_says_of_a_token_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_access() == ServerAccess()
    monkeypatch.setenv("DOLL_SERVE_TOKEN", "short")
    with pytest.raises(ConfigError, match="DOLL_SERVE_TOKEN: expected a token of at least 16"):
        find_access()
    monkeypatch.setenv("DOLL_SERVE_TOKEN", TOKEN)
    assert find_access().tokens == Tokens(TOKEN)
    file = tmp_path / "token"
    file.write_text(TOKEN[::-1])
    file.chmod(0o600)
    assert find_access(file).tokens == Tokens(TOKEN[::-1])
    with pytest.raises(ConfigError, match="the same text twice"):
        find_access(file, file)
    monkeypatch.setenv("DOLL_SERVE_READ_TOKEN", "read-" + TOKEN)
    assert find_access(file).tokens == Tokens(TOKEN[::-1], "read-" + TOKEN)
    assert TOKEN not in repr(find_access())


def test_what_the_environment_says_of_tls_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOLL_SERVE_CLIENT_CA", str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigError, match="DOLL_SERVE_CERT: expected a PEM file"):
        find_access()
    monkeypatch.setenv("DOLL_SERVE_CERT", str(tmp_path / "cert.pem"))
    with pytest.raises(ConfigError, match="that can be read"):
        find_access()
