"""A worker's process for the world of two channels: all of production but Faust and the gradient.

The gradient depends on the batch and on the view, so that a batch that is missing, is added twice or is computed on a
wrong view is seen in the numbers.
"""

from __future__ import annotations

import functools
import json
import queue
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from doll.config import JobConfig, parse
from doll.config.policy import POLICIES as REGISTERED
from doll.config.policy import policy_section
from doll.consumers.compute.error_feedback import rounded_before
from doll.consumers.compute.gradient import CachedVersion, Gradient, GradientComputer
from doll.consumers.compute.gradient_engine import GrantHandler
from doll.consumers.compute.guard import GuardedGradient
from doll.consumers.compute.step_model import StepModel
from doll.consumers.compute.weights_ahead import SlicedDeltaReader
from doll.consumers.protocol.worker_core import (
    Batch,
)
from doll.consumers.tables.row_client import RowClient
from doll.consumers.tables.table_rows import WorkerTables
from doll.model.flat_model import FlatModel, build
from doll.optim.optimizer import Contribution
from doll.optim.row_optimizer import row_optimizers
from doll.records.control import (
    AnyRecord,
    Grant,
    NewVersion,
    Push,
    RowsStored,
    Settle,
)
from doll.storage.contributions import Compressor
from doll.tables.rows import Ids, Rows
from doll.task.base import Task, load_task
from doll.task.batches import SampleBatch
from expected_model import LR, Added, Held
from manual_executor import ManualExecutor

from doll_lab.simulation import world as worlds

if TYPE_CHECKING:
    from channel_world import World

WORKERS: Final = 3
PLACES: Final = 5  # to so many workers a job may be scaled
_IDS: Final = 24

JOB = """
job: unit
task: %s
data: {workers: %d, max_workers: %d, batch_size: 4, rebalance_s: 1}
training: {policy: %s, optimizer: {name: sgd, lr: %g}}
worker: {max_pending_batches: 12}
checkpoint: {every_updates: %d, every_s: 1000000}
"""
_DENSE = json.dumps({"class": "examples.synthetic.task:Gaussian", "args": {"features": 6}})
_TABLES = json.dumps(
    {"class": f"{Path(__file__).with_name('bag_task.py')}:Bags", "args": {"sparse": True, "ids": _IDS}}
)

# Every registered policy, and the other forms that differ in what a push holds.
POLICIES: Final[dict[str, str]] = {name: f"{{name: {name}}}" for name in REGISTERED.names()} | {
    "asp": "{name: asp, contributions: sum}",
    "asp, mean": "{name: asp}",
    "ssp, mean": "{name: ssp, staleness: 2}",
    "wsp, mean": "{name: wsp, wave_batches: 3, clock_distance: 1}",
    "isp, mean": "{name: isp}",
    "doll": "{name: doll, group_size: 3}",
    "doll, sets": "{name: doll, group_size: 7}",
    "doll, recent": "{name: doll, group_size: 2, staleness: 2}",
    "bsp, steps": "{name: bsp, contribution: step, contributions: sum}",
    "asp, steps": "{name: asp, contribution: step, contributions: sum}",
    "ssp": "{name: ssp, staleness: 2, contributions: sum}",
    "ssp, ahead": "{name: ssp, staleness: 3, under_way: 4, contributions: sum}",
    "essp": "{name: essp, staleness: 2, contributions: sum}",
    "essp, ahead": "{name: essp, staleness: 3, under_way: 4, contributions: sum}",
    "vap": "{name: vap, value_bound: 0.5, contributions: sum}",
    "isp": "{name: isp, significance: 0.7, contributions: sum}",
    "isp, rounded": "{name: isp, significance: 0, contributions: sum}",
    "wsp": "{name: wsp, wave_batches: 3, clock_distance: 1, contributions: sum}",
    "diloco": "{name: diloco, local_batches: 3, quorum: 0.6, grace_s: 1.0}",
    "diloco, sparse": "{name: diloco, local_batches: 3, quorum: 0.6, grace_s: 1.0, density: 0.3}",
}

SETTLING: Final = ("isp", "isp, mean", "isp, rounded", "diloco, sparse")  # those that hold back


@functools.cache
def job_of(policy: str, *, has_tables: bool, overrides: tuple[str, ...] = ()) -> tuple[JobConfig, Task]:
    """The job file of a policy of `POLICIES`, and its task."""
    settles, form = policy in SETTLING, "bf16" if policy.endswith("rounded") else "float32"
    config = parse(
        JOB % (_TABLES if has_tables else _DENSE, WORKERS, PLACES, POLICIES[policy], LR, 2 if settles else 4),
        (*overrides, f"blobs.contributions={form}"),
    )
    return config, load_task(config)


_REPLICAS: Final[dict[tuple[int, int], FlatModel]] = {}


