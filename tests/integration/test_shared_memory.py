"""Weights and gradients in shared memory: the same job, and the same proof when all of it is wiped."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from doll.errors import ConfigError
from doll.storage.blobs import decode_blob, decode_latest, latest_key
from doll.storage.stores import open_blobs
from job_rig import MakePipeline

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("model", ["small", "large"])
def test_a_job_learns_every_sample_once_also_when_it_is_wiped(
    make_pipeline: MakePipeline, tmp_path: Path, model: str
) -> None:
    """The blobs of the large model (1.2 MB) are in files that are used again."""
    large = ["task.args.hidden=[400,700]"] if model == "large" else []
    job = make_pipeline("stop.updates=200", "worker.stall_timeout_s=600", *large)
    folder = tmp_path / "blobs"
    folder.mkdir(mode=0o700)
    job.services = replace(job.services, blobs=str(folder))
    job.start()
    job.send(job.samples(1600))
    job.until_version(10)
    assert list(folder.iterdir()), "the weights are not in shared memory"
    assert (model == "large") == bool(list(folder.glob(".segment-*")))
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)  # may meet a blob that is being written
        version = job.version
        job.send(job.samples(160))  # what was sent before may have been learned before
        job.until_version(version + 5)
    assert job.restarts == []
    job.send(job.samples(1700))
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.version, report.applied) == (200, 3200)

    blobs = open_blobs(job.config, job.services, give_up=lambda: True)
    pointer = blobs.get(latest_key(job.scope))
    assert pointer is not None
    weights = job.checkpoint().tensors["weights"]
    blob = blobs.get(decode_latest(pointer).key)
    assert blob is not None
    published = decode_blob(blob, job=job.scope, kind="w", version=200, numel=weights.size)
    assert published.tobytes() == weights.tobytes()
    blobs.close()


def test_shm_asked_for_and_not_there_is_an_error(make_pipeline: MakePipeline) -> None:
    job = make_pipeline("blobs.kind=shm")
    with pytest.raises(ConfigError, match=r"blobs\.kind is shm: expected a process that `doll up` starts"):
        open_blobs(job.config, job.services, give_up=lambda: True)
