"""What a fleet is, which process has which of its workers, and what a profile's table shows."""

from __future__ import annotations

import cProfile
from pathlib import Path

import pytest
from benchmarks.fleet_report import POLICIES, Fleet, profile_table
from benchmarks.fleets import fleet_job, shares


@pytest.mark.parametrize(("policy", "group_size"), [("doll K=N/4", 16), ("doll K=N", 64), ("doll K=4N", 256)])
def test_the_group_follows_the_size_of_the_fleet(policy: str, group_size: int) -> None:
    fleet = Fleet(64, policy, 0.04, "redis")
    assert fleet.group_size == group_size
    assert fleet_job(fleet).training.policy.batches_per_update(64) == group_size


def test_only_the_workers_of_a_group_compute_at_once() -> None:
    offered = {policy: Fleet(8, policy, 0.5, "redis").offered for policy in POLICIES}
    assert offered == {"doll K=N/4": 4.0, "doll K=N": 16.0, "doll K=4N": 16.0, "bsp": 16.0}


def test_every_worker_has_one_process_and_the_one_to_be_lost_has_its_own() -> None:
    assert shares(8, False) == [(0, 8)]
    assert shares(130, False) == [(0, 64), (64, 128), (128, 130)]
    assert shares(65, True) == [(0, 64), (64, 65)]


def test_a_profile_shows_what_the_loop_calls_and_nothing_else(tmp_path: Path) -> None:
    def handle() -> int:
        return sum(range(20_000))

    def serve() -> None:
        for _ in range(20):
            handle()

    def start() -> None:
        sorted(range(1000), key=lambda n: -n)
        serve()

    profile = cProfile.Profile()
    profile.runcall(start)
    profile.dump_stats(tmp_path / "p")
    table = profile_table(tmp_path / "p")
    assert "| `<built-in method builtins.sum>` | 20 |" in table
    assert "sorted" not in table
