"""What `doll plan` and `doll simulate` share: a job that a job file, options or both describe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from doll.cli.errors import usage
from doll.cli.options import target
from doll.errors import ConfigError

if TYPE_CHECKING:
    from doll.config import JobConfig


def optional_job(argument: Path | None, option: Path | None, overrides: list[str] | None) -> JobConfig | None:
    """The job file that the command line names; None if it names none.

    Raises:
        BadParameter: there are overrides, but nothing to override.
        ConfigError: it cannot be used.
    """
    if argument is None and option is None:
        if overrides:
            raise usage("--set: expected a job file to override")
        return None
    return target(argument, option, overrides).config


def stream_rates(
    config: JobConfig | None,
    workers: int | None,
    rate: list[str] | None,
    *,
    default: tuple[float, int] | None = None,
) -> list[float]:
    """λ_n of every stream in samples per second: from `--rate` and `--workers`, else the job file, else the default.

    Args:
        workers, rate: the options' values.
        default: a rate and a number of workers.

    Raises:
        BadParameter: no rate is given, or not as many as there are workers.
        ConfigError: the job file states no rate.
    """
    rates = _numbers(rate)
    if rates is None and config is not None:
        rates = config.rates_per_s()
        if not all(math.isfinite(value) for value in rates):
            raise ConfigError(
                "arrivals.process is asap, which states no rate: give --rate, samples per second of a stream"
            )
        if len(set(rates)) == 1:
            rates = rates[:1]
    if rates is None:
        if default is None:
            raise usage("expected a job file, or --rate (and --workers, --group-size, --batch-size, --updates)")
        rates = [default[0]]
    count = workers or (config.data.workers if config is not None else None)
    if len(rates) == 1:
        return rates * (count or (1 if default is None else default[1]))
    if count is not None and len(rates) != count:
        raise usage(f"--rate: expected one rate, or one for each of {count} workers, got {len(rates)}")
    return rates


def _numbers(rate: list[str] | None) -> list[float] | None:
    """The numbers of `--rate 125`, `--rate 10,20` or `--rate 10 --rate 20`; None where it is not given."""
    if not rate:
        return None
    text = ",".join(rate)
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise usage(f"--rate: expected numbers with commas between them, got {text[:60]!r}") from error
