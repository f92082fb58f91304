"""A checkpoint store of each kind, for the tests of what every store must do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from doll.storage.checkpoints import Checkpoint, CheckpointStore
from doll.storage.file_checkpoints import FileCheckpointStore
from doll.storage.s3_checkpoints import S3CheckpointStore
from memory_stores import MemoryCheckpointStore


class Kit(NamedTuple):
    """A store, a second handle on the same checkpoints, and a way to damage one of them."""

    store: CheckpointStore
    again: Callable[[str], CheckpointStore]  # of job name
    damage: Callable[[int, int], None]


@contextmanager
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an imitated S3 with an empty bucket `models`; one request at a time, as if S3 decided at once."""
    import boto3
    from moto import mock_aws
    from moto.core.botocore_stubber import BotocoreStubber

    one_at_a_time, answer = threading.Lock(), BotocoreStubber.__call__

    def serialised(stubber: BotocoreStubber, *args: Any, **kwargs: Any) -> Any:
        with one_at_a_time:
            return answer(stubber, *args, **kwargs)

    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(BotocoreStubber, "__call__", serialised)
    with mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket="models")
        yield client


@pytest.fixture(params=["memory", "file", "s3"])
def kit(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kit]:
    if request.param == "s3":
        with s3(monkeypatch) as client:

            def flip_object(term: int, version: int) -> None:
                where = {"Bucket": "models", "Key": f"team/digits/checkpoint-{term:08d}-{version:010d}.doll"}
                data = bytearray(client.get_object(**where)["Body"].read())
                data[len(data) // 2] ^= 1
                client.put_object(**where, Body=bytes(data))

            def handle(job: str) -> S3CheckpointStore:
                return S3CheckpointStore("s3://models/team/digits/", job, keep=3)

            yield Kit(handle("digits"), handle, flip_object)
        return
    if request.param == "file":
        folder = tmp_path / "not" / "there yet"

        def flip(term: int, version: int) -> None:
            path = folder / f"checkpoint-{term:08d}-{version:010d}.doll"
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)

        yield Kit(
            FileCheckpointStore(folder, "digits", keep=3), lambda job: FileCheckpointStore(folder, job, keep=3), flip
        )
        return
    store = MemoryCheckpointStore("digits", keep=3)
    yield Kit(store, store.handle, store.damage)


def checkpoint(term: int, version: int, *, job: str = "digits", fingerprint: str = "f1") -> Checkpoint:
    rng = np.random.default_rng(version)
    return Checkpoint(
        job=job,
        fingerprint=fingerprint,
        term=term,
        version=version,
        state=b"state of %d" % version,
        tensors={
            "weights": rng.standard_normal(100).astype(np.float32),
            "optimizer.step": np.array(version, np.int64),
            "optimizer.momentum": rng.standard_normal((4, 5)).T,  # not contiguous
            "empty": np.zeros(0, np.float32),
        },
    )


def same(a: Checkpoint | None, b: Checkpoint) -> bool:
    assert a is not None
    assert (a.job, a.fingerprint, a.term, a.version, a.state) == (
        b.job,
        b.fingerprint,
        b.term,
        b.version,
        b.state,
    )
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in b.tensors.items():
        assert a.tensors[name].dtype == tensor.dtype
        np.testing.assert_array_equal(a.tensors[name], tensor)
    return True
