"""HetPipe Fig. 1: the order of the tasks in a virtual worker of four stages, four minibatches in flight, unit times.

The order as printed, and the minibatches that each stage keeps. In the figure, of two tasks that arrive at the same
moment the forward one comes first. With the backward one first, stage 2 keeps a minibatch less. The memory in
the picture is that of equal stages: weights of 100 MiB, activations of 250 MiB, two more arrays of the weights' size.

Criteria: the order is the printed one, task for task; 4, 4, 3 and 1 minibatches are kept with the backward task first;
N_m in flight gain 1, 2, 2.97 and 3.94 for N_m = 1 to 4 and no more beyond, in 200 minibatches from beginning to end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.paper.harness import Check, Result, Value, claim, main
from doll_lab.pipelines.plots import draw_timelines
from doll_lab.pipelines.schedule import StageTimes, simulate
from doll_lab.pipelines.timeline import Steps, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES, IN_FLIGHT, SHOWN = 4, 4, 16
# As printed, the first stage first: G1 to G4 of the figure.
PRINTED = (
    "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 F9 B6 F10 B7 F11 B8 F12",
    "F1 F2 F3 F4 B1 B2 F5 B3 F6 B4 F7 B5 F8 B6 F9 B7 F10 B8 F11 B9",
    "F1 F2 F3 F4 B1 B2 B3 F5 B4 F6 B5 F7 B6 F8 B7 F9 B8 F10 B9 F11 B10",
    "FB1 FB2 FB3 FB4 FB5 FB6 FB7 FB8 FB9 FB10",
)
KEPT = (4, 4, 3, 1)
GAINS = (1.0, 2.0, 2.97, 3.94, 3.94, 3.94)
MINIBATCHES = 200
PARAMETER_BYTES, ACTIVATION_BYTES, MULTIPLIER = 100 * 2.0**20, 250 * 2.0**20, 2.0


def run(quick: bool) -> Result:
    unit = [StageTimes(1.0, 1.0)] * STAGES
    forward_first = simulate(unit, IN_FLIGHT, SHOWN, forward_first=True)
    backward_first = simulate(unit, IN_FLIGHT, SHOWN)
    seconds = [simulate(unit, n, MINIBATCHES).end_s for n in range(1, len(GAINS) + 1)]
    gains = [seconds[0] / each for each in seconds]
    rows: list[dict[str, Value]] = [
        {"stage": span.stage, "task": span.kind, "minibatch": span.minibatch, "start": span.start_s, "end": span.end_s}
        for span in forward_first.spans
    ]
    notes = [
        "The figure has forward tasks first where two arrive at the same moment, and stage 2 then keeps 4 minibatches. "
        "With backward tasks first, stages 0, 1 and 3 keep the printed order; stage 2 does B1 before F4 and keeps 3.",
        "min(N_m, 2 (k - q) + 1) minibatches at stage q = 1 to k, backward first and unit times, holds up to N_m = 4. "
        "With N_m = 5 and k = 5 stage 4 keeps 4, not 3: forward tasks that arrived in the beginning come before the "
        "first backward ones. A bound for all times is N_m at all stages but the last.",
    ]
    return Result(
        "HetPipe Fig. 1: order of the tasks in a virtual worker",
        checks_of(forward_first, backward_first, gains),
        rows,
        lambda figure: _draw(figure, forward_first, backward_first),
        notes,
    )


def checks_of(forward_first: Timeline, backward_first: Timeline, gains: list[float]) -> list[Check]:
    """The checks, from both orders and what N_m = 1, 2, ... minibatches in flight gain."""
    checks: list[Check] = []
    for stage, printed in enumerate(PRINTED):
        count = len(printed.split())
        ours = " ".join(forward_first.order(stage).split()[:count])
        checks.append(
            claim("order", f"stage {stage}: {count} tasks, {' '.join(printed.split()[:8])} ...", "as printed",
                  "the same" if ours == printed else ours, "the same order", ours == printed)
        )  # fmt: skip
    kept = tuple(backward_first.max_in_flight(stage) for stage in range(STAGES))
    checks.append(
        Check("minibatches that stages 0 to 3 keep, backward first", None, str(KEPT), str(kept), "equal", kept == KEPT)
    )
    checks += [
        Check(f"gain of N_m = {n}, {MINIBATCHES} minibatches", None, reference, ours, "reference ± 0.01",
              abs(ours - reference) <= 0.01)
        for n, (reference, ours) in enumerate(zip(GAINS, gains, strict=True), 1)
    ]  # fmt: skip
    return checks


def _memory(timeline: Timeline) -> list[Steps]:
    return [
        timeline.memory_steps(
            stage, parameter_bytes=PARAMETER_BYTES, activation_bytes=ACTIVATION_BYTES, optimizer_multiplier=MULTIPLIER
        )
        for stage in range(STAGES)
    ]


def _draw(figure: Figure, forward_first: Timeline, backward_first: Timeline) -> None:
    figure.set_size_inches(12.0, 4.6)
    timelines = {"as printed": forward_first, "backward first": backward_first}
    memory = {title: _memory(timeline) for title, timeline in timelines.items()}
    draw_timelines(figure, timelines, end_s=26.0, memory=memory)


if __name__ == "__main__":
    main("hetpipe_fig1", run)
