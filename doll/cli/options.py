"""Options that several commands take: each is declared once, alone or as a field of a dataclass (see `Commands`)."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from doll.errors import ConfigError

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.run.target import Target

JOB_ENV: Final = "DOLL_JOB"  # for containers, in which all commands are for one job
METAVAR: Final = "TIME"
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART: Final = re.compile(r"(\d+\.?\d*|\.\d+)(ms|s|min|m|h|d)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def seconds(value: str | float) -> float:
    """The seconds of `5400`, `90m`, `1.5h` or `1h30m`.

    Raises:
        BadParameter: it is not in one of these forms.
    """
    text = str(value).replace(" ", "")
    if _NUMBER.fullmatch(text):
        total_s = float(text)
    else:
        parts = _PART.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise typer.BadParameter(f"expected a time such as 5400, 90m, 1.5h or 1h30m, got {str(value)[:60]!r}")
        total_s = sum(float(number) * _UNIT_S[unit.lower()] for number, unit in parts)
    if not math.isfinite(total_s):
        raise typer.BadParameter(f"expected a time that ends, got {str(value)[:60]!r}")
    return total_s


def duration(text: str, *names: str) -> Any:
    """An option that takes a time such as 90m.

    Args:
        text: its help.
        names: its spelling, if the name of the variable is not it.
    """
    return typer.Option(*names, parser=seconds, metavar=METAVAR, help=text, show_default=False)


WorkersOption = Annotated[int | None, typer.Option("--workers", "-N", min=1, help="N: streams, one worker each.")]
DeadlineOption = Annotated[
    float | None, duration("Deadline from the start of the job, such as 5400, 90m or 1.5h.", "--deadline")
]
AlphaOption = Annotated[
    float | None, typer.Option("--alpha", help="Availability of a spot machine: fraction of time that it runs.")
]
CycleOption = Annotated[
    float | None, duration("Mean up + down time of spot: the mean time between two interruptions.", "--cycle")
]
BootOption = Annotated[float | None, duration("From the launch of a machine to a working worker.", "--boot")]
ServiceOption = Annotated[float | None, duration("Mean time for one batch's gradient (mu_C).", "--service")]
InstanceOption = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="EC2 instance type of a worker, priced by the table that ships with DOLL [default: c7g.large].",
    ),
]
RegionOption = Annotated[
    str | None, typer.Option(help="AWS region of --instance [default: us-east-1, or fleet.region].")
]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", metavar="FOLDER", help="Replay a recorded market (docs/traces.md).")
]
PoolOption = Annotated[str | None, typer.Option("--pool", help="Pool of the trace [default: its first].")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of all random numbers.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output, all else on standard error.")]
RunFolderOption = Annotated[
    Path | None, typer.Option("--run-folder", help="Folder for the files of this process [default: runs/<job>].")
]
PageOption = Annotated[
    bool, typer.Option("--page/--no-page", help="Serve the live page of the job on this machine while it runs.")
]
FRESH_HELP: Final = "Begin a new generation on topics that hold an earlier run of this job, from data.start."
FreshOption = Annotated[bool, typer.Option("--fresh", help=FRESH_HELP)]
RunsFolderOption = Annotated[
    Path, typer.Option("--parent-folder", help="Folder in which the folder of this run is created.")
]
VersionOption = Annotated[str, typer.Option("--version", metavar="VERSION", help="latest, a number, or an alias.")]
JobOption = Annotated[Path | None, typer.Option("--job", help="The job file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job file; may be repeated."),
]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The job of a command: its file as an argument or as an option, and overrides of its keys."""

    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB.yaml", help="Job file, or name of an example (doll example list). Same as --job."),
    ] = None
    job_option: JobOption = None
    overrides: SetOption = None

    def target(self, run_folder: Path | None = None) -> Target:
        """The job that the command line names as argument or as option, else the job of $DOLL_JOB.

        Raises:
            BadParameter: no job is given, or two.
            ConfigError: the job file is invalid.
        """
        from doll import telemetry
        from doll.run.target import open_target

        if self.job is not None and self.job_option is not None and self.job != self.job_option:
            raise typer.BadParameter(f"expected one job, got {self.job} and --job {self.job_option}")
        from_environment = os.environ.get(JOB_ENV)
        path = self.job or self.job_option or (Path(from_environment) if from_environment else None)
        if path is None:
            raise typer.BadParameter("expected a job file, or an example that ships with DOLL, as in: doll up digits")
        opened = open_target(path, self.overrides or [], run_folder)
        telemetry.configure(opened.config.log.format)  # else what is logged goes to standard output, with the result
        return opened

    def config_if_named(self) -> JobConfig | None:
        """The job file that the command line names; None if it names none, whatever $DOLL_JOB is.

        Raises:
            BadParameter: there are overrides, but nothing to override.
            ConfigError: the job file is invalid.
        """
        if self.job is None and self.job_option is None:
            if self.overrides:
                raise typer.BadParameter("--set: expected a job file to override")
            return None
        return self.target().config


