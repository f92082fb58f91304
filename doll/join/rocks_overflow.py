"""The store of entries that do not fit into memory: a RocksDB in a temporary folder, which is not durable state."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from heapq import heappop, heappush
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec
import rocksdict

from doll.join.entries import Entry

_PREFIX: Final = "doll-join-"
_FOLDER: Final = re.compile(rf"{_PREFIX}(\d+)-")
_PLACE: Final = b"k"
_BLOCK_KEYS: Final = 1_000
_FILES: Final = 16  # that a search may look into, before they are merged
_NEVER: Final = 1 << 30  # what is removed must not wait until files are merged
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode
_decode_keys = msgspec.msgpack.Decoder(list[bytes]).decode
_key_of = attrgetter("key")


class RocksOverflow:
    """Entries in a RocksDB of a temporary folder, by key; and their keys in blocks, in the order of their deadlines.

    Entries come many at once, and a restart writes all of them. They are sorted first, because the database then puts
    each beside the one before. A block is not changed when one of its keys is taken: who takes the block finds no
    entry, or a later one, which then waits in memory.
    """

    def __init__(self) -> None:
        """Create the store. The folder and the database are made when the first entries come."""
        self._unlogged = rocksdict.WriteOptions()
        # A restart makes the entries again from the join log. The stubs of rocksdict take the property for a method.
        self._unlogged.disable_wal = True  # type: ignore[method-assign, assignment]
        self._folder = ""
        self._db: Any = None
        self._blocks: dict[bool, list[tuple[int, int]]] = {False: [], True: []}  # heaps: first deadline, and number
        self._num_blocks = 0

    def _open(self) -> Any:
        self._folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        options = rocksdict.Options(raw_mode=True)
        options.set_write_buffer_size(32 * 1024 * 1024)
        options.set_max_write_buffer_number(2)
        options.set_level_zero_file_num_compaction_trigger(_FILES)
        options.set_level_zero_slowdown_writes_trigger(_NEVER)
        options.set_level_zero_stop_writes_trigger(_NEVER)
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_bloom_filter(10, False)
        blocks.set_block_cache(rocksdict.Cache(32 * 1024 * 1024))
        options.set_block_based_table_factory(blocks)
        return rocksdict.Rdict(self._folder, options)

    def put_all(self, entries: Sequence[Entry]) -> None:
        if self._db is None:
            self._db = self._open()
        batch = rocksdict.WriteBatch(raw_mode=True)
        for waiting, heap in self._blocks.items():
            due = sorted((item.deadline_ms, item.key) for item in entries if (item.features is None) == waiting)
            for at in range(0, len(due), _BLOCK_KEYS):
                heappush(heap, (due[at][0], self._num_blocks))
                batch.put(_block(self._num_blocks), _encode([key for _, key in due[at : at + _BLOCK_KEYS]]))
                self._num_blocks += 1
        for entry in sorted(entries, key=_key_of):
            batch.put(_PLACE + entry.key, _encode(entry))
        self._db.write(batch, self._unlogged)

    def take(self, keys: list[bytes]) -> list[Entry]:
        values: Any = self._db[[_PLACE + key for key in keys]]
        entries = [_decode(value) for value in values if value is not None]
        self._remove([_PLACE + entry.key for entry in entries])
        return entries

    def take_due(self, waiting: bool, until_ms: int) -> list[Entry]:
        heap = self._blocks[waiting]
        while heap and heap[0][0] <= until_ms:
            place = _block(heappop(heap)[1])
            keys = _decode_keys(self._db[place])
            self._remove([place])
            if entries := self.take(keys):
                return entries
        return []

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _remove(self, places: list[bytes]) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        for place in places:
            batch.delete(place)
        self._db.write(batch, self._unlogged)


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


def _block(number: int) -> bytes:
    """Return the place of a block of keys: those of blocks are in their order, and before those of entries."""
    return b"b" + number.to_bytes(8, "big")
