"""Stages compute what the undivided model computes, whatever the model: gradient, buffers and steps, through real
processes and links. What they cannot compute is refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import record_builders
import torch
from doll.consumers.compute.step_model import StepModel
from doll.errors import ConfigError, TaskError
from doll.model.flat_model import FlatModel
from doll.model.random_numbers import draw_from, seed_of
from doll.pipeline.planner.cut import even_stops
from doll.pipeline.profiling.layers import layers_of
from odd_models import CASES, REFUSED, UNSEEN, case_of, odd_samples
from pipeline_rig import Rig, answer, first_offset
from process_checks import is_gone
from waiting import WAIT_TIMEOUT_S

pytestmark = pytest.mark.slow  # loads torch

Array = npt.NDArray[Any]
SIZES = (8, 3, 1)  # samples of each batch
TOLERANCE = 1e-6


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[[str], Rig]]:
    made: list[Rig] = []
    threads = torch.get_num_threads()

    def make(name: str) -> Rig:
        case = case_of(name)
        stages = 2 if case.cuts is None else len(case.cuts)
        overrides = [
            "task.class=odd_models:Odd", f"task.args={{name: {name!r}}}",
            # The first step is the mean gradient itself, with the other sign.
            "training.optimizer={name: sgd, lr: 1.0, momentum: 0.5}", "training.guard.spike_factor=0",
        ]  # fmt: skip
        if case.cuts is not None:
            at, layers = 0, []
            for count in case.cuts:
                layers.append([str(number) for number in range(at, at + count)])
                at += count
            if name == "frozen in the middle":
                layers = [["0"], ["1.0", "1.1", "2"], ["3"]]
            overrides.append(f"worker.pipeline.layers={layers}")
        made.append(Rig(tmp_path, stages, 1, *overrides))
        return made[-1]

    yield make
    for rig in made:
        rig.engine.close()
        assert all(is_gone(pid) for pid in rig.stages.pids)
    torch.set_num_threads(threads)


class Draws:
    """Lets the undivided model draw the random numbers that its parts draw at their stages: from as many generators,
    whose states are put in the place of torch's own by turns."""

    def __init__(self, rig: Rig, model: FlatModel) -> None:
        layers = layers_of(rig.task, model.module)
        pipeline = rig.config.worker.pipeline
        if pipeline.layers is None:
            sizes = [sum(p.numel() for p in layer.module.parameters()) for layer in layers]
            stops = even_stops(sizes, pipeline.stages)
        else:
            stops = np.cumsum([len(names) for names in pipeline.layers]).tolist()
        self._states: list[torch.Tensor] = []
        for stage, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
            for layer in layers[start:stop]:
                for module in layer.module.modules():
                    module.register_forward_pre_hook(lambda _, __, stage=stage: self._draw_at(stage))
        self._num_stages = len(stops)
        self._at = 0

    def of_batch(self, seed: int) -> None:
        """The next pass is over the batch of this seed."""
        self._states.clear()
        for stage in range(self._num_stages):
            draw_from(seed_of(seed, stage))
            self._states.append(torch.get_rng_state())
        self._at = 0
        torch.set_rng_state(self._states[0])

    def _draw_at(self, stage: int) -> None:
        self._states[self._at] = torch.get_rng_state()
        self._at = stage
        torch.set_rng_state(self._states[stage])


@pytest.mark.parametrize("name", CASES)
def test_gradient_buffers_and_steps_are_those_of_the_undivided_model(make_rig: Callable[[str], Rig], name: str) -> None:
    rig = make_rig(name)
    steps: StepModel = rig.undivided()
    computer = steps._computer
    draws = Draws(rig, computer._model)
    n, floats = rig.model.num_parameters, rig.model.num_floats
    moved = rig.first_weights
    moved[:floats] += 0.1 * np.random.default_rng(0).random(floats)  # statistics that are not those at the start
    for number, size in enumerate(SIZES):
        weights = rig.publish(1 + number, number, moved * np.float32(1 + number / 10))
        if number:
            rig.engine.offer(weights)
            steps.offer(weights)
        x, y = odd_samples(CASES[name], number, size)
        done = answer(rig.submit(number, weights, x.copy(), y.copy(), min_version=weights.version))
        order = record_builders.grant_of(
            term=1, worker=0, session=1, first=number, grant_ids=(number,), version=weights.version, min_version=0,
            key=weights.key, included=weights.included,
        )  # fmt: skip
        assert steps.load(order) == done.batches[0].version
        draws.of_batch(seed_of(rig.config.seed, 0, first_offset(number)))
        gradient = computer.compute(x.copy(), y.copy())
        assert done.batches[0].num_samples == size
        assert done.batches[0].loss_sum == pytest.approx(gradient.loss_sum, rel=1e-6)
        of_batch = gradient.values[:n] / size
        steps.add(gradient, batch=number)
        pushed, expected = rig.pushed(done), steps.values()
        assert expected is not None
        if not number:
            scale = max(1e-3, float(np.abs(of_batch).max()))
            # Weights that were stepped on are rounded once.
            rounding = float(np.abs(moved[:n]).max()) * 1.2e-7
            np.testing.assert_allclose(-pushed[:n], of_batch, rtol=0, atol=TOLERANCE * scale + rounding)
        scale = max(1.0, float(np.abs(expected[:floats]).max()))
        np.testing.assert_allclose(pushed[:floats], expected[:floats], rtol=0, atol=TOLERANCE * scale)
        assert pushed[floats:].tobytes() == expected[floats:].tobytes()
        assert np.abs(pushed[:n]).max() > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_before_anything_starts(make_rig: Callable[[str], Rig], name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name][1]):
        make_rig(name)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_random_numbers_do_not_show_is_refused_with_the_first_samples(
    make_rig: Callable[[str], Rig], name: str
) -> None:
    """Before anything is learned from them."""
    rig = make_rig(name)
    case, reason = UNSEEN[name]
    weights = rig.publish(1, 0)
    x, y = odd_samples(case, 0, 8)
    with pytest.raises(TaskError, match=reason):
        rig.submit(0, weights, x, y).result(WAIT_TIMEOUT_S)
