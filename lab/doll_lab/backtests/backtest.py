"""Replays of jobs on recorded markets, tick by tick, under every policy on the same windows."""

from __future__ import annotations

import multiprocessing
import os
import signal
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from doll.errors import ConfigError
from doll.local.processes import die_with_parent
from doll.process.platform import CAN_FORK
from doll.provisioner.traces.model import Floats, TraceSet
from doll.provisioner.traces.recordings import LeftOut, Survey, left_out_text, no_recordings_error

from doll_lab.backtests.baselines import OFF, ON_DEMAND, SPOT, BacktestJob, MarketPolicy, Observation
from doll_lab.backtests.windows import Windows, clairvoyant_usd, sample

Policies = Callable[[], Sequence[MarketPolicy]]

# A recording must be long enough for jobs with different start times.
_SHARE_OF_RECORDING = 0.6
_LEAST_BOOTS = 3


@dataclass(frozen=True, kw_only=True)
class BacktestSettings:
    """The settings of a backtest.

    Attributes:
        rates_per_s: λ_n, rate of each slot in samples per second.
        job_hours: θ_0, length of the job with all workers on-demand; shorter if a recording is short.
        deadline_ratios: values of θ / θ_0 to try.
        windows: number of jobs per trace set and ratio.
        boot_s: time from the start of a machine until its worker works; it is billed.
        tick_s: time between two decisions.
    """

    rates_per_s: Sequence[float] = (125.0,) * 64
    job_hours: float = 12.0
    deadline_ratios: Sequence[float] = (1.05, 1.1, 1.5)
    windows: int = 12
    boot_s: float = 180.0
    tick_s: float = 180.0
    seed: int = 0


ReplayCell = Callable[[TraceSet, float, BacktestSettings], list["Row"]]


@dataclass(frozen=True)
class Outcome:
    """The results of one policy on one set of windows; arrays of shape (W,).

    Attributes:
        finish_s: time at which the work was done; work that is left at the deadline is done on-demand.
        usd: cost in USD, including work after the deadline.
        moves: number of moves of slots between the markets.
    """

    finish_s: Floats
    usd: Floats
    moves: Floats


@dataclass(frozen=True)
class Row:
    """One row of the result: a policy on a trace set with a deadline.

    Attributes:
        cost_percent: mean cost, in percent of all on-demand.
        over_bound: mean cost divided by the cost of an oracle; never below 1.
    """

    trace_set: str
    deadline_ratio: float
    policy: str
    jobs: int
    met_percent: float
    cost_percent: float
    moves_per_job: float
    over_bound: float


def replay(policy: MarketPolicy, job: BacktestJob, windows: Windows) -> Outcome:
    """Run all windows under one policy.

    At the start, every chosen machine that is available works at once. Later, a machine works `boot_s` after it was
    chosen or became available again.
    """
    count, ticks, n = windows.up.shape
    rates, total_rate = job.rates_per_s, job.rates_per_s.sum(axis=-1)
    done_by_slot = np.zeros((count, n))
    usd, moves = np.zeros(count), np.zeros(count)
    finish_s = np.full(count, np.inf)
    boot_left = np.zeros((count, n))
    machine = np.full((count, n), OFF)
    choice = np.full((count, n), SPOT)
    policy.start(job)
    for tick in range(ticks):
        now_s = tick * windows.tick_s
        span_s = min(windows.tick_s, job.deadline_s - now_s)
        done = done_by_slot.sum(axis=1)
        running = np.isinf(finish_s)
        if span_s <= 0 or not running.any():
            break
        up, price = windows.up[:, tick], windows.price[:, tick]
        ready = (machine != OFF) & (boot_left <= 0)
        new = policy.decide(Observation(now_s, done, done_by_slot, up, choice, ready, price))
        if tick:
            moved = (new != choice) & (new != OFF) & (choice != OFF)
            moves += np.where(running, moved.sum(axis=1), 0)
        choice = new
        wanted = np.where(choice == ON_DEMAND, ON_DEMAND, np.where((choice == SPOT) & up, SPOT, OFF))
        if tick:
            boot_left = np.where((wanted != machine) & (wanted != OFF), job.boot_s, boot_left)
        machine = wanted
        works_s = np.where(machine == OFF, 0.0, np.maximum(span_s - boot_left, 0.0))
        boot_left = np.maximum(boot_left - span_s, 0.0)
        gain = works_s * rates
        gained = gain.sum(axis=1)
        left = job.samples - done
        finishing = running & (gained >= left * (1 - 1e-12)) & (gained > 0)
        share = np.where(finishing, left / np.where(gained > 0, gained, 1.0), 1.0)
        burn = (machine == ON_DEMAND).sum(axis=1) * job.on_demand + (machine == SPOT).sum(axis=1) * price
        usd += np.where(running, burn * share * span_s / 3600.0, 0.0)
        finish_s = np.where(finishing, now_s + share * span_s, finish_s)
        done_by_slot += gain * np.where(running, share, 0.0)[:, None]
    late = np.isinf(finish_s)
    left = np.where(late, job.samples - done_by_slot.sum(axis=1), 0.0)
    late_s = left / total_rate + job.boot_s
    usd += np.where(late, late_s * n * job.on_demand / 3600.0, 0.0)
    return Outcome(np.where(late, job.deadline_s + late_s, finish_s), usd, moves)


