"""The HTTP side of a model server without sockets: requests are calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
from doll.config import parse
from doll.evaluation.stored_weights import StoredWeights
from doll.model.flat_model import build
from doll.process.connections import ServerAccess
from doll.serving.app import ServeApp
from doll.serving.batcher import Batcher
from doll.serving.metrics import ServeMetrics
from doll.serving.model_copies import Lane, ModelCopies
from doll.serving.predictor import Predictor
from doll.serving.tensors import Signature
from doll.task.base import Task


class Here(Executor):
    """Computes at once, in the thread that asks."""

    def submit(self, fn: Any, /, *args: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **more))
        return future


class CalledApp:
    """A server of one version of a task's model, whose name is `m`."""

    def __init__(self, task: Task, access: ServerAccess | None = None) -> None:
        config = parse("job: m\ntask: {class: 'm:C'}\ndata: {workers: 1}")
        lanes = [Lane("latest")]
        copies = ModelCopies(lambda: build(config, task), lanes)
        signature = Signature(task)
        predictor = Predictor(task, signature, copies, 64)
        weights = np.full(copies.model.flat.numel(), 0.5, np.float32)
        copies.load(lanes[0], StoredWeights(1, weights, 1, "", {}, {}))
        batcher = Batcher(predictor.answer, Here(), max_samples=64, max_waiting=10, time_limit_s=600.0)
        self.metrics = ServeMetrics("m", 1)
        self.app = ServeApp(
            task, signature, lanes, batcher, self.metrics, name="m", newest_samples=lambda: -1,
            max_body_bytes=1_000_000, time_limit_s=600.0, access=access or ServerAccess(),
        )  # fmt: skip

    async def post(
        self, path: str, parts: bytes | Sequence[bytes], headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, int]:
        """Status and body of the answer, and how many messages of the body were asked for."""
        left = [parts] if isinstance(parts, bytes) else list(parts)
        received = 0
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            nonlocal received
            received += 1
            part = left.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(left)}

        async def send(message: Any) -> None:
            sent.append(message)

        named = {"host": "localhost", **(headers or {})}
        pairs = [(name.lower().encode(), value.encode()) for name, value in named.items()]
        await self.app({"type": "http", "method": "POST", "path": path, "headers": pairs}, receive, send)
        return sent[0]["status"], sent[1]["body"], received
