"""The placement of parameters on nodes, and the traffic of each link (the HetPipe paper, sections 5 and 8). Pure.

Each node has a parameter server. `default_placement` deals the layers to the servers in turn. `local_placement` puts
the parameters of stage q on the node that computes stage q; for this, all virtual workers must compute a stage on the
same node, which only equal distribution (ED) ensures. Then no parameters are sent between nodes.

Per minibatch, a cut between stages carries its activations forward and a gradient of the same size backward. Per wave,
a virtual worker pushes the sum of its updates once, and pulls the parameters once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from doll.errors import ConfigError
from doll.pipeline.profiling.profile import Profile

from doll_lab.pipelines.network import Network
from doll_lab.pipelines.partition import Partitioning

Placement = tuple[str, ...]
"""The node of each layer's parameters."""
Link = tuple[str, str]
"""From node to node; within a node where both are the same."""


def default_placement(num_layers: int, nodes: Sequence[str]) -> Placement:
    """Assign the layers to the nodes in turn.

    >>> default_placement(5, ["a", "b"])
    ('a', 'b', 'a', 'b', 'a')
    """
    return tuple(nodes[layer % len(nodes)] for layer in range(num_layers))


def local_placement(partitions: Sequence[Partitioning]) -> Placement:
    """Assign the parameters of each layer to the node that computes it.

    Raises:
        ConfigError: virtual workers compute a layer on different nodes.
    """
    of_worker = [
        tuple(stage.device.node for stage in partition.stages for _ in range(stage.first, stage.stop))
        for partition in partitions
    ]
    for number, nodes in enumerate(of_worker):
        for layer, (here, first) in enumerate(zip(nodes, of_worker[0], strict=True)):
            if here != first:
                raise ConfigError(
                    f"local placement: expected each layer on one node in all virtual workers, got layer {layer + 1} "
                    f"on {first!r} in virtual worker 1 and on {here!r} in {number + 1}: place parameters by default, "
                    "or use ED"
                )
    return of_worker[0]


@dataclass(frozen=True)
class LinkTraffic:
    """The bytes over one link, for all virtual workers together.

    Attributes:
        activation_bytes: bytes of activations and gradients of one minibatch of each virtual worker.
        parameter_bytes: bytes of pushes and pulls of one wave of each virtual worker.
    """

    activation_bytes: int = 0
    parameter_bytes: int = 0

    def bytes_per_minibatch(self, in_flight: int) -> float:
        """Return the bytes per minibatch, with N_m = `in_flight` minibatches per wave."""
        return self.activation_bytes + self.parameter_bytes / in_flight


@dataclass(frozen=True)
class Traffic:
    """The traffic of a fleet's links.

    Attributes:
        links: traffic by (from node, to node).
        push_bytes: bytes of the pushes of one wave by (from node, to node); pulls are equal in the other direction.
        stage_bytes: parameters of the largest stage, which it pushes over its own link.
        num_workers: number of virtual workers.
    """

    links: dict[Link, LinkTraffic]
    push_bytes: dict[Link, int]
    stage_bytes: int
    num_workers: int

    def activation_bytes(self, *, is_between: bool) -> float:
        """Return the mean bytes of activations and gradients per minibatch of a worker, between or within nodes."""
        return self._sum("activation_bytes", is_between)

    def parameter_bytes(self, *, is_between: bool) -> float:
        """Return the mean bytes of pushes and pulls per wave of a worker, between or within nodes."""
        return self._sum("parameter_bytes", is_between)

    def _sum(self, name: str, is_between: bool) -> float:
        chosen: list[int] = [getattr(load, name) for (a, b), load in self.links.items() if (a != b) == is_between]
        return sum(chosen) / self.num_workers

    def pace_bound(self, network: Network, in_flight: int) -> tuple[float, str]:
        """Return the minibatches per second of each worker that the nodes' links allow, and the node that limits them.

        A link can send and receive at the same time.
        """
        loads = _by_end({link: load.bytes_per_minibatch(in_flight) for link, load in self.links.items()})
        node, most = max(loads.items(), key=lambda item: item[1], default=("", 0.0))
        return (network.between_nodes_bytes_per_s / most if most else float("inf")), node

    def sync_s(self, network: Network) -> float:
        """Return the seconds from the end of a wave until its updates are pulled; all workers push at the same time."""
        between = max(_by_end(self.push_bytes).values(), default=0.0) / network.between_nodes_bytes_per_s
        within = self.stage_bytes / network.within_node_bytes_per_s
        return 2.0 * (network.latency_s + max(between, within))


def traffic(profile: Profile, partitions: Sequence[Partitioning], placement: Placement) -> Traffic:
    """Return the traffic for these virtual workers with this placement of their parameters."""
    activations = defaultdict[Link, int](int)
    pushes = defaultdict[Link, int](int)
    stage_bytes = 0
    for partition in partitions:
        for link, size in _activations(profile, partition):
            activations[link] += size
        for stage in partition.stages:
            sizes = [profile.layers[layer].parameter_bytes for layer in range(stage.first, stage.stop)]
            stage_bytes = max(stage_bytes, sum(sizes))
            for layer, size in enumerate(sizes, stage.first):
                pushes[stage.device.node, placement[layer]] += size
    links = {
        (a, b): LinkTraffic(activations.get((a, b), 0), pushes.get((a, b), 0) + pushes.get((b, a), 0))
        for a, b in sorted({*activations, *pushes, *((b, a) for a, b in pushes)})
    }
    return Traffic(links, dict(pushes), stage_bytes, len(partitions))


def _activations(profile: Profile, partition: Partitioning) -> Iterator[tuple[Link, int]]:
    for before, after in zip(partition.stages, partition.stages[1:], strict=False):
        size = profile.layers[after.first - 1].output_bytes
        yield (before.device.node, after.device.node), size
        yield (after.device.node, before.device.node), size


def _by_end(sizes: dict[Link, float] | dict[Link, int]) -> dict[str, float]:
    """Return the larger of the bytes that each node sends and receives, without traffic within the node."""
    sent = defaultdict[str, float](float)
    received = defaultdict[str, float](float)
    for (a, b), size in sizes.items():
        if a != b:
            sent[a] += size
            received[b] += size
    return {node: max(sent[node], received[node]) for node in {*sent, *received}}
