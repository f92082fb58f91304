"""The parameter server raises the learning rate after a change of the stream, for as many updates as it is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from doll.config import parse
from doll.errors import ConfigError
from doll.ps.checkpointing import decode_snapshot
from doll.ps.event_log import replay
from doll.records.control import AnyRecord, Drifted, Update
from logged_runs import JOB, LoggedRun, Outbox
from memory_stores import MemoryCheckpointStore

pytestmark = pytest.mark.slow  # loads torch

REACT = "drift={react: {lr_factor: 4.0, updates: 5}}"


class _Outbox(Outbox):
    def __init__(self) -> None:
        super().__init__()
        self.factors: dict[int, float] = {}

    def send_update(self, record: AnyRecord) -> None:
        super().send_update(record)
        if isinstance(record, Update):
            self.factors[record.version] = record.lr_factor


class Run(LoggedRun):
    outbox_class = _Outbox

    @property
    def factors(self) -> dict[int, float]:
        assert isinstance(self.outbox, _Outbox)
        return self.outbox.factors

    def drifted(self, version: int, term: int | None = None) -> None:
        self.server.feed(
            Drifted(term=self.server.engine.term if term is None else term, version=version, metric="loss")
        )


def test_the_rate_is_raised_from_the_change_on_and_a_later_server_goes_on_with_it(tmp_path: Path) -> None:
    store = MemoryCheckpointStore("replayed", keep=100)
    run = Run(tmp_path, store, REACT)
    run.play(4)
    at = run.server.engine.version
    run.drifted(at)
    run.drifted(at)  # reported twice
    run.play(3)
    raised = {version for version, factor in run.factors.items() if factor == 4.0}
    assert raised == set(range(at + 1, run.server.engine.version + 1))
    assert run.server.engine.counters["drift_reactions"] == 1
    run.close()
    weights = {}
    for _ in replay(
        run.config, run.path, on_update=lambda at, parts: weights.update({at: parts.updater.weights.tobytes()})
    ):
        pass
    assert {version: weights[version] for version in run.weights} == run.weights, "a replay has the same rates"

    later = Run(tmp_path, store, REACT, seed=2)
    begun = later.server.engine.version
    newest = store.load_newest(None)
    assert newest is not None
    assert decode_snapshot(newest).raised_until == at + 5
    later.drifted(at, term=1)  # an evaluator that was started again
    later.play(6)
    for version, factor in later.factors.items():
        assert factor == (4.0 if begun < version <= at + 5 else 1.0), version
    # Long after it came, a change raises nothing; a version that does not exist is refused.
    later.drifted(at)
    later.drifted(later.server.engine.version + 1)
    later.drifted(at, term=later.server.engine.term + 1)
    assert later.server.engine.counters["refused_drifted"] == 2
    later.play(2)
    assert later.factors[later.server.engine.version] == 1.0
    later.close()


def test_the_window_of_the_average_is_shorter_from_the_change_on(tmp_path: Path) -> None:
    react, ema = "drift={react: {lr_factor: 1.0, ema_factor: 4, updates: 3}}", "training.ema={decay: 0.875}"
    run = Run(tmp_path, MemoryCheckpointStore("replayed", keep=100), react, ema)
    run.play(4)
    at = run.server.engine.version
    run.drifted(at)
    run.play(4)
    run.close()
    made: dict[int, dict[str, npt.NDArray[np.float32]]] = {}
    for _ in replay(run.config, run.path, on_update=lambda version, parts: made.update({version: parts.tensors()})):
        pass
    for version in made.keys() & {version + 1 for version in made}:
        share = 0.5 if at < version <= at + 3 else 0.125
        before, after = made[version - 1]["average"], made[version]
        if (after["weights"] == made[version - 1]["weights"]).all():
            continue  # an update of refused records
        np.testing.assert_allclose(after["average"], before + share * (after["weights"] - before), rtol=1e-6, atol=1e-7)
    assert {at, at + 1, at + 3, at + 4} <= made.keys()


def test_without_the_setting_nothing_changes_and_workers_that_make_steps_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, MemoryCheckpointStore("replayed", keep=100))
    run.play(2)
    run.drifted(run.server.engine.version)
    run.play(2)
    assert set(run.factors.values()) == {1.0}
    assert "refused_drifted" not in run.server.engine.counters, "the record is for the provisioner"
    run.close()
    with pytest.raises(ConfigError, match=r"drift\.react: expected a policy whose workers send gradients"):
        parse(JOB.replace("name: doll, group_size: 2", "name: ssp"), (REACT,))
