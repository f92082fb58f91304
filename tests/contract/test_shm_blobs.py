"""What a blob store in shared memory does besides the contract: its folder, full memory, files that are used again."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doll.errors import BlobError, ServiceUnavailableError
from doll.storage import blobs as codec
from doll.storage import shm_blobs
from doll.storage.shm_blobs import ShmBlobs
from memory_stores import MemoryBlobs
from paths import SUPPORT

pytestmark = pytest.mark.slow  # starts processes


class Shm:
    """A store in a folder of its own, with its fallback and a clock."""

    def __init__(self, folder: Path, limit_bytes: int = 1000) -> None:
        self.folder = folder
        self.now_s = 100.0
        self.fallback = MemoryBlobs()
        self.store = ShmBlobs(folder, limit_bytes=limit_bytes, fallback=self.fallback, clock=lambda: self.now_s)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def shm(tmp_path: Path) -> Shm:
    return Shm(tmp_path / "blobs")


def test_shm_is_for_this_user_alone(shm: Shm) -> None:
    shm.store.put("a", [b"1"], 60)
    assert shm.folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in shm.folder.iterdir()] == [0o600]
    shm.folder.chmod(0o750)
    with pytest.raises(ServiceUnavailableError, match="nobody else may enter"):
        Shm(shm.folder)
    link = shm.folder.with_name("link")
    shm.folder.chmod(0o700)
    link.symlink_to(shm.folder)
    with pytest.raises(ServiceUnavailableError, match="nobody else may enter"):
        Shm(link)


@pytest.mark.parametrize("key", ["../up", "/etc/passwd", ".", "..", "", "x" * 5000, "a/b", "nul\0"])
def test_shm_keeps_every_key_inside_its_folder(shm: Shm, key: str) -> None:
    before = {path for path in shm.folder.parent.rglob("*") if shm.folder not in path.parents}
    shm.store.put(key, [b"here"], 60)
    assert bytes(shm.store.get(key) or b"") == b"here"
    assert {path for path in shm.folder.parent.rglob("*") if shm.folder not in path.parents} == before
    assert len(shm.files()) == 1
    shm.store.delete(key)
    assert shm.files() == []


def test_shm_sends_what_does_not_fit_beyond_and_finds_it_there(shm: Shm, events: list[Any]) -> None:
    shm.store.put("a", [bytes(600)], 60)
    shm.store.put("b", [bytes(600)], 60)
    shm.store.put("c", [bytes(1001)], 60)
    assert shm.fallback.keys() == ["b", "c"]
    assert [event["event"] for event in events] == ["shared_memory_full"]
    assert [len(shm.store.get(key) or b"") for key in "abc"] == [600, 600, 1001]
    shm.store.delete("a", "b", "c")
    assert [shm.store.get(key) for key in "abc"] == [None, None, None]
    shm.store.put("b", [bytes(600)], 60)  # there is room again
    assert shm.fallback.keys() == []


def test_shm_lets_the_other_store_take_a_blob_when_its_folder_does_not_stay(
    shm: Shm, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def make_and_lose(path: str, mode: int) -> None:
        make(path, mode)
        os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", make_and_lose)
    shm.folder.rmdir()
    for size in (3, 100_000):
        shm.store.put("a", [bytes(size)], 60)
        assert len(shm.store.get("a") or b"") == size
    assert shm.fallback.keys() == ["a"]


def test_shm_replaces_a_blob_that_no_longer_fits(shm: Shm) -> None:
    shm.store.put("a", [b"old"], 60)
    shm.store.put("a", [bytes(1001)], 60)
    assert len(shm.store.get("a") or b"") == 1001


def test_shm_removes_what_has_expired_and_what_a_dead_writer_left(shm: Shm) -> None:
    shm.store.put("short", [b"1"], 10)
    shm.store.put("long", [b"2"], 100)
    for name, age_s in ((".new-dead", 3600), (".new-alive", 0)):
        (shm.folder / name).write_bytes(b"half")
        os.utime(shm.folder / name, (time.time() - age_s,) * 2)
    shm.now_s += 50
    assert shm.store.get("short") is None
    shm.store.put("next", [b"3"], 100)
    assert len(shm.files()) == 3
    assert ".new-alive" in shm.files()
    assert bytes(shm.store.get("long") or b"") == b"2"


def test_shm_that_was_wiped_is_empty_and_goes_on(shm: Shm) -> None:
    shm.store.put("a", [b"1"], 60)
    held = shm.store.get("a")
    for path in shm.folder.iterdir():
        path.unlink()
    shm.folder.rmdir()
    assert shm.store.get("a") is None
    assert bytes(held or b"") == b"1"  # whoever reads it has it
    shm.store.put("a", [b"2"], 60)
    assert bytes(shm.store.get("a") or b"") == b"2"
    assert shm.folder.stat().st_mode & 0o777 == 0o700
    assert shm.fallback.keys() == []


def test_shm_that_was_wiped_and_has_no_memory_left_sends_it_beyond(shm: Shm, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(descriptor: int, parts: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shm_blobs, "_write_all", no_memory)
    shm.folder.rmdir()
    shm.store.put("a", [b"1"], 60)
    assert shm.fallback.keys() == ["a"]
    assert shm.files() == []
    assert bytes(shm.store.get("a") or b"") == b"1"


def test_shm_refuses_a_torn_blob_as_any_store(shm: Shm) -> None:
    big = Shm(shm.folder, 10**6)
    big.store.put("w", codec.encode_blob(np.ones(100, np.float32), job="j", kind="w", version=3), 60)
    (path,) = shm.folder.iterdir()
    with path.open("r+b") as file:
        file.seek(200)
        file.write(b"!")
    os.utime(path, ns=(0, 10**18))
    data = big.store.get("w")
    assert data is not None
    with pytest.raises(BlobError, match="the body's checksum does not match"):
        codec.decode_blob(data, job="j", kind="w", version=3, numel=100)


class Reused(Shm):
    """Every blob is in such a file. `reader` is another process's store of the same folder."""

    def __init__(self, folder: Path, limit_bytes: int = 10_000) -> None:
        super().__init__(folder, limit_bytes)
        self.store = self.another(limit_bytes)
        self.reader = self.another(limit_bytes)

    def another(self, limit_bytes: int = 10_000) -> ShmBlobs:
        return ShmBlobs(
            self.folder,
            limit_bytes=limit_bytes,
            fallback=self.fallback,
            clock=lambda: self.now_s,
            reused_from_bytes=1,
            mapped_from_bytes=1,
        )

    def inodes(self) -> set[int]:
        return {path.stat().st_ino for path in self.folder.iterdir()}


