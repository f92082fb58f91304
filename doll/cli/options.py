"""Arguments that the commands share, and printing in the two forms that they all know."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from doll.cli.errors import usage

if TYPE_CHECKING:
    from doll.cli.runfolder import Target

JOB_ENV: Final = "DOLL_JOB"  # for containers, whose commands are all about one job

JobArgument = Annotated[
    Path | None, typer.Argument(metavar="JOB.yaml", help="The job file. The same as --job.", show_default=False)
]
TargetArgument = Annotated[
    Path | None,
    typer.Argument(metavar="JOB.yaml|RUN", help="A job file, or the folder of a run.", show_default=False),
]
JobOption = Annotated[Path | None, typer.Option("--job", help="The job file.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the job file; may be repeated.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output, all else on standard error.")]
RunFolderOption = Annotated[
    Path | None,
    typer.Option("--run-folder", help="Where this process keeps its files [default: runs/<job>].", show_default=False),
]
FreshOption = Annotated[
    bool,
    typer.Option(
        "--fresh", help="Begin anew on topics that hold an earlier run of this job, from where data.start says."
    ),
]
RunsFolderOption = Annotated[Path, typer.Option("--runs-folder", help="Where the folder of this run is made.")]


def target(
    argument: Path | None, option: Path | None, overrides: list[str] | None, run_folder: Path | None = None
) -> Target:
    """The job that the command line names, in either form, else the one that $DOLL_JOB names.

    Raises:
        BadParameter: none is named, or two are.
        ConfigError: it cannot be used.
    """
    from doll.cli.runfolder import open_target

    if argument is not None and option is not None and argument != option:
        raise usage(f"expected one job, got {argument} and --job {option}")
    from_environment = os.environ.get(JOB_ENV)
    path = argument or option or (Path(from_environment) if from_environment else None)
    if path is None:
        raise usage("expected a job file, as in: doll up examples/digits.yaml")
    return open_target(path, overrides or [], run_folder)


def emit(as_json: bool, content: Any, text: str) -> None:
    """Print `content` as JSON, or `text`, to standard output."""
    if as_json:
        from doll.evaluation.history import plain

        text = json.dumps(plain(content), indent=2, ensure_ascii=False)
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()
