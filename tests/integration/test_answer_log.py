"""`doll serve --log-answers` on a real Kafka: each answer stands there once, and no request waits for Kafka."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from doll.config import parse
from doll.errors import ConfigError
from doll.join.main import run_joiner
from doll.kafka import topics
from doll.kafka.range_reader import RangeReader
from doll.local.kafka_broker import LocalKafka
from doll.services import Services
from doll.serving import answer_log
from doll.serving.answer_log import AnswerLog
from doll.storage.version_marks import VersionMarks
from owners_topic import OwnersTopic
from serving_rig import ServingRig, output_of
from waiting import until

pytestmark = pytest.mark.integration


@pytest.fixture
def topic(broker: LocalKafka, job_name: str) -> str:
    topic = OwnersTopic(broker.address, f"{job_name}-answers")
    topic.create(2)
    return topic.name


@pytest.fixture
def rig(tmp_path: Path, broker: LocalKafka, topic: str) -> Iterator[ServingRig]:
    with ServingRig(tmp_path, log_topic=topic) as rig:
        rig.services = dataclasses.replace(rig.services, kafka=broker.address)
        rig.save(1)
        yield rig


def logged(address: str, topic: str) -> list[tuple[str, Any]]:
    """Key and content of all records of a topic of two partitions, each in order."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": "reader", "enable.partition.eof": False})
    records = []
    try:
        for partition in range(2):
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=60)
            consumer.assign([TopicPartition(topic, partition, low)])
            while low < high:
                message = consumer.poll(60)
                assert message is not None
                assert message.error() is None, message.error()
                low = message.offset() + 1
                records.append((message.key().decode(), json.loads(message.value())))
    finally:
        consumer.close()
    return records


def _has_more(rig: ServingRig, what: str, than: int) -> bool:
    return counted(rig, what) > than


def counted(rig: ServingRig, what: str) -> int:
    lines = rig.request("GET", "/metrics")[2].decode().splitlines()
    return int(float(next(line for line in lines if line.startswith(f"doll_serve_{what}_total{{")).rsplit(" ", 1)[1]))


def test_an_answer_stands_there_with_its_version_and_the_id_of_its_request(rig: ServingRig, topic: str) -> None:
    rig.start()
    assert rig.infer([[1, 2]], id="first")[1]["id"] == "first"
    rig.publish(2)
    until(lambda: rig.get("/v2/models/line")[1]["versions"][0] == "2", "version 2")
    body = json.dumps([{"x": [1, 2]}, {"x": [3, 4]}]).encode()
    answer = json.loads(rig.request("POST", "/predict", body, {"X-Request-Id": "second"})[2])
    assert (answer["id"], answer["version"]) == ("second", 2)
    own_id = json.loads(rig.request("POST", "/predict", b'{"x": [1, 2]}')[2])["id"]
    assert rig.infer([[1, 2, 3]])[0] == 422, "what is refused is no answer"
    until(lambda: counted(rig, "logged_answers") == 3, "Kafka to have taken all")
    records = dict(logged(rig.services.kafka, topic))
    assert records.keys() == {"first", "second", own_id}
    assert [records[key]["version"] for key in ("first", "second", own_id)] == [1, 2, 2]
    assert records["first"]["answer"] == {"output": [output_of(1, [[1, 2]])]}
    assert records["second"]["answer"] == answer["predictions"]
    for key, record in records.items():
        assert (record["id"], record["model"], record["term"]) == (key, "line", 1)
        assert record["time_s"] > 1e9
    assert counted(rig, "unlogged_answers") == 0


