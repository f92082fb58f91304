"""HetPipe, Fig. 6: time and minibatches to a target loss, by clock distance D.

4 virtual workers of 4 stages with N_m = 4 train a perceptron with one hidden layer on drawn images of 10 classes, each
on a stream of its own. Stage times vary by a lognormal factor that changes slowly (sigma 0.3, over 20 minibatches), so
that now one and now another virtual worker is behind; a wave takes half the time of a minibatch to the server, and
weights as long back. Engine and policy are those of production: a virtual worker computes on the weights of the version
that it pulled last, and its own updates that this version lacks, and pulls when the gate asks for newer ones.

Criteria: the paper's orders, D = 4 before D = 0 and D = 32 no better than D = 4, and its ratios within 20 %. Means over
seeds. What the ratio of D = 32 depends on is tried with virtual workers that pull after each of their waves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappush
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from doll.ps.engine.events import ApplyUpdate
from doll.ps.policies.wsp import WspPolicyConfig
from doll.theory.checks import Floats

from benchmarks.paper.harness import FORMULA, OURS, PAPER, Check, Result, Value, claim, main, near
from benchmarks.paper.virtual_workers import VirtualWorkers
from doll_lab.figures import decorate
from doll_lab.pipelines.schedule import Jitter, StageTimes
from doll_lab.pipelines.timeline import Kind
from doll_lab.simulation.timed_world import MESSAGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Ints = npt.NDArray[np.int64]

WORKERS, STAGES, IN_FLIGHT = 4, 4, 4
DISTANCES = (0, 1, 4, 32)
SIGMA, MEMORY = 0.3, 20
TRANSFER = 0.5 * 2 * STAGES  # stage times are 1
INPUTS, HIDDEN, CLASSES, BATCH = 64, 32, 10, 8
RATE, WAVES = 0.02, 150
TARGET, MIDDLE = 0.7, 800
_EVERY_VERSIONS = 4
_REFRESHED = (1 << 20) + 2  # number of a message, behind those of `virtual_workers`
_CAUSE = (
    "the age of the weights: ours are as old as D allows, as a virtual worker pulls when it must; pulled after each "
    "wave, D = 32 costs 1 % more minibatches than D = 4, and waits less (rows below in Fig. 6's section)"
)


class Problem(Protocol):
    """What is learned.

    Attributes:
        start: the first parameters, shape (d,).
    """

    start: Floats

    def gradient(self, parameters: Floats, worker: int, minibatch: int) -> Floats:
        """Of the mean loss of a minibatch of this worker's stream, shape (d,)."""
        ...

    def loss(self, parameters: Floats) -> float:
        """Held out."""
        ...


class Perceptron:
    """Softmax regression on a hidden layer, in one flat vector. Images are a class's mean and noise."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng((41, seed))
        self._means = rng.normal(0.0, 0.35, (CLASSES, INPUTS))
        self._seed = seed
        self.start = np.concatenate(
            [rng.normal(0.0, INPUTS**-0.5, INPUTS * HIDDEN), rng.normal(0.0, HIDDEN**-0.5, HIDDEN * CLASSES)]
        )
        self._held_out = self._draw(np.random.default_rng((42, seed)), 1000)

    def _draw(self, rng: np.random.Generator, count: int) -> tuple[Floats, Ints]:
        labels = rng.integers(0, CLASSES, count)
        return self._means[labels] + rng.normal(0.0, 1.0, (count, INPUTS)), labels

    def gradient(self, parameters: Floats, worker: int, minibatch: int) -> Floats:
        images, labels = self._draw(np.random.default_rng((43, self._seed, worker, minibatch)), BATCH)
        output_weights, hidden, probabilities = self._forward(parameters, images)
        probabilities[np.arange(BATCH), labels] -= 1.0
        error = probabilities / BATCH
        back = (error @ output_weights.T) * (hidden > 0)
        return np.concatenate([(images.T @ back).ravel(), (hidden.T @ error).ravel()])

    def loss(self, parameters: Floats) -> float:
        images, labels = self._held_out
        probabilities = self._forward(parameters, images)[2]
        return float(-np.mean(np.log(probabilities[np.arange(len(labels)), labels] + 1e-12)))

    def _forward(self, parameters: Floats, images: Floats) -> tuple[Floats, Floats, Floats]:
        hidden_weights = parameters[: INPUTS * HIDDEN].reshape(INPUTS, HIDDEN)
        output_weights = parameters[INPUTS * HIDDEN :].reshape(HIDDEN, CLASSES)
        hidden = np.maximum(images @ hidden_weights, 0.0)
        scores = hidden @ output_weights
        exponents = np.exp(scores - scores.max(axis=1, keepdims=True))
        return output_weights, hidden, exponents / exponents.sum(axis=1, keepdims=True)


class LearningWorkers(VirtualWorkers):
    """Virtual workers that compute what they push.

    Attributes:
        curve: (seconds, minibatches in the model, held-out loss) of some versions.
    """

    def __init__(self, problem: Problem, rate: float, config: WspPolicyConfig, **more: object) -> None:
        self._problem, self._rate = problem, rate
        # Sums of each virtual worker's first updates, by their number; and the models by version.
        self._sums: list[list[Floats]] = [[np.zeros_like(problem.start)] for _ in range(WORKERS)]
        self._under_way: list[dict[int, Floats]] = [{} for _ in range(WORKERS)]
        self._models = [problem.start]
        self.curve: list[tuple[float, int, float]] = []
        super().__init__(config, **more)  # type: ignore[arg-type]

    def view(self, worker: int) -> Floats:
        """The pulled version, and the updates of the worker's own complete minibatches that it lacks."""
        version, own = self.process(worker).cached, self._sums[worker]
        has: Floats = self._models[version] + own[-1] - own[self._contents[version][worker]]
        return has

    def _start_next(self, worker: int) -> None:
        super()._start_next(worker)
        minibatch = self.pipelines[worker].started
        gradient = self._problem.gradient(self.view(worker), worker, minibatch)
        self._under_way[worker][minibatch] = -self._rate * gradient

    def _on_complete(self, worker: int, minibatch: int) -> None:
        own = self._sums[worker]
        own.append(own[-1] + self._under_way[worker].pop(minibatch))
        super()._on_complete(worker, minibatch)

    def _on_update(self, update: ApplyUpdate) -> None:
        super()._on_update(update)
        contents = self._contents[-1]
        model = self._problem.start + sum(own[count] for own, count in zip(self._sums, contents, strict=True))
        self._models.append(model)
        if len(self._models) % _EVERY_VERSIONS == 0:
            self.curve.append((self.now, sum(contents), self._problem.loss(model)))


