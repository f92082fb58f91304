"""`doll serve` and the page beside a job that is rolled back while they run: what was left is never called the newest.

Redis stays, with the weights that were published last, so nothing but the checkpoints says that the job went back.
"""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from doll.dashboard.sources import RunningJob
from doll.local.processes import free_port
from doll.local.supervisor import Supervisor
from doll.monitor.views.page import page
from job_rig import MakePipeline
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.integration
FEATURES = 4
SAMPLES = 400


class Asker:
    """Asks for the newest version all the time, and keeps every answer in its order."""

    def __init__(self, port: int, model: str) -> None:
        self._url = f"http://127.0.0.1:{port}/v2/models/{model}/versions"
        self.answers: list[dict[str, Any]] = []

    def ask(self, wanted: str = "latest") -> dict[str, Any]:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, FEATURES], "data": FEATURES * [1.0]}
        request = urllib.request.Request(
            f"{self._url}/{wanted}/infer",
            json.dumps({"inputs": [tensor]}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_TIMEOUT_S) as answer:
            content: dict[str, Any] = json.loads(answer.read())
        return {
            "version": int(content["model_version"]),
            "output": content["outputs"][0]["data"],
            **content["parameters"],
        }

    def answers_now(self) -> bool:
        try:
            return bool(self.ask())
        except urllib.error.URLError:
            return False

    @contextmanager
    def asking(self) -> Iterator[None]:
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(0.02):
                self.answers.append(self.ask())

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@pytest.fixture
def job(make_pipeline: MakePipeline) -> Any:
    """A job that is under way, with its server and an alias for a version that is left later."""
    job = make_pipeline("stop.updates=1000", "checkpoint.keep=100")
    job.start()
    job.send(job.samples(SAMPLES))
    job.until_version(12)
    return job


def test_the_server_and_the_page_follow_the_line_that_goes_on(job: Any) -> None:
    port = free_port()
    asker = Asker(port, job.config.job)
    job.until(lambda: len(job.store.versions()) >= 2, "two versions")
    server = job.doll("serve", "--port", str(port), "--split", "latest=50,stable=50", log="serve")
    shown = RunningJob(job.config, job.run)
    try:
        with shown.followed(job.services):
            # The newest version stays the newest only once all samples are in it.
            job.until(lambda: job.status is not None and job.status.samples_total == SAMPLES, "all samples")
            job.until_status(lambda status: status.durable_version == status.version, "a checkpoint of all")
            left = job.checkpoint()
            job.store.change_marks(lambda marks: marks.with_alias("stable", left.version))
            until(asker.answers_now, lambda: job.log("serve"))
            until(lambda: asker.ask()["version"] == left.version, lambda: str(asker.ask()))
            to = min(version for _, version in job.store.versions())
            job.supervisor.stop(grace_s=60)
            with asker.asking():
                back = job.doll("rollback", "--to", str(to), "--skip", log="rollback")
                assert back.wait(WAIT_TIMEOUT_S) == 0, job.log("rollback")
                again = job.checkpoint()
                assert (again.version, again.term > left.term) == (left.version + 1, True)
                until(lambda: asker.answers[-1]["version"] == again.version, lambda: str(asker.answers[-1]))
                assert asker.answers[-1]["samples_behind"] == 0
                # A server looks for rollbacks every two seconds.
                until(lambda: "left_behind" in asker.ask("stable"), lambda: str(asker.ask("stable")))
                stable = asker.ask("stable")
                assert (stable["version"], stable["samples_behind"]) == (left.version, None)
                assert stable["left_behind"].startswith(f"version {again.version} is version {to} again")
                assert "left_behind" not in asker.ask("latest")

                job.supervisor = Supervisor(job.forks.launch, on_restart=job.restarts.append)
                job.start()
                job.send(job.samples(200))
                job.until(lambda: job.updates[-1].term > again.term and job.version > again.version + 3, "updates")
                until(lambda: asker.answers[-1]["version"] > again.version + 3, "versions of the next server")
            places = [(answer["term"], answer["version"]) for answer in asker.answers]
            assert places == sorted(places), "once it has gone back, no answer is of a version that was left"
            assert asker.ask(str(left.version))["output"] == stable["output"]

            newest = job.updates[-1]
            until(lambda: str(newest.version) in shown.read(page)["lists"]["updates"], "the newest update on the page")
            view = shown.read(page)
            facts = dict(view["questions"]["safety"]["facts"])
            assert view["questions"]["safety"]["tone"] == "good", facts
            assert " 0 missing, 0 twice" in facts["audit"]
            shown_updates = view["lists"]["updates"]
            assert shown_updates[str(left.version)][0] == "16, void"
            assert shown_updates[str(newest.version)][0] == "16"
        report = job.assert_audit_ok()
        assert report.skipped > 0
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