@dataclass(frozen=True, kw_only=True)
class RunOptions(JobOptions):
    """The job of a command that also takes the folder of a run."""

    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB.yaml|RUN", help="A job file, or the folder of a run."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """The streams of a job, and how they are batched: in place of a job file, or of its values."""

    workers: WorkersOption = None
    rate: Annotated[list[str] | None, typer.Option(metavar="L[,L...]", help="Samples/s of each stream, or of all.")] = (
        None
    )
    group_size: Annotated[int | None, typer.Option("--group-size", "-K", min=1, help="K: batches per update.")] = None
    batch_size: Annotated[int | None, typer.Option("--batch-size", "-b", min=1, help="b: samples per batch.")] = None

    def rates_per_s(self, config: JobConfig | None, default: tuple[float, int] | None = None) -> list[float]:
        """λ_n of every stream in samples per second: from the options, else the job file, else the default.

        Args:
            default: a rate and a number of workers.

        Raises:
            BadParameter: no rate is given, or not as many as there are workers.
            ConfigError: the job file states no rate.
        """
        rates = self._given_rates()
        if rates is None and config is not None:
            rates = config.worker_rates_per_s()
            if not all(math.isfinite(value) for value in rates):
                raise ConfigError(
                    "arrivals.process is asap, which states no rate: give --rate, samples per second of a stream"
                )
            if len(set(rates)) == 1:
                rates = rates[:1]
        if rates is None:
            if default is None:
                raise typer.BadParameter(
                    "expected a job file, or --rate (and --workers, --group-size, --batch-size, --updates)"
                )
            rates = [default[0]]
        count = self.workers or (config.data.workers if config is not None else None)
        if len(rates) == 1:
            return rates * (count or (1 if default is None else default[1]))
        if count is not None and len(rates) != count:
            raise typer.BadParameter(f"--rate: expected one rate, or one for each of {count} workers, got {len(rates)}")
        return rates

    def _given_rates(self) -> list[float] | None:
        """The numbers of `--rate 125`, `--rate 10,20` or `--rate 10 --rate 20`; None if it is not given."""
        if not self.rate:
            return None
        text = ",".join(self.rate)
        try:
            return [float(part) for part in text.split(",")]
        except ValueError as error:
            raise typer.BadParameter(f"--rate: expected numbers with commas between them, got {text[:60]!r}") from error


@dataclass(frozen=True, kw_only=True)
class MarketOptions:
    """Keys of the job file's plan section about machines; each field has the name of the key that it replaces."""

    spot_usd_per_h: Annotated[
        float | None, typer.Option("--spot-price", help="USD per hour of a spot machine while it runs.")
    ] = None
    on_demand_usd_per_h: Annotated[
        float | None, typer.Option("--on-demand-price", help="USD per hour of an on-demand machine.")
    ] = None
    alpha: AlphaOption = None
    cycle_s: CycleOption = None
    machines_per_worker: Annotated[
        int | None, typer.Option(min=1, help="k: machines that a worker gets and loses together [default: 1].")
    ] = None
    availability_of: Annotated[
        Literal["machine", "worker"] | None, typer.Option(help="What --alpha and --cycle describe [default: machine].")
    ] = None
    boot_s: BootOption = None
    service_s: ServiceOption = None
