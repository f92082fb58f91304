"""Rows of tables as of one version after another: those of a checkpoint, in its file, and in memory those that have
changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from doll.evaluation.stored_weights import Place, StoredWeights, place_of
from doll.storage.row_changes import RowChanges
from doll.tables.row_layers import NO_LAYERS, RowLayers


class RowFollower:
    """Does no I/O. Not thread-safe; the versions that it gives are for any thread, and stay as they are.

    Args:
        limit_bytes: of memory for rows that have changed since the checkpoint.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._base: StoredWeights | None = None
        self._at = Place(0, 0)
        self._layers: Mapping[str, RowLayers] = {}

    @property
    def base(self) -> Place | None:
        """The place of the checkpoint; None: there is none yet."""
        return None if self._base is None else place_of(self._base)

    @property
    def num_bytes(self) -> int:
        """The memory for changed rows, in bytes."""
        return sum(layers.num_bytes for layers in self._layers.values())

    @property
    def needs_checkpoint(self) -> bool:
        """Whether a newer checkpoint should be read, because there are many changed rows."""
        return self._base is None or self.num_bytes > self._limit_bytes // 2

    def rebase(self, checkpoint: StoredWeights) -> None:
        """Have the rows of a newer checkpoint below those that have changed since."""
        at = place_of(checkpoint)
        if at.term == self._at.term and at.version <= self._at.version:
            self._layers = {name: layers.after(at.version) for name, layers in self._layers.items()}
        else:
            self._layers, self._at = {}, at
        self._base = checkpoint

    def advance(
        self, to: Place, read: Callable[[int], RowChanges | None], is_newest: Callable[[Place], bool]
    ) -> str:  # fmt: skip
        """Have the rows of a published version; why not, "" if they are here now.

        Args:
            read: what a version of this term has published as changed; None: it is not there (any more).
            is_newest: whether no checkpoint is newer than this one. What it raises changes nothing.
        """
        if self._base is None:
            return "no checkpoint has been read yet"
        base = place_of(self._base)
        is_same_term = self._at.term == to.term
        # A new term goes on from a checkpoint: what the term before it has made since is void.
        at, layers = (self._at, self._layers) if is_same_term else (base, {})
        if to == at:
            return ""
        if to.version <= at.version or to.term < base.term:
            return f"term {to.term} has no rows yet above those of the checkpoint of version {base.version}"
        chain: list[RowChanges] = []
        version, num_bytes = to.version, sum(each.num_bytes for each in layers.values())
        while version > at.version:
            changes = read(version)
            if changes is None:
                return f"the rows of version {version} are not published: the next checkpoint has them"
            chain.append(changes)
            version = changes.since
            num_bytes += changes.num_bytes
            if num_bytes > self._limit_bytes:
                return (
                    f"the rows that have changed since the checkpoint of version {base.version} take more than "
                    f"{self._limit_bytes / 1e6:g} MB of memory: raise --row-memory-mb, or save checkpoints more often"
                )
        # Another checkpoint may have this number, too, if a server has gone back to before a damaged one.
        if at.term != to.term and not (version == chain[-1].began == base.version and is_newest(base)):
            return f"term {to.term} went on from version {chain[-1].began}, whose checkpoint has not been read yet"
        for changes in reversed(chain):
            layers = {
                name: layers.get(name, NO_LAYERS).with_rows(rows, changes.version)
                for name, rows in changes.rows.items()
            }
        self._at, self._layers = to, layers
        return ""

    def with_weights(self, weights: npt.NDArray[np.float32], run_id: str) -> StoredWeights:
        """The version that was advanced to, with its weights."""
        assert self._base is not None, "expected a checkpoint before a version"
        term, version = self._at
        return self._base._replace(
            term=term, version=version, weights=weights, layers=self._layers, samples=-1, run_id=run_id
        )
