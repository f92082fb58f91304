"""Compress gradients and steps to blobs: all values, or only the nonzero ones if these are few, and rows. Pure.

A gradient is sent unchanged as dense float32, or rounded to 16 bits (`blobs.contributions`). A step has many zeros if
its worker holds back insignificant values, or if a batch changes few parameters. Then only the nonzero values are sent.
`doll.optim.significance_filter` and `doll.optim.top_k` choose the values that a worker holds back.
`doll.consumers.compute.error_feedback` keeps what rounding loses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.model.slices import Slice, Slices
from doll.storage.blobs import Buffer, blob_info, decode_blob, encode_blob
from doll.storage.sections import RoundedVector, decode_push, encode_push
from doll.tables.row_slices import RowSlice, row_slices
from doll.tables.rows import Rows, TableShape

Vector = npt.NDArray[np.float32]
Tables = Mapping[str, TableShape]

PARAMETERS: Final = "parameters"  # not the name of a table: these are paths of parameters that end in `weight`
TAIL: Final = "tail"  # the values after the parameters: buffers, which are always complete
# In the sparse form a value takes 5 bytes or more; in the dense form it takes 4 bytes and less time on both sides.
MAX_SHARE: Final = 0.6
_NO_TABLES: Final[Tables] = {}
NO_ROWS: Final[Mapping[str, Rows]] = {}


class DecodedContribution(NamedTuple):
    """A decoded contribution."""

    values: Vector  # float32, shape (numel,)
    num_sent: int  # number of values that were sent
    rows: Mapping[str, Rows] = NO_ROWS  # rows of tables, by name


class Compressor(NamedTuple):
    """An encoder of one worker's contributions."""

    job: str
    # Number of parameters, which are the first values. Only their zeros may be omitted. None: every value is sent.
    num_parameters: int | None = None
    tables: Tables = _NO_TABLES  # shapes of all tables of the model, by name
    rounding: Callable[[Vector], RoundedVector | None] | None = None  # rounds dense parameters; needs `num_parameters`

    def compress_slices(
        self, values: Vector, slices: Slices | None, *, version: int, rows: Mapping[str, Rows] = NO_ROWS
    ) -> list[list[Buffer]]:  # fmt: skip
        """Return a blob for each slice of a contribution; see `compress`. It contains the rows of the slice's shard
        (`doll.tables.row_slices`). `slices`: None: the model is not divided."""
        if slices is None:
            n = len(values) if self.num_parameters is None else self.num_parameters
            slices = Slices([Slice(0, len(values), n, n)])
        if self.num_parameters is None:
            assert not rows, "a dense contribution has no rows"
            return [encode_blob(part.view(values), job=self.job, kind="g", version=version) for part in slices]
        parameters = values[: self.num_parameters]
        ids = [np.flatnonzero(part.view(values)[: part.num_parameters]) for part in slices]
        is_dense = sum(map(len, ids)) > MAX_SHARE * self.num_parameters
        rounded = self.rounding(parameters) if self.rounding is not None and is_dense else None
        return [
            self._compressed(part, part.view(values), here, rounded, version, shard.parts(rows), shard)
            for part, here, shard in zip(slices, ids, row_slices(len(slices)), strict=True)
        ]

    def _compressed(
        self, part: Slice, values: Vector, ids: npt.NDArray[np.int64], rounded: RoundedVector | None, version: int,
        rows: Mapping[str, Rows], shard: RowSlice,
    ) -> list[Buffer]:  # fmt: skip
        """Return the blob of one slice. `ids`: its parameters that are not zero. `rounded`: those of all slices."""
        n = part.num_parameters
        parameters = values[:n]
        is_dense = len(ids) > MAX_SHARE * n
        if is_dense and not rows and rounded is None:
            return encode_blob(values, job=self.job, kind="g", version=version)
        pieces: dict[str, Vector | RoundedVector | Rows] = {}
        if n and rounded is not None:
            pieces[PARAMETERS] = rounded._replace(values=rounded.values[part.begin : part.begin + n])
        elif n:
            pieces[PARAMETERS] = parameters if is_dense else Rows(ids, parameters[ids].reshape(-1, 1))
        if len(values) > n:
            pieces[TAIL] = values[n:]
        return encode_push(
            {**pieces, **rows}, shapes_of(len(values), n, shard.shapes(self.tables)), job=self.job, version=version
        ).parts

    def compress(self, values: Vector, *, version: int, rows: Mapping[str, Rows] = NO_ROWS) -> list[Buffer]:
        """Return the blob of a contribution in the shorter of its two formats, as parts for `Blobs.put`. The parts may
        be views of `values`, so `values` must not change before they are stored.

        Args:
            values: float32, shape (numel,), with the layout of `doll.model.flat_model`.
            version: version of the weights at which the contribution was computed.
        """
        return self.compress_slices(values, None, version=version, rows=rows)[0]


def whole_contribution(
    values: Vector, num_parameters: int, rows: Mapping[str, Rows], tables: Tables, *, job: str, version: int
) -> list[Buffer]:
    """Return a blob with all of `values`, shape (numel,), and `rows`, as parts."""
    if not rows:
        return encode_blob(values, job=job, kind="g", version=version)
    pieces: dict[str, Vector | RoundedVector | Rows] = {**rows}
    if num_parameters:
        pieces[PARAMETERS] = values[:num_parameters]
    if len(values) > num_parameters:
        pieces[TAIL] = values[num_parameters:]
    return encode_push(pieces, shapes_of(len(values), num_parameters, tables), job=job, version=version).parts


def decode_contribution(
    data: Buffer, num_parameters: int, *, job: str, version: int, numel: int, tables: Tables = _NO_TABLES
) -> DecodedContribution:
    """Return the contribution that was given to `Compressor.compress`, as views of `data` if possible.

    Raises:
        BlobError: the blob is incomplete or damaged; or it has another job, version or size; or it has a table that is
            not in `tables`; or its keys are unsorted, repeated or out of range. The message states which.
        NotFiniteError: a value of the sparse form or of a row is NaN or infinite.
    """
    if blob_info(data).kind != "p":
        return DecodedContribution(decode_blob(data, job=job, kind="g", version=version, numel=numel), numel)
    pieces = decode_push(data, shapes_of(numel, num_parameters, tables), job=job, version=version)
    values = np.zeros(numel, np.float32)
    num_sent = 0
    rows: dict[str, Rows] = {}
    for name, piece in pieces.items():
        num_sent += piece.values.size if isinstance(piece, Rows) else len(piece)
        if name in tables:
            assert isinstance(piece, Rows), "a dense section is of a vector"
            rows[name] = piece
            continue
        into = values[:num_parameters] if name == PARAMETERS else values[num_parameters:]
        if isinstance(piece, Rows):
            into[piece.ids] = piece.values[:, 0]
        else:
            into[:] = piece
    return DecodedContribution(values, num_sent, rows)


def shapes_of(numel: int, num_parameters: int, tables: Tables = _NO_TABLES) -> dict[str, int | TableShape]:
    """Return the shapes of the sections of a blob: the two of the flat vector, and one for each table."""
    shapes: dict[str, int | TableShape] = {**tables, PARAMETERS: num_parameters}
    return shapes if numel == num_parameters else shapes | {TAIL: numel - num_parameters}
