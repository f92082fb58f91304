"""The marks that `doll rollback` leaves in the lineage of a model. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    """The model of an earlier version, once more: what was learned since is not in it (docs/decisions/0090).

    Updates and servers of terms below `term` that are above `to` are left behind. Numbers of versions are not given
    again: those from `to` + 1 to `version` have no update.
    """

    to: int  # the earlier version, of grid `grid`
    grid: int
    version: int  # its number from now on
    term: int  # of the checkpoint of `version`
    skipped: bool = False  # whether what was learned since is left out of the model, and not learned again

    def leaves(self, term: int, version: int, grid: int = 0) -> bool:
        """Whether an update of this version, or a server that began with it, is left behind."""
        return term < self.term and (version > self.to or (version == self.to and grid > self.grid))

    def text(self) -> str:
        """The rollback in words, for people."""
        since = "the samples since then are skipped" if self.skipped else "the samples since then are learned again"
        return f"version {self.version} is version {self.to} again (doll rollback): {since}"


def is_left(rollbacks: Sequence[Rollback], term: int, version: int, grid: int = 0) -> bool:
    """Whether one of these rollbacks leaves it behind; see `Rollback.leaves`."""
    return any(rollback.leaves(term, version, grid) for rollback in rollbacks)
