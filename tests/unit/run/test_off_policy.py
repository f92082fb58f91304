"""`doll versions value`: the value of versions from the log of served choices, and the choices that are logged."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from commands import doll
from doll.consumers.intake.decoding import RawRecords
from doll.errors import ConfigError, VersionUnknownError
from doll.run import off_policy
from doll.run.off_policy import value_of_versions
from gate_rig import Rig
from serving_rig import ServingRig

pytestmark = pytest.mark.slow  # loads torch

TASK = """
import msgspec
import numpy as np
import torch
from doll import Sample, Task


class Arms(Task):
    '''Two actions: the second one with the probability sigmoid(w x).'''

    input_shape = (2,)

    def build_model(self):
        return torch.nn.Linear(2, 1)

    def losses(self, output, target):
        return (output[:, 0] - target) ** 2

    def decode(self, record):
        fields = msgspec.json.decode(record)
        return Sample(np.array(fields["x"], np.float32), float(fields["clicked"]))

    def choose(self, output):
        second = torch.sigmoid(output[:, 0])
        return torch.stack([1 - second, second], dim=1)
"""
VALUES = """
    def action_values(self, output):
        return torch.tensor([[0.2, 0.6]]).expand(len(output), 2)
"""


class Log:
    """Served by an even choice: the first action is rewarded in 20 %, the second in 60 %."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        rng = np.random.default_rng(0)
        for _ in range(4_000):
            action = int(rng.random() < 0.5)
            clicked = int(rng.random() < (0.2, 0.6)[action])
            served = {"answer": {"action": action, "probability": 0.5}}
            self.add({"x": [1.0, 0.0], "clicked": clicked, "doll_served": served})

    def add(self, content: Any) -> None:
        self.values.append(content if isinstance(content, bytes) else json.dumps(content).encode())

    def close(self) -> None:
        pass

    def take_raw(self, most: int) -> RawRecords:
        return RawRecords(range(len(self.values[:most])), self.values[:most])


class ArmsRig(Rig):
    job = "job: j\ntask: {class: arms.py:Arms}\ndata: {workers: 1, batch_size: 1}\n"

    def __init__(self, folder: Path, task: str = TASK) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "arms.py").write_text(task)
        super().__init__(folder)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(off_policy, "LiveRecords", lambda config, services: log)
    monkeypatch.setattr(off_policy, "reachable_kafka", lambda target: (target, None))
    return log


def test_versions_have_the_value_of_what_they_would_choose(tmp_path: Path, log: Log) -> None:
    rig = ArmsRig(tmp_path / "run", TASK + VALUES)
    rig.save(1, -9.0, 0.0)  # always the first action
    rig.save(2, 9.0, 0.0)  # always the second
    rig.save(3, 0.0, 0.0)  # as logged
    report = value_of_versions(rig.target, ["1", "2", "latest"], reward="clicked", most=10_000)
    assert report.choices == 4_000
    for version, true in zip(report.versions, (0.2, 0.6, 0.4), strict=True):
        assert set(version.estimates) == {"ips", "snips", "dr"}
        for value in version.estimates.values():
            assert value.low <= true <= value.high
            assert value.high - value.low < 0.1
    assert report.logged == pytest.approx(0.4, abs=0.03)
    assert "version 2: 0.59" in report.text()
    json.dumps(report.to_dict())


def test_records_without_a_choice_are_counted_with_their_reason(tmp_path: Path, log: Log) -> None:
    rig = ArmsRig(tmp_path / "run")
    rig.save(1, 1.0, 0.0)
    served = {"answer": {"action": 0, "probability": 0.5}}
    for content in (
        b"\xff", b"[]", {"x": [1, 0], "clicked": 1}, {"x": [1, 0], "doll_served": served},
        {"x": [1, 0], "clicked": 1, "doll_served": {"answer": {"value": 1.0}}},
        {"x": [1, 0], "clicked": 1, "doll_served": 3}, {"clicked": 1, "doll_served": served},
        {"x": [1, 0], "clicked": 1, "doll_served": {"answer": {"action": 0.5, "probability": 0.5}}},
    ):  # fmt: skip
        log.add(content)
    report = value_of_versions(rig.target, ["1"], reward="clicked", most=10_000)
    assert report.choices == 4_000
    assert sum(report.left_out.values()) == 8
    assert set(report.versions[0].estimates) == {"ips", "snips"}
    assert "left out: 6 records: expected a JSON object with doll_served.answer" in report.text()


