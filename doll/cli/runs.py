"""Commands that run a whole job on this machine or use the files of a run: up, resume, regrid, rollback, export, ..."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from doll.cli.options import (
    FreshOption,
    JobOptions,
    JsonOption,
    PageOption,
    RunFolderOption,
    RunOptions,
    RunsFolderOption,
    SetOption,
    VersionOption,
    duration,
)
from doll.cli.output import emit, emit_result, say


def up(
    job: JobOptions,
    runs_folder: RunsFolderOption = Path("runs"),
    fresh: FreshOption = False,
    fleet: Annotated[
        Literal["processes", "ray"] | None,
        typer.Option(
            help="Run the workers as processes of this machine or as actors of Ray. If fleet.address names no "
            "cluster, doll up starts Ray [default: ray if fleet.kind is ray, otherwise processes]."
        ),
    ] = None,
    page: PageOption = True,
    as_json: JsonOption = False,
) -> None:
    """Run a whole job on this machine: broker, parameter server, workers, evaluator and producer.

    It prints the address of a page that shows the job live. The run ends by the job's stop rule or on Ctrl-C. Then doll
    up audits the ledger, exports the model and writes report.json.

    Example: doll up digits --set stop.updates=100
    """
    from doll.run.local.up import run_up

    if fleet is not None and replace(job, overrides=None).target().config.fleet.kind != fleet:
        job = replace(job, overrides=[f"fleet={{kind: {fleet}}}", *(job.overrides or [])])
    _finish(run_up(job.target().config, runs_folder, fresh=fresh, page=page), as_json)


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    overrides: SetOption = None,
    page: PageOption = True,
    as_json: JsonOption = False,
) -> None:
    """Resume a run of doll up from its checkpoints, on the same topics. The new report covers the whole run.

    A local broker is started again with the data in the run folder. The batch size and the task cannot change, because
    batches are identified by their numbers. Other keys can change with --set, such as the number of workers, rates and
    stop rules.

    Example: doll resume runs/digits-20260101-120000 --set stop.updates=2000
    """
    from doll.run.local.resume import run_resume

    _finish(run_resume(run, overrides or [], page=page), as_json)


def regrid(
    job: RunOptions,
    batch_size: Annotated[int | None, typer.Option("--batch-size", "-b", min=1, help="Samples per batch (b).")] = None,
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", "-K", min=1, help="Batches per update, under policy doll (K)."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME[:KEY=VALUE...]", help="Consistency policy; its options follow after colons."),
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", "-N", min=1, help="Number of workers (N).")] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, help="Number of shards; alone, it is a change of doll resume.")
    ] = None,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue from the newest checkpoint with another batch size, policy or optimizer.

    The model, its version number and its ledger continue. Batches are numbered again, from the first offset that is not
    learned, so that doll audit still counts each offset once. A run must have ended; the command then resumes it with
    the changes. If the command is killed, the run is either unchanged or changed completely. Change other keys with
    --set.

    With a job file (roles started one by one): write the new values into the job file, end the parameter server, run
    doll regrid JOB.yaml, and start all roles again with this job file.

    Example: doll regrid runs/digits-20260101-120000 --batch-size 256 --group-size 8
    """
    from doll.run.local.regrid import NewGrid, regrid_deployed, regrid_run

    target = job.target(run_folder)
    new = NewGrid(batch_size=batch_size, group_size=group_size, policy=policy, workers=workers, shards=shards)
    if target.is_run_folder:
        _finish(regrid_run(target, job.overrides or [], new, say), as_json)
    if new != NewGrid():
        raise typer.BadParameter(
            "expected these values in the job file, which the job's roles are started with: options are for runs of "
            "doll up"
        )
    emit_result(as_json, regrid_deployed(target))


