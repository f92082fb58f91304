"""Stages that are reached over TCP: the same bits as forked ones, all or none, and what happens when one is away."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from doll.consumers.pipeline.remote_stages import RemoteStages, form_gang
from doll.consumers.pipeline.stage_main import StageSeat
from doll.consumers.pipeline.stage_processes import cut_model
from doll.errors import ConfigError, StageLostError, TaskError
from doll.pipeline.links.link import LinkClosedError
from doll.pipeline.links.tcp import Address, Claim, LinkRefusedError, connect
from doll.pipeline.runtime.messages import Begin, Part, Ready, encode
from doll.pipeline.runtime.stage_process import checked_part
from pipeline_rig import RemoteRig, Rig, answer, job, trained
from stage_models import samples
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.slow  # loads torch

OVERRIDES = ("worker.pipeline.remote=true", "worker.pipeline.stage_timeout_s=120")


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[Rig] = []
    threads = torch.get_num_threads()

    def make(kind: type[Rig], *arguments: Any) -> Rig:
        made.append(kind(tmp_path, *arguments))
        return made[-1]

    yield make
    for rig in made:
        rig.engine.close()
        if isinstance(rig, RemoteRig):
            for pid in rig.pids:
                os.kill(pid, signal.SIGCONT)
            rig.reap()
    torch.set_num_threads(threads)


def failure(rig: Rig) -> BaseException:
    error = rig.engine.ended.exception(WAIT_TIMEOUT_S)
    assert error is not None
    return error


def test_stages_on_other_machines_compute_the_same_bits(make_rig: Callable[..., Any]) -> None:
    here = trained(make_rig(Rig, 3, 4))
    there = trained(make_rig(RemoteRig, 3, 4, *OVERRIDES))
    assert here == there
    assert len(set(here)) == len(here)


def test_an_unusual_batch_is_inspected_with_the_weights_of_the_stages(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(RemoteRig, 3, 1, *OVERRIDES)
    x, y = samples(rig.task, 0, 8)
    x = np.array(x)
    x[3] = np.inf
    done = answer(rig.submit(0, rig.publish(1, 0), x, y))
    assert list(rig.refusals.bad[0]) == [3]
    assert done.batches[0].num_samples == 7


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_worker_ends_with_the_first_stage_that_is_killed(make_rig: Callable[..., Any], stage: int) -> None:
    rig = make_rig(RemoteRig, 3, 4, *OVERRIDES)
    answer(rig.submit(0, rig.publish(1, 0)))
    os.kill(rig.pids[stage], signal.SIGKILL)
    assert isinstance(failure(rig), StageLostError)
    rig.reap()  # the others have ended with it
    rig.pids.clear()


def test_a_frozen_stage_is_given_up(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(RemoteRig, 3, 4, "worker.pipeline.remote=true", "worker.pipeline.stage_timeout_s=2")
    answer(rig.submit(0, rig.publish(1, 0)))
    os.kill(rig.pids[1], signal.SIGSTOP)
    error = failure(rig)
    assert isinstance(error, StageLostError)
    # A neighbour may notice it first, if it has something to send.
    assert "silent" in str(error) or "closed its link" in str(error)


def test_a_worker_that_says_nothing_is_given_up_by_its_stages(
    make_rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it were frozen: its machine answers, and it does not."""
    monkeypatch.setattr(RemoteStages, "_relay", lambda self: None)
    rig = make_rig(RemoteRig, 2, 1, "worker.pipeline.remote=true", "worker.pipeline.stage_timeout_s=2")
    rig.reap()
    rig.pids.clear()


