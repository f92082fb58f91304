"""The model as its batches make it, computed apart: every version, view and row of a world is compared with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from doll.config.policy import PolicyConfig
from doll.consumers.protocol.worker_core import Batch
from doll.ps.engine.events import ApplyUpdate
from doll.records.control import Grant, Push
from doll.tables.rows import Ids, Rows

if TYPE_CHECKING:
    from channel_process import Process

LR: Final = 0.05
_RTOL, _ATOL = 3e-4, 3e-5  # float32 over some hundred steps


class Difference(AssertionError):
    """The model, a view or a row is not what its batches make of it."""


Vector = npt.NDArray[np.float64]


class Added(NamedTuple):
    """What one batch adds: to parameters, float64, and to rows of tables; a step, or a gradient. `share`: the factor of
    the step of the parameters in the model; its worker's view has the whole step."""

    values: Vector
    rows: Mapping[str, Rows]
    share: float = 1.0


class Held(NamedTuple):
    """What one worker holds back: of parameters, and of each table, of its shape."""

    values: Vector
    rows: Mapping[str, Vector]


class Moment(NamedTuple):
    """A version of the model, as its batches make it.

    Attributes:
        included: of each worker: how many of its batches are in it.
        applied: the same of each partition.
        held_back: by worker and session: what of these is not in it.
        momentum: of the outer step; 0.0 where there is none yet.
        ends: of each partition: one above the last offset that is in it.
    """

    weights: Vector
    rows: Mapping[str, Vector]
    included: tuple[int, ...]
    applied: tuple[int, ...]
    held_back: Mapping[tuple[int, int], Held]
    momentum: Vector | float
    ends: tuple[int, ...]


def _samples_and_version(push: Push) -> tuple[int, int]:
    """Usable samples of a push, and the oldest version that a batch of it was computed on."""
    versions = [push.version if batch.version < 0 else batch.version for batch in push.batches]
    return sum(batch.n_samples for batch in push.batches), min(versions, default=push.version)


def _is_equal(got: npt.NDArray[Any], expected: Vector) -> bool:
    return bool((np.abs(got - expected) <= _ATOL + _RTOL * np.abs(expected)).all())


