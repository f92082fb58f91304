"""Sparse all-reduce beside `isp`: a job's task by torch's DistributedDataParallel over gloo, a process a worker.

Each worker has a network namespace of its own. Its link to the others passes `mbit_per_s` in each direction, and counts
its bytes. Namespaces need Linux and root. They and the processes end with the process that started them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from doll.config import load
from doll.local import launcher

from benchmarks.live.experiment import Skip

SUBNET: Final = "10.213.0"
LINK: Final = "veth0"
_BURST_BYTES: Final = 256_000
_TICK_S: Final = 0.01  # a link passes its rate where a burst lasts for a tick of the kernel's clock
# In namespaces of its own for processes, mounts and network: nothing of it is left when the shell has ended.
_NETWORK: Final = """
set -e
mount --make-rprivate /
mkdir -p /run/netns
mount -t tmpfs none /run/netns
ip link add br0 type bridge
ip link set br0 up
for i in $(seq 0 $(($1 - 1))); do
  ip netns add worker$i
  ip link add port$i type veth peer name veth0 netns worker$i
  ip link set port$i master br0 up
  ip netns exec worker$i ip addr add 10.213.0.$((i + 1))/24 dev veth0
  ip netns exec worker$i ip link set veth0 up
  ip netns exec worker$i ip link set lo up
  if [ "$2" != 0 ]; then
    tc qdisc add dev port$i root tbf rate $2mbit burst $5 latency 200ms
    ip netns exec worker$i tc qdisc add dev veth0 root tbf rate $2mbit burst $5 latency 200ms
  fi
done
for i in $(seq $(($1 - 1)) -1 1); do ip netns exec worker$i $3 -m benchmarks.live.sparse_allreduce_worker $i "$4" & done
ip netns exec worker0 $3 -m benchmarks.live.sparse_allreduce_worker 0 "$4"
wait
"""


class Round(NamedTuple):
    """What all workers are told.

    Attributes:
        job: path of the job file, and `changes` of it; its `source` and `stop` are the file and the loss to reach.
        lr: of a worker's mean gradient: the workers' steps are added, as under `isp`.
    """

    job: str
    changes: list[str]
    lr: float


def measure(job: Path, changes: Sequence[str], *, lr: float, mbit_per_s: float) -> dict[str, Any]:
    """Train to the `stop.loss` of the job, or to its `stop.samples`.

    Args:
        lr: see `Round`.
        mbit_per_s: 0: no limit.

    Returns:
        As a run's report.json: best_loss, training_seconds, updates, measures.

    Raises:
        Skip: no root, or no `ip`, `tc` and `unshare`.
        subprocess.CalledProcessError: a worker has failed.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        raise Skip("expected root with ip, tc and unshare, for a network namespace for each worker of the all-reduce")
    words = json.dumps(Round(str(job), list(changes), lr)._asdict())
    namespaces = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", _NETWORK, "network")
    # The launcher kills `unshare` with this process, and that kills all the others.
    command = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), *namespaces]
    burst_bytes = max(_BURST_BYTES, round(mbit_per_s * 1e6 / 8 * _TICK_S))
    workers = load(job, changes).data.workers
    command += [str(workers), f"{mbit_per_s:g}", sys.executable, words, str(burst_bytes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
