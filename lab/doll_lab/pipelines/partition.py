"""The best partition of a model's layers onto the devices of a virtual worker, in any order (the HetPipe paper, 5).

Pure. Stages are contiguous. The time of a stage is the time of its layers, forward and backward, plus the time to
receive the activations from the stage before and the gradients from the next stage. The best partition has the smallest
bottleneck, which is the time of its slowest stage, within the memory of the devices. `doll_lab.pipelines.device_orders`
finds it exactly, with a dynamic programme instead of the paper's CPLEX. The devices of a job's virtual worker are in
the order of the job file; `doll.pipeline.planner.partition` cuts for this order.

>>> from doll.pipeline.profiling.profile import LayerProfile
>>> layers = tuple(LayerProfile(name, 1.0, 2.0, 10, 4, 100) for name in "abcdef")
>>> devices = [Device("slow"), Device("fast", speed=2.0)]
>>> memory = MemoryRule(optimizer_multiplier=1.0)
>>> best = best_partition(Profile("net", 32, "slow", layers), devices, Network(), in_flight=4, memory=memory)
>>> [(stage.device.name, stage.first, stage.stop, stage.memory_bytes) for stage in best.stages]
[('slow', 0, 2, 1280.0), ('fast', 2, 6, 1240.0)]
>>> best.bottleneck_s, best.binding
(6.0, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from doll.pipeline.planner.partition import MemoryRule
from doll.pipeline.profiling.profile import Device, Profile

from doll_lab.pipelines.device_orders import StageRange, best
from doll_lab.pipelines.misfit import explain
from doll_lab.pipelines.network import Network
from doll_lab.pipelines.partition_problem import Problem


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Layers [first, stop) on `device`; times are seconds for one minibatch."""

    first: int
    stop: int
    device: Device
    forward_s: float
    backward_s: float
    receive_forward_s: float
    receive_backward_s: float
    memory_bytes: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.receive_forward_s + self.receive_backward_s


@dataclass(frozen=True, slots=True)
class Partitioning:
    """The stages, first stage first.

    Attributes:
        bottleneck_s: time of the slowest stage.
        binding: number of the slowest stage, from 0.
    """

    stages: tuple[StagePlan, ...]
    bottleneck_s: float
    binding: int


def best_partition(
    profile: Profile, devices: Sequence[Device], network: Network, *, in_flight: int, memory: MemoryRule,
    stages: int | None = None,
) -> Partitioning:  # fmt: skip
    """Return the partition with the smallest bottleneck, over all cuts and all distinct orders of the devices. Among
    equal ones, a minibatch takes least from the first stage to the last and back. The result is equal in each run.

    Args:
        profile, devices, network, memory: costs of the layers, devices, links, and rule for the memory of a stage.
        in_flight: N_m.
        stages: k; None: one for each device. With fewer stages than devices, the best devices are used.

    Raises:
        DoesNotFitError: no partition fits.
        ConfigError: there are too many different devices to try all orders.
        ValueError: there is no minibatch in flight, or less than one stage.
    """
    problem = Problem(profile, devices, network, memory, stages or len(devices))
    costs = problem.costs(in_flight)
    placed = best(costs, problem.sets)
    if placed is None:
        raise explain(problem, costs, in_flight)
    free = [iter(group) for group in problem.groups]
    plans = tuple(_stage(problem, at, next(free[at.kind]), in_flight) for at in placed)
    binding = max(range(len(plans)), key=lambda number: plans[number].total_s)
    return Partitioning(plans, plans[binding].total_s, binding)


def _stage(problem: Problem, at: StageRange, device: Device, in_flight: int) -> StagePlan:
    forward_s, backward_s = problem.forward_s[at.kind], problem.backward_s[at.kind]
    is_last = at.stop == len(problem.profile.layers)
    return StagePlan(
        at.first, at.stop, device,
        forward_s=float(forward_s[at.stop] - forward_s[at.first]),
        backward_s=float(backward_s[at.stop] - backward_s[at.first]),
        receive_forward_s=float(problem.transfer_s[at.before, at.first]),
        receive_backward_s=float(problem.transfer_s[at.after, at.stop]),
        memory_bytes=problem.bytes_of(at.first, at.stop, in_flight, is_last=is_last),
    )  # fmt: skip
