"""The rollbacks (`doll rollback`) in the lineage of a model. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    """A return of the model to an earlier version, without the samples learned since then (docs/decisions/0090).

    Updates and server starts of terms below `term` with versions above `to` are abandoned. No version number is used
    twice, so the numbers from `to` + 1 to `version` have no update.
    """

    to: int  # the earlier version, of grid `grid`
    grid: int
    version: int  # its new number
    term: int  # term of the checkpoint of `version`
    skipped: bool = False  # True: the samples learned since then are left out; False: they are learned again

    def leaves(self, term: int, version: int, grid: int = 0) -> bool:
        """Return whether this rollback abandons an update of this version, or a server that began with this version."""
        return term < self.term and (version > self.to or (version == self.to and grid > self.grid))

    def text(self) -> str:
        """Return the rollback in words, for people."""
        since = "the samples since then are skipped" if self.skipped else "the samples since then are learned again"
        return f"version {self.version} is version {self.to} again (doll rollback): {since}"


def is_left(rollbacks: Sequence[Rollback], term: int, version: int, grid: int = 0) -> bool:
    """Return whether one of these rollbacks abandons the version; see `Rollback.leaves`."""
    return any(rollback.leaves(term, version, grid) for rollback in rollbacks)
