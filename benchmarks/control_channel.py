"""What carries grants and pushes: how long one takes and how much CPU time, for each kind of control channel.

    python -m benchmarks.control_channel [--rounds 5] [--messages 200] [--compute-ms 5] [--out control.json]

One server's end and one worker's end, each a process, as in a job: the worker reads the grant on its event loop and
passes it to the thread that computes, which sleeps for `--compute-ms`; then the worker pushes. The kinds alternate.
Columns: from sending a grant to the first line of the computing thread, from sending a push to its arrival at the
server, both in ms; CPU time of a grant and its push together, in us, of server and worker, broker, and Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import psutil
import uvloop
from doll.config import JobConfig, parse
from doll.consumers.channels.control_link import ControlLink
from doll.consumers.channels.kafka_channel import WorkerChannel
from doll.kafka import topics
from doll.local.kafka_broker import KafkaCluster
from doll.local.stack import local_stack
from doll.ps.channels.control_channel import ControlChannel, open_links
from doll.ps.channels.kafka_channel import KafkaChannel
from doll.records.control import AnyRecord, Grant, Join, Push, PushedBatch, Served, Stop, Welcome, decode
from doll.services import Services

KINDS: Final = ("kafka", "redis", "local")
_TERM: Final = 1
_RUN_ID: Final = ""
_WARM: Final = 30
_TIMEOUT_S: Final = 60.0


@dataclass
class Measured:
    """One kind, all rounds. Times in ms, CPU times in us per grant and push."""

    grant_ms: list[float] = field(default_factory=list)
    push_ms: list[float] = field(default_factory=list)
    ends_us: list[float] = field(default_factory=list)
    kafka_us: list[float] = field(default_factory=list)
    redis_us: list[float] = field(default_factory=list)


def _config(kind: str) -> JobConfig:
    task = {"class": "examples.synthetic.task:Gaussian"}
    sections = {"job": f"bench-control-{kind}", "task": task, "data": {"workers": 1}, "control": {"kind": kind}}
    return parse(json.dumps(sections))


def worker_end(kind: str, services: Services, compute_s: float, out: Connection) -> None:
    """Answer grants until Stop; then send this process's CPU time since the warm-up."""
    config = _config(kind)
    channel = WorkerChannel(config, services, 0)
    joined = channel.join("bench", lambda: False)
    assert joined is not None
    welcome, _ = joined
    threading.Thread(target=_flush, args=(channel,), daemon=True).start()
    out.send(uvloop.run(_answer(kind, services, compute_s, channel, welcome)))
    channel.close()


def _flush(channel: WorkerChannel) -> None:
    while True:
        channel.poll()
        time.sleep(0.1)


async def _answer(kind: str, services: Services, compute_s: float, channel: WorkerChannel, welcome: Welcome) -> float:
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[list[AnyRecord]] = asyncio.Queue()
    link = ControlLink(services, kind)
    link.welcome(welcome)

    def deliver(commands: list[tuple[int, bytes | None]]) -> None:
        loop.call_soon_threadsafe(received.put_nowait, [decode(value) for _, value in commands])

    channel.read_commands(deliver)
    keeping = asyncio.create_task(link.run(received.put_nowait, lambda: None))
    began_s = 0.0
    with ThreadPoolExecutor(1) as thread:
        while True:
            for record in await received.get():
                if isinstance(record, Stop):
                    keeping.cancel()
                    link.close("measured")
                    return time.process_time() - began_s
                if not isinstance(record, Grant):
                    continue
                if record.first == _WARM:
                    began_s = time.process_time()
                started_s = await loop.run_in_executor(thread, _compute, compute_s)
                batch = PushedBatch(batch=record.first, grant_id=record.first, n_samples=1, loss_sum=0.0)
                push = Push(
                    worker=0, session=welcome.session, term=_TERM, version=0, key="", batches=(batch,),
                    fetch_s=started_s, store_s=time.monotonic(),
                )  # fmt: skip
                if not link.send(push):
                    channel.send(push)


def _compute(compute_s: float) -> float:
    started_s = time.monotonic()
    time.sleep(compute_s)
    return started_s


