"""What a preemption during an update does (D3 of docs/theory.md): three readings of the DOLL paper, simulated.

Section III-B4 assumes that no preemption occurs during an update or, equivalently, that such an update is discarded
altogether. Algorithm 4 read by itself waits for the gradient of the worker that is gone. DOLL replaces the batch.

Criteria: with discarded updates, and with replacement, at least 98 and 99 % of the formula's 1500 updates come.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
from doll.provisioner.traces.availability import Markov
from doll.ps.policies.doll import DollPolicyConfig

from benchmarks.paper.harness import FORMULA, OURS, PAPER, Check, Result, Value, claim, main
from benchmarks.paper.setting import CYCLE_S, RATE, B, K, N
from doll_lab.figures import decorate
from doll_lab.simulation.report import formula_rate
from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

# (N_s, α) of 64 workers, and the updates of a separate reference simulation that waits for the worker.
SETS = ((5, 0.9, 1493), (15, 0.8, 846), (30, 0.9, 799), (29, 0.8, 473), (64, 0.9, 245))
TARGET = 1500


WAITS, DISCARDS, REPLACES = "waits for the worker", "update discarded", "batch replaced"


def run(quick: bool) -> Result:
    runs, target = (2, 300) if quick else (6, TARGET)
    checks: list[Check] = []
    rows: list[dict[str, Value]] = []
    shares: list[tuple[str, dict[str, float]]] = []
    for spot, alpha, reference in SETS:
        mean_share = {}
        for reading in (DISCARDS, REPLACES, WAITS):
            done = [_updates(spot, alpha, reading, target, seed) / target for seed in range(runs)]
            mean_share[reading] = float(np.mean(done))
            rows += [
                {"spot": spot, "alpha": alpha, "reading": reading, "run": seed, "share": share}
                for seed, share in enumerate(done)
            ]
        name = f"N_s = {spot}, α = {alpha:g}"
        shares.append((name, mean_share))
        least, discarded, replaced = 0.9 if quick else 0.98, mean_share[DISCARDS], mean_share[REPLACES]
        checks += [
            claim("formula", f"{name}: updates by the time of (15), of the formula's", 1, discarded, f"≥ {least:g}",
                  discarded >= least),
            Check(f"{name}: with replacement", None, 1.0, replaced, f"≥ {least + 0.01:g}", replaced >= least + 0.01),
            Check(f"{name}: waiting for the worker (reference simulation: {reference / TARGET:.2f})", None, None,
                  mean_share[WAITS], "", None),
        ]  # fmt: skip
    notes = [
        "Section III-B4 of the paper assumes that preemptions do not occur during an update, and calls it equivalent "
        "to discard such an update altogether. So (4) to (6) and (15) describe the paper's system. Its Algorithm 4 "
        "does not say so: read by itself, the server waits for the gradient until the worker is back, while all others "
        "queue. This implementation replaces the batch, and loses no samples by it.",
    ]
    return Result("Preemption during an update (D3)", checks, rows, lambda figure: _draw(figure, shares), notes)


def _updates(spot: int, alpha: float, reading: str, target: int, seed: int) -> int:
    """Updates in the time in which the formula predicts `target`."""
    slots = [slot < spot for slot in range(N)]

    def job(seconds: float) -> SimulationSettings:
        return SimulationSettings(
            rates_per_s=[RATE] * N,
            batch_size=B,
            policy=DollPolicyConfig(group_size=K),
            seconds=seconds,
            replacement=reading == REPLACES,
            seed=seed,
        )

    seconds = target / formula_rate(job(1.0), slots, alpha)
    preemption = Markov(alpha, CYCLE_S, np.random.default_rng((seed, 1)))
    if reading == DISCARDS:
        return discarding(slots, preemption, seconds, job(1.0).compute_s, np.random.default_rng((seed, 2)))
    system = System(job(seconds), spot=slots, preemption=preemption)
    system.run()
    return system.version


def discarding(
    slots: Sequence[bool], preemption: Markov, seconds: float, compute_s: float, rng: np.random.Generator
) -> int:
    """Updates within `seconds` where a preemption of one of its workers discards an update, with all of its batches.

    A group is the first K queued batches of workers that are up. It lasts until the last of its workers is through,
    each of which computes its batches in turn.

    Args:
        slots: which workers are preemptible.
        compute_s: mean of a batch's time, exponential.
    """
    events: list[tuple[float, int, int]] = []  # (time, kind, worker); kinds as below
    gone, back, ready, end = range(4)
    up = [True] * len(slots)
    for worker, is_spot in enumerate(slots):
        begin_s, spans = 0.0, preemption.spans(worker)
        # Arrivals pause while a worker is down: batches are complete at times of its time up.
        batch_s, up_s = rng.uniform() * B / RATE, 0.0
        while begin_s < seconds:
            available, length_s = next(spans) if is_spot else (True, seconds)
            if begin_s == 0.0:
                up[worker] = available
            elif is_spot:
                heappush(events, (begin_s, back if available else gone, worker))
            while available and batch_s <= up_s + length_s:
                heappush(events, (begin_s + batch_s - up_s, ready, worker))
                batch_s += rng.gamma(B) / RATE
            up_s += length_s if available else 0.0
            begin_s += length_s
    waiting, group, updates, number = list[int](), list[int](), 0, 0
    while events and events[0][0] <= seconds:
        now, kind, worker = heappop(events)
        if kind == ready:
            waiting.append(worker)
        elif kind in (gone, back):
            up[worker] = kind == back
            if kind == gone and worker in group:
                group, number = [], number + 1  # discarded
        elif worker == number:  # of a group, its number
            group, updates, number = [], updates + 1, number + 1
        eligible = [at for at, owner in enumerate(waiting) if up[owner]][:K]
        if not group and len(eligible) == K:
            group = [waiting[at] for at in eligible]
            chosen = set(eligible)
            waiting = [owner for at, owner in enumerate(waiting) if at not in chosen]
            took_s = max(rng.gamma(count) * compute_s for count in Counter(group).values())
            heappush(events, (now + took_s, end, number))
    return updates


def _draw(figure: Figure, shares: list[tuple[str, dict[str, float]]]) -> None:
    axes = figure.subplots()
    at = np.arange(len(shares))
    for place, (reading, color) in enumerate(((REPLACES, OURS), (DISCARDS, "#72b7b2"), (WAITS, PAPER))):
        axes.bar(at + 0.27 * (place - 1), [of[reading] for _, of in shares], 0.25, color=color, label=reading)
    axes.axhline(1.0, color=FORMULA, linestyle="--", linewidth=0.8, label="formula")
    axes.set_xticks(at, [name for name, _ in shares])
    decorate(axes, "Updates done by the time of (15)", "", "share of the formula's")
    axes.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    main("replacement", run)
