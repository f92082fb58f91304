"""Updates per second of a model whose shards are on hosts of their own, with networks of a limited rate.

    python -m benchmarks.hosts.shards --shards 1,2,4 --mbit 0,200 --repetitions 2

Each host is a network namespace with a Redis and the server, or a shard, behind a link of `--mbit` in each direction
(0: no limit). One worker outside computes on batches of 4 samples, so the model's bytes are most of the work.
`--old FOLDER` also runs workers of another checkout's code, in the same runs. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
from doll.config import dump, parse
from doll.kafka import topics
from doll.kafka.reader import Tail
from doll.local import processes
from doll.local.kafka_broker import LocalKafka
from doll.local.processes import Host
from doll.local.redis_server import LocalRedis
from doll.records.control import Update
from doll.services import KAFKA_ENV, REDIS_ENV, Services

ROOT: Final = Path(__file__).parents[2]
OUTSIDE: Final = "10.77.0.1"  # this machine, as its hosts reach it
_SWITCH: Final = "shards-switch"
_START_S: Final = 300.0
JOB: Final = """
job: shards-on-hosts
base_folder: {root}
task: {{class: "examples.synthetic.task:Gaussian", args: {{features: 20, hidden: {hidden}}}}}
data: {{workers: 1, batch_size: 4}}
source: {{kind: python, of: "examples.synthetic.source:gaussians", args: {{features: 20}}}}
arrivals: {{process: poisson, rate_per_s: 100}}
training: {{policy: {{name: bsp}}, optimizer: {{name: sgd, lr: 0.001}}, guard: {{spike_factor: 0}}}}
ps: {{shards: {shards}, lease_s: 60}}
redis: {{address: "{redis}", shard_addresses: {addresses}}}
blobs: {{kind: redis, ttl_s: 1000}}
checkpoint: {{every_updates: 1000000, every_s: 1000000, folder: {folder}/checkpoints}}
evaluation: {{enabled: false}}
worker: {{lease_s: 600, grant_timeout_s: 1000}}
stop: {{updates: 1000000}}
"""


def _ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True)


@contextmanager
def switch() -> Iterator[None]:
    """The network between this machine and the hosts."""
    if Path("/sys/class/net", _SWITCH).exists():  # of a run that was killed
        _ip("link", "delete", _SWITCH)
    _ip("link", "add", _SWITCH, "type", "bridge")
    try:
        _ip("address", "add", f"{OUTSIDE}/24", "dev", _SWITCH)
        _ip("link", "set", _SWITCH, "up")
        yield
    finally:
        _ip("link", "delete", _SWITCH)


@contextmanager
def shaped_host(number: int, mbit: float, folder: Path) -> Iterator[Host]:
    """A host with a link of `mbit` in each direction. It ends with its process, which ends with this one."""
    keeper = processes.spawn(["unshare", "--net", "sleep", "infinity"], folder / f"host-{number}.log")
    try:
        space = Path(f"/proc/{keeper.pid}/ns/net")
        until_s = time.monotonic() + 10.0
        while space.stat().st_ino == Path("/proc/self/ns/net").stat().st_ino:
            if keeper.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(processes.tail(folder / f"host-{number}.log"))
            time.sleep(0.01)
        ours, inside = f"shards{number}", ("nsenter", f"--net={space}")
        _ip("link", "add", ours, "type", "veth", "peer", "name", "eth0", "netns", keeper.pid)
        _ip("link", "set", ours, "master", _SWITCH, "up")
        for words in (
            f"ip address add 10.77.0.{number + 2}/24 dev eth0", "ip link set eth0 up", "ip link set lo up",
        ):  # fmt: skip
            subprocess.run([*inside, *words.split()], check=True)
        for prefix, device in (((), ours), (inside, "eth0")) if mbit else ():
            limit = f"tc qdisc add dev {device} root tbf rate {mbit:g}mbit burst 256kb latency 200ms"
            subprocess.run([*prefix, *limit.split()], check=True)
        yield Host(f"10.77.0.{number + 2}", inside)
    finally:
        processes.end(keeper, 5.0)


def run(shards: int, mbit: float, megabytes: float, updates: int, code: Path) -> dict[str, Any]:
    """Updates per second after the first two, bytes of a link, and how busy the cores were."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="doll-shards-")))
        opened.enter_context(switch())
        hosts = [opened.enter_context(shaped_host(number, mbit, folder)) for number in range(shards)]
        kafka = opened.enter_context(LocalKafka(folder / "kafka", host=Host(OUTSIDE)))
        caches = [
            opened.enter_context(LocalRedis(folder / f"redis-{number}", max_memory_mb=4000, host=host))
            for number, host in enumerate(hosts)
        ]
        common = caches[0] if shards == 1 else opened.enter_context(LocalRedis(folder / "redis", host=Host(OUTSIDE)))
        width = round((megabytes * 250_000 / 9) ** 0.5)
        job = folder / "job.yaml"
        addresses = json.dumps([cache.address for cache in caches] if shards > 1 else [])
        text = JOB.format(root=ROOT, hidden=[width] * 10, shards=shards, redis=common.address, addresses=addresses,
                          folder=folder)  # fmt: skip
        config = parse(text)
        job.write_text(dump(config) + f"base_folder: {ROOT}\n")
        services = Services(kafka.address, common.address)
        topics.ensure(config, services)
        env = {KAFKA_ENV: services.kafka, REDIS_ENV: services.redis}

        def start(name: str, *command: str, host: Host | None = None, path: Path = ROOT) -> None:
            words = [sys.executable, "-m", "doll", *command, "--job", str(job), "--run-folder", str(folder / "run")]
            prefix = () if host is None else host.prefix
            own = {**env, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"}  # not of the working folder
            process = processes.spawn([*prefix, *words], folder / f"{name}.log", own)
            opened.callback(processes.end, process, 20.0)

        start("ps", "ps", host=hosts[0] if shards == 1 else None)
        for number in range(shards) if shards > 1 else ():
            start(f"shard-{number}", "shard", "--shard", str(number), host=hosts[number])
        start("worker", "worker", "--worker", "0", path=code)
        start("producer", "produce")
        at_s: list[float] = []
        with Tail(config, services, (config.topic("updates"),)) as tail:
            until_s = time.monotonic() + _START_S
            while len(at_s) < updates + 2:
                if time.monotonic() > until_s:
                    logs = "\n".join(f"{path.name}:\n{processes.tail(path)}" for path in folder.glob("*.log"))
                    raise RuntimeError(f"{len(at_s)} updates in {_START_S:g} s\n{logs}")
                for entry in tail.poll(0.1):
                    if isinstance(entry.record, Update):
                        at_s.append(time.monotonic())
                        if len(at_s) == 2:
                            busy, counts = psutil.cpu_times(), _sent()
        spent, sent = psutil.cpu_times(), _sent()
        took_s = at_s[updates + 1] - at_s[1]
        idle_s = spent.idle - busy.idle + spent.iowait - busy.iowait
    return {
        "shards": shards, "mbit": mbit, "updates_per_s": updates / took_s,
        "link_mbit": max(sent[name] - counts[name] for name in counts) * 8e-6 / took_s,
        "busy": 1.0 - idle_s / (took_s * (os.cpu_count() or 1)),
    }  # fmt: skip


def _sent() -> dict[str, int]:
    """Bytes that went to each host."""
    links = psutil.net_io_counters(pernic=True)
    return {name: counts.bytes_sent for name, counts in links.items() if name.startswith("shards") and name != _SWITCH}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts.shards", description=__doc__.splitlines()[0])
    parser.add_argument("--shards", default="1,2,4", help="numbers of shards, with commas")
    parser.add_argument("--mbit", default="0,200", help="rates of each host's link, Mbit/s; 0: no limit")
    parser.add_argument("--mb", type=float, default=100.0, help="size of the model, MB of float32")
    parser.add_argument("--updates", type=int, default=8, help="measured in each run")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--old", type=Path, default=None, help="a checkout whose code workers also run")
    options = parser.parse_args(argv)
    codes = {"": ROOT} | ({"old workers": options.old.resolve()} if options.old is not None else {})
    arms = list(itertools.product(map(float, options.mbit.split(",")), codes, map(int, options.shards.split(","))))
    results: dict[tuple[float, str, int], list[dict[str, Any]]] = {arm: [] for arm in arms}
    for _ in range(options.repetitions):
        for mbit, code, shards in arms:
            if code and shards == 1:
                continue  # nothing differs
            results[mbit, code, shards].append(run(shards, mbit, options.mb, options.updates, codes[code]))
            print(json.dumps({"code": code, **results[mbit, code, shards][-1]}), file=sys.stderr, flush=True)
    print("| link of a host | shards | updates/s | of one shard | Mbit/s to a host | cores busy |")
    print("|---|---|---:|---:|---:|---:|")
    for (mbit, code, shards), each in results.items():
        if each:
            rate, one = (median(run["updates_per_s"] for run in runs) for runs in (each, results[mbit, "", arms[0][2]]))
            link, busy = (median(run[key] for run in each) for key in ("link_mbit", "busy"))
            limit, name = f"{mbit:g} Mbit/s" if mbit else "no limit", f"{shards}, {code}" if code else str(shards)
            print(f"| {limit} | {name} | {rate:.3f} | {rate / one:.2f} | {link:.0f} | {busy:.0%} |")


if __name__ == "__main__":
    main()
