"""The page of `doll up` and of `doll compare`, served by a process of its own: it ends with the run, and cannot hold it
up."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from doll.ledger.admission import AFTER_TERM_ENV
from doll.local.processes import LOOPBACK, end, free_port, spawn
from doll.run.local.context import LocalRun

_NAME: Final = "page"
_GRACE_S: Final = 3.0


def start_page(run: LocalRun) -> None:
    """Start the page, and say where it is."""
    port, services = free_port(), run.stack.services
    arguments = [str(run.folder.job), services.kafka, services.redis, str(run.folder.path), port]
    env = {AFTER_TERM_ENV: str(run.after_term)} if run.after_term else {}
    log_path = run.folder.logs / f"{_NAME}.log"
    run.forks.start_role("doll.run.local.roles:page_role", arguments, log_path=log_path, name=_NAME, env=env)
    run.display.say(f"page: http://{LOOPBACK}:{port}")


@contextlib.contextmanager
def page_of_runs(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Within the context: the page of the runs in `folder`, side by side."""
    port = free_port()
    process = spawn(
        [sys.executable, "-m", "doll", "dashboard", str(folder), "--port", str(port)], folder / f"{_NAME}.log"
    )
    say(f"page: http://{LOOPBACK}:{port}")
    try:
        yield
    finally:
        end(process, _GRACE_S)
