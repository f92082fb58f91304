"""All-reduce by torch's DistributedDataParallel over gloo: a process for each device, each as slow as its device.

`python -m benchmarks.live.paced_allreduce ROUND` prints what `measure` returns. The processes are forked from one that
has torch loaded, exchange gradients over this machine's loopback, and end with the process that started them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from doll.config import parse
from doll.local import launcher
from doll.local.processes import LOOPBACK, free_port
from doll.task import images
from doll.task.base import Task, load_task
from examples.digits.task import originals
from torch.nn.parallel import DistributedDataParallel

EVALUATIONS: Final = 150  # of a run, at most
_TIMEOUT: Final = timedelta(seconds=60)
_BUCKETS: Final = 12


class Round(NamedTuple):
    """What all processes are told.

    Attributes:
        job: a job file with a task of `benchmarks.live.paced:PacedBlocks`, and `changes` of it.
        slowdowns: of each device, times `task.args.block_s`.
        lr: of the mean gradient of all devices.
        seconds: of learning.
        ring_s: that the all-reduce of all gradients takes on the devices' links.
    """

    job: str
    changes: list[str]
    slowdowns: list[float]
    lr: float
    seconds: float
    ring_s: float = 0.0


class PacedRing:
    """All-reduce of buckets of gradients one after the other, each in its share of `ring_s`.

    It goes on in a thread of its own, while the device computes the gradients that come later, as Horovod's and DDP's.
    """

    def __init__(self, ring_s: float, num_bytes: int) -> None:
        self._s_per_byte = ring_s / num_bytes
        self._thread = ThreadPoolExecutor(1)

    def mean_of(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The mean of this bucket's gradients over all devices."""
        mean: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._thread.submit(self._reduce, bucket.buffer(), mean)
        return mean

    def _reduce(self, gradients: torch.Tensor, mean: torch.futures.Future[torch.Tensor]) -> None:
        try:
            until_s = time.monotonic() + self._s_per_byte * gradients.nbytes
            dist.all_reduce(gradients)
            time.sleep(max(0.0, until_s - time.monotonic()))
            mean.set_result(gradients.div_(dist.get_world_size()))
        except Exception as error:
            mean.set_exception(error)


def measure(told: Round) -> dict[str, Any]:
    """Train for so many seconds.

    Returns:
        samples; seconds; busy_share, of the devices' time that of forward and backward passes; curve, a list of
        (seconds, samples, held-out loss).

    Raises:
        subprocess.CalledProcessError: a process has failed.
    """
    command = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), sys.executable, "-m", __name__]
    done = subprocess.run([*command, json.dumps(told._asdict())], stdout=subprocess.PIPE, check=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def work(told: Round) -> dict[str, Any]:
    """Fork the processes, and be the first of them; what `measure` returns."""
    job = parse(told.job, told.changes)
    torch.set_num_threads(1)
    task, parent, port = load_task(job), os.getpid(), free_port()
    context = multiprocessing.get_context("fork")
    others = [
        context.Process(target=_follow, args=(rank, told, port, parent), daemon=True)
        for rank in range(1, len(told.slowdowns))
    ]
    for process in others:
        process.start()
    seconds, busy_s, models = _train(0, told, port)
    for process in others:
        process.join()
    if failed := [process.exitcode for process in others if process.exitcode]:
        raise RuntimeError(f"processes of the all-reduce have failed: exit codes {failed}")
    size = len(told.slowdowns) * job.data.batch_size
    return {
        "samples": len(models) * size, "seconds": seconds, "busy_share": busy_s / (seconds * len(told.slowdowns)),
        "curve": _curve(task, models, size),
    }  # fmt: skip


def _follow(rank: int, told: Round, port: int, parent: int) -> None:
    launcher.die_with_parent(parent)
    _train(rank, told, port)


def _train(rank: int, told: Round, port: int) -> tuple[float, float, list[tuple[float, dict[str, torch.Tensor]]]]:
    """Seconds, the busy seconds of all devices, and the model after each round with its time (at rank 0)."""
    block_s = float(parse(told.job, told.changes).task.args["block_s"])
    job = parse(told.job, [*told.changes, f"task.args.block_s={block_s * told.slowdowns[rank]!r}"])
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    task, size = load_task(job), job.data.batch_size
    torch.manual_seed(job.seed)
    module = task.build_model().train()
    dist.init_process_group("gloo", rank=rank, world_size=len(told.slowdowns), timeout=_TIMEOUT)
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    # Small buckets: the first gradients are on their way while the last ones are computed.
    model = DistributedDataParallel(module, bucket_cap_mb=num_bytes / 2**20 / _BUCKETS)
    ring = PacedRing(told.ring_s, num_bytes)
    model.register_comm_hook(None, lambda _, bucket: ring.mean_of(bucket))
    ready_s: list[float] = []  # when this device's gradients were there: the first parameter's is the last one
    first = next(module.parameters())
    first.register_post_accumulate_grad_hook(lambda _: ready_s.append(time.monotonic()))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(model.parameters(), lr=told.lr)
    rng, stream = np.random.default_rng((job.seed, rank)), originals()
    models: list[tuple[float, dict[str, torch.Tensor]]] = []
    goes_on, busy_s = torch.ones(1), 0.0
    dist.barrier()
    begun_s = time.monotonic()
    while goes_on:
        x, y = images.draw(*stream, size, rng)
        start_s = time.monotonic()
        optimizer.zero_grad()
        task.loss(task.forward(model, torch.from_numpy(x)), torch.from_numpy(y.astype(np.int64))).backward()  # type: ignore[no-untyped-call]
        busy_s += ready_s[-1] - start_s
        optimizer.step()
        now_s = time.monotonic() - begun_s
        if rank == 0:
            models.append((now_s, {name: value.clone() for name, value in module.state_dict().items()}))
            goes_on[0] = now_s < told.seconds
        dist.broadcast(goes_on, 0)
    seconds, total = time.monotonic() - begun_s, torch.tensor([busy_s], dtype=torch.float64)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return seconds, float(total), models


def _curve(
    task: Task, models: Sequence[tuple[float, dict[str, torch.Tensor]]], size: int
) -> list[tuple[float, int, float]]:
    """Held-out losses, of no more than `EVALUATIONS` models; after the run, so that no device waits for them."""
    held_out = list(task.holdout())
    x = torch.from_numpy(np.stack([sample.x for sample in held_out]))
    y = torch.from_numpy(np.array([sample.y for sample in held_out]))
    module, curve = task.build_model().eval(), []
    step = -(-len(models) // EVALUATIONS)
    for number in range(step, len(models) + 1, step):
        at_s, state = models[number - 1]
        module.load_state_dict(state)
        with torch.no_grad():
            curve.append((at_s, number * size, float(task.loss(task.forward(module, x), y))))
    return curve


if __name__ == "__main__":
    print(json.dumps(work(Round(**json.loads(sys.argv[1])))))
