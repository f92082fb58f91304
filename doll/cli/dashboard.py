"""`doll dashboard`: the live page of a job, or the page of a run that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from doll.cli.options import RunFolderOption, RunOptions
from doll.extras import require


def dashboard(
    job: RunOptions,
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Port of the page; 0: one that is free.")] = 0,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; one that other machines reach needs --token-file.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the secret that readers must know.", show_default=False),
    ] = None,
    model_server: Annotated[
        str | None,
        typer.Option(
            "--model-server",
            metavar="ADDRESS",
            help="Also show the doll serve of the job at this address, with the token of DOLL_SERVE_TOKEN.",
            show_default=False,
        ),
    ] = None,
    run_folder: RunFolderOption = None,
) -> None:
    """Serve the live page of a job: whether it learns, is on time and on budget, is safe, and who works.

    It only reads: the job's topics while they answer, else the folder of the run. Of a folder with several runs, such
    as that of doll compare, it shows them side by side. It ends on Ctrl-C. doll up prints the address of a page that it
    serves itself.

    Example: doll dashboard runs/digits-20260101-120000
    """
    require("doll dashboard", "serve")
    from doll.credentials import secret
    from doll.dashboard.model_server import metrics_of
    from doll.dashboard.runs_folder import is_runs_folder
    from doll.process.connections import TOKEN_ENV
    from doll.process.http_access import address_of, listen, read_token
    from doll.run.page import serve_runs, serve_target

    token = "" if token_file is None else read_token(token_file)
    metrics = None if model_server is None else metrics_of(model_server, secret(TOKEN_ENV) or "")
    target = None if job.job is not None and is_runs_folder(job.job) else job.target(run_folder)
    with listen(host, port, token) as listener:
        note = " (it asks for the token)" if token else ""

        def say(text: str) -> None:
            typer.echo(f"{text}: {address_of(listener)}{note}", err=True)

        if target is not None:
            serve_target(target, listener, token, say, metrics)
        elif job.job is not None:
            serve_runs(job.job, listener, token, say)
