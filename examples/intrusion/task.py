"""Network intrusion detection on connection records of the KDD Cup 1999: CSV lines of 41 features and the label.

Every transform is fixed in advance, so no transform uses records that a live stream has not shown yet.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from doll import Sample, Task
from doll.errors import BadRecordsError, SampleError
from torch import nn

_COLUMNS: Final = 42
_CATEGORICAL: Final = {1: b"protocol_type", 2: b"service", 3: b"flag"}
_RATES: Final = frozenset((*range(24, 31), *range(33, 41)))  # fractions 0..1
_NUMERIC: Final = tuple(column for column in range(41) if column not in _CATEGORICAL)
_COUNTS: Final = tuple(at for at, column in enumerate(_NUMERIC) if column not in _RATES)  # indexes in `_NUMERIC`
_NUMBERS: Final = msgspec.json.Decoder(list[float])
_LOG_SCALE: Final = 0.25  # log1p of a megabyte is 14: this factor scales counts and bytes to the size of the rates

FAMILIES: Final = ("normal", "dos", "probe", "r2l", "u2r")
_FAMILY: Final = {
    name: family
    for family, names in enumerate(
        (
            "normal",
            "apache2 back land mailbomb neptune pod processtable smurf teardrop udpstorm",
            "ipsweep mscan nmap portsweep saint satan",
            "ftp_write guess_passwd httptunnel imap multihop named phf sendmail snmpgetattack snmpguess spy "
            "warezclient warezmaster worm xlock xsnoop",
            "buffer_overflow loadmodule perl ps rootkit sqlattack xterm",
        )
    )
    for name in names.split()
}


class Intrusion(Task):
    """Distinguishes attacks from normal connections, with a multi-layer perceptron.

    Args:
        classes: `binary` (0 normal, 1 attack) or `families` (normal, dos, probe, r2l, u2r).
        hash_size: number of slots that protocol, service and flag are hashed into.
        hidden: widths of the hidden layers; empty: logistic regression.
    """

    num_classes: int

    def __init__(
        self,
        classes: Literal["binary", "families"] = "binary",
        hash_size: int = 128,
        hidden: Sequence[int] = (64,),
    ) -> None:
        if classes not in ("binary", "families"):
            raise ValueError(f"classes: expected binary or families, got {classes!r}")
        if hash_size < 1 or not all(width > 0 for width in hidden):
            raise ValueError(f"expected hash_size and hidden widths above 0, got {hash_size} and {list(hidden)}")
        self.binary = classes == "binary"
        self.num_classes = 2 if self.binary else len(FAMILIES)
        self.hash_size = hash_size
        self.hidden = tuple(hidden)
        self.input_shape = (len(_NUMERIC) + hash_size,)

    def build_model(self) -> nn.Module:
        widths = (len(_NUMERIC) + self.hash_size, *self.hidden)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], self.num_classes))

    def decode(self, record: bytes) -> Sample:
        cells = record.strip().split(b",")
        if len(cells) != _COLUMNS:
            raise SampleError(f"expected {_COLUMNS} columns (41 features, then the label), got {len(cells)}")
        numbers = np.array([[_number(cells[column], column) for column in _NUMERIC]])
        label = self._class(cells[-1])
        return Sample(self._features(numbers, {column: [cells[column]] for column in _CATEGORICAL})[0], label)

    def decode_many(self, values: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        lines = [value.strip() for value in values]
        if bad := [at for at, line in enumerate(lines) if line.count(b",") != _COLUMNS - 1]:
            raise BadRecordsError(bad)
        cells = b",".join(lines).split(b",")
        labels = np.array([self._class(cell) for cell in cells[_COLUMNS - 1 :: _COLUMNS]])
        names = {column: cells[column::_COLUMNS] for column in _CATEGORICAL}
        for column in (*_CATEGORICAL, _COLUMNS - 1):
            cells[column::_COLUMNS] = [b"0"] * len(lines)
        # A number in JSON's form is the same number in Python. Other forms, such as `1.` or `+1`, raise here.
        parsed = np.array(_NUMBERS.decode(b"[" + b",".join(cells) + b"]")).reshape(-1, _COLUMNS)
        numbers = parsed[:, _NUMERIC]
        limits = np.full(len(_NUMERIC), 1.0)
        limits[list(_COUNTS)] = np.finfo(np.float64).max
        if not (good := ((numbers >= 0) & (numbers <= limits)).all(axis=1)).all():
            raise BadRecordsError(np.flatnonzero(~good))
        return self._features(numbers, names), labels

    def _features(self, numbers: npt.NDArray[np.float64], names: Mapping[int, Sequence[bytes]]) -> npt.NDArray[Any]:
        """Return x of n records.

        Args:
            numbers: the columns of `_NUMERIC`, shape (n, 38).
            names: the n cells of each categorical column.
        """
        numbers = numbers + 0.0  # `-0` is 0 as an integer of JSON and -0.0 for `float`: both are 0.0 from here on
        x = np.zeros((len(numbers), len(_NUMERIC) + self.hash_size), np.float32)
        x[:, : len(_NUMERIC)] = numbers
        x[:, _COUNTS] = np.log1p(numbers[:, _COUNTS]) * _LOG_SCALE
        rows = np.arange(len(numbers))
        for column, name in _CATEGORICAL.items():
            # crc32 is the same in every process and version; Python's own hash of bytes is not.
            slots = [zlib.crc32(name + b"=" + cell.strip()) % self.hash_size for cell in names[column]]
            x[rows, len(_NUMERIC) + np.array(slots)] += 1.0
        return x

    def _class(self, cell: bytes) -> int:
        label = cell.strip().rstrip(b".").decode("ascii", "replace")
        if self.binary and label:
            return int(label != "normal")
        family = _FAMILY.get(label)
        if family is None:
            raise SampleError(f"expected `normal` or the name of an attack in the last column, got {label[:40]!r}")
        return family


def _number(cell: bytes, column: int) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if column in _RATES:
        if not 0 <= value <= 1:
            raise SampleError(f"column {column + 1}: expected a fraction 0..1, got {cell[:40]!r}")
        return value
    if not 0 <= value < math.inf:
        raise SampleError(f"column {column + 1}: expected a finite number >= 0, got {cell[:40]!r}")
    return value
