"""The page of a job: by its topics while Kafka has them, else by the folder of the run."""

from __future__ import annotations

import socket
from collections.abc import Callable

from doll.dashboard.ended_run import ended_run
from doll.dashboard.server import serve_page
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
                serve_page(job, listener, token=token)
            return
    state = ended_run(target.config, run.path)
    say(f"page of the run in {display_path(run.path)}")
    serve_page(EndedRun(state), listener, token=token)
