"""The simulator against theory and the clock: update rates, stability, replacement, and how long it all takes.

    python -m benchmarks.simulator [--quick] [--out simulator.json]

Criteria: update rate within 0.5 % of Eq. (1); the queue bounded where Proposition 1's necessary form holds, growing
where it does not; with replacement at least 99 % of the formula's updates, without it at most 70 % at (30, 0.9);
64 workers and 10 000 updates in less than 5 s, 10 000 workers in less than 2 min, the backtest in less than 60 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from doll.config import DollPolicyConfig
from doll.evaluation.rates import harmonic
from doll.simulation.preemption import Markov
from doll.simulation.report import formula_rate, summarise
from doll.simulation.settings import SimulationSettings
from doll.simulation.system import System

# (N, K, b, samples per second), each stable.
RATE_SETS = [(64, 20, 256, 125.0), (64, 10, 256, 125.0), (16, 4, 32, 50.0), (8, 8, 64, 100.0)]
# Digest 1.2: preemptible slots of 64 and their availability.
REPLACEMENT_SETS = [(5, 0.9), (15, 0.8), (30, 0.9), (29, 0.8), (64, 0.9)]
CYCLE_S = 1000.0
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def settings(n: int, k: int, b: int, rate: float, **changes: object) -> SimulationSettings:
    values: dict[str, object] = {"compute_s": 0.02, "seed": 1, **changes}
    return SimulationSettings(rates_per_s=[rate] * n, batch_size=b, policy=DollPolicyConfig(group_size=k), **values)  # type: ignore[arg-type]


def rates(updates: int) -> list[dict[str, object]]:
    rows = []
    for n, k, b, rate in RATE_SETS:
        system = System(settings(n, k, b, rate, updates=updates, compute_s=0.2 * k * b / (n * rate) / harmonic(k)))
        system.run()
        summary = summarise(system, 1.0)
        ratio = summary.rate_measured / summary.rate_formula
        rows.append({
            "n": n, "k": k, "b": b, "measured": summary.rate_measured, "formula": summary.rate_formula,
            "ratio": ratio, "ok": abs(ratio - 1) < 0.005,
        })  # fmt: skip
    return rows


def stability(seconds: float) -> list[dict[str, object]]:
    """Group service time against the time between groups, on both sides of the edge."""
    rows = []
    for load, grows in ((0.5, False), (0.8, False), (1.25, True)):
        compute_s = load * 0.64 / harmonic(20)
        system = System(settings(64, 20, 256, 125.0, seconds=seconds, compute_s=compute_s))
        system.run()
        summary = summarise(system, 1.0)
        grew = summary.waiting_growth > 1.5
        rows.append({
            "load": load, "compute_s": compute_s, "max_waiting": summary.max_waiting_batches,
            "growth": summary.waiting_growth, "rate_ratio": summary.rate_measured / summary.rate_formula,
            "ok": grew == grows,
        })  # fmt: skip
    return rows


def replacement(runs: int) -> list[dict[str, object]]:
    """Digest 1.2's table: updates by the time in which the formula does 1500."""
    rows = []
    for spot, alpha in REPLACEMENT_SETS:
        slots = [slot < spot for slot in range(64)]
        found = {}
        for name, replace in (("replaced", True), ("literal", False)):
            done = []
            for seed in range(runs):
                base = settings(64, 20, 256, 125.0, seconds=1.0, seed=seed, replacement=replace)
                seconds = 1500 / formula_rate(base, slots, alpha)
                job = settings(64, 20, 256, 125.0, seconds=seconds, seed=seed, replacement=replace)
                vanish = Markov(alpha, CYCLE_S, np.random.default_rng((seed, 1)))
                system = System(job, spot=slots, preemption=vanish)
                system.run()
                done.append(system.version)
            found[name] = (float(np.mean(done)), float(np.std(done)))
        ok = found["replaced"][0] >= 0.99 * 1500
        if (spot, alpha) == (30, 0.9):
            ok = ok and found["literal"][0] <= 0.7 * 1500
        rows.append({"spot": spot, "alpha": alpha, **found, "ok": ok})
    return rows


def speed(quick: bool) -> list[dict[str, object]]:
    rows = []
    cases = [
        ("64 workers, 10 000 updates", settings(64, 20, 256, 125.0, updates=10_000), 0, 5.0),
        ("64 workers, 30 of them spot, 10 000 updates", settings(64, 20, 256, 125.0, updates=10_000), 30, 5.0),
        ("10 000 workers, K 20, 10 000 updates",
         settings(10_000, 20, 256, 125.0, updates=10_000, compute_s=0.0005), 0, 120.0),
        ("10 000 workers, 3000 of them spot, K 3125, 200 updates",
         settings(10_000, 3125, 256, 125.0, updates=20 if quick else 200), 3000, 120.0),
    ]  # fmt: skip
    for name, job, spot, limit_s in cases[:2] if quick else cases:
        wall, cpu = time.perf_counter(), time.process_time()
        slots = [slot < spot for slot in range(job.num_workers)]
        vanish = Markov(0.9, CYCLE_S, np.random.default_rng(0)) if spot else None
        system = System(job, spot=slots, preemption=vanish)
        system.run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        batches = sum(system.complete)
        rows.append({
            "case": name, "wall_s": wall, "cpu_s": cpu, "events_per_cpu_s": 2 * batches / cpu, "limit_s": limit_s,
            "ok": wall < limit_s,
        })  # fmt: skip
    return rows


def backtest_speed() -> list[dict[str, object]]:
    from doll.cli.backtest import policies
    from doll.provisioner.traces import load
    from doll.simulation.backtest import BacktestSettings
    from doll.simulation.backtest_report import verdict
    from doll.simulation.parallel import backtest_on

    start = time.perf_counter()
    rows = backtest_on(2, load(SHARED), BacktestSettings(), policies)
    wall = time.perf_counter() - start
    found = verdict(rows)
    return [{"case": "backtest on two cores", "wall_s": wall, "verdict": found.text, "ok": wall < 60 and found.ok}]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter runs, for a look")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    quick = options.quick
    found = {
        "rates": rates(3_000 if quick else 10_000),
        "stability": stability(1000.0 if quick else 3000.0),
        "replacement": replacement(3 if quick else 20),
        "speed": speed(quick),
    }
    if SHARED.is_dir():
        found["backtest"] = backtest_speed()
    for name, rows in found.items():
        for row in rows:
            cells = ", ".join(f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}"
                              for key, value in row.items() if key != "ok")  # fmt: skip
            print(f"{'pass' if row['ok'] else 'FAIL'}  {name}: {cells}")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for rows in found.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