@pytest.fixture
def reused(tmp_path: Path) -> Reused:
    return Reused(tmp_path / "blobs")


def test_a_file_is_used_again_when_its_blob_is_deleted_and_not_before(reused: Reused) -> None:
    for number in range(20):
        reused.store.put("a", [bytes([number]) * 1000], 60)
        assert bytes(reused.reader.get("a") or b"") == bytes([number]) * 1000
        reused.reader.delete("a")
    assert len(reused.inodes()) == 1
    reused.store.put("a", [b"1" * 1000], 60)
    reused.store.put("b", [b"2" * 1000], 60)
    assert len(reused.inodes()) == 2
    assert [bytes(reused.reader.get(key) or b"")[:1] for key in "ab"] == [b"1", b"2"]


def test_a_blob_that_is_read_is_not_written_over_though_it_is_deleted(reused: Reused) -> None:
    reused.store.put("a", [b"1" * 1000], 60)
    view = reused.reader.get("a")
    part = np.frombuffer(view, np.uint8)[10:20]  # type: ignore[arg-type]
    reused.store.delete("a")
    reused.store.put("b", [b"2" * 1000], 60)
    assert bytes(view or b"") == b"1" * 1000
    assert len(reused.inodes()) == 2
    del view
    reused.store.delete("b")
    for key in "cde":
        reused.store.put(key, [b"3" * 1000], 60)
    assert part.tobytes() == b"1" * 10, "a part of it is held"
    assert len(reused.inodes()) == 4
    del part
    reused.store.put("f", [b"4" * 1000], 60)
    assert len(reused.inodes()) == 4


