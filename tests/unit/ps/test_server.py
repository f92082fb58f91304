"""The parameter server without its transport: what it does, and in which order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from doll import metrics
from doll.errors import CheckpointError
from doll.metrics.states import from_bytes, to_bytes
from doll.ps.checkpointing import decode_snapshot
from doll.ps.engine.events import StopRequested
from doll.ps.server import held_out_score
from doll.records.control import (
    Alive,
    AnyRecord,
    Durable,
    Fence,
    Grant,
    HeldOutScore,
    Hello,
    Join,
    Nack,
    NewVersion,
    TermStarted,
    Update,
    Welcome,
)
from doll.storage.blobs import HEADER_BYTES, decode_blob, decode_latest, encode_blob, gradient_key, latest_key
from doll.storage.checkpoints import Checkpoint
from memory_stores import MemoryBlobs, MemoryCheckpointStore
from pushes import answer
from record_builders import announce
from server_rig import MemoryOutbox, Rig

pytestmark = pytest.mark.slow  # loads torch


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.join()
    yield made
    made.server.close()


def test_it_says_that_it_is_there_before_anything_else() -> None:
    rig = Rig()
    (started,) = rig.outbox.updates
    assert isinstance(started, TermStarted)
    assert (started.term, started.resumed_version, started.origins, started.records_per_batch) == (1, 0, (100, 200), 4)
    assert rig.outbox.commands == [(0, Hello(term=1)), (1, Hello(term=1))]
    rig.server.close()


def test_the_origins_of_a_new_job_are_durable_before_anybody_hears_of_them() -> None:
    """A server that starts again before its first checkpoint would take them again, and workers keep the old ones."""
    store = MemoryCheckpointStore("unit")
    rig = Rig(store=store)
    sent_before: list[int] = []
    keep = store.save

    def save(checkpoint: Checkpoint) -> None:
        sent_before.append(len(rig.outbox.commands) + len(rig.outbox.updates))
        keep(checkpoint)

    rig.outbox.commands.clear()
    rig.outbox.updates.clear()
    store.save = save  # type: ignore[method-assign]
    rig.server.open()
    assert sent_before == [0]
    held = store.load_newest(rig.mark)
    assert held is not None
    assert (held.version, decode_snapshot(held).origins, decode_snapshot(held).applied) == (0, (100, 200), (0, 0))
    rig.server.close()

    successor = Rig("data.start=latest", store=store)
    successor.join()
    assert successor.server.engine.start.origins == (100, 200)
    assert [(record.served[0].origin, record.served[0].next_batch) for record in successor.outbox.of(Welcome)] == [
        (100, 0),
        (200, 0),
    ]
    successor.update()
    successor.turn_until(lambda: successor.server.engine.durable_version == 1)
    successor.server.close()


def test_nothing_is_heard_of_a_server_whose_origins_cannot_be_kept() -> None:
    store = MemoryCheckpointStore("unit")
    store.fail_next(CheckpointError("disk full"))
    rig = object.__new__(Rig)
    with pytest.raises(CheckpointError, match="disk full"):
        rig.__init__(store=store)  # type: ignore[misc]
    assert (rig.outbox.commands, rig.outbox.updates) == ([], [])
    rig.server.close()


def test_weights_are_there_before_the_grant_and_only_the_newest_are_kept(rig: Rig) -> None:
    seen = []

    class Watching(MemoryOutbox):
        def send_command(self, worker: int, record: AnyRecord) -> None:
            if isinstance(record, Grant):
                seen.append(rig.blobs.get(record.key) is not None)
            super().send_command(worker, record)

    rig.outbox.__class__ = Watching
    for _ in range(6):
        rig.update()
    assert seen == [True] * 12
    kept = [key for key in rig.blobs.keys() if ":w:1:" in key]  # noqa: SIM118 - not a dict
    assert kept == [f"doll:{{unit}}:w:1:{version}" for version in (2, 3, 4, 5)]  # blobs.keep_versions
    pointer = rig.blobs.get(latest_key("unit"))
    assert pointer is not None
    latest = decode_latest(pointer)
    assert latest.version == 5  # of the last grant: version 6 is asked for by nobody yet
    blob = rig.blobs.get(latest.key)
    assert blob is not None
    decode_blob(blob, job="unit", kind="w", version=5, numel=rig.size)


def test_a_far_store_is_cleared_while_the_server_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryBlobs, "is_far", True)
    go, delete = threading.Event(), rig.blobs.delete

    def late_delete(*keys: str) -> None:
        assert go.wait(300)
        delete(*keys)

    monkeypatch.setattr(rig.blobs, "delete", late_delete)
    for _ in range(6):
        rig.update()  # no update waits for it
    go.set()

    def is_cleared() -> bool:
        rig.server.run_periodic()
        pointer = rig.blobs.get(latest_key("unit"))
        newest = -1 if pointer is None else decode_latest(pointer).version
        kept = [key for key in rig.blobs.keys() if ":w:1:" in key or ":g:" in key]  # noqa: SIM118 - not a dict
        # No grant asks for version 6: it is published after its checkpoint, which another thread stores meanwhile.
        return newest >= 5 and kept == [f"doll:{{unit}}:w:1:{version}" for version in range(newest - 3, newest + 1)]

    rig.turn_until(is_cleared)


def test_grants_of_the_new_version_go_out_first(rig: Rig) -> None:
    """Before the update's record, which comes before anything else, and before blobs are deleted."""
    for batch in (0, 1):
        for worker in (0, 1):
            rig.announce(worker, batch, batch + 1)
    first, second = rig.grants()
    rig.answer(first)
    key = gradient_key("unit", 1, first.grant_ids[0])
    seen: list[tuple[type[AnyRecord], bool]] = []

    class Watching(MemoryOutbox):
        def send_command(self, worker: int, record: AnyRecord) -> None:
            seen.append((type(record), key in rig.blobs.keys()))  # noqa: SIM118 - not a dict
            super().send_command(worker, record)

        def send_update(self, record: AnyRecord) -> None:
            seen.append((type(record), key in rig.blobs.keys()))  # noqa: SIM118 - not a dict
            super().send_update(record)

    rig.outbox.__class__ = Watching
    rig.answer(second)
    rig.turn_until(lambda: rig.outbox.of(Durable) != [])
    assert seen[:3] == [(Grant, True), (Grant, True), (Update, True)]
    assert {kind for kind, _ in seen[3:]} == {Durable}
    assert key not in rig.blobs.keys()  # noqa: SIM118 - not a dict


