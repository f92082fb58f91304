"""One worker of `benchmarks.live.sparse_allreduce`: `python -m benchmarks.live.sparse_allreduce_worker RANK ROUND`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from doll.config import JobConfig, load
from doll.records import lines
from doll.task.base import Task, load_task
from examples.clicks import task as clicks
from examples.ratings import task as ratings
from torch.nn.parallel import DistributedDataParallel

from benchmarks.live.sparse_allreduce import LINK, SUBNET, Round

_EVALUATE_EVERY: Final = 2  # rounds


def _link_bytes() -> int:
    """Sent and received on this namespace's link."""
    folder = Path("/proc/self/net/dev")
    (line,) = (line for line in folder.read_text(encoding="ascii").splitlines() if line.strip().startswith(LINK))
    fields = line.split(":")[1].split()
    return int(fields[0]) + int(fields[8])


def samples_of(job: JobConfig, task: Task) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """x and y of all samples of the job's file, but those held out of it."""
    args: dict[str, Any] = job.source.args  # of a source of kind python, of the example `ratings` or `clicks`
    if "ratings_path" in args:
        read = lines.read_file(job.path(Path(args["ratings_path"])), header=args["header"])
        records = list(ratings.records(read, args["holdout_one_in"]))
    else:
        records = list(clicks.records(lines.read_file(job.path(Path(args["clicks_path"])))))
    decoded = task.decode_block(memoryview(b"".join(records)), len(records[0]))
    assert decoded is not None, "the file has packed records only"
    return decoded


def work(rank: int, told: Round) -> dict[str, Any]:
    """One worker; what `measure` returns."""
    job = load(Path(told.job), told.changes)
    count, size, goal = job.data.workers, job.data.batch_size, job.stop.loss
    assert goal is not None, "the example has a loss to reach"
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": LINK}
    task = load_task(job)
    (all_x, all_y), held_out = samples_of(job, task), list(task.holdout())
    held_x = torch.from_numpy(np.stack([sample.x for sample in held_out]))
    held_y = torch.from_numpy(np.array([sample.y for sample in held_out], np.float32))
    torch.manual_seed(job.seed)
    module = task.build_model()
    dist.init_process_group("gloo", rank=rank, world_size=count)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=told.lr * count)  # of the mean over the workers
    rng = np.random.default_rng(job.seed)
    order, at, best, rounds = rng.permutation(len(all_x)), 0, np.inf, 0
    dist.barrier()
    before_bytes, begun_s = _link_bytes(), time.monotonic()
    max_rounds = (job.stop.samples or 0) // (count * size)
    while rounds < max_rounds:
        if at + count * size > len(all_x):
            order, at = rng.permutation(len(all_x)), 0
        mine = order[at + rank * size : at + (rank + 1) * size]
        at, rounds = at + count * size, rounds + 1
        optimizer.zero_grad()
        output = task.forward(model, torch.from_numpy(all_x[mine]))
        task.loss(output, torch.from_numpy(all_y[mine].astype(np.float32))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rounds % _EVALUATE_EVERY == 0:  # each worker has the same model
            with torch.no_grad():
                best = min(best, float(task.loss(task.forward(module, held_x), held_y)))
            if best <= goal:
                break
    seconds = time.monotonic() - begun_s
    sent = torch.tensor([_link_bytes() - before_bytes], dtype=torch.int64)
    dist.all_reduce(sent)
    # Each byte is sent by one worker and received by another: half of it is "pushed".
    both = {"pushed": int(sent) // 2, "fetched": int(sent) - int(sent) // 2}
    return {"best_loss": best, "training_seconds": seconds, "updates": rounds, "measures": {"bytes": both}}


if __name__ == "__main__":
    report = work(int(sys.argv[1]), Round(**json.loads(sys.argv[2])))
    if sys.argv[1] == "0":
        print(json.dumps(report))
