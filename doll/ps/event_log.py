"""The event log of one parameter server: a file with every event. A replay makes the same model, bit for bit.

The file is a sequence of length-prefixed MessagePack entries. Each entry is one event with its time; the event of a
fetched gradient also has the gradient's blob. The first entry is the server's start, with the checkpoint or the origins
of a new job.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from doll.config import JobConfig
from doll.errors import RecordError
from doll.model.flat_model import build, fingerprint
from doll.ps.checkpointing import encode_snapshot
from doll.ps.engine.events import ApplyUpdate, DropGradient, Event, GradientFetched, StoreCheckpoint
from doll.ps.model.updater import ContributionBuffer, ModelParts, make_parts
from doll.ps.start import Start, make_engine
from doll.records.bounded import short
from doll.storage.blobs import Buffer, blob_info, scope_of
from doll.storage.checkpoints import Checkpoint
from doll.storage.contributions import decode_contribution
from doll.task.base import load_task

_LENGTH: Final = struct.Struct("<I")
T = TypeVar("T")


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """One event, its time on the server's monotonic clock (seconds), and its gradient blob (b\"\": no gradient)."""

    event: Event
    now: float
    gradient: bytes = b""


class FileEventLog:
    """Writes entries to the file `path`, which must not exist yet. Written entries are kept even after SIGKILL."""

    def __init__(self, path: Path, start: Start) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=0)
        self._encoder = msgspec.msgpack.Encoder()
        self._append(start)

    def write(self, event: Event, now: float, gradient: Buffer | None = None) -> None:
        self._append(LogEntry(event, now, b"" if gradient is None else bytes(gradient)))

    def _append(self, item: Start | LogEntry) -> None:
        data = self._encoder.encode(item)
        self._file.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> tuple[Start, Iterator[LogEntry]]:
    """Return the server's start and the entries of its event log. An incomplete last entry of a killed server is left
    out. Raises RecordError if the file is not an event log of this build. If an entry is invalid, the error is raised
    when that entry is read."""
    items = _items(path)
    start = _decode(next(items, b""), Start, path)
    return start, (_decode(data, LogEntry, path) for data in items)


def _items(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        left = path.stat().st_size
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            left -= _LENGTH.size + length
            if left < 0:  # an incomplete entry, or a damaged length
                return
            data = file.read(length)
            yield data


def _decode(data: bytes, kind: type[T], path: Path) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RecordError(f"{path}: not an event log of this build: {short(exc)}") from exc


def replay(
    config: JobConfig, path: Path, *, on_update: Callable[[int, ModelParts], Any] | None = None
) -> Iterator[Checkpoint]:
    """Replay the event log at `path`, and yield each checkpoint that its server ordered, in order and bit for bit.

    If the server was killed, the last checkpoints may never have been stored. A checkpoint made on SIGTERM is missing,
    because no event asked for it.

    Args:
        config: the job file that the server ran with.
        on_update: function that is called for the first version and each later one, with the number and the model of
            the version. The same model object changes with the next update, so copy the arrays that you keep.

    Raises:
        RecordError: the file is not an event log of this build.
        DivergedError: the log ends at an update that made the model diverge.
        ConfigError: the task cannot be loaded.
    """
    start, entries = read_log(path)
    model = build(config, load_task(config))
    job_fingerprint = fingerprint(config, model)
    parts = make_parts(config.training, model)
    updater, tables = parts
    engine = make_engine(config, start, parts.load)
    contributions = ContributionBuffer(updater, tables, config.training.policy.age_weight)
    scope = scope_of(config.job, engine.start.run_id)
    if on_update is not None:
        on_update(engine.version, parts)
    for entry in entries:
        if isinstance(entry.event, GradientFetched):
            version = blob_info(entry.gradient).version
            size = updater.weights.size
            decoded = decode_contribution(
                entry.gradient, updater.num_parameters, job=scope, version=version, numel=size,
                tables={} if tables is None else tables.shapes,
            )  # fmt: skip
            contributions.put(entry.event.grant_id, decoded.values, rows=decoded.rows)
        for action in engine.handle(entry.event, entry.now):
            match action:
                case ApplyUpdate():
                    contributions.apply(action)
                    if on_update is not None:
                        on_update(action.version, parts)
                case DropGradient(held=number) if number:
                    contributions.drop(number)
                case StoreCheckpoint():
                    yield Checkpoint(
                        job=config.job, fingerprint=job_fingerprint, term=start.term, version=action.version,
                        state=encode_snapshot(action.snapshot), tensors=parts.tensors(),
                    )  # fmt: skip