def replica(config: JobConfig, task: Task, number: int) -> FlatModel:
    """That of worker `number`, whose processes come one after the other. Weights are loaded before it is used."""
    if (key := (id(config), number)) not in _REPLICAS:
        _REPLICAS[key] = build(config, task, with_rows=False)
    return _REPLICAS[key]


def takes_tables(policy: str) -> bool:
    """Whether models with tables can be trained under it."""
    return bool(policy_section(job_of(policy, has_tables=False)[0].training.policy.name).supports_tables)


class AtOnce(RowClient):
    """Does not wait: what the world has not answered is lost, and asked again."""

    def _wait(self, grant: Grant) -> RowsStored | None:
        while True:
            try:
                answer = self._answers.get_nowait()
            except queue.Empty:
                return None
            if answer is not None and (answer.term, answer.session, answer.number) == (
                grant.term,
                grant.session,
                self._number,
            ):
                return answer


class Recorder:
    """`SetContribution` that writes down what each batch adds, and passes it on."""

    def __init__(self, process: Process, inner: Any) -> None:
        self._process = process
        self._inner = inner

    @property
    def holds(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._inner.holds)

    @property
    def absent(self) -> int:
        return int(self._inner.absent)

    @property
    def holds_back(self) -> bool:
        return bool(self._inner.holds_back)

    def begin(self, grant: Grant) -> bool:
        process = self._process
        if grant.term != process.term:
            process.term, process.own = grant.term, {}
        process.grant = grant
        if not self._inner.begin(grant):
            return False
        process.own = {batch: step for batch, step in process.own.items() if batch < grant.first}
        return True

    def add(self, gradient: Gradient, *, batch: int) -> bool:
        process = self._process
        n, weights = process.num_parameters, process.computer.weights
        if process.sends_steps:
            process.expected.check_view(process, batch)
        before = weights[:n].astype(np.float64)
        if not self._inner.add(gradient, batch=batch):
            return False
        if process.sends_steps:
            share = process.config.training.policy.share(self._inner._grant.num_live)
            added = process.own[batch] = Added(weights[:n] - before, self._inner._kept[-1].rows, share)
        else:
            added = Added(gradient.values[:n].astype(np.float64), gradient.rows)
        process.note(batch, added)
        return True

    def skip(self, batch: int) -> None:
        self._inner.skip(batch)
        self._process.note(batch, Added(np.zeros(self._process.num_parameters), {}))

    def keep(self) -> None:
        self._inner.keep()

    def values(self) -> Contribution | None:
        values: Contribution | None = self._inner.values()
        self._note_push()
        return values

    def _note_push(self) -> None:
        """Give the changes of a sparse push the factor that they have in the model, and note what is held back."""
        process = self._process
        if self.holds and (sparse := process.config.training.policy.sparse_push) is not None:
            factor = sparse.factor(self._inner._grant.num_live)
            for batch, grant_id in self.holds:
                names = process.term, process.worker, batch, grant_id
                added = Added(factor * process.expected.added[names].values, {})
                process.expected.added[names] = added
                if batch in process.own:
                    process.own[batch] = added
        if self.holds and self._inner.holds_back:
            process.expected.held_back[process.term, process.worker, *self.holds[-1]] = process.residual

    def rows(self) -> Mapping[str, Rows]:
        rows: Mapping[str, Rows] = self._inner.rows()
        return rows

    def rest(self, until: int) -> Contribution | None:
        rest: Contribution | None = self._inner.rest(until)
        self._note_push()
        return rest

    def rest_stored(self) -> None:
        self._inner.rest_stored()


