"""Policies in somebody else's wheel: found by entry point, validated, played by the engine's suite, simulated."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from access_counts import reads_per_event
from commands import doll
from distributions import install_wheel, write_distribution
from doll.config import dump, parse
from doll.config.policy import POLICIES, PolicyConfig
from doll.errors import ConfigError
from doll.ps.policies import make_policy, policy_spec
from doll.records.control import NewVersion
from engine_runs import check_random_run, play, random_steps
from engine_world import World
from fuzzing import seeds
from paths import SUPPORT

from doll_lab.simulation.report import summarise
from doll_lab.simulation.settings import SimulationSettings
from doll_lab.simulation.system import System

pytestmark = pytest.mark.slow  # loads torch

JOB = "job: j\ntask: {class: 'm:C'}\ntraining: {policy: %s}"


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the third party's wheel installed."""
    folder = tmp_path_factory.mktemp("wheel") / "site-packages"
    folder.mkdir()
    install_wheel(SUPPORT / "third_party_policy", folder)
    return folder


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The registry forgets what it has found, before the test's distributions are on the path and after."""
    before = set(sys.modules)
    POLICIES.refresh()
    yield monkeypatch
    monkeypatch.undo()
    POLICIES.refresh()
    for name in set(sys.modules) - before:
        if name.startswith(("bounded_lead", "few_at_once", "broken_policy")):
            del sys.modules[name]


@pytest.fixture
def installed(site_packages: Path, fresh_registry: pytest.MonkeyPatch) -> None:
    fresh_registry.syspath_prepend(str(site_packages))


def section(**values: object) -> PolicyConfig:
    return parse(JOB % ({"name": "bounded_lead"} | values)).training.policy


def of_steps(limit: int) -> PolicyConfig:
    return section(name="few_at_once", limit=limit, contribution="step")


@pytest.mark.usefixtures("installed")
def test_it_is_found_and_its_section_is_checked() -> None:
    assert POLICIES.names()[:3] == ("doll", "bsp", "asp")
    assert "bounded_lead" in POLICIES.names()
    config = parse(JOB % "{name: bounded_lead, lead: 3}")
    assert config.training.policy.model_dump() == {"name": "bounded_lead", "lead": 3, "eager": False}
    assert config.group_size == 1
    assert parse(dump(config)) == config
    for wrong, expected in (
        ("{name: bounded_lead, lead: -1}", "training.policy.lead: .* greater than or equal to 0, got -1"),
        ("{name: bounded_lead, leed: 1}", "training.policy.leed: unknown key"),
        ("{name: unbounded}", "training.policy.name: expected one of doll, bsp, asp, .*bounded_lead.* got 'unbounded'"),
    ):
        with pytest.raises(ConfigError, match=expected):
            parse(JOB % wrong)
    assert make_policy(config.training.policy).name == policy_spec("bounded_lead").name == "bounded_lead"


@pytest.mark.slow  # long random runs
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("lead", [0, 2])
@pytest.mark.parametrize("seed", seeds(12))
def test_random_runs(lead: int, seed: int) -> None:
    check_random_run(section(lead=lead, eager=bool(seed % 2)), seed, 3000)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("lead", [0, 2])
def test_nobody_gets_further_ahead_than_the_lead_and_grants_name_the_version_that_this_needs(lead: int) -> None:
    world = World(section(lead=lead), max_pending=12)
    world.high = [origin + 16 for origin in world.origins]  # eight batches for each worker
    for _ in range(100):
        for process in world.live():
            for _ in range(3 if process.worker else 1):  # worker 0 is the slow one
                world.receive_next(process)
                world.read(process)
                if process.worker or len(world.updates) < 4:
                    world.compute(process)
                world.send(process)
        world.store_checkpoint()
    applied = world.engine.snapshot(world.now).applied
    assert applied[1] == applied[2] == applied[0] + lead + 1, "the last of them was computed at the bound"
    for update in world.updates:
        for worker, batch, base in update.members:
            counted = [0, 0, 0]
            for earlier in world.updates[:base]:
                for other, _, _ in earlier.members:
                    counted[other] += 1
            assert min(counted) >= batch - lead, (worker, batch, base)


@pytest.mark.slow  # long random runs
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("seed", seeds(12))
def test_random_runs_of_the_one_whose_workers_send_steps(limit: int, seed: int) -> None:
    check_random_run(of_steps(limit), seed, 3000)


@pytest.mark.usefixtures("installed")
def test_what_workers_send_is_its_section_s_to_say() -> None:
    assert of_steps(limit=2).sends_steps
    assert not section(name="few_at_once", contribution="gradient").sends_steps
    with pytest.raises(
        ConfigError, match=r"training\.policy\.contribution: input should be 'gradient' or 'step', got 'sum'"
    ):
        section(name="few_at_once", contribution="sum")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_batches_than_the_limit_are_under_way(limit: int) -> None:
    most = granted = 0
    for seed in range(10):
        world = World(of_steps(limit))
        for step in random_steps(seed, 1500):
            play(world, [step])
            if world.engine is not None:
                most = max(most, world.engine.num_computing + world.engine.num_held)
        granted += len(world.updates)
    assert most == limit
    assert granted > 20


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("values", [{"lead": 1}, {"name": "few_at_once", "limit": 3}])
def test_the_cost_per_event_does_not_grow_with_the_number_of_workers(values: dict[str, object]) -> None:
    small, large = (reads_per_event(section(**values), workers, 800) for workers in (8, 400))
    assert 0 < large < 1.1 * small