def test_what_was_served_is_the_features_of_a_join(
    tmp_path: Path, broker: LocalKafka, topic: str, job_name: str
) -> None:
    clicks = OwnersTopic(broker.address, f"{job_name}-clicks")
    clicks.create(1)
    join = {"features": {"topic": topic}, "labels": [{"topic": clicks.name, "name": "click"}], "window_s": 600.0}
    data = {"workers": 1, "join": join}
    job = {"job": job_name, "task": {"class": "a:B"}, "data": data, "kafka": {"replication_factor": 1}}
    config = parse(json.dumps(job))
    with ServingRig(tmp_path, log_topic=topic, log_records=True) as rig:
        rig.services = dataclasses.replace(rig.services, kafka=broker.address)
        rig.save(1)
        rig.start()
        body = json.dumps([{"x": [1, 2]}, {"x": [3, 4]}]).encode()
        answer = json.loads(rig.request("POST", "/predict", body, {"X-Request-Id": "both"})[2])
        rig.request("POST", "/predict", b'{"x": [5, 6]}', {"X-Request-Id": "third"})
        assert rig.infer(id="tensors")[0] == 200
        until(lambda: (counted(rig, "logged_answers"), counted(rig, "unlogged_answers")) == (3, 1), "all to be logged")
    clicks.write([("both-1", b"{}"), ("third", b"{}")])
    stop, samples = threading.Event(), dict[str, Any]()
    services = Services(kafka=broker.address, redis="")

    def joined() -> bool:
        with RangeReader(config, services) as reader:
            name = config.topic("samples")
            records = [json.loads(value or b"") for _, value in reader.read(name, 0, *reader.bounds(name, 0))]
        samples.update({record["doll_served"]["id"]: record for record in records})
        return len(samples) == 2

    topics.ensure(config, services)
    with ThreadPoolExecutor(1) as pool:
        joiner = pool.submit(run_joiner, config, services, 0, stop=stop, until_finished=False)
        try:
            until(joined, "two samples")
        finally:
            stop.set()
            joiner.result()
    sample = samples["both-1"]
    assert (sample["x"], sample["click"], sample["doll_served"]["version"]) == ([3, 4], 1, 1)
    assert sample["doll_served"]["answer"] == answer["predictions"][1]
    assert samples["third"]["x"] == [5, 6]


def test_a_shadow_computes_each_request_after_its_user_has_the_answer(
    tmp_path: Path, broker: LocalKafka, topic: str
) -> None:
    with ServingRig(tmp_path, wanted={"1": 100.0}, shadow="latest", log_topic=topic) as rig:
        rig.services = dataclasses.replace(rig.services, kafka=broker.address)
        rig.save(1)
        rig.save(2)
        rig.start()
        until(lambda: counted(rig, "swaps") == 2, "the version of the shadow")
        assert rig.infer([[1, 2]], id="first")[1]["model_version"] == "1"
        answer = json.loads(rig.request("POST", "/predict", b'{"x": [3, 4]}', {"X-Request-Id": "second"})[2])
        assert answer["version"] == 1
        assert rig.infer(version="latest")[0] == 404, "users never get it"
        until(lambda: (counted(rig, "logged_answers"), counted(rig, "shadow_answers")) == (4, 2), "all to be logged")
        assert counted(rig, "skipped_shadow_answers") == 0
    records = {(key, record["version"]): record for key, record in logged(broker.address, topic)}
    assert records.keys() == {("first", 1), ("first", 2), ("second", 1), ("second", 2)}
    assert records["first", 1]["answer"] == {"output": [output_of(1, [[1, 2]])]}
    assert records["first", 2]["answer"] == {"output": [output_of(2, [[1, 2]])]}
    assert [records["second", version]["probability"] for version in (1, 2)] == [1.0, 0.0]


