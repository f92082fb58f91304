"""Computes the updates of a job again from their records, with all samples or without some of them.

The record of an update names its batches, the order of their gradients, and the versions of the weights that these were
computed with. So no event log is needed: each gradient is computed again with the code of a worker, and each update
made with the code of the server. With all samples, the result has the bits of the job's model on the same kind of
processor. Without some, it is the model of a job in which these records were dead letters (docs/decisions/0134).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.config import JobConfig
from doll.consumers.compute.gradient import ForwardPasses, GradientComputer
from doll.consumers.intake.decoding import DecodedBatch, RawRecords, SeenForms, decode_records
from doll.errors import ConfigError, TaskError
from doll.ledger import offset_ranges
from doll.ledger.offset_ranges import Span
from doll.model.flat_model import build
from doll.model.random_numbers import seed_of
from doll.ps.engine.events import AppliedBatch, AppliedSet, ApplyUpdate
from doll.ps.model.updater import ContributionBuffer, make_parts
from doll.records.control import Grant, Member, Push, PushedBatch, Update
from doll.storage.checkpoints import Checkpoint
from doll.storage.contributions import Compressor, decode_contribution
from doll.tables.rows import Floats, Ids
from doll.task.base import load_task
from doll.task.batches import SampleBatch

# (partition, first offset, offset after the last one) -> the records that the log holds there.
ReadRecords = Callable[[int, int, int], RawRecords]

_TASK_CHANGED: Final = "use the job file, the task and the libraries that the job ran with"


def obstacle(config: JobConfig) -> str:
    """Return why the updates of a job cannot be computed again; "" if they can."""
    policy = config.training.policy
    if policy.sends_steps:
        return f"under policy {policy.name} workers send steps, which depend on states that no record holds"
    if config.blobs.contributions != "float32":
        return f"blobs.contributions: {config.blobs.contributions} rounds gradients by errors that no record holds"
    if config.worker.pipeline is not None:
        return "its workers divide the model into stages (worker.pipeline)"
    return ""


class Recomputation:
    """A model at one version of a job, to which the job's updates are applied again, one after the other.

    Attributes:
        version: version of the model.
        samples: number of samples that the updates have learned here.
    """

    def __init__(
        self, config: JobConfig, start: Checkpoint | None, read: ReadRecords, *,
        without: Mapping[int, Sequence[Span]], max_age: int = 0,
    ) -> None:  # fmt: skip
        """
        Args:
            start: the version to begin with; None: version 0, which the task makes.
            without: by partition, the ranges of offsets to leave out, disjoint and ascending.
            max_age: how many updates a gradient has missed at most.

        Raises:
            ConfigError: the task cannot be loaded, or this kind of job cannot be computed again.
            CheckpointError: the checkpoint does not fit the job file.
        """
        self._config, self._read, self._without = config, read, without
        self._task = load_task(config)
        self.parts = make_parts(config.training, build(config, self._task))
        self.version = 0
        if start is not None:
            self.parts.load(start.tensors)
            self.version = start.version
        self._model = build(config, self._task, with_rows=False)
        if self._model.tables is not None:
            if max_age:
                raise ConfigError(
                    f"job {config.job}: expected all gradients of an update at the version before it, because its "
                    f"model has tables, got gradients that have missed {max_age} updates"
                )
            self._model.tables.connect(self._rows_of)
        passes = ForwardPasses(self._model.module, precision=config.training.precision)
        self._computer = GradientComputer(self._task, self._model, passes)
        self._sum = self._computer.new_sum()
        self._seen = SeenForms(self._task)
        updater, tables = self.parts
        self._contributions = ContributionBuffer(updater, tables, config.training.policy.age_weight)
        self._tables = {} if tables is None else tables.shapes
        self._compressor = Compressor(config.job)
        if self._tables:
            self._compressor = Compressor(config.job, self._model.num_parameters, self._tables)
        self._max_age = max_age
        self._weights = {self.version: updater.weights}  # of the versions that a gradient may need
        self._loaded = -1  # version of the replica's weights
        self.samples = 0

    def _rows_of(self, name: str, ids: Ids) -> Floats:
        assert self.parts.tables is not None, "only a model with tables asks for rows"
        return self.parts.tables.read(name, ids).values

    def apply(self, update: Update) -> None:
        """Make the version of `update`, the next one of the job.

        Raises:
            ConfigError: the records or the task are not those that the job has learned with.
            TaskError: a gradient cannot be computed.
            DivergedError: the model is not finite any more.
        """
        before = update.version - 1
        if before != self.version:  # a rollback has given another number to this version
            self._weights = {before: self._weights[self.version]}
            self._loaded = -1
        sets = tuple(self._set(list(members)) for _, members in groupby(update.members, lambda item: item.set_grant_id))
        weight = sum(item.weight for item in sets)
        takes_sum = self._config.training.reduction == "sum"
        scale = 1.0 if takes_sum or not weight else 1.0 / weight
        if self._max_age:
            self._weights[before] = self._weights[before].copy()  # the updater may change the memory of its weights
        again = ApplyUpdate(update.version, sets, scale, 0, 0, lr_factor=update.lr_factor, ema_factor=update.ema_factor)
        self.samples += self._contributions.apply(again)
        self.version = update.version
        self._weights[self.version] = self.parts.updater.weights
        for old in [version for version in self._weights if version < self.version - self._max_age]:
            del self._weights[old]

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of all tensors of the version, as a checkpoint has them."""
        return {name: np.array(tensor) for name, tensor in self.parts.tensors().items()}

    def _set(self, members: list[Member]) -> AppliedSet:
        """Compute the sum of the gradients of one set of batches, and keep it for the update."""
        number = members[0].set_grant_id
        self._sum.begin(
            Grant(
                term=0, worker=0, session=0, first=0, grant_ids=tuple(range(number, number + len(members))),
                batches=tuple((item.partition, item.batch) for item in members), version=0, min_version=0, key="",
            )
        )  # fmt: skip
        pushed: list[PushedBatch] = []
        has_values = False
        for at, member in enumerate(members):
            batch, seed = self._samples_of(member)
            item = PushedBatch(batch=at, grant_id=number + at, n_samples=0, loss_sum=0.0, version=member.base_version)
            if batch is None:
                self._sum.skip(at)
                pushed.append(item)
                continue
            if has_values:
                self._sum.keep()
            self._load(member.base_version)
            self._computer.seed = seed
            gradient = self._computer.compute(*batch)
            if problem := gradient.problem():
                raise TaskError(f"{_name(member)} cannot be computed again: {problem}")
            if not gradient.weight:
                self._sum.skip(at)
            elif self._sum.add(gradient, batch=at):
                has_values = True
            else:
                raise TaskError(f"{_name(member)}: the sum of its set is too large for float32")
            pushed.append(
                PushedBatch(
                    batch=at, grant_id=number + at, n_samples=batch.num_samples, loss_sum=gradient.loss_sum,
                    metric_sums=gradient.metric_sums, weight=gradient.weight, version=member.base_version,
                )
            )  # fmt: skip
        values, key, absent = self._sum.values(), "", b""
        if values is not None:
            version = members[-1].base_version
            blob = b"".join(self._compressor.compress(values, version=version, rows=self._sum.rows()))
            decoded = decode_contribution(
                blob, self._model.num_parameters, job=self._config.job, version=version, numel=len(values),
                tables=self._tables,
            )  # fmt: skip
            self._contributions.put(number, decoded.values, rows=decoded.rows)
            key, mask = "computed", self._sum.absent
            absent = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
        push = Push(
            worker=0, session=0, term=0, version=members[-1].base_version, key=key, batches=tuple(pushed), absent=absent
        )
        applied = (
            AppliedBatch(member.partition, member.batch, member.lo, member.hi, 0.0, item)
            for member, item in zip(members, pushed, strict=True)
        )
        return AppliedSet(push, 0.0, tuple(applied))

    def _load(self, version: int) -> None:
        if version == self._loaded:
            return
        if version not in self._weights:
            raise ConfigError(f"expected gradients of versions {sorted(self._weights)}, got one of version {version}")
        self._computer.load(self._weights[version])
        self._loaded = version

    def _samples_of(self, member: Member) -> tuple[SampleBatch | None, int]:
        """Return the samples of a batch that are learned here (None: there are none), and the seed of its pass."""
        if not member.n_samples:
            return None, 0
        records = self._read(member.partition, member.lo, member.hi)
        _check_whole(member, records)
        without = self._without.get(member.partition, ())
        kept = [at for at, offset in enumerate(records.offsets) if not offset_ranges.contains(without, offset)]
        is_whole = len(kept) == len(records.offsets)
        records = RawRecords(
            [records.offsets[at] for at in kept], [records.values[at] for at in kept], member.partition,
            [records.envelopes[at] for at in kept] if self._task.reads_envelopes else (),
        )  # fmt: skip
        data = self._config.data
        decoded = decode_records(
            self._task, records, samples_per_record=data.samples_per_record, max_record_bytes=data.max_record_bytes,
            skip_tombstones=data.tombstones == "skip", seen=self._seen,
        )  # fmt: skip
        _check_refused(member, decoded, is_whole=is_whole)
        learned = np.flatnonzero(~np.isin(decoded.offsets, member.held_out))
        if not len(learned):
            return None, 0
        # The seed is that of the first decoded sample, also if the guard has refused it (`batch_seed`).
        seed = seed_of(self._config.seed, member.partition, int(decoded.offsets[learned[0]]))
        learned = learned[~np.isin(decoded.offsets[learned], member.dead)]
        if is_whole and len(learned) != member.n_samples:
            raise ConfigError(
                f"{_name(member)} has {len(learned)} samples now, {member.n_samples} then: {_TASK_CHANGED}"
            )
        if not len(learned):
            return None, 0
        samples = decoded.samples
        return samples if len(learned) == len(decoded.offsets) else samples.take(learned.tolist()), seed


