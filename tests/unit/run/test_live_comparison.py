"""`doll versions compare`: two versions on the records that come, until one is better beyond the noise."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import doll
from doll.consumers.intake.decoding import RawRecords
from doll.errors import ConfigError, VersionUnknownError
from doll.run import live_comparison
from doll.run.live_comparison import LiveDifference, compare_live
from gate_rig import TASK, Rig

pytestmark = pytest.mark.slow  # loads torch

DECODE = """
        import struct
        a, b, y = struct.unpack("<3f", record)
        return Sample(np.array([a, b], np.float32), np.float32(y))
"""


class Records:
    """The records that come: y = slope (x0 - x1) and noise, 60 at each look."""

    def __init__(self) -> None:
        self._rng, self.slope, self.closed, self.looks = np.random.default_rng(3), 1.0, 0, 0

    def begin(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1

    def take_raw(self, most: int) -> RawRecords:
        self.looks += 1
        x = self._rng.normal(size=(60, 2))
        y = self.slope * (x[:, 0] - x[:, 1]) + self._rng.normal(0, 0.3, 60)
        values: list[bytes | None] = [struct.pack("<3f", *row, at) for row, at in zip(x, y, strict=True)]
        return RawRecords(range(60), values, 0, ())


class Clock:
    """Monotonic time that passes only in sleep."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    came = Records()
    monkeypatch.setattr(live_comparison, "LiveRecords", lambda config, services: came)
    monkeypatch.setattr(live_comparison, "reachable_kafka", lambda target: (target, None))
    monkeypatch.setattr(live_comparison, "time", Clock())
    yield came
    assert came.closed == 1 or not came.looks


def rig_of(folder: Path, job: str = "j", decode: str = DECODE) -> Rig:
    class Decoding(Rig):
        pass

    Decoding.job = Rig.job.replace("job: j", f"job: {job}").replace("line.py", "decoding.py")
    folder.mkdir()
    (folder / "decoding.py").write_text(TASK.replace("        raise NotImplementedError", decode))
    return Decoding(folder)


def test_the_better_version_is_found_and_the_interval_says_how_much_better_it_is(
    tmp_path: Path, records: Records
) -> None:
    rig = rig_of(tmp_path / "run")
    rig.save(1, 0.6, -0.6)
    rig.save(2, 0.95, -0.95)
    said: list[str] = []
    difference = compare_live(rig.target, "1", "latest", say=said.append)
    assert difference.is_decided
    assert difference.better == "version 2"
    # The mean loss of a slope that is off by d is 2 d² and the noise.
    true = 2 * (0.4**2 - 0.05**2)
    assert difference.low <= true <= difference.high
    assert difference.mean_a == pytest.approx(0.41, abs=0.15)
    assert len(said) == records.looks
    assert "version 2 is better" in said[-1]
    assert difference.records == 60 * records.looks


def test_equal_versions_are_not_decided_at_any_of_many_looks(tmp_path: Path, records: Records) -> None:
    rig = rig_of(tmp_path / "run")
    rig.save(1, 0.9, -0.9)
    rig.save(2, 1.1, -1.1)  # as far off as version 1
    difference = compare_live(rig.target, "1", "2", seconds=60)
    assert not difference.is_decided
    assert difference.better == ""
    assert records.looks == 60
    assert "not decided yet" in difference.text()


def test_a_challenger_is_another_job_with_its_own_model(tmp_path: Path, records: Records) -> None:
    first = rig_of(tmp_path / "first")
    first.save(1, 0.5, -0.5)
    other = rig_of(tmp_path / "second", "challenger")
    other.save(3, 1.0, -1.0)
    with pytest.raises(VersionUnknownError):
        compare_live(first.target, "9", "1", seconds=1)
    difference = compare_live(first.target, "1", "3", against=other.target)
    assert (difference.a, difference.b, difference.better) == ("j 1", "challenger 3", "challenger 3")


def test_a_metric_that_is_no_mean_and_tasks_that_accept_other_records_are_refused(
    tmp_path: Path, records: Records
) -> None:
    rig = rig_of(tmp_path / "run")
    rig.save(1, 0.6, -0.6)
    rig.save(2, 0.9, -0.9)
    with pytest.raises(ConfigError, match="metric rmse: expected loss or a mean"):
        compare_live(rig.target, "1", "2", metric="rmse")
    picky = rig_of(tmp_path / "picky", "picky", DECODE.replace("return", "assert a > 0; return"))
    picky.save(1, 0.6, -0.6)
    records.closed = 0
    with pytest.raises(ConfigError, match="expected tasks that accept the same records"):
        compare_live(rig.target, "1", "1", against=picky.target)


def test_the_command_prints_the_result(tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of(tmp_path / "run")
    rig.save(1, 0.6, -0.6)
    rig.save(2, 0.95, -0.95)
    result = doll(
        "versions",
        "compare",
        rig.target.run.path / "job.yaml",
        "1",
        "2",
        "--run-folder",
        rig.folder,
        "--duration",
        "2m",
    )
    assert result.exit_code == 0, result.output
    assert "version 2 is better" in result.stdout


def test_the_text_before_the_first_interval_and_for_a_metric_without_direction() -> None:
    given: dict[str, Any] = {
        "a": "version 1",
        "b": "version 2",
        "mean_a": 1.0,
        "mean_b": 2.0,
        "records": 10,
        "error": 0.05,
    }
    early = LiveDifference(metric="loss", low=-math.inf, high=math.inf, **given)
    assert "10 records, too few for an interval" in early.text()
    unknown = LiveDifference(metric="clicks", low=0.1, high=0.2, **given)
    assert unknown.is_decided
    assert unknown.better == ""
    assert "they differ" in unknown.text()
    assert dataclasses.replace(unknown, metric="accuracy").better == "version 1"
    assert dataclasses.replace(unknown, metric="accuracy", low=-0.2, high=-0.1).better == "version 2"
