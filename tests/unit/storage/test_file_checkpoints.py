"""What only files suffer: torn, renamed, killed while written, claimed by two processes."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from doll.errors import CheckpointError
from doll.storage.checkpoints import Checkpoint, encode_checkpoint
from doll.storage.file_checkpoints import FileCheckpointStore


def checkpoint(version: int = 20, term: int = 1) -> Checkpoint:
    tensors = {"weights": np.arange(64, dtype=np.float32) + version, "step": np.array(version)}
    return Checkpoint(job="digits", fingerprint="f1", term=term, version=version, state=b"state", tensors=tensors)


BYTES = b"".join(encode_checkpoint(checkpoint()))
HEAD_ENDS = 16 + int.from_bytes(BYTES[8:16], "little")
STATE_ENDS = HEAD_ENDS + len(b"state")
LENGTHS = {
    "nothing": 0,
    "part of the prefix": 7,
    "prefix": 16,
    "part of the head": HEAD_ENDS - 5,
    "head": HEAD_ENDS,
    "part of the state": STATE_ENDS - 2,
    "state": STATE_ENDS,
    "part of the tensors": STATE_ENDS + 100,
    "no checksum": len(BYTES) - 32,
    "part of the checksum": len(BYTES) - 1,
}


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("tail", [b"", bytes(4096)], ids=["cut", "zeros"])
def test_a_torn_file_is_passed_over(tmp_path: Path, length: int, tail: bytes) -> None:
    store = FileCheckpointStore(tmp_path, "digits")
    store.save(checkpoint(10))
    store.save(checkpoint(20))
    (tmp_path / "checkpoint-00000001-0000000020.doll").write_bytes(BYTES[:length] + tail)
    loaded = store.load_newest("f1")
    assert loaded is not None
    assert loaded.version == 10


def test_a_whole_file_of_another_schema_is_not_passed_over(tmp_path: Path) -> None:
    """A newer release wrote it: to go back to an older checkpoint silently would lose updates."""
    import hashlib

    body = b"DLCK\x04" + BYTES[5:-32]
    store = FileCheckpointStore(tmp_path, "digits")
    store.save(checkpoint(10))
    (tmp_path / "checkpoint-00000001-0000000020.doll").write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(CheckpointError, match="expected a checkpoint of schema 2 or 3, got b'DLCK', schema 4"):
        store.load_newest("f1")


def test_a_renamed_file_is_passed_over(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path, "digits")
    store.save(checkpoint(10))
    (tmp_path / "checkpoint-00000009-0000000099.doll").write_bytes(BYTES)
    loaded = store.load_newest("f1")
    assert loaded is not None
    assert loaded.version == 10


def test_foreign_files_are_let_be(tmp_path: Path) -> None:
    for name in ("notes.txt", "checkpoint-1-2.doll", "checkpoint-00000001-0000000002.doll.bak", "term-x.claim"):
        (tmp_path / name).write_text("mine")
    store = FileCheckpointStore(tmp_path, "digits")
    assert store.load_newest("f1") is None
    assert store.newest_term() == 0
    for version in range(5):
        store.save(checkpoint(version))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "checkpoint-00000001-0000000002.doll.bak").exists()


SAVE_AND_DIE = """
import os, signal, sys
from pathlib import Path
import numpy as np
from doll.storage import file_checkpoints
from doll.storage.checkpoints import Checkpoint

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "before rename":
    Path.replace = die
else:
    file_checkpoints._fsync_folder = die