def _name(member: Member) -> str:
    return f"batch {member.batch} of partition {member.partition} (offsets {member.lo} to {member.hi - 1})"


def _check_whole(member: Member, records: RawRecords) -> None:
    """Raise ConfigError if the log does not hold all records of a batch any more."""
    absent = offset_ranges.union([*member.gaps, *member.lost, *((offset, offset + 1) for offset in member.dead)])
    here = offset_ranges.points(records.offsets)
    missing = offset_ranges.subtract(offset_ranges.subtract([(member.lo, member.hi)], absent), here)
    if missing:
        lo, hi = missing[0]
        raise ConfigError(
            f"the samples topic does not hold the records {lo} to {hi - 1} of partition {member.partition} any more, "
            "which the job has learned since the version to begin with: keep records longer (data.retention_hours), or "
            "more versions (checkpoint.keep)"
        )


def _check_refused(member: Member, decoded: DecodedBatch, *, is_whole: bool) -> None:
    """Raise ConfigError if other records are refused now than were when the batch was learned."""
    refused = {item.offset: item.reason for item in decoded.refused if item.whole}
    if changed := sorted(refused.keys() - set(member.dead)):
        raise ConfigError(
            f"the record at offset {changed[0]} of partition {member.partition} was learned and is refused now "
            f"({refused[changed[0]]}): {_TASK_CHANGED}"
        )
    partly = sum(item.samples for item in decoded.refused if not item.whole)
    if is_whole and partly != member.dead_samples:
        raise ConfigError(
            f"{_name(member)}: {member.dead_samples} samples of packed records were refused, {partly} are now; what "
            f"the guard has refused of a packed record is not recorded (training.guard), or else {_TASK_CHANGED}"
        )