def test_what_cannot_be_estimated_is_refused_in_one_line(tmp_path: Path, log: Log) -> None:
    rig = ArmsRig(tmp_path / "run")
    rig.save(1, 1.0, 0.0)
    with pytest.raises(VersionUnknownError):
        value_of_versions(rig.target, ["9"], reward="clicked", most=10)
    with pytest.raises(ConfigError, match=r"no logged choice in 10 records: expected a JSON object .* and bought"):
        value_of_versions(rig.target, ["1"], reward="bought", most=10)
    log.add({"x": [1, 0], "clicked": 1, "doll_served": {"answer": {"action": 2, "probability": 0.5}}})
    with pytest.raises(ConfigError, match="expected actions from 0 to 1, got 2"):
        value_of_versions(rig.target, ["1"], reward="clicked", most=10_000)
    other = ArmsRig(tmp_path / "other", TASK.partition("    def choose")[0])
    other.save(1, 1.0, 0.0)
    with pytest.raises(ConfigError, match=r"Arms.choose: expected the probability of each action, got None"):
        value_of_versions(other.target, ["1"], reward="clicked", most=10)


def test_the_command_has_help() -> None:
    assert "inverse propensity" in doll("versions", "value", "--help").stdout


SERVED = """
import torch
from doll import Sample, Task


class Line(Task):
    input_shape = (2,)

    def build_model(self):
        return torch.nn.Linear(2, 1)

    def decode(self, record):
        raise NotImplementedError

    def choose(self, output):
        return torch.tensor([[0.0, 0.25, 0.75, 0.0]]).expand(len(output), 4)
"""


def test_the_server_draws_actions_with_their_probabilities(tmp_path: Path) -> None:
    with ServingRig(tmp_path, task=SERVED) as rig:
        rig.save(1)
        rig.start()
        drawn: Counter[tuple[int, float]] = Counter()
        for _ in range(20):
            status, answer = rig.post("/predict", [{"x": [1, 2]}] * 50)
            assert status == 200
            drawn.update((row["action"], row["probability"]) for row in answer["predictions"])
            assert "value" in answer["predictions"][0], "what the task predicts is there as before"
    assert drawn.keys() == {(1, 0.25), (2, 0.75)}
    assert drawn[2, 0.75] == pytest.approx(750, abs=70)


def test_what_is_no_probability_is_refused_and_the_server_goes_on(tmp_path: Path) -> None:
    task = SERVED.replace("0.75", "float(output.sum() > 1e6)")
    with ServingRig(tmp_path, task=task) as rig:
        rig.save(1)
        rig.start()
        status, answer = rig.post("/predict", [{"x": [1, 2]}])
        assert (status, "add up to 1" in answer["error"]) == (422, True)
        assert rig.infer()[0] == 200, "tensors are answered without a choice"


def test_requests_of_one_user_get_one_version(tmp_path: Path) -> None:
    wanted = {"1": 50.0, "2": 30.0, "latest": 20.0}
    with ServingRig(tmp_path, wanted=wanted, split_by="X-User") as rig:
        for version in (1, 2, 3):
            rig.save(version)
        rig.start()

        def version_of(user: str) -> str:
            body = msgspec.json.encode({"x": [1, 2]})
            status, _, answer = rig.request("POST", "/predict", body, {"x-user": user} if user else {})
            assert status == 200, answer
            return str(json.loads(answer)["version"])

        first = {f"user {at}": version_of(f"user {at}") for at in range(300)}
        assert {user: version_of(user) for user in first} == first
        shares = Counter(first.values())
        assert [shares[version] / 300 for version in ("1", "2", "3")] == pytest.approx([0.5, 0.3, 0.2], abs=0.1)
        assert len({version_of("") for _ in range(50)}) > 1, "without the header each request is drawn"
