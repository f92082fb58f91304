"""Checkpoints that contain only the rows that have changed: what every `CheckpointStore` must do with them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import doll.storage.checkpoints
import doll.storage.differences
import numpy as np
import pytest
import structlog
from checkpoint_kits import Kit, checkpoint, same
from doll.errors import CheckpointError
from doll.storage.checkpoints import (
    BaseDeletedError,
    Checkpoint,
    CheckpointStore,
    checkpoint_name,
    decode_checkpoint,
    part_name,
)
from doll.storage.differences import MAX_DIFFERENCES, Base, BaseReference, ChangedRows
from doll.storage.file_checkpoints import FileCheckpointStore
from doll.storage.version_marks import VersionMarks
from fuzzing import seeds
from memory_stores import MemoryCheckpointStore

NUM_ROWS, WIDTH = 6000, 5


@pytest.fixture(autouse=True)
def small_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doll.storage.differences, "MIN_BASE_BYTES", 0)


class Model:
    """A dense part, a table, and a table whose rows become more and fewer."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.version = 0
        self.dense = self.rng.standard_normal(20, np.float32)
        self.values = self.rng.standard_normal((NUM_ROWS, WIDTH), np.float32)
        self.state = np.zeros((0, 3), np.float32)
        self.changed = {"values": np.zeros(NUM_ROWS, np.int64), "state": np.zeros(0, np.int64)}

    def update(self, num_rows: int = 3, num_new: int = 0) -> None:
        self.version += 1
        self.dense = self.rng.standard_normal(20, np.float32)
        rows = self.rng.choice(NUM_ROWS, num_rows, replace=False)
        self.values[rows] = self.rng.standard_normal((num_rows, WIDTH), np.float32)
        self.changed["values"][rows] = self.version
        new = self.rng.standard_normal((num_new, 3), np.float32)
        self.state = np.concatenate([self.state, new])
        self.changed["state"] = np.concatenate([self.changed["state"], np.full(num_new, self.version)])

    def checkpoint(self, term: int = 1) -> Checkpoint:
        changed = {name: versions.copy() for name, versions in self.changed.items()}

        def changes(since: int) -> dict[str, ChangedRows]:
            rows = {name: np.flatnonzero(versions > since) for name, versions in changed.items()}
            return {"values": ChangedRows(rows["values"], WIDTH), "state": ChangedRows(rows["state"], 3)}

        tensors = {"weights": self.dense.copy(), "values": self.values.copy(), "state": self.state.copy()}
        return Checkpoint(
            job="digits", fingerprint="f1", term=term, version=self.version, state=b"s", tensors=tensors,
            changes=changes,
        )  # fmt: skip


def is_whole(store: CheckpointStore, version: int, term: int = 1) -> bool:
    return store.read_head(term, version).base is None


def saved(store: CheckpointStore, *num_rows: int) -> list[Checkpoint]:
    """Save a checkpoint after each update that changes so many rows."""
    model, made = Model(), []
    for count in num_rows:
        model.update(count)
        made.append(model.checkpoint())
        store.save(made[-1])
    return made


@pytest.mark.parametrize("seed", seeds(10))
def test_what_is_loaded_is_what_a_whole_checkpoint_has(kit: Kit, seed: int) -> None:
    store, model, held, term = kit.store, Model(seed), dict[int, Checkpoint](), kit.store.claim_term()
    for _ in range(25):
        for _ in range(model.rng.integers(1, 4)):
            model.update(int(model.rng.choice([0, 1, 5, 30, NUM_ROWS])), int(model.rng.choice([0, 0, 1, 40])))
        if model.rng.random() < 0.1:
            store = kit.again("digits")  # a restart
            term = store.claim_term()
        held[model.version] = model.checkpoint(term)
        store.save(held[model.version])
        if model.rng.random() < 0.2:
            pinned = int(model.rng.choice([version for _, version in store.versions()]))
            store.change_marks(functools.partial(VersionMarks.with_pin, version=pinned))
        assert same(store.load_newest("f1"), held[model.version])
    kinds = set()
    for at, version in kit.again("digits").versions():
        kinds.add(is_whole(store, version, at))
        for in_place in (False, True):
            assert same(kit.again("digits").load_newest("f1", version, in_place=in_place), held[version])
    assert kinds == {True, False}
    assert set(store.read_marks().pins) <= {version for _, version in store.versions()}


