"""From an event to the answer that has learned it: p50 and p99, measured by a program outside of DOLL.

    python -m benchmarks.freshness [--rate 10000] [--seconds 60] [--link "20 ms"] [--docs]

Each event is a number, and the model has one weight for each partition, which a batch sets to the mean of its numbers.
Batches have a fixed size and are learned in order, so an answer says up to which number each partition is learned. The
latency of an event is the time from just before it is given to the Kafka client until an answer with it has been read.
Without `--link`, everything runs on this machine. With it, Kafka, Redis, the server, each worker and the model server
are on emulated hosts that are so far apart (one way); this needs root, TUN devices and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from confluent_kafka import Producer
from doll.config import JobConfig, dump
from doll.kafka import topics
from doll.local.processes import free_port, tied
from doll.local.supervisor import RoleSpec

from benchmarks import results
from benchmarks.freshness_task import RECORD
from benchmarks.harness import job
from benchmarks.hosts.__main__ import link_of
from benchmarks.hosts.job import RunningJob, Site, host_names
from benchmarks.hosts.network import Network, why_not
from benchmarks.hosts.router import Link

TOKEN_ENV: Final = "DOLL_SERVE_TOKEN"
MODEL_HOST: Final = "model"
_TICK_S: Final = 0.005
_READY_S: Final = 300.0
_LAST_S: Final = 60.0


@dataclass
class Place:
    """Where the job is: addresses of its Kafka and of its model server, and how DOLL itself sees its freshness."""

    kafka: str
    host: str
    port: int
    token: str = ""
    status: list[str] = field(default_factory=list)


def job_of(options: argparse.Namespace) -> JobConfig:
    is_far = options.link is not None
    places = {"blobs": {"kind": "redis"}, "control": {"kind": "redis"}} if is_far else {}
    return job(
        "freshness", task="benchmarks.freshness_task:Numbers", args={"partitions": options.partitions},
        data={"workers": options.partitions, "batch_size": options.batch_size},
        training={
            "policy": {"name": "doll", "group_size": 1}, "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.0},
            "guard": {"spike_factor": 0},
        },
        freshness={"time": {"header": "at"}, "event_to_served_s": 5.0}, evaluation={"enabled": False}, **places,
    )  # fmt: skip


@contextlib.contextmanager
def on_this_machine(config: JobConfig, folder: Path) -> Iterator[Place]:
    """`doll up` and `doll serve`, as a user starts them."""
    path, port = folder / "job.yaml", free_port()
    path.write_text(dump(config), encoding="utf-8")
    doll = [sys.executable, "-m", "doll"]
    with (folder / "up.log").open("wb") as log, (folder / "serve.log").open("wb") as serve_log:
        command = tied([*doll, "up", str(path), "--parent-folder", str(folder / "runs")])
        up = subprocess.Popen(command, stdout=log, stderr=log)
        serve = None
        try:
            run = wait_for(lambda: next((folder / "runs").glob("*/stack.json"), None), up, "the job").parent
            command = tied([*doll, "serve", str(run), "--port", str(port)])
            serve = subprocess.Popen(command, stdout=serve_log, stderr=serve_log)
            kafka = json.loads((run / "stack.json").read_text(encoding="utf-8"))["kafka"]
            yield Place(kafka, "127.0.0.1", port, status=[*map(str, [*doll, "status", run, "--json"])])
        finally:
            for process in filter(None, (serve, up)):
                process.send_signal(signal.SIGINT)
                process.wait(_LAST_S)


@contextlib.contextmanager
def on_hosts(config: JobConfig, folder: Path, link: Link) -> Iterator[Place]:
    """Roles on hosts that are far apart."""
    token = secrets.token_hex(16)
    os.environ[TOKEN_ENV] = token  # for the model server, which is forked from a process with this environment
    names = (*host_names(config.data.workers), MODEL_HOST)
    with Network(names, folder / "router.log", seed=1) as network, Site(network, folder, say) as site:
        topics.ensure(config, site.services)
        with RunningJob(site, config) as running:
            address, port = network.address(MODEL_HOST), 8000
            arguments = [
                network.namespace(MODEL_HOST), "benchmarks.freshness:serve_role", str(running.folder / "job.yaml"),
                site.services.kafka, site.services.redis, str(running.folder), address, port,
            ]  # fmt: skip
            log_path = running.folder / "logs" / "serve.log"
            role = "benchmarks.hosts.network:role_on_host"
            running.supervisor.start(RoleSpec("serve", role, log_path, arguments))
            network.set_link(link)
            yield Place(site.services.kafka, address, port, token)
            network.set_link(Link())
            running.supervisor.stop(("serve",), grace_s=10.0)
            say(running.stop().summary())


def serve_role(job_path: str, kafka: str, redis: str, run_folder: str, host: str, port: int) -> int:
    """`doll serve` on a host of its own."""
    from doll.config import load
    from doll.services import Services
    from doll.serving.main import ServedJob, ServeOptions, run_serve

    config, services = load(Path(job_path)), Services(kafka, redis)
    served = ServedJob(config, Path(run_folder), lambda: services, lambda: False)
    return run_serve(served, ServeOptions({"latest": 100.0}, config.job, host=host, port=port))


def wait_for(found: Any, process: subprocess.Popen[bytes], what: str) -> Any:
    deadline_s = time.monotonic() + _READY_S
    while (value := found()) is None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise TimeoutError(f"{what} did not start")
        time.sleep(0.1)
    return value


class Events:
    """The events of each partition: when each was sent, and when an answer had it (NaN: not yet)."""

    def __init__(self, partitions: int, most: int) -> None:
        self.sent_s = np.full((partitions, most), np.nan)
        self.seen_s = np.full((partitions, most), np.nan)
        self.num_sent = [0] * partitions
        self.num_seen = [0] * partitions

    def latencies_s(self, after_s: float) -> npt.NDArray[np.float64]:
        """Of the events that were sent after this time; infinite for those that no answer had."""
        is_counted = self.sent_s >= after_s
        latencies = (self.seen_s - self.sent_s)[is_counted]
        return np.where(np.isnan(latencies), np.inf, latencies)

    def medians_s(self, after_s: float, seconds: float, parts: int = 10) -> list[float]:
        """The median latency of each part of the time: it shows whether events wait longer and longer."""
        cuts_s = np.linspace(after_s, after_s + seconds, parts + 1)
        parts_s = [self.latencies_s(a)[self.sent_s[self.sent_s >= a] < b] for a, b in pairwise(cuts_s)]
        return [round(float(np.median(part)), 3) for part in parts_s if len(part)]


def send(place: Place, topic: str, events: Events, numbers: range, rate_per_s: float) -> None:
    """Send these events, in turn to the partitions, at the rate."""
    producer = Producer({"bootstrap.servers": place.kafka, "linger.ms": 2, "acks": "all"})
    begun_s, sent, partitions = time.monotonic(), numbers.start, len(events.num_sent)
    while sent < numbers.stop:
        due = min(numbers.stop, numbers.start + round((time.monotonic() - begun_s) * rate_per_s))
        for number in range(sent, due):
            partition, at = number % partitions, number // partitions
            events.sent_s[partition, at] = time.monotonic()
            events.num_sent[partition] = at + 1
            headers = [("at", str(time.time_ns() // 1_000_000).encode())]
            while True:
                with contextlib.suppress(BufferError):
                    producer.produce(topic, RECORD.pack(partition, at), partition=partition, headers=headers)
                    break
                producer.poll(0.01)
        sent = max(sent, due)
        producer.poll(0)
        time.sleep(_TICK_S)
    producer.flush(_LAST_S)


class Asker:
    """Asks the model server over one connection, and again after each answer."""

    def __init__(self, place: Place, model: str, partitions: int, timeout_s: float = 10.0) -> None:
        self._connection = http.client.HTTPConnection(place.host, place.port, timeout=timeout_s)
        self._path = f"/v2/models/{model}/infer"
        rows = np.eye(partitions).ravel().tolist()
        tensor = {"name": "x", "datatype": "FP32", "shape": [partitions, partitions], "data": rows}
        self._body = json.dumps({"inputs": [tensor]})
        self._headers = {"Content-Type": "application/json"}
        if place.token:
            self._headers["Authorization"] = f"Bearer {place.token}"

    def ask(self) -> list[float] | None:
        """The weights of the answer; None while there is none."""
        try:
            self._connection.request("POST", self._path, self._body, self._headers)
            answer = self._connection.getresponse()
            content = json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return None
        return list(content["outputs"][0]["data"]) if answer.status == 200 else None


def note_answer(weights: list[float], events: Events, batch_size: int, at_s: float) -> None:
    """Note the events that an answer has: those up to the last of the batch whose mean the weight is."""
    for partition, weight in enumerate(weights):
        first = events.num_seen[partition]
        until = round((weight + (batch_size + 1) / 2) / batch_size) * batch_size if weight else 0
        until = min(until, events.num_sent[partition])
        events.seen_s[partition, first:until] = at_s
        events.num_seen[partition] = max(first, until)


def measure(place: Place, config: JobConfig, options: argparse.Namespace) -> dict[str, Any]:
    first = options.batch_size * options.partitions  # a batch of each partition, so that there is a version
    last = -(-round(options.rate * options.seconds) // first) * first + first
    events, topic = Events(options.partitions, last // options.partitions), config.topic("samples")
    send(place, topic, events, range(first), options.rate)
    asker = Asker(place, config.job, options.partitions)
    deadline_s = time.monotonic() + _READY_S
    while asker.ask() is None:
        if time.monotonic() > deadline_s:
            raise TimeoutError("the model server does not answer")
        time.sleep(0.05)
    arguments = (place, topic, events, range(first, last), options.rate)
    sender = threading.Thread(target=send, args=arguments, daemon=True)
    sender.start()
    begun_s, answers, deadline_s = time.monotonic(), 0, float("inf")
    while time.monotonic() < deadline_s:
        weights = asker.ask()
        if weights is not None:
            answers += 1
            note_answer(weights, events, options.batch_size, time.monotonic())
        time.sleep(options.ask_ms / 1000)
        if not sender.is_alive():
            deadline_s = min(deadline_s, time.monotonic() + _LAST_S)
            if events.num_seen == events.num_sent:
                break
    latencies = events.latencies_s(begun_s + options.warm_up)
    sent_s = events.sent_s[events.sent_s >= begun_s]
    result = {
        "rate_per_s": options.rate, "sent_per_s": len(sent_s) / max(np.ptp(sent_s), 1e-9), "seconds": options.seconds,
        "batch_size": options.batch_size, "partitions": options.partitions,
        "link": options.link or "one machine", "events": len(latencies),
        "never_answered": int(np.isinf(latencies).sum()), "answers": answers, "load": os.getloadavg()[0],
        **{f"p{share}_s": float(np.quantile(latencies, share / 100)) for share in (50, 90, 99)},
        "max_s": float(latencies.max()), "p50_s_of_parts": events.medians_s(begun_s, options.seconds),
    }  # fmt: skip
    if place.status:
        status = subprocess.run(place.status, capture_output=True, text=True, check=False).stdout
        result["doll_says"] = {stage["stage"]: stage for stage in json.loads(status or "{}").get("freshness", [])}
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """The section of docs/benchmarks.md. `rows`: the newest result on this machine, and of hosts."""
    lines = [
        "| where | events/s | workers | batch | p50 s | p90 s | p99 s | longest s | DOLL's own | load | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        own = row.get("doll_says", {}).get("served", {})
        says = f"{own['p50_s']:.2f}, {own['p99_s']:.2f}" if own else "-"
        times = " | ".join(f"{row[name]:.2f}" for name in ("p50_s", "p90_s", "p99_s", "max_s"))
        lines.append(
            f"| {row['link']} | {row['sent_per_s']:,.0f} | {row['partitions']} | {row['batch_size']:,} | {times} "
            f"| {says} | {row['load']:.0f} | {row['commit']} |"
        )
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.freshness", description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=10_000.0, help="events per second, over all partitions")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which events are sent")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds at the begin that do not count")
    parser.add_argument("--partitions", type=int, default=2, help="each with a worker")
    parser.add_argument("--batch-size", type=int, default=250, help="events of a batch")
    parser.add_argument("--ask-ms", type=float, default=2.0, help="pause between two requests")
    parser.add_argument(
        "--link", help="hosts with such links, as in '20 ms' or '20 ms, 1 Gbit/s'; default: one machine"
    )
    parser.add_argument("--docs", action="store_true", help="write the table to docs/benchmarks.md")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.link is not None and (reason := why_not()):
        sys.exit(reason)
    config = job_of(options)
    with tempfile.TemporaryDirectory(prefix="doll-freshness-") as name:
        folder = Path(name)
        is_here = options.link is None
        with on_this_machine(config, folder) if is_here else on_hosts(config, folder, link_of(options.link)) as place:
            result = measure(place, config, options)
    print(json.dumps(result, indent=1))
    if options.docs:
        results.keep(f"freshness-{'here' if is_here else 'hosts'}", result)
        rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.RESULTS.glob("freshness-*"))]
        results.update_section(
            results.DOCS / "benchmarks.md", "freshness", "python -m benchmarks.freshness --docs", table(rows)
        )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
