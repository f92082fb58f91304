"""`doll backtest`: the planner and baseline policies on recorded spot markets."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from doll.cli import options
from doll.cli.output import emit, progress_bar

if TYPE_CHECKING:
    from doll.provisioner.traces.model import TraceSet

    from doll_lab.backtests.backtest import BacktestSettings, Row
    from doll_lab.backtests.regions import RegionSettings

_BATCH_SIZE: Final = 256  # as in the paper's experiments


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
    regions: Annotated[
        int | None,
        typer.Option(min=2, max=32, help="Pools of one kind of machine that each job may use, as its regions."),
    ] = None,
    egress: options.EgressOption = None,
    model_mb: options.ModelMbOption = None,
    policy: Annotated[
        str | None,
        typer.Option(help="With --regions: policy whose traffic is billed, with its defaults [default: doll]."),
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

    With --regions R a job may use R pools of one kind of machine, and its home is the first of them. Workers elsewhere
    pay for their traffic. The cost is then relative to the exact optimum with boots and moves (docs/traces.md).

    Example: doll backtest my-traces --out backtest

    Example: doll backtest my-traces --regions 3 --workers 16 --policy diloco --model-mb 5
    """
    from doll.provisioner.traces.recordings import left_out_text, survey

    from doll_lab.backtests import backtest_report
    from doll_lab.backtests.adaptive import backtest_policies
    from doll_lab.backtests.backtest import BacktestSettings, backtest_one, replay_cells, select, usable
    from doll_lab.backtests.region_backtest import backtest_regions
    from doll_lab.backtests.regions import with_regions
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
    of_regions = None
    if regions is not None:
        of_regions = _of_regions(settings, regions, egress, model_mb, policy or "doll")
        sets, skips = with_regions(folder, sets, skips, settings, regions)
    elif any(given is not None for given in (egress, model_mb, policy)):
        raise typer.BadParameter("--egress, --model-mb, --policy: expected --regions with them")
    _warn(left_out_text(skips))

    def replay_cell(trace_set: TraceSet, ratio: float, own: BacktestSettings) -> list[Row]:
        if of_regions is not None:
            return backtest_regions(trace_set, ratio, own, of_regions)
        return backtest_one(trace_set, ratio, own, backtest_policies())

    with progress_bar("replaying", len(sets) * len(ratios)) as bar:
        rows = replay_cells(
            sets, settings, replay_cell, processes=processes or os.cpu_count() or 1,
            progress=lambda done: bar(advance=1, description=done),
        )  # fmt: skip
    report = {**backtest_report.to_json(rows, settings), "skipped": [asdict(skip) for skip in skips]}
    text = backtest_report.text(rows)
    if of_regions is not None:
        report["regions"] = asdict(of_regions)
        text = f"{backtest_report.table(rows)}\n\n{backtest_report.gaps_text(rows)}"
    if out is not None:
        backtest_report.write_report(rows, report, out)
        text += f"\nwritten: {out / 'backtest.json'}, .csv, .png"
    emit(as_json, report, text)


def _of_regions(
    settings: BacktestSettings, count: int, egress: float | None, model_mb: float | None, policy: str
) -> RegionSettings:
    """Return the settings of the regions, with the traffic of a policy. Raises BadParameter for an unknown policy."""
    from doll.config.policy import POLICIES, policy_section
    from doll.provisioner.planning.regions import policy_traffic

    from doll_lab.backtests.optimum import boot_ticks
    from doll_lab.backtests.regions import RegionSettings

    boot_ticks(settings.boot_s, settings.tick_s)
    if policy not in POLICIES.names():
        raise typer.BadParameter(f"--policy: expected one of {', '.join(POLICIES.names())}, got {policy!r}")
    traffic = policy_traffic(
        policy_section(policy)(name=policy), model_bytes=1e6 * (model_mb or 0.0), batch_size=_BATCH_SIZE,
        num_workers=len(settings.rates_per_s),
    )  # fmt: skip
    return RegionSettings(count, options.EGRESS_USD_PER_GB if egress is None else egress, traffic)


def _warn(text: str) -> None:
    if text:
        sys.stderr.write(f"{text}\n")
