"""`doll serve`: answer requests with a job's model while it is learned, and afterwards."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from doll.cli.options import RunFolderOption, RunOptions, duration
from doll.cli.output import say
from doll.extras import require
from doll.storage.version_marks import LATEST, checked_alias

if TYPE_CHECKING:
    from doll.run.target import Target
    from doll.services import Services
    from doll.serving.metrics import ServeMetrics

_MB = 1e6


def serve(
    job: RunOptions,
    version: Annotated[
        str | None,
        typer.Option(help="latest, an alias (doll versions alias) or a number [default: latest]."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION=PERCENT,...",
            help="Several versions, and the share of requests that each answers, as in stable=95,latest=5.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; one that other machines reach needs a token, or certificates.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0: one that is free.")] = 8000,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Processes that share the port.")] = 1,
    name: Annotated[str, typer.Option(help="Name of the model in requests [default: that of the job].")] = "",
    max_batch: Annotated[int, typer.Option(min=1, help="Samples that the model gets at once, at most.")] = 64,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are answered 429.")] = 1024,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="MB of a request; more are answered 413.")] = 16.0,
    row_memory_mb: Annotated[
        float, typer.Option(min=0.001, help="MB for rows of tables that a checkpoint lacks, in each process.")
    ] = 256.0,
    timeout_s: Annotated[
        float | None, duration("Time for a request to come, and then to be computed [default: 10].", "--timeout")
    ] = None,
    keep_alive_s: Annotated[
        float | None,
        duration(
            "How long a connection stays open without a request; longer than a load balancer keeps it [default: 75].",
            "--keep-alive",
        ),
    ] = None,
    log_answers: Annotated[
        str,
        typer.Option(metavar="TOPIC", help="Send answers to this topic, with version and id."),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token of requests [default: that of DOLL_SERVE_TOKEN]."),
    ] = None,
    page_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            metavar="PORT",
            help="Also serve the live page of the job, on this machine, at this port; 0: one that is free.",
        ),
    ] = None,
    run_folder: RunFolderOption = None,
) -> None:
    """Answer requests with the model of a job, by the Open Inference Protocol V2 and POST /predict.

    It follows the versions: a newer one takes the place of the older one in memory, between two batches. It goes on
    with the last good version while Kafka, Redis or the parameter server is away, and after the job has ended. Each
    answer names its version.

    Example: doll serve runs/digits-20260101-120000 --port 8000
    """
    if page_port is not None and processes > 1:
        raise typer.BadParameter("--page-port: expected --processes 1; doll dashboard --model-server shows several")
    require("doll serve", "serve")
    from doll.serving.main import ServedJob, ServeOptions, run_serve

    target = job.target(run_folder)
    options = ServeOptions(
        wanted=_wanted(version, split), host=host, port=port, processes=processes, name=name or target.config.job,
        max_batch=max_batch, max_queue=max_queue, max_body_bytes=round(max_body_mb * _MB),
        row_bytes=round(row_memory_mb * _MB),
        time_limit_s=10.0 if timeout_s is None else timeout_s,
        keep_alive_s=75.0 if keep_alive_s is None else keep_alive_s, log_topic=log_answers, token_file=token_file,
    )  # fmt: skip
    served = ServedJob(target.config, target.run.path, lambda: _services(target), lambda: _has_ended(target))
    path = f"/v2/models/{options.name}"

    def beside(metrics: ServeMetrics) -> AbstractContextManager[None]:
        if page_port is None:
            return nullcontext()
        from doll.run.page import page_beside

        return page_beside(target, page_port, lambda: metrics.page().decode(), say)

    raise typer.Exit(run_serve(served, options, say=lambda address: say(address + path), beside=beside))


def _wanted(version: str | None, split: str | None) -> dict[str, float]:
    """Versions, and the percentage of requests that each answers."""
    if split is None:
        return {_plain(version or LATEST): 100.0}
    if version is not None:
        raise typer.BadParameter("expected --version or --split, got both")
    shares: dict[str, float] = {}
    for part in split.split(","):
        name, _, percent = part.partition("=")
        try:
            share = float(percent.strip().removesuffix("%"))
        except ValueError:
            share = -1.0
        if not 0 < share <= 100 or not name.strip() or _plain(name) in shares:
            raise typer.BadParameter(f"--split: expected shares such as stable=95,latest=5, got {split[:60]!r}")
        shares[_plain(name)] = share
    if abs(sum(shares.values()) - 100) > 1e-6:
        raise typer.BadParameter(f"--split: expected shares of 100 together, got {sum(shares.values()):g}")
    return shares


def _plain(version: str) -> str:
    """`7` for `007`; refuses what no version can be called."""
    version = version.strip()
    if version.isdecimal():
        return str(int(version))
    return version if version == LATEST else checked_alias(version)


def _services(target: Target) -> Services | None:
    """The job's services now; None if none are known: a server goes on with checkpoints."""
    from doll.errors import ConfigError, ServiceUnavailableError

    try:
        return target.services(needs_redis=False)
    except (ConfigError, ServiceUnavailableError):
        return None


def _has_ended(target: Target) -> bool:
    """Whether a run has ended, and was not resumed since."""
    return target.is_run_folder and _modified_s(target.run.report) >= _modified_s(target.run.stack) > 0


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
