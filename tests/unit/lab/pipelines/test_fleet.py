"""A fleet's table, strictly read, and its plan as text, JSON and picture."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from doll.cli.app import app
from doll.config import AdamConfig, SgdConfig
from doll.errors import ConfigError
from doll.pipeline.planner.partition import MemoryRule
from doll.pipeline.planner.profiled import live_rule
from doll.pipeline.profiling.profile import Device, LayerProfile, Profile
from doll.process.files import json_safe
from paths import ROOT
from typer.testing import CliRunner

from doll_lab.pipelines import fleet_report
from doll_lab.pipelines.allocation import RULES
from doll_lab.pipelines.fleet import load_fleet, parse_csv, parse_yaml
from doll_lab.pipelines.fleet_plan import plan_fleet
from doll_lab.pipelines.network import Network

EXAMPLE = ROOT / "examples" / "gpus.yaml"
LAYERS = tuple(
    LayerProfile(f"l{at}", 0.01 * (1 + at % 3), 0.02, 2**20 * (9 - at), 2**18, 2**20 * at) for at in range(8)
)
PROFILE = Profile("small", 16, "base", LAYERS)


def test_the_example() -> None:
    devices, network = load_fleet(EXAMPLE)
    assert Counter(device.node for device in devices) == Counter(a=4, b=4, c=4, d=4)
    assert devices[8] == Device("L4", 0.5, 22.5 * 2**30, "c", 0.25, is_spot=True)
    assert network == Network(10e9, 3e9, 0.00005)


def test_csv_and_yaml_say_the_same() -> None:
    text = "name, count,node,speed,memory_gib,usd_per_h,spot\nx,2,n,0.5,8,1.5,yes\n\ny,,,,,,\n"
    from_csv, network = parse_csv(text, "f.csv")
    from_yaml, _ = parse_yaml(
        "devices: [{name: x, count: 2, node: n, speed: 0.5, memory_gib: 8, usd_per_h: 1.5, spot: yes}, {name: y}]", "f"
    )
    assert from_csv == from_yaml
    assert from_csv[2] == Device("y", 1.0, math.inf, "machine 3")
    assert network == Network()


def test_devices_without_a_node_are_machines_by_themselves() -> None:
    devices, _ = parse_yaml("devices: [{name: x, count: 3}]", "f")
    assert len({device.node for device in devices}) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: line 1: expected the columns' names, `name` and any of count.*got nothing"),
        ("name,cores\nx,2\n", "f: line 1: expected the columns' names.*got cores"),
        ("name,name\nx,2\n", "f: line 1: expected the columns' names.*each once"),
        ("count\n2\n", "f: line 1: expected the columns' names"),
        ("name\n", "f: expected a line for each kind of device"),
        ("name,count\nx,0\n", "f: line 2: count: .*greater than 0, got '0'"),
        ("name,count\nx,two\n", "f: line 2: count: .*got 'two'"),
        ("name,speed\nx,1\ny,nan\n", "f: line 3: speed: .*finite"),
        ("name,spot\nx,maybe\n", "f: line 2: spot: .*got 'maybe'"),
        ("name,speed\n,1\n", "f: line 2: name: expected a value, got nothing"),
        ("name,speed\nx,1,2\n", "f: line 2: expected 2 cells at most, one per column, got 3"),
        ('name,speed\n"x,1\n', "f: line 2: not CSV"),
        ("name,count\nx,513\n", "f: expected 512 devices at most"),
        ("name,speed\nx,1\nx,2\n", "f: line 3: expected the same speed and memory_gib in all rows of 'x'"),
        ("name,usd_per_h\nx,-1\n", "f: line 2: usd_per_h: .*got '-1'"),
    ],
)
def test_a_bad_csv_file_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_csv(text, "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "f: expected devices: and network:, got list"),
        ("devices: []", "f: devices: "),
        ("devices: [{name: x, speeed: 2}]", r"f: devices.0.speeed: unknown key \(did you mean 'speed'\?\)"),
        ("devices: [{name: x, speed: true}]", "f: devices.0.speed: expected a number, got true"),
        ("devices: [{name: x}]\nnetwork: {latency_s: -1}", "f: network.latency_s: "),
        ("devices: [{name: x}]\nnetwork: {between_nodes_gb_per_s: 0}", "f: network.between_nodes_gb_per_s: "),
        ("devices: [", "f: not YAML"),
        ("devices: [{name: x}, {name: x, memory_gib: 4}]", "f: devices.1: expected the same speed and memory_gib"),
    ],
)
def test_a_bad_yaml_file_is_refused_with_its_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "f")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml: No such file.*: expected a table of devices"):
        load_fleet(tmp_path / "none.yaml")


# --- the plan --------------------------------------------------------------------------------------------------------


def fleet() -> list[Device]:
    kinds = (("a", 1.0, 1.0), ("b", 0.5, 2.0))
    return [
        Device(name, speed, gib * 2**30, node=name, usd_per_h=speed, is_spot=name == "b")
        for name, speed, gib in kinds for _ in range(4)
    ]  # fmt: skip


def test_the_search_is_as_good_as_each_rule_and_its_bound_holds() -> None:
    plan = plan_fleet(PROFILE, fleet(), Network(1e9, 1e8), MemoryRule(2.0), k=2)
    assert plan.best is not None
    by_rule = {
        (each.rule, each.placement_name): each.best.samples_per_s for each in plan.candidates if each.best is not None
    }
    assert {rule for rule, _ in by_rule} == {*RULES, "search"}
    best = max(by_rule.values())
    assert max(value for (rule, _), value in by_rule.items() if rule == "search") == best == plan.best.samples_per_s
    for candidate in plan.candidates:
        if candidate.answer is not None and candidate.best is not None:
            assert candidate.best.samples_per_s <= candidate.answer.bound * PROFILE.batch_size * (1 + 1e-9)


def test_n_m_is_the_smallest_that_does_as_well_and_can_be_given() -> None:
    plan = plan_fleet(PROFILE, fleet(), Network(), MemoryRule(2.0), k=2, rules=["ED"])
    candidate = plan.candidates[0]
    assert candidate.best is not None
    rates = dict(candidate.by_in_flight)
    assert rates[candidate.best.in_flight] >= 0.99 * max(rates.values())
    assert all(rates[n] < 0.99 * max(rates.values()) for n in rates if n < candidate.best.in_flight)
    given = plan_fleet(PROFILE, fleet(), Network(), MemoryRule(2.0), k=2, rules=["ED"], in_flight=1).candidates[0]
    assert given.best is not None
    assert (given.best.in_flight, list(dict(given.by_in_flight))) == (1, [1])
    assert given.best.samples_per_s == pytest.approx(rates[1])


def test_all_wait_for_the_slowest_virtual_worker() -> None:
    plan = plan_fleet(PROFILE, fleet(), Network(), MemoryRule(2.0), k=2, rules=["NP"])
    best = plan.best
    assert best is not None
    # Two workers of fast devices wait for half of their time for the slow ones, for b is half as fast as a.
    assert best.waiting_shares == pytest.approx((0.5, 0.5, 0.0, 0.0), abs=0.02)
    assert best.waits_for(0).startswith(f"virtual worker {best.slowest + 1}, whose stage ")
    assert best.waits_for(0).endswith("on b binds")
    assert best.waits_for(best.slowest) == "nothing"
    assert best.samples_per_s == pytest.approx(4 * 16 * min(best.rates))
    assert best.usd_per_h == pytest.approx(6.0)
    assert best.usd_per_million_samples == pytest.approx(6.0 / 3600 / best.samples_per_s * 1e6)


def test_devices_are_left_out_where_the_others_do_more_without_them() -> None:
    slow = [Device("snail", 0.01, node="s")] * 2
    plan = plan_fleet(PROFILE, [*fleet()[:4], *slow], Network(), MemoryRule(2.0), k=2, rules=["NP", "search"])
    best = plan.best
    assert best is not None
    assert (best.rule, len(best.workers)) == ("search", 2)
    assert [device.name for device in best.spare] == ["snail"] * 2
    assert "left out: 2 devices (snail)" in fleet_report.report_text(plan)


@pytest.mark.parametrize(("k", "message"), [(0, "expected 1 to 8 devices"), (9, "expected 1 to 8 devices")])
def test_an_impossible_number_of_devices_per_worker(k: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_fleet(PROFILE, fleet(), Network(), MemoryRule(2.0), k=k)


def test_more_stages_than_layers() -> None:
    devices = [Device("a")] * 12
    with pytest.raises(ConfigError, match="expected 8 devices per virtual worker at most, one per layer, got 9"):
        plan_fleet(PROFILE, devices, Network(), MemoryRule(2.0), k=9)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_bytes(PROFILE.to_json())
    return path


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_the_command_compares_and_shows_the_stages(profile_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    arguments = ("--pipeline", EXAMPLE, "--profile", profile_file, "--stages", 4, "--in-flight", 4)
    code, out, _ = run(*arguments, "--plot", picture)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[3:9]] == ["NP", "ED", "ED", "HD", "search", "search"]
    assert "GiB" in out
    assert ", binds" in out
    assert "2 of 4 on spot" in out
    assert "if one of them is preempted, all 4 stop working" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, _ = run(*arguments, "--json")
    content = json.loads(out)
    assert code == 0
    assert content["feasible"] is True
    chosen = next(
        each for each in content["candidates"]
        if {"rule": each["rule"], "placement": each["placement"]} == content["best"]
    )  # fmt: skip
    layers = [name for stage in chosen["workers"][0]["stages"] for name in stage["layers"]]
    assert layers == [layer.name for layer in LAYERS]
    assert all(stage["memory_bytes"] <= stage["available_bytes"] for stage in chosen["workers"][0]["stages"])


def test_a_model_that_fits_nowhere_exits_3(profile_file: Path, tmp_path: Path) -> None:
    table = tmp_path / "fleet.csv"
    table.write_text("name,count,memory_gib\ntiny,4,0.001\n")
    code, out, _ = run("--pipeline", table, "--profile", profile_file, "--stages", 2)
    assert code == 3
    assert out.startswith("NOT FEASIBLE: small")
    assert "fits on no device" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stages", 2), "expected --pipeline FLEET with it"),
        (("--pipeline", EXAMPLE), "expected --profile, or a job file with worker.pipeline.profile"),
        (("--pipeline", EXAMPLE, "--profile", "none.json"), "expected --stages, or a job file"),
        (("--pipeline", EXAMPLE, "--profile", "none.json", "--stages", 2), "expected a file of `doll profile`"),
        (("--pipeline", "none.csv", "--profile", "none.json", "--stages", 2), "expected a table of devices"),
    ],
)
def test_wrong_usage_exits_2(arguments: tuple[object, ...], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())


def test_the_job_file_gives_profile_stages_and_distance(profile_file: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "job: piped\ntask: {class: 'examples.synthetic.task:Synthetic'}\ndata: {workers: 2, batch_size: 16}\n"
        "arrivals: {rate_per_s: 50}\ntraining: {policy: {name: wsp, wave_batches: 3, clock_distance: 2}}\n"
        f"worker: {{pipeline: {{stages: 2, profile: {profile_file.name}}}}}\n"
    )
    code, out, err = run(job, "--pipeline", EXAMPLE, "--json")
    assert code == 0, err
    content = json.loads(out)
    assert (content["devices_per_worker"], content["clock_distance"]) == (2, 2)
    assert any("wave_batches 3" in note for note in content["notes"]) or content["candidates"][0]["in_flight"] == 3


def test_infinities_are_plain_json() -> None:
    plan = plan_fleet(PROFILE, [Device("a")] * 2, Network(), MemoryRule(2.0), k=2)
    json.dumps(json_safe(fleet_report.to_dict(plan)), allow_nan=False)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_memory_is_counted_as_the_live_system_takes_it(profile_file: Path, tmp_path: Path, optimizer: str) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "job: piped\ntask: {class: 'examples.synthetic.task:Synthetic'}\ndata: {workers: 2, batch_size: 16}\n"
        f"arrivals: {{rate_per_s: 50}}\ntraining: {{optimizer: {{name: {optimizer}}}}}\n"
    )
    table = tmp_path / "fleet.csv"
    table.write_text("name\nx\n")
    arguments = ("--pipeline", table, "--profile", profile_file, "--stages", 1, "--in-flight", 1, "--json")
    code, out, err = run(job, *arguments)
    assert code == 0, err
    stage = next(each for each in json.loads(out)["candidates"] if "workers" in each)["workers"][0]["stages"][0]
    rule = live_rule(SgdConfig() if optimizer == "sgd" else AdamConfig())
    size = PROFILE.size_of(0, len(LAYERS))
    assert stage["memory_bytes"] == rule.stage_bytes(size, in_flight=1, is_last=True)
