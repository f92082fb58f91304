"""The layers of each stage: as named, or about even."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from doll.config import parse
from doll.errors import ConfigError
from doll.pipeline.planner.cut import cut, even_stops
from doll.pipeline.profiling.profile import LayerProfile, Profile
from doll.task.base import load_task
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.slow  # loads torch

JOB = """
job: cuts
task: {class: "examples.digits.task:Digits", args: {hidden: [16, 8]}}
training: {policy: {name: wsp}}
worker: {pipeline: {stages: 3}}
"""


def names(*overrides: str) -> list[list[str]]:
    config = parse(JOB, overrides)
    task = load_task(config)
    torch.manual_seed(0)
    return [[layer.name for layer in part] for part in cut(config, task, task.build_model(), 0)]


def test_stages_have_about_as_many_parameters_each() -> None:
    assert names() == [["0", "1"], ["2", "3"], ["4", "5"]]


def test_layers_may_be_named() -> None:
    assert names("worker.pipeline.layers=[['0'], ['1', '2', '3', '4'], ['5']]") == [["0"], ["1", "2", "3", "4"], ["5"]]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("worker.pipeline.stages=7", "expected at most 6 stages, one for each layer of the model"),
        ("worker.pipeline.layers=[['0', '2'], ['1', '3'], ['4', '5']]", "expected '1', got '2'"),
        ("worker.pipeline.layers=[['0', '1'], ['2', '3'], ['4']]", "expected '5' in stage 3"),
        ("worker.pipeline.layers=[['0', '1'], ['2', 'x'], ['4']]", "stage 2: expected a layer of 0, 1, 2, 3, 4, 5"),
        ("worker.pipeline.layers=[['0', '1'], ['1', '2', '3'], ['4', '5']]", "stage 2: .*expected '2', got '1'"),
        ("worker.pipeline.layers=[['0', '1'], ['2', '3'], ['4', '5', '0']]", "expected no other layer, got '0'"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        names(override)


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=7), data=st.data())
def test_the_largest_part_is_as_small_as_possible(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))

    def largest(stops: list[int]) -> int:
        return max(sum(sizes[start:stop]) for start, stop in pairwise([0, *stops]))

    stops = even_stops(sizes, parts)
    assert len(stops) == parts
    assert stops == sorted(set(stops))
    every = [[*inner, len(sizes)] for inner in combinations(range(1, len(sizes)), parts - 1)]
    assert largest(stops) == min(map(largest, every))


def profiled(tmp_path: Path, times: Sequence[float], *overrides: str, parameter_bytes: int = 0) -> list[list[str]]:
    layers = tuple(LayerProfile(str(at), s, s, 0, 0, parameter_bytes) for at, s in enumerate(times))
    (tmp_path / "profile.json").write_bytes(Profile("digits", 64, "cpu", layers).to_json())
    return names(f"worker.pipeline.profile={tmp_path / 'profile.json'}", *overrides)


def test_a_profile_decides_with_the_speed_of_the_devices(tmp_path: Path) -> None:
    assert profiled(tmp_path, [4, 1, 1, 2, 1, 3]) == [["0"], ["1", "2", "3"], ["4", "5"]]
    slow = "worker.pipeline.devices=[{device: cpu, slowdown: 3}, cpu, cpu]"
    assert profiled(tmp_path, [1, 1, 1, 1, 1, 1], slow) == [["0"], ["1", "2"], ["3", "4", "5"]]


def test_a_stage_that_fits_nowhere_is_refused_by_layer_and_device(tmp_path: Path) -> None:
    devices = "worker.pipeline.devices=[cpu, {device: cpu, memory_bytes: 1e8}, cpu]"
    with pytest.raises(ConfigError, match=r"cpu of stage 2"):
        profiled(tmp_path, [1] * 6, devices, parameter_bytes=10**8)


def test_a_profile_of_another_model_or_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has the layers 0, 1, 2, 3, 4, the job's model has 0, 1, 2, 3, 4, 5: profile it again"
    ):
        profiled(tmp_path, [1] * 5)
    with pytest.raises(ConfigError, match=r"is of batches of 64, data\.batch_size is 8: profile it again"):
        profiled(tmp_path, [1] * 6, "data.batch_size=8")
