"""Encode the changes of a model's weights from one version to a later one as a blob. Pure.

If few numbers change, as with a significance filter, a worker that has the older version reads the changes instead of
all weights (MLLess, section 4: workers exchange filtered updates).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from doll.errors import BlobError
from doll.storage.blobs import Buffer
from doll.storage.contributions import MAX_SHARE, PARAMETERS, TAIL, shapes_of
from doll.storage.sections import Shapes, Vector, decode_delta, encode_delta
from doll.tables.rows import Ids, Rows


class Layout(NamedTuple):
    """The parts of a flat vector of weights."""

    numel: int
    num_parameters: int  # number of values at the beginning that are parameters

    @property
    def shapes(self) -> Shapes:
        return shapes_of(self.numel, self.num_parameters)


class Delta(NamedTuple):
    """The numbers that differ between two versions, with their values in the later version."""

    since: int  # the earlier version
    ids: Ids  # indices of parameters, strictly increasing
    values: Vector  # shape (len(ids),)
    tail: Vector | None  # None: it has not changed

    def write_to(self, weights: npt.NDArray[np.float32]) -> None:
        """Change `weights`, shape (numel,), to the later version. They have version `since` or a version in between."""
        weights[self.ids] = self.values
        if self.tail is not None:
            weights[len(weights) - len(self.tail) :] = self.tail


def changes(
    before: Vector, after: Vector, layout: Layout, *, job: str, since: int, version: int
) -> list[Buffer] | None:  # fmt: skip
    """Return the blob of the numbers that differ bitwise between `before` and `after`, as parts for `Blobs.put`. Both
    are float32 of shape (numel,), of the versions `since` and `version`. Return None if all weights take as little."""
    n = layout.num_parameters
    old, new = before.view(np.uint32), after.view(np.uint32)
    ids = np.flatnonzero(old[:n] != new[:n])
    if len(ids) > MAX_SHARE * n:
        return None
    pieces: dict[str, Vector | Rows] = {PARAMETERS: Rows(ids, after[ids].reshape(-1, 1))}
    if (old[n:] != new[n:]).any():
        pieces[TAIL] = after[n:]
    return encode_delta(pieces, layout.shapes, job=job, since=since, version=version).parts


def decode_changes(data: Buffer, layout: Layout, *, job: str, version: int) -> Delta:
    """Return the delta that `changes` encoded, as views of `data`.

    Raises:
        BlobError: the blob is incomplete or damaged; or it has another job, version or layout, or keys that are
            unsorted, repeated or out of range. The message states which.
        NotFiniteError: a parameter is NaN or infinite.
    """
    pieces, since = decode_delta(data, layout.shapes, job=job, version=version)
    parameters, tail = pieces.get(PARAMETERS), pieces.get(TAIL)
    if not isinstance(parameters, Rows) or isinstance(tail, Rows):
        raise BlobError(
            f"delta of version {version}: expected some of the parameters, and the buffers whole or not at all"
        )
    return Delta(since, parameters.ids, parameters.values[:, 0], tail)