def cells(sets: Sequence[TraceSet], settings: BacktestSettings) -> list[tuple[int, float]]:
    """Return (number of the trace set, θ / θ_0) of each replay, in the order of the results."""
    return [(index, ratio) for index in range(len(sets)) for ratio in settings.deadline_ratios]


def backtest(
    sets: Sequence[TraceSet],
    settings: BacktestSettings,
    policies: Policies,
    *,
    processes: int = 1,
    progress: Callable[[str], None] = lambda cell: None,
) -> list[Row]:
    """Run every policy on the same windows of every trace set and deadline, as `replay_cells` does."""

    def replay_cell(trace_set: TraceSet, ratio: float, own: BacktestSettings) -> list[Row]:
        return backtest_one(trace_set, ratio, own, policies())

    return replay_cells(sets, settings, replay_cell, processes=processes, progress=progress)


def replay_cells(
    sets: Sequence[TraceSet],
    settings: BacktestSettings,
    replay_cell: ReplayCell,
    *,
    processes: int = 1,
    progress: Callable[[str], None] = lambda cell: None,
) -> list[Row]:
    """Replay every trace set with every deadline. Call it from the main thread.

    Args:
        replay_cell: function that replays one trace set with one deadline.
        processes: number of forked processes; it does not change the results. Each task is one trace set with one
            deadline. The processes die with this process. If processes cannot be forked, one process is used.
        progress: function that is called with the name of each replayed trace set and deadline.
    """
    tasks = cells(sets, settings)
    rows: list[Row] = []

    def gather(results: Iterable[list[Row]]) -> list[Row]:
        for (index, ratio), some in zip(tasks, results, strict=True):
            rows.extend(some)
            progress(f"{sets[index].name} x {ratio:g}")
        return rows

    if processes < 2 or not CAN_FORK:
        return gather(replay_cell(sets[index], ratio, settings) for index, ratio in tasks)
    # A forked process already has the recordings, so only rows are sent between the processes.
    context = multiprocessing.get_context("fork")
    with context.Pool(min(processes, len(tasks)), _begin, (os.getpid(), sets, settings, replay_cell)) as pool:
        return gather(pool.imap(_replay, tasks))


_work: tuple[Sequence[TraceSet], BacktestSettings, ReplayCell] | None = None  # work of a forked process


def _begin(parent_pid: int, sets: Sequence[TraceSet], settings: BacktestSettings, replay_cell: ReplayCell) -> None:
    global _work
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler only notes that the pool ends this process
    die_with_parent(parent_pid)
    _work = (sets, settings, replay_cell)


def _replay(task: tuple[int, float]) -> list[Row]:
    assert _work is not None
    sets, settings, replay_cell = _work
    return replay_cell(sets[task[0]], task[1], settings)


def select(folder: Path, surveyed: Survey, parts: Sequence[str] | None) -> Survey:
    """Return the trace sets whose name contains one of `parts` (without `parts`: all sets), and all skipped recordings.
    Raises ConfigError if no recording in `folder` is usable, or no set has such a name."""
    surveyed.check(folder)
    if not parts:
        return surveyed
    sets = [recorded for recorded in surveyed.sets if any(part in recorded.name for part in parts)]
    if not sets:
        names = ", ".join(recorded.name for recorded in surveyed.sets)
        raise ConfigError(
            f"--trace-set: no trace set of {folder} has {' or '.join(parts)} in its name; there are {names}"
            + "".join(f"\n{line}" for line in left_out_text(surveyed.skipped).splitlines())
        )
    return Survey(sets, surveyed.skipped)


