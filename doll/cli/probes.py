"""Commands for whoever watches: is a process healthy, and what does the job measure?"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from doll.cli.errors import usage
from doll.cli.options import JobArgument, JobOption, SetOption, target

_PROBE_TIMEOUT_S = 5.0
_MOST_BYTES = 1_000_000


def health(
    port: Annotated[int | None, typer.Option("--port", help="Where it answers [default: $DOLL_HEALTH_PORT].")] = None,
    ready: Annotated[bool, typer.Option("--ready", help="Ask whether it can do its work, not only is alive.")] = False,
) -> None:
    """Ask the process that answers health probes at a port of this machine. Exit 0 if it is healthy, else 1.

    Example: doll health --port 8080 --ready
    """
    import http.client

    from doll.process.health import HOST, PORT_ENV

    given = port if port is not None else os.environ.get(PORT_ENV, "")
    if not str(given).isdecimal() or not 0 < int(given) < 65_536:
        raise usage(f"expected a port, 1 to 65535, in --port or {PORT_ENV}, got {str(given)!r}")
    connection = http.client.HTTPConnection(HOST, int(given), timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/readyz" if ready else "/healthz")
        answer = connection.getresponse()
        text, good = answer.read(_MOST_BYTES).decode("utf-8", "replace"), answer.status == 200
    except (OSError, http.client.HTTPException) as error:
        text, good = f"nobody answers at {HOST}:{given} ({error})", False
    finally:
        connection.close()
    (sys.stdout if good else sys.stderr).write(_printable(text).rstrip("\n") + "\n")
    raise typer.Exit(0 if good else 1)


def _printable(text: str) -> str:
    """Without what would steer a terminal: any process of this machine may have the port."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def prometheus(job: JobArgument = None, job_option: JobOption = None, overrides: SetOption = None) -> None:
    """Serve what all processes of a job measure at /metrics, on 127.0.0.1 and $DOLL_HEALTH_PORT or port 9464.

    Example: doll prometheus my.yaml
    """
    at = target(job, job_option, overrides)
    from doll import telemetry
    from doll.kafka import topics
    from doll.service_checks import require_services

    telemetry.configure(process="prometheus")
    services = at.services()
    require_services(at.config, services)
    topics.check(at.config, services)
    from doll.monitor.prometheus import serve_metrics

    raise typer.Exit(serve_metrics(at.config, services))
