"""`doll backtest`: the planner and its baselines on recorded spot markets."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from doll.cli.durations import METAVAR, seconds
from doll.cli.errors import usage
from doll.cli.options import BootOption, JsonOption, SeedOption, WorkersOption
from doll.cli.output import emit

if TYPE_CHECKING:
    from doll.provisioner.planning.baselines import MarketPolicy
    from doll.provisioner.traces.model import TraceSet
    from doll.provisioner.traces.recordings import LeftOut
    from doll.simulation.backtest import BacktestSettings, Row


def backtest(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Recorded markets, in the form of docs/traces.md or a known one.")
    ],
    workers: WorkersOption = None,
    job_length: Annotated[
        float,
        typer.Option(
            parser=seconds,
            metavar=METAVAR,
            help="Length of the job with everything on demand [default: 12h].",
            show_default=False,
        ),
    ] = 43_200.0,
    deadline_ratio: Annotated[
        list[float] | None,
        typer.Option(help="Deadline over that length; may be repeated [default: 1.05, 1.1, 1.5].", show_default=False),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Jobs per trace set and deadline.")] = 12,
    boot: BootOption = None,
    tick: Annotated[
        float,
        typer.Option(
            parser=seconds,
            metavar=METAVAR,
            help="Time between two decisions [default: 3m].",
            show_default=False,
        ),
    ] = 180.0,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only trace sets whose name contains this; may be repeated.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that replay [default: one per core].", show_default=False)
    ] = None,
    seed: SeedOption = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for backtest.json, .csv and .png.")] = None,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write the traces to this folder in the documented form, and end.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay recorded prices and availability: the production planner, with and without its guard, and its baselines.

    Per policy: deadlines met, cost in percent of all on demand, moves between the markets per job, cost over that of a
    clairvoyant. Costs and deadlines are those of many jobs that begin at random times of the recordings.

    Without --workers a job has 64, without --boot machines take 3m. Each recording is judged by itself: what cannot be
    used is named with the reason, and the others are replayed.

    Example: doll backtest my-traces --out backtest
    """
    from doll.provisioner.traces.model import write_folder
    from doll.provisioner.traces.recordings import LeftOut, left_out_text, no_recordings_error, survey
    from doll.simulation.backtest import BacktestSettings, too_short

    found = survey(folder)
    if not found.sets:
        raise no_recordings_error(folder, found.skipped)
    sets, skipped = found.sets, found.skipped
    if only:
        sets = [one for one in sets if any(part in one.name for part in only)]
        if not sets:
            names = ", ".join(one.name for one in found.sets)
            raise usage(
                f"--only: no trace set of {folder} has {' or '.join(only)} in its name; there are {names}"
                + "".join(f"\n{line}" for line in left_out_text(skipped).splitlines())
            )
    if export is not None:
        _say(left_out_text(skipped))
        write_folder(sets, export)
        content = {"folder": str(export), "sets": [one.name for one in sets], "skipped": _plain(skipped)}
        emit(as_json, content, f"written: {export}")
        return
    ratios = tuple(deadline_ratio or (1.05, 1.1, 1.5))
    if not all(1 <= ratio < 1e6 for ratio in ratios) or job_length <= 0 or tick < 1:
        raise usage(
            f"expected deadlines of at least 1 times the job's length, a length above 0 and ticks of 1 s or more, got "
            f"{', '.join(map(str, ratios))}, {job_length:g} s and {tick:g} s"
        )
    settings = BacktestSettings(
        rates_per_s=(125.0,) * (workers or 64),
        job_hours=job_length / 3600.0,
        deadline_ratios=ratios,
        windows=windows,
        boot_s=180.0 if boot is None else boot,
        tick_s=tick,
        seed=seed,
    )
    short = {one.name: why for one in sets if (why := too_short(one, settings))}
    skipped = [*skipped, *(LeftOut(f"trace set {name}", why) for name, why in short.items())]
    sets = [one for one in sets if one.name not in short]
    if not sets:
        raise no_recordings_error(folder, skipped)
    _say(left_out_text(skipped))
    rows = _run(processes or os.cpu_count() or 1, sets, settings)
    from doll.simulation.backtest_report import draw, table, to_json, verdict, write_csv

    report: dict[str, object] = {**to_json(rows, settings), "skipped": _plain(skipped)}
    text = table(rows) + "\n\n" + verdict(rows).text
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        import json

        (out / "backtest.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        write_csv(rows, out / "backtest.csv")
        draw(rows, out / "backtest.png")
        text += f"\nwritten: {out / 'backtest.json'}, .csv, .png"
    emit(as_json, report, text)


def _say(text: str) -> None:
    if text:
        sys.stderr.write(f"{text}\n")


def _plain(skipped: Sequence[LeftOut]) -> list[dict[str, str]]:
    return [{"what": one.what, "why": one.why} for one in skipped]


def policies() -> list[MarketPolicy]:
    """The planner in its three forms, and everything that it is held against."""
    from doll.provisioner.planning.baselines import baselines
    from doll.simulation.adaptive import planners

    return [*baselines(), *planners()]


def _run(processes: int, sets: list[TraceSet], settings: BacktestSettings) -> list[Row]:
    from rich.console import Console
    from rich.progress import Progress

    from doll.simulation.parallel import backtest_on

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=len(sets) * len(settings.deadline_ratios))
        return backtest_on(
            processes, sets, settings, policies, lambda done: bar.update(task, advance=1, description=done)
        )
