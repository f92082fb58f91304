"""The whole pipeline on the real broker and Redis: policies, packed records, batch norm, plain Kafka clients."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Producer
from doll.config.policy import POLICIES
from doll.ps.event_log import replay
from doll.records.packing import pack
from doll.storage.blobs import decode_blob, decode_latest, latest_key
from doll.storage.redis_blobs import RedisBlobs
from doll.storage.redis_client import connect_redis
from job_policies import some
from job_rig import MakePipeline
from paths import EXAMPLES

pytestmark = pytest.mark.integration

CHURN = EXAMPLES / "stdin" / "task.py"

BATCH_NORM_TASK = """
import torch
from examples.synthetic.task import Gaussian


class WithBatchNorm(Gaussian):
    def build_model(self):
        return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
"""


def test_a_job_learns_every_sample_once(make_pipeline: MakePipeline) -> None:
    job = make_pipeline("stop.updates=40")
    job.start()
    job.send(job.samples(800))
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.version, report.applied, report.pending, report.voided) == (40, 640, 160, 0)
    assert [update.version for update in job.updates] == list(range(1, 41))
    assert all(update.n_samples == 16 for update in job.updates)
    early, late = (np.mean([update.loss for update in part]) for part in (job.updates[:5], job.updates[-5:]))
    assert late < 0.7 * early

    # What was published last, and what anybody may read from Redis, is the durable model.
    blobs = RedisBlobs(connect_redis(job.services))
    pointer = blobs.get(latest_key(job.scope))
    assert pointer is not None
    latest = decode_latest(pointer)
    weights = job.checkpoint().tensors["weights"]
    blob = blobs.get(latest.key)
    assert blob is not None
    published = decode_blob(blob, job=job.scope, kind="w", version=40, numel=weights.size)
    blobs.close()
    assert latest.version == 40
    assert published.tobytes() == weights.tobytes()


def test_adam_on_packed_records_with_more_batches_than_workers(make_pipeline: MakePipeline) -> None:
    """K = 5 > N = 2, four samples a record."""
    job = make_pipeline(
        "stop.updates=10", "training.policy.group_size=5", "training.optimizer={name: adam, lr: 0.01}",
        "data.samples_per_record=4",
    )  # fmt: skip
    job.start()
    values = job.samples(500)
    job.send([pack(values[at : at + 4]) for at in range(0, 500, 4)])
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.version, report.applied) == (10, 10 * 5 * 2)  # offsets: two records a batch
    assert all(len(update.members) == 5 and update.n_samples == 40 for update in job.updates)
    assert {name for name in job.checkpoint().tensors if name.startswith("optimizer.")} >= {
        "optimizer.exp_avg",
        "optimizer.exp_avg_sq",
        "optimizer.step",
    }


OTHERS = [name for name in POLICIES.built_in if name != "doll"]


@pytest.mark.parametrize("policy", some(OTHERS, "bsp", "ssp", "isp", "wsp", "diloco"))
def test_other_policies_and_batch_norm(make_pipeline: MakePipeline, tmp_path: Path, policy: str) -> None:
    (tmp_path / "bn.py").write_text(BATCH_NORM_TASK)
    sizes = {"wsp": ", wave_batches: 2", "diloco": ", local_batches: 1"}
    job = make_pipeline(
        "stop.updates=30",
        f"training.policy={{name: {policy}{sizes.get(policy, '')}}}",
        "task.class=bn.py:WithBatchNorm",
        "task.args={features: 4}",
    )
    job.start()
    job.send(job.samples(800))
    job.until_finished()
    job.assert_audit_ok()
    for update in job.updates:
        if update.settled:
            assert (policy, update.members) == ("isp", ())
        elif policy in ("bsp", "isp"):
            assert sorted(member.worker for member in update.members) == [0, 1]
            assert all(member.base_version == update.version - 1 for member in update.members)
        elif policy == "diloco":
            workers = [member.worker for member in update.members]
            assert sorted(workers) == sorted(set(workers)), "of each worker of the round, one wave"
        else:
            assert len(update.members) == (2 if policy == "wsp" else 1)
    assert any(update.settled for update in job.updates) == (policy == "isp")
    # 4 + 4 + 8 + 2 parameters, then running mean and variance, then the int64 that counts batches: they travel with the
    # gradients. The features have mean 0 and variance 1 + 1 (two classes at +-1).
    weights = job.checkpoint().tensors["weights"]
    assert weights.shape == (28,)
    mean, variance, batches = weights[18:22], weights[22:26], int(weights[26:].view(np.int64)[0])
    assert batches == 30 if policy == "bsp" else 0 < batches <= 60
    assert np.abs(mean).max() < 0.6
    assert mean.any()
    assert 1.3 < variance.mean() < 2.8


def churn_job(make_pipeline: MakePipeline, *overrides: str) -> Any:
    job = make_pipeline("task.class=churn.py:Churn", "task.args={}", *overrides)
    shutil.copy(CHURN, job.folder / "churn.py")
    return job


def test_records_of_a_plain_kafka_client_are_trained_on(make_pipeline: MakePipeline) -> None:
    """The lines of docs/records.md, which know nothing of DOLL but the name of a topic."""
    job = churn_job(make_pipeline, "stop.updates=10")
    job.start()
    rng = random.Random(0)
    producer = Producer({"bootstrap.servers": job.services.kafka, "acks": "all", "enable.idempotence": True})
    for i in range(200):
        visits = rng.randint(0, 30)
        event = {"age": rng.uniform(18, 80), "visits": visits, "spend": 10.0 * visits, "left": visits < 8}
        producer.produce(f"doll.{job.config.job}.samples", json.dumps(event), partition=i % 2)
        producer.poll(0)
    assert producer.flush(300) == 0
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.applied, report.dead) == (160, 0)


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not on PATH")
def test_records_of_kcat_are_trained_on(make_pipeline: MakePipeline) -> None:
    job = churn_job(make_pipeline, "stop.updates=5")
    job.start()
    lines = subprocess.run([sys.executable, str(CHURN), "200"], capture_output=True, check=True).stdout.splitlines()
    for partition in (0, 1):
        subprocess.run(
            ["kcat", "-P", "-b", job.services.kafka, "-t", job.config.topic("samples"), "-p", str(partition)],
            input=b"\n".join(lines[partition::2]) + b"\n",
            check=True,
            timeout=300,
        )
    job.until_finished()
    assert job.assert_audit_ok().dead == 0


def test_a_program_piped_into_doll_produce_is_trained_on(make_pipeline: MakePipeline) -> None:
    job = churn_job(make_pipeline, "stop.updates=10", "arrivals.process=asap")
    job.start()
    command = f"{sys.executable} {CHURN} 200 | {sys.executable} -m doll produce --job {job.job_path} --stdin"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"DOLL_KAFKA": job.services.kafka, "DOLL_REDIS": job.services.redis},
        cwd=job.folder,
    )
    assert done.returncode == 0, done.stderr
    assert "200 samples delivered, 0 failed" in done.stderr
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.applied, report.pending, report.dead) == (160, 40, 0)


WITNESS = '''
import os
import zlib

from examples.synthetic.task import Gaussian


class Witness(Gaussian):
    """Says, as metrics, on which weights each process computed: their checksum times its share of the samples."""

    def forward(self, model, x):
        parts = (p.detach().numpy().tobytes() for p in model.parameters())
        self.crc = zlib.crc32(b"".join(parts))
        return model(x)

    def metrics(self, output, target):
        return {f"share.{os.getpid()}": 1.0, f"crc.{os.getpid()}": float(self.crc)}
'''


def test_every_worker_gets_every_new_version_to_the_bit(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    """The same log makes the same model: the replay has the weights that the workers saw and the checkpoint holds."""
    (tmp_path / "witness.py").write_text(WITNESS)
    job = make_pipeline("task.class=witness.py:Witness", "stop.updates=30", "checkpoint.event_log=true")
    job.start()
    job.send(job.samples(600))
    job.until_finished()
    job.assert_audit_ok()

    (log,) = (job.run / "events").glob("*.log")
    crc_of: dict[int, int] = {}
    *_, last = replay(
        job.config,
        log,
        on_update=lambda version, parts: crc_of.update({version: zlib.crc32(parts.updater.weights.tobytes())}),
    )
    checkpoint = job.checkpoint()
    assert last.version == checkpoint.version == 30
    assert sorted(last.tensors) == sorted(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        assert last.tensors[name].tobytes() == tensor.tobytes(), name
    assert last.state == checkpoint.state

    pids = [str(job.pids[f"worker-{n}"]) for n in (0, 1)]
    seen = dict.fromkeys(pids, 0)
    for update in job.updates:
        for pid in pids:
            if share := float(update.metrics.get(f"share.{pid}", 0.0)):
                assert float(update.metrics[f"crc.{pid}"]) / share == crc_of[update.version - 1]
                seen[pid] += 1
    assert min(seen.values()) >= 10  # each worker was asked again and again
    assert all(before != after for before, after in pairwise(crc_of[version] for version in range(31)))
