"""How a parameter server ends, and how its successor goes on: divergence, fences, failing stores, stop rules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
import structlog
from doll.config import SgdConfig
from doll.errors import CheckpointError, FencedError
from doll.optim.optimizer import DivergedError
from doll.records.control import (
    Durable,
    Finished,
    Grant,
    Nack,
    Stop,
    TermStarted,
    Update,
    Welcome,
)
from doll.storage.blobs import decode_latest, latest_key
from doll.storage.checkpoints import Checkpoint
from server_rig import Rig

pytestmark = pytest.mark.slow  # loads torch


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.join()
    yield made
    made.server.close()


def test_a_model_that_diverges_ends_the_server_and_leaves_the_checkpoint_intact(rig: Rig) -> None:
    rig.update()
    rig.turn_until(lambda: rig.server.engine.durable_version == 1)
    weights = rig.optimizer.weights.copy()
    with pytest.raises(DivergedError):
        rig.update(value=float("nan"))
    held = rig.store.load_newest(rig.mark)
    assert held is not None
    assert held.version == 1
    assert held.tensors["weights"].tobytes() == weights.tobytes()
    assert not any(isinstance(record, Update) and record.version == 2 for record in rig.outbox.updates)


def test_a_fenced_server_stops_and_saves_nothing(rig: Rig) -> None:
    rig.update()
    rig.store.claim_term()  # a successor
    with pytest.raises(FencedError, match="term 1 is over: term 2"):
        rig.turn_until(lambda: False)
    assert rig.store.saved == []
    assert rig.outbox.of(Durable) == []


def test_a_superseded_server_with_nothing_to_save_stops_too(rig: Rig) -> None:
    """It hears workers answer a newer server, and asks the store whether that is so: anybody may write to the topic."""
    newer = Nack(worker=0, session=rig.sessions[0], batch=0, term=2, grant_id=1, reason="batch")
    rig.server.feed(newer)
    rig.store.claim_term()
    with pytest.raises(FencedError, match="term 1 is over: term 2"):
        rig.server.feed(newer)


def test_a_checkpoint_that_cannot_be_saved_is_not_durable(rig: Rig) -> None:
    """It is tried again for `checkpoint.retry_timeout_s`: ending at once would only lose what is learned meanwhile."""
    rig.store.fail_next(*[CheckpointError("disk full")] * 3)
    rig.update()
    with structlog.testing.capture_logs() as logs:
        while len([entry for entry in logs if entry["event"] == "checkpoint_not_saved"]) < 3:
            assert rig.outbox.of(Durable) == []
            rig.pass_time(0.5)
            rig.server.run_periodic()
    rig.now += 1.0
    rig.turn_until(lambda: bool(rig.outbox.of(Durable)))
    assert rig.store.saved == [(1, 1)]


def test_a_store_that_stays_away_ends_the_server(rig: Rig) -> None:
    rig.store.fail_next(*[CheckpointError("disk full")] * 1000)
    rig.update()

    def later() -> bool:
        rig.pass_time(0.5)
        return rig.now > 100

    with pytest.raises(CheckpointError, match="disk full"):
        rig.turn_until(later)
    assert 60 < rig.now < 65
    assert rig.outbox.of(Durable) == []


def test_the_end_comes_when_the_last_version_is_durable() -> None:
    rig = Rig("stop.updates=2")
    rig.join()
    rig.outbox.acknowledged = 0
    rig.update()
    rig.update()
    for _ in range(3):
        rig.server.run_periodic()
    assert rig.server.engine.finished is None
    assert not any(isinstance(record, Finished) for record in rig.outbox.updates)
    rig.outbox.acknowledged = None
    rig.turn_until(lambda: rig.server.engine.finished is not None)
    finished = rig.outbox.updates[-1]
    assert isinstance(finished, Finished)
    assert (finished.version, finished.reason) == (2, "updates: 2 reached")
    assert rig.store.saved[-1] == (1, 2)
    assert [worker for worker, record in rig.outbox.commands if isinstance(record, Stop)] == [0, 1]
    pointer = rig.blobs.get(latest_key("unit"))
    assert pointer is not None
    assert decode_latest(pointer).version == 2  # the evaluator's last word is about it
    rig.server.close()


def test_leaving_saves_only_what_kafka_has_records_of() -> None:
    rig = Rig("checkpoint.every_updates=1000")
    rig.join()
    rig.update()
    rig.outbox.acknowledged = 1
    rig.server.save_now()
    assert rig.store.saved == []
    rig.outbox.acknowledged = None
    rig.server.save_now()
    assert rig.store.saved == [(1, 1)]
    rig.server.close()


def test_sigterm_saves_although_the_save_under_way_fails(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A passing failure is tried again, also when there is only one try left."""
    under_way: Future[None] = Future()
    monkeypatch.setattr(rig.server.checkpoints._executor, "submit", lambda *_: under_way)
    rig.update()
    rig.turn_until(lambda: rig.server.checkpoints._saving is not None)
    under_way.set_exception(CheckpointError("timeout"))
    rig.server.save_now()
    assert rig.store.saved == [(1, 1)]
    rig.store.claim_term()
    with pytest.raises(FencedError):
        rig.server.save_now()


