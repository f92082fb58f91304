"""What `doll dashboard` shows: a job by its topics while Kafka has them, else a run by its folder; or runs side by
side."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from doll.dashboard.ended_run import ended_run
from doll.dashboard.runs_folder import RunsFolder
from doll.dashboard.server import JobPage, RunsPage, serve_page
from doll.dashboard.sources import EndedRun, RunningJob
from doll.errors import ServiceUnavailableError
from doll.run.folder import RunFolder, display_path
from doll.run.status import reachable_kafka
from doll.run.target import Target


def serve_target(target: Target, listener: socket.socket, token: str, say: Callable[[str], None]) -> None:
    """Serve the page of a job or a run at a socket until SIGTERM or SIGINT.

    Args:
        say: is told what is shown, once it can be asked for.

    Raises:
        ServiceUnavailableError: the broker of a job file does not answer.
        ConfigError: the report of the run cannot be read.
    """
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
            with job.followed(services):
                say(f"page of job {target.config.job}")
                serve_page(JobPage(job), listener, token=token)
            return
    state = ended_run(target.config, run.path)
    say(f"page of the run in {display_path(run.path)}")
    serve_page(JobPage(EndedRun(state, run.path)), listener, token=token)


def serve_runs(folder: Path, listener: socket.socket, token: str, say: Callable[[str], None]) -> None:
    """Serve the page of the runs in a folder, side by side, until SIGTERM or SIGINT.

    Args:
        say: as in `serve_target`.
    """
    say(f"page of the runs in {display_path(folder.resolve())}")
    serve_page(RunsPage(RunsFolder(folder.resolve())), listener, token=token)
