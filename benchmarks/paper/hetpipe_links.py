"""The links of HetPipe's cluster: what they carry, fitted to half of the paper's throughputs and tested on the rest.

The paper gives the kind of its links (PCIe, InfiniBand of 56 Gbit/s), and not what they carry. Two numbers are fitted
to the rows of Table 4 with 8 and 16 GPUs: bytes per second of the virtual workers' transfers to HetPipe's, and of the
all-reduce to Horovod's with VGG-19. (Horovod's with ResNet-152 have given the speeds of the GPUs, and the rows of 4
GPUs that of V.) The rows of 12 GPUs, and NP, ED and HD of Fig. 4, are for the test. Pushes and pulls are not hidden
behind the pipeline, as the paper says of HetPipe in section 9: then a wave lasts as long as its minibatches and both
together. The all-reduce is hidden behind the gradients, as Horovod does it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from doll.errors import ConfigError
from doll.pipeline.planner.partition import DoesNotFitError, MemoryRule
from doll.pipeline.profiling.profile import Device, Profile

from benchmarks.paper.hetpipe_models import GPUS, MODELS, NETWORK, OPTIMIZER_MULTIPLIER, virtual_worker
from doll_lab.pipelines.allocation import RULES, Grouping, GroupRates
from doll_lab.pipelines.network import Network
from doll_lab.pipelines.placement import default_placement, local_placement, traffic
from doll_lab.pipelines.prediction import rates_in_waves

MAX_IN_FLIGHT, PER_NODE = 8, 4
HOROVOD, LOCAL = "Horovod", "ED-local"


# GPUs of Table 4: the kinds, and devices per virtual worker.
TABLE_4 = {4: ("V", 4), 8: ("VR", 2), 12: ("VRQ", 3), 16: ("VRGQ", 4)}
PAPER_TABLE_4 = {"VGG-19": {4: 300, 8: 530, 12: 572, 16: 606}, "ResNet-152": {4: 256, 8: 516, 12: 538, 16: 580}}
PAPER_HOROVOD = {"VGG-19": {4: 164, 8: 205, 12: 265, 16: 339}, "ResNet-152": {4: 233, 8: 353, 12: 415}}
FITTED_GPUS, TESTED_GPUS = (8, 16), (12,)


@dataclass(frozen=True)
class Links:
    """What is taken of the links between nodes.

    Attributes:
        bytes_per_s: of activations, gradients, pushes and pulls.
        ring_bytes_per_s: of the all-reduce.
        is_sync_hidden: pushes and pulls take place while the pipeline works on other minibatches.
        is_ring_hidden: the all-reduce takes place while gradients are computed.
    """

    bytes_per_s: float
    ring_bytes_per_s: float
    is_sync_hidden: bool = False
    is_ring_hidden: bool = True


PEAK = NETWORK.between_nodes_bytes_per_s
LINKS = Links(1.8e9, 0.75e9)
"""As `fit` finds them; `hetpipe_fig4` compares."""
ASSUMED = Links(PEAK, PEAK, is_sync_hidden=True, is_ring_hidden=False)
"""Three quarters of InfiniBand's peak for all; pushes and pulls are hidden, and the all-reduce is not."""
_GRID = tuple(1e9 * step / 20 for step in range(10, 61))  # 0.5 to 3 GB/s


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


class Allocated(NamedTuple):
    """What an allocation of GPUs to virtual workers does.

    Attributes:
        images_per_s: with the best N_m up to 8 that fits.
        in_flight: that N_m.
        local_bytes: activations and gradients of a minibatch between nodes.
    """

    images_per_s: float
    in_flight: int
    local_bytes: float


def allocated(
    profile: Profile, groups: Grouping, links: Links, *, is_local: bool, clock_distance: int = 0
) -> Allocated:  # fmt: skip
    """Virtual workers of these devices.

    Args:
        is_local: parameters are on the node that computes their layer; else layers are dealt to the nodes.
        clock_distance: D. Where pushes and pulls are not hidden, a virtual worker pushes after each wave, and pulls
            after D + 1 of them.
    """
    network = Network(NETWORK.within_node_bytes_per_s, links.bytes_per_s)
    nodes = sorted({device.node for group in groups for device in group})
    best = Allocated(0.0, 0, 0.0)
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
            pace = min(rates_in_waves(workers, in_flight, clock_distance, sync_s))
        else:
            wave_sync_s = sync_s * (1 + 1 / (clock_distance + 1)) / 2
            pace = min(in_flight / (in_flight / worker.rate + wave_sync_s) for worker in workers)
        rate = len(workers) * profile.batch_size * min(pace, load.pace_bound(network, in_flight)[0])
        best = max(best, Allocated(rate, in_flight, load.activation_bytes(is_between=True)), key=lambda each: each[0])
    return best


def fleet_of(kinds: str) -> list[Device]:
    """Four GPUs of each kind."""
    return [device for kind in kinds for device in virtual_worker(kind * PER_NODE)]


def hetpipe(model: str, gpus: int, links: Links, *, clock_distance: int = 0) -> Allocated:
    """ED-local on the GPUs of Table 4."""
    kinds, k = TABLE_4[gpus]
    return allocated(
        MODELS[model](), RULES["ED"](fleet_of(kinds), k), links, is_local=True, clock_distance=clock_distance
    )


def allocations(model: str, links: Links) -> dict[str, Allocated]:
    """The allocations of Fig. 4, by name."""
    profile, fleet = MODELS[model](), fleet_of("".join(GPUS))
    dealt = {rule: allocated(profile, RULES[rule](fleet, 4), links, is_local=False) for rule in ("NP", "ED", "HD")}
    return dealt | {LOCAL: hetpipe(model, 16, links)}


def horovod_gpus(model: str) -> str:
    """The kinds of GPUs on which the model fits alone."""
    return "".join(kind for kind in GPUS if horovod(MODELS[model](), kind, LINKS))


def orders(vgg: Mapping[str, float], resnet: Mapping[str, float]) -> dict[str, bool]:
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


def orders_with(links: Links) -> dict[str, bool]:
    """Whether each of the paper's orders of Fig. 4 holds."""
    rates = {
        model: {name: each.images_per_s for name, each in allocations(model, links).items()}
        | {HOROVOD: horovod(MODELS[model](), horovod_gpus(model), links) or 0.0}
        for model in MODELS
    }
    return orders(rates["VGG-19"], rates["ResNet-152"])


def distance(links: Links) -> float:
    """Of HetPipe's fitted rows from the paper's: the root of the mean square of their logarithms."""
    return math.sqrt(
        sum(
            math.log(hetpipe(model, gpus, links).images_per_s / PAPER_TABLE_4[model][gpus]) ** 2
            for model in MODELS
            for gpus in FITTED_GPUS
        )
        / (len(MODELS) * len(FITTED_GPUS))
    )


def ring_distance(links: Links) -> float:
    """The same of Horovod's, with VGG-19."""
    profile = MODELS["VGG-19"]()
    rates = {gpus: horovod(profile, TABLE_4[gpus][0], links) or math.nan for gpus in FITTED_GPUS}
    squares = [math.log(rate / PAPER_HOROVOD["VGG-19"][gpus]) ** 2 for gpus, rate in rates.items()]
    return math.sqrt(sum(squares) / len(squares))


def fit() -> Links:
    """The links with which the rows of 8 and 16 GPUs are nearest to the paper's."""
    candidates = [Links(bytes_per_s, bytes_per_s) for bytes_per_s in _GRID]
    ring = min(candidates, key=ring_distance).ring_bytes_per_s
    return Links(min(candidates[::2], key=distance).bytes_per_s, ring)
