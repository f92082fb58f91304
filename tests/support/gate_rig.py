"""A job with gates, whose versions a test saves and lets the evaluator judge."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from doll.config import JobConfig, load
from doll.evaluation.evaluator import Evaluator
from doll.ledger.snapshot_counts import SnapshotCounts
from doll.model.flat_model import build, fingerprint
from doll.run.folder import RunFolder
from doll.run.target import Target
from doll.storage.checkpoints import Checkpoint
from doll.storage.stores import open_store
from doll.storage.version_marks import Verdict
from doll.task.base import load_task
from memory_stores import MemoryBlobs

TASK = """
import numpy as np
import torch
from doll import Sample, Task, metrics

class Line(Task):
    input_shape = (2,)

    def build_model(self):
        return torch.nn.Linear(2, 1)

    def forward(self, model, x):
        return model(x)[:, 0]

    def losses(self, output, target):
        return (output - target) ** 2

    def metrics(self, output, target):
        if output.abs().max() > 1e6:
            raise ValueError("no such outputs")
        return {"rmse": metrics.rmse(output, target)}

    def decode(self, record):
        raise NotImplementedError

    def check(self, version, stable):
        return "an output below -50" if version.outputs["output"].min() < -50 else ""

    def holdout(self):
        x = np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)
        return [Sample(row, row[0] - row[1]) for row in x]
"""
JOB = """
job: j
task: {class: line.py:Line}
data: {workers: 1, batch_size: 1}
checkpoint: {keep: 3}
versions: {gates: {metrics: {loss: 0.01, rmse: 0.01}}}
"""


class Rig:
    job = JOB

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "line.py").write_text(TASK)
        (folder / "job.yaml").write_text(self.job)
        self.config: JobConfig = load(folder / "job.yaml")
        self.target = Target(self.config, RunFolder(folder), True, folder / "job.yaml")
        self.target.run.report.write_text("{}")  # of a run that has ended: its records are in its folder
        self.store = open_store(self.config, folder)
        self.fingerprint = fingerprint(self.config, build(self.config, load_task(self.config)))
        self.folder = folder
        self.term = self.store.claim_term()
        self.new_gate()

    def new_gate(self) -> None:
        self.evaluator = Evaluator(self.config, MemoryBlobs(), self.folder)

    def save(self, version: int, *weights: float) -> None:
        values: npt.NDArray[np.float32] = np.array([*weights, 0.0][:3], np.float32)
        tensors = {"weights": values}
        state = msgspec.msgpack.encode(
            SnapshotCounts(version=version, applied=(version,), origins=(0,), records_per_batch=1)
        )
        self.store.save(
            Checkpoint(
                job=self.config.job,
                fingerprint=self.fingerprint,
                term=self.term,
                version=version,
                state=state,
                tensors=tensors,
            )
        )

    def judged(self, version: int, *weights: float) -> Verdict:
        self.save(version, *weights)
        verdict = self.evaluator.judge_newest()
        assert verdict is not None
        assert verdict.version == version
        assert self.evaluator.judge_newest() is None, "once"
        return verdict

    @property
    def stable(self) -> int | None:
        return self.store.read_marks().aliases.get("stable")