store = file_checkpoints.FileCheckpointStore(Path(sys.argv[1]), "digits")
tensors = {"weights": np.ones(64, np.float32)}
store.save(Checkpoint(job="digits", fingerprint="f1", term=1, version=30, state=b"s", tensors=tensors))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "version"), [("before rename", 20), ("after rename", 30)])
def test_killed_while_saving(tmp_path: Path, moment: str, version: int) -> None:
    store = FileCheckpointStore(tmp_path, "digits")
    store.save(checkpoint(20))
    done = subprocess.run([sys.executable, "-c", SAVE_AND_DIE, str(tmp_path), moment], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.tmp"))) == (moment == "before rename")
    loaded = store.load_newest("f1")
    assert loaded is not None
    assert loaded.version == version
    term = store.claim_term()  # the lock went with the process
    store.save(checkpoint(31, term=term))
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileCheckpointStore(tmp_path, "digits")
    store.save(checkpoint(10))

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(CheckpointError, match=r"cannot save a checkpoint in .*: No space left on device"):
        store.save(checkpoint(20))
    monkeypatch.undo()
    assert store.versions() == [(1, 10)]
    assert list(tmp_path.glob("*.tmp")) == []


CLAIM = """
import sys
from pathlib import Path
from doll.storage.file_checkpoints import FileCheckpointStore
store = FileCheckpointStore(Path(sys.argv[1]), "digits")
sys.stdin.readline()
print(*[store.claim_term() for _ in range(40)])
"""


@pytest.mark.slow
def test_two_processes_never_claim_the_same(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIM, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    claims = [[int(word) for word in racer.communicate(timeout=300)[0].split()] for racer in racers]
    assert sorted(claims[0] + claims[1]) == list(range(1, 81))
    assert all(list(mine) == sorted(mine) for mine in claims)


def test_a_suspended_holder_of_the_lock_is_named_not_waited_for(tmp_path: Path) -> None:
    holder = os.open(tmp_path / ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    store = FileCheckpointStore(tmp_path, "digits", lock_timeout_s=0.05)
    with pytest.raises(CheckpointError, match=r"held .*\.lock for 0\.05 s: is a parameter server suspended"):
        store.claim_term()
    with pytest.raises(CheckpointError, match=r"is a parameter server suspended"):
        store.save(checkpoint())
    os.close(holder)
    assert store.claim_term() == 1


def test_reading_makes_no_folder(tmp_path: Path) -> None:
    store = FileCheckpointStore(tmp_path / "none", "digits")
    assert store.load_newest(None) is None
    assert store.newest_term() == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_reader_beside_a_busy_writer_always_finds_a_whole_checkpoint(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; import numpy as np\n"
        "from doll.storage.file_checkpoints import FileCheckpointStore\n"
        "from doll.storage.checkpoints import Checkpoint\n"
        "store = FileCheckpointStore(Path(sys.argv[1]), 'digits', keep=2)\n"
        "v = 0\n"
        "while os.getppid() == int(sys.argv[2]):\n"
        "    v += 1\n"
        "    tensors = {'w': np.ones(9)}\n"
        "    store.save(Checkpoint(job='digits', fingerprint='f', term=1, version=v, state=b'', tensors=tensors))\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(os.getpid())])
    try:
        store = FileCheckpointStore(tmp_path, "digits", keep=2)
        seen = [-1]
        deadline_s = time.monotonic() + 60
        while len(set(seen)) < 30:
            assert time.monotonic() < deadline_s
            loaded = store.load_newest("f")
            if loaded is not None:
                assert loaded.version >= seen[-1]
                seen.append(loaded.version)
    finally:
        writer.kill()
        writer.wait()
    assert not [path for path in tmp_path.glob("*.tmp") if path.stat().st_mtime < time.time() - 60]


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot claim a term in .*file"):
        FileCheckpointStore(tmp_path / "file", "digits").claim_term()
    with pytest.raises(ValueError, match="expected keep >= 2"):
        FileCheckpointStore(tmp_path, "digits", keep=1)


def test_the_claims_of_the_newest_terms_are_kept(tmp_path: Path) -> None:
    for _ in range(20):
        store = FileCheckpointStore(tmp_path, "digits")
        term = store.claim_term()
        store.save(checkpoint(term, term))
    assert sorted(path.name for path in tmp_path.glob("*.claim")) == [f"term-{t:08d}.claim" for t in range(13, 21)]
    assert FileCheckpointStore(tmp_path, "digits").claim_term() == 21


def test_where_nothing_locks_a_late_claim_takes_no_term_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FileCheckpointStore(tmp_path, "digits").save(checkpoint(20, 20))
    late = FileCheckpointStore(tmp_path, "digits")
    seen = [0]  # what it saw before it was suspended
    monkeypatch.setattr(
        late, "newest_term", lambda: seen.pop() if seen else FileCheckpointStore(tmp_path, "digits").newest_term()
    )
    assert late.claim_term() == 21