def server_end(kind: str, services: Services, messages: int, out: Connection) -> None:
    """Welcome the worker, send grants one after the other, and report [grant ms], [push ms] and the CPU time."""
    config = _config(kind)
    channel = ControlChannel(KafkaChannel(config, services), open_links(config, services, _TERM, _RUN_ID))
    out.send("ready")
    deadline_s = time.monotonic() + _TIMEOUT_S
    welcomed = False
    while not welcomed or channel.report()[0].get(0, "kafka") != kind:
        assert time.monotonic() < deadline_s, f"no link over {kind}"
        for value in channel.poll(0.05).values:
            join = decode(value)
            if isinstance(join, Join) and not welcomed:
                welcomed = True
                channel.send_command(
                    0, Welcome(term=_TERM, worker=0, process=join.process, session=1, fingerprint="f",
                               served=(Served(partition=0, origin=0, next_batch=0),)),
                )  # fmt: skip
    grant_ms: list[float] = []
    push_ms: list[float] = []
    began_s = 0.0
    for number in range(_WARM + messages):
        if number == _WARM:
            began_s = time.process_time()
            out.send("warm")
        grant = Grant(
            term=_TERM,
            worker=0,
            session=1,
            first=number,
            grant_ids=(number,),
            batches=((0, number),),
            version=0,
            min_version=0,
            key="w",
        )
        sent_s = time.monotonic()
        channel.send_command(0, grant)
        push = _wait_for_push(channel, number)
        if number >= _WARM:
            grant_ms.append(1e3 * (push.fetch_s - sent_s))
            push_ms.append(1e3 * (time.monotonic() - push.store_s))
    out.send((grant_ms, push_ms, time.process_time() - began_s))
    channel.send_command(0, Stop(term=_TERM, reason="measured"))
    channel.flush(5.0)
    out.recv()
    channel.close()


def _wait_for_push(channel: ControlChannel, number: int) -> Push:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        incoming = channel.poll(0.05)
        for record in (*incoming.records, *map(decode, incoming.values)):
            if isinstance(record, Push) and record.batches[0].batch == number:
                return record
    raise AssertionError(f"no push {number}")


def measure(kind: str, services: Services, pids: Sequence[int], messages: int, compute_s: float) -> Measured:
    """One round of one kind.

    Args:
        pids: of Kafka and Redis.
    """
    context = multiprocessing.get_context("spawn")
    server, server_far = context.Pipe()
    worker, worker_far = context.Pipe()
    processes = [context.Process(target=server_end, args=(kind, services, messages, server_far))]
    processes[0].start()
    try:
        assert server.recv() == "ready"
        processes.append(context.Process(target=worker_end, args=(kind, services, compute_s, worker_far)))
        processes[1].start()
        assert server.recv() == "warm"
        before = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
        grant_ms, push_ms, server_s = server.recv()
        after = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
        worker_s = worker.recv()
        server.send("done")
    finally:
        for process in processes:
            process.join(_TIMEOUT_S)
    kafka_us, redis_us = (1e6 * (end - begin) / messages for begin, end in zip(before, after, strict=True))
    return Measured(grant_ms, push_ms, [1e6 * (server_s + worker_s) / messages], [kafka_us], [redis_us])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all kinds")
    parser.add_argument("--messages", type=int, default=200, help="grants per round and kind")
    parser.add_argument("--compute-ms", type=float, default=5.0, help="pause between a grant and its push")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    results = {kind: Measured() for kind in KINDS}
    with (
        tempfile.TemporaryDirectory(prefix="doll-bench-") as folder,
        local_stack(_config("kafka"), Path(folder), lambda line: print(line, file=sys.stderr)) as stack,
    ):
        servers = [server for server in (stack.kafka, stack.redis) if not isinstance(server, KafkaCluster | None)]
        pids = [server.pid for server in servers if server.pid is not None]
        assert len(pids) == len(("Kafka", "Redis")), "expected both to be started here: unset $DOLL_KAFKA, $DOLL_REDIS"
        for kind in KINDS:
            topics.ensure(_config(kind), stack.services)
        for _ in range(args.rounds):
            for kind, result in results.items():
                measured = measure(kind, stack.services, pids, args.messages, args.compute_ms / 1e3)
                for name in ("grant_ms", "push_ms", "ends_us", "kafka_us", "redis_us"):
                    getattr(result, name).extend(getattr(measured, name))
    print("channel   grant p50   p99   push p50   p99   CPU us: ends  Kafka  Redis")
    for kind, result in results.items():
        print(
            f"{kind:<8} {_quantile(result.grant_ms, 50):9.2f} {_quantile(result.grant_ms, 99):6.2f}"
            f" {_quantile(result.push_ms, 50):9.2f} {_quantile(result.push_ms, 99):6.2f}"
            f" {statistics.median(result.ends_us):12.0f} {statistics.median(result.kafka_us):6.0f}"
            f" {statistics.median(result.redis_us):6.0f}"
        )
    if args.out is not None:
        args.out.write_text(json.dumps({kind: vars(result) for kind, result in results.items()}), encoding="utf-8")
    return 0


def _quantile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


if __name__ == "__main__":
    sys.exit(main())