def test_a_version_that_nobody_is_granted_is_recorded_at_once(rig: Rig) -> None:
    rig.update()
    assert isinstance(rig.outbox.updates[-1], Update)
    assert rig.outbox.updates[-1].version == 1


def test_an_update_is_recorded_with_its_lineage(rig: Rig) -> None:
    before = rig.optimizer.weights.copy()
    rig.update(value=2.0)
    update = rig.outbox.updates[-1]
    assert isinstance(update, Update)
    assert (update.version, update.n_samples, update.samples_total, update.batches_total) == (1, 8, 8, 2)
    assert (update.loss, update.metrics) == (2.0, {"accuracy": 0.5})
    assert [(m.worker, m.batch, m.lo, m.hi, m.base_version) for m in update.members] == [
        (0, 0, 100, 104, 0),
        (1, 0, 200, 204, 0),
    ]
    np.testing.assert_allclose(rig.optimizer.weights, before - 0.1 * (2.0 + 2.0) / 8)
    # The gradients are of no use any more.
    assert not any(":g:" in key for key in rig.blobs.keys())  # noqa: SIM118 - not a dict


def test_a_checkpoint_waits_for_the_update_records_and_durable_waits_for_the_checkpoint(rig: Rig) -> None:
    rig.outbox.acknowledged = 1  # the TermStarted record only
    rig.update()
    for _ in range(3):
        rig.server.run_periodic()
    assert rig.store.saved == []
    assert rig.outbox.of(Durable) == []

    release = threading.Event()
    save = rig.store.save

    def slow(checkpoint: Checkpoint) -> None:
        assert release.wait(300)
        save(checkpoint)

    rig.store.save = slow  # type: ignore[method-assign]
    rig.outbox.acknowledged = 2
    for _ in range(3):
        rig.server.run_periodic()
    assert rig.outbox.of(Durable) == []  # ordered, being written, not durable

    release.set()
    rig.turn_until(lambda: bool(rig.outbox.of(Durable)))
    assert rig.store.saved == [(1, 1)]
    assert rig.outbox.of(Durable) == [Durable(term=1, worker=worker, until={worker: 1}, batches=1) for worker in (0, 1)]


