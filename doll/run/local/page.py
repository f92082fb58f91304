"""The page of `doll up` and `doll compare`, served by a separate process. It ends with the run, which waits at most
three seconds for its end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from doll.extras import is_installed, lacking
from doll.ledger.admission import AFTER_TERM_ENV
from doll.local.forks import Role
from doll.local.processes import LOOPBACK, end, free_port, spawn
from doll.run.local.context import LocalRun

_NAME: Final = "page"
_EXTRA: Final = "serve"
_GRACE_S: Final = 3.0


def start_page(run: LocalRun) -> Role | None:
    """Start the page and print its address; return None if the packages that serve it are not installed."""
    if not is_installed(_EXTRA):
        run.display.say(str(lacking("the live page", _EXTRA)))
        return None
    port, services = free_port(), run.stack.services
    arguments = [str(run.folder.job), services.kafka, services.redis, str(run.folder.path), port]
    env = {AFTER_TERM_ENV: str(run.after_term)} if run.after_term else {}
    log_path = run.folder.logs / f"{_NAME}.log"
    role = run.forks.start_role("doll.run.local.roles:page_role", arguments, log_path=log_path, name=_NAME, env=env)
    run.display.say(f"page: http://{LOOPBACK}:{port}")
    return role


def end_page(role: Role) -> None:
    """End the page, after it has sent its last state (the report with its audit) to the browsers."""
    role.terminate()
    role.wait(_GRACE_S)


@contextlib.contextmanager
def page_of_runs(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """While the context is open, serve the page of the runs in `folder`, if its packages are installed."""
    if not is_installed(_EXTRA):
        say(str(lacking("the live page", _EXTRA)))
        yield
        return
    port = free_port()
    process = spawn(
        [sys.executable, "-m", "doll", "dashboard", str(folder), "--port", str(port)], folder / f"{_NAME}.log"
    )
    say(f"page: http://{LOOPBACK}:{port}")
    try:
        yield
    finally:
        end(process, _GRACE_S)
