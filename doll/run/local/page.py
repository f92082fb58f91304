"""The page of a run of `doll up`, served by a process of its own: it ends with the run, and cannot hold it up."""

from __future__ import annotations

from typing import Final

from doll.ledger.admission import AFTER_TERM_ENV
from doll.local.processes import LOOPBACK, free_port
from doll.run.local.context import LocalRun

_NAME: Final = "page"


def start_page(run: LocalRun) -> None:
    """Start the page, and say where it is."""
    port, services = free_port(), run.stack.services
    arguments = [str(run.folder.job), services.kafka, services.redis, str(run.folder.path), port]
    env = {AFTER_TERM_ENV: str(run.after_term)} if run.after_term else {}
    log_path = run.folder.logs / f"{_NAME}.log"
    run.forks.start_role("doll.run.local.roles:page_role", arguments, log_path=log_path, name=_NAME, env=env)
    run.display.say(f"page: http://{LOOPBACK}:{port}")
