"""Predictions for virtual workers that train together: their pace, what each waits for, and the cost of waiting. Pure.

In the long run, all virtual workers have the pace of the slowest one, whatever the clock distance D is: D only delays
the first wait. A virtual worker also waits for its own waves: minibatch p = (c + 2) N_m starts when wave c - D is
pushed and pulled. With D = 0, this is the time of a push and a pull after the last minibatch of a wave. This time is
hidden if more minibatches are in flight than are needed to keep all stages busy. A larger D hides the pull; it hides
the push as far as a virtual worker may have more minibatches that are not in the model: 2 N_m in policy `wsp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from doll.pipeline.profiling.profile import Device
from doll.theory.cost import SECONDS_PER_HOUR

from doll_lab.pipelines.allocation import VirtualWorker
from doll_lab.pipelines.placement import Placement, Traffic
from doll_lab.pipelines.schedule import Pipeline, StageTimes, simulate

_MINIBATCHES = 120  # minimum number of minibatches of a simulation


def throughput_in_waves(
    stages: Sequence[StageTimes], in_flight: int, *, clock_distance: int, push_s: float, pull_s: float
) -> float:
    """Return the minibatches per second of a virtual worker that pushes and pulls once per wave, among equal workers.

    Args:
        stages: times of the stages.
        in_flight: N_m.
        clock_distance: D.
        push_s: seconds from the end of a wave until the model has its updates.
        pull_s: seconds from then until the virtual worker has the updates.
    """
    ends_s: list[float] = []
    # Policy `wsp` limits the minibatches of a virtual worker that are not in the model.
    max_under_way = 2 * in_flight if in_flight > 1 else 1

    class Recording(Pipeline):
        def end(self, stage: int, now: float) -> int | None:
            complete = super().end(stage, now)
            if complete is not None:
                ends_s.append(now)
            return complete

    def admitted_s(minibatch: int) -> float:
        at_s = 0.0
        own = -(-(minibatch - max_under_way) // in_flight) * in_flight  # last minibatch of a wave that must be pushed
        if own >= 1:
            at_s = ends_s[own - 1] + push_s
        others = minibatch - (1 + clock_distance) * in_flight  # last minibatch of the wave that must be included
        if minibatch % in_flight == 0 and others >= 1:
            at_s = max(at_s, ends_s[others - 1] + push_s + pull_s)
        return at_s

    count = max(_MINIBATCHES, (6 + 2 * clock_distance) * in_flight + 2)
    # Only whole waves, so that a partial wave does not change the slope of completions.
    count = -(-count // in_flight) * in_flight
    return simulate(stages, in_flight, count, admitted_s=admitted_s, pipeline=Recording).throughput()


def rates_in_waves(
    workers: Sequence[VirtualWorker], in_flight: int, clock_distance: int, sync_s: float
) -> tuple[float, ...]:
    """Return the minibatches per second of each virtual worker with its own waves, without waiting for other workers.

    Args:
        workers: the virtual workers.
        in_flight: N_m.
        clock_distance: D.
        sync_s: seconds of a push and a pull.
    """
    half_s = sync_s / 2
    by_stages = {
        stages: throughput_in_waves(stages, in_flight, clock_distance=clock_distance, push_s=half_s, pull_s=half_s)
        for stages in {worker.stage_times for worker in workers}
    }
    # Waiting for its own waves never makes a virtual worker faster; the slope of completions is not exact.
    return tuple(min(worker.rate, by_stages[worker.stage_times]) for worker in workers)


@dataclass(frozen=True)
class Prediction:
    """The prediction for virtual workers and a placement of their parameters.

    Attributes:
        rule: rule that grouped the devices.
        placement_name: "default" or "local".
        in_flight: N_m.
        rates: minibatches per second of each worker, with its own pushes and pulls, without waiting for other workers.
        link_pace: minibatches per second of each worker that the links allow.
        link_node: node whose link has the smallest limit.
        sync_s: seconds from the end of a wave until its updates are pulled.
        batch_size: number of samples of a minibatch.
        spare: devices that are not used.
    """

    rule: str
    placement_name: str
    placement: Placement
    workers: tuple[VirtualWorker, ...]
    in_flight: int
    rates: tuple[float, ...]
    traffic: Traffic
    link_pace: float
    link_node: str
    sync_s: float
    batch_size: int
    spare: tuple[Device, ...] = ()

    @property
    def pace(self) -> float:
        """Minibatches per second of each virtual worker."""
        return min(*self.rates, self.link_pace)

    @property
    def slowest(self) -> int:
        """The virtual worker that the others wait for."""
        return min(range(len(self.rates)), key=self.rates.__getitem__)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all virtual workers together."""
        return len(self.workers) * self.pace * self.batch_size

    @property
    def waiting_shares(self) -> tuple[float, ...]:
        """The share of throughput that each virtual worker loses to waiting for the slowest worker or for the links."""
        return tuple(1.0 - self.pace / rate for rate in self.rates)

    @property
    def usd_per_h(self) -> float:
        """USD per hour of the used devices."""
        return sum(device.usd_per_h for worker in self.workers for device in worker.devices)

    @property
    def usd_per_million_samples(self) -> float:
        return self.usd_per_h / SECONDS_PER_HOUR / self.samples_per_s * 1e6

    def waits_for(self, worker: int) -> str:
        """Return what a virtual worker waits for in the long run."""
        if self.waiting_shares[worker] <= 0.005:
            return "nothing"
        if self.link_pace < min(self.rates):
            return f"the link of node {self.link_node!r}"
        slow = self.workers[self.slowest].partition
        return (
            f"virtual worker {self.slowest + 1}, whose stage {slow.binding + 1} on "
            f"{slow.stages[slow.binding].device.name} binds"
        )
