"""`doll backtest`: the planner and baseline policies on recorded spot markets."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from doll.cli import options
from doll.cli.output import emit, progress_bar


def backtest(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Recorded markets, in the format of docs/traces.md or of a supported data set."
        ),
    ],
    workers: options.WorkersOption = None,
    job_length: Annotated[
        float, options.duration("Length of the job with all workers on-demand [default: 12h].")
    ] = 43_200.0,
    deadline_ratio: Annotated[
        list[float] | None,
        typer.Option(help="Deadline over job length; may be repeated [default: 1.05, 1.1, 1.5].", show_default=False),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Jobs per trace set and deadline.")] = 12,
    boot: options.BootOption = None,
    tick: Annotated[float, options.duration("Interval between decisions [default: 3m].")] = 180.0,
    trace_set: Annotated[
        list[str] | None, typer.Option(help="Only trace sets whose name contains this; may be repeated.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Parallel processes [default: one per core].", show_default=False)
    ] = None,
    seed: options.SeedOption = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for backtest.json, .csv and .png.")] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Write the traces to this folder in the format of docs/traces.md, and exit."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Replay recorded prices and availability: the production planner, with and without its guard, and baselines.

    Per policy: deadlines met, cost in percent of all on-demand, moves between the markets per job, and cost relative to
    an oracle that knows the future. Jobs start at random times of the recordings.

    Without --workers a job has 64, without --boot machines take 3m to boot. Recordings are validated independently: an
    unusable one is skipped, with the reason.

    Example: doll backtest my-traces --out backtest
    """
    from doll.provisioner.traces.recordings import left_out_text, survey

    from doll_lab.backtests import backtest_report
    from doll_lab.backtests.adaptive import backtest_policies
    from doll_lab.backtests.backtest import BacktestSettings, select, usable
    from doll_lab.backtests.backtest import backtest as replay_all
    from doll_lab.traces.export import write_folder

    selected = select(folder, survey(folder), trace_set)
    if export is not None:
        _warn(left_out_text(selected.skipped))
        write_folder(selected.sets, export)
        names = [recorded.name for recorded in selected.sets]
        skipped = [asdict(skip) for skip in selected.skipped]
        emit(as_json, {"folder": str(export), "sets": names, "skipped": skipped}, f"written: {export}")
        return
    ratios = tuple(deadline_ratio or (1.05, 1.1, 1.5))
    if not all(1 <= ratio < 1e6 for ratio in ratios) or job_length <= 0 or tick < 1:
        raise typer.BadParameter(
            f"expected deadlines of at least 1 times the job's length, a length above 0 and ticks of 1 s or more, got "
            f"{', '.join(map(str, ratios))}, {job_length:g} s and {tick:g} s"
        )
    settings = BacktestSettings(
        rates_per_s=(125.0,) * (workers or 64), job_hours=job_length / 3600.0, deadline_ratios=ratios, windows=windows,
        boot_s=180.0 if boot is None else boot, tick_s=tick, seed=seed,
    )  # fmt: skip
    sets, skips = usable(folder, selected, settings)
    _warn(left_out_text(skips))
    with progress_bar("replaying", len(sets) * len(ratios)) as bar:
        rows = replay_all(
            sets, settings, backtest_policies, processes=processes or os.cpu_count() or 1,
            progress=lambda done: bar(advance=1, description=done),
        )  # fmt: skip
    report = {**backtest_report.to_json(rows, settings), "skipped": [asdict(skip) for skip in skips]}
    text = backtest_report.text(rows)
    if out is not None:
        backtest_report.write_report(rows, report, out)
        text += f"\nwritten: {out / 'backtest.json'}, .csv, .png"
    emit(as_json, report, text)


def _warn(text: str) -> None:
    if text:
        sys.stderr.write(f"{text}\n")
