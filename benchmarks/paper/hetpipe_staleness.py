"""HetPipe, global staleness: how many updates of other virtual workers a minibatch misses, against s_global.

600 random sets of 2 to 4 virtual workers with 1 to 4 stages of random times, N_m = 1 to 5 and D = 0 to 3, and D + 8
waves each. Measured is what the weights of each minibatch p > (D + 1) N_m + s_local hold: how many of minibatches 1 to
p - 1 of another virtual worker they miss. Engine and policy are those of production; weights are pulled when the gate
asks for newer ones. As a control, 60 sets of which the stages do first what arrived last: minibatches are then not
complete in order, and a wave does not hold what its number says.

Criteria: s_global = (D + 1)(s_local + 1) + s_local - 1 is reached in every set and exceeded in none; of its own updates
a minibatch misses s_local at most; of pushed waves D + 1 is reached for every D, and never exceeded; the control
exceeds s_global.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from doll.ps.policies.wsp import Wsp, WspPolicyConfig

from benchmarks.paper.harness import FORMULA, OURS, PAPER, Check, Result, Value, main
from benchmarks.paper.virtual_workers import VirtualWorkers, lognormal_jitter
from doll_lab.figures import decorate
from doll_lab.pipelines.schedule import Pipeline, StageTimes
from doll_lab.pipelines.timeline import Kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SETS, CONTROLS = 600, 60
MAX_WAVE, MAX_DISTANCE = 5, 3


class LastInFirstOut(Pipeline):
    """A stage does what arrived last, so that minibatches are not complete in order."""

    def _next(self, stage: int) -> tuple[Kind, int] | None:
        forward, backward = self._forward[stage], self._backward[stage]
        if forward and (not backward or forward[-1] > backward[-1]):
            return "FB" if stage == self._last else "F", forward.pop()[1]
        return ("B", backward.pop()[1]) if backward else None


@dataclass(frozen=True)
class Missed:
    """One set.

    Attributes:
        wave: N_m.
        distance: D.
        others: the most updates of another virtual worker that a minibatch missed.
        own: of its own virtual worker.
        waves: the most waves that one virtual worker was behind another.
    """

    wave: int
    distance: int
    others: int
    own: int
    waves: int

    @property
    def bound(self) -> int:
        """s_global."""
        return (self.distance + 1) * self.wave + self.wave - 2


def missed(seed: int, *, pipeline: type[Pipeline] = Pipeline, make: Callable[[int, int], Wsp] | None = None) -> Missed:
    """One random set; `make` gives another policy for N_m and D."""
    rng = np.random.default_rng((11, seed))
    wave, distance = seed % MAX_WAVE + 1, seed // MAX_WAVE % (MAX_DISTANCE + 1)
    k = int(rng.integers(1, 5))
    speeds = rng.lognormal(0.0, 0.4, int(rng.integers(2, 5)))
    stages = [[StageTimes(*times) for times in (rng.lognormal(0.0, 0.5, (k, 2)) / speed).tolist()] for speed in speeds]
    system = VirtualWorkers(
        WspPolicyConfig(wave_batches=wave, clock_distance=distance), stages, waves=distance + 8, pipeline=pipeline,
        policy=None if make is None else make(wave, distance),
        jitter=lambda worker: lognormal_jitter(np.random.default_rng((12, seed, worker)), 0.1),
    )  # fmt: skip
    system.run()
    return Missed(wave, distance, system.missing, system.missing_own, system.distance)


def checks_of(sets: list[Missed], controls: list[Missed]) -> list[Check]:
    """The checks, from the random sets and from those that are not complete in order."""
    count = len(sets)
    reached = sum(each.others == each.bound for each in sets)
    beyond = sum(each.others > each.bound for each in sets)
    example = max((each.others for each in sets if (each.wave, each.distance) == (4, 0)), default=0)
    own = sum(each.own > each.wave - 1 for each in sets)
    most = {d: max(each.waves for each in sets if each.distance == d) for d in range(MAX_DISTANCE + 1)}
    control = sum(each.others > each.bound for each in controls)
    return [
        Check(f"sets that reach s_global, of {count}", None, count, reached, "all", reached == count),
        Check("sets that exceed it", None, 0, beyond, "0", beyond == 0),
        Check("N_m = 4, D = 0: most updates missed", None, 6, example, "s_global", example == 6),
        Check("sets in which one misses more than s_local of its own updates", None, 0, own, "0", own == 0),
        *(
            Check(f"D = {d}: most pushed waves that one is behind another", None, d + 1, ours, "D + 1", ours == d + 1)
            for d, ours in most.items()
        ),
        Check(f"control, not complete in order: sets that exceed s_global, of {len(controls)}", None, None, control,
              "some", control > 0),
    ]  # fmt: skip


def run(quick: bool) -> Result:
    sets = [missed(seed) for seed in range(SETS // 5 if quick else SETS)]
    controls = [missed(seed, pipeline=LastInFirstOut) for seed in range(CONTROLS)]
    rows: list[dict[str, Value]] = [
        {
            "control": int(is_control), "N_m": each.wave, "D": each.distance, "s_global": each.bound,
            "missed": each.others, "missed_own": each.own, "waves_behind": each.waves,
        }
        for is_control, group in ((False, sets), (True, controls))
        for each in group
    ]  # fmt: skip
    notes = [
        "The bound is reached at p ≡ -1 (mod N_m), the last minibatch before the gate.",
        "The paper bounds the distance of the clocks by D. It counts the waves to which virtual workers are admitted; "
        "in waves that are pushed the same bound is D + 1.",
    ]
    return Result(
        "HetPipe: updates that a minibatch misses, against s_global",
        checks_of(sets, controls),
        rows,
        lambda figure: _draw(figure, sets, controls),
        notes,
    )


def _draw(figure: Figure, sets: list[Missed], controls: list[Missed]) -> None:
    axes = figure.subplots()
    highest = max(each.bound for each in sets)
    axes.plot([0, highest], [0, highest], color=FORMULA, linewidth=1, label="s_global")
    jitter = np.random.default_rng(0)
    for group, color, label in ((controls, PAPER, "not complete in order"), (sets, OURS, "random sets")):
        across = [each.bound + jitter.uniform(-0.25, 0.25) for each in group]
        axes.plot(across, [each.others for each in group], ".", color=color, markersize=4, label=label)
    decorate(axes, "updates of another virtual worker", "(D + 1)(s_local + 1) + s_local - 1", "most missed")
    axes.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    main("hetpipe_staleness", run)
