"""The provisioner's knowledge of a job, collected from its records: progress, rates, and the worker of each slot. Pure.

Records come from the topics `updates`, `events`, `commands` and `metrics`. The order of records of different topics
does not matter. Times are Unix seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt

from doll.ledger.lineage import Lineage, LineageChange, UpdatesRecord
from doll.provisioner.kept_state import KeptState, plain
from doll.provisioner.planning.estimators import AvailabilityEstimator, BootTimeEstimator, RateEstimator
from doll.provisioner.planning.state import Bools
from doll.provisioner.planning.tuner import LossHistory
from doll.records import control as records
from doll.theory import checks
from doll.theory.checks import Floats

_MAX_INCARNATION: Final = 10**9
_NEWEST: Final = 0.1  # weight of the newest batch in a worker's mean service time
_MOST_COMPARED: Final = 48  # newest measurements of a slot that are compared with those of other slots


PAUSE_S: Final = 480.0
"""A stream has paused if it sends no sample for this time, unless such gaps are usual for a slow stream."""
_GAPS_OF_A_PAUSE: Final = 20.0  # number of mean gaps between two samples; by chance such a pause has probability e^-20
_LEAST_OF_PRIOR: Final = 1e-6  # the planner needs a rate above 0, also of a slot without a partition

Owners = npt.NDArray[np.int64]


class StreamRates(KeptState):
    """The rates of the streams, computed from the end offsets of the partitions. The caller sets `owners`.

    Attributes:
        owners: slot that serves each partition, shape (P,). P is 0 before the first end offsets.
        last_arrival_s: time of the last arrival in any partition; None before the first end offsets.
    """

    def __init__(self, prior_per_s: npt.ArrayLike, samples_per_record: float) -> None:
        self._prior = checks.rates(prior_per_s)
        self._samples_per_record = samples_per_record
        self._rates: RateEstimator | None = None
        self._quiet_s = np.zeros(0)  # time without a sample, up to the newest ends
        self._ends: tuple[float, Sequence[int]] | None = None
        self.owners = self.first_owners(0)
        self.last_arrival_s: float | None = None

    def first_owners(self, partitions: int) -> Owners:
        """Return the slots that serve the partitions of a new job."""
        return np.arange(partitions) % len(self._prior)

    def observe(self, now_s: float, ends: Sequence[int]) -> None:
        """Record the end offset of each partition at `now_s`. Partitions may be added, but not removed."""
        if self._rates is None or len(ends) != len(self._quiet_s):
            self._resize(len(ends))
        assert self._rates is not None
        if self.last_arrival_s is None:
            self.last_arrival_s = now_s
        if self._ends is not None and now_s > self._ends[0]:
            before_s, before = self._ends
            known = np.asarray([*before, *ends[len(before) :]])[: len(ends)]
            grown = np.maximum(0, np.asarray(ends) - known) * self._samples_per_record
            came, span_s = grown > 0, now_s - before_s
            # A gap between two samples is part of the rate; a pause of the source is not.
            gap_s = np.where(self._is_quiet(), 0.0, self._quiet_s)
            self._rates.observe(grown, np.where(came, span_s + gap_s, 0.0))
            self._quiet_s = np.where(came, 0.0, self._quiet_s + span_s)
            if came.any():
                self.last_arrival_s = now_s
        self._ends = (now_s, list(ends))

    def _resize(self, partitions: int) -> None:
        """Change the number of partitions. The knowledge of existing partitions is kept if the number grows."""
        earlier, owners = self._rates, self.first_owners(partitions)
        self._rates = RateEstimator(self._prior[owners] / np.bincount(owners, minlength=len(self._prior))[owners])
        keep = 0 if partitions < len(self._quiet_s) else len(self._quiet_s)
        if earlier is not None and keep:
            self._rates.adopt(earlier)
        self._quiet_s = np.concatenate([self._quiet_s[:keep], np.zeros(partitions - keep)])
        self.owners = np.concatenate([self.owners[:keep], owners[keep:]])

    def per_s(self) -> Floats:
        """Return λ̂ > 0 for each slot, shape (N,): samples per second of the slot's partitions while samples arrive."""
        if self._rates is None:
            return self._prior
        count = len(self._prior)
        served = np.bincount(self.owners, weights=self._rates.per_s(), minlength=count)
        rates: Floats = np.maximum(served, _LEAST_OF_PRIOR * self._prior.max())
        return rates

    def pause_s(self) -> Floats:
        """Return the seconds without a sample after which the streams of each slot count as paused, shape (N,)."""
        pauses_s: Floats = np.maximum(PAUSE_S, _GAPS_OF_A_PAUSE * self._samples_per_record / self.per_s())
        return pauses_s

    def paused(self) -> Bools:
        """Return the slots for which no partition sends anything, shape (N,); includes slots without a partition."""
        if self._rates is None:
            return np.zeros(len(self._prior), dtype=np.bool_)
        quiet: Bools = np.bincount(self.owners[~self._is_quiet()], minlength=len(self._prior)) == 0
        return quiet

    def is_silent(self) -> bool:
        """Return whether no partition sends anything."""
        return self._rates is not None and bool(self._is_quiet().all())

    def without_partition(self) -> Bools:
        """Return the slots that serve no partition although there are enough partitions for all slots, shape (N,)."""
        count = len(self._prior)
        none: Bools = np.bincount(self.owners, minlength=count) == 0
        return none & (len(self.owners) >= count)

    def _is_quiet(self) -> Bools:
        assert self._rates is not None
        gaps_s = _GAPS_OF_A_PAUSE * self._samples_per_record / np.maximum(self._rates.per_s(), 1e-300)
        quiet: Bools = self._quiet_s > np.maximum(PAUSE_S, gaps_s)
        return quiet

    def to_dict(self) -> dict[str, Any]:
        return {} if self._rates is None else {"partitions": len(self._quiet_s), **self._rates.to_dict()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        if kept:
            self._resize(int(kept["partitions"]))
            assert self._rates is not None
            self._rates.restore(kept)


class _Slot(msgspec.Struct):
    """The process of a slot that the parameter server has welcomed last."""

    process: str = ""  # as in `Welcome.process`
    session: int = 0  # the parameter server's number for it
    incarnation: int = 0  # the fleet's number for its instance
    highest_incarnation: int = 0  # of all incarnations that have asked for the slot
    since_s: float = 0.0
    last_seen_s: float = 0.0
    left: bool = False
    served: tuple[int, ...] = ()  # partitions, by its newest Welcome
    served_s: float = -math.inf  # time of this Welcome
    read_to: int = -1  # sum of the next offsets of its partitions
    read_at_s: float = 0.0
    service_s: float = 0.0  # recent mean of the time from a granted batch to its stored gradient
    is_cold: bool = False  # its process has computed nothing yet
    services_s: list[float] = []  # newest service times of its process, if losses are kept
    shared_losses: list[tuple[int, float]] = []  # version, and the loss of its replica on the version's shared samples

    def note_incarnation(self, incarnation: int) -> None:
        """Record that an instance of this incarnation exists or existed. Implausible numbers are ignored, because
        records may be wrong."""
        if incarnation <= _MAX_INCARNATION:
            self.highest_incarnation = max(self.highest_incarnation, incarnation)


@dataclass(frozen=True)
class SlotHolder:
    """The holder of a slot: its newest worker. Incarnation 0: no fleet has started it. `works` states that the worker
    has not left, and is not silent while other workers send records."""

    incarnation: int
    since_s: float
    last_seen_s: float
    works: bool


class Observed(KeptState):
    """The provisioner's knowledge of a job. The caller passes records and end offsets; the planner reads results.

    Args:
        prior_rates_per_s: λ_n of the job file, samples per second, shape (N,).
        samples_per_record: see `ControllerSettings`.
        prior_alpha, prior_cycle_s: assumed availability and cycle of spot before anything is observed.
        heartbeat_timeout_s: a worker that sends nothing for this time, while others do, counts as not working.
        keeps_losses: whether to record the loss of each update in `losses`.
    """

    KEPT: ClassVar = {
        "slots": list[_Slot], "last_seen_s": float, "version": int, "batches_done": int, "finished": str,
        "generation_s": float, "evaluations": list[tuple[int, float, float | None]], "drifted_version": int,
        "service": tuple[int, float], "spot": KeptState, "streams": KeptState, "read": KeptState, "boots": KeptState,
        "losses": KeptState,
    }  # fmt: skip
    LATER: ClassVar = ("generation_s", "boots", "losses", "streams", "drifted_version")

    def __init__(
        self, prior_rates_per_s: npt.ArrayLike, *, samples_per_record: float = 1.0, prior_alpha: float = 0.9,
        prior_cycle_s: float = 36_000.0, heartbeat_timeout_s: float = 30.0, keeps_losses: bool = False,
    ) -> None:  # fmt: skip
        self._streams = StreamRates(prior_rates_per_s, samples_per_record)
        self._read = RateEstimator(prior_rates_per_s)
        self._slots = [_Slot() for _ in self._read.per_s()]
        self._samples_per_record = samples_per_record
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.spot = AvailabilityEstimator(prior_alpha=min(max(prior_alpha, 0.01), 0.99), prior_cycle_s=prior_cycle_s)
        self.boots = BootTimeEstimator()
        self.last_seen_s = -math.inf  # the newest heartbeat of any worker
        self.ps_last_seen_s = self._ps_since_s = -math.inf  # when a parameter server was last heard; since when it runs
        self.version = 0  # updates that are applied and have not been rolled back
        self.batches_done = 0  # batches in them
        self._lineage = Lineage()
        self.generation_s = -math.inf  # when the generation began
        self.finished: str | None = None  # why the job has ended
        self.loss = math.nan
        self.evaluations: list[tuple[int, float, float | None]] = []  # version, loss, accuracy of the valid evaluations
        self.drifted_version = 0  # version at which the stream last changed; 0: it has not
        self.keeps_losses = keeps_losses
        self.losses = LossHistory()
        # Slots without a worker by scale-in: others serve their streams, shape (N,).
        self.released: Bools = np.zeros(self.num_slots, dtype=np.bool_)
        self.status: records.ServerStatus | None = None  # newest status of the parameter server, of this run
        self._service = (0, 0.0)
        self.last_decision: records.ProvisionDecision | None = None  # newest decision that any provisioner published

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def term(self) -> int:
        """The term of the newest server."""
        return self._lineage.newest_term

    @property
    def generation(self) -> int:
        """The generation of the job's run on these topics. A new generation starts the job again."""
        return self._lineage.generation

    def feed(self, record: records.AnyRecord, at_s: float) -> None:
        """Process one record, written at about `at_s`. Unknown records, and records of unknown slots, are ignored."""
        self.last_seen_s = max(self.last_seen_s, at_s)
        if isinstance(record, records.Welcome | records.TermStarted | records.Update | records.ServerStatus):
            if at_s - self.ps_last_seen_s > self.heartbeat_timeout_s:
                self._ps_since_s = at_s
            self.ps_last_seen_s = max(self.ps_last_seen_s, at_s)
        match record:
            case records.Join() if self._is_slot(record.worker):
                self._slots[record.worker].note_incarnation(record.incarnation)
            case records.Welcome() if self._is_slot(record.worker):
                self._welcomed(self._slots[record.worker], record, at_s)
            case records.Alive() | records.Announce() | records.Push() if self._is_slot(record.worker):
                slot = self._slots[record.worker]
                if record.session == slot.session:
                    if isinstance(record, records.Alive):
                        self._read_on(record, slot, at_s)
                    slot.last_seen_s = max(slot.last_seen_s, at_s)
            case records.Leave() if self._is_slot(record.worker):
                slot = self._slots[record.worker]
                slot.left = slot.left or record.session == slot.session
            case records.Evaluated():
                if record.term >= self.generation and (record.term >= self.term or record.version <= self.version):
                    self.evaluations.append((record.version, record.loss, record.accuracy))
            case records.Drifted():
                if record.term >= self.generation and record.version <= self.version:
                    self.drifted_version = max(self.drifted_version, record.since)
            case records.TermStarted() | records.Update() | records.Finished():
                self._lineage_changed(record, self._lineage.feed(record), at_s)
            case records.ProvisionDecision():
                self._decision_recorded(record)
            case records.ServerStatus() if record.term >= self.generation:
                self.status = record
            case _:
                pass

    def _lineage_changed(self, record: UpdatesRecord, change: LineageChange, at_s: float) -> None:
        if change is LineageChange.FENCED:
            return
        match record:
            case records.TermStarted():
                self._term_started(record, is_new_run=change is LineageChange.GENERATION)
            case records.Update():
                self.version, self.batches_done = max(0, record.version), max(0, record.batches_total)
                if record.total_weight:
                    self.loss = record.loss
                    if self.keeps_losses:
                        self.losses.observe(record.version, record.loss, at_s)
                count, seconds = self._service
                self._service = (
                    count + len(record.members),
                    seconds + sum(member.compute_s + member.fetch_s + member.store_s for member in record.members),
                )
                for member in record.members:
                    if self._is_slot(member.worker):
                        self._computed(self._slots[member.worker], member)
            case records.Finished():
                self.finished = record.reason

    def _computed(self, slot: _Slot, member: records.Member) -> None:
        took_s = member.compute_s + member.fetch_s + member.store_s
        if slot.is_cold:  # the first batch of a process includes the import of its libraries, so it is not typical
            slot.is_cold = False
        else:
            slot.service_s += (_NEWEST if slot.service_s else 1.0) * (took_s - slot.service_s)
            slot.services_s = [*slot.services_s, took_s][-_MOST_COMPARED:] if self.keeps_losses else []
        if member.shared_loss is not None:
            slot.shared_losses.append((member.base_version, member.shared_loss))
            del slot.shared_losses[:-_MOST_COMPARED]

    def _is_slot(self, worker: int) -> bool:
        return 0 <= worker < len(self._slots)

    def _welcomed(self, slot: _Slot, record: records.Welcome, at_s: float) -> None:
        if record.session < slot.session:
            return
        slot.read_to = -1  # it may read other partitions from now on
        served = tuple(item.partition for item in record.served if item.partition >= 0)
        is_known = served == slot.served  # it has joined again, which moves no partition
        slot.served, slot.served_s = served, at_s
        if not is_known:
            self._follow_assignment()
        if record.process != slot.process:
            slot.process, slot.since_s, slot.is_cold = record.process, at_s, True
            slot.services_s, slot.shared_losses = [], []
        slot.session, slot.incarnation, slot.left = record.session, record.incarnation, False
        slot.note_incarnation(record.incarnation)
        slot.last_seen_s = max(slot.last_seen_s, at_s)

    def _read_on(self, record: records.Alive, slot: _Slot, at_s: float) -> None:
        """Update the reading speed of a worker, which limits its rate if the worker is behind its stream. A worker that
        reads nothing waits for its source or the parameter server, so longer pauses than usual do not change its
        speed."""
        if slot.read_to >= 0 and record.next_offset == slot.read_to:
            return
        span_s = at_s - slot.read_at_s
        is_pause = span_s > self._streams.pause_s()[record.worker]
        if slot.read_to >= 0 and record.next_offset > slot.read_to and span_s > 0 and not is_pause:
            tally = np.zeros((2, self.num_slots))
            tally[:, record.worker] = (record.next_offset - slot.read_to) * self._samples_per_record, span_s
            self._read.observe(tally[0], tally[1])
        slot.read_to, slot.read_at_s = record.next_offset, at_s

    def _decision_recorded(self, record: records.ProvisionDecision) -> None:
        for slot, incarnation in zip(self._slots, record.incarnations, strict=False):
            slot.note_incarnation(incarnation)  # incarnations count in any generation
        newest = -math.inf if self.last_decision is None else self.last_decision.time_s
        if record.time_s >= max(newest, self.generation_s):
            self.last_decision = record

    def _term_started(self, record: records.TermStarted, *, is_new_run: bool) -> None:
        if is_new_run:
            for slot in self._slots:
                slot.served, slot.served_s = (), -math.inf
            self.generation_s, self.loss, self.evaluations = record.time_s, math.nan, []
            self.drifted_version = 0
            self.losses.clear()
            self.status = None
            if self.last_decision is not None and self.last_decision.time_s < record.time_s:
                self.last_decision = None
        self.finished = None
        self.version, self.batches_done = max(0, record.resumed_version), max(0, record.resumed_batches)
        self.evaluations = [evaluation for evaluation in self.evaluations if evaluation[0] <= record.kept_version]
        self.drifted_version = min(self.drifted_version, record.kept_version)
        self.losses.cut(record.kept_version)
        for slot in self._slots:
            slot.shared_losses = [] if is_new_run else [at for at in slot.shared_losses if at[0] <= record.kept_version]

    def observe_ends(self, now_s: float, ends: Sequence[int]) -> None:
        """Record the end offset of each partition at `now_s`, which shows the rate of the samples."""
        partitions = len(self._streams.owners)
        self._streams.observe(now_s, ends)
        if len(ends) != partitions:
            self._follow_assignment()

    def _follow_assignment(self) -> None:
        """Update the slots of the partitions, which may move while a job runs. If the partitions of a worker have
        changed, its reading speed is forgotten."""
        before, owners = self._streams.owners, self._assignment()
        self._streams.owners = owners
        moved = owners != before
        for number in sorted({*owners[moved].tolist(), *before[moved].tolist()}):
            self._read.forget(number, float(self._streams.per_s()[number]))

    def _assignment(self) -> Owners:
        """Return the slot of each partition, according to the newest Welcome that names the partition. A partition that
        no Welcome names is served as in a new job."""
        owners = self._streams.first_owners(len(self._streams.owners))
        for number in sorted(range(self.num_slots), key=lambda number: self._slots[number].served_s):
            owners[[partition for partition in self._slots[number].served if partition < len(owners)]] = number
        return owners

    def paused(self) -> Bools:
        """Return the streams that send nothing although their worker is ready to read, shape (N,)."""
        working = [(holder := self.holder(slot)) is not None and holder.works for slot in range(self.num_slots)]
        return np.array(working, dtype=np.bool_) & self._streams.paused() & ~self.released

    def without_partition(self) -> Bools:
        """Return the slots that serve no partition because other slots serve their streams, shape (N,)."""
        return self._streams.without_partition()

    def source_silent_since_s(self) -> float | None:
        """Return the time since which no stream has sent anything; None if a stream sends, or if nothing was
        observed."""
        return self._streams.last_arrival_s if self._streams.is_silent() else None

    def rates_per_s(self) -> Floats:
        """Return λ̂_n, shape (N,): samples per second that arrive in the slot's partitions, or that the slot's worker
        can read, whichever is smaller."""
        rates: Floats = np.minimum(self._streams.per_s(), self._read.per_s())
        return rates

    @property
    def service_s(self) -> float:
        """The mean seconds μ_C from a granted batch to its stored gradient; NaN before the first batch."""
        count, seconds = self._service
        return seconds / count if count else math.nan

    def services_s(self, slots: Sequence[int]) -> Floats:
        """Return the newest service times of these slots' batches, as many of each slot, shape (n, number of slots)."""
        times = [self._slots[slot].services_s for slot in slots]
        count = min(map(len, times))
        return np.array([each[len(each) - count :] for each in times]).T.reshape(count, len(slots))

    def shared_losses(self, slots: Sequence[int]) -> Floats:
        """Return the losses of these slots' replicas, shape (n, number of slots). A row has the losses on the same
        samples at the same version, at which each of these slots was evaluated."""
        by_version = [dict(self._slots[slot].shared_losses) for slot in slots]
        versions = sorted(set.intersection(*map(set, by_version)))
        return np.array([[losses[version] for losses in by_version] for version in versions]).reshape(-1, len(slots))

    def capacity_per_s(self, batch_size: float) -> Floats:
        """Return the samples per second that each slot's worker can compute, shape (N,); 0 before its first batch."""
        service_s = np.array([slot.service_s for slot in self._slots])
        return np.where(service_s > 0, batch_size / np.maximum(service_s, 1e-9), 0.0)

    @property
    def batches_per_update(self) -> float:
        """The mean number of batches per update so far; NaN before the first update."""
        return self.batches_done / self.version if self.version > 0 else math.nan

    def errors(self, measure: str) -> tuple[list[int], list[float]]:
        """Return version and held-out error of each evaluation, in ascending order of versions; only errors above 0.
        `measure` is "error_rate" (1 - accuracy) or "loss"."""
        errors_by_version: dict[int, float] = {}
        for version, loss, accuracy in self.evaluations:
            error = loss if measure == "loss" else math.nan if accuracy is None else 1 - accuracy
            if math.isfinite(error) and error > 0:
                errors_by_version[version] = error
        return sorted(errors_by_version), [errors_by_version[version] for version in sorted(errors_by_version)]

    def holder(self, slot: int) -> SlotHolder | None:
        """Return the holder of the slot; None if no worker was welcomed yet."""
        holder = self._slots[slot]
        if not holder.process:
            return None
        works = not holder.left and self.last_seen_s - holder.last_seen_s <= self.heartbeat_timeout_s
        return SlotHolder(holder.incarnation, holder.since_s, holder.last_seen_s, works)

    def ps_since_s(self, now_s: float) -> float | None:
        """Return the time since which a parameter server has run without a pause. None: none runs, so no worker can
        join."""
        return self._ps_since_s if now_s - self.ps_last_seen_s <= self.heartbeat_timeout_s else None

    def highest_incarnation(self, slot: int) -> int:
        """Return the highest incarnation that is known to have asked for the slot."""
        return self._slots[slot].highest_incarnation

    def to_dict(self) -> dict[str, Any]:
        kept = super().to_dict()
        kept["losses"] = kept["losses"] if self.keeps_losses else None
        seen_s = [plain(self._ps_since_s), plain(self.ps_last_seen_s)]
        return {"ps_seen_s": seen_s, "term": self.term, "generation": self.generation, **kept}

    def restore(self, kept: Mapping[str, Any]) -> None:
        if len(kept["slots"]) != len(self._slots):
            raise ValueError(f"expected {len(self._slots)} slots, got {len(kept['slots'])}")
        super().restore(kept)
        self._streams.owners = self._assignment()
        self._lineage = Lineage(int(kept["term"]), int(kept.get("generation", 0)))
        seen_s = [-math.inf if at_s is None else float(at_s) for at_s in kept.get("ps_seen_s", (None, None))]
        self._ps_since_s, self.ps_last_seen_s = seen_s