def test_only_changed_rows_are_written(kit: Kit) -> None:
    saved(kit.store, 3, NUM_ROWS // 100)
    whole, difference = kit.store.stored()
    assert difference.size_bytes < 0.05 * whole.size_bytes
    assert kit.store.whole_bytes(whole) == whole.size_bytes
    assert 0.9 < kit.store.whole_bytes(difference) / whole.size_bytes <= 1


def test_tensors_that_stay_in_their_file_outlive_it_and_do_not_change_it(kit: Kit) -> None:
    made = saved(kit.store, 3, 3)
    held = kit.store.load_newest("f1", in_place=True)
    assert held is not None
    assert not any(tensor.flags.writeable for tensor in held.tensors.values())
    assert same(kit.store.load_newest("f1", 1), made[0])
    for version in range(3, 9):
        kit.store.save(checkpoint(1, version))
    assert same(held, made[1])


def test_a_whole_one_is_due_when_the_differences_have_as_many_bytes(kit: Kit) -> None:
    saved(kit.store, 3, NUM_ROWS // 2, NUM_ROWS // 3, NUM_ROWS // 100, 3)
    kept = {version: is_whole(kit.store, version) for _, version in kit.store.versions()}
    assert kept == {1: True, 3: True, 4: False, 5: False}


def test_a_whole_one_is_due_after_many_differences() -> None:
    base = Base(1, BaseReference(1, b""), 10**9)
    for _ in range(MAX_DIFFERENCES):
        assert base.is_worth(1)
        base.note_difference(1)
    assert not base.is_worth(1)


def test_a_small_checkpoint_is_whole(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doll.storage.differences, "MIN_BASE_BYTES", 1 << 20)
    saved(kit.store, 3, 3)
    assert is_whole(kit.store, 2)


def test_the_first_of_a_term_and_a_repeated_one_are_whole(kit: Kit) -> None:
    model = Model()
    for term, num_saves in ((1, 1), (1, 2), (2, 1)):
        model.update()
        for _ in range(num_saves):
            kit.store.save(model.checkpoint(term))
    assert [is_whole(kit.store, version, term) for term, version in kit.store.versions()] == [True, False, True]
    kit.store.save(model.checkpoint(2))  # again: it must not become the difference to itself
    assert same(kit.again("digits").load_newest("f1"), model.checkpoint(2))


def test_bases_are_kept_and_one_whole_one_before_them(kit: Kit) -> None:
    made = saved(kit.store, 1, *[1] * 9, NUM_ROWS, *[1] * 9)
    assert [version for _, version in kit.store.versions()] == [1, 11, 18, 19, 20]
    assert [is_whole(kit.store, version) for _, version in kit.store.versions()] == [True, True, False, False, False]
    for version in (11, 20):
        kit.damage(1, version)
    with structlog.testing.capture_logs() as logs:
        assert same(kit.store.load_newest("f1"), made[0])
    assert any(checkpoint_name(1, 11) in str(entry.get("error")) for entry in logs)


def test_marks_keep_bases(kit: Kit) -> None:
    model, made = Model(), dict[int, Checkpoint]()

    def save(num_rows: int) -> None:
        model.update(num_rows)
        made[model.version] = model.checkpoint()
        kit.store.save(made[model.version])

    for num_rows in (1, 1, 1):
        save(num_rows)
    kit.store.change_marks(lambda marks: marks.with_alias("stable", 3).with_pin(2))
    for _ in range(12):
        save(NUM_ROWS)
    assert [version for _, version in kit.store.versions()][:3] == [1, 2, 3]
    assert same(kit.again("digits").load_newest("f1", 3), made[3])
    kit.store.change_marks(lambda marks: marks.without_alias("stable").without_pin(2))
    save(NUM_ROWS)
    assert [version for _, version in kit.store.versions()] == [14, 15, 16]


def test_another_process_keeps_bases_too(kit: Kit) -> None:
    saved(kit.store, *[1] * 6)
    for version in (20, 30):
        kit.again("digits").save(checkpoint(2, version))
    assert kit.store.versions() == [(1, 1), (1, 6), (2, 20), (2, 30)]
    kit.again("digits").save(checkpoint(2, 40))
    assert kit.store.versions() == [(2, 20), (2, 30), (2, 40)]


def test_a_base_is_deleted_only_with_its_differences(kit: Kit) -> None:
    saved(kit.store, *[1] * 3, NUM_ROWS, NUM_ROWS, NUM_ROWS)
    kit.store.change_marks(lambda marks: marks.with_pin(4))
    saved_keys = kit.store.versions()
    assert saved_keys == [(1, 4), (1, 5), (1, 6)]
    model = Model()
    model.version = 10
    for _ in range(4):
        model.update(1)
        kit.store.save(model.checkpoint(2))
    assert kit.store.versions()[-4:] == [(2, 11), (2, 12), (2, 13), (2, 14)]
    with pytest.raises(CheckpointError, match=r"checkpoint-00000002-0000000011.doll cannot be deleted: .* that stay"):
        kit.again("digits").delete([(2, 11), (2, 12)])
    assert (2, 12) in kit.store.versions()
    kit.again("digits").delete([(2, 12), (2, 13)])
    kit.store.save(checkpoint(3, 20))
    kit.again("digits").delete([(2, 11), (2, 14)])
    assert kit.store.versions()[-1] == (3, 20)


def test_a_damaged_base_is_named(kit: Kit) -> None:
    saved(kit.store, 1, 1)
    kit.damage(1, 1)
    with pytest.raises(CheckpointError, match=r"version 2 is damaged \(checkpoint-00000001-0000000001.doll, on which"):
        kit.store.load_newest("f1", 2)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        kit.store.load_newest("f1")


def test_a_base_that_was_deleted_meanwhile_makes_the_next_one_whole(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()

    def save() -> None:
        model.update(1)
        kit.store.save(model.checkpoint())

    save()
    model.update(1)
    encode = kit.store._encode

    def encode_late(*args: Any) -> Any:
        encoded = encode(*args)
        other.save(checkpoint(1, 2))
        other.delete([(1, 1)])
        return encoded

    other = kit.again("digits")
    monkeypatch.setattr(kit.store, "_encode", encode_late)
    with pytest.raises(CheckpointError, match=r"checkpoint-00000001-0000000001.doll was deleted: the next save is"):
        kit.store.save(model.checkpoint())
    monkeypatch.setattr(kit.store, "_encode", encode)
    kit.store.save(model.checkpoint())
    assert same(kit.again("digits").load_newest("f1"), model.checkpoint())
    assert is_whole(kit.store, 2)


# --- parts of shards ------------------------------------------------------------------------------------------------


class Shards:
    """Two shards with a model each, and their server. Their models have equal names, so only one of them is joined."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store, self.models = store, (Model(0), Model(1))
        self.bases: dict[tuple[int, int], BaseReference] = {}

    def save(self, num_rows: int = 1, base: int = 0) -> list[dict[str, Any]]:
        """Save a checkpoint after an update, with the base of this version, and return the tensors of its parts."""
        made = []
        for model in self.models:
            model.update(num_rows)
            made.append(model.checkpoint())
        parts = tuple(
            self.store.save_part(each, number, 2, self.bases.get((number, base))) for number, each in enumerate(made)
        )
        self.store.save(dataclasses.replace(made[0], tensors={}, parts=parts, changes=None))
        version = made[0].version
        self.bases |= {
            (part.number, version): BaseReference(version, part.checksum) for part in parts if part.base is None
        }
        return [dict(each.tensors) for each in made]

    def read(self, store: CheckpointStore, version: int) -> list[dict[str, Any]]:
        parts = store.read_head(1, version).parts
        return [dict(store.read_part(1, version, part).tensors) for part in parts]


def test_parts_are_differences_to_the_parts_of_one_base(kit: Kit) -> None:
    shards = Shards(kit.store)
    made = {version: shards.save(3, base) for version, base in ((1, 0), (2, 1), (3, 1))}
    made[4] = shards.save(NUM_ROWS, 1)  # a difference would be no smaller
    made[5] = shards.save(1, 4)
    for version, expected in made.items():
        if version in (1, 2):
            continue
        for got, tensors in zip(shards.read(kit.again("digits"), version), expected, strict=True):
            assert got.keys() == tensors.keys()
            assert all(got[name].tobytes() == tensors[name].tobytes() for name in tensors)
            assert not any(tensor.flags.writeable for tensor in got.values())
    heads = {version: kit.store.read_head(1, version) for _, version in kit.store.versions()}
    assert {version: head.base_version for version, head in heads.items()} == {1: None, 3: 1, 4: None, 5: 4}
    sizes = {version: sum(part.size_bytes for part in head.parts) for version, head in heads.items()}
    assert sizes[5] < 0.05 * sizes[4]
    for item in kit.store.stored():
        assert 0.9 < kit.store.whole_bytes(item) / sizes[4] < 1.1


def test_the_base_of_parts_is_deleted_only_with_them(kit: Kit) -> None:
    shards = Shards(kit.store)
    for base in (0, *[1] * 6):
        shards.save(1, base)
    assert [version for _, version in kit.store.versions()] == [1, 5, 6, 7]
    with pytest.raises(CheckpointError, match=r"checkpoint-00000001-0000000001.doll cannot be deleted: .* that stay"):
        kit.again("digits").delete([(1, 1)])
    for version in (10, 20, 30):
        kit.again("digits").save(checkpoint(2, version))
    assert kit.store.versions() == [(2, 10), (2, 20), (2, 30)]
    with pytest.raises(FileNotFoundError):
        kit.store._read_file(part_name(1, 1, 0, 2))


def test_a_base_of_parts_that_was_deleted_meanwhile_is_found_out(kit: Kit) -> None:
    shards = Shards(kit.store)
    shards.save()
    shards.bases[0, 9] = BaseReference(0, b"")
    with pytest.raises(BaseDeletedError, match=r"checkpoint-00000001-0000000000.doll was deleted: the next save is"):
        shards.save(1, 9)


def test_a_part_without_its_base_is_named(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path, "digits")
    shards = Shards(store)
    shards.save()
    expected = shards.save(1, 1)
    base = tmp_path / part_name(1, 1, 1, 2)
    data = base.read_bytes()
    for change, reason in (
        (base.unlink, "is missing: this file contains only the rows that have changed since"),
        (lambda: base.write_bytes((tmp_path / part_name(1, 1, 0, 2)).read_bytes()), "is not the checkpoint on which"),
        (lambda: base.write_bytes(data[:-1]), "on which it is based: the checksum does not match"),
        (lambda: base.write_bytes(b""), "on which it is based: "),
    ):
        change()
        for with_parts in (True, False):
            with pytest.raises(CheckpointError, match=f"version 2 is damaged .*part-1-of-2.doll.*{reason}"):
                store.load_newest("f1", 2, with_parts=with_parts)
    base.write_bytes(data)
    assert shards.read(store, 2)[1].keys() == expected[1].keys()


# --- files ----------------------------------------------------------------------------------------------------------


def path_of(folder: Path, version: int) -> Path:
    return folder / checkpoint_name(1, version)


def with_checksum(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def test_a_missing_base_is_named_and_the_older_whole_one_is_used(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path, "digits", keep=4)
    made = saved(store, 1, NUM_ROWS, 1, 1)
    path_of(tmp_path, 2).unlink()
    with pytest.raises(CheckpointError, match=r"version 4 is damaged \(checkpoint-00000001-0000000002.doll is missing"):
        store.load_newest("f1", 4)
    with structlog.testing.capture_logs() as logs:
        assert same(store.load_newest("f1"), made[0])
    assert [entry["file"] for entry in logs] == [checkpoint_name(1, 4), checkpoint_name(1, 3)]


def test_another_checkpoint_in_place_of_the_base_is_found_out(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path, "digits")
    saved(store, 1, 1)
    other = Model(seed=1)
    other.update()
    FileCheckpointStore(tmp_path / "other", "digits").save(other.checkpoint())
    path_of(tmp_path, 1).write_bytes(path_of(tmp_path / "other", 1).read_bytes())
    with pytest.raises(CheckpointError, match=r"version 2 is damaged \(.*0001.doll is not the checkpoint on which"):
        store.load_newest("f1", 2, in_place=True)


def test_a_copy_of_the_folder_has_all(tmp_path: Path) -> None:
    import shutil

    made = saved(FileCheckpointStore(tmp_path / "a", "digits"), 1, 1, 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    assert same(FileCheckpointStore(tmp_path / "b", "digits").load_newest("f1"), made[2])


def test_a_difference_alone_is_refused(tmp_path: Path) -> None:
    saved(FileCheckpointStore(tmp_path, "digits"), 1, 1)
    data = path_of(tmp_path, 2).read_bytes()
    assert data[4] == 3  # earlier releases refuse it: without the other rows, it is another model
    with pytest.raises(CheckpointError, match="got the difference to version 1: read it with the store"):
        decode_checkpoint(data)


@pytest.mark.parametrize("step", ["write", "rename", "fsync", "delete"])
def test_a_crash_leaves_a_readable_newest_checkpoint(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step of each save, what is in the folder is what a process that dies there leaves."""
    store = FileCheckpointStore(tmp_path, "digits")
    monkeypatch.setattr(doll.storage.differences, "MIN_BASE_BYTES", 0)
    model, newest = Model(), dict[int, Checkpoint]()

    def look(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for each in (False, True):
            loaded = FileCheckpointStore(tmp_path, "digits").load_newest("f1", in_place=each)
            if loaded is None:
                assert model.version == 1
            else:
                assert same(loaded, newest[loaded.version])
                assert loaded.version >= model.version - 1
        return before(*args, **kwargs)

    target = {
        "write": "doll.storage.file_checkpoints.fault_point", "rename": "pathlib.Path.replace",
        "fsync": "doll.storage.file_checkpoints._fsync_folder", "delete": "pathlib.Path.unlink",
    }[step]  # fmt: skip
    original = _resolved(target)
    monkeypatch.setattr(target, lambda *args, **kwargs: look(original, *args, **kwargs))
    for num_rows in (1, 1, NUM_ROWS, 1, 1, 1, NUM_ROWS, NUM_ROWS, 1, 1, 1):
        model.update(num_rows)
        newest[model.version] = model.checkpoint()
        store.save(newest[model.version])


def _resolved(target: str) -> Any:
    module, _, name = target.rpartition(".")
    return getattr(Path if module == "pathlib.Path" else __import__(module, fromlist=[name]), name)


def hostile(data: bytes) -> Iterator[bytes]:
    """Differential checkpoints with a valid checksum and a changed byte."""
    for at in range(16, len(data) - 32, max(1, len(data) // 400)):
        for flip in (0x01, 0x80, 0xFF):
            body = bytearray(data[:-32])
            body[at] ^= flip
            yield with_checksum(bytes(body))


@pytest.mark.slow
def test_hostile_differences_are_refused_or_read(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path, "digits")
    model = Model()
    model.update()
    store.save(model.checkpoint())
    model.update(2, 1)
    store.save(model.checkpoint())
    data = path_of(tmp_path, 2).read_bytes()
    refused = 0
    for changed in hostile(data):
        path_of(tmp_path, 2).write_bytes(changed)
        try:
            store.load_newest(None, 2, in_place=True)
        except CheckpointError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (2**62, WIDTH)}, {"shape": (NUM_ROWS + 1, WIDTH)}, {"shape": (2, WIDTH)}, {"shape": ()},
        {"shape": (NUM_ROWS, WIDTH + 1)}, {"rows": "nothing"}, {"rows": "weights"},
    ],
)  # fmt: skip
def test_a_patch_that_does_not_fit_is_damage(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    store, model = MemoryCheckpointStore("digits"), Model()
    encode = doll.storage.checkpoints.encode_checkpoint

    def changed(checkpoint: Checkpoint, base: Any = None, patches: Any = None, whole_bytes: int = 0) -> Any:
        patches = dict(patches or {})
        if base is not None:
            patches["values"] = msgspec.structs.replace(patches["values"], **change)
        return encode(checkpoint, base, patches, whole_bytes)

    monkeypatch.setattr(doll.storage.checkpoints, "encode_checkpoint", changed)
    for _ in range(2):
        model.update()
        store.save(model.checkpoint())
    with pytest.raises(CheckpointError, match=r"version 2 is damaged \(the changed rows do not fit checkpoint-0"):
        store.load_newest(None, 2)
