"""The store of entries that do not fit into memory: a RocksDB in a temporary folder, which is not durable state."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import rocksdict

from doll.join.entries import Entry

_PREFIX: Final = "doll-join-"
_FOLDER: Final = re.compile(rf"{_PREFIX}(\d+)-")
_PLACE: Final = b"k"
_TIME_BYTES: Final = 8
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode


class RocksOverflow:
    """Entries in a RocksDB of a temporary folder: by key, and beside it the keys in the order of their deadlines."""

    def __init__(self) -> None:
        """Create the store. The folder and the database are made when the first entries come."""
        self._new_batch = partial(rocksdict.WriteBatch, raw_mode=True)
        self._unlogged = rocksdict.WriteOptions()
        # A restart makes the entries again from the join log. The stubs of rocksdict take the property for a method.
        self._unlogged.disable_wal = True  # type: ignore[method-assign, assignment]
        self._folder = ""
        self._db: Any = None

    def _open(self) -> Any:
        self._folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        options = rocksdict.Options(raw_mode=True)
        options.set_write_buffer_size(32 * 1024 * 1024)
        options.set_max_write_buffer_number(2)
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_bloom_filter(10, False)
        blocks.set_block_cache(rocksdict.Cache(32 * 1024 * 1024))
        options.set_block_based_table_factory(blocks)
        return rocksdict.Rdict(self._folder, options)

    def put_all(self, entries: Iterable[Entry]) -> None:
        if self._db is None:
            self._db = self._open()
        batch = self._new_batch()
        for entry in entries:
            batch.put(_PLACE + entry.key, _encode(entry))
            batch.put(_deadline(entry), entry.key)
        self._db.write(batch, self._unlogged)

    def take(self, keys: list[bytes]) -> list[Entry]:
        values: Any = self._db[[_PLACE + key for key in keys]]
        return self._removed([_decode(value) for value in values if value is not None])

    def take_due(self, waiting: bool, until_ms: int, most: int) -> list[Entry]:
        prefix = _prefix(waiting)
        keys: list[bytes] = []
        for at, key in self._db.items(from_key=prefix):
            if at[:1] != prefix or int.from_bytes(at[1 : 1 + _TIME_BYTES], "big") > until_ms or len(keys) == most:
                break
            keys.append(key)
        return self.take(keys) if keys else []

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _removed(self, entries: list[Entry]) -> list[Entry]:
        batch = self._new_batch()
        for entry in entries:
            batch.delete(_PLACE + entry.key)
            batch.delete(_deadline(entry))
        self._db.write(batch, self._unlogged)
        return entries


def remove_leftovers() -> None:
    """Remove the folders of processes that were killed. Call it before this process has a store: in a container, it may
    have the process id of the one before."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        match = _FOLDER.match(folder.name)
        if match is not None and (int(match[1]) == os.getpid() or not _is_alive(int(match[1]))):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _prefix(waiting: bool) -> bytes:
    return b"w" if waiting else b"f"


def _deadline(entry: Entry) -> bytes:
    """Return the key whose order is that of the deadlines."""
    at = max(entry.deadline_ms, 0).to_bytes(_TIME_BYTES, "big") + entry.number.to_bytes(_TIME_BYTES, "big")
    return _prefix(entry.features is None) + at
