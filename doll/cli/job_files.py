"""`doll example` and `doll config`: list and copy the examples that ship with DOLL, and show or check a job file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from doll.amounts import aligned
from doll.cli.groups import Commands
from doll.cli.options import JsonOption, RunOptions
from doll.cli.output import emit

example_app = Commands(help="List or copy the examples that ship with DOLL.")
config_app = Commands(help="Show or check a job file.")


@example_app.command("list")
def list_examples(as_json: JsonOption = False) -> None:
    """Show the examples that ship with DOLL. Each name can be used in place of a job file.

    Example: doll example list
    """
    from doll.run.examples import examples

    shipped = [(example, example.lacks_data()) for example in examples()]
    rows = [
        (example.command, f"{example.description}{' Needs data of your own.' * lacks_data}")
        for example, lacks_data in shipped
    ]
    content = [
        {**example._asdict(), "files": [str(file) for file in example.files], "lacks_data": lacks_data}
        for example, lacks_data in shipped
    ]
    emit(as_json, content, "\n".join([*aligned(rows, "<"), "", "To change one: doll example copy NAME FOLDER"]))


@example_app.command("copy")
def copy_example(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of an example; see doll example list.")],
    to: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]", help="Target folder; created if needed. [default: the example's folder name]"
        ),
    ] = None,
) -> None:
    """Copy an example and its files, so that you can change them. Existing files are not overwritten.

    If the working directory has a folder with the name of an example, doll up NAME runs the files of this folder.

    Example: doll example copy stdin mine
    """
    from doll.run.examples import copy

    for path in copy(name, to):
        sys.stdout.write(f"{path}\n")


@config_app.command("show")
def show(job: RunOptions, as_json: JsonOption = False) -> None:
    """Print the job file with all defaults and overrides.

    Example: doll config show my.yaml --set data.workers=8
    """
    from doll.config import dump

    config = job.target().config
    emit(as_json, config.model_dump(mode="json", by_alias=True, exclude_none=True), dump(config))


@config_app.command("check")
def check(
    job: RunOptions,
    build_model: Annotated[
        bool,
        typer.Option("--build-model", help="Also build model and optimizer, and read init_from; takes seconds."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a job file: keys, values, and whether its files and task class exist. Exit code 2 if it is invalid.

    Example: doll config check my.yaml
    """
    from doll.model.auto_shards import shards_text
    from doll.run.local.preflight import check_files, check_model, check_pipeline, check_task
    from doll.storage.stores import find_source

    config = job.target().config
    check_files(config)
    if config.training.init_from is not None:
        find_source(config, config.training.init_from.source)
    check_task(config)
    content: dict[str, Any] = {
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
        model = check_model(config)
        content["parameters"] = model.parameters
        check_pipeline(config)
        text += f", {model.parameters} parameters"
        if config.ps.shards == "auto":
            content["shards"] = model.shards
            text += f"\n{shards_text(config, model.shards, model.values)}"
        if model.init_from is not None:
            content["init_from"] = model.init_from.to_dict()
            text += f"\n{model.init_from.text()}"
    emit(as_json, content, text)