def test_what_a_checkpoint_holds_is_one_moment_also_when_learning_goes_on(rig: Rig) -> None:
    """Weights, optimizer and counts of the version that was ordered, not of the one at which it is written."""
    rig.outbox.acknowledged = 1
    rig.update()
    weights = rig.optimizer.weights.copy()
    rig.update()
    rig.outbox.acknowledged = None
    rig.turn_until(lambda: rig.server.engine.durable_version >= 1)
    held = rig.store.load_newest(rig.mark)
    assert held is not None
    if held.version == 1:
        assert held.tensors["weights"].tobytes() == weights.tobytes()
        assert decode_snapshot(held).applied == (1, 1)
    assert decode_snapshot(held).version == held.version


def test_only_gradients_that_this_server_may_want_are_read_ahead(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hints: list[list[str]] = []
    monkeypatch.setattr(rig.blobs, "prefetch", lambda keys: hints.append(list(keys)))
    for worker in (0, 1):
        rig.announce(worker, 0, 1)
    first, second = (answer(grant, grant.term, f"g{grant.worker}", n_samples=4) for grant in rig.grants())
    empty, foreign = msgspec.structs.replace(second, key=""), msgspec.structs.replace(second, term=second.term + 1)
    rig.server.prefetch([first, Alive(worker=0, session=first.session), empty, foreign, second])
    rig.server.prefetch([first, empty, foreign])  # one is read when it is fed
    assert hints == [["g0", "g1"]]


def test_a_gradient_that_is_on_its_way_is_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a server that is near to the store: its workers may be far from it."""
    is_there, get = threading.Event(), rig.blobs.get
    waited: list[str] = []

    def get_soon(key: str) -> bytes | None:
        waited.append(key)
        assert is_there.wait(300)
        return get(key)

    monkeypatch.setattr(rig.blobs, "get_soon", get_soon)
    rig.announce(0, 0, 1)
    rig.announce(1, 0, 1)
    first, second = rig.grants()
    rig.answer(first)
    push = msgspec.structs.replace(answer(second, second.term, "late", n_samples=4), is_on_its_way=True)
    rig.server.prefetch([push])
    assert rig.server.waits_for(push)
    parts = encode_blob(np.zeros(rig.size, np.float32), job="unit", kind="g", version=0)
    rig.blobs.put("late", parts, 60.0)
    is_there.set()
    rig.turn_until(lambda: not rig.server.waits_for(push))
    rig.server.feed(push)
    assert (rig.server.engine.version, waited) == (1, ["late"])
    assert not rig.server.engine.counters["requeued"]
    rig.server.prefetch([push])  # sent again: nobody waits for what is learned
    assert not rig.server.waits_for(push)
    rig.server.feed(push)
    assert (rig.server.engine.version, waited) == (1, ["late"])


def test_a_lost_gradient_is_computed_again(rig: Rig) -> None:
    rig.announce(0, 0, 1)
    rig.announce(1, 0, 1)
    first, second = rig.grants()
    rig.answer(first)
    rig.answer(second, store=False)
    assert rig.server.engine.version == 0
    (again,) = rig.grants()
    assert (again.worker, again.first, again.version) == (second.worker, second.first, 0)
    assert again.grant_ids != second.grant_ids
    rig.answer(second)  # the old answer comes late: refused, and its blob is dropped
    assert rig.server.engine.version == 0
    assert rig.server.engine.counters["refused_late"] == 1
    rig.answer(again)
    assert rig.server.engine.version == 1


@pytest.mark.parametrize("damage", ["torn", "other version", "other size", "garbage"])
def test_a_gradient_that_is_not_the_one_that_was_asked_for_is_never_applied(rig: Rig, damage: str) -> None:
    rig.announce(0, 0, 1)
    rig.announce(1, 0, 1)
    first, second = rig.grants()
    before = rig.optimizer.weights.copy()
    rig.answer(first)
    values = {
        "torn": b"".join(encode_blob(np.ones(rig.size, np.float32), job="unit", kind="g", version=0))[:-4],
        "other version": b"".join(encode_blob(np.ones(rig.size, np.float32), job="unit", kind="g", version=7)),
        "other size": b"".join(encode_blob(np.ones(3, np.float32), job="unit", kind="g", version=0)),
        "garbage": b"garbage",
    }
    rig.blobs.put(gradient_key("unit", 1, second.grant_ids[0]), [values[damage]], 60.0)
    rig.answer(second, store=False)
    assert rig.server.engine.version == 0
    assert rig.optimizer.weights.tobytes() == before.tobytes()
    assert len(rig.grants()) == 1


def test_weights_that_a_worker_misses_are_published_again(rig: Rig) -> None:
    rig.announce(0, 0, 1)
    rig.announce(1, 0, 1)
    first, second = rig.grants()
    rig.blobs.wipe()
    nack = Nack(worker=0, session=first.session, batch=0, term=1, grant_id=first.grant_ids[0], reason="weights")
    rig.server.feed(nack)
    (again,) = rig.grants()
    assert again.key == second.key
    assert rig.blobs.get(again.key) is not None


def test_batches_without_a_usable_sample_make_a_version_and_change_no_weight(rig: Rig) -> None:
    before = rig.optimizer.weights.copy()
    rig.announce(0, 0, 1)
    rig.announce(1, 0, 1)
    for grant in rig.grants():
        rig.answer(grant, key="")
    update = rig.outbox.updates[-1]
    assert isinstance(update, Update)
    assert (update.version, update.n_samples, update.loss) == (1, 0, 0.0)
    assert update.members[0].dead == (100,)
    assert rig.optimizer.weights.tobytes() == before.tobytes()


def test_an_update_names_the_losses_of_the_replicas_on_shared_samples(rig: Rig) -> None:
    rig.announce(0, 0, 1)
    rig.announce(1, 0, 1)
    for grant, loss in zip(rig.grants(), (0.5, None), strict=True):
        rig.server.feed(answer(grant, grant.term, "", dead=(100,), shared_loss=loss))
    update = rig.outbox.updates[-1]
    assert isinstance(update, Update)
    assert [member.shared_loss for member in update.members] == [0.5, None]


def test_an_older_incarnation_is_fenced(rig: Rig) -> None:
    rig.announce(0, 0, 1)
    old = rig.sessions[0]
    rig.server.feed(Join(worker=0, process="newer"))
    assert rig.outbox.of(Fence) == [Fence(term=1, worker=0, process="i0")]
    welcome = rig.outbox.of(Welcome)[-1]
    assert (welcome.process, welcome.session > old) == ("newer", True)
    rig.server.feed(announce(0, old, 0, 2))
    assert rig.server.engine.counters["refused_fenced"] == 1


def test_it_measures_itself_once_a_second(rig: Rig) -> None:
    rig.now = 2.0
    rig.server.run_periodic()
    rig.server.run_periodic()
    (status,) = rig.outbox.statuses
    assert (status.term, status.version, status.durable_version, status.counters["joined"]) == (1, 0, 0, 2)
    assert [worker.is_live for worker in status.workers] == [True, True]
    assert status.workers[1].session > 0
    assert 0 < status.leader_since_s <= status.time_s
    assert status.time_s - status.workers[1].live_since_s == pytest.approx(rig.now), "Unix seconds of its Join"


def test_a_version_that_its_policy_sends_is_published_before_any_grant_of_it(rig: Rig) -> None:
    rig.server.engine.policy.recipients = lambda view: (1,)  # type: ignore[method-assign]
    rig.update()
    (record,) = rig.outbox.of(NewVersion)
    assert (record.worker, record.term, record.version) == (1, 1, 1)
    assert rig.blobs.get(record.key) is not None
    assert rig.grants() == []


def test_a_state_of_another_build_is_not_taken_for_one() -> None:
    checkpoint = Checkpoint(
        job="unit", fingerprint="", term=1, version=1, state=msgspec.msgpack.encode({"version": 1}), tensors={}
    )
    with pytest.raises(CheckpointError, match="version 1 of job 'unit' holds no engine state that this build reads"):
        decode_snapshot(checkpoint)


def test_staleness_and_bytes_are_in_the_status(rig: Rig) -> None:
    for _ in range(3):
        rig.update()
    measures = rig.server.status().measures
    assert measures is not None
    # In each update both workers read the version before it, which holds as many batches of either.
    assert measures.staleness == {-1: 6}
    blob_bytes = HEADER_BYTES + 4 * rig.size
    assert measures.gradient_bytes == measures.dense_gradient_bytes == 6 * blob_bytes
    assert measures.weights_bytes == 6 * blob_bytes, "each worker has read each of three versions once"


def test_the_last_status_has_everything_that_was_measured(rig: Rig) -> None:
    rig.update()
    rig.outbox.statuses.clear()
    rig.server.feed(StopRequested(reason="enough"))
    rig.turn_until(lambda: rig.server.engine.finished is not None)
    status = rig.outbox.statuses[-1]
    assert status.measures is not None
    assert (status.version, status.measures.staleness) == (1, {-1: 2})


def test_a_worker_is_blocked_from_its_push_or_its_batch_to_its_next_grant(rig: Rig) -> None:
    """What of the time between two pushes is neither computing nor waiting for the batch."""
    for worker in (0, 1):
        rig.announce(worker, 0, 1)
    for grant in rig.grants():
        rig.answer(grant)
    for worker in (0, 1):
        rig.announce(worker, 1, 2)
    rig.now += 10.0
    for grant, wait_s in zip(rig.grants(), (3.0, 30.0), strict=True):
        key = gradient_key("unit", grant.term, grant.grant_ids[0])
        rig.blobs.put(key, encode_blob(np.ones(rig.size, np.float32), job="unit", kind="g", version=1), 60.0)
        rig.server.feed(answer(grant, grant.term, key, n_samples=4, loss_sum=1.0, compute_s=2.0, wait_s=wait_s))
    measures = rig.server.status().measures
    assert measures is not None
    # The first one's batch was complete 3 s before it began; the second one's all the time, so it waited for 10 - 2 s.
    assert measures.blocked_s == pytest.approx(3.0 + 8.0)
    assert measures.computing_s == pytest.approx(4.0)
    assert measures.idle_s == pytest.approx(8.0 + 8.0)


def test_an_update_has_the_score_of_all_held_out_samples() -> None:
    counters: Counter[str] = Counter()
    assert held_out_score([], counters) is None
    parts = [[1.0, 2.0], [6.0]]
    scores = [
        HeldOutScore(
            n_samples=len(values), weight=0.5 * len(values), loss_sum=0.5 * sum(values),
            metric_sums={"right": 0.5 * len(values), "mean": to_bytes(metrics.mean(values)), "torn": b"?"},
        )
        for values in parts
    ]  # fmt: skip
    score = held_out_score(scores, counters)
    assert score is not None
    assert (score.n_samples, score.weight, score.loss_sum) == (3, 1.5, 4.5)
    assert score.metric_sums["right"] == pytest.approx(1.5)
    state = score.metric_sums["mean"]
    assert isinstance(state, bytes)
    assert from_bytes(state).compute() == 3.0
    assert "torn" not in score.metric_sums
    assert counters == {"refused_metric_states": 1}
