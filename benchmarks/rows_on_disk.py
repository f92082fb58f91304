"""Row updates of a table that is larger than its memory: `python -m benchmarks.rows_on_disk`.

Each update reads distinct rows, adds to them, and writes them. Candidates:

- `numpy`: all rows in memory, for reference.
- `mmap`: a file that is mapped; the pages are given back to the system when they reach the limit.
- `direct`: a file that is read and written by pages past the page cache (O_DIRECT), by some threads.
- `cache`: `direct`, behind a cache of single rows in memory; rows that were not used lately are written back.
- `rocksdict`: RocksDB, a row for each key.

`uniform` draws all rows equally often, `zipf` a few rows most of the time, at places without an order.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.tables import Table as Report

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

WIDTH: Final = 16
PAGE: Final = 4096
ROWS_PER_PAGE: Final = PAGE // (4 * WIDTH)


class Rows(ABC):
    """Rows by number."""

    @abstractmethod
    def read(self, ids: Ids) -> Floats: ...

    @abstractmethod
    def write(self, ids: Ids, rows: Floats) -> None: ...

    def close(self) -> None:  # noqa: B027
        """Release files."""


class InMemory(Rows):
    def __init__(self, num_rows: int) -> None:
        self._rows = np.zeros((num_rows, WIDTH), np.float32)
        self._rows[::ROWS_PER_PAGE] = 1  # every page exists

    def read(self, ids: Ids) -> Floats:
        return self._rows[ids]

    def write(self, ids: Ids, rows: Floats) -> None:
        self._rows[ids] = rows


class Mapped(Rows):
    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._file = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(self._file, 0)
        self._map.madvise(mmap.MADV_RANDOM)
        self._rows = np.frombuffer(self._map, np.float32).reshape(-1, WIDTH)
        self._limit, self._used = limit_bytes // PAGE, 0

    def read(self, ids: Ids) -> Floats:
        self._used += len(np.unique(ids // ROWS_PER_PAGE))
        if self._used > self._limit:  # more than what is in memory, as rows come again
            self._map.flush()
            self._map.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
            self._used = 0
        return self._rows[ids]

    def write(self, ids: Ids, rows: Floats) -> None:
        self._rows[ids] = rows


class Direct(Rows):
    def __init__(self, path: Path, threads: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_DIRECT)
        self._pool, self._threads = ThreadPoolExecutor(threads), threads
        self._pages: Ids = np.empty(0, np.int64)
        self._buffer = mmap.mmap(-1, PAGE)

    def read(self, ids: Ids) -> Floats:
        self._pages, at = np.unique(ids // ROWS_PER_PAGE, return_inverse=True)
        self._buffer = mmap.mmap(-1, PAGE * len(self._pages))  # aligned, as O_DIRECT needs
        self._at = at * ROWS_PER_PAGE + ids % ROWS_PER_PAGE
        self._all(os.preadv)
        rows: Floats = self._values[self._at]
        return rows

    def write(self, ids: Ids, rows: Floats) -> None:
        """Write the rows that were read last."""
        self._values[self._at] = rows
        self._all(os.pwritev)

    @property
    def _values(self) -> Floats:
        return np.frombuffer(self._buffer, np.float32).reshape(-1, WIDTH)

    def _all(self, call: Any) -> None:
        view, pages = memoryview(self._buffer), self._pages.tolist()

        def part(first: int) -> None:
            for index in range(first, len(pages), self._threads):
                call(self._file, [view[index * PAGE : (index + 1) * PAGE]], pages[index] * PAGE)

        for _ in self._pool.map(part, range(self._threads)):
            pass

    def close(self) -> None:
        self._pool.shutdown()


class Cached(Rows):
    """A cache of rows that makes room by halves: the rows with the oldest use are written back."""

    def __init__(self, below: Rows, num_rows: int, limit_bytes: int) -> None:
        self._below = below
        size = limit_bytes // (4 * WIDTH + 8 + 8)
        self._values = np.zeros((size, WIDTH), np.float32)
        self._ids, self._used = np.full(size, -1, np.int64), np.zeros(size, np.int64)
        self._slot = np.full(num_rows, -1, np.int32)
        self._num, self._clock = 0, 0

    def read(self, ids: Ids) -> Floats:
        self._clock += 1
        slots = self._slot[ids]
        missing = ids[slots < 0]
        if self._num + len(missing) > len(self._ids):
            self._used[slots[slots >= 0]] = self._clock
            self._make_room()
            slots = self._slot[ids]
        if len(missing):
            new = np.arange(self._num, self._num + len(missing))
            self._values[new], self._ids[new], self._slot[missing] = self._below.read(missing), missing, new
            self._num += len(missing)
            slots = self._slot[ids]
        self._used[slots] = self._clock
        return self._values[slots]

    def write(self, ids: Ids, rows: Floats) -> None:
        self._values[self._slot[ids]] = rows

    def _make_room(self) -> None:
        order = np.argpartition(self._used[: self._num], self._num // 8)
        out, rest = order[: self._num // 8], np.sort(order[self._num // 8 :])
        out = out[np.argsort(self._ids[out])]
        for part in np.array_split(out, max(1, len(out) // 20_000)):
            self._below.read(self._ids[part])
            self._below.write(self._ids[part], self._values[part])
        self._slot[self._ids[out]] = -1
        self._num = len(rest)
        for array in (self._values, self._ids, self._used):
            array[: self._num] = array[rest]
        self._slot[self._ids[: self._num]] = np.arange(self._num)

    def close(self) -> None:
        self._below.close()


class Rocks(Rows):
    def __init__(self, folder: Path, limit_bytes: int, num_rows: int) -> None:
        import rocksdict

        self._rocks = rocksdict
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(64 << 20)
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_block_cache(rocksdict.Cache(limit_bytes))
        blocks.set_bloom_filter(10, False)
        options.set_block_based_table_factory(blocks)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        self._db = rocksdict.Rdict(str(folder), options)
        self._unlogged = rocksdict.WriteOptions()
        # The stubs of rocksdict take the property for a method.
        self._unlogged.disable_wal = True  # type: ignore[method-assign, assignment]
        zeros = np.zeros((100_000, WIDTH), np.float32)
        for first in range(0, num_rows, len(zeros)):
            self.write(np.arange(first, min(first + len(zeros), num_rows)), zeros)
        self._db.flush()

    def read(self, ids: Ids) -> Floats:
        values: Any = self._db[[each.tobytes() for each in ids.astype(">i8")]]
        return np.frombuffer(b"".join(values), np.float32).reshape(-1, WIDTH)

    def write(self, ids: Ids, rows: Floats) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        for key, row in zip(ids.astype(">i8"), rows, strict=True):
            batch.put(key.tobytes(), row.tobytes())
        self._db.write(batch, self._unlogged)

    def close(self) -> None:
        self._db.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=float, default=1e8)
    parser.add_argument("--rocks-rows", type=float, default=2e6, help="RocksDB takes minutes to be filled with more")
    parser.add_argument("--limit-mb", type=int, default=1000)
    parser.add_argument("--update", type=int, default=10_000, help="rows of an update")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", nargs="*", default=["numpy", "mmap", "direct", "cache", "rocksdict"])
    arguments = parser.parse_args()
    num_rows, limit = int(arguments.rows), arguments.limit_mb << 20
    columns = ("store", "rows", "limit MB", "draws", "row updates/s")
    report = Report("Row updates of a table larger than its memory", columns, left=("store", "draws"))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "rows"
        if set(arguments.only) & {"mmap", "direct", "cache"}:
            _fill(path, num_rows)
        for name in arguments.only:
            count, memory = num_rows, limit
            if name == "rocksdict":  # as much memory for each row
                count = int(arguments.rocks_rows)
                memory = limit * count // num_rows
            for draws in ("uniform", "zipf"):
                rows = _opened(name, Path(folder), count, memory, arguments.threads)
                speed = _speed(rows, _places(draws, count, arguments.update), arguments.seconds)
                rows.close()
                report.rows.append([name, f"{count:.0e}", f"{memory >> 20}", draws, f"{speed:,.0f}"])
                print(*report.rows[-1], sep="  ", flush=True)
                del rows
    print(report.markdown())


def _fill(path: Path, num_rows: int) -> None:
    block = np.ones((1 << 18, WIDTH), np.float32)
    with path.open("wb") as file:
        for first in range(0, num_rows, len(block)):
            file.write(block[: num_rows - first].tobytes())
            if first % (len(block) * 64) == 0:  # so that other processes keep their pages
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.truncate(-(-file.tell() // PAGE) * PAGE)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _opened(name: str, folder: Path, num_rows: int, limit: int, threads: int) -> Rows:
    match name:
        case "numpy":
            return InMemory(num_rows)
        case "mmap":
            return Mapped(folder / "rows", limit)
        case "direct":
            return Direct(folder / "rows", threads)
        case "cache":
            return Cached(Direct(folder / "rows", threads), num_rows, limit)
    return Rocks(Path(tempfile.mkdtemp(dir=folder)), limit, num_rows)


def _places(draws: str, num_rows: int, count: int) -> list[Ids]:
    rng = np.random.default_rng(1)
    updates = []
    for _ in range(400):
        ids = rng.integers(0, num_rows, count) if draws == "uniform" else rng.zipf(1.2, count) % num_rows
        updates.append(np.unique(ids.astype(np.int64) * 1_000_003 % num_rows))
    return updates


def _speed(rows: Rows, updates: list[Ids], seconds: float) -> float:
    """Return row updates per second, in the second half of the time."""
    done, begun, index = 0, time.perf_counter(), 0
    counted_from = begun + seconds / 2
    while (now := time.perf_counter()) < begun + seconds or not done:
        if done == 0 and now >= counted_from:
            counted_from = now
        ids = updates[index % len(updates)]
        index += 1
        rows.write(ids, rows.read(ids) + np.float32(0.1))
        if now >= counted_from:
            done += len(ids)
    return done / (time.perf_counter() - counted_from)


if __name__ == "__main__":
    main()
