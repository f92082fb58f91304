"""Every number of the job file, with extreme values: each is refused by its key, or is one that a run can work with."""

from __future__ import annotations

import math
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

import numpy as np
import pytest
import torch
import yaml
from doll.config import JobConfig, dump, parse
from doll.config.section import LONGEST_S, OTHER
from doll.config.variants import sections_of
from doll.errors import ConfigError
from fuzzing import ALL_EXAMPLES
from pydantic import BaseModel

pytestmark = pytest.mark.slow  # loads torch

EXTREMES = (
    "0", "-0.0", "1", "-1", "2", "0.5", "1e-9", "1e-7", "1e-320", "5e-324", "1e7", "2147483647", "2147483648",
    "9007199254740992", "9223372036854775807", "9223372036854775808", "18446744073709551616", "1e20", "1e31", "1e308",
    "1e400", ".inf", "-.inf", ".nan", "1" + "0" * 400, "-1e20", "1e10", "600", "1000", "5000",
)  # fmt: skip
FEW = (
    "0", "-1", "2", "2147483647", "0.5", "1e-9", "5e-324", "600", "5000", "9223372036854775808", "1e31", "1e308",
    ".inf", ".nan", "1" + "0" * 400,
)  # fmt: skip
"""Those of `make test`."""
BESIDE: dict[str, dict[str, Any]] = {
    "at_least": {"metric": "auc"},
    "at_most": {"metric": "auc"},
    "tolerance": {"better": "lower"},
    "min_count": {"max_rows": 1000},
    "ttl_updates": {"max_rows": 1000},
    "version": {"registry": "http://host", "subject": "clicks"},
}
"""What a section needs where a key that may be left out is given."""
REQUIRED: dict[str, Any] = {
    "images": "a", "labels": "a", "cls": "a.B", "path": "a", "socket": "a", "of": "a:b",
    "launch_template": "lt-0123456789", "launch_template_version": 1, "function": "doll",
    "table": "a", "topic": "a", "time": "at", "handover": {"partition": "p", "offset": "o"},
    "subnets": ["subnet-0123456789"], "instance_types": ["c7g.large"], "stages": 2, "pod_template": "a",
}  # fmt: skip
# Waits of the system, which are never longer than 24 days, are in seconds; these are only compared with other times.
COMPARED = (
    "plan.deadline_s", "plan.cycle_s", "stop.seconds", "checkpoint.history_s", "checkpoint.history_every_s",
    "data.join.window_s", "data.join.lateness_s", "data.join.late_window_s", "data.join.early_after_s",
    "data.join.max_ahead_s", "checkpoint.every_event_s", "freshness.event_to_learned_s", "freshness.event_to_durable_s",
    "freshness.event_to_served_s", "freshness.max_ahead_s",
    "source.handover.overlap_s", "versions.gates.max_event_age_s", "versions.gates.min_interval_s",
)  # fmt: skip
JOIN: dict[str, Any] = {
    "features": {"topic": "f"}, "labels": [{"topic": "l", "name": "y"}], "window_s": 1e9, "on_late": "correct",
}  # fmt: skip


class Key(NamedTuple):
    """A number of the job file. `section`: what its section needs beside it."""

    path: tuple[str, ...]
    section: dict[str, Any]
    is_list: bool = False

    def job(self, value: str) -> str:
        """A job file with this value."""
        number = yaml.safe_load(value)
        inner: Any = {**self.section, self.path[-1]: [number] * 4 if self.is_list else number}
        if self.path[:3] == ("data", "join", "labels"):
            inner = {**JOIN["labels"][0], self.path[-1]: number}
        for name in reversed(self.path[:-1]):
            if name == "join":
                inner = {**JOIN, **{name: value for name, value in inner.items() if value != REQUIRED["labels"]}}
            if name == "labels":
                inner = [inner]
            if name == "source" and self.path[1] == "handover":
                history = {key: REQUIRED[key] for key in ("table", "topic", "time")}
                inner = {"kind": "history", **history, "handover": {"key": "k", **inner["handover"]}}
            if name == "versions" and self.path[1] == "live":
                inner = {"gates": {}, **inner}
            if name == "schedule":
                inner = [{"updates": 1, **inner}, {"class": "a.B"}]
            inner = {name: {**inner, "stages": 2} if name == "pipeline" else inner}
        job = {"job": "limits", "task": {"class": "m:C"}, **inner}
        if self.path[:2] == ("worker", "pipeline"):
            job["training"] = {"policy": {"name": "wsp"}}
        text: str = yaml.safe_dump(job)
        return text

    def __str__(self) -> str:
        kind = self.section.get("kind") or self.section.get("name")
        return ".".join(self.path) + (f" ({kind})" if kind else "") + (" []" if self.is_list else "")


