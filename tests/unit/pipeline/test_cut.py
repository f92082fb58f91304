"""The layers of each stage: as named, or about even."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from doll.config import parse
from doll.errors import ConfigError
from doll.pipeline.cut import cut, even_stops
from doll.task import load_task
from hypothesis import given
from hypothesis import strategies as st

JOB = """
job: cuts
task: {class: "doll.tasks.digits:Digits", args: {hidden: [16, 8]}}
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
