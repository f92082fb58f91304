"""Models with tables under every policy, with the real server and workers in one thread: as with a dense embedding."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from doll.consumers.tables.row_cache import OpLog, RowCache
from doll.consumers.tables.table_rows import WorkerTables
from doll.errors import ConfigError
from doll.evaluation.stored_weights import StoredWeights
from doll.model.flat_model import build
from doll.ps.model.model_host import ModelHost
from doll.ps.tables.bounded_table import BoundedTable, stored_bounded_rows
from doll.records.control import Grant
from doll.tables.rows import Floats, Ids, Rows
from doll.task.base import load_task
from fuzzing import seeds
from paths import SUPPORT
from threadless_jobs import BATCHES, WORKERS, Job

pytestmark = pytest.mark.slow  # loads torch

TASK = SUPPORT / "bag_task.py"
NAME = "0.weight"
POLICIES = {
    "doll": "{name: doll, group_size: 2}",
    "doll, one": "{name: doll, group_size: 1}",
    "doll, recent": "{name: doll, group_size: 1, staleness: 2}",
    "bsp": "{name: bsp}",
    "bsp, steps": "{name: bsp, contribution: step}",
    "asp": "{name: asp}",
    "asp, steps": "{name: asp, contribution: step}",
    "ssp": "{name: ssp, staleness: 2}",
    "essp": "{name: essp, staleness: 2}",
    "vap": "{name: vap, value_bound: 0.5}",
    "wsp": "{name: wsp, wave_batches: 2, clock_distance: 1}",
    "isp": "{name: isp, significance: 0}",
}
TRAININGS = {
    "sgd": "optimizer: {name: sgd, lr: 0.05}",
    "sgd, clipped": "optimizer: {name: sgd, lr: 0.05}, clip_norm: 0.05",
}


def job(policy: str, seed: int, training: str = TRAININGS["sgd"], workers: int = WORKERS, **args: Any) -> Job:
    task = json.dumps({"class": f"{TASK}:Bags", "args": args})
    return Job(policy, seed, task=task, training=training, workers=workers)


def rows(job: Job) -> Floats:
    return job.host.tensors()[f"table.{NAME}.values"]


def parts(job: Job, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The embedding's values and the rest of the weights, of a job without tables."""
    return job.weights[: 40 * width].reshape(40, width), job.weights[40 * width :]