def rollback(
    job: RunOptions,
    to: Annotated[
        str,
        typer.Option(metavar="VERSION", help="Number or alias of a kept version."),
    ],
    skip: Annotated[
        bool | None,
        typer.Option("--skip/--again", help="Skip the samples learned since that version, or learn them again."),
    ] = None,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue training from an earlier version.

    The model of the earlier version becomes the newest version, with the next version number. With --again, the samples
    learned since then are learned again. With --skip, they are not, and doll audit counts them as skipped. Later
    versions are kept as long as other versions. A run must have ended; the command then resumes it. If the command is
    killed, the run is either unchanged or rolled back completely. To serve an earlier version: doll versions alias.

    With a job file (roles started one by one): end the parameter server, run doll rollback JOB.yaml, and start all
    roles again.

    Example: doll rollback runs/digits-20260101-120000 --to 120 --skip
    """
    from doll.run.local.regrid import rollback_deployed, rollback_run

    if skip is None:
        raise typer.BadParameter("expected --again, to learn again what was learned since, or --skip, to leave it out")
    target = job.target(run_folder)
    if target.is_run_folder:
        _finish(rollback_run(target, to, skip=skip, say=say), as_json)
    emit_result(as_json, rollback_deployed(target, to, skip=skip))


def replay_(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    to: Annotated[str, typer.Option(metavar="VERSION", help="Version to rebuild: latest, a number or an alias.")],
    out: Annotated[Path | None, typer.Option(help="Output folder [default: replayed/ in the run folder].")] = None,
    as_json: JsonOption = False,
) -> None:
    """Rebuild a version, bit for bit, from the event log of its run, and write it in the format of doll export.

    The run needs the setting checkpoint.event_log: true. If a checkpoint of the version is kept, all its tensors are
    compared with the rebuilt tensors.

    Example: doll replay runs/digits-20260101-120000 --to 120
    """
    from doll.run.replay import replay_version
    from doll.run.target import open_target

    target = open_target(run, [])
    emit_result(as_json, replay_version(target.run, to, out or target.run.path / "replayed"))


def scale(
    job: RunOptions,
    workers: Annotated[int, typer.Option("--workers", "-N", min=1, help="New number of workers (N).")],
    timeout_s: Annotated[
        float | None, duration("Time limit for moving the partitions [default: 60].", "--timeout")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Change the number of workers of a running job.

    A partition moves between two batches; until the new worker is ready, the old one keeps it. No sample is lost or
    counted twice. doll up starts and ends its workers automatically. In other deployments, start the new workers like
    the others, before or after this command. Workers without a partition wait as spares; you may end them.

    Example: doll scale runs/digits-20260101-120000 --workers 7
    """
    from doll.run import scale as scaling

    wait_s = scaling.TIMEOUT_S if timeout_s is None else timeout_s
    emit_result(as_json, scaling.scale(job.target(), workers, timeout_s=wait_s, say=say))


def export(
    job: RunOptions,
    out: Annotated[Path | None, typer.Option(help="Output folder [default: model/ in the run folder].")] = None,
    average: Annotated[
        bool | None,
        typer.Option("--average/--weights", help="Export the average of training.ema (the default) or the weights."),
    ] = None,
    version: VersionOption = "latest",
    format_: Annotated[
        Literal["safetensors", "onnx", "torch.export"],
        typer.Option("--format", help="safetensors: only the tensors; onnx, torch.export: a computation graph."),
    ] = "safetensors",
    samples: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Records to compare a graph with torch on, one per line [default: Task.holdout(), the source].",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="mlflow[:ADDRESS]", help="Also register it in MLflow [address: $MLFLOW_TRACKING_URI]."),
    ] = None,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a version of the model: model.json, and the tensors as model.safetensors or a graph.

    A graph is compared with torch on held-out samples before it is written. The export fails if the model cannot be
    converted to the format, or if outputs differ by more than 1e-5. The error names the operator.

    Example: doll export runs/digits-20260101-120000 --version stable --format onnx --out model
    """
    from doll.records.lines import read_file
    from doll.run.export import ExportOptions, export_model

    job_target = job.target(run_folder)
    folder = out or job_target.run.model
    if to is not None:
        from doll.run.mlflow_registry import registry_uri

        to = registry_uri(to)
    values = () if samples is None else read_file(samples)
    options = ExportOptions(version=version, format=format_, average=average, samples=values)
    exported = export_model(job_target.config, job_target.run.path, folder, options)
    what = f"version {exported['version']} of {exported['job']}" + (", average" if exported["average"] else "")
    text = f"{what}: {folder / exported['file']}"
    if "compared" in exported:
        compared = exported["compared"]
        text += f" (within {compared['largest_difference']:.2g} of torch on {compared['samples']} samples)"
    if to is not None:
        from doll.run.mlflow_registry import register
        from doll.run.versions import show_version

        exported["mlflow"] = register(folder, exported, show_version(job_target, str(exported["version"])), to)
        text += f"\nMLflow: version {exported['mlflow']['version']} of {exported['mlflow']['name']}"
    emit(as_json, exported, text)


def _finish(report: dict[str, Any], as_json: bool) -> None:
    from doll.monitor.views.run_report import summary

    emit(as_json, report, summary(report))
    raise typer.Exit(report["exit_code"])
