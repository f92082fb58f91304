"""`doll forget`: a model computed again without some records has the bits of a job in which these were dead letters."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doll.config import JobConfig, parse
from doll.consumers.intake.decoding import RawRecords
from doll.errors import ConfigError, FencedError
from doll.ledger import offset_ranges
from doll.ledger.offset_ranges import Span
from doll.ps.checkpointing import decode_snapshot
from doll.ps.engine import events as ev
from doll.ps.forgetting import save_without
from doll.ps.rollback import rollback
from doll.ps.server import update_record
from doll.records.control import Update
from doll.run.forgetting.recomputation import Recomputation, obstacle
from doll.run.forgetting.selection import Found, SampleReader, Selection, find
from doll.storage.checkpoints import Checkpoint, checksum_of
from fuzzing import seeds
from logged_runs import LoggedRun
from memory_stores import MemoryCheckpointStore

from doll_lab.simulation.learning import LearningWorld, jittered

pytestmark = pytest.mark.slow  # loads torch

DENSE = """
job: forgetful
task: {class: "examples.synthetic.task:Gaussian", args: {features: 4, hidden: [6]}}
data: {workers: 3, batch_size: 4}
source: {kind: python, of: examples.synthetic.source:gaussians, args: {features: 4, classes: 2}}
training: {policy: {name: doll, group_size: 2}, optimizer: {name: sgd, lr: 0.1, momentum: 0.9}, ema: {decay: 0.9}}
stop: {updates: 16}
"""
PARTS = """
job: forgetful
task: {class: "parts_task:Parts"}
data: {workers: 3, batch_size: 4}
source: {kind: python, of: parts_task:bags}
training: {policy: {name: bsp}, optimizer: {name: adam, lr: 0.05}}
stop: {updates: 12}
"""
POISON = b"no sample"


class RecordedWorld(LearningWorld):
    """A job in virtual time whose records and update records are kept. `poison`: offsets whose records are no samples.

    Attributes:
        models: tensors of each version.
    """

    def __init__(self, config: JobConfig, poison: Mapping[int, set[int]] | None = None) -> None:
        self.updates: list[Update] = []
        self.values: list[list[bytes]] = [[] for _ in range(config.data.num_partitions)]
        self.models: dict[int, dict[str, Any]] = {}
        super().__init__(config, compute_s=jittered(1.0, sigma=0.4, seed=1))
        self._streams = [
            self._kept(stream, number, (poison or {}).get(number, set())) for number, stream in enumerate(self._streams)
        ]
        self.models[0] = self._copied()
        self.run()

    def _kept(self, stream: Iterator[bytes], partition: int, poison: set[int]) -> Iterator[bytes]:
        for offset, value in enumerate(stream):
            self.values[partition].append(POISON if offset in poison else value)
            yield self.values[partition][-1]

    def _evaluate(self) -> Any:
        """Measure nothing: the tasks have no held-out samples."""

    def _copied(self) -> dict[str, Any]:
        return {name: np.array(tensor) for name, tensor in self._host.tensors().items()}

    def perform(self, action: ev.EngineAction) -> ev.Event | None:
        outcome = super().perform(action)
        if isinstance(action, ev.ApplyUpdate):
            samples = sum(item.num_samples for item in action.sets)
            self.updates.append(
                update_record(action, term=1, num_samples=samples, apply_s=0.0, now=self.now, counters=Counter())
            )
            self.models[action.version] = self._copied()
        return outcome

    def read(self, partition: int, lo: int, hi: int) -> RawRecords:
        return RawRecords(range(lo, hi), self.values[partition][lo:hi], partition)


def recomputed(
    world: RecordedWorld, without: Mapping[int, list[Span]], start: Checkpoint | None = None
) -> Recomputation:
    ages = [each.version - 1 - item.base_version for each in world.updates for item in each.members if item.n_samples]
    model = Recomputation(world.config, start, world.read, without=without, max_age=max(ages))
    for update in world.updates:
        if update.version > model.version:
            model.apply(update)
    return model


def chosen(rng: random.Random, world: RecordedWorld, most: int) -> dict[int, set[int]]:
    """Random offsets of learned records."""
    learned = [
        (item.partition, at) for each in world.updates for item in each.members for at in range(item.lo, item.hi)
    ]
    places: dict[int, set[int]] = {}
    for partition, offset in rng.sample(learned, rng.randint(1, most)):
        places.setdefault(partition, set()).add(offset)
    return places


def spans_of(places: Mapping[int, set[int]]) -> dict[int, list[Span]]:
    return {partition: offset_ranges.points(sorted(offsets)) for partition, offsets in places.items()}


def is_complete(world: RecordedWorld, version: int) -> bool:
    """Whether no later gradient is of an earlier version."""
    later = [item for each in world.updates if each.version > version for item in each.members if item.n_samples]
    return all(item.base_version >= version for item in later)


def shape_of(updates: list[Update]) -> list[Any]:
    return [[(item.partition, item.batch, item.base_version) for item in each.members] for each in updates]


JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "doll": (DENSE, ()),
    "doll, a schedule": (DENSE, ("training.schedule={class: torch.optim.lr_scheduler.StepLR, args: {step_size: 5}}",)),
    "recent versions": (DENSE, ("training.policy.staleness=2", "training.policy.group_size=2")),
    "asp": (DENSE, ("training.policy={name: asp}",)),
    "adam, sums": (DENSE, ("training.optimizer={name: adam, lr: 0.01}", "training.reduction=sum")),
    "tables and batch norm": (PARTS, ()),
    "tables, groups": (PARTS, ("training.policy={name: doll, group_size: 3}",)),
}


@pytest.fixture(scope="module")
def worlds() -> dict[str, RecordedWorld]:
    return {name: RecordedWorld(parse(job, overrides)) for name, (job, overrides) in JOBS.items()}


@pytest.mark.parametrize("name", JOBS)
def test_with_all_records_it_is_the_model_of_the_job_to_the_bit(name: str, worlds: dict[str, RecordedWorld]) -> None:
    world = worlds[name]
    model = recomputed(world, {})
    assert checksum_of(model.tensors()) == checksum_of(world.models[world.engine.version])
    assert model.samples == sum(update.n_samples for update in world.updates)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", seeds(20))
def test_without_records_it_is_the_model_of_a_job_that_refused_them(
    name: str, seed: int, worlds: dict[str, RecordedWorld]
) -> None:
    world, rng = worlds[name], random.Random(seed)
    places = chosen(rng, world, 12)
    refusing = RecordedWorld(world.config, places)
    assert shape_of(refusing.updates) == shape_of(world.updates), "else the two cannot be compared"
    first = min(
        update.version for update in world.updates for item in update.members
        if places.get(item.partition, set()) & set(range(item.lo, item.hi))
    )  # fmt: skip
    begin = rng.choice([at for at in range(first) if is_complete(world, at)])
    start = Checkpoint(job="forgetful", fingerprint="", term=1, version=begin, state=b"", tensors=world.models[begin])
    expected = refusing.models[refusing.engine.version]
    removed = recomputed(world, spans_of(places))
    assert checksum_of(removed.tensors()) == checksum_of(expected)
    assert checksum_of(recomputed(world, spans_of(places), start).tensors()) == checksum_of(expected)
    assert checksum_of(expected) != checksum_of(world.models[world.engine.version])
    assert removed.samples == sum(update.n_samples for update in world.updates) - sum(map(len, places.values()))


def test_a_batch_of_which_nothing_is_left_makes_an_update_without_it(worlds: dict[str, RecordedWorld]) -> None:
    world = worlds["doll"]
    member = world.updates[7].members[0]
    places = {member.partition: set(range(member.lo, member.hi))}
    refusing = RecordedWorld(world.config, places)
    assert shape_of(refusing.updates) == shape_of(world.updates)
    assert checksum_of(recomputed(world, spans_of(places)).tensors()) == checksum_of(
        refusing.models[refusing.engine.version]
    )


def test_other_data_or_another_task_is_refused(worlds: dict[str, RecordedWorld]) -> None:
    world = worlds["doll"]

    def shorter(partition: int, lo: int, hi: int) -> RawRecords:
        return RawRecords(range(lo + 1, hi), world.values[partition][lo + 1 : hi], partition)

    def other(partition: int, lo: int, hi: int) -> RawRecords:
        return RawRecords(range(lo, hi), [POISON, *world.values[partition][lo + 1 : hi]], partition)

    for read, said in (
        (shorter, "does not hold the records 0 to 0 of partition"),
        (other, "was learned and is refused now (expected 20 bytes"),
    ):
        model = Recomputation(world.config, None, read, without={})
        with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
            model.apply(world.updates[0])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("training.policy.name=essp",), "workers send steps"),
        (("blobs.contributions=bf16",), "rounds gradients"),
        ((), ""),
        (("training.policy={name: asp}",), ""),
    ],
)
def test_jobs_whose_updates_depend_on_what_no_record_holds_are_refused(overrides: tuple[str, ...], said: str) -> None:
    assert said in obstacle(parse(DENSE.replace("name: doll, group_size: 2", "name: doll"), overrides))
    assert bool(said) == bool(obstacle(parse(DENSE.replace("name: doll, group_size: 2", "name: doll"), overrides)))


# --- the checkpoint store --------------------------------------------------------------------------------------------


def newest_of(store: MemoryCheckpointStore) -> Checkpoint:
    checkpoint = store.load_newest(None)
    assert checkpoint is not None
    return checkpoint


def test_the_model_without_records_is_the_newest_and_no_rollback_goes_before_it(tmp_path: Path) -> None:
    store = MemoryCheckpointStore("replayed", keep=100)
    run = LoggedRun(tmp_path, store, seed=3)
    run.play(9)
    run.close()
    before = newest_of(store)
    state = decode_snapshot(before)
    tensors = {name: tensor * 2 if tensor.dtype == np.float32 else tensor for name, tensor in before.tensors.items()}
    saved = save_without(run.config, store, before, tensors, [((1, 3),), (), ((24, 25),)], 3)
    now, after = newest_of(store), decode_snapshot(newest_of(store))
    assert (now.version, now.term) == (before.version + 1, saved.term) > (before.version, before.term)
    np.testing.assert_array_equal(now.tensors["weights"], tensors["weights"])
    assert after.samples_total == state.samples_total - 3
    assert after.origins == tuple(
        origin + 4 * count for origin, count in zip(state.origins, state.applied, strict=True)
    ), "no batch is learned again"
    assert (after.grid, after.rolled_back_to) == (state.grid + 1, before.version)
    assert after.rollbacks[-1].forgot == (((1, 3),), (), ((24, 25),))
    # It goes on, and what it has removed stays removed.
    later = LoggedRun(tmp_path, store, seed=4)
    later.play(4)
    later.close()
    assert decode_snapshot(newest_of(store)).rollbacks == after.rollbacks
    for version in [version for _, version in store.versions() if version < now.version]:
        with pytest.raises(ConfigError, match=f"expected version {now.version} or a later one, got {version}"):
            rollback(run.config, store, version, skip=True)
    assert rollback(run.config, store, now.version, skip=True).to == now.version
    assert decode_snapshot(newest_of(store)).rollbacks[0] == after.rollbacks[0]


def test_a_server_that_saved_meanwhile_wins(tmp_path: Path) -> None:
    store = MemoryCheckpointStore("replayed", keep=100)
    run = LoggedRun(tmp_path, store, seed=3)
    run.play(6)
    before = newest_of(store)
    run.play(6)
    run.close()
    with pytest.raises(FencedError, match="run doll forget again"):
        save_without(run.config, store, before, before.tensors, [((1, 3),), (), ()], 2)
    assert not decode_snapshot(newest_of(store)).rollbacks


# --- the command line -------------------------------------------------------------------------------------------------


def test_what_is_selected(tmp_path: Path) -> None:
    keys, places = tmp_path / "keys", tmp_path / "places"
    keys.write_bytes(b"anna\r\nbert\n\n\xffodd\n")
    places.write_text("0/7\n\n1/3-9\n0/8\n")
    selection = Selection.parse(keys, "user", ["2/5"], places)
    assert selection.keys == {b"anna", b"bert", b"\xffodd"}
    assert selection.spans == {0: [(7, 9)], 1: [(3, 10)], 2: [(5, 6)]}
    for arguments, said in (
        ((None, "", [], None), "expected records to remove: --keys FILE"),
        ((None, "user", ["0/1"], None), "--field: expected --keys too"),
        ((None, "", ["0:1"], None), "expected PARTITION/OFFSET or PARTITION/FIRST-LAST"),
        ((None, "", ["0/9-3"], None), "not above the last one"),
        ((tmp_path / "none", "", [], None), "cannot read"),
    ):
        with pytest.raises(ConfigError, match=said):
            Selection.parse(*arguments)
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(ConfigError, match="expected records to remove"):
        Selection.parse(empty, "", [], None)


class _Message:
    def __init__(self, offset: int, key: bytes | None, value: bytes) -> None:
        self._offset, self._key, self._value = offset, key, value

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes:
        return self._value


class _Topic:
    """Two partitions of ten records with keys and fields, and a ledger that has learned the first seven of each."""

    origins = (2, 0)

    def bounds_of_partitions(self, topic: str, partitions: range) -> dict[int, tuple[int, int]]:
        return dict.fromkeys(partitions, (0, 10))

    def client_messages(self, topic: str, partition: int, lo: int, hi: int) -> Iterator[_Message]:
        for offset in range(lo, hi):
            user: Any = f"user-{offset % 4}" if partition else offset % 4
            value = json.dumps({"user": user}).encode() if offset != 5 else b"{"
            yield _Message(offset, None if offset == 4 else b"key-%d" % (offset % 3), value)

    def offset_state(self, partition: int, offset: int) -> str:
        return "dead" if offset == 3 else "applied" if offset < 7 else "pending"


def test_records_are_found_by_key_by_field_and_by_offset(tmp_path: Path) -> None:
    topic: Any = _Topic()
    keys, config = tmp_path / "keys", parse(DENSE)

    def found(*places: str, field: str = "", text: str = "") -> Found:
        keys.write_text(text)
        return find(config, topic, topic, Selection.parse(keys if text else None, field, places, None))

    assert found(text="key-0") == Found({0: [(6, 7)], 1: [(0, 1), (6, 7)]}, {0: [(9, 10)], 1: [(9, 10)]}, 2)
    assert found(text="2\n", field="user") == Found({0: [(2, 3), (6, 7)]}, {}, 0), "numbers are keys, too"
    assert found(text="user-1", field="user") == Found({1: [(1, 2)]}, {1: [(9, 10)]}, 0), "of 5 the field is not known"
    assert found("0/0-99") == Found({0: [(2, 3), (4, 7)]}, {0: [(7, 10)]}, 1), "before the origin is not of the job"
    assert found("1/12") == Found({}, {}, 0)
    with pytest.raises(ConfigError, match="expected a partition from 0 to 1, got 2"):
        found("2/1")


def test_batches_are_read_ahead_and_each_once() -> None:
    topic: Any = _Topic()
    reader = SampleReader(parse(DENSE), topic)
    assert list(reader.read(0, 4, 6).offsets) == [4, 5]
    assert list(reader.read(0, 8, 9).offsets) == [8]
    assert list(reader.read(0, 6, 8).offsets) == [6, 7], "out of order"
    assert list(reader.read(0, 0, 2).offsets) == [0, 1], "before the first"
    assert list(reader.read(1, 2, 4).offsets) == [2, 3]


def test_the_form_of_a_certificate() -> None:
    from doll.run.forgetting.forget import Certificate

    given = Certificate(
        job="j", run_id="r", before=9, version=10, records=2, samples=3, ranges=((0, 4, 5),), keys=1, field="user",
        begun_with=4, updates=5, control="equal", later=1, others=2, still_held=("backups",), path="p",
    )  # fmt: skip
    said = given.text()
    assert "version 10 of j is version 9 without 2 records (3 samples): 5 updates computed again from version 4" in said
    assert "1 more of these records come after the end" in said
    assert "\n    backups\n  certificate: p" in said
    assert json.loads(json.dumps(given.to_dict()))["ranges"] == [[0, 4, 5]]
    assert "the model is not changed" in replace(given, records=0, version=-1).text()
    assert "(--dry-run)" in replace(given, version=-1).text()
