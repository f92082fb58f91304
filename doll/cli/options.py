"""Arguments and options that commands share, and the job that they name."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from doll.cli.durations import METAVAR, seconds
from doll.cli.errors import usage

if TYPE_CHECKING:
    from doll.run.target import Target

JOB_ENV: Final = "DOLL_JOB"  # for containers, in which all commands are for one job


def duration(text: str, *names: str) -> Any:
    """An option that takes a time such as 90m.

    Args:
        text: its help.
        names: its spelling, where the name of the variable is not it.
    """
    return typer.Option(*names, parser=seconds, metavar=METAVAR, help=text, show_default=False)


JobArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="JOB.yaml",
        help="Job file, or name of an example (doll example list). Same as --job.",
        show_default=False,
    ),
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
# An option that has one meaning has one spelling on all commands.
WorkersOption = Annotated[
    int | None, typer.Option("--workers", "-N", min=1, help="N: streams, one worker each.", show_default=False)
]
RateOption = Annotated[
    list[str] | None,
    typer.Option("--rate", metavar="L[,L...]", help="Samples/s of each stream, or of all.", show_default=False),
]
GroupSizeOption = Annotated[
    int | None, typer.Option("--group-size", "-K", min=1, help="K: batches per update.", show_default=False)
]
BatchSizeOption = Annotated[
    int | None, typer.Option("--batch-size", "-b", min=1, help="b: samples per batch.", show_default=False)
]
DeadlineOption = Annotated[
    float | None,
    duration("Deadline from the start of the job, such as 5400, 90m or 1.5h.", "--deadline"),
]
CycleOption = Annotated[
    float | None,
    duration("Mean up + down time of spot: the mean time between two interruptions.", "--cycle"),
]
BootOption = Annotated[
    float | None,
    duration("From the launch of a machine to a working worker.", "--boot"),
]  # fmt: skip
ServiceOption = Annotated[
    float | None,
    duration("Mean time for one batch's gradient (mu_C).", "--service"),
]  # fmt: skip
AlphaOption = Annotated[
    float | None,
    typer.Option("--alpha", help="Availability of a spot machine: fraction of time that it runs.", show_default=False),
]
MachinesOption = Annotated[
    int | None,
    typer.Option(
        "--machines-per-worker", min=1, help="k: machines that a worker gets and loses together [default: 1].",
        show_default=False,
    ),
]  # fmt: skip


class AvailabilityOf(StrEnum):
    machine = "machine"
    worker = "worker"


AvailabilityOfOption = Annotated[
    AvailabilityOf | None,
    typer.Option(help="What --alpha and --cycle describe [default: machine].", show_default=False),
]
SpotPriceOption = Annotated[
    float | None, typer.Option("--spot-price", help="USD per hour of a spot machine while it runs.", show_default=False)
]
OnDemandPriceOption = Annotated[
    float | None, typer.Option("--on-demand-price", help="USD per hour of an on-demand machine.", show_default=False)
]
InstanceOption = Annotated[
    str | None,
    typer.Option(
        "--instance",
        metavar="TYPE",
        help="EC2 instance type of a worker, priced by the table that ships with DOLL [default: c7g.large].",
        show_default=False,
    ),
]
RegionOption = Annotated[
    str | None,
    typer.Option(
        "--region", help="AWS region of --instance [default: us-east-1, or fleet.region].", show_default=False
    ),
]


StackOption = Annotated[
    Literal["self_managed", "msk", "none"],
    typer.Option("--stack", help="What runs beside the workers: Kafka on machines of your own, MSK, or nothing."),
]
TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FOLDER", help="Replay a recorded market (docs/traces.md).", show_default=False),
]
PoolOption = Annotated[
    str | None, typer.Option("--pool", help="Pool of the trace [default: its first].", show_default=False)
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of all random numbers.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output, all else on standard error.")]
RunFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--run-folder", help="Folder for the files of this process [default: runs/<job>].", show_default=False
    ),
]
FRESH_HELP: Final = "Begin a new generation on topics that hold an earlier run of this job, from data.start."
FreshOption = Annotated[bool, typer.Option("--fresh", help=FRESH_HELP)]
RunsFolderOption = Annotated[
    Path, typer.Option("--parent-folder", help="Folder in which the folder of this run is created.")
]


def target(
    argument: Path | None, option: Path | None, overrides: list[str] | None, run_folder: Path | None = None
) -> Target:
    """The job that the command line names as argument or as option, else the job of $DOLL_JOB.

    Raises:
        BadParameter: no job is given, or two.
        ConfigError: the job file is invalid.
    """
    from doll import telemetry
    from doll.run.target import open_target

    if argument is not None and option is not None and argument != option:
        raise usage(f"expected one job, got {argument} and --job {option}")
    from_environment = os.environ.get(JOB_ENV)
    path = argument or option or (Path(from_environment) if from_environment else None)
    if path is None:
        raise usage("expected a job file, or an example that ships with DOLL, as in: doll up digits")
    opened = open_target(path, overrides or [], run_folder)
    telemetry.configure(opened.config.log.format)  # else what is logged goes to standard output, with the result
    return opened