def numbers(model: type[BaseModel] = JobConfig, path: tuple[str, ...] = ()) -> Iterator[Key]:
    """As docs/configuration.md lists them."""
    needed: dict[str, Any] = {
        field.alias or name: REQUIRED[name]
        for name, field in model.model_fields.items()
        if field.is_required() and name in REQUIRED
    }
    for tag in ("kind", "name"):
        choices = get_args(model.model_fields[tag].annotation) if tag in model.model_fields else ()
        if len(choices) == 1:  # one of several sections
            needed[tag] = choices[0]
    for name, field in model.model_fields.items():
        here = (*path, field.alias or name)
        if inner := sections_of(field):
            if name != "devices":  # a list of lists of sections: below
                names = ("emb",) if get_origin(field.annotation) is dict else ()  # sections by names of tables
                for section in inner:
                    yield from numbers(section, (*here, *names))
            continue
        kinds = types_in(field.annotation)
        if path[:2] == ("data", "join") and str in kinds:  # a label, which is any value
            continue
        if kinds & {int, float} and dict not in kinds:
            yield Key(here, {**needed, **BESIDE.get(name, {})})
            if "list" in str(field.annotation):
                yield Key(here, needed, is_list=True)


def types_in(annotation: Any) -> set[Any]:
    if get_origin(annotation) is Literal:
        return set()
    return {annotation, get_origin(annotation)}.union(*map(types_in, get_args(annotation)))


KEYS = list(numbers())


def test_all_numbers_are_here() -> None:
    names = {str(key) for key in KEYS}
    assert len(names) == len(KEYS) > 110
    assert {
        "seed", "arrivals.rate_per_s []", "worker.pipeline.stage_timeout_s", "training.policy.wave_batches (wsp)",
        "blobs.ttl_s", "fleet.api_calls_per_s (ec2)", "provision.scale_in.horizon_s", "plan.machines_per_worker",
    } <= names  # fmt: skip


def value_of(config: JobConfig, path: Sequence[str]) -> Any:
    value: Any = config
    for name in path:
        value = value[0] if isinstance(value, list) else value
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def assert_waits(value_s: float) -> None:
    """The system's calls take it, and none takes it for no time or for ever."""
    lock = threading.Lock()
    assert lock.acquire(timeout=value_s)
    now_s = 1e6 + time.monotonic()  # of a machine that has run for days
    assert now_s + value_s > now_s
    here, there = socket.socketpair()
    with here, there, select.epoll() as poll:
        here.settimeout(value_s)
        timeval = struct.pack("@ll", int(value_s), int(value_s % 1 * 1e6))
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        assert any(timeval), "no limit"
        there.send(b"x")
        poll.register(here, select.EPOLLIN)
        assert poll.poll(value_s)
    assert 1 <= value_s * 1000 < 2**31


