"""AdamW with groups, schedule, clipping and average on real processes is a plain torch loop, to the bit, through kills
and with another number of workers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from doll.model.flat_model import build
from doll.optim.optimizer import AVERAGE, WEIGHTS
from doll.records.control import Scale, TermStarted, Update
from doll.run.export import ExportOptions, export_model
from doll.task.base import load_task
from job_policies import some
from job_rig import MakePipeline
from safetensors.torch import load_file
from stacked import stack
from torch.optim import lr_scheduler as schedulers

from doll_lab.drill.replay_check import check_replay

pytestmark = [pytest.mark.slow, pytest.mark.integration]  # starts servers

PARTITIONS = 6
OPTIMIZER = {
    "class": "torch.optim.AdamW",
    "args": {"lr": 0.02, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "groups": {"bias$": {"weight_decay": 0}},
}
SCHEDULE = [
    {"class": "torch.optim.lr_scheduler.LinearLR", "args": {"start_factor": 0.1, "total_iters": 20}, "updates": 20},
    {"class": "torch.optim.lr_scheduler.CosineAnnealingLR", "args": {"T_max": 100}},
]
RECIPE = (
    f"training.optimizer={json.dumps(OPTIMIZER)}", f"training.schedule={json.dumps(SCHEDULE)}",
    "training.clip_norm=0.1", "training.ema={decay: 0.9}", "training.guard.spike_factor=0",
)  # fmt: skip


def test_the_model_is_that_of_a_plain_loop_through_kills(make_pipeline: MakePipeline) -> None:
    job = make_pipeline(
        *RECIPE, f"data.partitions={PARTITIONS}", "stop.updates=120", "checkpoint.event_log=true", "checkpoint.keep=3"
    )
    streams: list[list[bytes]] = [[] for _ in range(PARTITIONS)]

    def send(count: int) -> None:
        values = job.samples(count * PARTITIONS)
        for at, value in enumerate(values):
            streams[at % PARTITIONS].append(value)
        job.send(values)

    job.start()
    send(80)
    job.until_version(10)
    job.kill("worker-0")
    send(80)
    job.until_version(30)
    job.kill("ps")
    job.until(lambda: len(job.term_starts) == 2, "a second parameter server")
    send(80)
    job.until_version(50)
    job.start_worker(2)
    job.until_status(lambda status: bool(status.run_id), "a status")
    job.control("events", Scale(workers=3, run_id=job.last_status.run_id))
    job.until_status(lambda status: status.num_workers == 3 and not status.moving_partitions, "three workers")
    send(40)
    job.until(lambda: any(member.worker == 2 for member in job.updates[-1].members), "an update of the third worker")
    job.until_version(70)
    job.kill("ps")
    job.kill("worker-1")
    send(200)
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.version, report.term) == (120, 3)

    weights, average = plain_loop(job, streams, valid_updates(job))
    checkpoint = job.checkpoint()
    assert {member.worker for update in job.updates for member in update.members} == {0, 1, 2}
    assert checkpoint.tensors[WEIGHTS].tobytes() == weights.numpy().tobytes()
    assert checkpoint.tensors[AVERAGE].tobytes() == average.numpy().tobytes()
    for name, vector in (("average", average), ("weights", weights)):
        content = export_model(
            job.config, job.run, job.folder / name, ExportOptions(average=None if name == "average" else False)
        )
        tensors = load_file(job.folder / name / "model.safetensors")
        assert content["average"] == (name == "average")
        assert torch.equal(torch.cat([tensors[key].flatten() for key in names(job)]), vector)
    replay = check_replay(job.config, job.run / "events", checkpoint)
    assert (replay.differences, replay.terms) == ((), 3)


STEPS = ["{name: ssp, staleness: 2}", "{name: diloco, local_batches: 2, grace_s: 0.2}"]


@pytest.mark.parametrize("policy", some(STEPS, "ssp"))
def test_workers_step_by_a_class_through_kills(make_pipeline: MakePipeline, policy: str) -> None:
    """Their moments begin again with their processes, so no plain loop makes this model; a replay does."""
    job = make_pipeline(*RECIPE, f"training.policy={policy}", "stop.updates=60", "checkpoint.event_log=true")
    job.start()
    job.send(job.samples(400))
    job.until_version(10)
    job.kill("worker-0")
    job.send(job.samples(400))
    job.until_version(20)
    job.kill("ps")
    job.send(job.samples(2000))
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.version, report.term) == (60, 2)
    checkpoint = job.checkpoint()
    assert not np.array_equal(checkpoint.tensors[AVERAGE], checkpoint.tensors[WEIGHTS])
    replay = check_replay(job.config, job.run / "events", checkpoint)
    assert (replay.differences, replay.terms) == ((), 2)


def names(job: Any) -> list[str]:
    return [name for name, _ in load_task(job.config).build_model().named_parameters()]


def valid_updates(job: Any) -> list[Update]:
    """Without those that a later server began again below."""
    updates: list[Update] = []
    for record in job.read("updates"):
        match record:
            case TermStarted():
                updates = [update for update in updates if update.version <= record.resumed_version]
            case Update() if not updates or record.term >= updates[-1].term:
                updates.append(record)
    assert [update.version for update in updates] == list(range(1, 121))
    return updates


def plain_loop(job: Any, streams: list[list[bytes]], updates: list[Update]) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and their average, of the batches of `updates`."""
    task = load_task(job.config)
    module = build(job.config, task).module
    named = dict(module.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [parameter for name, parameter in named.items() if not name.endswith("bias")]},
        {"params": [parameter for name, parameter in named.items() if name.endswith("bias")], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-2, betas=(0.9, 0.95), weight_decay=0.1)
    parts: list[schedulers.LRScheduler] = [
        schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=20),
        schedulers.CosineAnnealingLR(optimizer, T_max=100),
    ]
    schedule = schedulers.SequentialLR(optimizer, parts, milestones=[20])
    average = flat_of(module).clone()
    clipped = 0
    for update in updates:
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter)
        for member in update.members:
            assert (member.n_samples, member.dead) == (8, ())
            x, y = stack([task.decode(value) for value in streams[member.partition][member.lo : member.hi]])
            loss = task.loss(task.forward(module, torch.from_numpy(x)), torch.from_numpy(y))
            (loss * 8).backward()
        for parameter in named.values():
            assert parameter.grad is not None
            parameter.grad *= 1 / update.n_samples
        clipped += bool(torch.nn.utils.clip_grad_norm_(named.values(), 0.1) > 0.1)
        optimizer.step()
        schedule.step()
        average.lerp_(flat_of(module), 1 - 0.9)
    assert 0 < clipped < len(updates)
    return flat_of(module), average


def flat_of(module: torch.nn.Module) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([parameter.detach().numpy().ravel() for parameter in module.parameters()]))
