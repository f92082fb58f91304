"""What `doll doctor` says of a real Ray cluster."""

from __future__ import annotations

from typing import Any

import pytest
import ray_cluster
import yaml
from doll.config import parse
from doll.provisioner.fleets.findings import Finding
from doll.provisioner.fleets.ray.diagnosis import ask_ray, nodes_with
from doll.run.doctor.checks import check_fleet

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(ray_cluster.unavailable_reason() is not None, reason=str(ray_cluster.unavailable_reason())),
]


def ask(**fleet: Any) -> dict[str, Finding]:
    config = parse("job: digits\ntask: {class: 'a:B'}\n" + yaml.safe_dump({"fleet": {"kind": "ray", **fleet}}))
    return {finding.what: finding for finding in ask_ray(config)}


def test_doctor_says_which_nodes_are_missing_and_what_is_on_them() -> None:
    with ray_cluster.RayCluster() as cluster:
        cluster.ensure("spot", 1, cpus=2)
        asked = ask(address=cluster.address)
        assert asked["Ray"].detail.startswith("2 nodes, Ray ")
        spot = asked["Ray: nodes for spot"]
        assert (spot.result, spot.detail) == ("ok", "1 with ray.io/market-type=spot, room for 2 workers")
        assert asked["Ray: doll-online on a node for spot"].result == "ok"
        other = asked["Ray: nodes for on-demand"]
        assert (other.result, other.detail) == ("warning", "none has ray.io/market-type=on-demand")
        assert "ray start --labels ray.io/market-type=on-demand" in other.todo
        asked = ask(address=cluster.address, num_cpus=4)
        assert asked["Ray: nodes for spot"].result == "failed"
        (check, *_) = check_fleet([asked["Ray: nodes for spot"]])
        assert check.name == "provisioner: Ray: nodes for spot"


def test_a_cluster_that_is_not_there_is_one_line() -> None:
    (finding,) = ask(address="127.0.0.1:1").values()
    assert finding.result == "failed"
    assert "expected the head of a Ray cluster at 127.0.0.1:1" in finding.detail


def test_labels_that_are_expressions_are_left_to_ray() -> None:
    nodes = [{"Labels": {"a": "b", "c": "d"}}, {"Labels": {"a": "x"}}]
    assert nodes_with(nodes, {"a": "b"}) == nodes[:1]
    assert nodes_with(nodes, {"a": "!b"}) is None
