"""HetPipe, partition of a model: the dynamic programme against all partitions and against a mixed-integer programme.

1,000 random problems of 1 to 7 layers and 1 to 4 devices, alike or not, on one node or several, with memory from plenty
to too little: the least bottleneck by `doll.pipeline.planner.partition`, by looking at all cuts and orders, and by
HiGHS on the programme of the paper, to which the order of the devices is added. As a control, a search that gives each
stage as many layers as it can for a given bottleneck. Then the time of the dynamic programme for 200 layers and 8
different devices, 40,320 orders, with four placements on nodes.

Criteria: the three agree in all problems, those in which nothing fits among them; the control does not; the largest
partition takes less than 1 s of processor time. What takes long are the 1,000 integer programmes (a minute).
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from doll.pipeline.planner.partition import DoesNotFitError, MemoryRule
from doll.pipeline.profiling.profile import Device, LayerProfile, Profile

from benchmarks.paper.harness import FORMULA, OURS, PAPER, Check, Result, Value, main
from benchmarks.paper.partition_reference import (
    Instance,
    by_enumeration,
    by_furthest_layer,
    by_integer_programme,
    random_instance,
)
from doll_lab.figures import decorate
from doll_lab.pipelines.network import Network
from doll_lab.pipelines.partition import best_partition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROBLEMS, SEED = 1_000, 13
LAYERS, NODES, REPEATS = 200, ("one node", "two nodes", "four nodes", "eight nodes"), 3
LIMIT_S = 1.0


@dataclass(frozen=True)
class Answers:
    """The least bottleneck of one problem in seconds, by each way; None: nothing fits."""

    ours: float | None
    enumeration: float | None
    programme: float | None
    furthest: float | None
    layers: int
    stages: int

    @property
    def agree(self) -> bool:
        return _same(self.ours, self.enumeration) and _same(self.ours, self.programme)


def run(quick: bool) -> Result:
    answers = [answers_of(random_instance(random.Random(f"{SEED} {n}"))) for n in range(150 if quick else PROBLEMS)]
    seconds = [[seconds_of(kind, seed) for seed in range(REPEATS)] for kind in range(len(NODES))]
    rows: list[dict[str, Value]] = [
        {"problem": n, "layers": each.layers, "stages": each.stages, "partition_s": each.ours,
         "enumeration_s": each.enumeration, "programme_s": each.programme, "furthest_s": each.furthest}
        for n, each in enumerate(answers)
    ]  # fmt: skip
    notes = [
        "Time of a stage: its layers forward and backward, with what it takes to receive the activations and the "
        "gradients. With transfers, a stage may get faster by a layer more: there the control is wrong, and this is "
        "why the dynamic programme keeps each cut that is possible, and not the furthest one.",
        f"Times for {LAYERS} layers are processor time, medians of {REPEATS} random problems each, for 40,320 orders. "
        "Where all links are equally fast there are half as many states.",
    ]
    return Result(
        "HetPipe: partition of a model onto unequal devices",
        checks_of(answers, seconds),
        rows,
        lambda figure: _draw(figure, answers, seconds),
        notes,
    )


def answers_of(instance: Instance) -> Answers:
    """One problem, in all ways."""
    try:
        ours: float | None = best_partition(
            instance.profile, instance.devices, instance.network, in_flight=instance.in_flight, memory=instance.memory
        ).bottleneck_s
    except DoesNotFitError:
        ours = None
    return Answers(
        ours, by_enumeration(instance), by_integer_programme(instance), by_furthest_layer(instance),
        len(instance.profile.layers), len(instance.devices),
    )  # fmt: skip


def seconds_of(kind: int, seed: int) -> float:
    """Processor time of one partition of 200 layers onto 8 different devices on 1, 2, 4 or 8 nodes."""
    rng = random.Random(f"{SEED} {kind} {seed}")
    layers = tuple(
        LayerProfile(f"layer{n}", rng.uniform(0.1, 2.0), rng.uniform(0.1, 3.0), rng.randrange(1_000),
                     rng.randrange(1_000), rng.randrange(1_000))
        for n in range(LAYERS)
    )  # fmt: skip
    # About three times the memory that is needed, unequally.
    need = 3 * sum(layer.parameter_bytes * 6 + layer.activation_bytes * 4 for layer in layers) / 8
    devices = [
        Device(f"device{n}", rng.uniform(0.3, 2.0), need * rng.uniform(0.5, 1.5), node=str(n % 2**kind))
        for n in range(8)
    ]
    profile = Profile("random", 32, "device", layers)
    begin_s = time.process_time()
    best_partition(profile, devices, Network(2_000.0, 500.0, 0.01), in_flight=4, memory=MemoryRule(1.0))
    return time.process_time() - begin_s


def checks_of(answers: list[Answers], seconds: list[list[float]]) -> list[Check]:
    """The checks, from the answers to all problems and the times for 200 layers by placement."""
    count = len(answers)
    agree = sum(each.agree for each in answers)
    misfits = sum(each.enumeration is None for each in answers)
    refused = sum(each.enumeration is None and each.ours is None for each in answers)
    control = sum(not _same(each.furthest, each.enumeration) for each in answers)
    checks = [
        Check(f"{count} random problems: least bottleneck by all partitions, the integer programme and the dynamic "
              "programme agree", None, count, agree, "all", agree == count),
        Check("of these, in which nothing fits", None, misfits, refused, "all, and there are some",
              refused == misfits > 0),
        Check("control: each stage as many layers as it can, wrong in", None, 0, control, "above 0", control > 0),
    ]  # fmt: skip
    for name, each in zip(NODES, seconds, strict=True):
        took = sorted(each)[len(each) // 2]
        checks.append(
            Check(f"{LAYERS} layers, 8 different devices on {name}: processor time in s", None, LIMIT_S, took,
                  "below 1 s", took < LIMIT_S)
        )  # fmt: skip
    return checks


def _same(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def _draw(figure: Figure, answers: list[Answers], seconds: list[list[float]]) -> None:
    left, right = figure.subplots(1, 2)
    fit = [(each.ours, each.programme) for each in answers if each.ours is not None and each.programme is not None]
    left.loglog(*zip(*fit, strict=True), ".", color=OURS, markersize=3, label="random problem")
    ends = [min(ours for ours, _ in fit), max(ours for ours, _ in fit)]
    left.loglog(ends, ends, color=FORMULA, linewidth=0.8, label="equal")
    decorate(left, "least bottleneck", "dynamic programme, s", "integer programme, s")
    left.legend()
    for number, each in enumerate(seconds):
        right.plot([number] * len(each), each, "o", color=OURS)
    right.axhline(LIMIT_S, color=PAPER, linewidth=0.8)
    right.set_xticks(range(len(NODES)), NODES)
    decorate(right, f"{LAYERS} layers, 8 different devices", "devices on", "time of the dynamic programme, s")
    right.set_ylim(0.0, 1.1 * LIMIT_S)


if __name__ == "__main__":
    main("hetpipe_partition", run)
