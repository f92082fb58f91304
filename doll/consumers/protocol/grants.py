"""What a worker knows of the grants of its batches: which are owed, computed, answered and void. Pure.

A grant may come more than once, and late: the server sends grants again when a worker's channel changes, while the
other channel still carries the first copies. A grant is computed once: the answer to it is known until its batch is
durable (docs/decisions/0042).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from doll.records.control import Grant, Push, PushedBatch


class Taken(NamedTuple):
    """What a grant asks for.

    Attributes:
        answers: pushes that the server may not have.
        orders: runs of batches that are to be computed, with the grants that they belong to.
    """

    answers: list[Push]
    orders: list[tuple[Grant, range]]


class Grants:
    """Of one worker process. `is_wanted` may be called from any thread; all else from one."""

    def __init__(self) -> None:
        # Of batches that are not durable. Without an entry in `_owed` or `_answered`, the newest grant was given back.
        self._newest: dict[int, int] = {}  # batch -> newest grant of this server
        self._owed: dict[int, Grant] = {}  # batch -> the record of its newest grant, which is not answered
        self._answered: dict[int, Push] = {}  # batch -> the push that answers its newest grant
        self._computed: dict[tuple[int, int], PushedBatch] = {}  # (batch, grant) that are pushed with later ones
        self._void_until = 0  # grants up to this one are void

    @property
    def is_busy(self) -> bool:
        """A batch is owed and not computed yet."""
        return any((batch, self._newest.get(batch)) not in self._computed for batch in self._owed)

    @property
    def is_any_kept(self) -> bool:
        """A batch is computed and not pushed yet."""
        return bool(self._computed)

    def is_wanted(self, batch: int, number: int) -> bool:
        """Whether grant `number` of `batch` is the newest, and is not answered."""
        return batch in self._owed and self._newest.get(batch) == number

    def take(self, grant: Grant) -> Taken:
        """A grant has come, perhaps not for the first time.

        Grants of a stream increase with its batches. So where the grant of a batch is new, earlier grants of later
        batches are void: the server has taken all of these back. Later grants of later batches have overtaken this one:
        their steps do not count on a view without the step of this batch, and those not pushed yet are computed again.
        """
        new: list[int] = []
        answers: dict[int, Push] = {}  # by their first grants
        for batch, number in enumerate(grant.grant_ids, grant.first):
            newest = self._newest.get(batch, -1)
            if number < newest or number <= self._void_until:
                continue
            if number == newest and (push := self._answered.get(batch)) is not None:
                answers[push.batches[0].grant_id] = push
            elif number > newest or batch not in self._owed:
                new.append(batch)
        overtook = self._replace_later(new[0], grant.grant_ids[new[0] - grant.first]) if new else []
        for batch in new:
            self._forget_answer(batch)
            self._newest[batch], self._owed[batch] = grant.grant_ids[batch - grant.first], grant
        orders = [(grant, run) for run in _runs(new)]
        orders += [(self._owed[batch], range(batch, batch + 1)) for batch in overtook if batch not in new]
        return Taken(list(answers.values()), orders)

    def _replace_later(self, batch: int, number: int) -> list[int]:
        overtook = []
        for later in [later for later in self._newest if later > batch]:
            if self._newest[later] < number:
                self._forget_answer(later)
            elif later in self._owed and self._computed.pop((later, self._newest[later]), None) is not None:
                overtook.append(later)
        return sorted(overtook)

    def give_back(self, batch: int, number: int) -> None:
        """Grant `number` of `batch` is not computed. The worker does not owe it, and computes it if it comes again."""
        if self.is_wanted(batch, number):
            self._forget_answer(batch)

    def computed(self, items: Iterable[PushedBatch]) -> None:
        """These batches are computed, and pushed now or with later ones."""
        self._computed |= {(item.batch, item.grant_id): item for item in items}

    def take_computed(self, names: Sequence[tuple[int, int]]) -> tuple[PushedBatch, ...]:
        """What is known of the (batch, grant id) that one push holds; none where nobody waits for any of them."""
        if not all(name in self._computed for name in names):
            return ()  # one of them has become durable: another process has taken this worker's place
        items = tuple(self._computed.pop(name) for name in names)
        return items if any(self.is_wanted(item.batch, item.grant_id) for item in items) else ()

    def answer(self, push: Push) -> None:
        """`push` is the answer to those of its grants that stand."""
        for item in push.batches:
            if self.is_wanted(item.batch, item.grant_id):
                del self._owed[item.batch]
                self._answered[item.batch] = push

    def unconfirmed(self, applied: int) -> list[Push]:
        """Pushes with a batch from `applied` on: the server may not have them."""
        return list({item.batches[0].grant_id: item for at, item in self._answered.items() if at >= applied}.values())

    def forget(self, batch: int) -> None:
        """`batch` is durable."""
        self._forget_answer(batch)
        self._newest.pop(batch, None)
        if self._computed:
            self._computed = {name: item for name, item in self._computed.items() if name[0] > batch}

    def void(self) -> None:
        """The server has taken all of its grants back. Copies of them may still come."""
        self._void_until = max((self._void_until, *self._newest.values()))
        self._newest.clear()
        self._owed.clear()
        self._answered.clear()

    def _forget_answer(self, batch: int) -> None:
        self._owed.pop(batch, None)
        self._answered.pop(batch, None)
        self._computed.pop((batch, self._newest.get(batch, -1)), None)


def _runs(numbers: Iterable[int]) -> list[range]:
    """Increasing numbers as runs of consecutive ones."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def grant_id_of(grant: Grant | None, batch: int) -> int:
    """Which of its ids grants `batch`; 0 where none does: the server has no such grant, and refuses a push of it."""
    at = -1 if grant is None else batch - grant.first
    return grant.grant_ids[at] if grant is not None and 0 <= at < len(grant.grant_ids) else 0