class RefreshedWorkers(LearningWorkers):
    """They get the model after each of their waves, whether the gate asks for it or not, and do not wait for it."""

    def __init__(self, problem: Problem, rate: float, config: WspPolicyConfig, **more: object) -> None:
        self._coming: list[list[int]] = [[] for _ in range(WORKERS)]
        super().__init__(problem, rate, config, **more)

    def _on_update(self, update: ApplyUpdate) -> None:
        super()._on_update(update)
        for item in update.sets:
            self._coming[item.push.worker].append(update.version)
            heappush(self._queue, (self.now + self._pull_s, MESSAGE, item.push.worker, _REFRESHED))

    def _on_message(self, worker: int, number: int) -> None:
        if number != _REFRESHED:
            super()._on_message(worker, number)
            return
        process = self.process(worker)
        process.cached = max(process.cached, self._coming[worker].pop(0))
        self._dispatch_later(worker)


def drifting_jitter(rng: np.random.Generator) -> Jitter:
    """One factor for a minibatch and all of its tasks, which changes slowly from one minibatch to the next."""
    keep = 1 - 1 / MEMORY
    logs = [SIGMA * float(rng.standard_normal())]

    def factor(stage: int, kind: Kind, minibatch: int) -> float:
        while len(logs) <= minibatch:
            logs.append(keep * logs[-1] + SIGMA * (1 - keep**2) ** 0.5 * float(rng.standard_normal()))
        return float(np.exp(logs[minibatch]))

    return factor


@dataclass(frozen=True)
class Curve:
    """One run; arrays of shape (m,)."""

    seconds: Floats
    minibatches: Floats
    loss: Floats
    end_s: float

    def to_target(self, target: float) -> tuple[float, float]:
        """Seconds and minibatches until the loss is below the target permanently; infinite where it is not."""
        above = np.flatnonzero(self.loss > target)
        first = 0 if not above.size else int(above[-1]) + 1
        if first == len(self.loss):
            return np.inf, np.inf
        return float(self.seconds[first]), float(self.minibatches[first])

    def loss_after(self, minibatches: float) -> float:
        """Mean of the losses around so many minibatches."""
        near = np.abs(self.minibatches - minibatches) <= 0.1 * minibatches
        return float(self.loss[near].mean())


def simulate(distance: int, seed: int, waves: int = WAVES, kind: type[LearningWorkers] = LearningWorkers) -> Curve:
    """One run."""
    system = kind(
        Perceptron(seed), RATE, WspPolicyConfig(wave_batches=IN_FLIGHT, clock_distance=distance),
        stages=[[StageTimes(1.0, 1.0)] * STAGES] * WORKERS, waves=waves, push_s=TRANSFER, pull_s=TRANSFER,
        jitter=lambda worker: drifting_jitter(np.random.default_rng((44, seed, worker))),
    )  # fmt: skip
    system.run()
    seconds, minibatches, loss = np.array(system.curve).T
    return Curve(seconds, minibatches, loss, system.now)


Curves = Mapping[int, Sequence[Curve]]


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def seconds_of(curves: Curves) -> dict[int, float]:
    """Until the target, by D."""
    return {distance: mean([curve.to_target(TARGET)[0] for curve in runs]) for distance, runs in curves.items()}


