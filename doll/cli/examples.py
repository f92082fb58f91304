"""`doll example`: list and copy the job files that ship with DOLL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from doll.cli.errors import DollGroup
from doll.cli.options import JsonOption
from doll.cli.output import emit

example_app = typer.Typer(
    cls=DollGroup, help="List or copy the examples that ship with DOLL.", no_args_is_help=True, rich_markup_mode=None
)


@example_app.command("list")
def list_examples(as_json: JsonOption = False) -> None:
    """Show the examples that ship with DOLL. Each name can be used in place of a job file.

    Example: doll example list
    """
    from doll.run.examples import examples

    shipped = [(example, example.lacks_data()) for example in examples()]
    width = max((len(example.command) for example, _ in shipped), default=0)
    lines = [
        f"{example.command:<{width}}  {example.description}{' Needs data of your own.' * lacks_data}"
        for example, lacks_data in shipped
    ]
    content = [
        {
            "name": example.name,
            "description": example.description,
            "command": example.command,
            "files": [str(file) for file in example.files],
            "lacks_data": lacks_data,
        }
        for example, lacks_data in shipped
    ]
    emit(as_json, content, "\n".join([*lines, "", "To change one: doll example copy NAME FOLDER"]))


@example_app.command("copy")
def copy_example(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As doll example list shows it.", show_default=False)],
    to: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Target folder; created if needed.")] = Path("."),
) -> None:
    """Copy an example and the files that it needs, to be changed. Existing files are not overwritten.

    Example: doll example copy stdin mine
    """
    from doll.run.examples import copy

    for path in copy(name, to):
        sys.stdout.write(f"{path}\n")
