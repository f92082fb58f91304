"""Contributions as blobs: dense, or the values that are not zero where these are few, and rows of tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.storage.blobs import Buffer, blob_info, decode_blob, encode_blob
from doll.storage.sections import decode_push, encode_push
from doll.tables.rows import Rows, TableShape

Vector = npt.NDArray[np.float32]
Tables = Mapping[str, TableShape]

_PARAMETERS: Final = "parameters"  # no table has this name: theirs are paths of parameters, which end in `weight`
_TAIL: Final = "tail"  # what is behind the parameters: buffers, which are always whole
# A value of the sparse form takes 5 bytes and more, and both sides more time than 4 bytes of the dense one.
_MAX_SHARE: Final = 0.6
_NO_TABLES: Final[Tables] = {}
_NO_ROWS: Final[Mapping[str, Rows]] = {}


class DecodedContribution(NamedTuple):
    """A contribution.

    Attributes:
        values: float32, shape (numel,).
        num_sent: how many numbers were sent.
        rows: of tables, by name.
    """

    values: Vector
    num_sent: int
    rows: Mapping[str, Rows] = _NO_ROWS


def encode_contribution(
    values: Vector, num_parameters: int, *, job: str, version: int, rows: Mapping[str, Rows] = _NO_ROWS,
    tables: Tables = _NO_TABLES,
) -> list[Buffer]:  # fmt: skip
    """The blob of a contribution, the shorter one of its two forms.

    Args:
        values: float32, shape (numel,), laid out as `doll.model.flat_model` says. The parts are views of it where they
        can be. num_parameters: the first so many may be left out where they are zero. version: of the weights that it
        was computed at. rows: of tables, by name. tables: shapes of all tables of the model.
    """
    parameters = values[:num_parameters]
    ids = np.flatnonzero(parameters)
    is_dense = len(ids) > _MAX_SHARE * num_parameters
    if is_dense and not rows:
        return encode_blob(values, job=job, kind="g", version=version)
    pieces: dict[str, Vector | Rows] = {}
    if num_parameters:
        pieces[_PARAMETERS] = parameters if is_dense else Rows(ids, parameters[ids].reshape(-1, 1))
    if len(values) > num_parameters:
        pieces[_TAIL] = values[num_parameters:]
    shapes = _shapes(len(values), num_parameters, tables)
    return encode_push({**pieces, **rows}, shapes, job=job, version=version).parts


def decode_contribution(
    data: Buffer, num_parameters: int, *, job: str, version: int, numel: int, tables: Tables = _NO_TABLES
) -> DecodedContribution:
    """What `encode_contribution` was given; views of `data` where they can be.

    Raises:
        BlobError: torn, changed on the way, of another job, version or size, of a table that is not in `tables`, or
            with keys that are unsorted, repeated or out of range; the message says which.
        NotFiniteError: a value of the sparse form or of a row is NaN or infinite.
    """
    if blob_info(data).kind != "p":
        return DecodedContribution(decode_blob(data, job=job, kind="g", version=version, numel=numel), numel)
    pieces = decode_push(data, _shapes(numel, num_parameters, tables), job=job, version=version)
    values = np.zeros(numel, np.float32)
    num_sent = 0
    rows: dict[str, Rows] = {}
    for name, piece in pieces.items():
        num_sent += piece.values.size if isinstance(piece, Rows) else len(piece)
        if name in tables:
            assert isinstance(piece, Rows), "a dense section is of a vector"
            rows[name] = piece
            continue
        into = values[:num_parameters] if name == _PARAMETERS else values[num_parameters:]
        if isinstance(piece, Rows):
            into[piece.ids] = piece.values[:, 0]
        else:
            into[:] = piece
    return DecodedContribution(values, num_sent, rows)


def _shapes(numel: int, num_parameters: int, tables: Tables) -> dict[str, int | TableShape]:
    shapes: dict[str, int | TableShape] = {**tables, _PARAMETERS: num_parameters}
    return shapes if numel == num_parameters else shapes | {_TAIL: numel - num_parameters}
