"""`doll serve`: answers requests with a job's model, during training and afterwards."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
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
        typer.Option(help="Version to serve: latest, an alias (doll versions alias) or a number [default: latest]."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION=PERCENT,...",
            help="Versions to serve, and the percentage of requests for each, as in stable=95,latest=5.",
        ),
    ] = None,
    split_by: Annotated[
        str, typer.Option(metavar="HEADER", help="With --split: requests with the same header get the same version.")
    ] = "",
    host: Annotated[
        str, typer.Option(help="Address to listen on. If other machines can reach it, a token or mTLS is required.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0: any free port.")] = 8000,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Number of processes that share the port.")] = 1,
    name: Annotated[str, typer.Option(help="Name of the model in requests [default: the job's name].")] = "",
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum number of samples per batch.")] = 64,
    max_queue: Annotated[int, typer.Option(min=1, help="Maximum number of waiting requests; others get 429.")] = 1024,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest request, MB; larger ones get 413.")] = 16.0,
    row_memory_mb: Annotated[
        float, typer.Option(min=0.001, help="Memory for table rows newer than the checkpoint, MB per process.")
    ] = 256.0,
    timeout_s: Annotated[
        float | None, duration("Time limit to receive a request, and then to compute it [default: 10].", "--timeout")
    ] = None,
    keep_alive_s: Annotated[
        float | None,
        duration(
            "Time until an idle connection is closed; must exceed the load balancer's time [default: 75].",
            "--keep-alive",
        ),
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Also compute each request with this version, for --log-answers: an alias, a number or latest.",
        ),
    ] = None,
    log_answers: Annotated[
        str,
        typer.Option(metavar="TOPIC", help="Send every answer, with its version and id, to this Kafka topic."),
    ] = "",
    log_records: Annotated[
        bool,
        typer.Option(
            "--log-records",
            help="With --log-answers: log each record of /predict with its answer, as features for data.join.",
        ),
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token that requests must have [default: the token in DOLL_SERVE_TOKEN]."),
    ] = None,
    read_token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with a token for metadata and metrics only [default: the token in DOLL_SERVE_READ_TOKEN]."
        ),
    ] = None,
    page_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            metavar="PORT",
            help="Also serve the live page of the job on this machine, at this port; 0: any free port.",
        ),
    ] = None,
    run_folder: RunFolderOption = None,
) -> None:
    """Answer requests with the model of a job, by the Open Inference Protocol V2 and POST /predict.

    The server loads each new version and replaces the old one between two batches. While Kafka, Redis or the parameter
    server is unavailable, and after the job has ended, it continues with its last version. Each answer names its
    version.

    Example: doll serve runs/digits-20260101-120000 --port 8000
    """
    if page_port is not None and processes > 1:
        raise typer.BadParameter("--page-port: expected --processes 1; doll dashboard --model-server shows several")
    if log_records and not log_answers:
        raise typer.BadParameter("--log-records: expected --log-answers TOPIC, the topic for them")
    if shadow is not None and (not log_answers or log_records):
        raise typer.BadParameter("--shadow: expected --log-answers TOPIC for its answers, without --log-records")
    if split_by and split is None:
        raise typer.BadParameter("--split-by: expected --split VERSION=PERCENT,..., the versions and their percentages")
    require("doll serve", "serve")
    from doll.serving.main import ServedJob, ServeOptions, run_serve

    target = job.target(run_folder)
    options = ServeOptions(
        wanted=_wanted(version, split), host=host, port=port, processes=processes, name=name or target.config.job,
        max_batch=max_batch, max_queue=max_queue, max_body_bytes=round(max_body_mb * _MB),
        row_bytes=round(row_memory_mb * _MB),
        time_limit_s=10.0 if timeout_s is None else timeout_s,
        keep_alive_s=75.0 if keep_alive_s is None else keep_alive_s, log_topic=log_answers,
        log_records=log_records, shadow="" if shadow is None else _plain(shadow), token_file=token_file,
        read_token_file=read_token_file,
        split_by=split_by,
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
    """Return the versions to serve, and the percentage of requests that each version answers."""
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
    """Return the version in its plain form, such as `7` for `007`. Refuse any text but versions and aliases."""
    version = version.strip()
    if version.isdecimal():
        return str(int(version))
    return version if version == LATEST else checked_alias(version)


def _services(target: Target) -> Services | None:
    """Return the job's services. None: no address is known; the server then uses only checkpoints."""
    from doll.errors import ConfigError, ServiceUnavailableError

    with suppress(ConfigError, ServiceUnavailableError):
        return target.services(needs_redis=False)
    return None


def _has_ended(target: Target) -> bool:
    """Return whether the run has ended and was not resumed afterwards."""
    return target.is_run_folder and _modified_s(target.run.report) >= _modified_s(target.run.stack) > 0


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
