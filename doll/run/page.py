"""The page of `doll dashboard` and of `doll serve --page-port`. It shows a job from its topics while Kafka has them,
otherwise a run from its folder, or several runs side by side."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from doll.dashboard.model_server import WithModelServer
from doll.dashboard.runs_folder import RunsFolder
from doll.dashboard.server import JobPage, PageServer, RunsPage, serve_page
from doll.dashboard.sources import EndedRun, JobSource, RunningJob
from doll.errors import DollError, ServiceUnavailableError
from doll.process.http_access import LOOPBACK, Tokens, address_of, listen
from doll.run.folder import RunFolder, display_path
from doll.run.status import reachable_kafka
from doll.run.target import Target

_END_S: Final = 10.0  # time limit for the page to end

Say = Callable[[str], None]
ReadMetrics = Callable[[], str]


def serve_target(
    target: Target, listener: socket.socket, tokens: Tokens, say: Say, metrics: ReadMetrics | None = None
) -> None:  # fmt: skip
    """Serve the page of a job or a run at a socket until SIGTERM or SIGINT.

    Args:
        say: called with a description of the page when the page is available.
        metrics: reads the metrics of the job's model server. None: no model server is shown.

    Raises:
        ServiceUnavailableError: the broker of a job file does not answer.
        ConfigError: the report of the run cannot be read.
    """
    with _opened(target, metrics) as (source, what):
        say(what)
        serve_page(JobPage(source), listener, tokens=tokens)


def serve_runs(folder: Path, listener: socket.socket, tokens: Tokens, say: Say) -> None:
    """Serve the page of the runs in a folder, side by side, until SIGTERM or SIGINT.

    Args:
        say: see `serve_target`.
    """
    say(f"page of the runs in {display_path(folder.resolve())}")
    serve_page(RunsPage(RunsFolder(folder.resolve())), listener, tokens=tokens)


@contextlib.contextmanager
def page_beside(target: Target, port: int, metrics: ReadMetrics, say: Say) -> Iterator[None]:
    """While the context is open, serve the page of a job and of its model server on loopback, in a thread.

    If the page cannot be shown, the reason is printed, and the model server still works.
    """
    with listen(LOOPBACK, port) as listener, contextlib.ExitStack() as opened:
        try:
            source, what = opened.enter_context(_opened(target, metrics))
        except DollError as error:
            say(f"no page: {error}")
            listener.close()
            yield
            return
        server = PageServer(JobPage(source))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="page", daemon=True)
        thread.start()
        say(f"{what}: {address_of(listener)}")
        try:
            yield
        finally:
            server.should_exit = True
            thread.join(_END_S)


@contextlib.contextmanager
def _opened(target: Target, metrics: ReadMetrics | None) -> Iterator[tuple[JobSource, str]]:
    """Yield the source of the page's state, and a description of it."""
    with contextlib.ExitStack() as opened:
        source, what = _job_or_run(target, opened)
        if metrics is not None:
            source = WithModelServer(source, metrics)
            opened.enter_context(source.watched())
        yield source, what


def _job_or_run(target: Target, opened: contextlib.ExitStack) -> tuple[JobSource, str]:
    beside = RunFolder(target.path.parent.resolve())  # the job file of a run is in its folder
    run = beside if beside.report.exists() else target.run
    if not run.report.exists():
        try:
            target, services = reachable_kafka(target)
        except ServiceUnavailableError:
            if not target.is_run_folder:
                raise
        else:
            job = RunningJob(target.config, run.path)
            opened.enter_context(job.followed(services))
            return job, f"page of job {target.config.job}"
    return EndedRun(target.config, run.path), f"page of the run in {display_path(run.path)}"
