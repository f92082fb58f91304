"""Two runs of one job name may share a Redis: a run's random id keeps what is theirs apart (docs/decisions/0045)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from doll.config import parse
from doll.consumers.protocol.worker_core import Exit, WorkerCore
from doll.ledger.admission import new_run_id
from doll.monitor.state.history import History
from doll.ps.checkpointing import encode_snapshot
from doll.ps.engine.engine import Engine
from doll.ps.policies import make_policy
from doll.ps.start import Start, engine_settings, make_engine
from doll.records.control import Hello, TermStarted
from doll.storage.checkpoints import Checkpoint
from memory_stores import MemoryBlobs
from record_builders import term_started, welcome
from threadless_jobs import GAUSSIAN, JOB, SGD, Job

pytestmark = pytest.mark.slow  # loads torch

SLOWER = "optimizer: {name: sgd, lr: 0.01, momentum: 0.5}"
POLICIES = ("{name: bsp}", "{name: asp}", "{name: ssp, staleness: 2}", "{name: wsp, wave_batches: 2}")


def pair(policy: str, *run_ids: str) -> tuple[list[Job], MemoryBlobs]:
    """Two jobs that differ in their weights only, both at term 1, with one blob store."""
    blobs = MemoryBlobs()
    rates = (SGD, SLOWER)
    jobs = [
        Job(policy, seed, training=rate, blobs=blobs, run_id=run_id)
        for seed, (rate, run_id) in enumerate(zip(rates, run_ids, strict=True))
    ]
    while sum(job.step() for job in jobs):  # each takes a step
        pass
    return jobs, blobs


def alone(policy: str) -> list[Job]:
    return [Job(policy, seed, training=rate) for seed, rate in enumerate((SGD, SLOWER))]


@pytest.mark.parametrize("policy", POLICIES)
def test_two_runs_on_one_blob_store_learn_what_each_learns_alone(policy: str) -> None:
    together, _ = pair(policy, new_run_id(), new_run_id())
    for one, reference in zip(together, alone(policy), strict=True):
        assert one.order == reference.order
        assert one.weights.tobytes() == reference.weights.tobytes()


def test_without_an_id_they_mix() -> None:
    """The check above can fail."""
    try:
        together, _ = pair("{name: bsp}", "", "")
    except Exception:  # a gradient of a version that this run does not have
        return
    references = alone("{name: bsp}")
    assert any(not np.array_equal(one.weights, other.weights) for one, other in zip(together, references, strict=True))


def engine(start: Start) -> Engine:
    config = parse(JOB % (GAUSSIAN, 2, "{name: bsp}", SGD))
    return Engine(
        engine_settings(config), make_policy(config.training.policy), term=start.term, now=0.0, origins=start.origins,
        run_id=start.run_id,
    )  # fmt: skip


class Tensors:
    """Loads nothing."""

    def load(self, tensors: object) -> None:
        pass

    def tensors(self) -> dict[str, object]:
        return {}


def test_a_server_has_the_id_that_its_session_gives_it_else_that_of_the_checkpoint() -> None:
    """Two copies of a run folder have one checkpoint, and are to share no name on one Redis."""
    config = parse(JOB % (GAUSSIAN, 2, "{name: bsp}", SGD))
    first = engine(Start(1, 0.0, (0, 0), run_id="aa"))
    for kept, offered, expected in (("aa", "bb", "bb"), ("aa", "", "aa"), ("", "bb", "bb")):
        snapshot = msgspec.structs.replace(first.snapshot(0.0), run_id=kept)
        checkpoint = Checkpoint(
            job="unit", fingerprint="f", term=1, version=0, state=encode_snapshot(snapshot), tensors={}
        )
        resumed = make_engine(config, Start.resume(2, 0.0, checkpoint, run_id=offered), Tensors().load)
        assert resumed.start.run_id == resumed.snapshot(0.0).run_id == expected


def test_ids_are_random() -> None:
    assert len({new_run_id() for _ in range(100)}) == 100
    assert all(len(new_run_id()) == 16 and new_run_id().isalnum() for _ in range(10))


def test_a_worker_ends_when_a_later_server_is_of_another_run() -> None:
    first = welcome(0, session=7, fingerprint="f", run_id="aa")
    core = WorkerCore(first, max_pending=4, now=0.0)
    core.on_record(Hello(term=2), 0.0)
    assert not any(isinstance(action, Exit) for action in core.on_record(msgspec.structs.replace(first, term=2), 0.0))
    core.on_record(Hello(term=3), 0.0)
    (action,) = core.on_record(msgspec.structs.replace(first, term=3, run_id="bb"), 0.0)
    assert action == Exit(1, "another run of the job has begun: reading again")


def test_readers_learn_the_id_from_the_newest_term() -> None:
    history = History()
    assert history.run_id == ""
    for term, run_id in ((1, "aa"), (3, "bb"), (2, "cc")):
        started: TermStarted = msgspec.structs.replace(term_started(term), run_id=run_id)
        history.feed(started)
    assert history.run_id == "bb"
