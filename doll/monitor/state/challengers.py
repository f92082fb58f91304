"""Challengers: which drifts start a second job on the stream of a job, and with which command. Pure.

Each drift is decided once; the caller keeps the decisions, so that a restart of any process decides nothing again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from doll.config import JobConfig
from doll.config.drift import ChallengerConfig

MAX_AGE_S: Final = 3600.0  # of a drift when it is seen: an evaluator that was away may find it long after it came
_NAME_CHARS: Final = 40  # of the name of the job, in that of a challenger
_CHALLENGER: Final = re.compile(r".*-challenger-\d+")


class NoticedDrift(NamedTuple):
    """A metric that was found to be worse at the update that made `version`, at Unix time `time_s`."""

    metric: str
    version: int
    time_s: float


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about a drift: the command of its challenger, or why it has none; and what became of it."""

    metric: str
    version: int
    time_s: float
    refusal: str = ""
    command: tuple[str, ...] = ()
    outcome: str = ""


def settings_of(config: JobConfig) -> ChallengerConfig | None:
    """Return the settings of a job's challengers; None if it wants none, or is one."""
    return None if config.drift is None or _CHALLENGER.fullmatch(config.job) else config.drift.challenger


def decide(
    config: ChallengerConfig, drift: NoticedDrift, earlier: Sequence[Challenge], now_s: float
) -> Challenge | None:
    """Return the decision about a drift, without a command; None if it is among the `earlier` ones."""
    if any((item.metric, item.version) == (drift.metric, drift.version) for item in earlier):
        return None
    started = [item for item in earlier if not item.refusal]
    waited_s = min((abs(drift.time_s - item.time_s) for item in started), default=float("inf"))
    refusal = ""
    if now_s - drift.time_s > MAX_AGE_S:
        refusal = f"the drift was noticed {now_s - drift.time_s:,.0f} s after it came, later than {MAX_AGE_S:,.0f} s"
    elif any(item.version == drift.version for item in started):
        refusal = "the drift of another metric at the same update has one"
    elif len(started) >= config.most:
        refusal = f"drift.challenger.most is {config.most}"
    elif waited_s < config.min_interval_s:
        refusal = (
            f"{waited_s:,.0f} s after the last one, and drift.challenger.min_interval_s is {config.min_interval_s:g}"
        )
    return Challenge(**drift._asdict(), refusal=refusal)


def challenger_arguments(config: JobConfig, version: int, *, job_file: str, source: str, kafka: str = "") -> list[str]:
    """Return the arguments of `doll` that start the challenger of the drift that was noticed at `version`.

    Args:
        source: run folder or checkpoints of the job, for `training.init_from`.
        kafka: address of the job's Kafka; "": that of the job file or the environment.
    """
    settings = settings_of(config)
    begin_with = "null" if settings is None or settings.begin_with is None else f"{source}@{settings.begin_with}"
    values = [
        f"job={config.job[:_NAME_CHARS]}-challenger-{version}", f"data.topic={config.topic('samples')}",
        "data.partitions=null", "data.start=latest", "data.join=null", "source=null", "checkpoint.folder=null",
        "health.base_port=null", "fleet={kind: processes}", f"training.init_from={begin_with}",
        *([f"kafka.address={kafka}"] if kafka else ()),
    ]  # fmt: skip
    return ["up", job_file, *(word for value in values for word in ("--set", value))]


def challenger_advice(config: JobConfig, version: int) -> str:
    """Return the words of an event that name the command for the challenger of a drift; "": the job wants none."""
    if (settings := settings_of(config)) is None:
        return ""
    job_file, source = str(settings.job or "JOB.yaml"), str(config.checkpoint.folder or "RUN")
    command = shlex.join(challenger_arguments(config, version, job_file=job_file, source=source))
    return f"; its challenger: doll {command} (doll up starts it itself)"