def num_workers(policy: str) -> int:
    """As many workers as keep rows no newer than the weights: where weights may be old, one worker."""
    is_exact = policy.startswith(("{name: doll", "{name: bsp", "{name: isp")) and "staleness" not in policy
    return WORKERS if is_exact else 1


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("seed", seeds(3))
def test_a_table_learns_what_a_dense_embedding_learns(policy: str, training: str, seed: int) -> None:
    workers = num_workers(policy)
    with_table, without = (job(policy, seed, training, workers, sparse=sparse) for sparse in (True, False))
    assert [worker.applied for worker in with_table.engine.workers()] == [BATCHES] * workers
    assert with_table.order == without.order
    embedding, rest = parts(without, 3)
    np.testing.assert_allclose(rows(with_table), embedding, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(with_table.weights, rest, rtol=2e-5, atol=2e-6)
    first = job(policy, seed, "optimizer: {name: sgd, lr: 1.0e-12}", workers, sparse=True)
    assert np.abs(rows(with_table) - rows(first)).max() > 5e-4


@pytest.mark.parametrize("policy", ["doll", "doll, one"])
def test_gradients_of_a_table_give_the_same_bits(policy: str) -> None:
    workers = num_workers(POLICIES[policy])
    with_table, without = (job(POLICIES[policy], 1, workers=workers, sparse=sparse) for sparse in (True, False))
    embedding, rest = parts(without, 3)
    assert rows(with_table).tobytes() == embedding.tobytes()
    assert with_table.weights.tobytes() == rest.tobytes()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_model_may_have_nothing_but_tables(policy: str) -> None:
    workers = num_workers(policy)
    with_table, without = (job(policy, 2, workers=workers, sparse=sparse, dense=False) for sparse in (True, False))
    assert with_table.weights.shape == (0,)
    np.testing.assert_allclose(rows(with_table), parts(without, 2)[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("policy", ["doll", "asp, steps", "essp"])
def test_a_record_with_an_id_beyond_the_table_is_a_dead_letter(policy: str) -> None:
    done = job(POLICIES[policy], 1, sparse=True, bad=3)
    assert [worker.applied for worker in done.engine.workers()] == [BATCHES] * WORKERS
    for worker in done.workers:
        letters = worker.channel.letters
        assert len(letters) == BATCHES
        assert all("expected ids of 0 to 39, got" in letter.reason for letter in letters)
    assert np.isfinite(rows(done)).all()


class Watched:
    """A job whose workers' rows are compared with those of all versions that they may have, with their own steps."""

    def __init__(self, policy: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        first = job("{name: doll}", seed, "optimizer: {name: sgd, lr: 1.0e-30}", sparse=True)
        self.versions = [rows(first).copy()]
        self.applied = [[0] * WORKERS]  # by version, of each worker
        self.steps: list[dict[int, Rows]] = [{} for _ in range(WORKERS)]  # worker: batch -> its step
        self.looked_up = self.old = 0
        self.problems: list[str] = []
        tables = WorkerTables
        apply, begin, look_up, close = ModelHost.apply, tables.begin, tables.look_up, tables.close
        grants: dict[int, Grant] = {}

        def watched_apply(host: ModelHost, update: Any) -> int:
            done = apply(host, update)
            assert len(self.versions) == update.version
            self.applied.append(list(self.applied[-1]))
            for item in update.sets:
                self.applied[-1][item.push.worker] += len(item.push.batches)
            self.versions.append(host.tensors()[f"table.{NAME}.values"].copy())
            return done

        def watched_begin(table_rows: WorkerTables, grant: Grant, is_wanted: Any) -> None:
            grants[id(table_rows)] = grant
            # A batch that is computed again has no step: what was void is taken back.
            for batch in [batch for batch in self.steps[grant.worker] if batch >= grant.first]:
                del self.steps[grant.worker][batch]
            begin(table_rows, grant, is_wanted)

        def watched_look_up(table_rows: WorkerTables, name: str, ids: Ids) -> Floats:
            got, grant = look_up(table_rows, name, ids), grants[id(table_rows)]
            for at, row in zip(ids, got, strict=True):
                self._check(grant, int(at), row)
            return got

        def watched_close(table_rows: WorkerTables, batch: int) -> dict[str, Rows]:
            closed = close(table_rows, batch)
            self.steps[grants[id(table_rows)].worker][batch] = closed[NAME]
            return closed

        monkeypatch.setattr(ModelHost, "apply", watched_apply)
        monkeypatch.setattr(WorkerTables, "begin", watched_begin)
        monkeypatch.setattr(WorkerTables, "look_up", watched_look_up)
        monkeypatch.setattr(WorkerTables, "close", watched_close)
        self.job = job(policy, seed, sparse=True)

    def _check(self, grant: Grant, at: int, row: Floats) -> None:
        """The value is row `at` of a version that the grant allows, plus the own steps that this version lacks."""
        self.looked_up += 1
        for version in range(len(self.versions) - 1, grant.min_version - 1, -1):
            expected = self.versions[version][at].copy()
            included = self.applied[version][grant.worker]
            for batch, steps in sorted(self.steps[grant.worker].items()):
                if batch >= included and at in steps.ids:
                    expected += steps.values[np.searchsorted(steps.ids, at)]
            if np.allclose(row, expected, rtol=1e-5, atol=1e-6):
                self.old += version < len(self.versions) - 1
                return
        self.problems.append(f"worker {grant.worker}: row {at} is of no version from {grant.min_version} on")


@pytest.mark.parametrize("policy", ["asp", "asp, steps", "ssp", "essp", "vap", "wsp", "isp"])
@pytest.mark.parametrize("seed", range(4))
def test_workers_see_allowed_versions_and_their_own_steps(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(POLICIES[policy], seed, monkeypatch)
    assert not watched.problems
    assert watched.looked_up > 500
    if policy in ("ssp", "essp", "wsp"):  # vap sends each version to all
        assert watched.old > 50, "else old rows are not tested"


def test_rows_without_own_steps_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpLog, "add_to", lambda self, ids, rows: None)
    assert Watched(POLICIES["wsp"], 0, monkeypatch).problems


def test_rows_that_are_too_old_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    get = RowCache.get
    monkeypatch.setattr(RowCache, "get", lambda self, ids, min_version, fetch: get(self, ids, 0, fetch))
    assert Watched(POLICIES["ssp"], 0, monkeypatch).problems


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("optimizer", ["{name: adam, lr: 0.01}", "{name: sgd, lr: 0.1}"])
def test_the_same_order_makes_the_same_tables(policy: str, optimizer: str) -> None:
    one, other = (job(policy, 3, f"optimizer: {optimizer}", sparse=True) for _ in range(2))
    assert rows(one).tobytes() == rows(other).tobytes()
    assert {name: array.tobytes() for name, array in one.host.tensors().items()} == {
        name: array.tobytes() for name, array in other.host.tensors().items()
    }


@pytest.mark.parametrize("policy", ["ssp", "essp"])
def test_rows_that_are_allowed_to_be_old_are_not_asked_for(policy: str) -> None:
    exact = job(POLICIES["asp"], 4, ids=4000, sparse=True)
    stale = job(f"{{name: {policy}, staleness: 10}}", 4, ids=4000, sparse=True)
    assert 0 < stale.row_bytes < exact.row_bytes
    assert 0 < stale.row_request_bytes < exact.row_request_bytes


def test_tables_are_refused_where_they_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"training.policy diloco: expected a model without tables.*'0.weight'"):
        job("{name: diloco}", 0, sparse=True)
    for optimizer, field in (("momentum: 0.5", "momentum"), ("weight_decay: 0.1", "weight_decay")):
        for policy in ("{name: doll}", "{name: ssp, staleness: 2}"):
            with pytest.raises(ConfigError, match=rf"training.optimizer.{field}: expected 0 for a model with tables"):
                job(policy, 0, f"optimizer: {{name: sgd, lr: 0.1, {optimizer}}}", sparse=True)


# --- bounded tables -------------------------------------------------------------------------------------------------

BOUNDED = "optimizer: {name: adam, lr: 0.01}, tables: {'0': {max_rows: 32, min_count: 2, ttl_updates: 30}}"
GRADIENTS = {name: POLICIES[name] for name in ("doll", "doll, one", "bsp", "asp")}


def bounded_job(policy: str, seed: int, training: str = BOUNDED, ids: int = 10**15) -> Job:
    return job(policy, seed, training, bounded=True, ids=ids)


@pytest.mark.parametrize("policy", GRADIENTS.values(), ids=GRADIENTS)
def test_a_bounded_table_learns_in_a_job_and_the_same_order_makes_the_same_table(policy: str) -> None:
    one, other = (bounded_job(policy, 3, ids=60) for _ in range(2))
    assert [worker.applied for worker in one.engine.workers()] == [BATCHES] * WORKERS
    assert {name: array.tobytes() for name, array in one.host.tensors().items()} == {
        name: array.tobytes() for name, array in other.host.tensors().items()
    }
    totals = one.host.table_totals()[NAME]
    assert 0 < totals.rows <= 32
    assert min(totals.admitted, totals.evicted, totals.refused) > 0


@pytest.mark.parametrize("policy", ["doll", "bsp"])
def test_workers_read_the_rows_that_the_server_has_at_the_grant_s_version(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ids that have a row, have lost it, or have got it again."""
    read, look_up = BoundedTable.read, WorkerTables.look_up
    tables: list[BoundedTable] = []
    looked_up = 0

    def watched_read(table: BoundedTable, ids: Ids) -> Rows:
        tables[:] = [table]
        return read(table, ids)

    def watched_look_up(rows: WorkerTables, name: str, ids: Ids) -> Floats:
        nonlocal looked_up
        values = look_up(rows, name, ids)
        assert values.tobytes() == read(tables[0], ids).values.tobytes()
        looked_up += len(ids)
        return values

    monkeypatch.setattr(BoundedTable, "read", watched_read)
    monkeypatch.setattr(WorkerTables, "look_up", watched_look_up)
    done = bounded_job(POLICIES[policy], 5, ids=60)
    assert looked_up > 500
    assert done.host.table_totals()[NAME].evicted > 0


@pytest.mark.parametrize(
    ("policy", "training", "message"),
    [
        ("{name: ssp, staleness: 2}", BOUNDED, r"training.policy ssp: expected workers that send gradients"),
        ("{name: bsp, contribution: step}", BOUNDED, r"training.policy bsp: expected workers that send gradients"),
        ("{name: bsp}", "tables: {'0': {max_rows: 8}}", r"expected max_rows of at least 24 for table '0.weight'"),
        ("{name: bsp}", "tables: {}", r"expected max_rows for table '0.weight', which is a doll.BoundedEmbedding"),
        ("{name: bsp}", "tables: {items: {max_rows: 32}}", r"training.tables: expected regular .* got 'items'"),
    ],
)
def test_a_bounded_table_is_refused_where_it_does_not_fit(policy: str, training: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bounded_job(policy, 0, training)
    with pytest.raises(ConfigError, match=r"expected no max_rows for table '0.weight'"):
        job("{name: bsp}", 0, BOUNDED, sparse=True)


def test_the_evaluator_reads_of_a_checkpoint_what_the_server_has() -> None:
    """Also of ids that have no row, on both sides of those that have one."""
    done = bounded_job(POLICIES["doll"], 4, ids=60)
    tensors = done.host.tensors()
    bounded = {NAME: stored_bounded_rows(tensors, NAME, 3)}
    model = build(done.config, load_task(done.config), with_rows=False)
    StoredWeights(1, done.weights, 1, "", {}, bounded).load_into(model)
    assert model.tables is not None
    assert done.host._tables is not None
    everything = np.arange(60)
    assert 0 < len(bounded[NAME].ids) < 60
    rows_of_server = done.host._tables.bounded[NAME].read(everything).values
    assert model.tables.look_up(NAME, everything).tobytes() == rows_of_server.tobytes()
