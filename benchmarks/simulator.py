"""How long the simulator, the planner and the backtest take, in seconds of the processor.

    python -m benchmarks.simulator [--quick] [--out simulator.json]

Bars: Theorem 5 for a million workers in less than 0.1 s; 64 workers and 10 000 updates in less than 5 s, 10 000 workers
in less than 2 min; `doll plan` in less than 1 s, without torch; the backtest in less than 60 s on two cores. What the
simulator *says* is checked in `benchmarks/paper` (`make paper`).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from doll.provisioner.traces.availability import Markov
from doll.ps.policies.doll import DollPolicyConfig
from doll.theory.cost import Prices
from doll.theory.planning import best_assignment

from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System

CYCLE_S = 1000.0
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
# The paper's setting, without a job file.
_PLAN = (
    "plan -N 64 --rate 125 -K 20 -b 256 -J 10000 --alpha 0.9 --deadline 6720 --spot-price 0.158 --on-demand-price 0.286"
)


def reference() -> list[dict[str, object]]:
    """The machine's speed at this moment: contention for a core increases CPU seconds, too."""

    def additions() -> None:
        total = 0
        for number in range(3_000_000):
            total += number

    return [{"case": "reference, 3 million additions", "cpu_s": min(_cpu_s(additions) for _ in range(3)), "ok": True}]


def theorem_5() -> list[dict[str, object]]:
    """The best of five runs: the first one warms up."""
    rates = np.random.default_rng(0).pareto(2.0, 1_000_000) * 100 + 1
    took = [_cpu_s(lambda: best_assignment(1e9, rates, 0.9, 1.05 * 1e9 / rates.sum(), Prices(0.158, 0.286)))
            for _ in range(5)]  # fmt: skip
    return [{"case": "Theorem 5, a million workers", "cpu_s": min(took), "limit_s": 0.1, "ok": min(took) < 0.1}]


def simulations(quick: bool) -> list[dict[str, object]]:
    def job(n: int, k: int, updates: int, compute_s: float = 0.02) -> SimulationSettings:
        return SimulationSettings(rates_per_s=[125.0] * n, batch_size=256, policy=DollPolicyConfig(group_size=k),
                                  updates=updates, compute_s=compute_s, seed=1)  # fmt: skip

    cases = [
        ("64 workers, 10 000 updates", job(64, 20, 10_000), 0, 5.0),
        ("64 workers, 30 of them spot, 10 000 updates", job(64, 20, 10_000), 30, 5.0),
        ("10 000 workers, K 20, 10 000 updates", job(10_000, 20, 10_000, 0.0005), 0, 120.0),
        (
            "10 000 workers, 3000 of them spot, K 3125, 200 updates",
            job(10_000, 3125, 20 if quick else 200),
            3000,
            120.0,
        ),
    ]
    rows = []
    for name, settings, spot, limit_s in cases[:2] if quick else cases:
        slots = [slot < spot for slot in range(settings.num_workers)]
        vanish = Markov(0.9, CYCLE_S, np.random.default_rng(0)) if spot else None
        system = System(settings, spot=slots, preemption=vanish)
        cpu = _cpu_s(system.run)
        rows.append({"case": name, "cpu_s": cpu, "events_per_cpu_s": 2 * sum(system.complete) / cpu, "limit_s": limit_s,
                     "ok": cpu < limit_s})  # fmt: skip
    return rows


def plan() -> list[dict[str, object]]:
    """`doll plan` as a process of its own, imports included; the best of three."""
    code = f"import sys; from doll.cli import main; sys.argv[1:] = {_PLAN.split()!r}\ntry:\n    main()\n" \
           "finally:\n    print('torch' in sys.modules, file=sys.stderr)"  # fmt: skip
    took, torch = [], ""
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if done.returncode != 0:
            raise RuntimeError(f"doll plan failed with {done.returncode}:\n{done.stderr}")
        torch = done.stderr.strip().splitlines()[-1]
    return [{"case": "doll plan", "cpu_s": min(took), "limit_s": 1.0, "imports_torch": torch,
             "ok": min(took) < 1.0 and torch == "False"}]  # fmt: skip


def backtest() -> list[dict[str, object]]:
    """On two cores: half of the CPU time of both, which is the elapsed time on an idle machine."""
    from doll.provisioner.traces.recordings import load

    from doll_lab.backtests.adaptive import backtest_policies
    from doll_lab.backtests.backtest import BacktestSettings
    from doll_lab.backtests.backtest import backtest as replay_all
    from doll_lab.backtests.backtest_report import verdict

    before, wall = _all_cpu_s(), time.perf_counter()
    begin = time.process_time()
    sets = load(SHARED)
    loading = time.process_time() - begin
    rows = replay_all(sets, BacktestSettings(), backtest_policies, processes=2)
    cpu, wall = _all_cpu_s() - before, time.perf_counter() - wall
    judgement, idle = verdict(rows), loading + (cpu - loading) / 2
    return [{"case": "backtest on two cores", "cpu_s": cpu, "wall_s": wall, "idle_machine_s": idle, "limit_s": 60.0,
             "verdict": judgement.text, "ok": idle < 60 and judgement.ok}]  # fmt: skip


def _cpu_s(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _all_cpu_s() -> float:
    """Of this process and of its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without 10 000 workers and the backtest")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    rows = [*reference(), *theorem_5(), *plan(), *simulations(options.quick)]
    if SHARED.is_dir() and not options.quick:
        rows += backtest()
    for row in rows:
        cells = ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                          for key, value in row.items() if key not in ("ok", "case"))  # fmt: skip
        print(f"{'pass' if row['ok'] else 'FAIL'}  {row['case']}: {cells}")
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
