"""A copy of an example works anywhere: its task is loaded, decodes what its source sends, and learns from it."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from doll import config as job_config
from doll.config import JobConfig
from doll.config.source import PythonSource, StdinSource
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.compute.task_steps import OwnSteps
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.model.flat_model import build
from doll.producers import sources
from doll.task.base import Sample, load_task
from doll.task.forms import as_features
from paths import EXAMPLES, SHARED_DATA

pytestmark = pytest.mark.slow  # loads torch

JOBS = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("*/*.yaml"))


def _records(config: JobConfig, count: int) -> list[bytes]:
    if config.source is None or isinstance(config.source, StdinSource):  # a pipe fills the topic
        program = [sys.executable, str(config.path(Path("task.py"))), str(count)]
        return subprocess.run(program, capture_output=True, check=True).stdout.splitlines()
    return list(itertools.islice(sources.open_streams(config, [0] * config.data.workers)[0], count))


def test_the_examples_are_there() -> None:
    assert {"digits/job.yaml", "digits/market.yaml", "emnist/job.yaml", "ratings/factors.yaml"} <= set(JOBS)
    folders = [path for path in EXAMPLES.iterdir() if path.is_dir()]
    assert {
        path.name: {"job.yaml", "task.py", "README.md"} - {file.name for file in path.iterdir()} for path in folders
    } == {path.name: set() for path in folders}


@pytest.mark.parametrize("name", JOBS)
def test_a_copy_loads_decodes_its_source_and_computes_a_gradient(name: str, tmp_path: Path) -> None:
    folder, file = name.split("/")
    shutil.copytree(EXAMPLES / folder, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    job = tmp_path / "copy" / file
    if "/shared/data/" in job.read_text():
        if not SHARED_DATA.is_dir():
            pytest.skip(f"{name} needs the data in ../shared")
        job.write_text(job.read_text().replace("../../../shared/data", str(SHARED_DATA)))
    config = job_config.load(job)
    task = load_task(config)
    if config.data.format is not None:
        pytest.skip("its records need a registry: see the example's own test")
    records = _records(config, 100)
    made = [task.decode(record) for record in records]
    samples = [sample for item in made for sample in (item if isinstance(item, list) else [item])]
    for sample in samples:
        assert isinstance(sample, Sample)
        assert task.input_shape is None or as_features(sample.x).shape == task.input_shape
        assert task.num_classes is None or 0 <= int(sample.y) < task.num_classes
    task.decode = None  # type: ignore[method-assign, assignment]  # in bulk, or not at all
    decoded = decode_records(task, RawRecords(range(100), records), samples_per_record=1, max_record_bytes=10_000)
    assert (decoded.num_samples, decoded.refused) == (len(samples), [])
    flat = build(config, task)
    if flat.tables is not None:
        shapes, rng, scale = flat.tables.shapes, np.random.default_rng(0), 0.0 if task.defines_step else 0.1

        def rows(name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
            return rng.normal(scale=scale, size=(len(ids), shapes[name].width)).astype(np.float32)

        flat.tables.connect(rows)
    if task.defines_step:
        step, bad = OwnSteps(config, task, flat).compute(decoded.x, decoded.y, seed=0)
        assert not bad
        assert step is not None
        assert step.values.any()
    else:
        gradient = GradientComputer(task, flat).compute(*decoded.samples)
        assert not gradient.problem()
        assert gradient.norm > 0


def test_two_tasks_of_one_file_name_keep_modules_of_their_own() -> None:
    """What a class looks up in its module later, such as the types of a msgspec.Struct, is its own."""
    tasks = [load_task(job_config.load(EXAMPLES / name / "job.yaml")) for name in ("stdin", "digits", "synthetic")]
    assert [type(task).__name__ for task in tasks] == ["Churn", "Digits", "Gaussian"]
    assert all(getattr(sys.modules[type(task).__module__], type(task).__name__) is type(task) for task in tasks)


def test_emnist_streams_what_is_not_held_out() -> None:
    config = job_config.load(EXAMPLES / "emnist" / "job.yaml")
    assert isinstance(config.source, PythonSource)
    assert config.source.args["skip"] >= config.task.args["holdout_samples"]
