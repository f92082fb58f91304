"""What every `CheckpointStore` must do."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import structlog
from checkpoint_kits import Kit, checkpoint, same
from doll.errors import CheckpointError, FencedError, VersionUnknownError
from doll.storage.checkpoints import Checkpoint, CheckpointStore, part_name, resolve_version
from doll.storage.version_marks import VersionMarks
from fuzzing import seeds
from standby_scenario import StandbyScenario


@pytest.mark.slow
def test_an_empty_store_has_nothing(kit: Kit) -> None:
    assert kit.store.load_newest("f1") is None
    assert kit.store.versions() == []
    assert kit.store.newest_term() == 0


def test_what_is_saved_is_loaded(kit: Kit) -> None:
    kit.store.save(checkpoint(1, 20))
    assert same(kit.store.load_newest("f1"), checkpoint(1, 20))
    assert same(kit.again("digits").load_newest(None), checkpoint(1, 20))


def test_tensors_that_stay_in_their_file_outlive_it(kit: Kit) -> None:
    kit.store.save(checkpoint(1, 20))
    held = kit.store.load_newest("f1", in_place=True)
    assert same(held, checkpoint(1, 20))
    for version in range(21, 26):
        kit.store.save(checkpoint(1, version))
    assert (1, 20) not in kit.store.versions()
    assert same(held, checkpoint(1, 20))
    assert held is not None
    assert not any(tensor.flags.writeable for tensor in held.tensors.values())


@pytest.mark.slow
def test_a_higher_term_is_newer_than_a_higher_version(kit: Kit) -> None:
    kit.store.save(checkpoint(1, 20))
    kit.store.save(checkpoint(1, 40))
    kit.store.save(checkpoint(2, 25))
    assert same(kit.store.load_newest("f1"), checkpoint(2, 25))
    assert kit.store.versions() == [(1, 20), (1, 40), (2, 25)]
    assert kit.store.newest_term() == 2


def test_keeps_the_newest(kit: Kit) -> None:
    for version in range(0, 100, 10):
        kit.store.save(checkpoint(1, version))
    assert kit.store.versions() == [(1, 70), (1, 80), (1, 90)]
    kit.store.save(checkpoint(2, 5))
    assert kit.store.versions() == [(1, 80), (1, 90), (2, 5)]


def test_a_save_may_be_repeated(kit: Kit) -> None:
    kit.store.save(checkpoint(1, 20))
    kit.store.save(checkpoint(1, 20))
    assert kit.store.versions() == [(1, 20)]


@pytest.mark.slow
def test_a_repeated_save_that_is_fenced_leaves_what_is_durable(kit: Kit) -> None:
    """A server that is told to stop saves its version once more, with newer state, while a successor claims."""
    old = kit.store.claim_term()
    kit.store.save(checkpoint(old, 20))
    kit.store.save(dataclasses.replace(checkpoint(old, 20), state=b"later"))
    assert kit.again("digits").claim_term() == old + 1
    with pytest.raises(FencedError):
        kit.store.save(dataclasses.replace(checkpoint(old, 20), state=b"later still"))
    assert kit.store.versions() == [(old, 20)]
    assert same(kit.store.load_newest("f1"), dataclasses.replace(checkpoint(old, 20), state=b"later"))


def test_a_term_does_not_go_back(kit: Kit) -> None:
    kit.store.save(checkpoint(1, 20))
    with pytest.raises(CheckpointError, match="got 10"):
        kit.store.save(checkpoint(1, 10))
    assert kit.store.versions() == [(1, 20)]


@pytest.mark.slow
def test_claims_rise_above_all_that_was_seen(kit: Kit) -> None:
    assert [kit.store.claim_term() for _ in range(3)] == [1, 2, 3]
    assert kit.store.claim_term(above=2) == 4
    kit.store.save(checkpoint(7, 1))
    assert kit.store.claim_term() == 8
    assert kit.again("digits").newest_term() == 8
    assert kit.again("digits").claim_term(above=20) == 21  # what the topics hold of another store's terms


def test_a_claim_fences_every_lower_term(kit: Kit) -> None:
    old = kit.store.claim_term()
    kit.store.save(checkpoint(old, 20))
    new = kit.again("digits").claim_term()
    assert kit.store.newest_term() == new > old
    with pytest.raises(FencedError, match=f"term {old} is over"):
        kit.store.save(checkpoint(old, 40))
    assert kit.store.versions() == [(old, 20)]
    kit.store.save(checkpoint(new, 21))
    assert same(kit.store.load_newest("f1"), checkpoint(new, 21))


@pytest.mark.slow
def test_threads_never_claim_the_same(kit: Kit) -> None:
    claimed: list[int] = []
    threads = [
        threading.Thread(target=lambda: claimed.extend(kit.store.claim_term() for _ in range(5))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(claimed)) == len(claimed) == 30  # one that was overtaken by many may have left a term out


def test_a_damaged_newest_is_passed_over_with_a_warning(kit: Kit) -> None:
    kit.store.save(checkpoint(1, 20))
    kit.store.save(checkpoint(2, 10))
    kit.damage(2, 10)
    with structlog.testing.capture_logs() as logs:
        assert same(kit.store.load_newest("f1"), checkpoint(1, 20))
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("checkpoint_damaged", "warning")]
    assert kit.store.claim_term() == 3  # the damaged one still counts


def test_it_does_not_begin_anew_when_all_are_damaged(kit: Kit) -> None:
    kit.store.save(checkpoint(1, 20))
    kit.damage(1, 20)
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints .* is whole"):
        kit.store.load_newest("f1")


def test_a_damaged_version_gets_no_mark_and_is_what_is_said_to_be_damaged(kit: Kit) -> None:
    save(kit, 1, 10, 20, 30)
    kit.store.change_marks(lambda marks: marks.with_pin(20))
    kit.damage(1, 20)
    changes: tuple[Callable[[VersionMarks], VersionMarks], ...] = (
        lambda marks: marks.with_alias("stable", 20),
        lambda marks: marks.without_pin(20).with_alias("best", 20),
    )
    for change in changes:
        with pytest.raises(CheckpointError, match=r"version 20 is damaged \(.*\): .* 2 more are kept"):
            kit.store.change_marks(change)
    assert kit.store.read_marks() == VersionMarks(pins=(20,))
    kit.store.change_marks(lambda marks: marks.without_pin(20).with_alias("stable", 10))
    with pytest.raises(CheckpointError, match="version 20 is damaged"):
        kit.store.load_newest(None, 20)
    save(kit, 2, 20)
    assert same(kit.store.load_newest(None, 20), checkpoint(2, 20))


def test_refuses_another_fingerprint(kit: Kit) -> None:
    kit.store.save(checkpoint(1, 20, fingerprint="data.batch_size=8 pushes=gradients"))
    with pytest.raises(CheckpointError, match=r"data\.batch_size: expected 8, got 9: .* rename the job"):
        kit.store.load_newest("data.batch_size=9 pushes=gradients")


def test_refuses_another_job(kit: Kit) -> None:
    kit.store.save(checkpoint(1, 20))
    says = "expected a checkpoint of job 'other', got one of job 'digits': .*folder"
    with pytest.raises(CheckpointError, match=says):
        kit.again("other").load_newest("f1")
    with pytest.raises(CheckpointError, match="expected a checkpoint of job 'digits', got one of job 'other'"):
        kit.store.save(checkpoint(1, 30, job="other"))


def save(kit: Kit, term: int, *versions: int) -> None:
    for version in versions:
        kit.store.save(checkpoint(term, version))


def test_versions_with_an_alias_or_a_pin_are_never_deleted(kit: Kit) -> None:
    assert kit.store.read_marks() == VersionMarks()
    save(kit, 1, 10, 20, 30)
    kit.store.change_marks(lambda marks: marks.with_pin(10))
    marks = kit.again("digits").change_marks(lambda marks: marks.with_alias("stable", 20))
    assert marks == VersionMarks({"stable": 20}, (10,)) == kit.store.read_marks()
    save(kit, 1, 40, 50, 60, 70)
    assert kit.store.versions() == [(1, 10), (1, 20), (1, 50), (1, 60), (1, 70)]
    assert resolve_version(kit.store, "stable") == 20
    assert same(kit.store.load_newest(None, resolve_version(kit.store, "10")), checkpoint(1, 10))
    kit.store.change_marks(lambda marks: marks.without_pin(10).with_alias("stable", 60))
    save(kit, 1, 80)
    assert kit.store.versions() == [(1, 60), (1, 70), (1, 80)]
    assert resolve_version(kit.store, "latest") == 80
    with pytest.raises(VersionUnknownError, match=r"\(60, 70, 80\), an alias \(stable \(version 60\)\).* got '20'"):
        resolve_version(kit.store, "20")
    with pytest.raises(VersionUnknownError, match=r"kept \(60, 70, 80\), .* got '10'"):
        kit.store.change_marks(lambda marks: marks.with_pin(10))
    with pytest.raises(VersionUnknownError, match="got '10'"):
        kit.store.load_newest(None, 10)
    assert kit.store.read_marks() == VersionMarks({"stable": 60})


def test_changes_of_marks_at_the_same_time_are_all_made(kit: Kit) -> None:
    kit.store.save(checkpoint(1, 20))
    names = [f"name-{number}" for number in range(6)]
    threads = [
        threading.Thread(target=lambda name=name: kit.store.change_marks(lambda marks: marks.with_alias(name, 20)))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(kit.store.read_marks().aliases) == names


def test_a_version_that_is_deleted_while_it_is_marked_gets_no_mark(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    save(kit, 1, 10, 20, 30)
    kit.store.change_marks(lambda marks: marks.with_alias("stable", 20))
    replace = kit.store.replace_document

    def after_a_save(name: str, data: bytes, known: Any) -> Any:
        if kit.store.versions()[0] == (1, 10):
            kit.again("digits").save(checkpoint(1, 40))
        return replace(name, data, known)

    monkeypatch.setattr(kit.store, "replace_document", after_a_save)
    with pytest.raises(VersionUnknownError, match="got '10'"):
        kit.store.change_marks(lambda marks: marks.with_pin(10))
    assert kit.store.read_marks() == VersionMarks({"stable": 20})


def test_a_document_is_replaced_only_as_it_was_read(kit: Kit) -> None:
    again = kit.again("digits")
    content, known = kit.store.read_document("state.json")
    assert content is None
    first = kit.store.replace_document("state.json", b"one", known)
    assert first is not None
    assert again.replace_document("state.json", b"other", known) is None, "it is there by now"
    assert again.read_document("state.json")[0] == b"one"
    second = again.replace_document("state.json", b"two", again.read_document("state.json")[1])
    assert second is not None
    assert kit.store.replace_document("state.json", b"three", first) is None
    assert kit.store.replace_document("state.json", b"three", kit.store.read_document("state.json")[1]) is not None
    assert again.replace_document("state.json", b"four", second) is None
    assert again.read_document("state.json")[0] == b"three"
    assert kit.store.read_document("marks.json")[0] is None
    assert kit.store.versions() == []


@pytest.mark.slow  # random runs
@pytest.mark.parametrize("seed", seeds(2))
def test_two_provisioners_have_one_state(kit: Kit, seed: int) -> None:
    """Deaths, freezes and lost answers, on each store; see tests/unit/provisioner/test_standby.py."""
    scenario = StandbyScenario(seed, kit.store, faults=8)
    scenario.play()
    scenario.check()


def test_a_head_says_what_a_checkpoint_is_without_its_tensors(kit: Kit) -> None:
    kit.store.save(dataclasses.replace(checkpoint(1, 20), state=b"s" * 200_000))
    kit.store.save(checkpoint(1, 30))
    assert kit.store.read_head(1, 20).state == b"s" * 200_000
    head = kit.store.read_head(1, 30)
    assert (head.job, head.fingerprint, head.version, head.state) == ("digits", "f1", 30, b"state of 30")
    sizes = {item.version: item.size_bytes for item in kit.store.stored()}
    assert sizes[30] > head.tensors_bytes > 500
    assert sizes[20] > 200_000
    with pytest.raises(VersionUnknownError, match="version 7 was deleted while it was read"):
        kit.store.read_head(1, 7)
    with pytest.raises(CheckpointError, match="expected a checkpoint of job 'other'"):
        kit.again("other").read_head(1, 30)


def test_chosen_checkpoints_are_deleted_also_with_marks_and_never_the_newest(kit: Kit) -> None:
    store = kit.store
    for version in (1, 2, 3):
        store.save(checkpoint(1, version))
    store.change_marks(lambda marks: marks.with_pin(1))
    store.delete([(1, 1), (1, 2)])
    assert store.versions() == [(1, 3)]
    store.delete([(1, 1)])  # a second time
    with pytest.raises(ValueError, match="other than the newest one"):
        store.delete([(1, 3)])
    assert store.versions() == [(1, 3)]


def saved_in_parts(store: CheckpointStore, term: int, version: int, count: int = 2) -> Checkpoint:
    """Save the model of `checkpoint` as shards and their server do; return it whole."""
    whole = checkpoint(term, version)
    slices = np.array_split(whole.tensors["weights"], count)
    parts = tuple(
        store.save_part(
            dataclasses.replace(whole, state=b"", tensors={**whole.tensors, "weights": part}, sliced=("weights",)),
            number, count,
        )
        for number, part in enumerate(slices)
    )  # fmt: skip
    store.save(dataclasses.replace(whole, tensors={}, parts=parts))
    return whole


def test_the_parts_of_shards_are_read_as_one_checkpoint(kit: Kit) -> None:
    whole = saved_in_parts(kit.store, 1, 20)
    for in_place in (False, True):
        assert same(kit.store.load_newest("f1", in_place=in_place), whole)
    without = kit.store.load_newest("f1", with_parts=False)
    assert without is not None
    assert (without.tensors, len(without.parts)) == ({}, 2)
    part = kit.store.read_part(1, 20, without.parts[1])
    np.testing.assert_array_equal(part.tensors["weights"], whole.tensors["weights"][50:])


def test_a_checkpoint_whose_part_is_another_one_is_passed_over(kit: Kit) -> None:
    older, newest = saved_in_parts(kit.store, 1, 10), saved_in_parts(kit.store, 1, 20)
    kit.store.save_part(dataclasses.replace(newest, state=b"", tensors=older.tensors), 1, 2)  # of another moment
    for with_parts in (True, False):
        with structlog.testing.capture_logs() as logs:
            loaded = kit.store.load_newest("f1", with_parts=with_parts)
        assert loaded is not None
        assert loaded.version == 10
        assert [line["event"] for line in logs] == ["checkpoint_damaged"]
    assert same(kit.store.load_newest("f1"), older)


def test_parts_are_kept_as_long_as_their_checkpoint(kit: Kit) -> None:
    kit.store.save_part(checkpoint(1, 5), 0, 2)  # its server ended before the checkpoint
    for version in (10, 20, 30, 40):
        saved_in_parts(kit.store, 1, version)
    kit.store.save_part(checkpoint(1, 50), 0, 2)  # this one is to come
    kit.store.delete([(1, 30)])
    assert kept_parts(kit.store) == [20, 40, 50]


def kept_parts(store: CheckpointStore) -> list[int]:
    names = [part_name(1, version, 0, 2) for version in (5, 10, 20, 30, 40, 50)]
    return [version for version, name in zip((5, 10, 20, 30, 40, 50), names, strict=True) if is_there(store, name)]


def is_there(store: CheckpointStore, name: str) -> bool:
    try:
        store._read_file(name)
    except FileNotFoundError:
        return False
    return True


def test_a_part_of_a_lower_term_is_refused(kit: Kit) -> None:
    saved_in_parts(kit.store, kit.store.claim_term(), 10)
    kit.store.claim_term()
    with pytest.raises(FencedError):
        kit.store.save_part(checkpoint(1, 20), 0, 2)