def test_a_file_that_was_cut_short_is_no_blob_and_is_not_used_again(reused: Reused) -> None:
    """Its mapping is longer than it: reading or writing behind its end would kill the process."""
    reused.store.put("a", [b"1" * 10_000], 60)
    assert reused.reader.get("a") is not None  # mapped
    for path in reused.folder.iterdir():
        os.truncate(path, 100)
    assert reused.reader.get("a") is None
    reused.store.delete("a")
    reused.store.put("a", [b"2" * 10_000], 60)
    assert bytes(reused.reader.get("a") or b"") == b"2" * 10_000


def test_a_reader_that_comes_too_late_finds_no_blob(reused: Reused, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its look at the name and its lock, the file may have got another blob."""
    flock = fcntl.flock

    def owner_was_faster(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        reused.store.delete("a")
        reused.store.put("b", [b"2" * 1000], 60)
        flock(descriptor, operation)

    reused.store.put("a", [b"1" * 1000], 60)
    monkeypatch.setattr(fcntl, "flock", owner_was_faster)
    assert reused.reader.get("a") is None
    assert len(reused.inodes()) == 1
    assert bytes(reused.reader.get("b") or b"") == b"2" * 1000


def test_a_blob_that_is_replaced_while_it_is_looked_up_is_found(
    reused: Reused, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def owner_was_faster(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        reused.store.put("a", [b"2" * 1000], 60)
        flock(descriptor, operation)

    reused.store.put("a", [b"1" * 1000], 60)
    monkeypatch.setattr(fcntl, "flock", owner_was_faster)
    assert bytes(reused.reader.get("a") or b"") == b"2" * 1000


def test_reserved_memory_is_not_copied_and_not_lent_twice(reused: Reused) -> None:
    one, other = reused.store.reserve(1000), reused.store.reserve(1000)
    assert one is not None
    assert other is not None
    one[:], other[:] = b"1" * 1000, b"2" * 1000
    files = reused.inodes()
    reused.store.put("a", [one], 60)
    assert reused.inodes() == files
    assert bytes(reused.reader.get("a") or b"") == b"1" * 1000
    reused.store.delete("a")
    third = reused.store.reserve(1000)
    assert third is not None
    third[:] = b"3" * 1000
    assert (bytes(one), bytes(other)) == (b"1" * 1000, b"2" * 1000), "both are still held"
    del one, third
    reused.store.reserve(1000)
    assert len(reused.inodes()) == 3


@pytest.mark.parametrize("folder_too", [False, True])
def test_a_wiped_folder_loses_blobs_and_no_process(reused: Reused, folder_too: bool) -> None:
    memory = reused.store.reserve(1000)
    assert memory is not None
    memory[:] = b"m" * 1000
    reused.store.put("a", [b"1" * 1000], 60)
    held = reused.reader.get("a")
    for path in reused.folder.iterdir():
        path.unlink()
    if folder_too:
        reused.folder.rmdir()
    assert reused.reader.get("a") is None
    assert bytes(held or b"") == b"1" * 1000
    reused.store.put("m", [memory], 60)
    assert bytes(reused.reader.get("m") or b"") == b"m" * 1000
    reused.store.put("a", [b"2" * 1000], 60)
    assert bytes(reused.reader.get("a") or b"") == b"2" * 1000
    assert reused.fallback.keys() == []


def test_the_limit_counts_a_file_once_and_frees_what_waits_to_be_used_again(reused: Reused) -> None:
    for key in "abcde":
        reused.store.put(key, [bytes(1900)], 60)
    assert reused.fallback.keys() == []
    assert reused.store.reserve(1900) is None
    reused.store.put("f", [bytes(1900)], 60)
    assert reused.fallback.keys() == ["f"]
    reused.store.delete("a", "b")
    reused.store.put("g", [bytes(3800)], 60)  # of another size
    assert reused.fallback.keys() == ["f"]
    assert len(reused.inodes()) == 4


def test_without_memory_a_blob_goes_beyond(reused: Reused, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert reused.store.reserve(1000) is None
    reused.store.put("a", [b"1" * 1000], 60)
    assert reused.fallback.keys() == ["a"]
    assert bytes(reused.reader.get("a") or b"") == b"1" * 1000
    assert reused.files() == []


def test_without_memory_for_a_name_what_was_reserved_goes_beyond(
    reused: Reused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tmpfs each name counts as a file, and their number is limited."""
    memory = reused.store.reserve(1000)
    assert memory is not None
    memory[:] = b"1" * 1000

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    reused.store.put("a", [memory], 60)
    assert reused.fallback.keys() == ["a"]
    assert bytes(reused.reader.get("a") or b"") == b"1" * 1000


def test_what_a_dead_owner_left_is_removed_and_its_blobs_expire(reused: Reused) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for key in "ab":
        reused.store.put(key, [b"1" * 1000], 60)
    for number, path in enumerate(sorted(reused.folder.glob(".segment-*"))):
        path.rename(reused.folder / f".segment-{dead.pid}-{number}")
    reused.store.delete("a")
    reused.now_s += 2
    reader = reused.another()
    reader.put("c", [b"2" * 1000], 60)
    assert len(reused.inodes()) == 2
    assert bytes(reader.get("b") or b"") == b"1" * 1000
    reused.now_s += 70
    assert reader.get("b") is None
    reader.put("d", [b"2" * 1000], 60)
    assert len(reused.inodes()) == 1


def test_a_reader_forgets_the_files_that_are_gone(reused: Reused) -> None:
    def memory() -> int:
        return Path("/proc/self/maps").read_text().count(str(reused.folder))

    before = memory()
    for number in range(100):
        owner = reused.another()
        owner.put("a", [bytes([number]) * 1000], 60)
        assert bytes(reused.reader.get("a") or b"") == bytes([number]) * 1000
        owner.delete("a")
        owner.close()
    assert memory() <= before + 2


WRITER = """
import sys
from pathlib import Path
from doll.storage.shm_blobs import ShmBlobs
from memory_stores import MemoryBlobs
store = ShmBlobs(Path(sys.argv[1]), limit_bytes=10**9, fallback=MemoryBlobs(), reused_from_bytes=1, mapped_from_bytes=1)
for number in range(int(sys.argv[2])):
    memory = store.reserve(200_000) if number % 3 else None
    value = bytes([number % 251]) * 200_000
    if memory is not None:
        memory[:] = value
    store.put(f"k{number % 4}", [value if memory is None else memory], 60)
    if number % 5 == 0:
        store.delete(f"k{(number + 1) % 4}")
store.put("done", [b"1"], 60)
"""


@pytest.mark.parametrize("mapped_from_bytes", [1, 1 << 30])
def test_readers_beside_a_writer_never_see_bytes_change(tmp_path: Path, mapped_from_bytes: int) -> None:
    """Torn or changed: a value whose bytes are not all equal, or that has other bytes when it is read again."""
    folder = tmp_path / "blobs"
    store = ShmBlobs(
        folder, limit_bytes=10**9, fallback=MemoryBlobs(), reused_from_bytes=1, mapped_from_bytes=mapped_from_bytes
    )
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), "1500"], env=environment)
    read = 0
    try:
        while store.get("done") is None:
            assert writer.poll() in (None, 0)
            for number in range(4):
                value = store.get(f"k{number}")
                if value is None:
                    continue
                array = np.frombuffer(value, np.uint8)
                first = int(array[0])
                assert (array == first).all()
                assert (array == first).all()
                read += 1
    finally:
        writer.wait()
    assert read > 0
    assert len({path.stat().st_ino for path in folder.iterdir()}) < 12
