"""`doll serve` with several processes on one port, which are killed, and end with their parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from doll.local.processes import free_port
from doll.run.folder import RunFolder
from process_checks import is_gone
from serving_rig import ServingRig
from waiting import until

pytestmark = pytest.mark.slow  # starts processes that load torch


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ServingRig]:
    with ServingRig(tmp_path) as rig:
        rig.save(3)
        run = RunFolder(rig.run_folder)
        run.write_job(rig.config)
        run.write_stack(rig.services)
        rig.port = free_port()
        yield rig


@contextlib.contextmanager
def serving(rig: ServingRig, *arguments: str, answering: bool = True) -> Iterator[psutil.Popen]:
    """`doll serve` while the context lasts, from its first answer on."""
    command = [sys.executable, "-m", "doll", "serve", str(rig.run_folder), "--port", str(rig.port), *arguments]
    with (rig.run_folder / "serve.log").open("wb") as log:
        process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        if answering:
            until(lambda: answers(rig), lambda: (rig.run_folder / "serve.log").read_text())
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        process.wait()


def answers(rig: ServingRig) -> bool:
    try:
        return rig.infer()[0] == 200
    except OSError:
        return False


def test_a_process_that_is_killed_is_started_again_and_all_end_with_their_parent(rig: ServingRig) -> None:
    with serving(rig, "--processes", "2") as parent:
        first, second = parent.children()
        first.kill()
        until(lambda: is_gone(first.pid), "its end: until then it may take a connection")
        assert all(answers(rig) for _ in range(20)), "the other one answers"
        until(lambda: len({child.pid for child in parent.children()} - {first.pid}) == 2, "another process")
        until(lambda: answers(rig), "an answer")
        children = parent.children()
        assert second.pid in [child.pid for child in children]
        parent.kill()
        until(lambda: all(is_gone(child.pid) for child in children), "the end of all processes")
        assert not answers(rig)


def test_sigterm_ends_all_in_order(rig: ServingRig) -> None:
    with serving(rig, "--processes", "2") as parent:
        parent.terminate()
        assert parent.wait(60) == 0


def test_what_cannot_be_served_is_refused_once(rig: ServingRig) -> None:
    (rig.config.base_folder / "line.py").write_text("raise RuntimeError('broken')")
    with serving(rig, "--processes", "2", answering=False) as parent:
        assert parent.wait(120) == 2
    assert "broken" in (rig.run_folder / "serve.log").read_text()


def test_an_address_that_others_reach_is_refused_with_what_would_do(rig: ServingRig) -> None:
    with serving(rig, "--host", "0.0.0.0", answering=False) as parent:
        assert parent.wait(120) == 2
    said = " ".join((rig.run_folder / "serve.log").read_text().split())
    assert "expected a token (DOLL_SERVE_TOKEN, or --token-file FILE), or certificates of clients" in said


def test_ten_thousand_connections_end_nothing(rig: ServingRig) -> None:
    """Those beyond as many as it takes are told so, and all others are answered."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 10_500:
        pytest.skip("this process may open fewer than 10,500 files")
    with serving(rig):
        statuses = asyncio.run(asked_over(rig.port, 10_000))
        assert statuses.keys() <= {"200", "503", "closed"}, statuses
        assert min(statuses["200"], statuses["503"]) > 1000, statuses
        until(lambda: answers(rig), "room for another connection")


async def asked_over(port: int, count: int) -> Counter[str]:
    """What so many connections are answered, all of which are open at once."""

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        try:
            writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return (await reader.readuntil(b"\r\n"))[9:12].decode()
        except (ConnectionError, asyncio.IncompleteReadError):  # it was idle for too long, on a slow machine
            return "closed"

    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    for _ in range(0, count, 500):
        opened += await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(500)))
    statuses = Counter(await asyncio.gather(*(ask(*connection) for connection in opened)))
    for _, writer in opened:
        writer.close()
    return statuses


def counted(rig: ServingRig, what: str) -> int:
    lines = rig.request("GET", "/metrics")[2].decode().splitlines()
    return int(float(next(line for line in lines if line.startswith(f"doll_serve_{what}_total{{")).rsplit(" ", 1)[1]))


def test_a_shadow_that_is_killed_is_started_again_and_ends_with_its_server(rig: ServingRig) -> None:
    with serving(rig, "--shadow", "3", "--log-answers", "answers") as server:
        (keeper,) = server.children()
        until(lambda: answers(rig) and counted(rig, "shadow_answers") > 0, "an answer of the shadow")
        (shadow,) = keeper.children()
        assert shadow.nice() == 19
        shadow.suspend()
        before = counted(rig, "shadow_answers") + counted(rig, "skipped_shadow_answers")
        sent = sum(answers(rig) for _ in range(30))
        assert sent == 30, "users do not wait for it"
        shadow.kill()
        until(lambda: counted(rig, "shadow_answers") + counted(rig, "skipped_shadow_answers") >= before + 30, "counts")
        answered = counted(rig, "shadow_answers")
        until(lambda: answers(rig) and counted(rig, "shadow_answers") > answered, "an answer of its successor")
        (shadow,) = keeper.children()
        server.kill()
        until(lambda: is_gone(keeper.pid) and is_gone(shadow.pid), "the end of both")


def test_a_shadow_beside_several_processes_ends_in_order(rig: ServingRig) -> None:
    arguments = ("--processes", "2", "--shadow", "9", "--log-answers", "answers")
    with serving(rig, *arguments) as server:
        assert len(server.children()) == 3
        until(lambda: answers(rig) and counted(rig, "skipped_shadow_answers") > 0, "a version that does not exist")
        assert counted(rig, "shadow_answers") == 0
        processes = server.children(recursive=True)
        server.terminate()
        assert server.wait(60) == 0
        assert all(is_gone(process.pid) for process in processes)


def test_the_same_process_serves_the_page_of_the_job_with_its_versions_and_latencies(rig: ServingRig) -> None:
    RunFolder(rig.run_folder).report.write_text('{"reason": "updates: 3 reached", "error": null}')
    page = free_port()

    def served() -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{page}/events", timeout=60) as stream:
            stream.readline()
            shown: dict[str, Any] = json.loads(stream.readline().removeprefix(b"data: "))["served"]
        return shown

    with serving(rig, "--page-port", str(page)):
        until(lambda: rig.infer() and "latency" in dict(served()["facts"]), "the time of an answer")
        facts = dict(served()["facts"])
        assert facts["version"] == "3"
        assert facts["latency"].startswith("median ")


def test_a_page_beside_several_processes_is_refused(rig: ServingRig) -> None:
    with serving(rig, "--page-port", "0", "--processes", "2", answering=False) as parent:
        assert parent.wait(60) == 2
    assert "expected --processes 1" in (rig.run_folder / "serve.log").read_text()