def assert_usable(key: Key, config: JobConfig) -> None:
    value = value_of(config, key.path)
    name, path = key.path[-1], ".".join(key.path)
    if isinstance(value, list):
        assert len(value) == 4
        value = value[0]
    assert not isinstance(value, bool)
    if value is None or value == 0:
        return
    if isinstance(value, int):
        struct.pack("<q", value)
        assert np.int64(value) == value
        assert path == "seed" or float(value) == value
    elif path != "training.policy.value_bound":  # where .inf is no bound
        assert abs(value) <= OTHER.most
        assert np.isfinite(np.float32(value))
    if path in COMPARED:
        assert 0.001 <= value <= LONGEST_S
    elif name.endswith("_s") and not name.endswith("_per_s"):
        assert_waits(value)
    elif name.endswith("_ms"):
        assert 1 <= value <= 300_000, "librdkafka's limit of fetch.wait.max.ms"
    elif name.endswith("_hours"):
        assert 1 <= int(value * 3_600_000) < 2**63
    elif name.endswith("_per_s"):
        assert 40 / value < threading.TIMEOUT_MAX, "a gap between samples that is slept"
        assert 1 / value > 0
    if name == "seed":
        torch.manual_seed(value + 1_000 * (config.data.workers + 1) + 64)
        np.random.default_rng([value, 1])
    if name == "max_record_bytes":
        assert 2 * value < 2**31, "Kafka's sizes are of 32 bits"
    if name == "base_port":
        assert value + 10 + config.data.workers <= 65_536
    again = parse(dump(config))
    assert value_of(again, key.path) == value_of(config, key.path)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_an_extreme_value_is_refused_by_its_key_or_usable(key: Key) -> None:
    accepted = 0
    for extreme in EXTREMES if ALL_EXAMPLES else FEW:
        config, refusal = parsed(key.job(extreme))
        if config is None:
            # By its key, or by its section where several keys together are wrong.
            assert any(name in refusal for name in {key.path[-1], key.path[0]}), refusal
            assert len(refusal) < 2_000
        else:
            accepted += 1
            assert_usable(key, config)
    assert accepted, "the test says nothing"


def parsed(text: str) -> tuple[JobConfig | None, str]:
    """The job, or why it is refused."""
    try:
        return parse(text), ""
    except ConfigError as exc:
        return None, str(exc)


MINIMAL = "job: limits\ntask: {class: 'm:C'}\n"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed=9223372036854775808"], "seed: .* less than or equal to 9223372036854775807, got 9223372036854775808"),
        (["worker.lease_s=0.9"], "worker.lease_s: .* greater than or equal to 2, got 0.9"),
        (["ps.lease_s=1"], "ps.lease_s: .* greater than or equal to 2, got 1"),
        (["blobs.ttl_s=1e-9"], "blobs.ttl_s: .* greater than or equal to 1"),
        (["worker.drain_s=1.0e+20"], r"worker.drain_s: expected at most 2e\+06 seconds, got 1e\+20"),
        (["worker.drain_s=1.0e-7"], "worker.drain_s: expected at least 0.001 seconds, got 1e-07"),
        (["worker.grant_timeout_s=900"], "blobs.ttl_s: expected at least worker.grant_timeout_s .900., .* got 600"),
        (["worker.fetch_max_wait_ms=60000"], "worker.stall_timeout_s: expected at least twice .* .120 s., .* got 60"),
        (["plan.boot_s=900"], r"provision.boot_timeout_s: expected more than plan.boot_s \(900\), .* got 900"),
        (["health.base_port=60000", "data.workers=6000", "worker.max_pending_batches=99"],
         "health.base_port: expected at most 59526, so that each of 6000 workers .* got 60000"),
        (["arrivals.rate_per_s=[1, 2, 3, 1.0e+20]"], r"arrivals.rate_per_s: expected at most 1e\+09 per second"),
        (["stop.loss=1.0e+36"], r"stop.loss: expected at most 1e\+35, got 1e\+36"),
        (["stop.updates=9007199254740993"], r"stop.updates: expected at most 9.0072e\+15"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_what_was_expected(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse(MINIMAL, overrides)


@pytest.mark.parametrize("value", ["1.0e+20", "1.0e-7", "1.9", "3601"])
def test_a_stage_is_given_the_time_to_be_heard(value: str) -> None:
    pipeline = f"worker.pipeline={{stages: 2, stage_timeout_s: {value}}}"
    with pytest.raises(ConfigError, match=r"worker\.pipeline\.stage_timeout_s: "):
        parse(MINIMAL, ["training.policy.name=wsp", pipeline])


def test_limits_of_seeds_and_ports_are_reached() -> None:
    config = parse(MINIMAL, ["seed=9223372036854775807", "health.base_port=60000", "data.workers=5000"])
    assert math.log2(config.seed) > 62
    assert config.health.base_port == 60_000
