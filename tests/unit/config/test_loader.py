"""The job file: what is right comes through, what is wrong is a `ConfigError` that names key, expectation and value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from doll.config import Ec2FleetConfig, JobConfig, ProcessesFleetConfig, dump, load, parse
from doll.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

MINIMAL = "job: digits\ntask: {class: 'examples.digits.task:Digits'}\n"


def wrong(text: str = MINIMAL, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, overrides, origin="job.yaml")
    return str(caught.value)


def test_two_keys_make_a_job() -> None:
    config = parse(MINIMAL)
    assert (config.job, config.task.cls, config.task.args) == ("digits", "examples.digits.task:Digits", {})
    assert (config.data.workers, config.data.batch_size, config.group_size) == (4, 64, 4)
    assert config.source is None
    assert config.topic("samples") == "doll.digits.samples"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.workers=four", "data.workers: input should be a valid integer, unable to parse .*, got 'four'"),
        ("data.workers=2.5", "data.workers: input should be a valid integer, .*got 2.5"),
        ("data.workers=[4]", r"data.workers: input should be a valid integer, got \[4\]"),
        ("data.workers=0", "data.workers: input should be greater than 0, got 0"),
        ("data.batch_size=0", "data.batch_size: input should be greater than 0, got 0"),
        ("data.batch_size=-3", "data.batch_size: .* greater than 0, got -3"),
        ("training.policy.group_size=0", "training.policy.group_size: .* greater than 0, got 0"),
        ("training.policy.group_size=129", "training.policy: the 129 batches of an update .* hold 128; raise max"),
        ("training.policy.name=sync", "training.policy.name: expected one of doll, bsp, .*, diloco, got 'sync'"),
        ("training.policy=bsp", "training.policy.name: expected one of .*, got 'bsp'"),
        ("training.optimizer.name=sgdd", "training.optimizer.name: expected one of sgd, .*, class, got 'sgdd'"),
        ("training.optimizer.lr=0", "training.optimizer.lr: .* greater than 0, got 0"),
        ("training.optimizer.lr=.nan", "training.optimizer.lr: .* finite number, got nan"),
        ("training.optimizer.lr=.inf", "training.optimizer.lr: .* finite number, got inf"),
        ("training.optimizer.momentum=1", "training.optimizer.momentum: .* less than 1, got 1"),
        ("training.reduction=avg", "training.reduction: input should be 'mean' or 'sum', got 'avg'"),
        ("source.kind=kafka", "source.kind: expected one of csv, jsonl, .*, python, text, history, got 'kafka'"),
        ("source.path=x", "source.kind: expected one of .*, got None"),
        ("data.samples_per_record=7", "data: samples_per_record must divide batch_size, got 7 and 64"),
        ("data.start=middle", r"data.start: expected earliest, latest, \{timestamp: ...\} or .*, got 'middle'"),
        ("data.start={}", "data.start: expected one of timestamp and offsets"),
        ("data.start={timestmp: 3}", r"data.start.timestmp: unknown key \(did you mean 'timestamp'\?\)"),
        ("data.start={timestamp: '2026-11-01T00:00:00'}", "data.start.timestamp: .* timezone info"),
        ("data.start={offsets: {0: -1}}", "data.start.offsets.0: .* greater than or equal to 0, got -1"),
        ("data.topic=a b", "data.topic: expected the name of a topic, .*, got 'a b'"),
        ("data.topic=doll.digits.dead", "data.topic: expected a topic that belongs to somebody else"),
        ("arrivals.rate_per_s=-1", "arrivals.rate_per_s: input should be greater than 0, got -1"),
        ("arrivals.rate_per_s=[1,2]", r"rate_per_s: expected 4 rates \(data.partitions or data.workers\), got 2"),
        ("arrivals.process=trace", "arrivals: expected 'trace' .* exactly when process is 'trace'"),
        ("arrivals.trace=gaps.txt", "arrivals: expected 'trace' .* exactly when process is 'trace'"),
        (
            "fleet.kind=docker",
            "fleet.kind: expected one of processes, compose, ec2, kubernetes, ray, lambda, got 'docker'",
        ),
        ("fleet.subnet=x", "fleet.subnet: unknown key"),
        ("fleet.speedup=2", r"fleet.speedup: unknown key \(did you mean 'speed_up'\?\)"),
        ("fleet.notice_s=-1", "fleet.notice_s: .* greater than or equal to 0, got -1"),
        ("worker.device=gpu", r"worker.device: expected auto, cpu, cuda, cuda:N \(such as cuda:0\) or mps, got 'gpu'"),
        ("fleet.cluster=a b", "fleet.cluster: string should match pattern .*, got 'a b'"),
        ("fleet={kind: ec2}", "fleet.launch_template: expected a value, got nothing: add this key"),
        ("fleet={kind: compose, project: Doll}", "fleet.project: string should match pattern .*, got 'Doll'"),
        ("worker.spot_notices=ec2", "worker.spot_notices: input should be 'none' or 'imds', got 'ec2'"),
        ("checkpoint.keep=1", "checkpoint.keep: .* greater than or equal to 2, got 1"),
        ("stop.accuracy=1.1", "stop.accuracy: .* less than or equal to 1, got 1.1"),
        ("seed=-1", "seed: .* greater than or equal to 0, got -1"),
        ("job=Digits", "job: expected 1-63 of a-z 0-9 _ - .*, got 'Digits'"),
        ("job=-x", "job: expected .*, got '-x'"),
        ("job=3", "job: input should be a valid string, got 3"),
        ("job=", "job: input should be a valid string, got None"),
        (f"job={'x' * 64}", "job: expected 1-63 of"),
        ("task.class=Digits", "task: expected 'module:Class' or 'file.py:Class', got 'Digits'"),
        ("task.class='m:not a name'", "task: expected 'module:Class'"),
        ("task.args=3", "task.args: input should be a valid dictionary, got 3"),
        ("data=", "data: input should be a valid dictionary .*, got None"),
        ("ps.shards=257", "ps.shards: .* less than or equal to 256, got 257"),
        (
            "redis.shard_addresses=['redis://a:1/0', 'redis://b:1/0']",
            r"redis.shard_addresses: expected one for each shard of ps.shards \(1\), got 2",
        ),
        ("redis.shard_addresses=['redis://u:p@a:1/0']", "redis.shard_addresses: no credentials in the job file"),
        ("kafka.security=tls", "kafka.security: input should be 'plaintext', .*, got 'tls'"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_was_expected(override: str, expected: str) -> None:
    message = wrong(MINIMAL, override)
    assert message.startswith("job.yaml: ")
    with pytest.raises(ConfigError, match=expected):
        parse(MINIMAL, [override])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.batchsize=1", "data.batchsize: unknown key (did you mean 'batch_size'?)"),
        ("dta.workers=1", "dta: unknown key (did you mean 'data'?)"),
        ("task.clas=x", "task.clas: unknown key (did you mean 'class'?)"),
        ("training.policy.group_siz=2", "training.policy.group_siz: unknown key (did you mean 'group_size'?)"),
        ("training.optimizer.momentun=0.9", "training.optimizer.momentun: unknown key (did you mean 'momentum'?)"),
        ("kafka.adress=x", "kafka.adress: unknown key (did you mean 'address'?)"),
        ("blobs.zebra=1", "blobs.zebra: unknown key"),
        ("redis.password=x", "redis.password: unknown key"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(override: str, expected: str) -> None:
    assert wrong(MINIMAL, override) == f"job.yaml: {expected}"


def test_a_key_of_another_policy_is_not_its_own_suggestion() -> None:
    message = wrong(MINIMAL, "training.policy.name=asp", "training.policy.group_size=3")
    assert message == "job.yaml: training.policy.group_size: unknown key"


def test_missing_keys_are_named() -> None:
    assert wrong("job: a\n") == "job.yaml: task: expected a value, got nothing: add this key"
    assert wrong("task: {class: 'm:C'}\n") == "job.yaml: job: expected a value, got nothing: add this key"
    assert "task.class: expected a value" in wrong("job: a\ntask: {}\n")
    assert "source.path: expected a value" in wrong(MINIMAL, "source.kind=csv")


def test_every_fault_is_told_at_once() -> None:
    lines = wrong(MINIMAL, "data.workers=0", "seed=-1", "kafka.adress=x").splitlines()
    assert len(lines) == 3
    assert all(line.startswith("job.yaml: ") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "not YAML"),
        ("job: a\n\ttask: b", "not YAML"),
        ("!!python/object/apply:os.getcwd []", "not YAML"),
        ("job: !!timestamp 2024-12-24", "not YAML"),
        ("- 1\n- 2", "expected keys and values .*, got list"),
        ("just words", "expected keys and values .*, got str"),
        ("", "expected keys and values .*, got NoneType"),
        ("[" * 5000, "not YAML"),
        (MINIMAL + "1: 2\n", "keys should be strings, got 1"),
    ],
)
def test_what_is_no_job_file_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.workers", "--set: expected key.sub=value, got 'data.workers'"),
        ("=3", "--set: expected key.sub=value, got '=3'"),
        ("", "--set: expected key.sub=value, got ''"),
        ("job.name=x", "--set job.name=x: 'job' is a value, not a section"),
        ("seed=[1", "--set seed=[1: value is not YAML"),
        ("seed=!!bool x", "--set seed=!!bool x: value is not YAML: expected a value of tag:yaml.org,2002:bool"),
        ("seed=" + "[" * 5000, "value is not YAML"),
    ],
)
def test_a_malformed_override_is_refused(override: str, expected: str) -> None:
    message = wrong(MINIMAL, override)
    assert expected in message
    assert len(message) < 500


def test_credentials_in_the_redis_address_are_refused_and_not_repeated() -> None:
    message = wrong(MINIMAL, "redis.address=redis://user:s3cret@host:6379/0")
    assert "no credentials in the job file: set DOLL_REDIS_PASSWORD" in message
    assert "s3cret" not in message


def test_overrides_win_in_order_and_make_sections() -> None:
    config = parse(
        MINIMAL + "seed: 1\n", ["seed=2", "seed=3", "stop.updates=7", "source={kind: stdin}", "data.workers=2"]
    )
    assert (config.seed, config.stop.updates, config.data.workers) == (3, 7, 2)
    assert config.source is not None
    assert config.source.kind == "stdin"
    assert parse(MINIMAL, ["task.args={path: 'a=b'}"]).task.args == {"path": "a=b"}


def test_the_policy_may_be_left_unnamed() -> None:
    assert parse(MINIMAL, ["training.policy.group_size=7"]).group_size == 7
    assert parse(MINIMAL, ["training.policy.name=bsp", "data.workers=3"]).group_size == 3
    assert parse(MINIMAL, ["training.policy.name=asp"]).group_size == 1


def test_derived_values() -> None:
    config = parse(MINIMAL, ["data.samples_per_record=16", "arrivals.rate_per_s=[1,2,3,4.5]"])
    assert config.data.records_per_batch == 4
    assert config.rates_per_s() == [1, 2, 3, 4.5]
    assert parse(MINIMAL).rates_per_s() == [125.0] * 4
    assert parse(MINIMAL, ["arrivals.process=asap"]).rates_per_s() == [float("inf")] * 4


def test_it_cannot_be_changed() -> None:
    config = parse(MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        config.data.workers = 3  # type: ignore[misc]


def test_a_date_is_text() -> None:
    assert parse("job: 2024-13-45\ntask: {class: 'm:C', args: {since: 2024-12-24}}").task.args == {
        "since": "2024-12-24"
    }


def test_load_reads_a_file_and_takes_paths_from_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(MINIMAL)
    config = load(file, ["checkpoint.folder=saved"])
    assert isinstance(config.checkpoint.folder, Path)
    assert config.path(config.checkpoint.folder) == tmp_path / "saved"
    assert config.path(Path("/elsewhere")) == Path("/elsewhere")
    in_s3 = load(file, ["checkpoint.folder=s3://models/digits"])
    assert in_s3.checkpoint.folder == "s3://models/digits"
    assert parse(dump(in_s3)).checkpoint == in_s3.checkpoint
    for wrong in (
        "s3:/models",
        "s3:models",
        "s3://x",
        "s3://models//a",
        "3",
        "gs://bucket/x",
        "file:///tmp/x",
        "S3://models/a",
    ):
        with pytest.raises(ConfigError, match=r"checkpoint\.folder: expected a folder or s3://bucket/prefix, got"):
            load(file, [f"checkpoint.folder={wrong}"])
    with pytest.raises(ConfigError, match=r"cannot read job file .*none\.yaml: No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"cannot read job file .*: Is a directory"):
        load(tmp_path)
    file.write_bytes(b"job: \xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot read job file .*: expected UTF-8, got byte 0xff at 5"):
        load(file)
    file.write_text("job: [")
    with pytest.raises(ConfigError, match=r"job\.yaml: not YAML"):
        load(file)


EC2 = """
fleet:
  kind: ec2
  region: eu-west-1
  launch_template: lt-0123456789abcdef0
  launch_template_version: 3
  subnets: [subnet-0123456789abcdef0]
  instance_types: [c5.xlarge, c6i.xlarge, m6id.metal, u-6tb1.112xlarge]
