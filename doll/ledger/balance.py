"""The ledger: proof that every sample is in the durable model exactly once, is still to come, or is dead-lettered.

At every moment each offset of each partition is in exactly one of: not yet applied, applied in exactly one update that
the durable model contains, or dead-lettered. The ledger checks it from four things that different processes wrote: the
update records (`doll.ledger.valid_updates` says which count), the dead letters, the checkpoint's counts of applied
batches, and the partitions' ends.

An offset is dead only if the update that counts says so. A batch that was not durable when its worker died is decoded
again, perhaps by a corrected task, and its gradient may be computed again at another version: what an earlier process
refused may be applied then. The letter of an offset that was applied is superseded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from doll.ledger.lineage import UpdatesRecord
from doll.ledger.partition_account import OffsetState, PartitionAccount
from doll.ledger.report import LedgerReport, PartitionCounts, Range
from doll.ledger.valid_updates import DurableModel, ValidUpdates
from doll.records.control import DeadLetter, Update

__all__ = ["DurableModel", "Ledger", "LedgerReport", "OffsetState", "PartitionCounts", "Range", "balance"]


def balance(
    *,
    durable: DurableModel,
    ends: Sequence[int],
    records: Iterable[UpdatesRecord],
    dead_letters: Iterable[DeadLetter],
    present: Sequence[Range] = (),
    lows: Sequence[int] | None = None,
    loss_allowed: bool = False,
) -> LedgerReport:
    """The report of a job's ledger: a `Ledger` with its letters, evaluated; see there."""
    if len(ends) != len(durable.origins):
        raise ValueError(_SHAPES.format(len(durable.origins), len(durable.applied), len(ends)))
    ledger = Ledger(durable, records)
    for letter in dead_letters:
        ledger.add_dead_letter(letter)
    return ledger.report(ends, present=present, lows=lows, loss_allowed=loss_allowed)


_SHAPES = "expected {} partitions, got {} counts of applied batches and {} ends"


class Ledger:
    """The accounts of a job: one for each partition, and what does not fit.

    It keeps ranges of offsets, not records: a sound history of any length takes little memory.
    """

    def __init__(self, durable: DurableModel, records: Iterable[UpdatesRecord]) -> None:
        """Add the updates that count.

        Args:
            durable: from the newest checkpoint.
            records: of `updates`, in log order, read after the checkpoint, of its generation. They are iterated over
                twice.

        Raises:
            ValueError: `durable` does not have one entry per partition.
        """
        num = len(durable.origins)
        if len(durable.applied) != num:
            raise ValueError(_SHAPES.format(num, len(durable.applied), num))
        self._durable = durable
        self._accounts = [PartitionAccount(n, durable) for n in range(num)]
        self._partly_dead_samples = 0
        self._valid = ValidUpdates(records, durable)
        self._update_problems: list[str] = []
        self._letter_problems: list[str] = []
        self._held_back: dict[int, int] = {}  # worker -> number of the newest batch whose step is not whole
        for update in self._valid:
            self._add_update(update)
        for account in self._accounts:
            account.finish_updates()
        for worker, batch in sorted(self._held_back.items()):
            self._update_problems.append(
                f"batches of worker {worker} up to {batch} are in the durable model, but a part of their steps is not: "
                "expected an update that settles them before the checkpoint"
            )

    def _add_update(self, update: Update) -> None:
        accounts, problems, name = self._accounts, self._update_problems, f"update {update.version}"
        if update.n_samples != sum(member.n_samples for member in update.members):
            problems.append(f"{name}: its batches do not have the {update.n_samples} samples that it says")
        for member in update.members:
            if not 0 <= member.worker < len(accounts):
                problems.append(f"{name}: expected a worker from 0 to {len(accounts) - 1}, got {member.worker}")
                continue
            if member.base_version >= update.version:
                problems.append(
                    f"{name}: batch {member.batch} of worker {member.worker} used version {member.base_version}"
                )
            self._partly_dead_samples += member.dead_samples
            if member.held_back:
                self._held_back[member.worker] = member.batch
            else:
                self._held_back.pop(member.worker, None)
            accounts[member.worker].add_batch(member, name, problems)
        for worker, until in update.settled:
            if self._held_back.get(worker, until) < until:
                del self._held_back[worker]

    def add_dead_letter(self, letter: DeadLetter) -> None:
        """Add one dead letter, in any order; the same may come twice, after a crash."""
        if not 0 <= letter.partition < len(self._accounts):
            self._letter_problems.append(
                f"a dead letter names partition {letter.partition}, expected 0 to {len(self._accounts) - 1}"
            )
        else:
            self._accounts[letter.partition].add_dead_letter(letter)

    def offset_state(self, partition: int, offset: int) -> OffsetState:
        """What became of an offset in the durable model.

        Returns:
            "pending": nothing yet; "applied"; "partly": applied, in a batch with refused samples inside packed
            records; "dead": by the update that counts; "absent": the log held no record when the batch was read.
        """
        return self._accounts[partition].offset_state(offset) if 0 <= partition < len(self._accounts) else "pending"

    def report(
        self,
        ends: Sequence[int],
        *,
        present: Sequence[Range] = (),
        lows: Sequence[int] | None = None,
        loss_allowed: bool = False,
    ) -> LedgerReport:
        """Evaluate the accounts. It may be repeated.

        Args:
            ends: end of each partition of the samples topic: one above its last offset.
            present: ranges that do hold records although an update says that they hold none.
            lows: the first offset that each partition still holds; None: nothing was deleted. What an ended job left
                unread may be deleted.
            loss_allowed: records that were deleted before they were learned are no failure.
        """
        problems = [*self._valid.problems, *self._update_problems, *self._letter_problems]
        present_spans = [
            [(item.lo, item.hi) for item in present if item.partition == n] for n in range(len(self._accounts))
        ]
        first = [None] * len(self._accounts) if lows is None else lows
        results = [
            account.evaluate(first[n], ends[n], present_spans[n], self._valid.finished, problems)
            for n, account in enumerate(self._accounts)
        ]
        lines = [item.line for item in results]
        return LedgerReport(
            version=self._durable.version,
            term=self._durable.term,
            updates=self._valid.updates,
            unsaved=self._valid.unsaved,
            voided=self._valid.voided,
            produced=sum(line.produced for line in lines),
            applied=sum(line.applied for line in lines),
            pending=sum(line.pending for line in lines),
            dead=sum(line.dead for line in lines),
            gaps=sum(line.gaps for line in lines),
            superseded=sum(line.superseded for line in lines),
            lost=sum(line.lost for line in lines),
            lost_ranges=tuple(item for result in results for item in result.lost),
            loss_allowed=loss_allowed,
            missing=tuple(item for result in results for item in result.missing),
            twice=tuple(item for result in results for item in result.twice),
            gap_ranges=tuple(item for result in results for item in result.gaps),
            partly_dead_samples=self._partly_dead_samples,
            partitions=tuple(lines),
            problems=tuple(problems),
        )
