"""`doll regrid` at the checkpoint store: the weights go on, the optimizer's state where it fits, replays are exact."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from doll.config import JobConfig, parse
from doll.consumers.protocol.grants import part_of
from doll.errors import ConfigError, FencedError
from doll.model.flat_model import build, fingerprint
from doll.ps.checkpointing import decode_snapshot, encode_snapshot
from doll.ps.engine.assignment import first_snapshot
from doll.ps.event_log import replay
from doll.ps.model.updater import ModelParts, make_parts
from doll.ps.regrid import regrid
from doll.ps.start import engine_settings
from doll.ps.tables.bounded_table import BoundedTable
from doll.records.control import Grant
from doll.storage.blobs import encode_blob, gradient_key
from doll.storage.checkpoints import Checkpoint
from doll.tables.rows import Rows
from doll.task.base import load_task
from logged_runs import JOB, LoggedRun
from memory_stores import MemoryCheckpointStore
from paths import SUPPORT
from pushes import answer

pytestmark = pytest.mark.slow  # loads torch

POLICIES = ("{name: doll, group_size: 3}", "{name: asp}", "{name: bsp}", "{name: ssp}", "{name: essp, staleness: 3}")
LR = 0.1
OPTIMIZERS = ("{name: sgd, lr: 0.1, momentum: 0.9}", "{name: adam}", "{name: sgd, lr: 0.05, momentum: 0.9}")


def newest(store: MemoryCheckpointStore) -> Checkpoint:
    checkpoint = store.load_newest(None)
    assert checkpoint is not None
    return checkpoint


def played(folder: Path, store: MemoryCheckpointStore, overrides: list[str], seed: int) -> JobConfig:
    """One server of the present grid; its replay makes the same model, to the bit."""
    run = LoggedRun(folder, store, *overrides, seed=seed)
    run.play(9)
    run.close()
    replayed: dict[int, bytes] = {}

    def note(version: int, parts: ModelParts) -> None:
        replayed[version] = parts.updater.weights.tobytes()

    ordered = {item.version: item for item in replay(run.config, run.path, on_update=note)}
    assert {version: replayed[version] for version in run.weights} == run.weights
    held = newest(store)
    assert held.state == ordered[held.version].state
    assert {name: value.tobytes() for name, value in held.tensors.items()} == {
        name: value.tobytes() for name, value in ordered[held.version].tensors.items()
    }
    return run.config


@pytest.mark.parametrize("seed", range(4))
def test_the_model_of_each_grid_is_its_replay_and_the_next_begins_with_it(tmp_path: Path, seed: int) -> None:
    rng, store = random.Random(seed), MemoryCheckpointStore("replayed", keep=100)
    played(tmp_path, store, [], seed)
    for _ in range(4):
        overrides = [
            f"data.batch_size={rng.choice((2, 8, 16))}", f"training.policy={rng.choice(POLICIES)}",
            f"training.optimizer={rng.choice(OPTIMIZERS)}",
        ]  # fmt: skip
        before = newest(store)
        config = parse(JOB, overrides)
        result = regrid(config, store)
        after = newest(store)
        assert (after.version, after.term) == (before.version, result.term)
        assert after.term > before.term
        np.testing.assert_array_equal(after.tensors["weights"], before.tensors["weights"])
        old, new = decode_snapshot(before), decode_snapshot(after)
        ends = tuple(
            origin + count * old.records_per_batch for origin, count in zip(old.origins, old.applied, strict=True)
        )
        assert (new.origins, new.applied) == (ends, (0,) * len(ends)) == (result.origins, new.applied)
        assert (new.run_id, new.generation, new.samples_total) == (old.run_id, old.generation, old.samples_total)
        assert [grid.ends for grid in new.earlier_grids][-1] == ends
        played(tmp_path, store, overrides, rng.randrange(1000))
        assert newest(store).version > after.version


@pytest.mark.parametrize(
    ("overrides", "kept", "said"),
    [
        (["data.batch_size=8"], True, "so is the state of the optimizer"),
        (["training.policy={name: bsp}", "training.optimizer.lr=0.01"], True, "so is the state of the optimizer"),
        (["training.optimizer={name: adam}"], False, "begins again (training.optimizer.name: expected sgd, got adam"),
        (["training.policy={name: essp}"], False, "runs in the workers"),
        (["training.policy={name: diloco}"], False, "begins again (workers push waves"),
    ],
)
def test_the_optimizers_state_is_kept_where_it_fits(
    tmp_path: Path, overrides: list[str], kept: bool, said: str
) -> None:
    store = MemoryCheckpointStore("replayed", keep=100)
    played(tmp_path, store, [], 1)
    before = newest(store)
    assert said in regrid(parse(JOB, overrides), store).text()
    after = newest(store)
    states = [{name for name in item.tensors if name != "weights"} for item in (before, after)]
    assert states == [states[0], states[0] if kept else set()]
    for name in states[1]:
        np.testing.assert_array_equal(after.tensors[name], before.tensors[name])


class SteadyRun(LoggedRun):
    """All gradients are ones, and each worker steps along them as `StepModel` does."""

    def answer(self, whole: Grant) -> Grant:
        count, policy = len(whole.grant_ids), self.config.training.policy
        each = -LR * policy.share(whole.num_live) if policy.sends_steps else 4.0  # the sum over a batch's samples
        key = gradient_key(self.config.job, whole.term, whole.grant_ids[0])
        values = np.full(self.updater.weights.size, count * each, np.float32)
        self.blobs.put(key, encode_blob(values, job=self.config.job, kind="g", version=whole.version), 600.0)
        self.server.feed(answer(whole, whole.term, key, n_samples=4, loss_sum=4.0))
        return part_of(whole, count)

    def steps_per_batch(self, updates: int) -> float:
        """Return how far the model goes with each batch of the next updates, in steps of lr."""
        engine, before = self.server.engine, self.updater.weights.copy()
        batches = engine.batches_total
        self.play(updates)
        moved = before - self.updater.weights
        assert np.ptp(moved) < 1e-5
        return float(moved[0]) / LR / (engine.batches_total - batches)


@pytest.mark.parametrize(
    "policy",
    ["{name: doll, group_size: 3}", *(f"{{name: {name}}}" for name in ("asp", "ssp", "essp", "vap", "isp", "wsp"))],
)
def test_a_regrid_to_another_policy_keeps_the_step(tmp_path: Path, policy: str) -> None:
    store, plain = MemoryCheckpointStore("replayed", keep=100), f"training.optimizer={{name: sgd, lr: {LR}}}"
    run = SteadyRun(tmp_path, store, "training.policy={name: bsp}", plain)
    before = run.steps_per_batch(9)
    run.close()
    regrid(parse(JOB, [f"training.policy={policy}", plain]), store)
    run = SteadyRun(tmp_path, store, f"training.policy={policy}", plain, seed=1)
    run.play(12)  # the first grants are from a time when not all workers were there
    after = run.steps_per_batch(24)
    run.close()
    assert before == pytest.approx(1 / 3, rel=1e-4)
    assert after == pytest.approx(1 / 3, rel=1e-4)


def test_what_cannot_be_is_refused_and_leaves_the_grid_before(tmp_path: Path) -> None:
    store = MemoryCheckpointStore("replayed", keep=100)
    with pytest.raises(ConfigError, match="no checkpoint of job replayed"):
        regrid(parse(JOB, ["data.batch_size=8"]), store)
    played(tmp_path, store, [], 1)
    before, claimed = store.versions(), store.newest_term()
    for overrides, words in (
        ([], "got the same"),
        (["task.args.hidden=[9]", "data.batch_size=8"], r"cannot change this: parameters: .*task.args.hidden"),
        (["data.samples_per_record=2"], r"data.samples_per_record: expected 1, got 2"),
        (["data.partitions=4"], r"data.partitions: expected 3, got 4"),
    ):
        with pytest.raises(ConfigError, match=words):
            regrid(parse(JOB, overrides), store)
    assert (store.versions(), store.newest_term()) == (before, claimed), "nothing was claimed"


def test_of_a_regrid_and_a_server_that_starts_meanwhile_one_goes_on(tmp_path: Path) -> None:
    store = MemoryCheckpointStore("replayed", keep=100)
    played(tmp_path, store, [], 1)
    before = store.versions()
    claim = store.claim_term

    def claimed_twice(above: int = 0) -> int:
        term = claim(above)
        claim()  # a standby takes over
        return term

    store.claim_term = claimed_twice  # type: ignore[method-assign]
    with pytest.raises(FencedError):
        regrid(parse(JOB, ["data.batch_size=8"]), store)
    assert store.versions() == before


BAGS = f"""
job: bags
task: {{class: "{SUPPORT / "bag_task.py"}:Bags", args: {{bounded: true, ids: 1000000, width: 3}}}}
data: {{workers: 2, batch_size: 4}}
training:
  policy: {{name: doll, group_size: 1}}
  optimizer: {{name: adagrad}}
  tables: {{"0": {{max_rows: 40, min_count: 3, ttl_updates: 20}}}}