def test_a_successor_goes_on_from_the_checkpoint_and_does_the_rest_again() -> None:
    """Crash after apply, before the checkpoint: version 2 is void, its batches are granted again."""
    rig = Rig()
    rig.join()
    rig.update(1.0)
    rig.turn_until(lambda: rig.server.engine.durable_version == 1)
    rig.outbox.acknowledged = 0
    rig.update(2.0)
    weights = rig.optimizer.weights.copy()
    rig.server.close()

    successor = Rig(store=rig.store)
    (started,) = successor.outbox.updates
    assert isinstance(started, TermStarted)
    assert (started.term, started.resumed_version, started.origins) == (2, 1, (100, 200))
    assert started.resumed_batches == 2
    successor.join()
    assert [record.served[0].next_batch for record in successor.outbox.of(Welcome)] == [1, 1]
    successor.update(2.0)
    assert successor.optimizer.weights.tobytes() == weights.tobytes()  # momentum went with the checkpoint
    assert all(grant.key.startswith("doll:{unit}:w:2:") for grant in successor.outbox.of(Grant))
    successor.server.close()


def test_a_resume_with_another_learning_rate_steps_by_it_from_the_same_state() -> None:
    """Only what a resume may change differs: the momentum of the checkpoint counts, times the new rate."""
    rig = Rig()
    rig.join()
    rig.update(1.0)
    rig.turn_until(lambda: rig.server.engine.durable_version == 1)
    saved = rig.optimizer.weights.copy()
    rig.server.close()
    steps = []
    assert isinstance(rig.config.training.optimizer, SgdConfig)
    rate = rig.config.training.optimizer.lr
    for overrides in ((), (f"training.optimizer.lr={4 * rate}",)):
        successor = Rig(*overrides, store=rig.store)
        successor.outbox.acknowledged = 0  # the next one begins from the same checkpoint
        successor.join()
        successor.update(1.0)
        steps.append(successor.optimizer.weights - saved)
        successor.server.close()
    assert np.any(steps[0] != 0)
    np.testing.assert_allclose(steps[1], 4 * steps[0], rtol=1e-4, atol=1e-6)


def test_crash_after_the_checkpoint_before_durable_is_said_in_the_next_welcome() -> None:
    rig = Rig()
    rig.join()
    rig.update()
    order = rig.store.save
    saved, release = threading.Event(), threading.Event()

    def save(checkpoint: Checkpoint) -> None:
        order(checkpoint)
        saved.set()
        assert release.wait(300)

    rig.store.save = save  # type: ignore[method-assign]
    rig.server.run_periodic()
    assert saved.wait(300)
    assert rig.outbox.of(Durable) == []  # it died here
    release.set()
    rig.server.close()
    del rig.store.save
    successor = Rig(store=rig.store)
    successor.join()
    assert [record.served[0].next_batch for record in successor.outbox.of(Welcome)] == [1, 1]
    successor.server.close()
