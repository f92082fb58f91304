"""Commands that run a whole job on this machine, or use what a run has left: up, resume, rollback, export."""

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
            help="Run the workers as processes of this machine, or as actors of Ray, which it starts if "
            "fleet.address names no cluster [default: ray if fleet.kind is ray, else processes]."
        ),
    ] = None,
    page: PageOption = True,
    as_json: JsonOption = False,
) -> None:
    """Run a whole job on this machine: broker, parameter server, workers, evaluator and producer.

    It prints the address of a page that shows the job live. It ends by the job's stop rule or on Ctrl-C. Then it audits
    the ledger, exports the model and writes report.json.

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
    """Resume a run of doll up from its checkpoints, on the same topics. Its report then covers the whole run.

    A local broker is started again on the data in the run folder. The batch size and the task cannot change, because
    batches are identified by their numbers; the number of workers, rates, stop rules and others can, with --set.

    Example: doll resume runs/digits-20260101-120000 --set stop.updates=2000
    """
    from doll.run.local.resume import run_resume

    _finish(run_resume(run, overrides or [], page=page), as_json)


def regrid(
    job: RunOptions,
    batch_size: Annotated[int | None, typer.Option("--batch-size", "-b", min=1, help="b: samples per batch.")] = None,
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", "-K", min=1, help="K: batches per update, under policy doll."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME[:KEY=VALUE...]", help="Policy, with its options after colons."),
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", "-N", min=1, help="How many workers.")] = None,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with batches of another size, or under another policy or optimizer, from the newest checkpoint.

    The model, its version and its ledger go on. Batches are numbered again, from the first offset that is not learned,
    so that doll audit still counts each offset once. Of a run that has ended it is doll resume with these changes; a
    killed regrid leaves the run as it was, or regridded. Other keys change with --set.

    Of a job file, whose roles are started one by one, the job file has the new values: end its parameter server, run
    doll regrid JOB.yaml, and start all roles again with this job file.

    Example: doll regrid runs/digits-20260101-120000 --batch-size 256 --group-size 8
    """
    from doll.run.local.regrid import NewGrid, regrid_deployed, regrid_run

    target = job.target(run_folder)
    new = NewGrid(batch_size=batch_size, group_size=group_size, policy=policy, workers=workers)
    if target.is_run_folder:
        report = regrid_run(target, job.overrides or [], new, say)
        _finish(report, as_json)
    if new != NewGrid():
        raise typer.BadParameter(
            "expected these values in the job file, which the job's roles are started with: options are for runs of "
            "doll up"
        )
    result = regrid_deployed(target)
    emit_result(as_json, result)


def rollback(
    job: RunOptions,
    to: Annotated[
        str,
        typer.Option(metavar="VERSION", help="A version that is kept: a number or an alias."),
    ],
    skip: Annotated[
        bool | None,
        typer.Option("--skip/--again", help="What was learned since: leave it out, or learn it again."),
    ] = None,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let training go on from an earlier version.

    The earlier model gets the number after the newest one, and is the newest one from then on. With --again the
    samples that were learned since are learned again; with --skip they are left out, and doll audit counts them as
    skipped. The versions since stay as long as others. A run that has ended is then resumed; a killed rollback leaves
    it as it was, or rolled back. To serve an earlier version: doll versions alias.

    Of a job file, whose roles are started one by one: end its parameter server, run doll rollback JOB.yaml, and start
    all roles again.

    Example: doll rollback runs/digits-20260101-120000 --to 120 --skip
    """
    from doll.run.local.regrid import rollback_deployed, rollback_run

    if skip is None:
        raise typer.BadParameter("expected --again, to learn again what was learned since, or --skip, to leave it out")
    target = job.target(run_folder)
    if target.is_run_folder:
        _finish(rollback_run(target, to, skip=skip, say=say), as_json)
    result = rollback_deployed(target, to, skip=skip)
    emit_result(as_json, result)


def replay_(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    to: Annotated[str, typer.Option(metavar="VERSION", help="latest, a number, or an alias.")],
    out: Annotated[Path | None, typer.Option(help="Output folder [default: replayed/ in the run folder].")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a version again from the event log of its run, to the bit, and write it as doll export does.

    The run must have been made with checkpoint.event_log: true. Where a checkpoint of the version is kept, all its
    tensors are compared.

    Example: doll replay runs/digits-20260101-120000 --to 120
    """
    from doll.run.replay import replay_version
    from doll.run.target import open_target

    target = open_target(run, [])
    made = replay_version(target.run, to, out or target.run.path / "replayed")
    emit_result(as_json, made)


def scale(
    job: RunOptions,
    workers: Annotated[int, typer.Option("--workers", "-N", min=1, help="How many workers the job is to have.")],
    timeout_s: Annotated[
        float | None, duration("How long to wait until the partitions have moved [default: 60].", "--timeout")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Change the number of workers of a running job.

    A partition moves between two batches, and stays with its worker until the other one is there: no sample is lost or
    counted twice. doll up starts and ends its workers by itself. Elsewhere start the new workers like the others,
    before or after this command. Workers that serve no partition wait as spares; you may end them.

    Example: doll scale runs/digits-20260101-120000 --workers 7
    """
    from doll.run import scale as scaling

    wait_s = scaling.TIMEOUT_S if timeout_s is None else timeout_s
    scaled = scaling.scale(job.target(), workers, timeout_s=wait_s, say=say)
    emit_result(as_json, scaled)


def export(
    job: RunOptions,
    out: Annotated[Path | None, typer.Option(help="Output folder [default: model/ in the run folder].")] = None,
    average: Annotated[
        bool | None,
        typer.Option("--average/--weights", help="The average of training.ema, or the weights [default: the average]."),
    ] = None,
    version: VersionOption = "latest",
    format_: Annotated[
        Literal["safetensors", "onnx", "torch.export"],
        typer.Option("--format", help="The tensors, or a graph that computes: ONNX, or one of torch.export."),
    ] = "safetensors",
    samples: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Records, a line each, to compare a graph on [default: Task.holdout(), the source]."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="mlflow[:ADDRESS]", help="Register it in MLflow, too [address: $MLFLOW_TRACKING_URI]."),
    ] = None,
    run_folder: RunFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a version of the model, and model.json: its tensors as model.safetensors, or a graph.

    A graph is compared with torch on held-out samples before it is written. A model that has no such form, or whose
    outputs differ by more than 1e-5, is refused, with the operator's name.

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
