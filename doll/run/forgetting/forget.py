"""`doll forget`: makes the newest version of a job again without some of its records, and proves it.

Steps: 1. find the records, and their states in the ledger; 2. choose the newest kept version that has learned none of
them; 3. compute the updates from it to the next kept version again with all records, and compare the bits: this shows
that task, records and processor are those of the job; 4. compute all updates since then without the records; 5. save
the result as the newest version, of a new grid; 6. write the certificate. Until step 5 nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from dataclasses import field as dataclass_field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from doll.config import JobConfig
from doll.config.fingerprint import REGRIDDABLE, differences, is_among, job_fields, parse
from doll.errors import ConfigError
from doll.kafka.range_reader import RangeReader
from doll.ledger import offset_ranges
from doll.ledger.audit import build_ledger, durable_updates
from doll.ledger.offset_ranges import Span
from doll.local.stack import local_stack
from doll.process.files import write_json
from doll.ps.checkpointing import decode_snapshot
from doll.ps.forgetting import save_without
from doll.records.control import Update
from doll.records.rollbacks import forgotten, is_left
from doll.run.folder import RunFolder, display_path
from doll.run.forgetting import still_held
from doll.run.forgetting.recomputation import Recomputation, obstacle
from doll.run.forgetting.selection import Found, SampleReader, Selection, find
from doll.run.local.regrid import stopped_job
from doll.run.local.resume import check_same_ledger, on_same_broker
from doll.run.target import Target
from doll.services import Services, resolve
from doll.storage.checkpoints import Checkpoint, CheckpointStore, checksum_of
from doll.storage.stores import open_store
from doll.tables.checkpointed import by_row

Say = Callable[[str], None]
Tensors = Mapping[str, npt.NDArray[Any]]

FOLDER: Final = "forgotten"  # of the certificates, in the run folder
_SAY_EVERY_S: Final = 5.0
# Another kind of processor may round the last bits differently, and rounding grows with the updates.
_RTOL, _ATOL = 1e-3, 1e-4


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The record of a removal: what was removed from a model, how, and where the records still are.

    Attributes:
        before: the newest version until then, with the records; `version` replaces it. -1: nothing is saved yet.
        records, samples: number of records, and of the samples that the model had learned from them.
        ranges: [partition, first offset, last offset] of the records.
        begun_with: version that the updates were computed from; 0 also if the task has made it again.
        updates: number of updates that were computed again.
        control: outcome of the comparison with a kept version.
        sha256_before, sha256: checksums of all tensors.
        later: number of selected records after the end of the model.
        others: number of selected records that the model had not learned.
        still_held: where the records, or what was learned from them, still are, and how to remove them there.
    """

    job: str
    run_id: str
    before: int
    version: int = -1
    records: int
    samples: int = 0
    ranges: tuple[tuple[int, int, int], ...]
    keys: int = 0
    field: str = ""
    begun_with: int = -1
    updates: int = 0
    control: str = ""
    sha256_before: str = ""
    sha256: str = ""
    later: int = 0
    others: int = 0
    still_held: tuple[str, ...] = ()
    time_s: float = dataclass_field(default_factory=time.time)
    path: str = ""

    def text(self) -> str:
        if not self.records:
            lines = [f"version {self.before} of {self.job} has learned none of these records: the model is not changed"]
        elif self.version < 0:
            lines = [
                f"version {self.before} of {self.job} has learned {self.records} of these records: "
                f"{self.updates} updates from version {self.begun_with} on would be computed again (--dry-run)"
            ]
        else:
            lines = [
                f"version {self.version} of {self.job} is version {self.before} without {self.records} records "
                f"({self.samples} samples): {self.updates} updates computed again from version {self.begun_with} on",
                f"  control: {self.control}",
            ]
        if self.others:
            lines.append(f"  {self.others} more of these records were not learned: dead, held out, skipped or removed")
        if self.later:
            lines.append(
                f"  {self.later} more of these records come after the end of the model, which learns them when it goes "
                "on: end the job after them, and run doll forget again"
            )
        if self.still_held:
            lines += ["  what still holds them:", *(f"    {item}" for item in self.still_held)]
        if self.path:
            lines.append(f"  certificate: {self.path}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Plan:
    """The updates to compute again.

    Attributes:
        start: the version to begin with; None: version 0, made by the task.
        version: its number.
        max_age: how many updates a gradient has missed at most.
        updates: number of updates after it.
        control: the kept version to compare with; None: there is none.
    """

    start: Checkpoint | None
    version: int
    max_age: int
    updates: int
    control: int | None


def forget(
    target: Target, selection: Selection, *, purge: bool, dry_run: bool, say: Say = lambda text: None
) -> Certificate:
    """Remove records from the newest version of a job. No process of the job may run.

    Args:
        purge: delete the earlier versions that are kept, and the event logs of the run.
        dry_run: change nothing and compute nothing; say how much would be computed.

    Raises:
        ConfigError: the job is running, or this kind of job cannot be computed again.
        CheckpointError: its checkpoints cannot be read or written.
        FencedError: the job was continued meanwhile. Nothing is changed.
        ServiceUnavailableError: the records of the run are gone, or its services do not answer.
    """
    torch.set_num_threads(target.config.worker.torch_threads)
    with ExitStack() as stack:
        config, services, above_term = _opened(target, stack, say)
        store = open_store(config, target.run.path)
        newest = store.load_newest(None)
        if newest is None:
            raise ConfigError(f"no checkpoint of job {config.job} in {store.location}: nothing was learned yet")
        run = _Run(config, services, store, newest, stack, say)
        return run.forget(target, selection, above_term=above_term, purge=purge, dry_run=dry_run)


def _opened(target: Target, stack: ExitStack, say: Say) -> tuple[JobConfig, Services, int]:
    """Return the job file, its services, and the highest term in its topics. The job does not run until the exit of
    `stack`, if it is a run of this machine."""
    if not target.is_run_folder:
        config, above_term = stopped_job(target, "forget")
        return config, resolve(config, needs_redis=False), above_term
    run, config = target.run, target.config
    stack.enter_context(run.locked())
    check_same_ledger(run, config)
    config = on_same_broker(run, config)
    return config, stack.enter_context(local_stack(config, run.path, say)).services, 0


class _Run:
    """One call of `forget`, with a job that does not run."""

    def __init__(
        self, config: JobConfig, services: Services, store: CheckpointStore, newest: Checkpoint, stack: ExitStack,
        say: Say,
    ) -> None:  # fmt: skip
        self._config, self._store, self._newest, self._say = config, store, newest, say
        self._state = decode_snapshot(newest)
        # Two consumers, because updates and samples are read in turn.
        self._updates_reader = stack.enter_context(RangeReader(config, services))
        self._samples_reader = stack.enter_context(RangeReader(config, services))

    def forget(
        self, target: Target, selection: Selection, *, above_term: int, purge: bool, dry_run: bool
    ) -> Certificate:  # fmt: skip
        config, newest = self._config, self._newest
        self._say("looking for the records")
        ledger, _ = build_ledger(config, self._updates_reader, newest)
        chosen = find(config, self._samples_reader, ledger, selection)
        facts: dict[str, Any] = {
            "job": config.job, "run_id": self._state.run_id, "before": newest.version, "records": _num(chosen.learned),
            "ranges": tuple(
                (at, lo, hi - 1) for at, spans in sorted(chosen.learned.items()) for lo, hi in spans
            ),
            "keys": len(selection.keys), "field": selection.field, "later": _num(chosen.later), "others": chosen.others,
        }  # fmt: skip
        if not chosen.learned:
            if not (chosen.others or chosen.later):
                return Certificate(**facts)
            # An earlier version may have learned the others; without any, a key may be a mistake.
            purge = purge and chosen.others > 0 and not dry_run
            return Certificate(**facts, still_held=self._held(target.run, newest, purge=purge))
        plan = self._planned(chosen)
        facts |= {"begun_with": plan.version, "updates": plan.updates}
        if dry_run:
            return Certificate(**facts)
        facts |= {"control": self._control(plan)}
        without = _joined([self._removed_until(newest.version), chosen.learned])
        tensors, learned = self._computed(plan, without, newest.version, "without the records")
        begun_with = 0 if plan.start is None else decode_snapshot(plan.start).samples_total
        samples = self._state.samples_total - begun_with - learned
        saved = save_without(
            config, self._store, newest, tensors, _by_partition(chosen.learned, len(self._state.origins)), samples,
            above_term=above_term,
        )  # fmt: skip
        facts |= {
            "version": saved.version, "samples": samples, "sha256_before": checksum_of(newest.tensors),
            "sha256": checksum_of(saved.tensors),
            "still_held": self._held(target.run, saved, purge=purge),
        }  # fmt: skip
        path = target.run.path / FOLDER / f"version-{saved.version}.json"
        certificate = Certificate(**facts, path=display_path(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, certificate.to_dict())
        return certificate

    def _held(self, run: RunFolder, newest: Checkpoint, *, purge: bool) -> tuple[str, ...]:
        """Return what still holds the records. `purge`: first delete what DOLL can."""
        key = newest.term, newest.version
        if purge:
            still_held.purge(run, self._store, key)
        return tuple(still_held.still_held(self._config, run, self._store, key, self._updates_reader))

    def _updates(self) -> Iterator[Update]:
        return iter(durable_updates(self._config, self._updates_reader, self._newest))

    def _planned(self, chosen: Found) -> _Plan:
        first = next((update.version for update in self._updates() if _has_some(update, chosen.learned)), 0)
        if not first:
            raise ConfigError(f"job {self._config.job}: expected an update with these records in the topic updates")
        remedy = self._remedy(first)
        if problem := obstacle(self._config):
            raise ConfigError(f"job {self._config.job} cannot be computed again: {problem}; {remedy}")
        kept = self._kept()
        begin = max((version for version in self._complete(kept) if version < first), default=None)
        start = None if begin is None else self._store.load_newest(None, begin)
        version = 0 if begin is None else begin
        self._require_same_settings(start, remedy)
        control = min((each for each in kept if each > version and self._is_same_lineage(version, each)), default=None)
        updates, max_age = 0, 0
        for update in self._updates():
            if update.version > version:
                updates += 1
                ages = (update.version - 1 - item.base_version for item in update.members if item.n_samples)
                max_age = max(max_age, *ages, 0)
        return _Plan(start, version, max_age, updates, control)

    def _complete(self, versions: Sequence[int]) -> set[int]:
        """Return the versions after which no update has a gradient of an earlier version."""
        complete = set(versions)
        for update in self._updates():
            oldest = min((item.base_version for item in update.members if item.n_samples), default=update.version)
            complete -= {version for version in complete if oldest < version < update.version}
        return complete

    def _kept(self) -> list[int]:
        """Return the kept versions that the newest version has gone through."""
        return [
            version for term, version in self._store.versions()
            if version <= self._newest.version and not is_left(self._state.rollbacks, term, version)
        ]  # fmt: skip

    def _is_same_lineage(self, version: int, later: int) -> bool:
        """Return whether no records were removed between two versions, so that the one is made from the other."""
        return not any(item.forgot and version < item.version <= later for item in self._state.rollbacks)

    def _require_same_settings(self, start: Checkpoint | None, remedy: str) -> None:
        """Refuse if the settings of updates have changed since `start`, or are not those of the job file."""
        config, state, begin = self._config, self._state, 0
        grid = 0
        if start is not None:
            begin, grid = start.version, decode_snapshot(start).grid
        elif state.init_from:
            raise ConfigError(
                f"job {config.job}: version 0 is not kept, and was made of {state.init_from}: expected a kept version "
                f"before the first of these records; {remedy}"
            )
        wanted, changed = job_fields(config), ""
        for term, version in self._store.versions():
            if version >= begin and version in self._kept():
                saved = parse(self._store.read_head(term, version).fingerprint)
                changed = changed or differences(
                    *(
                        {key: item[key] for key in item if is_among(key, REGRIDDABLE) and key != "ps.shards"}
                        for item in (saved, wanted)
                    )  # any number of shards makes the same updates
                )
        returns = sum(item.version > begin for item in state.rollbacks)
        if changed or state.grid - grid != returns:
            raise ConfigError(
                f"job {config.job} has changed since version {begin} ({changed or 'doll regrid'}), and all updates "
                f" since then would be computed with the present job file; {remedy}"
            )

    def _remedy(self, first: int) -> str:
        kept = [version for version in self._kept() if version < first]
        if not kept:
            return f"no version without these records is kept: begin a new job without them (version {first} has some)"
        return (
            f"version {kept[-1]} has none of these records: doll rollback --to {kept[-1]} --skip goes on from it, "
            "without all that was learned since"
        )

    def _removed_until(self, version: int) -> dict[int, list[Span]]:
        """Return the records that earlier calls have removed from `version`."""
        removed = [item for item in self._state.rollbacks if item.version <= version]
        spans = {at: offset_ranges.union(forgotten(removed, at)) for at in range(len(self._state.origins))}
        return {at: each for at, each in spans.items() if each}

    def _computed(
        self, plan: _Plan, without: Mapping[int, Sequence[Span]], until: int, what: str
    ) -> tuple[dict[str, npt.NDArray[Any]], int]:
        """Compute the versions after `plan.version` up to `until`. Return the tensors of the last one, and the number
        of samples that these updates have learned."""
        read = SampleReader(self._config, self._samples_reader).read
        model = Recomputation(self._config, plan.start, read, without=without, max_age=plan.max_age)
        said_s, done = time.monotonic(), 0
        for update in self._updates():
            if not plan.version < update.version <= until:
                continue
            model.apply(update)
            done += 1
            if time.monotonic() - said_s >= _SAY_EVERY_S:
                said_s = time.monotonic()
                self._say(f"computing {what}: update {update.version} of {until} ({done} of {plan.updates})")
        return model.tensors(), model.samples

    def _control(self, plan: _Plan) -> str:
        """Compute the next kept version again with all records, and return how it compares.

        Raises:
            ConfigError: it differs by more than rounding.
        """
        if plan.control is None:
            return f"none, because no version between {plan.version} and the next removal of records is kept"
        kept = self._store.load_newest(None, plan.control)
        assert kept is not None, "a kept version was listed"
        without = self._removed_until(plan.version)
        tensors, _ = self._computed(plan, without, plan.control, "with all records, as a control")
        span = f"versions {plan.version + 1} to {plan.control}, with all records"
        if checksum_of(tensors) == checksum_of(kept.tensors):
            return f"{span}, were computed again: equal to the job's to the bit"
        if not _is_close(tensors, kept.tensors):
            raise ConfigError(
                f"{span}, were computed again and differ from the job's: are the job file, the task and its data those "
                "that the job ran with? Random numbers must come from torch alone, and not in decode"
            )
        return (
            f"{span}, were computed again: equal to the job's up to rounding, as on another kind of processor or device"
        )


def _has_some(update: Update, spans: Mapping[int, Sequence[Span]]) -> bool:
    return any(
        item.n_samples and offset_ranges.intersect(spans.get(item.partition, ()), [(item.lo, item.hi)])
        for item in update.members
    )


def _num(spans: Mapping[int, Sequence[Span]]) -> int:
    return sum(offset_ranges.size(each) for each in spans.values())


def _joined(all_spans: Iterable[Mapping[int, Sequence[Span]]]) -> dict[int, list[Span]]:
    joined: dict[int, list[Span]] = {}
    for spans in all_spans:
        for at, each in spans.items():
            joined[at] = offset_ranges.union([*joined.get(at, ()), *each])
    return joined


def _by_partition(spans: Mapping[int, Sequence[Span]], num: int) -> list[Sequence[Span]]:
    return [spans.get(at, ()) for at in range(num)]


def _is_close(a: Tensors, b: Tensors) -> bool:
    a, b = by_row(a), by_row(b)
    return a.keys() == b.keys() and all(
        a[name].shape == b[name].shape and np.allclose(a[name], b[name], rtol=_RTOL, atol=_ATOL, equal_nan=True)
        for name in a
    )
