"""Options of several commands. Each is declared once, as a type or as a field of a dataclass (see `Commands`)."""

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

JOB_ENV: Final = "DOLL_JOB"  # for containers in which all commands use the same job
METAVAR: Final = "TIME"
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART: Final = re.compile(r"(\d+\.?\d*|\.\d+)(ms|s|min|m|h|d)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def seconds(value: str | float) -> float:
    """Return the number of seconds of a text such as `5400`, `90m`, `1.5h` or `1h30m`.

    Raises:
        BadParameter: the text does not have one of these forms.
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
    """Return an option that takes a time such as 90m.

    Args:
        names: names of the option; default: derived from the name of the variable.
    """
    return typer.Option(*names, parser=seconds, metavar=METAVAR, help=text, show_default=False)


def interval(given_s: float | None, default_s: float) -> float:
    """Return the value of --interval in seconds. Raise BadParameter if it is below 1 s."""
    if given_s is not None and given_s < 1:
        raise typer.BadParameter(f"--interval: expected 1 s or more, got {given_s:g} s")
    return default_s if given_s is None else given_s


WorkersOption = Annotated[int | None, typer.Option("--workers", "-N", min=1, help="Workers, one per stream (N).")]
DeadlineOption = Annotated[
    float | None, duration("Deadline, as time from the start of the job, such as 5400, 90m or 1.5h.", "--deadline")
]
AlphaOption = Annotated[
    float | None, typer.Option("--alpha", help="Availability of a spot machine: the fraction of time that it runs.")
]
CycleOption = Annotated[
    float | None, duration("Mean time between two interruptions of a spot machine (mean up + down time).", "--cycle")
]
BootOption = Annotated[float | None, duration("Time from the launch of a machine until its worker works.", "--boot")]
ServiceOption = Annotated[float | None, duration("Mean time to compute the gradient of one batch (mu_C).", "--service")]
InstanceOption = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="EC2 instance type of the workers; its price is taken from a table in DOLL [default: c7g.large].",
    ),
]
RegionOption = Annotated[
    str | None, typer.Option(help="AWS region of --instance [default: fleet.region or us-east-1].")
]
EGRESS_USD_PER_GB: Final = 0.02  # between regions of AWS in North America and Europe
EgressOption = Annotated[
    float | None,
    typer.Option(min=0, max=1000, help="Price of a GB that leaves a region, USD [default: 0.02].", show_default=False),
]
ModelMbOption = Annotated[
    float | None, typer.Option(min=0, max=1e7, help="Size of the weights in MB, for the traffic between regions.")
]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", metavar="FOLDER", help="Recorded market to replay (docs/traces.md).")
]
PoolOption = Annotated[str | None, typer.Option("--pool", help="Pool of the trace [default: its first pool].")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of all random numbers.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON; other text goes to standard error.")]
RunFolderOption = Annotated[
    Path | None, typer.Option("--run-folder", help="Folder for the files of the job [default: runs/<job>].")
]
StackOption = Annotated[
    Literal["self_managed", "msk", "none"],
    typer.Option(help="Further machines to include in the cost: own Kafka machines, MSK, or none."),
]
PageOption = Annotated[
    bool, typer.Option("--page/--no-page", help="Serve the live page of the job on this machine while it runs.")
]
FRESH_HELP: Final = "If the topics hold an earlier run of this job, begin a new generation at data.start."
FreshOption = Annotated[bool, typer.Option("--fresh", help=FRESH_HELP)]
RunsFolderOption = Annotated[Path, typer.Option("--parent-folder", help="Folder in which the run folder is created.")]
VersionOption = Annotated[str, typer.Option("--version", metavar="VERSION", help="latest, a number or an alias.")]
JobOption = Annotated[Path | None, typer.Option("--job", help="Job file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the job file to another value; may be repeated."),
]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The job of a command: its file, given as an argument or as an option, and changed values of its keys."""

    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB.yaml", help="Job file or example name (doll example list); or use --job."),
    ] = None
    job_option: JobOption = None
    overrides: SetOption = None

    def target(self, run_folder: Path | None = None) -> Target:
        """Return the job that the command line gives as argument or option, otherwise the job of $DOLL_JOB.

        Raises:
            BadParameter: no job is given, or two different jobs are given.
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
        telemetry.configure(opened.config.log.format)  # otherwise log lines mix with the result on standard output
        return opened

    def config_if_named(self) -> JobConfig | None:
        """Return the job file that the command line gives, or None if it gives none. $DOLL_JOB is not read.

        Raises:
            BadParameter: overrides are given without a job file.
            ConfigError: the job file is invalid.
        """
        if self.job is None and self.job_option is None:
            if self.overrides:
                raise typer.BadParameter("--set: expected a job file to override")
            return None
        return self.target().config


@dataclass(frozen=True, kw_only=True)
class RunOptions(JobOptions):
    """The job of a command that accepts a job file or the folder of a run."""

    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB.yaml|RUN", help="Job file, or folder of a run."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """The streams of a job and its batch settings; they replace a job file or some of its values."""

    workers: WorkersOption = None
    rate: Annotated[
        list[str] | None, typer.Option(metavar="L[,L...]", help="Samples/s: one rate for all streams, or one each.")
    ] = None
    group_size: Annotated[int | None, typer.Option("--group-size", "-K", min=1, help="Batches per update (K).")] = None
    batch_size: Annotated[int | None, typer.Option("--batch-size", "-b", min=1, help="Samples per batch (b).")] = None

    def rates_per_s(self, config: JobConfig | None, default: tuple[float, int] | None = None) -> list[float]:
        """Return the rate λ_n of every stream in samples per second: from the options, the job file, or the default.

        Args:
            default: rate of each stream in samples per second, and number of workers.

        Raises:
            BadParameter: no rate is given, or the number of rates differs from the number of workers.
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
        """Return the numbers of `--rate 125`, `--rate 10,20` or `--rate 10 --rate 20`; None if it is not given."""
        if not self.rate:
            return None
        text = ",".join(self.rate)
        try:
            return [float(part) for part in text.split(",")]
        except ValueError as error:
            raise typer.BadParameter(f"--rate: expected numbers with commas between them, got {text[:60]!r}") from error


@dataclass(frozen=True, kw_only=True)
class MarketOptions:
    """Options for machines. Each field has the name of the key of the job file's plan section that it replaces."""

    spot_usd_per_h: Annotated[
        float | None, typer.Option("--spot-price", help="Price of a running spot machine, USD per hour.")
    ] = None
    on_demand_usd_per_h: Annotated[
        float | None, typer.Option("--on-demand-price", help="Price of an on-demand machine, USD per hour.")
    ] = None
    alpha: AlphaOption = None
    cycle_s: CycleOption = None
    machines_per_worker: Annotated[
        int | None, typer.Option(min=1, help="Machines per worker, started and lost together (k) [default: 1].")
    ] = None
    availability_of: Annotated[
        Literal["machine", "worker"] | None,
        typer.Option(help="Whether --alpha and --cycle describe a machine or a worker [default: machine]."),
    ] = None
    boot_s: BootOption = None
    service_s: ServiceOption = None
