"""The changes of a model's weights from one version to a later one, as a blob. Pure.

If few numbers change, as under a significance filter, a worker that holds the older version reads these and not the
whole (MLLess, section 4: workers exchange filtered updates).
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
    num_parameters: int  # the first so many

    @property
    def shapes(self) -> Shapes:
        return shapes_of(self.numel, self.num_parameters)


class Delta(NamedTuple):
    """The numbers that differ between two versions, as they are in the later one."""

    since: int  # the earlier version
    ids: Ids  # of parameters, strictly increasing
    values: Vector  # shape (len(ids),)
    tail: Vector | None  # None: it has not changed

    def write_to(self, weights: npt.NDArray[np.float32]) -> None:
        """Make the later version of `weights`, shape (numel,), which are of `since`, or between the two."""
        weights[self.ids] = self.values
        if self.tail is not None:
            weights[len(weights) - len(self.tail) :] = self.tail


def changes(
    before: Vector, after: Vector, layout: Layout, *, job: str, since: int, version: int
) -> list[Buffer] | None:  # fmt: skip
    """The blob of what differs, bit for bit, between `before` and `after`, float32 of shape (numel,), of versions
    `since` and `version`; in parts as `Blobs.put` takes them. None: the whole is not longer."""
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
    """The delta that `changes` made; views of `data`.

    Raises:
        BlobError: torn, changed on the way, of another job, version or layout, or with keys that are unsorted, repeated
            or out of range; the message says which.
        NotFiniteError: a parameter is NaN or infinite.
    """
    pieces, since = decode_delta(data, layout.shapes, job=job, version=version)
    parameters, tail = pieces.get(PARAMETERS), pieces.get(TAIL)
    if not isinstance(parameters, Rows) or isinstance(tail, Rows):
        raise BlobError(
            f"delta of version {version}: expected some of the parameters, and the buffers whole or not at all"
        )
    return Delta(since, parameters.ids, parameters.values[:, 0], tail)
