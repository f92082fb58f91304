"""HetPipe Fig. 4 with other links: which of the model's assumptions decide the order of the allocations.

The model of `hetpipe_fig4` assumes three quarters of the peak for all links, pushes and pulls that are hidden behind
the pipeline, and an all-reduce that begins when all gradients are there. Here they are changed one after the other. The
rates of `doll.pipeline.planner` are used, except where a push and a pull are not hidden: then a wave lasts as long as
its minibatches and both together.
"""

from __future__ import annotations

from dataclasses import dataclass

from doll.errors import ConfigError
from doll.pipeline.planner.partition import DoesNotFitError, MemoryRule
from doll.pipeline.profiling.profile import Profile

from benchmarks.paper.hetpipe_models import GPUS, MODELS, NETWORK, OPTIMIZER_MULTIPLIER, virtual_worker
from doll_lab.pipelines.allocation import RULES, Grouping, GroupRates
from doll_lab.pipelines.network import Network
from doll_lab.pipelines.placement import default_placement, local_placement, traffic
from doll_lab.pipelines.prediction import rates_in_waves

MAX_IN_FLIGHT, PER_NODE = 8, 4
HOROVOD, LOCAL = "Horovod", "ED-local"


@dataclass(frozen=True)
class Links:
    """What is assumed of the links between nodes.

    Attributes:
        bytes_per_s: of activations, gradients, pushes and pulls.
        ring_bytes_per_s: of the all-reduce.
        is_sync_hidden: pushes and pulls take place while the pipeline works on other minibatches.
        is_ring_hidden: the all-reduce takes place while gradients are computed.
    """

    bytes_per_s: float
    ring_bytes_per_s: float
    is_sync_hidden: bool
    is_ring_hidden: bool


_PEAK = NETWORK.between_nodes_bytes_per_s
SLOW, RING = 1.4e9, 0.713e9
"""Bytes/s: of the links, a fifth of their peak; and of the all-reduce if it is hidden, so that Horovod does the 339
images/s with VGG-19 on 16 GPUs that the paper states."""
STEPS = {
    "as assumed": Links(_PEAK, _PEAK, is_sync_hidden=True, is_ring_hidden=False),
    "links of 1.4 GB/s": Links(SLOW, SLOW, is_sync_hidden=True, is_ring_hidden=False),
    "and pushes and pulls not hidden": Links(SLOW, SLOW, is_sync_hidden=False, is_ring_hidden=False),
    "and the all-reduce of 0.71 GB/s hidden": Links(SLOW, RING, is_sync_hidden=False, is_ring_hidden=True),
}


def ring_bytes(parameter_bytes: float, workers: int) -> float:
    """What each of n workers sends in one half of a ring's all-reduce, S (n - 1) / n: the volume that the HetPipe paper
    states for Horovod.

    >>> round(ring_bytes(548e6, 16) / 1e6), round(ring_bytes(230e6, 12) / 1e6)
    (514, 211)
    """
    return parameter_bytes * (workers - 1) / workers


def horovod(profile: Profile, kinds: str, links: Links) -> float | None:
    """Images per second of data-parallel training on four GPUs of each kind; None if the model does not fit on one.

    A step takes as long as on the slowest GPU, and an all-reduce.
    """
    rates = GroupRates(profile, NETWORK, MemoryRule(OPTIMIZER_MULTIPLIER), 1)
    alone = [rates.rate([GPUS[kind]]) for kind in kinds]
    if not all(alone):
        return None
    workers = PER_NODE * len(kinds)
    size = 2.0 * ring_bytes(sum(layer.parameter_bytes for layer in profile.layers), workers)
    ring_s = size / (links.ring_bytes_per_s if len(kinds) > 1 else NETWORK.within_node_bytes_per_s)
    compute_s = 1.0 / min(alone)
    return workers * profile.batch_size / (max(compute_s, ring_s) if links.is_ring_hidden else compute_s + ring_s)


def allocation_rate(profile: Profile, groups: Grouping, links: Links, *, is_local: bool) -> float:
    """Images per second of virtual workers of these devices, with the best N_m up to 8 that fits.

    Args:
        is_local: parameters are on the node that computes their layer; else layers are dealt to the nodes.
    """
    network = Network(NETWORK.within_node_bytes_per_s, links.bytes_per_s)
    nodes = sorted({device.node for group in groups for device in group})
    best = 0.0
    for in_flight in range(1, MAX_IN_FLIGHT + 1):
        rates = GroupRates(profile, network, MemoryRule(OPTIMIZER_MULTIPLIER), in_flight)
        try:
            workers = [rates.worker(group) for group in groups]
        except DoesNotFitError:
            break
        partitions = [worker.partition for worker in workers]
        try:
            placement = local_placement(partitions) if is_local else default_placement(len(profile.layers), nodes)
        except ConfigError:
            continue
        load = traffic(profile, partitions, placement)
        sync_s = load.sync_s(network)
        if links.is_sync_hidden:
            pace = min(rates_in_waves(workers, in_flight, 0, sync_s))
        else:
            pace = min(in_flight / (in_flight / worker.rate + sync_s) for worker in workers)
        best = max(best, len(workers) * profile.batch_size * min(pace, load.pace_bound(network, in_flight)[0]))
    return best


def rates_of(model: str, links: Links) -> dict[str, float]:
    """Images per second of each allocation of 16 GPUs, and of Horovod on those on which the model fits."""
    profile = MODELS[model]()
    fleet = [device for kind in GPUS for device in virtual_worker(kind * PER_NODE)]
    kinds = "".join(kind for kind in GPUS if horovod(profile, kind, links))
    rates = {
        rule: allocation_rate(profile, RULES[rule](fleet, 4), links, is_local=False) for rule in ("NP", "ED", "HD")
    }
    rates[LOCAL] = allocation_rate(profile, RULES["ED"](fleet, 4), links, is_local=True)
    rates[HOROVOD] = horovod(profile, kinds, links) or 0.0
    return rates


def orders(vgg: dict[str, float], resnet: dict[str, float]) -> dict[str, bool]:
    """What the paper says of Fig. 4, by allocation's images per second; “about” and ratios within 20 %."""
    by_horovod = {name: rate / resnet[HOROVOD] for name, rate in resnet.items()}
    return {
        **{f"VGG-19: Horovod over {name}": vgg[HOROVOD] > vgg[name] for name in ("NP", "ED", "HD")},
        "VGG-19: ED-local by Horovod, 1.8": abs(vgg[LOCAL] / vgg[HOROVOD] / 1.8 - 1) <= 0.2,
        "ResNet-152: NP is worst": resnet["NP"] < min(resnet["ED"], resnet["HD"], resnet[LOCAL]),
        **{f"ResNet-152: {name} about Horovod": abs(by_horovod[name] - 1) <= 0.2 for name in ("ED", "HD")},
        "ResNet-152: ED-local by Horovod, 1.4": abs(by_horovod[LOCAL] / 1.4 - 1) <= 0.2,
        "ResNet-152: ED-local over ED": resnet[LOCAL] > 1.001 * resnet["ED"],
    }


def all_orders() -> dict[str, dict[str, bool]]:
    """By step of `STEPS`."""
    return {name: orders(rates_of("VGG-19", links), rates_of("ResNet-152", links)) for name, links in STEPS.items()}
