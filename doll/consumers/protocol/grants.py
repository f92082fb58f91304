"""The grants of one worker: which of its batches are still to be computed (owed), computed, answered or void. Pure.

A message may arrive twice or late: grants are sent again when the channel changes, while the other channel may still
deliver the first copy. The server refuses a repeated push. The worker computes a grant once, and keeps its answer until
the batch is durable (docs/decisions/0042).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from doll.records.control import Grant, Nack, Push, PushedBatch


class WorkerGrants:
    """The grants of a worker's batches: which are owed, computed, answered or void.

    A grant is computed once: its answer is kept until its batch is durable. Any thread may call `is_wanted`; only one
    thread may call the other methods.
    """

    def __init__(self) -> None:
        # For batches that are not durable. Without an entry in `_owed` or `_answered`, the newest grant was given back.
        self._newest: dict[int, int] = {}  # batch -> id of the newest grant of this server
        self._owed: dict[int, Grant] = {}  # batch -> its newest grant, which is not answered
        self._answered: dict[int, Push] = {}  # batch -> the push that answers its newest grant
        self._refused: dict[int, Nack] = {}  # batch -> the Nack that answers its newest grant
        self.kept: dict[tuple[int, int], PushedBatch] = {}  # (batch, grant id) -> result that is not pushed
        self._void_until = 0  # grants up to this one are void

    @property
    def is_busy(self) -> bool:
        """Whether a batch is owed and not computed yet."""
        return any((batch, self._newest.get(batch)) not in self.kept for batch in self._owed)

    def is_wanted(self, batch: int, number: int) -> bool:
        """Return whether grant `number` is the newest grant of `batch` and is not answered."""
        return batch in self._owed and self._newest.get(batch) == number

    def take(self, grant: Grant) -> tuple[list[Push], list[tuple[Grant, range]]]:
        """Handle a received grant, which may be a repetition. Return the answers that the server may not have received,
        and the runs of batches to compute, each run with its grant.

        The grant ids of a worker ascend with its batches. So if the grant of a batch is new, earlier grants of later
        batches are void, because the server has taken them back. Newer grants of later batches may have arrived before
        this grant. If their results are already in the sum, `computed` returns these batches to be computed again.
        """
        new: list[int] = []
        answers: dict[int, Push] = {}  # by their first grant id
        for batch, number in enumerate(grant.grant_ids, grant.first):
            newest = self._newest.get(batch, -1)
            if number < newest or number <= self._void_until:
                continue
            if number == newest and (push := self._answered.get(batch)) is not None:
                answers[push.batches[0].grant_id] = push
            elif number > newest or batch not in self._owed:
                new.append(batch)
        if new:
            first, number = new[0], grant.grant_ids[new[0] - grant.first]
            for later in [later for later, newest in self._newest.items() if later > first and newest < number]:
                self._forget_answer(later)
        for batch in new:
            self._forget_answer(batch)
            self._newest[batch], self._owed[batch] = grant.grant_ids[batch - grant.first], grant
        return list(answers.values()), [(grant, run) for run in _runs(new)]

    def give_back(self, batch: int, number: int) -> None:
        """Record that grant `number` of `batch` is not computed. The worker no longer owes the batch. It computes the
        batch if the grant arrives again."""
        if self.is_wanted(batch, number):
            self._forget_answer(batch)

    def computed(self, items: Sequence[PushedBatch]) -> list[tuple[Grant, range]]:
        """Add these results, which are pushed now or later. Return the batches to compute again, in the form of `take`.

        Later batches may already have results in the sum, if their grants arrived before the grants of `items`. Their
        steps were made without the steps of `items`, so the sum has dropped them.
        """
        dropped = [name for name in self.kept if name[0] >= items[0].batch]
        for name in dropped:
            del self.kept[name]
        self.kept |= {(item.batch, item.grant_id): item for item in items}
        again = sorted(name[0] for name in dropped if name not in self.kept and self.is_wanted(*name))
        return [(self._owed[batch], range(batch, batch + 1)) for batch in again]

    def take_computed(self, names: Sequence[tuple[int, int]]) -> tuple[PushedBatch, ...]:
        """Return the computed batches of one push, which `names` lists as (batch, grant id). Return () if none is
        wanted any more."""
        if not all(name in self.kept for name in names):
            return ()  # a batch has become durable: another process has replaced this one
        items = tuple(self.kept.pop(name) for name in names)
        return items if any(self.is_wanted(item.batch, item.grant_id) for item in items) else ()

    def answer(self, push: Push) -> None:
        """Record `push` as the answer to those of its grants that are still wanted."""
        for item in push.batches:
            if self.is_wanted(item.batch, item.grant_id):
                del self._owed[item.batch]
                self._answered[item.batch] = push

    def refuse(self, nack: Nack) -> None:
        self._refused[nack.batch] = nack

    def unconfirmed(self, applied: int) -> list[Push | Nack]:
        """Return the records that the server may not have received: all Nacks, and the pushes that contain batch
        `applied` or a later batch."""
        pushes = {item.batches[0].grant_id: item for at, item in self._answered.items() if at >= applied}
        return [*pushes.values(), *self._refused.values()]

    def forget_below(self, batch: int) -> None:
        """Forget the batches below `batch`, which are durable."""
        for number in [number for number in self._newest if number < batch]:
            self._forget_answer(number)
            del self._newest[number]
        if self.kept:
            self.kept = {name: item for name, item in self.kept.items() if name[0] >= batch}
        if self._refused:
            self._refused = {number: nack for number, nack in self._refused.items() if number >= batch}

    def void(self) -> None:
        """Forget all grants, because the server has taken them back. Copies may still arrive, and are ignored."""
        self._void_until = max((self._void_until, *self._newest.values()))
        self._newest.clear()
        self._owed.clear()
        self._answered.clear()
        self._refused.clear()

    def _forget_answer(self, batch: int) -> None:
        self._owed.pop(batch, None)
        self._answered.pop(batch, None)
        self._refused.pop(batch, None)


def _runs(numbers: Iterable[int]) -> list[range]:
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def part_of(grant: Grant, begin: int, end: int | None = None) -> Grant:
    """Return the part of `grant` for its batches [begin, end), counted from its first batch."""
    if begin == 0 and end in (None, len(grant.grant_ids)):
        return grant
    return msgspec.structs.replace(
        grant, first=grant.first + begin, grant_ids=grant.grant_ids[begin:end], batches=grant.batches[begin:end],
        left_out=grant.left_out[begin:end],
    )  # fmt: skip


def grant_id_of(grant: Grant | None, batch: int) -> int:
    """Return the grant id of `batch`; 0 if there is none. The server never uses 0, and refuses a push with it."""
    at = -1 if grant is None else batch - grant.first
    return grant.grant_ids[at] if grant is not None and 0 <= at < len(grant.grant_ids) else 0
