"""What `doll doctor` says of a real Ray cluster."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import pytest
import ray_cluster
import yaml
from doll.config import JobConfig, parse
from doll.provisioner.fleets.ray.diagnosis import ask_ray, nodes_with
from doll.provisioner.fleets.ray.fleet import connect, lease_key
from doll.provisioner.fleets.ray.host import KV_NAMESPACE
from doll.records.check import Check

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(ray_cluster.unavailable_reason() is not None, reason=str(ray_cluster.unavailable_reason())),
]


def job(**fleet: Any) -> JobConfig:
    return parse("job: digits\ntask: {class: 'a:B'}\n" + yaml.safe_dump({"fleet": {"kind": "ray", **fleet}}))


def ask(**fleet: Any) -> dict[str, Check]:
    return {check.name: check for check in ask_ray(job(**fleet))}


def test_doctor_says_which_nodes_are_missing_and_what_is_on_them() -> None:
    import ray
    from ray.experimental.internal_kv import _internal_kv_get

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
        # A provisioner that has just listed its actors, as an actor sees it.
        with closing(connect(job(address=cluster.address))) as fleet:
            assert fleet.instances() == []
            read = ray.remote(num_cpus=0)(lambda key: _internal_kv_get(key, namespace=KV_NAMESPACE))
            sign = ray.get(read.remote(lease_key("digits", "digits")))
            assert time.time() - int(sign) / 1e9 < 600
        asked = ask(address=cluster.address, num_cpus=4)
        assert asked["Ray: nodes for spot"].result == "failed"


def test_a_cluster_that_is_not_there_is_one_line() -> None:
    (finding,) = ask(address="127.0.0.1:1").values()
    assert finding.result == "failed"
    assert "expected the head of a Ray cluster at 127.0.0.1:1" in finding.detail


def test_labels_that_are_expressions_are_left_to_ray() -> None:
    nodes = [{"Labels": {"a": "b", "c": "d"}}, {"Labels": {"a": "x"}}]
    assert nodes_with(nodes, {"a": "b"}) == nodes[:1]
    assert nodes_with(nodes, {"a": "!b"}) is None
