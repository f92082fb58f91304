"""What other systems are sent of a job on a real broker: its runs as OpenLineage, its batches and metrics by OTLP."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from forked_commands import environment
from job_rig import MakePipeline
from waiting import WAIT_TIMEOUT_S

pytestmark = pytest.mark.integration
SAMPLES = 320


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """The address of a server that accepts everything, and its requests: path and body."""
    requests: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", requests
    http.shutdown()
    http.server_close()
    thread.join()


def test_a_job_that_loses_its_server_is_one_run_and_its_counts_are_those_of_the_audit(
    make_pipeline: MakePipeline, receiver: tuple[str, list[tuple[str, bytes]]]
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    url, requests = receiver
    job = make_pipeline("stop.updates=20")
    job.start()
    job.send([b"not a sample"], 0)
    job.send(job.samples(SAMPLES // 2))
    job.until_version(3)
    lineage = job.doll("lineage", "--url", f"{url}/lineage", "--interval", "1", log="lineage")
    options = ("--job", job.job_path, "--endpoint", url, "--interval", "1")  # it has no run folder
    otel = job._program.start("otel", *options, err=job.run / "logs" / "otel.log", **environment(job.services))
    job.until(lambda: any(path == "/lineage" for path, _ in requests), "the first event")
    job.kill("ps")
    job.send(job.samples(SAMPLES // 2 + 16))
    job.until_finished()
    assert lineage.wait(WAIT_TIMEOUT_S) == 0, job.log("lineage")
    job.until(lambda: b"doll_job_finished" in b"".join(body for path, body in requests if path == "/v1/metrics"), "it")
    otel.send_signal(signal.SIGTERM)
    assert otel.wait(WAIT_TIMEOUT_S) == 0, job.log("otel")

    events = [json.loads(body) for path, body in requests if path == "/lineage"]
    assert [event["eventType"] for event in events if event["eventType"] != "RUNNING"] == ["START", "COMPLETE"]
    assert events[0]["eventType"], events[-1]["eventType"] == ("START", "COMPLETE")
    assert len({event["run"]["runId"] for event in events}) == 1
    report = job.assert_audit_ok()
    end = events[-1]
    partitions = end["inputs"][0]["inputFacets"]["doll_offsets"]["partitions"]
    assert {each["partition"]: each["applied"] for each in partitions} == {
        line.partition: [[line.origin, line.applied_until]] for line in report.partitions
    }
    assert sum(each["deadLetters"] for each in partitions) == report.dead == 1
    assert sum(each["samples"] for each in partitions) == report.applied
    assert end["outputs"][0]["facets"]["version"]["datasetVersion"] == str(report.version)
    assert end["outputs"][0]["name"] == str(job.run / "checkpoints")
    assert any(path == "/v1/traces" for path, _ in requests)

    again = job.doll("lineage", log="lineage-again")
    printed = [json.loads(line) for line in again.communicate(WAIT_TIMEOUT_S)[0].splitlines()]
    assert printed == [events[0], end]