"""


def test_a_fleet_on_ec2_says_all_that_a_launch_needs() -> None:
    config = parse(MINIMAL + EC2)
    assert isinstance(config.fleet, Ec2FleetConfig)
    assert (config.fleet.api_calls_per_s, config.fleet.queue_url, config.cluster) == (2.0, None, "digits")
    assert parse(MINIMAL + EC2, ["fleet.cluster=prod.digits"]).cluster == "prod.digits"
    assert parse(MINIMAL).fleet == ProcessesFleetConfig()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("fleet.launch_template_version=$Latest", "fleet.launch_template_version: .*valid integer.*got '.Latest'"),
        ("fleet.subnets=[]", "fleet.subnets: list should have at least 1 item"),
        ("fleet.subnets=[vpc-1]", r"fleet.subnets.0: string should match pattern .*, got 'vpc-1'"),
        ("fleet.instance_types=[c5]", "fleet.instance_types.0: string should match pattern .*, got 'c5'"),
        ("fleet.instance_types=[c5.large, c5.large]", "fleet: instance_types: expected each once, got c5.large twice"),
        ("fleet.region=us-east-1a", "fleet.region: string should match pattern .*, got 'us-east-1a'"),
        ("fleet.api_calls_per_s=0", "fleet.api_calls_per_s: .*greater than 0, got 0"),
        ("fleet.queue_url=my-queue", "fleet.queue_url: string should match pattern .*, got 'my-queue'"),
        ("fleet.max_price=0.1", "fleet.max_price: unknown key"),
    ],
)
def test_a_wrong_fleet_on_ec2_is_named(override: str, expected: str) -> None:
    assert re.search(expected, wrong(MINIMAL + EC2, override))


POSITIVE = st.floats(1e-3, 1e6)
SECTIONS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**63 - 1),
    "task": st.fixed_dictionaries(
        {"class": st.sampled_from(["m:C", "a.b.c:D", "tasks/my.py:Task"])},
        optional={
            "args": st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5), max_size=3)
        },
    ),
    "data": st.fixed_dictionaries(
        {"batch_size": st.sampled_from([16, 64, 1024]), "samples_per_record": st.sampled_from([1, 4, 16])},
        optional={
            "start": st.sampled_from(
                ["earliest", "latest", {"timestamp": "2026-11-01T00:00:00Z"}, {"offsets": {0: 17, 1: 0}}]
            ),
            "retention_hours": st.floats(0.01, 1e6),
        },
    ),
    "source": st.none()
    | st.sampled_from(
        [
            {"kind": "python", "of": "task.py:samples"},
            {"kind": "csv", "path": "a/b.csv", "header": True, "limit_samples": 5},
            {"kind": "text", "path": "a.txt", "skip": 3},
            {"kind": "python", "of": "a.b:c", "args": {"drift_per_sample": 0.5}},
            {"kind": "stdin"},
        ]
    ),
    "arrivals": st.fixed_dictionaries(
        {}, optional={"rate_per_s": POSITIVE | st.lists(POSITIVE, min_size=4, max_size=4)}
    ),
    "training": st.fixed_dictionaries(
        {},
        optional={
            "policy": st.sampled_from([{"group_size": 2}, {"name": "bsp"}, {"name": "asp"}]),
            "optimizer": st.sampled_from([{"lr": 0.5, "momentum": 0.9}, {"name": "adam", "beta1": 0.8}]),
            "reduction": st.sampled_from(["mean", "sum"]),
        },
    ),
    "stop": st.fixed_dictionaries({}, optional={"updates": st.integers(1, 10**9), "accuracy": st.floats(0.1, 1)}),
    "fleet": st.sampled_from(
        [
            {"speed_up": 60},
            {"kind": "processes", "trace": "a/b", "pool": "c"},
            {"kind": "compose", "cluster": "x"},
            {
                "kind": "ec2",
                "launch_template": "doll-workers",
                "launch_template_version": 2,
                "subnets": ["subnet-12345678"],
                "instance_types": ["c5.xlarge"],
            },
        ]
    ),
    "redis": st.just({"address": "redis://h:1/0"}),
    "kafka": st.just({"address": "h:1,i:2", "security": "sasl_ssl"}),
    "checkpoint": st.just({"folder": "x/y", "keep": 5}),
}


NAMES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,62}", fullmatch=True)
TASK = SECTIONS.pop("task")


@pytest.mark.slow
@given(st.fixed_dictionaries({"job": NAMES, "task": TASK}, optional=SECTIONS))
def test_dump_and_parse_give_the_same_job(raw: dict[str, Any]) -> None:
    config = JobConfig.model_validate(raw)
    text = dump(config)
    again = parse(text)
    assert again.model_copy(update={"base_folder": config.base_folder}) == config
    assert dump(again) == text
    assert yaml.safe_load(text)["job"] == raw["job"]
