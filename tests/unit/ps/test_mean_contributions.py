"""`contributions: mean`: the parallel steps of P workers move the model as far as one step on their mean."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
import pytest
from doll.config import parse
from doll.ps.engine import events as ev
from doll.ps.policies.asp import Asp
from doll.ps.start import engine_settings
from doll.records.control import Grant, Leave
from engine_bench import Bench, only
from paths import SUPPORT
from threadless_jobs import WORKERS, Job

pytestmark = pytest.mark.slow  # loads torch


SGD = "name: sgd, momentum: 0.5"
OTHERS = ["name: adam", "name: adagrad", "{class: torch.optim.AdamW, args: {lr: %r}}"]
# Under the other policies, a worker's view has whole own steps that the model has divided (docs/decisions/0123).
SAME_VIEWS = ["name: asp", "name: bsp, contribution: step", "name: isp, significance: 0"]


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [*((policy, SGD) for policy in SAME_VIEWS), *(("name: asp", other) for other in OTHERS)],
)
def test_the_mean_is_the_sum_with_a_divided_learning_rate(policy: str, optimizer: str) -> None:
    def learned(contributions: str, lr: float) -> npt.NDArray[np.float32]:
        section = optimizer % lr if "%r" in optimizer else f"{{{optimizer}, lr: {lr!r}}}"
        job = Job(f"{{{policy}, contributions: {contributions}}}", 3, training=f"optimizer: {section}")
        return job.weights.copy()

    mean, total = learned("mean", 0.06), learned("sum", 0.06 / WORKERS)
    assert not np.allclose(mean, learned("sum", 0.06), atol=1e-4), "the two are not the same anyway"
    np.testing.assert_allclose(mean, total, rtol=2e-4, atol=2e-6)


def test_the_mean_of_the_steps_of_a_round_is_the_step_on_the_mean() -> None:
    """Under bsp with SGD without momentum, where both make the same model."""
    sgd = "optimizer: {name: sgd, lr: 0.05}"
    steps = Job("{name: bsp, contribution: step}", 5, training=sgd).weights
    np.testing.assert_allclose(steps, Job("{name: bsp}", 5, training=sgd).weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["name: asp", "name: bsp, contribution: step"])
def test_the_rows_of_tables_have_the_same_factor(policy: str) -> None:
    task = json.dumps({"class": f"{SUPPORT / 'bag_task.py'}:Bags", "args": {"sparse": True}})

    def rows(contributions: str, lr: float) -> npt.NDArray[np.float32]:
        training = f"optimizer: {{name: sgd, lr: {lr!r}}}"
        job = Job(f"{{{policy}, contributions: {contributions}}}", 3, task=task, training=training)
        return np.array(job.host.tensors()["table.0.weight.values"])

    np.testing.assert_allclose(rows("mean", 0.06), rows("sum", 0.06 / WORKERS), rtol=2e-4, atol=2e-6)


def test_the_factor_follows_the_number_of_live_workers() -> None:
    bench = Bench(Asp(), divides_steps=True, divides_lr=True)
    bench.join(0, 1, 2)

    def factors(worker: int) -> tuple[int, float]:
        (grant,) = only(bench.announce(worker, 0, 1), Grant)
        (update,) = only(bench.push(worker, 0), ev.ApplyUpdate)
        return grant.num_live, update.lr_factor

    assert factors(0) == (3, 1 / 3)
    bench.handle(Leave(worker=2, session=bench.sessions[2], cause="test"))
    assert factors(1) == (2, 1 / 2)


@pytest.mark.parametrize(
    ("policy", "steps", "lr"),
    [
        ("{name: doll}", False, False),
        ("{name: bsp}", False, False),
        ("{name: asp}", False, True),
        ("{name: ssp}", True, False),
        ("{name: ssp, contributions: sum}", False, False),
        ("{name: diloco}", False, False),
    ],
)
def test_either_workers_or_the_server_divide_and_never_both(policy: str, steps: bool, lr: bool) -> None:
    config = parse(
        "{job: j, task: {class: 'm:C'}, data: {workers: 4}, worker: {max_pending_batches: 64}}",
        [f"training.policy={policy}"],
    )
    made = engine_settings(config)
    assert (made.divides_steps, made.divides_lr) == (steps, lr)
