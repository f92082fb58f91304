"""Where the parameters are, and what goes over each link (the HetPipe paper, sections 5 and 8). Pure.

Each node has a parameter server. `default_placement` deals the layers to the servers in turn. `local_placement` puts
the parameters of stage q on the node that computes stage q; that needs the same node for it in every virtual worker, as
with equal distribution (ED) alone. Then no parameter goes from node to node.

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
    """Layers to nodes in turn.

    >>> default_placement(5, ["a", "b"])
    ('a', 'b', 'a', 'b', 'a')
    """
    return tuple(nodes[layer % len(nodes)] for layer in range(num_layers))


def local_placement(partitions: Sequence[Partitioning]) -> Placement:
    """The parameters of each layer on the node that computes it.

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
    """Bytes over one link, of all virtual workers together.

    Attributes:
        activation_bytes: activations and gradients of one minibatch of each virtual worker.
        parameter_bytes: pushes and pulls of one wave of each virtual worker.
    """

    activation_bytes: int = 0
    parameter_bytes: int = 0

    def bytes_per_minibatch(self, in_flight: int) -> float:
        """With N_m = `in_flight` minibatches per wave."""
        return self.activation_bytes + self.parameter_bytes / in_flight


@dataclass(frozen=True)
class Traffic:
    """What a fleet's links carry.

    Attributes:
        links: by (from node, to node).
        push_bytes: of one wave, by (from node, to node); the pull is the same the other way round.
        stage_bytes: parameters of the largest stage, which it pushes over its own link.
        num_workers: virtual workers.
    """

    links: dict[Link, LinkTraffic]
    push_bytes: dict[Link, int]
    stage_bytes: int
    num_workers: int

    def activation_bytes(self, *, is_between: bool) -> float:
        """Activations and gradients of a minibatch of one virtual worker, mean; between nodes, or within."""
        return self._sum("activation_bytes", is_between)

    def parameter_bytes(self, *, is_between: bool) -> float:
        """Pushes and pulls of a wave of one virtual worker, mean; between nodes, or within."""
        return self._sum("parameter_bytes", is_between)

    def _sum(self, name: str, is_between: bool) -> float:
        chosen: list[int] = [getattr(load, name) for (a, b), load in self.links.items() if (a != b) == is_between]
        return sum(chosen) / self.num_workers

    def pace_bound(self, network: Network, in_flight: int) -> tuple[float, str]:
        """Minibatches per second of each virtual worker that the nodes' links can carry, and the node whose link binds.

        A link sends and receives at the same time.
        """
        loads = _by_end({link: load.bytes_per_minibatch(in_flight) for link, load in self.links.items()})
        node, most = max(loads.items(), key=lambda item: item[1], default=("", 0.0))
        return (network.between_nodes_bytes_per_s / most if most else float("inf")), node

    def sync_s(self, network: Network) -> float:
        """Seconds from the end of a wave until its updates are pulled; all virtual workers push at the same time."""
        between = max(_by_end(self.push_bytes).values(), default=0.0) / network.between_nodes_bytes_per_s
        within = self.stage_bytes / network.within_node_bytes_per_s
        return 2.0 * (network.latency_s + max(between, within))


def traffic(profile: Profile, partitions: Sequence[Partitioning], placement: Placement) -> Traffic:
    """What the links carry for these virtual workers, with their parameters placed like this."""
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
    """What each node sends or receives, whichever is more; what stays within a node does not count."""
    sent = defaultdict[str, float](float)
    received = defaultdict[str, float](float)
    for (a, b), size in sizes.items():
        if a != b:
            sent[a] += size
            received[b] += size
    return {node: max(sent[node], received[node]) for node in {*sent, *received}}
