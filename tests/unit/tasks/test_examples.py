"""The example job files load, their tasks build and decode what their sources send."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from doll import config as job_config
from doll.config import DigitsSource, JobConfig
from doll.consumers.intake.decoding import Records, decode_records
from doll.producers import sources
from doll.task.base import as_features, load_task
from paths import EXAMPLES

NAMES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))


def _records(config: JobConfig, count: int) -> list[bytes]:
    if config.source is None:  # a pipe fills the topic
        program = [sys.executable, str(EXAMPLES / "churn.py"), str(count)]
        return subprocess.run(program, capture_output=True, check=True).stdout.splitlines()
    return list(itertools.islice(sources.open_streams(config, [0] * config.data.workers)[0], count))


def test_the_examples_are_there() -> None:
    assert {"digits.yaml", "emnist.yaml", "intrusion.yaml", "stdin.yaml"} <= set(NAMES)


@pytest.mark.slow  # loads torch, with the task
@pytest.mark.parametrize("name", NAMES)
def test_an_example_loads_and_its_task_decodes_its_source(name: str) -> None:
    config = job_config.load(EXAMPLES / name)
    if "../shared" in (EXAMPLES / name).read_text() and not (EXAMPLES / "../../shared/data").is_dir():
        pytest.skip(f"{name} needs the data in ../shared")
    task = load_task(config)
    assert list(task.build_model().parameters())
    records = _records(config, 100)
    for record in records:
        sample = task.decode(record)
        assert as_features(sample.x).shape == task.input_shape
        assert task.num_classes is None or 0 <= int(sample.y) < task.num_classes  # type: ignore[arg-type]
    task.decode = None  # type: ignore[method-assign, assignment]  # in bulk, or not at all
    decoded = decode_records(task, Records(range(100), records), samples_per_record=1, max_record_bytes=10_000)
    assert (decoded.num_samples, decoded.refused) == (100, [])


def test_emnist_streams_what_is_not_held_out() -> None:
    config = job_config.load(EXAMPLES / "emnist.yaml")
    assert config.source is not None
    assert config.source.skip >= config.task.args["holdout_samples"]  # type: ignore[attr-defined]


def test_the_digits_example_needs_no_file() -> None:
    assert isinstance(job_config.load(EXAMPLES / "digits.yaml").source, DigitsSource)
