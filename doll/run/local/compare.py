"""`doll compare`: runs one job under several policies, one after the other, on the same stream.

Each policy has a separate run: the same source from its start with the same seed, but its own services, topics and
folder, so that runs do not affect each other. The results are written to disk after each run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from doll.config import JobConfig, StdinSource
from doll.dashboard.saved_page import save_page
from doll.errors import ConfigError, DollError
from doll.monitor.views.comparison import Comparison, PolicyRun, comparison_page, read_run, workers_usd_per_h
from doll.monitor.views.run_report import INTERRUPTED
from doll.process.files import write_json
from doll.process.signals import Interrupts
from doll.run.folder import display_path, new_folder
from doll.run.local.page import page_of_runs
from doll.run.local.up import check_runnable, run_up
from doll.run.policy_choice import PolicyChoice, jobs_of

INTERRUPTED_EXIT_CODE: Final = 1
_NAME_CHARS: Final = (24, 16)  # limits for job and policy in the name of a run's job (63 in all)


def compare_live(
    path: Path,
    overrides: Sequence[str],
    choices: Sequence[PolicyChoice],
    runs_folder: Path,
    *,
    loss: float | None,
    say: Callable[[str], None],
    page: bool = False,
    repetitions: int = 1,
) -> tuple[Comparison, int]:
    """Run the job at `path` under each policy; return the comparison and the exit code.

    After SIGINT or SIGTERM, the current run ends in order, and no other run begins. If the run of a policy fails, the
    others still run.

    Args:
        loss: target loss, at which a run ends. None: the job's `stop.loss`.
        page: whether to serve the page of the runs during the comparison.
        repetitions: number of runs of each policy, with the job's seed and the next ones. All policies run with one
            seed before the next one, so that what changes on the machine over time changes for all of them.

    Returns:
        The comparison; and exit code 0 if every run ended by its stop rule and passed its audit. Otherwise, the exit
        code is that of the first other run, or 1 after a signal.

    Raises:
        ConfigError: the job, or a policy with its options, cannot be compared.
    """
    configs = jobs_of(path, [*overrides, *([] if loss is None else [f"stop.loss={loss!r}"])], choices)
    check_comparable(configs[0])
    check_runnable(configs[0])
    folder = new_folder(runs_folder, f"{configs[0].job}-compare", datetime.now())
    seeds = seeds_of(configs[0], repetitions)
    planned = [(seed, choice, config) for seed in seeds for choice, config in zip(choices, configs, strict=True)]
    say(f"comparing {len(choices)} policies in {display_path(folder)}")
    runs: list[PolicyRun] = []
    codes: list[int] = []
    labels = [choice.label for choice in choices]
    target, job, notes = configs[0].stop.loss, configs[0].job, notes_on(configs[0])

    def comparison() -> Comparison:
        return Comparison(job, tuple(runs), target, labels, notes, seeds)

    write_json(folder / "comparison.json", comparison().to_dict())
    try:
        with Interrupts(), page_of_runs(folder, say) if page else contextlib.nullcontext():
            for number, (seed, choice, config) in enumerate(planned, 1):
                say(f"run {number} of {len(planned)}: {choice.label}" + (f", seed {seed}" if len(seeds) > 1 else ""))
                own = own_job(config.model_copy(update={"seed": seed}), choice.name, number, folder)
                run, code = _run(own, choice.label, folder)
                runs.append(run)
                codes.append(code)
                write_json(folder / "comparison.json", comparison().to_dict())
                if run.outcome == INTERRUPTED:
                    codes.insert(0, INTERRUPTED_EXIT_CODE)
                    break
    except KeyboardInterrupt:
        codes.insert(0, INTERRUPTED_EXIT_CODE)
    done = comparison()
    write_json(folder / "comparison.json", done.to_dict())
    if runs:
        shown = folder / "comparison.html"
        save_page("runs", comparison_page(done), shown)
        say(f"page: {display_path(shown)}")
    return done, next((code for code in codes if code), 0)


def _run(config: JobConfig, label: str, folder: Path) -> tuple[PolicyRun, int]:
    """Run one policy; return its run and its exit code."""
    try:
        code = int(run_up(config, folder)["exit_code"])
    except DollError as error:
        return PolicyRun(label, str(error), ok=False, seed=config.seed), error.exit_code
    (own_folder,) = folder.glob(f"{config.job}-*")
    return read_run(label, own_folder, usd_per_h=workers_usd_per_h(config), seed=config.seed), code


def seeds_of(config: JobConfig, repetitions: int) -> list[int]:
    """Return the seeds of the runs of each policy."""
    return [config.seed + number for number in range(repetitions)]


def check_comparable(config: JobConfig) -> None:
    """Check that each policy can get the same stream, and that each run will end.

    Raises:
        ConfigError: the stream cannot be repeated, or a run would not end.
    """
    if config.source is None or isinstance(config.source, StdinSource):
        kind = "none" if config.source is None else "stdin"
        raise ConfigError(
            f"source: expected one that can be sent again to each policy, got {kind}; write the events to a file, and "
            "use source: {kind: jsonl, path: FILE}"
        )
    stop = config.stop
    if stop.samples is None and stop.updates is None and stop.seconds is None:
        raise ConfigError(
            "stop: expected a limit that every policy reaches (samples, updates or seconds), got none: a policy that "
            "does not reach a loss or an accuracy would run without end; as in --set stop.samples=20000"
        )


def own_job(config: JobConfig, policy: str, number: int, folder: Path) -> JobConfig:
    """Return the job of one run: with its own name, and checkpoints in its run folder.

    The name contains the time of the comparison, which is part of the name of `folder`. So the name is new on a broker
    that has the topics of earlier runs.
    """
    named = zip((config.job, policy), _NAME_CHARS, strict=True)
    job, name = (re.sub(r"[^a-z0-9]+", "-", text.lower())[:most] for text, most in named)
    time = folder.name.removeprefix(f"{config.job}-compare-")
    checkpoint = config.checkpoint.model_copy(update={"folder": None})
    return config.model_copy(update={"job": f"{job}-{number}-{name}-{time}", "checkpoint": checkpoint})


def notes_on(config: JobConfig) -> list[str]:
    """Return notes on a comparison of this job, such as on a stop rule that ends policies at different points."""
    if config.stop.samples is None and config.stop.updates is not None:
        return [
            "stop.updates ends each policy after as many updates, which hold different numbers of batches; "
            "stop.samples ends all at the same point of the stream"
        ]
    return []