@pytest.mark.usefixtures("installed")
def test_its_state_survives_a_restart_of_the_server() -> None:
    world = World(section(lead=1))
    world.high = [origin + 8 for origin in world.origins]
    world.settle()
    assert world.stored is not None
    before = world.stored.policy_state
    assert before is not None
    assert before["slowest"] == 4
    assert world.stored.policy == "bounded_lead"
    world.kill_server()
    world.start_server()
    assert world.engine.snapshot(world.now).policy_state == before


@pytest.mark.usefixtures("installed")
def test_a_checkpoint_that_another_policy_of_that_name_wrote_is_refused() -> None:
    world = World(section(lead=1))
    world.high = [origin + 8 for origin in world.origins]
    world.settle()
    assert world.stored is not None
    world.stored = msgspec.structs.replace(world.stored, policy_state={"rounds": 3})
    with pytest.raises(ValueError, match=r"not a state of bounded_lead: \['rounds'\]"):
        world.start_server()


@pytest.mark.usefixtures("installed")
def test_it_sends_versions_to_workers_that_have_not_asked() -> None:
    world = World(section(lead=1, eager=True))
    world.high = [origin + 8 for origin in world.origins]
    world.settle()
    sent = [record for record in world.commands[0] if isinstance(record, NewVersion)]
    assert [record.version for record in sent] == sorted({record.version for record in sent})
    assert len(sent) >= 3, "one each time that the slowest advances"
    world = World(section(lead=1))
    world.high = [origin + 8 for origin in world.origins]
    world.settle()
    assert not any(isinstance(record, NewVersion) for record in world.commands[0])


@pytest.mark.usefixtures("installed")
def test_a_simulated_job() -> None:
    settings = SimulationSettings(rates_per_s=[50.0] * 6, batch_size=20, policy=section(lead=3), updates=3000)
    system = System(settings)
    system.run()
    summary = summarise(system, alpha=1.0)
    assert summary.rate_formula == 15.0
    assert summary.rate_measured == pytest.approx(15.0, rel=0.05)
    applied = system.engine.snapshot(0.0).applied
    assert max(applied) - min(applied) <= 4


@pytest.mark.usefixtures("fresh_registry")
def test_a_broken_plugin_is_named_only_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(
        tmp_path,
        "sad",
        {"gone": "no_such_module:SPEC", "odd": "broken_policy:SPEC", "half": "broken_policy:HALF"},
        version="2.1",
    )
    (tmp_path / "broken_policy.py").write_text(
        "from doll.config.policy import PolicyConfig\n"
        "from doll.ps.policies.base import PolicySpec\n"
        "class Half(PolicyConfig):\n"
        "    def batches_per_update(self, num_workers): return 1\n"
        "SPEC = 'not a spec'\n"
        "HALF = PolicySpec('half', Half, None)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    POLICIES.refresh()
    assert parse(JOB % "{name: asp}").group_size == 1
    with pytest.raises(
        ConfigError, match=r"training.policy: cannot load .* gone = no_such_module:SPEC of sad 2.1: .*No"
    ):
        parse(JOB % "{name: gone}")
    with pytest.raises(
        ConfigError, match=r"of sad 2.1: expected a doll.ps.policies.PolicySpec named 'odd', got 'not a"
    ):
        parse(JOB % "{name: odd}")
    with pytest.raises(ConfigError, match=r"of sad 2.1: expected Half to define update_rate_per_s"):
        parse(JOB % "{name: half}")


@pytest.mark.usefixtures("fresh_registry")
def test_two_owners_of_a_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "rival", {"doll": "rival:SPEC"})
    monkeypatch.syspath_prepend(str(tmp_path))
    POLICIES.refresh()
    with pytest.raises(
        ConfigError, match=r"training.policy: doll.policies: 'doll' is registered by doll and rival 1.0"
    ):
        parse(JOB % "{name: doll}")
    assert parse(JOB % "{name: bsp}").group_size == 4


@pytest.mark.usefixtures("installed")
def test_it_is_compared_with_the_others(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "job: j\ntask: {class: 'm:C'}\ndata: {workers: 3, batch_size: 8}\nsource: {kind: python, of: 'a:b'}\n"
        "arrivals: {rate_per_s: 80}\nstop: {samples: 4800}\n"
    )
    result = doll("compare", job, "--simulate", "--policies", "bsp,bounded_lead:lead=1", "--json")
    assert result.exit_code == 0, result.output
    bsp, theirs = json.loads(result.stdout)["policies"]
    assert (bsp["policy"], theirs["policy"]) == ("bsp", "bounded_lead:lead=1")
    assert {-2, 1} <= set(map(int, theirs["staleness"]["histogram"])) <= {-2, -1, 0, 1}
    assert theirs["blocked_share"] < bsp["blocked_share"]
    assert "bounded_lead" in doll("compare", job, "--simulate").stdout, "by default, with every other one"