class ExpectedModel:
    """What the model must be, of what its workers say that they have computed.

    Attributes:
        added: by (term, worker, batch, grant id): what that batch adds, as it was computed last for that grant.
        held_back: by the same of a push's last batch: what its worker held back behind it.
        named: by the key of a push: the (batch, grant id) that its worker has named.
        moments: by (term, version).
        spans: by (term, worker, batch): (partition, lo, hi) of what its worker has computed for that batch.
        read: by (partition, number): [lo, hi) of what any process has read as that batch.
        void_views: by the same as `added`: void grants that were computed on a view without the rest given away.
        counts: of what was compared.
    """

    def __init__(self, policy: PolicyConfig, *, stands: Callable[[Process, int, int, int], bool]) -> None:
        """
        Args:
            policy: whether workers send steps or gradients, and what the server makes of steps.
            stands: (process, term, batch, grant id) -> whether the server would still take the push.
        """
        self.size = 4  # records of a batch that is not cut
        self._sends_steps, self._outer = policy.sends_steps, policy.outer_step
        self._takes_old_gradients = getattr(policy, "staleness", 0) > 0 and not policy.sends_steps
        self._stands = stands
        self.added: dict[tuple[int, int, int, int], Added] = {}
        self.held_back: dict[tuple[int, int, int, int], Held] = {}
        self.named: dict[str, list[tuple[int, int]]] = {}
        self.moments: dict[tuple[int, int], Moment] = {}
        self.spans: defaultdict[tuple[int, int, int], set[tuple[int, int, int]]] = defaultdict(set)
        self.read: defaultdict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        self.void_views: set[tuple[int, int, int, int]] = set()
        self.counts: Counter[str] = Counter()

    def regrid(self, policy: PolicyConfig, size: int) -> None:
        """From here on the server learns under this policy, of batches of this size."""
        self.size = size
        self._sends_steps, self._outer = policy.sends_steps, policy.outer_step
        self._takes_old_gradients = getattr(policy, "staleness", 0) > 0 and not policy.sends_steps

    def computes(self, process: Process, grant: Grant, batches: Sequence[Batch]) -> None:
        """A process computes these batches for a grant."""
        for batch in batches:
            self.spans[grant.term, process.worker, batch.number].add(batch.data.span)

    def check_update(self, term: int, update: ApplyUpdate, got: Vector, got_rows: Mapping[str, Vector]) -> None:
        """The new version is the one before and what the named batches add, without what their workers hold back."""
        self.counts["updates"] += 1
        before = self.moments[term, update.version - 1]
        weights, included, held_back = before.weights.copy(), list(before.included), dict(before.held_back)
        rows, applied = {name: values.copy() for name, values in before.rows.items()}, list(before.applied)
        ends = list(before.ends)
        factors = self._factors(update)
        changes, num_samples = np.zeros_like(weights), 0  # of an outer step
        for item, factor in zip(update.sets, factors, strict=True):
            worker = item.push.worker
            self.counts["sets of several batches"] += len(item.push.batches) > 1
            self.counts["rests"] += not item.push.batches
            source = (worker, item.push.session)
            if item.push.key or not item.push.holds_back:  # else it has no step, and what was held back stays
                self._give(weights, rows, held_back.pop(source, None), 1.0)
            # A push that came late is taken under the numbers of later grants.
            named = self.named[item.push.key] if item.push.key else []
            assert not named or [batch for batch, _ in named] == [batch.batch for batch in item.push.batches]
            for batch in item.push.batches:
                assert batch.batch == included[worker], "of each worker in its order"
                included[worker] += 1
            for learned, pushed in zip(item.batches, item.push.batches, strict=True):
                at = learned.partition
                applied += [0] * (at + 1 - len(applied))  # it was added to the topic
                ends += [0] * (at + 1 - len(ends))
                assert learned.number == applied[at], "of each partition in its order"
                applied[at] += 1
                assert learned.lo == ends[at], "without a hole and an overlap"
                ends[at] = learned.hi
                assert learned.cut == (learned.hi - learned.lo < self.size)
                # A batch of this number may have been read in another way before, by a process that is gone.
                spans = self.spans[term, worker, pushed.batch]
                assert (at, learned.lo, learned.hi) in spans, f"its worker has computed {spans}"
                self.counts["computed in two ways"] += len({span for span in spans if span[0] == at}) > 1
                self.counts["read in two ways"] += len(self.read[at, learned.number]) > 1
                self.counts["cuts applied"] += learned.cut
            for number, grant_id in named:
                key = (term, worker, number, grant_id)
                if key in self.void_views:
                    raise Difference(f"batch {number} of worker {worker} counts: its view lacked what is held back")
                added = self.added[key]
                if self._outer is None:
                    weights += factor * added.share * added.values
                else:
                    count, oldest = _samples_and_version(item.push)
                    changes += count * self._outer.age_discount ** (update.version - 1 - oldest) * added.values
                for name, part in added.rows.items():
                    np.add.at(rows[name], part.ids, factor * part.values)
                if item.push.holds_back and number == named[-1][0]:
                    held_back[source] = self.held_back[key]
            if item.push.key:
                self._give(weights, rows, held_back.get(source), -1.0)
            num_samples += _samples_and_version(item.push)[0]
        momentum = before.momentum
        if self._outer is not None and num_samples:
            gradient = -changes / num_samples
            momentum = self._outer.momentum * momentum + gradient
            weights -= self._outer.lr * (gradient + self._outer.momentum * momentum)
            self.counts["outer steps"] += 1
        names = [[(part.batch, part.grant_id) for part in item.push.batches] for item in update.sets]
        self.expect(got, weights, f"version {update.version} of term {term}, made of {names}")
        for name, values in rows.items():
            self.expect(got_rows[name], values, f"table {name} of version {update.version}, made of {names}")
        # From here on what there is counts: rounding does not add up.
        self.moments[term, update.version] = Moment(
            got, got_rows, tuple(included), tuple(applied), held_back, momentum, tuple(ends)
        )

    def _factors(self, update: ApplyUpdate) -> list[float]:
        """Of each set, what its contribution counts: with groups of recent versions, less the older it is."""
        if self._sends_steps:
            return [1.0] * len(update.sets)
        facts = [_samples_and_version(item.push) for item in update.sets]
        weights = [(update.version - oldest) ** -0.5 if self._takes_old_gradients else 1.0 for _, oldest in facts]
        self.counts["groups of several versions"] += len(set(weights)) > 1
        all_samples = sum(count for count, _ in facts)
        mean = sum(count * weight for (count, _), weight in zip(facts, weights, strict=True)) / (all_samples or 1)
        return [-LR * update.lr_factor * update.scale * weight / (mean or 1.0) for weight in weights]

    def _give(self, weights: Vector, rows: Mapping[str, Vector], held: Held | None, factor: float) -> None:
        if held is not None:
            weights += factor * held.values
            for name, values in held.rows.items():
                rows[name][:] += factor * values

    def expect(self, got: Vector, expected: Vector, what: str) -> None:
        off = np.abs(got - expected)
        if not (off <= _ATOL + _RTOL * np.abs(expected)).all():
            raise Difference(f"{what}: off by {off.max():.3g}")

    def check_view(self, process: Process, batch: int) -> None:
        """A worker that steps itself sees the weights, all its own steps that they lack, and what it holds back.

        There is one exception, under a policy with a filter. The server asks for rests only when no grant stands, and
        grants nothing before the rests are in a newer version. So a grant that a worker computes at an older version,
        after it has given its rest away, was taken back before the server asked, mostly by its time limit. That view
        lacks the rest. The server refuses the push, and the worker takes the step back at the next grant. So a view
        may lack the rest, and nothing else, where the grant does not stand; `check_update` fails if such a batch ever
        counts.
        """
        self.counts["views"] += 1
        grant, core = process.grant, process.core
        assert grant is not None
        assert core is not None
        moment = self.moments[process.term, process.version]
        included = moment.included[process.worker]
        expected = moment.weights.copy()
        for own, step in process.own.items():
            if own >= included:
                expected += step.values
        got = process.computer.weights[: process.num_parameters].astype(np.float64)
        what = f"view of {process.name} at version {process.version}, own steps {[*process.own]}"
        rest = moment.held_back.get((process.worker, core.session))
        if rest is None:
            self.expect(got, expected, what)
            return
        try:
            self.expect(got, expected + process.local._seen_times * rest.values, what)
        except Difference:
            grant_id = grant.grant_ids[batch - grant.first]
            if self._stands(process, grant.term, batch, grant_id) or core._settled_until < included:
                raise
            self.expect(got, expected, f"{what}, the rest given away")
            self.void_views.add((grant.term, process.worker, batch, grant_id))
            self.counts["void views"] += 1

    def check_rows(self, process: Process, name: str, ids: Ids, got: npt.NDArray[np.float32], batch: int) -> None:
        """Each row is of a version that the grant allows, with the worker's own steps that this version lacks, and what
        it holds back; for the exception, see `check_view`."""
        grant, core = process.grant, process.core
        assert grant is not None
        assert core is not None
        grant_id = grant.grant_ids[batch - grant.first]
        newest = max(version for term, version in self.moments if term == grant.term)
        for at, row in zip(ids, got, strict=True):
            self.counts["rows"] += 1
            for version in range(newest, grant.min_version - 1, -1):
                moment = self.moments.get((grant.term, version))
                if moment is None:
                    continue
                expected = moment.rows[name][at].copy()
                included = moment.included[process.worker]
                for own, step in process.own.items():
                    part = step.rows.get(name)
                    if own >= included and part is not None and at in part.ids:
                        expected += part.values[np.searchsorted(part.ids, at)]
                rest = moment.held_back.get((process.worker, core.session))
                if _is_equal(row, expected if rest is None else expected + rest.rows[name][at]):
                    break
                is_given = core._settled_until >= included
                if is_given and not self._stands(process, grant.term, batch, grant_id) and _is_equal(row, expected):
                    self.void_views.add((grant.term, process.worker, batch, grant_id))
                    break
            else:
                if core.is_wanted(grant.term, batch, grant_id):
                    raise Difference(
                        f"row {at} of {name}, at {process.name}: of no version from {grant.min_version} on"
                    )
