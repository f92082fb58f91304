"""`doll example`: the job files that ship with DOLL, in a clone and in a wheel, by their names.

`doll up digits` works anywhere: a name stands for a shipped example where no file or folder of that name is there.
"""

from __future__ import annotations

import difflib
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from doll.cli.errors import DollGroup
from doll.cli.options import JsonOption, emit
from doll.errors import ConfigError

example_app = typer.Typer(
    cls=DollGroup, help="List or copy the examples that ship with DOLL.", no_args_is_help=True, rich_markup_mode=None
)
_FILE_OF_TASK: Final = re.compile(r"^\s*class:\s*['\"]?([\w.-]+\.py):", re.MULTILINE)


class Example(NamedTuple):
    """A shipped job file.

    Attributes:
        description: its first line.
        files: all that it needs of its folder, the job file first.
        command: what runs it.
    """

    name: str
    description: str
    files: tuple[Path, ...]
    command: str

    def lacks_data(self) -> bool:
        """Whether it names files that do not ship with DOLL and are not there."""
        from doll.config import load
        from doll.run.preflight import check_files

        try:
            check_files(load(self.files[0]))
        except ConfigError:
            return True
        return False


def folder() -> Path | None:
    """Where the examples are: in the package, else beside it in a clone; None where neither is."""
    package = Path(__file__).parents[1]
    return next(
        (path for path in (package / "examples", package.parent / "examples") if (path / "digits.yaml").is_file()), None
    )


def examples() -> list[Example]:
    """Every shipped example, by name."""
    at = folder()
    return [] if at is None else [_example(path) for path in sorted(at.glob("*.yaml"))]


def _example(path: Path) -> Example:
    text = path.read_text(encoding="utf-8")
    description = next((line[1:].strip() for line in text.splitlines() if line.startswith("#")), "")
    beside = (path.with_name(name) for name in _FILE_OF_TASK.findall(text))
    command = f"doll {'spot' if path.stem == 'spot' else 'up'} {path.stem}"
    return Example(path.stem, description, (path, *(file for file in beside if file.is_file())), command)


def named(name: Path) -> Path | None:
    """The job file of the example of this name; None where the name is a path, or no example's."""
    at = folder()
    if at is None or name.name != str(name) or name.suffix:
        return None
    path = at / f"{name}.yaml"
    return path if path.is_file() else None


def hint(path: Path) -> str:
    """What to say of a job file that is not there: the example that may be meant."""
    names = [one.name for one in examples()]
    if path.stem in names:
        return f"; the example of this name ships with DOLL: use {path.stem} in place of the path"
    if str(path) != path.name:
        return ""
    near = difflib.get_close_matches(path.stem, names, n=1)
    return f"; did you mean the example {near[0]!r}?" if near else "; doll example list names those that ship with DOLL"


@example_app.command("list")
def list_examples(as_json: JsonOption = False) -> None:
    """Show the examples that ship with DOLL. Each name can stand for its job file.

    Example: doll example list
    """
    shipped = examples()
    width = max((len(one.command) for one in shipped), default=0)
    lacking = {one.name for one in shipped if one.lacks_data()}
    lines = [
        f"{one.command:<{width}}  {one.description}{' Needs data of your own.' * (one.name in lacking)}"
        for one in shipped
    ]
    content = [
        {
            "name": one.name, "description": one.description, "command": one.command, "files": [str(file) for file in one.files],
            "lacks_data": one.name in lacking,
        }
        for one in shipped
    ]  # fmt: skip
    emit(as_json, content, "\n".join([*lines, "", "to change one: doll example copy NAME FOLDER"]))


@example_app.command("copy")
def copy_example(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As doll example list shows it.", show_default=False)],
    to: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to; made if it is not there.")] = Path("."),
) -> None:
    """Copy an example and the files that it needs, to be changed. Nothing is overwritten.

    Example: doll example copy stdin mine
    """
    shipped = {one.name: one for one in examples()}
    chosen = shipped.get(name.removesuffix(".yaml"))
    if chosen is None:
        raise ConfigError(f"expected an example, one of {', '.join(shipped)}; got {name!r}")
    targets = [to / file.name for file in chosen.files]
    there = [str(path) for path in targets if path.exists()]
    if there:
        raise ConfigError(f"{', '.join(there)}: expected no such file, since nothing is overwritten")
    try:
        to.mkdir(parents=True, exist_ok=True)
        for file, target in zip(chosen.files, targets, strict=True):
            shutil.copyfile(file, target)
            sys.stdout.write(f"{target}\n")
    except OSError as error:
        raise ConfigError(f"cannot write to {to}: {error.strerror or error}") from error
