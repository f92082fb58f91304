"""`doll config`: show or check a job file."""

from __future__ import annotations

from typing import Annotated

import typer

from doll.cli.errors import DollGroup
from doll.cli.options import JobOption, JsonOption, SetOption, TargetArgument, target
from doll.cli.output import emit

config_app = typer.Typer(cls=DollGroup, help="Show or check a job file.", no_args_is_help=True, rich_markup_mode=None)


@config_app.command("show")
def show(
    job: TargetArgument = None, job_option: JobOption = None, overrides: SetOption = None, as_json: JsonOption = False
) -> None:
    """Print the job file with all defaults and overrides.

    Example: doll config show my.yaml --set data.workers=8
    """
    from doll.config import dump

    config = target(job, job_option, overrides).config
    emit(as_json, config.model_dump(mode="json", by_alias=True, exclude_none=True), dump(config))


@config_app.command("check")
def check(
    job: TargetArgument = None,
    job_option: JobOption = None,
    overrides: SetOption = None,
    build_model: Annotated[
        bool, typer.Option("--build-model", help="Also import the task and build its model; takes seconds.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a job file: keys, values, and the files and task class that it names. Exit code 2 if it is invalid.

    Example: doll config check my.yaml
    """
    from doll.run.local.preflight import check_files, check_pipeline, check_task, count_parameters

    config = target(job, job_option, overrides).config
    check_files(config)
    check_task(config)
    content = {
        "job": config.job,
        "workers": config.data.workers,
        "batch_size": config.data.batch_size,
        "group_size": config.group_size,
    }
    text = (
        f"{config.job}: valid. {config.data.workers} workers, batches of {config.data.batch_size}, "
        f"{config.group_size} batches per update"
    )
    if build_model:
        content["parameters"] = count_parameters(config)
        check_pipeline(config)
        text += f", {content['parameters']} parameters"
    emit(as_json, content, text)
