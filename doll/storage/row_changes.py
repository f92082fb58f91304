"""Encode the rows of tables that have changed from one version to a later one as a blob. Pure.

The rows are published for readers that are not workers (`doll serve`), while there are such readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from doll.errors import BlobError
from doll.storage.blobs import Buffer
from doll.storage.sections import Shapes, Vector, decode_delta, encode_delta
from doll.tables.rows import Rows, TableShape

FOLLOWED_S: Final = 10.0  # a reader counts as present for this time after its last message
RENEW_S: Final = 2.0  # interval of a reader's messages, which all differ
WORD_LIVES_S: Final = 600.0
_BEGAN: Final = ""  # no table has this name; an int64, in the bits of two float32
_BEGAN_VALUES: Final = 2


class RowChanges(NamedTuple):
    """The rows of each table that have changed after version `since`, with their values in `version`."""

    since: int
    version: int
    began: int  # first version of the term: the checkpoint from which its server has continued
    rows: dict[str, Rows]

    @property
    def num_bytes(self) -> int:
        """The size of rows and ids, in bytes."""
        return sum(rows.ids.nbytes + rows.values.nbytes for rows in self.rows.values())


def encode_row_changes(changes: RowChanges, shapes: Mapping[str, TableShape], *, job: str) -> list[Buffer]:
    """Return the blob, as parts for `Blobs.put`. It contains all tables, including those without a change."""
    pieces: dict[str, Vector | Rows] = {_BEGAN: np.array([changes.began], "<i8").view("<f4"), **changes.rows}
    return encode_delta(pieces, _with_began(shapes), job=job, since=changes.since, version=changes.version).parts


def decode_row_changes(data: Buffer, shapes: Mapping[str, TableShape], *, job: str, version: int) -> RowChanges:
    """Return the changes that were given to `encode_row_changes`, as views of `data`. Raise BlobError if the blob is
    damaged, has another job or version, or lacks a table. Raise NotFiniteError if a value is NaN or infinite."""
    pieces, since = decode_delta(data, _with_began(shapes), job=job, version=version)
    began = pieces.pop(_BEGAN, None)
    rows = {name: piece for name, piece in pieces.items() if isinstance(piece, Rows)}
    if rows.keys() != shapes.keys() or began is None or isinstance(began, Rows):
        raise BlobError(f"changes of version {version}: expected rows of {sorted(shapes)}, got {sorted(rows)}")
    return RowChanges(since, version, int(began.view("<i8")[0]), rows)


def _with_began(shapes: Mapping[str, TableShape]) -> Shapes:
    return {_BEGAN: _BEGAN_VALUES, **shapes}