def test_a_shadow_is_replaced_while_requests_come(tmp_path: Path, broker: LocalKafka, topic: str) -> None:
    """No user notices it, each request is counted once, and each answer of the shadow is that of the version that it
    names: the weights of two versions are never mixed."""
    versions, least, num_users = range(2, 8), 20, 4
    with ServingRig(tmp_path, wanted={"1": 100.0}, shadow="next", log_topic=topic) as rig:
        rig.services = dataclasses.replace(rig.services, kafka=broker.address)
        rig.save(1)
        rig.store.change_marks(lambda marks: marks.with_alias("next", 1).with_pin(1))
        rig.start()
        answers: list[tuple[int, str, Any]] = []
        end = threading.Event()

        def use(user: int) -> None:
            number = 100  # 13 is a number that the model refuses
            while not end.is_set():
                number += 1
                status, answer = rig.infer([[user, number]], id=f"{user}-{number}")
                answers.append((status, answer.get("model_version", answer), f"{user}-{number}"))

        with ThreadPoolExecutor(num_users) as pool:
            users = [pool.submit(use, user) for user in range(num_users)]
            try:
                for version in versions:
                    before = counted(rig, "shadow_answers")
                    swaps = counted(rig, "swaps")
                    rig.save(version)
                    rig.store.change_marks(partial(VersionMarks.with_alias, name="next", version=version))
                    until(partial(_has_more, rig, "swaps", swaps), "the new version of the shadow")
                    until(partial(_has_more, rig, "shadow_answers", before + least - 1), "answers of it")
            finally:
                end.set()
                for user in users:
                    user.result()
        assert [answer for answer in answers if answer[:2] != (200, "1")] == []
        asked = {key for _, _, key in answers}

        def shadow_counts() -> tuple[int, int]:
            return counted(rig, "shadow_answers"), counted(rig, "skipped_shadow_answers")

        until(lambda: sum(shadow_counts()) >= len(asked), "the count of each request")
        answered, skipped = shadow_counts()
        assert answered + skipped == len(asked), "each is counted once"
        until(lambda: counted(rig, "logged_answers") >= len(asked) + answered, "all to be logged")
    of_users, of_shadow = list[str](), dict[str, int]()
    for key, record in logged(broker.address, topic):
        x = [*map(float, key.split("-"))]
        assert record["answer"] == {"output": [output_of(record["version"], [x])]}, record
        if record["probability"]:
            of_users.append(key)
            assert record["version"] == 1
        else:
            assert key not in of_shadow
            of_shadow[key] = record["version"]
    assert sorted(of_users) == sorted(asked)
    assert len(of_shadow) == answered
    assert set(of_shadow.values()) >= set(versions), "each version has answered"


def test_requests_go_on_while_kafka_is_away_and_what_is_not_logged_is_counted(
    rig: ServingRig, topic: str, broker: LocalKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(answer_log._QUEUE, "queue_buffering_max_messages", 20)
    rig.start()
    assert rig.infer(id="before")[0] == 200
    until(lambda: counted(rig, "logged_answers") == 1, "Kafka to have taken it")
    broker.kill()
    try:
        asked = [f"away-{number}" for number in range(50)]
        assert [rig.infer(id=each)[0] for each in asked] == 50 * [200]
        assert counted(rig, "unlogged_answers") == 30, "20 wait, and the others are said to be lost"
    finally:
        broker.start()
    until(lambda: counted(rig, "logged_answers") == 21, "what has waited")
    assert rig.infer(id="after")[0] == 200
    until(lambda: counted(rig, "logged_answers") == 22, "Kafka to have taken it")
    keys = [key for key, _ in logged(broker.address, topic)]
    assert sorted(keys) == sorted(["before", *asked[:20], "after"]), "each of them once"


def test_kafka_may_be_away_at_the_beginning_and_come_back_elsewhere(
    rig: ServingRig, topic: str, broker: LocalKafka, nowhere: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_log, "_ANSWERS_S", 0.2)
    rig.services = dataclasses.replace(rig.services, kafka=nowhere.kafka)
    rig.start()
    assert rig.infer(id="lost")[0] == 200
    rig.services = dataclasses.replace(rig.services, kafka=broker.address)  # as of a run that was resumed
    until(lambda: counted(rig, "unlogged_answers") == 1, "the loss of what has waited for the other Kafka")
    assert rig.infer(id="there")[0] == 200
    until(lambda: counted(rig, "logged_answers") == 1, "Kafka to have taken it")
    assert [key for key, _ in logged(broker.address, topic)] == ["there"]


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("there-is-none", "expected a topic that exists on Kafka at .*: create it, or correct the name"),
        ("doll.line.samples", "expected a topic of its own, got one that the job uses"),
    ],
)
def test_a_topic_that_cannot_be_used_is_refused(rig: ServingRig, topic: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AnswerLog(rig.config, lambda: rig.services, topic, "line", on_logged=int, on_dropped=int)
    assert not topics.exists(rig.config, rig.services, topic), "nor was it created"


def test_without_an_address_of_kafka_nothing_can_be_logged(rig: ServingRig) -> None:
    with pytest.raises(ConfigError, match=r"--log-answers: expected kafka\.address"):
        AnswerLog(rig.config, lambda: None, "answers", "line", on_logged=int, on_dropped=int)
