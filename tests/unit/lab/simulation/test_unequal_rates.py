"""What each policy promises where streams have unequal rates: the table of docs/guide/run.md, row by row, simulated.

Production engine and worker protocol in virtual time: four workers with a partition each, batches of 10 samples that
take 20 ms, for 100 seconds.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from doll.config.policy import POLICIES, policy_section
from paths import ROOT

from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System

pytestmark = pytest.mark.slow  # some seconds

GUIDE = ROOT / "docs" / "guide" / "run.md"
NO_RECORDS = 1e-6  # per second: none in the run
RATES = {
    "dry": (100.0, 100.0, 100.0, NO_RECORDS),
    "slow": (100.0, 100.0, 100.0, 10.0),
    "most": (10.0, 10.0, 10.0, 270.0),
}
SIZES: dict[str, dict[str, Any]] = {
    "doll": {"group_size": 4},
    "doll, recent": {"group_size": 4, "staleness": 3},
    "diloco": {"local_batches": 4},
}
LOCKSTEP = ("bsp", "isp")
OTHERS = (*(name for name in POLICIES.built_in if name not in LOCKSTEP), "doll, recent")


@cache
def learned(name: str, rates: str) -> tuple[float, ...]:
    """Of each stream, the share of its whole batches that is in the model at the end; 0 where there is none."""
    policy = name.partition(",")[0]
    section = policy_section(policy)(name=policy, **SIZES.get(name, {}))
    system = System(
        SimulationSettings(rates_per_s=RATES[rates], batch_size=10, policy=section, seconds=100.0, compute_s=0.02)
    )
    system.run()
    workers = system.engine.workers()
    return tuple(worker.applied / max(1, all_) for worker, all_ in zip(workers, system.complete, strict=True))


@pytest.mark.parametrize("name", OTHERS)
def test_nobody_waits_for_dry_partitions(name: str) -> None:
    assert min(learned(name, "dry")[:3]) > 0.98


@pytest.mark.parametrize("name", OTHERS)
def test_a_slow_partition_holds_nobody_up_and_is_learned_itself(name: str) -> None:
    assert min(learned(name, "slow")) > 0.95


@pytest.mark.parametrize("name", OTHERS)
def test_a_partition_with_most_records_is_learned_as_fast_as_they_come(name: str) -> None:
    shares = learned(name, "most")
    assert shares[3] > 0.98
    assert min(shares) > 0.9, "and the others are learned as well"


@pytest.mark.parametrize("name", LOCKSTEP)
def test_rounds_of_all_workers_are_as_fast_as_the_slowest_partition(name: str) -> None:
    assert learned(name, "dry") == (0, 0, 0, 0)
    slow = learned(name, "slow")
    assert max(slow[:3]) < 0.15 < 0.98 < slow[3]
    most = learned(name, "most")
    assert most[3] < 0.05 < 0.9 < min(most[:3])


def test_the_table_has_every_policy() -> None:
    _, section = GUIDE.read_text(encoding="utf-8").split("### Streams of unequal rates\n")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+)", section, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(POLICIES.built_in)
