"""Contributions as blobs: dense, or the values that are not zero where these are few. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from doll.rows import Rows
from doll.storage.blobs import Buffer, blob_info, decode_blob, encode_blob
from doll.storage.sections import decode_push, encode_push

Vector = npt.NDArray[np.float32]

_PARAMETERS: Final = "parameters"
_TAIL: Final = "tail"  # what is behind the parameters: buffers, which are always whole
# A value of the sparse form takes 5 bytes and more, and both sides more time than 4 bytes of the dense one.
_MAX_SHARE: Final = 0.6


class Decoded(NamedTuple):
    """A contribution.

    Attributes:
        values: float32, shape (numel,).
        num_sent: how many of them were sent.
    """

    values: Vector
    num_sent: int


def encode_contribution(values: Vector, num_parameters: int, *, job: str, version: int) -> list[Buffer]:
    """The blob of a contribution, the shorter one of its two forms.

    Args:
        values: float32, shape (numel,), laid out as `doll.model` says. The parts are views of it where they can be.
        num_parameters: the first so many may be left out where they are zero.
        version: of the weights that it was computed at.
    """
    parameters = values[:num_parameters]
    ids = np.flatnonzero(parameters)
    if len(ids) > _MAX_SHARE * num_parameters:
        return encode_blob(values, job=job, kind="g", version=version)
    pieces: dict[str, Vector | Rows] = {_PARAMETERS: Rows(ids, parameters[ids].reshape(-1, 1))}
    if len(values) > num_parameters:
        pieces[_TAIL] = values[num_parameters:]
    return encode_push(pieces, _shapes(len(values), num_parameters), job=job, version=version).parts


def decode_contribution(data: Buffer, num_parameters: int, *, job: str, version: int, numel: int) -> Decoded:
    """What `encode_contribution` was given; a view of `data` where that is dense.

    Raises:
        BlobError: torn, changed on the way, of another job, version or size, or with keys that are unsorted, repeated
            or out of range; the message says which.
        NotFiniteError: a value of the sparse form is NaN or infinite.
    """
    if blob_info(data).kind != "p":
        return Decoded(decode_blob(data, job=job, kind="g", version=version, numel=numel), numel)
    pieces = decode_push(data, _shapes(numel, num_parameters), job=job, version=version)
    values = np.zeros(numel, np.float32)
    num_sent = 0
    for name, piece in pieces.items():
        into = values[:num_parameters] if name == _PARAMETERS else values[num_parameters:]
        if isinstance(piece, Rows):
            into[piece.ids] = piece.values[:, 0]
            num_sent += len(piece.ids)
        else:
            into[:] = piece
            num_sent += len(piece)
    return Decoded(values, num_sent)


def _shapes(numel: int, num_parameters: int) -> dict[str, int]:
    shapes = {_PARAMETERS: num_parameters}
    return shapes if numel == num_parameters else shapes | {_TAIL: numel - num_parameters}