def minibatches_of(curves: Curves) -> dict[int, float]:
    """Until the target, by D."""
    return {distance: mean([curve.to_target(TARGET)[1] for curve in runs]) for distance, runs in curves.items()}


def checks_of(curves: Curves, refreshed: Curves) -> list[Check]:
    """The checks, from the runs by D; means over seeds.

    Args:
        refreshed: those of `RefreshedWorkers`.
    """
    seconds, needed = seconds_of(curves), minibatches_of(curves)
    losses = {distance: mean([curve.loss_after(MIDDLE) for curve in runs]) for distance, runs in curves.items()}
    speed = {distance: mean([1 / curve.end_s for curve in runs]) for distance, runs in curves.items()}
    faster, older, slower = seconds[4] / seconds[0], losses[32] - losses[4], seconds[32] / seconds[4]
    refreshed_s, refreshed_minibatches = seconds_of(refreshed), minibatches_of(refreshed)
    more = refreshed_minibatches[32] / refreshed_minibatches[4]
    return [
        claim(
            "value",
            f"D = 4: time to loss {TARGET:g}, of that at D = 0",
            0.72,
            faster,
            "< 1, paper ± 20 %",
            faster < 1 and near(faster, 0.72, 0.2),
        ),
        claim(
            "order", f"D = 32: loss after {MIDDLE} minibatches, less that at D = 4", "above 0", older, "≥ 0", older >= 0
        ),
        claim(
            "order",
            "D = 32: minibatches per second, of D = 4",
            "similar",
            speed[32] / speed[4],
            "1 ± 15 %",
            near(speed[32] / speed[4], 1.0, 0.15),
        ),
        claim(
            "value",
            f"D = 32: time to loss {TARGET:g}, of that at D = 4",
            1.047,
            slower,
            "paper ± 20 %",
            near(slower, 1.047, 0.2),
            _CAUSE,
        ),
        Check(
            "cause: the same time, pulled after each wave",
            None,
            1.047,
            refreshed_s[32] / refreshed_s[4],
            "1.047 ± 20 %",
            near(refreshed_s[32] / refreshed_s[4], 1.047, 0.2),
        ),
        Check(
            "cause: minibatches at D = 32, of D = 4, pulled after each wave",
            None,
            None,
            more,
            "1 to 1.1",
            1 <= more <= 1.1,
        ),
        *(
            Check(f"D = {distance}: minibatches to loss {TARGET:g}", None, None, needed[distance], "", None)
            for distance in curves
        ),
        *(
            Check(f"D = {distance}: minibatches per second, of D = 0", None, None, speed[distance] / speed[0], "", None)
            for distance in list(curves)[1:]
        ),
    ]


def run(quick: bool) -> Result:
    curves = {distance: [simulate(distance, seed) for seed in range(1 if quick else 5)] for distance in DISTANCES}
    refreshed = {
        distance: [simulate(distance, seed, kind=RefreshedWorkers) for seed in range(1 if quick else 5)]
        for distance in (4, 32)
    }
    rows: list[dict[str, Value]] = [
        {"D": distance, "seed": seed, "seconds": float(at_s), "minibatches": int(count), "loss": float(loss)}
        for distance, runs in curves.items()
        for seed, curve in enumerate(runs)
        for at_s, count, loss in zip(curve.seconds, curve.minibatches, curve.loss, strict=True)
    ]
    notes = [
        "The paper trains VGG-19 on 16 GPUs to 67 % accuracy; here the model is small, and only the order is compared. "
        "A larger D gains speed where now one and now another virtual worker is behind, and where weights travel; what "
        "it costs in minibatches depends on the step: at D = 32 the weights are up to 134 minibatches of each other "
        "virtual worker old.",
        "The paper says that a clock distance of 32 is unlikely to be reached. It is not reached here either, but "
        "these virtual workers pull only when the gate asks for it, so that their weights are old even if nobody is "
        "behind. Pulled after each wave, D = 32 differs little from D = 4, as in the paper; it is earlier by what it "
        "waits less.",
    ]
    return Result(
        "HetPipe, Fig. 6: convergence by clock distance",
        checks_of(curves, refreshed),
        rows,
        lambda figure: _draw(figure, curves),
        notes,
    )


def _draw(figure: Figure, curves: Mapping[int, Sequence[Curve]]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    colors = dict(zip(DISTANCES, (FORMULA, "#72b7b2", OURS, PAPER), strict=True))
    for distance, runs in curves.items():
        left.plot(runs[0].seconds, runs[0].loss, color=colors[distance], linewidth=1.2, label=f"D = {distance}")
        right.plot(runs[0].minibatches, runs[0].loss, color=colors[distance], linewidth=1.2)
    for axes in (left, right):
        axes.axhline(TARGET, color=FORMULA, linewidth=0.8, linestyle=":")
    decorate(left, "over time", "seconds (a task takes about 1 s)", "held-out loss")
    decorate(right, "over minibatches", "minibatches of all", "")
    left.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    main("hetpipe_fig6", run)