def usable(folder: Path, selected: Survey, settings: BacktestSettings) -> tuple[list[TraceSet], list[LeftOut]]:
    """Return the trace sets that are long enough for a job, and everything that is skipped.

    Args:
        folder: folder of the recordings, for messages.

    Raises:
        ConfigError: no set is long enough.
    """
    reasons = {recorded.name: too_short(recorded, settings) for recorded in selected.sets}
    sets = [recorded for recorded in selected.sets if not reasons[recorded.name]]
    short = [LeftOut(f"trace set {name}", reason) for name, reason in reasons.items() if reason]
    skipped = [*selected.skipped, *short]
    if not sets:
        raise no_recordings_error(folder, skipped)
    return sets, skipped


def too_short(trace_set: TraceSet, settings: BacktestSettings) -> str:
    """Return why no meaningful job fits into the recordings of a set; "" if one does."""
    _, on_demand_s = job_s(trace_set, settings)
    least_s = _LEAST_BOOTS * max(settings.boot_s, settings.tick_s)
    if on_demand_s >= min(least_s, settings.job_hours * 3600.0):
        return ""
    return (
        f"expected a recording in which a job of {least_s:.0f} s fits ({_LEAST_BOOTS} times --boot or --tick), got one "
        f"for {on_demand_s:.0f} s"
    )


def job_s(trace_set: TraceSet, settings: BacktestSettings) -> tuple[float, float]:
    """Return the length of a window, and θ_0, in seconds."""
    longest_s = max(pool.length_s for pool in trace_set.pools)
    most = max(settings.deadline_ratios)
    on_demand_s = min(settings.job_hours * 3600.0, _SHARE_OF_RECORDING * longest_s / most)
    return most * on_demand_s, on_demand_s


def windows_of(trace_set: TraceSet, settings: BacktestSettings) -> tuple[Windows, float]:
    """Return the jobs of a trace set, equal for all deadlines and other replayed sets, and θ_0 in seconds."""
    length_s, on_demand_s = job_s(trace_set, settings)
    windows = sample(
        trace_set, count=settings.windows, length_s=length_s, tick_s=settings.tick_s,
        num_slots=len(settings.rates_per_s),
        rng=np.random.default_rng((settings.seed, zlib.crc32(trace_set.name.encode()))),
    )  # fmt: skip
    return windows, on_demand_s


def backtest_one(
    trace_set: TraceSet, ratio: float, settings: BacktestSettings, policies: Sequence[MarketPolicy]
) -> list[Row]:
    """Run all policies on one trace set with one deadline."""
    rates = np.asarray(settings.rates_per_s, float)
    windows, on_demand_s = windows_of(trace_set, settings)
    deadline_s = ratio * on_demand_s
    job = BacktestJob(
        samples=float(rates.sum()) * on_demand_s, deadline_s=deadline_s, rates_per_s=rates, boot_s=settings.boot_s,
        tick_s=settings.tick_s, on_demand=windows.on_demand, pool_alpha=windows.pool_alpha,
        pool_price=windows.pool_price, earlier_price=windows.earlier_price,
    )  # fmt: skip
    full_usd = on_demand_s * len(rates) * windows.on_demand / 3600.0
    bound = clairvoyant_usd(windows, rates_per_s=settings.rates_per_s, samples=job.samples, deadline_s=deadline_s)
    free_usd = np.where(bound > 0, 0.0, 1e-9 * full_usd)  # if spot is free, there is no ratio
    rows = []
    for policy in policies:
        outcome = replay(policy, job, windows)
        rows.append(
            Row(
                trace_set=trace_set.name,
                deadline_ratio=ratio,
                policy=policy.name,
                jobs=len(windows),
                met_percent=100.0 * float(np.mean(outcome.finish_s <= deadline_s * (1 + 1e-9))),
                cost_percent=100.0 * float(np.mean(outcome.usd / full_usd)),
                moves_per_job=float(np.mean(outcome.moves)),
                over_bound=float(np.mean((outcome.usd + free_usd) / (bound + free_usd))),
            )
        )
    return rows