class Process(worlds.Process):
    """One worker process: `StepModel` or `GradientSum`, `GrantHandler` and `WorkerCore`, and its ends of the channels.

    Attributes:
        own: of each batch of this term, as it was computed last: its step.
        sent_again: grants and Settles that came, and pushes that went, which may come once more.
    """

    def __init__(self, world: World, worker: int, name: str) -> None:
        super().__init__(worker, name)
        self.expected, self._rng, self._world = world.expected, world.rng, world
        self.numbers: dict[int, int] = {}  # of the batches of the order, by the seeds of their random numbers
        self.config = config = world.config
        self.model = replica(config, world.task, worker)
        self.computer = GradientComputer(world.task, self.model)
        self.num_parameters = self.model.num_parameters
        self.sends_steps = config.training.policy.sends_steps
        self._size = config.data.records_per_batch
        rounds = config.blobs.contributions == "bf16"
        self.tables: WorkerTables | None = None
        shapes = {} if self.model.tables is None else self.model.tables.shapes
        if shapes:
            self.client = AtOnce(config, world.blobs, dict(shapes), slices=self.model.slices)
            self.client.connect(lambda request: world.get_rows(self, request))
            self.tables = WorkerTables(
                self.client, 2000,
                optimizers=row_optimizers(config.training, self.client.tables) if self.sends_steps else None,
                threshold=config.training.policy.filter_threshold, rounds=rounds,
            )  # fmt: skip
        self.local: Any
        deltas = None
        if config.training.policy.publishes_deltas:
            deltas = SlicedDeltaReader(config.job, world.blobs, self.model.slices)
        if self.sends_steps:
            self.local = inner = StepModel(
                config.job, world.blobs, config.training, self.model, self.computer, rows=self.tables,
                background=ManualExecutor(at_once=True), deltas=deltas, rounds=rounds,
            )  # fmt: skip
        else:
            self.local, inner = CachedVersion(config.job, world.blobs, self.computer), self.computer.new_sum()  # type: ignore[assignment]
        is_sparse = self.sends_steps or bool(shapes)
        self.handler = GrantHandler(
            config, local_model=self, guard=self,
            compressor=Compressor(config.job, self.num_parameters, shapes, rounded_before if rounds else None)
            if is_sparse
            else Compressor(config.job),
            blobs=world.blobs, dead_letters=None,  # type: ignore[arg-type]  # no sample is refused
            contribution=Recorder(self, inner), rows=self.tables, slices=self.model.slices,
        )  # fmt: skip
        self.grant: Grant | None = None
        self.usual: tuple[float, ...] = ()
        self.version = self.term = 0
        self.own: dict[int, Added] = {}
        self.sent_again: deque[Grant | Settle | Push] = deque(maxlen=12)
        # "late": what was on links that have broken.
        self.to_worker: dict[str, deque[AnyRecord]] = {"kafka": deque(), "link": deque(), "late": deque()}
        self.to_server: dict[str, deque[AnyRecord]] = {"kafka": deque(), "link": deque(), "late": deque()}
        self.is_linked = self.is_linked_at_server = False

    @property
    def residual(self) -> Held:
        """What is held back now."""
        values = np.zeros(self.num_parameters)
        if self.sends_steps and self.local._residual.is_used:
            values += self.local._residual._held
        rows = {}
        if self.tables is not None:
            for name, residual in self.tables._residuals.items():
                rows[name] = np.zeros(self.client.tables[name])
                rows[name][residual.held.ids] = residual.held.values
        return Held(values, rows)

    def note(self, batch: int, added: Added) -> None:
        assert self.grant is not None
        number = self.grant.grant_ids[batch - self.grant.first]
        self.expected.added[self.grant.term, self.worker, batch, number] = added

    def compute(self, x: Any, y: Any, weight: Any, group: Any, *, seed: int) -> GuardedGradient:
        """`BatchComputer`: a gradient that depends on the worker, the batch and the view."""
        batch = self.numbers[seed]
        rng = np.random.default_rng([self.worker, batch])
        weights, n = self.computer.weights, self.num_parameters
        values = np.zeros_like(weights)
        values[:n] = rng.normal(size=n) + 0.3 * weights[:n]
        rows: dict[str, Rows] = {}
        if self.tables is not None and self.model.tables is not None:
            for name, shape in self.model.tables.shapes.items():
                ids: Ids = np.unique(rng.integers(0, _IDS, size=6))
                got = self.tables.look_up(name, ids)
                self.expected.check_rows(self, name, ids, got, batch)
                noise = rng.normal(size=(len(ids), shape.width)).astype(np.float32)
                rows[name] = Rows(ids, noise + np.float32(0.3) * got)
        norm = float(np.linalg.norm(values))
        return GuardedGradient(Gradient(torch.from_numpy(values), 1.0, {}, float(len(x)), norm, rows=rows), {})

    def offer(self, weights: NewVersion) -> None:
        """`LocalModel`."""
        self.local.offer(weights)
        if self.tables is not None:
            self.tables.offer(weights)

    @property
    def delta_bytes(self) -> int:
        """`LocalModel`."""
        return int(self.local.delta_bytes)

    def load(self, grant: Grant) -> int | None:
        """`LocalModel`."""
        version: int | None = self.local.load(grant)
        self.version = -1 if version is None else version
        return version

    def batch(self) -> Batch:
        """The next batch of some partition that the worker serves. Some batches have no usable sample, and some are
        cut, where that is not decided."""
        served = self._rng.choice([*self.protocol.served.values()])
        number, cut_rng = served.next_batch, self._world.cut_rng
        if number >= served.cuts.decided and cut_rng.random() < self._world.share_cut:
            served.cuts.add(number, cut_rng.randrange(1, self._size))
            self.expected.counts["cuts"] += 1
        lo, hi = served.bounds(self._size).span(number)
        self.expected.read[served.number, number].add((lo, hi))
        count = 0 if (served.number * 7 + number) % 11 == 0 else hi - lo
        data = SimpleNamespace(
            samples=SampleBatch(np.zeros(count), np.zeros(count)), span=(served.number, lo, hi), offsets=range(lo, hi)
        )
        return Batch(number, data, count, 0.0, partition=served.number)
