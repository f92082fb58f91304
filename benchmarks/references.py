"""Reference programs: bare torch loops, torch DDP over gloo, and a bare parameter server on Redis.

All learn the same model from the same batches (uint8, in memory) with one thread per process, and run as processes
forked from one that has torch loaded, as DOLL's own do. Each function here is the target of such a process; it writes
`{"first_s": ..., "last_s": ..., "samples": ..., "gradients": [...]}` to `out`: the measured part in seconds of
`time.monotonic()`, and the rows of `benchmarks.probes.GradientClock`.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.data import SIDE, batches
from benchmarks.probes import GradientClock

BATCH_SIZE = 256
LEARNING_RATE = 0.01
_POOL = 16  # batches, used in turn
_REDIS_WAIT_S = 30


def bare_loop(out: str, small: bool, rank: int, start_s: float, seconds: float, tuned: bool = True) -> None:
    """One independent loop: an optimizer step on every batch, no synchronization. Starts at monotonic `start_s`.

    `tuned`: malloc keeps freed memory, as in DOLL's workers and all other reference programs; else the default.
    """
    clock = GradientClock()
    step, pool = _local_step(small, rank, clock, tuned)
    for x, y in pool[:2]:
        step(x, y)
    time.sleep(max(0.0, start_s - time.monotonic()))
    first_s, samples = time.monotonic(), 0
    while time.monotonic() - first_s < seconds:
        x, y = pool[samples // BATCH_SIZE % _POOL]
        step(x, y)
        samples += BATCH_SIZE
    _write(out, first_s, time.monotonic(), samples, clock)


def barrier(
    out: str, small: bool, rank: int, group_size: int, updates: int, warm_updates: int, pipes: tuple[str, str]
) -> None:
    """One of 2 bare loops that meet after K / 2 batches each and exchange nothing: the bound for an exact system.

    Meeting costs a byte written to the other's pipe and one read from the own; who waits uses no CPU.

    Args:
        pipes: named pipes that exist, of rank 0 and 1.
    """
    clock = GradientClock()
    step, pool = _local_step(small, rank, clock)
    own, other = (os.open(pipes[place], os.O_RDWR) for place in (rank, 1 - rank))  # read-write: opening does not block
    first_s, at = 0.0, 0
    for update in range(warm_updates + updates):
        if update == warm_updates:
            first_s = time.monotonic()
        for _ in range(group_size // 2):
            step(*pool[at % _POOL])
            at += 1
        os.write(other, b".")
        os.read(own, 1)
    _write(out, first_s, time.monotonic(), updates * (group_size // 2) * BATCH_SIZE, clock)


def ddp(
    out: str, small: bool, rank: int, group_size: int, updates: int, warm_updates: int, port: int,
    samples: tuple[str, str, int] | None = None,
) -> None:  # fmt: skip
    """One of 2 ranks of DistributedDataParallel over gloo: K / 2 batches each, then one averaged step.

    Args:
        samples: Kafka's address, a topic and the samples of a record: this rank learns from partition `rank` of the
            topic, each batch once. None: from memory.
    """
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    task, model, pool = _task_model_pool(small, rank)
    source = itertools.cycle(pool) if samples is None else _batches_from_kafka(*samples, rank)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    clock = GradientClock()
    backward = clock.timed(_backward)
    per_rank = group_size // 2
    first_s = 0.0
    for update in range(warm_updates + updates):
        if update == warm_updates:
            first_s = time.monotonic()
        for place in range(per_rank):
            x, y = next(source)
            if place < per_rank - 1:
                with parallel.no_sync():
                    backward(task, parallel, x, y, per_rank)
            else:
                backward(task, parallel, x, y, per_rank)
        optimizer.step()
        optimizer.zero_grad()
    _write(out, first_s, time.monotonic(), updates * per_rank * BATCH_SIZE, clock)
    distributed.destroy_process_group()


def _batches_from_kafka(address: str, topic: str, samples_per_record: int, partition: int) -> Iterator[tuple[Any, Any]]:
    """Batches of one partition from its beginning, read with librdkafka in large fetches. It commits nothing, and
    begins again at the end."""
    import numpy as np
    from confluent_kafka import Consumer, TopicPartition
    from doll.records.packing import HEADER_BYTES

    settings = {
        "bootstrap.servers": address, "group.id": "benchmark-ddp", "enable.auto.commit": False,
        "fetch.min.bytes": 65_536, "max.partition.fetch.bytes": 4 << 20, "queued.max.messages.kbytes": 16_384,
        "fetch.queue.backoff.ms": 20, "enable.partition.eof": True,
    }  # fmt: skip
    consumer = Consumer(settings)
    consumer.assign([TopicPartition(topic, partition, 0)])
    values: list[bytes] = []
    wanted = BATCH_SIZE // samples_per_record
    while True:
        for message in consumer.consume(wanted - len(values), 1.0):
            if message.error() is None:
                values.append(message.value()[HEADER_BYTES:])
            else:
                consumer.seek(TopicPartition(topic, partition, 0))
        if len(values) == wanted:
            rows = np.frombuffer(b"".join(values), np.uint8).reshape(BATCH_SIZE, -1)
            yield rows[:, 1:].reshape(-1, SIDE, SIDE), rows[:, 0].astype(np.int64)
            values.clear()


def redis_server(out: str, small: bool, redis_url: str, group_size: int, updates: int, warm_updates: int) -> None:
    """A bare synchronous parameter server: weights under a key, one gradient sum per worker and update, no header."""
    import numpy as np
    import torch

    _, model, _ = _task_model_pool(small, 0)
    client = _redis(redis_url)
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    parameter = torch.nn.Parameter(flat)
    optimizer = torch.optim.SGD([parameter], lr=LEARNING_RATE)
    first_s = 0.0
    for update in range(warm_updates + updates):
        if update == warm_updates:
            first_s = time.monotonic()
        client.set("bare:w", memoryview(parameter.detach().numpy()).cast("B"))
        for rank in range(2):
            client.rpush(f"bare:go:{rank}", update)
        total = None
        for _ in range(2):
            _, key = client.blpop(["bare:done"], timeout=_REDIS_WAIT_S)
            gradient = torch.from_numpy(np.frombuffer(client.get(key), np.float32).copy())
            total = gradient if total is None else total.add_(gradient)
        parameter.grad = total.div_(group_size)
        optimizer.step()
    for rank in range(2):
        client.rpush(f"bare:go:{rank}", -1)
    _write(out, first_s, time.monotonic(), updates * group_size * BATCH_SIZE, GradientClock())


def redis_worker(out: str, small: bool, redis_url: str, rank: int, group_size: int) -> None:
    """A worker of `redis_server`: K / 2 batches on the weights, their gradient sum back under a key (claim check).

    In its result only the gradients count: the server measures the time and the samples.
    """
    import numpy as np
    import torch

    task, model, pool = _task_model_pool(small, rank)
    client = _redis(redis_url)
    clock = GradientClock()
    backward = clock.timed(_backward)
    at = 0
    while int(client.blpop([f"bare:go:{rank}"], timeout=_REDIS_WAIT_S)[1]) >= 0:
        weights = torch.from_numpy(np.frombuffer(client.get("bare:w"), np.float32).copy())
        torch.nn.utils.vector_to_parameters(weights, model.parameters())
        for _ in range(group_size // 2):
            backward(task, model, *pool[at % _POOL], 1)
            at += 1
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        client.set(f"bare:g:{rank}", memoryview(gradient.numpy()).cast("B"))
        client.rpush("bare:done", f"bare:g:{rank}")
        model.zero_grad()
    _write(out, 0.0, 0.0, 0, clock)


def _task_model_pool(small: bool, rank: int, tuned: bool = True) -> tuple[Any, Any, list[Any]]:
    import torch
    from doll.process.memory import keep_freed_memory
    from examples.emnist.task import Emnist

    if tuned:
        keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = Emnist(small=small)
    return task, task.build_model().train(), batches(_POOL, BATCH_SIZE, rank)


def _local_step(small: bool, rank: int, clock: GradientClock, tuned: bool = True) -> tuple[Any, list[Any]]:
    import torch

    task, model, pool = _task_model_pool(small, rank, tuned)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(x: Any, y: Any) -> None:
        _backward(task, model, x, y, 1)
        optimizer.step()
        optimizer.zero_grad()

    return clock.timed(step), pool


def _backward(task: Any, model: Any, x: Any, y: Any, parts: int) -> None:
    import torch

    loss = task.loss(task.forward(model, torch.from_numpy(x)), torch.from_numpy(y))
    (loss / parts).backward()


def _redis(url: str) -> Any:
    import redis

    return redis.Redis.from_url(url, socket_timeout=2 * _REDIS_WAIT_S)


def _write(out: str, first_s: float, last_s: float, samples: int, clock: GradientClock) -> None:
    result = {"first_s": first_s, "last_s": last_s, "samples": samples, "gradients": clock.rows}
    Path(out).write_text(json.dumps(result), encoding="utf-8")
