"""The changes of a model that no update made: rollbacks (`doll rollback`) and removed records (`doll forget`). Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    """A return of the model to an earlier version, without the samples learned since then (docs/decisions/0090). Or, if
    `forgot` is not empty, the newest version without some of its records (docs/decisions/0134).

    Updates and server starts of terms below `term` with versions above `to` are abandoned. No version number is used
    twice, so the numbers from `to` + 1 to `version` have no update.
    """

    to: int  # the earlier version, of grid `grid`
    grid: int
    version: int  # its new number
    term: int  # term of the checkpoint of `version`
    skipped: bool = False  # True: the samples learned since then are left out; False: they are learned again
    # By partition, the ranges [lo, hi) of offsets whose records `version` has not learned, and version `to` had.
    forgot: tuple[tuple[tuple[int, int], ...], ...] = ()

    def leaves(self, term: int, version: int, grid: int = 0) -> bool:
        """Return whether this rollback abandons an update of this version, or a server that began with this version."""
        return term < self.term and (version > self.to or (version == self.to and grid > self.grid))

    def text(self) -> str:
        """Return the rollback in words, for people."""
        if self.forgot:
            records = sum(hi - lo for spans in self.forgot for lo, hi in spans)
            return f"version {self.version} is version {self.to} without {records} of its records (doll forget)"
        since = "the samples since then are skipped" if self.skipped else "the samples since then are learned again"
        return f"version {self.version} is version {self.to} again (doll rollback): {since}"


def is_left(rollbacks: Sequence[Rollback], term: int, version: int, grid: int = 0) -> bool:
    """Return whether one of these rollbacks abandons the version; see `Rollback.leaves`."""
    return any(rollback.leaves(term, version, grid) for rollback in rollbacks)


def forgotten(rollbacks: Sequence[Rollback], partition: int) -> list[tuple[int, int]]:
    """Return the ranges of offsets of one partition that all of these have removed, in no order."""
    return [span for item in rollbacks if partition < len(item.forgot) for span in item.forgot[partition]]