def test_the_end_of_the_machine_of_a_stage_is_announced(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(RemoteRig, 2, 1, *OVERRIDES)
    answer(rig.submit(0, rig.publish(1, 0)))
    os.kill(rig.pids[1], signal.SIGTERM)
    until(rig.departure, "the departure")


def test_a_gang_is_formed_of_all_stages_or_of_none(make_rig: Callable[..., Any], tmp_path: Path) -> None:
    rig = make_rig(RemoteRig, 2, 1, *OVERRIDES)
    first, second = rig.addresses
    rig.launch(0)
    _, model, parts = cut_model(rig.config, 0)
    with pytest.raises(LinkRefusedError, match="no stage answers"):  # the second one serves the first gang
        form_gang(rig.config, rig.SECRET, 0, model, parts, [rig.addresses[2], second])
    os.waitpid(rig.pids.pop(), 0)  # let go
    assert answer(rig.submit(0, rig.publish(1, 0))).key
    assert first != rig.addresses[2]


def test_a_stage_of_another_job_file_is_named(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(RemoteRig, 1, 1, *OVERRIDES)
    _, model, parts = cut_model(rig.config, 0)
    rig.launch(0, job(1, 1, *OVERRIDES, "training.optimizer.lr=0.5"))
    with pytest.raises(ConfigError, match="stage 1 runs another version"):
        form_gang(rig.config, rig.SECRET, 0, model, parts, rig.addresses[1:])
    rig.launch(0, job(1, 1, *OVERRIDES, "job=other"))
    with pytest.raises(LinkRefusedError, match="of job other, got stage 0 of worker 0 of job unit"):
        form_gang(rig.config, rig.SECRET, 0, model, parts, rig.addresses[2:])
    os.kill(rig.pids[2], signal.SIGTERM)


def test_layers_that_are_cut_differently_are_refused(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(RemoteRig, 2, 1, *OVERRIDES)
    _, model, parts = cut_model(rig.config, 0)
    names = [[layer.name for layer in part] for part in parts]
    other = [names[0][:-1], names[0][-1:] + names[1]] if len(names[0]) > 1 else [names[0] + names[1][:1], names[1][1:]]
    layers = f"worker.pipeline.layers={other}"
    for stage in range(2):
        rig.launch(stage, job(2, 1, *OVERRIDES, layers))
    with pytest.raises((ConfigError, TaskError), match="expected the layers"):
        form_gang(rig.config, rig.SECRET, 0, model, parts, rig.addresses[2:])


def test_a_worker_that_claims_and_does_not_begin_frees_the_stage(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(RemoteRig, 1, 1, *OVERRIDES)
    rig.launch(0)
    claim = Claim("unit", 0, 0, "gang", is_control=True)
    link = connect(rig.addresses[1], rig.SECRET, claim, WAIT_TIMEOUT_S)
    with pytest.raises(LinkRefusedError, match="the place is taken by gang gang"):
        connect(rig.addresses[1], rig.SECRET, claim, WAIT_TIMEOUT_S)
    link.send(encode(Ready(stage=0, fingerprint="")))  # anything but Begin
    with pytest.raises(LinkClosedError):
        link.receive()
    os.waitpid(rig.pids.pop(), 0)
    link.close()


def test_links_of_a_stage_may_come_in_any_order(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(RemoteRig, 1, 1, *OVERRIDES)
    seat: Any = StageSeat(rig.config, None, rig.task, rig.model, [], 0, 0, rig.addresses[0])  # type: ignore[arg-type]
    links: Any = queue.SimpleQueue()
    for is_control in (False, True):
        links.put((Claim("unit", 0, 0, "gang", is_control), f"link {is_control}"))
    door = SimpleNamespace(links=links)
    assert seat._admitted(door, WAIT_TIMEOUT_S, is_control=True) == "link True"
    assert seat._admitted(door, WAIT_TIMEOUT_S, is_control=False) == "link False"


def test_a_worker_that_vanishes_after_its_claim_frees_the_stage(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(RemoteRig, 1, 1, *OVERRIDES)
    rig.launch(0)
    connect(rig.addresses[1], rig.SECRET, Claim("unit", 0, 0, "gang", is_control=True), WAIT_TIMEOUT_S).close()
    os.waitpid(rig.pids.pop(), 0)


def test_a_stage_whose_neighbour_is_away_frees_itself(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(RemoteRig, 1, 1, *OVERRIDES)
    rig.launch(0)
    link = connect(rig.addresses[1], rig.SECRET, Claim("unit", 0, 0, "gang", is_control=True), WAIT_TIMEOUT_S)
    away: Address = rig.addresses[0]  # its door is closed
    link.send(encode(Begin(host=away.host, port=away.port, layers=())))
    with pytest.raises(LinkClosedError):
        link.receive()
    os.waitpid(rig.pids.pop(), 0)
    link.close()


@pytest.mark.parametrize("numel", [0, 10])
@pytest.mark.parametrize(
    ("at", "arrays"),
    [
        (-1, [np.zeros(1, np.float32)]),
        (10, [np.zeros(1, np.float32)]),
        (1 << 60, [np.zeros(1, np.float32)]),
        (8, [np.zeros(3, np.float32)]),
        (0, [np.zeros(1, np.float64)]),
        (0, [np.zeros((1, 1), np.float32)]),
        (0, [np.zeros((), np.float32)]),
        (0, []),
        (0, [np.zeros(1, np.float32)] * 2),
    ],
)
def test_a_part_outside_of_the_vector_is_refused(numel: int, at: int, arrays: Any) -> None:
    with pytest.raises(ValueError, match="expected a part of a vector"):
        checked_part(Part(at=at), arrays, numel)
