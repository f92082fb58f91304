"""The backtest on several cores: one task per trace set and deadline, in forked processes that die with us."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Sequence

from doll.local.processes import die_with_parent
from doll.provisioner.planning.baselines import MarketPolicy
from doll.provisioner.traces.model import TraceSet
from doll.simulation.backtest import BacktestSettings, Row, backtest_one, cells

Policies = Callable[[], Sequence[MarketPolicy]]

_work: tuple[Sequence[TraceSet], BacktestSettings, Policies] | None = None


def backtest_on(
    processes: int,
    sets: Sequence[TraceSet],
    settings: BacktestSettings,
    policies: Policies,
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """As `backtest`, the same rows in the same order, on `processes` cores; to be called from the main thread.

    One process is used where processes cannot be forked.
    """
    tasks = cells(sets, settings)
    if processes < 2 or "fork" not in multiprocessing.get_all_start_methods():
        results = (backtest_one(sets[index], ratio, settings, policies()) for index, ratio in tasks)
        return _gather(results, sets, tasks, progress)
    # A fork has the recordings already: nothing but rows goes between the processes.
    context = multiprocessing.get_context("fork")
    with context.Pool(min(processes, len(tasks)), _begin, (os.getpid(), sets, settings, policies)) as pool:
        return _gather(pool.imap(_replay, tasks), sets, tasks, progress)


def _begin(parent_pid: int, sets: Sequence[TraceSet], settings: BacktestSettings, policies: Policies) -> None:
    global _work
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler would only note that the pool ends us
    die_with_parent(parent_pid)
    _work = (sets, settings, policies)


def _replay(task: tuple[int, float]) -> list[Row]:
    assert _work is not None
    sets, settings, policies = _work
    return backtest_one(sets[task[0]], task[1], settings, policies())


def _gather(
    results: Iterable[list[Row]],
    sets: Sequence[TraceSet],
    tasks: Sequence[tuple[int, float]],
    progress: Callable[[str], None] | None,
) -> list[Row]:
    rows = []
    for (index, ratio), some in zip(tasks, results, strict=True):
        rows += some
        if progress is not None:
            progress(f"{sets[index].name} x {ratio:g}")
    return rows
