"""A model server in a thread, for a job whose parameter server is the test: it publishes and saves versions.

The weights of version v are v, all of them, and the bias is v / 2: whatever mixes two versions gives another output.
"""

from __future__ import annotations

import copy
import http.client
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
from doll.config import JobConfig, load
from doll.model.flat_model import build, fingerprint
from doll.process.connections import ServerAccess
from doll.process.http_access import LOOPBACK, listen
from doll.records.rollbacks import Rollback
from doll.services import Services
from doll.serving.main import ServedJob, ServeOptions, compute_here, serve_here
from doll.serving.metrics import ServeMetrics
from doll.storage.blobs import Latest, encode_blob, encode_latest, latest_key, weights_key
from doll.storage.checkpoints import Checkpoint
from doll.storage.stores import open_blobs, open_store
from doll.task.base import load_task
from waiting import until

TASK = '''
import torch
from doll import Sample, Task


class Line(Task):
    """x[0] v + x[1] v + v / 2, of version v."""

    input_shape = (2,)

    def build_model(self):
        return torch.nn.Linear(2, 1)

    def forward(self, model, x):
        if (x == 13).any():
            raise RuntimeError("13 is not a number that this model computes")
        return model(x.float())

    def decode(self, record):
        raise NotImplementedError
'''
JOB = """
job: line
task: {class: line.py:Line}
data: {workers: 1, batch_size: 1}
training: {policy: {name: doll, group_size: 1}}
checkpoint: {keep: 3}
"""
RUN_ID = "r1"


def output_of(version: int, x: Any) -> list[float]:
    """What version `version` gives for samples `x`, shape (n, 2)."""
    return [version * (a + b) + version / 2 for a, b in np.asarray(x, float).tolist()]


class ServingRig:
    """A context manager.

    Args:
        access: who may ask; None: whoever reaches it.
        task, job: the task's module, and the job file.
        options: as of `ServeOptions`. The shadow is a thread of its own.
    """

    def __init__(
        self, folder: Path, *, access: ServerAccess | None = None, task: str = TASK, job: str = JOB, **options: Any
    ) -> None:  # fmt: skip
        self._sockets = tempfile.TemporaryDirectory()  # the paths of tests may be too long
        (folder / "line.py").write_text(task)
        (folder / "job.yaml").write_text(job)
        self.config: JobConfig = load(folder / "job.yaml")
        self.run_folder = folder / "run"
        # Nobody listens there: Kafka and Redis are away.
        self.services = Services("127.0.0.1:1", "redis://127.0.0.1:1/0", blobs=str(folder / "blobs"))
        self.blobs = open_blobs(self.config, self.services, give_up=lambda: True, timeout_s=1.0)
        self.store = open_store(self.config, self.run_folder)
        self.model = build(self.config, load_task(self.config))
        self.fingerprint = fingerprint(self.config, self.model)
        self.has_ended = False
        self._options = ServeOptions(**{"wanted": {"latest": 100.0}, "name": "line", **options})
        self._access = access or ServerAccess()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listeners: list[socket.socket] = []
        self.port = 0
        self.store.claim_term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for listener in self._listeners:
            listener.close()
        self._sockets.cleanup()
        self.blobs.close()

    def start(self) -> Self:
        """Serve, and wait until the first version answers."""
        self.begin()
        until(lambda: self.get("/v2/health/ready")[0] == 200, "a version that answers")
        return self

    def begin(self) -> None:
        """Serve."""
        listener = listen(LOOPBACK, 0)
        self._listeners.append(listener)
        self.port = listener.getsockname()[1]
        job = ServedJob(self.config, self.run_folder, lambda: self.services, lambda: self.has_ended)
        metrics, path = ServeMetrics("line", 1), ""
        if self._options.shadow:
            path = str(Path(self._sockets.name) / "shadow.sock")
            shadow_listener = socket.socket(socket.AF_UNIX)
            self._listeners.append(shadow_listener)
            shadow_listener.bind(path)
            shadow_listener.listen()
            of_shadow = copy.copy(metrics)
            of_shadow.use_row(1)
            self._run(compute_here, job, self._options, shadow_listener, of_shadow, self._stop)
        self._run(
            serve_here, job, self._options, self._access, listener, metrics, self._stop, None, shadow_path=path
        )  # fmt: skip

    def _run(self, target: Callable[..., None], *arguments: Any, **more: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, kwargs=more))
        self._threads[-1].start()

    # --- versions

    def weights(self, version: int) -> npt.NDArray[np.float32]:
        weights = np.full(self.model.flat.numel(), version, np.float32)
        weights[-1] = version / 2
        return weights

    def publish(self, version: int, *, term: int = 1) -> None:
        """As the parameter server does."""
        scope = f"{self.config.job}:{RUN_ID}"
        key = weights_key(scope, term, version)
        self.blobs.put(key, encode_blob(self.weights(version), job=scope, kind="w", version=version), 600.0)
        self.blobs.put(latest_key(scope), encode_latest(Latest(term=term, version=version, key=key)), 600.0)

    def save(
        self, version: int, *, term: int = 1, samples: int = 0, rollbacks: Sequence[Rollback] = (), **tensors: Any
    ) -> None:
        """A checkpoint."""
        known = {"run_id": RUN_ID, "samples_total": samples, "version": version, "rollbacks": rollbacks}
        state = msgspec.msgpack.encode(known)
        self.store.save(
            Checkpoint(
                job=self.config.job, fingerprint=self.fingerprint, term=term, version=version, state=state,
                tensors={"weights": self.weights(version), **tensors},
            )
        )  # fmt: skip

    # --- requests

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        status, _, body = self.request("GET", path, headers=headers)
        return status, json.loads(body)

    def post(self, path: str, content: Any) -> tuple[int, Any]:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        status, _, answer = self.request("POST", path, body)
        return status, json.loads(answer)

    def infer(self, x: Any = ((1, 2),), version: str = "", **more: Any) -> tuple[int, Any]:
        """An inference request in JSON."""
        array = np.asarray(x, np.float32)
        tensor = {"name": "x", "datatype": "FP32", "shape": list(array.shape), "data": array.tolist()}
        path = f"/v2/models/line{f'/versions/{version}' if version else ''}/infer"
        return self.post(path, {"inputs": [tensor], **more})

    def version(self) -> int:
        """That answers now."""
        status, answer = self.infer()
        assert status == 200, answer
        return int(answer["model_version"])
