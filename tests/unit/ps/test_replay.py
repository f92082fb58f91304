"""An event log through a fresh engine and optimizer makes the same model, to the bit, whatever happened on the way."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from doll.errors import RecordError
from doll.optim.optimizer import DivergedError
from doll.ps.engine import events as ev
from doll.ps.event_log import FileEventLog, read_log, replay
from doll.ps.model.updater import ModelParts
from doll.ps.start import Start
from doll.storage.checkpoints import Checkpoint
from fuzzing import seeds
from logged_runs import LoggedRun
from memory_stores import MemoryCheckpointStore

pytestmark = pytest.mark.slow  # loads torch


def assert_equal(ours: Checkpoint, theirs: Checkpoint) -> None:
    assert (ours.version, ours.term, ours.state) == (theirs.version, theirs.term, theirs.state)
    assert ours.fingerprint == theirs.fingerprint
    assert {name: tensor.tobytes() for name, tensor in ours.tensors.items()} == {
        name: tensor.tobytes() for name, tensor in theirs.tensors.items()
    }


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.policy={name: asp}", "training.optimizer={name: adam}"),
        ("training.policy={name: bsp}", "training.reduction=sum", "training.optimizer.lr=0.001"),
        ("training.policy.group_size=7", "training.optimizer={name: adam}"),
        (
            "training.optimizer={class: torch.optim.AdamW, groups: {bias: {weight_decay: 0}}}",
            "training.clip_value=1",
            "training.schedule={class: torch.optim.lr_scheduler.CosineAnnealingLR, args: {T_max: 15}}",
            "training.ema={decay: 0.9}",
        ),
        ("training.policy={name: vap, value_bound: 4.0}",),
        ("training.policy={name: ssp, staleness: 3, under_way: 4}",),
        ("training.policy={name: essp, staleness: 3, under_way: 4}",),
        ("training.policy.group_size=7", "weights"),
        ("training.policy={name: diloco, local_batches: 2}", "weights"),
        ("training.policy={group_size: 3, staleness: 2}", "weights"),
    ],
    ids=[
        "doll",
        "asp-adam",
        "bsp-sum",
        "doll-sets",
        "class",
        "vap-voids",
        "ssp-ahead",
        "essp-ahead",
        "weights",
        "diloco-weights",
        "doll-recent",
    ],
)
def test_the_replay_of_a_run_and_of_its_successor_is_equal(
    tmp_path: Path, overrides: tuple[str, ...], seed: int
) -> None:
    """The first server dies after its last checkpoint; the second begins from that checkpoint, momentum included."""
    store = MemoryCheckpointStore("replayed", keep=100)
    lost, sizes, voided = 0, Counter[int](), 0
    for part in (1, 2):
        settings = [item for item in overrides if item != "weights"]
        run = LoggedRun(tmp_path, store, *settings, seed=10 * seed + part, has_weights="weights" in overrides)
        run.play(20)
        run.close()
        replayed: dict[int, bytes] = {}

        def note(version: int, parts: ModelParts, into: dict[int, bytes] = replayed) -> None:
            into[version] = parts.updater.weights.tobytes()

        ordered = {item.version: item for item in replay(run.config, run.path, on_update=note)}
        # With asp one event may make several updates; only the last of them was seen here.
        assert {version: replayed[version] for version in run.weights} == run.weights
        held = store.load_newest(None)
        assert held is not None
        assert held.term == part
        assert_equal(ordered[held.version], held)
        lost += run.server.engine.counters["requeued_blob_lost"]
        sizes += run.sizes
        voided += run.server.engine.counters["requeued_void"]
    assert lost > 0
    assert voided > 0 or run.config.training.policy.name != "vap"
    assert set(sizes) >= {1, 2, 3} or run.config.group_size != 7


def test_a_killed_servers_log_ends_with_what_is_whole(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path, MemoryCheckpointStore("replayed"))
    run.play(6)
    run.close()
    data = run.path.read_bytes()
    whole = len(list(read_log(run.path)[1]))
    run.path.write_bytes(data[:-3])
    assert len(list(read_log(run.path)[1])) == whole - 1
    list(replay(run.config, run.path))


def test_what_is_written_is_there_without_a_close(tmp_path: Path) -> None:
    """SIGKILL runs no handler: nothing may wait in a buffer of the process."""
    log = FileEventLog(tmp_path / "events" / "a.log", Start(1, 0.0, (0,)))
    log.write(ev.Tick(), 1.5)
    start, entries = read_log(tmp_path / "events" / "a.log")
    assert start == Start(1, 0.0, (0,))
    assert [(entry.event, entry.now) for entry in entries] == [(ev.Tick(), 1.5)]
    log.close()


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    FileEventLog(tmp_path / "a.log", Start(1, 0.0, (0,))).close()
    with pytest.raises(FileExistsError):
        FileEventLog(tmp_path / "a.log", Start(1, 0.0, (0,)))


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x03\0\0\0abc"])
def test_a_file_that_is_no_event_log_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "not.log"
    path.write_bytes(data)
    with pytest.raises(RecordError, match="not an event log of this build"):
        read_log(path)


def test_a_log_that_ends_in_divergence_diverges_again(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path, MemoryCheckpointStore("replayed"))
    run.play(4)
    run.numbers = type("Nan", (), {"normal": staticmethod(lambda size: np.full(size, np.nan))})()
    with pytest.raises(DivergedError):
        run.play(4)
    run.close()
    with pytest.raises(DivergedError):
        list(replay(run.config, run.path))