"""


def test_a_bounded_table_goes_on_in_the_next_grid_as_if_there_were_none(tmp_path: Path) -> None:
    """Rows, counts of ids with and without rows, and what expires when."""

    def table_of(config: JobConfig) -> BoundedTable:
        parts = make_parts(config.training, build(config, load_task(config)))
        assert parts.tables is not None
        return parts.tables.bounded["0.weight"]

    def learn(table: BoundedTable, versions: range) -> None:
        for version in versions:
            rng = np.random.default_rng(version)
            ids = np.unique(np.minimum(rng.zipf(1.4, 12), 300) * np.int64(3001))
            table.add(Rows(ids, rng.normal(size=(len(ids), 3)).astype(np.float32)))
            table.apply(0.1, version)

    config = parse(BAGS, [])
    model = build(config, load_task(config))
    mark, layout = fingerprint(config, model), model.layout
    parts = make_parts(config.training, model)
    assert parts.tables is not None
    table = parts.tables.bounded["0.weight"]
    learn(table, range(1, 60))
    store = MemoryCheckpointStore("bags", keep=100)
    state = first_snapshot(engine_settings(config), (0, 0), policy="doll", generation=0, samples_id="", run_id="")
    state = msgspec.structs.replace(state, version=59)
    store.save(
        Checkpoint(
            job="bags", fingerprint=mark, term=store.claim_term(), version=59, state=encode_snapshot(state),
            tensors=parts.tensors(), layout=layout,
        )
    )  # fmt: skip
    changes = ["data.batch_size=8", "training.policy={name: bsp}", "training.tables.0.ttl_updates=25"]
    result = regrid(parse(BAGS, changes), store)
    assert "so is the state of the optimizer" in result.text()
    after = newest(store)
    for name, values in table.tensors().items():
        np.testing.assert_array_equal(after.tensors[name], values)
    same, other = table_of(config), table_of(parse(BAGS, changes[:2]))
    same.load(table.tensors())
    other.load(after.tensors)
    for each in (table, same, other):
        learn(each, range(60, 120))
    assert table.totals.expired > 0 < table.totals.refused
    assert table.totals == same.totals == other.totals
    for name, values in table.tensors().items():
        np.testing.assert_array_equal(other.tensors()[name], values)
    for wrong, words in (
        ("training.optimizer={name: adam}", "settings of tables .*training.optimizer.name: expected adagrad, got adam"),
        ('training.tables={"0": {max_rows: 50, min_count: 3}}', r"training.tables.0.max_rows: expected 40, got 50"),
        ("training.policy={name: essp}", "expected workers that send gradients"),
    ):
        with pytest.raises(ConfigError, match=words):
            regrid(parse(BAGS, ["data.batch_size=6", wrong]), store)
