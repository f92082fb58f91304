"""Links between two stages on one machine: sockets, shared memory, and torch.distributed over gloo.

    python -m benchmarks.stage_links [--rounds 5] [--megabytes 200] [--out links.json]

Two processes, forked as a worker forks its stages, exchange messages: a header of 200 bytes and one float32 array. The
receiver reads every array once (its sum), and keeps the last four, as a stage keeps activations. gloo sends the array
alone, to a receiver that knows its shape.

- latency: half of a round trip.
- MB/s and CPU: one process sends and the other receives as fast as they can; processor time of each, all threads.
- CPU in copies: the same in copies of the array within one process, measured in the same round.

The kinds alternate in each round; the table has medians over the rounds. Then one process of each kind is killed while
the other waits for it: seconds until that raises an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from doll.pipeline.links.link import StageLink, shared_pair, socket_pair
from doll.process.memory import keep_freed_memory

SIZES: Final = {"1 kB": 1 << 10, "64 kB": 1 << 16, "1 MB": 1 << 20, "10 MB": 10 << 20}
KINDS: Final = ("socket", "tcp", "shared", "shared, copied out", "gloo")
_HEADER: Final = bytes(200)
_KEPT: Final = 4
_WARM: Final = 8
_ROUND_TRIPS: Final = 100
_MIN_MESSAGES, _MAX_MESSAGES = 20, 2000
_GLOO_TIMEOUT_S: Final = 20.0
_SETTLE_S: Final = 0.5  # for the process that survives to begin to wait
_EXCHANGES: Final = 3000
_Floats = npt.NDArray[np.float32]


class End(Protocol):
    """One process's end of what is measured."""

    def send(self, array: _Floats) -> None: ...

    def receive(self, size: int) -> _Floats: ...

    def exchange(self, array: _Floats) -> None:
        """Send and receive at the same time."""


@dataclass
class Row:
    """What one round measured of one kind and size."""

    latency_us: float
    mb_per_s: float
    send_cpu_ms_per_mb: float
    receive_cpu_ms_per_mb: float
    copy_ms_per_mb: float

    @property
    def cpu_ms_per_mb(self) -> float:
        return self.send_cpu_ms_per_mb + self.receive_cpu_ms_per_mb


class LinkEnd:
    """An end of one of DOLL's links."""

    def __init__(self, link: StageLink, copies: bool) -> None:
        self._link = link
        self._copies = copies

    def send(self, array: _Floats) -> None:
        self._link.send(_HEADER, [array])

    def receive(self, size: int) -> _Floats:
        array: _Floats = self._link.receive()[1][0]
        return array.copy() if self._copies else array

    def exchange(self, array: _Floats) -> None:
        self._link.send(_HEADER, [array])
        self._link.receive()


class GlooEnd:
    """A rank of a group of two."""

    def __init__(self, rank: int, store: str) -> None:
        dist.init_process_group(
            "gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2), timeout=timedelta(seconds=_GLOO_TIMEOUT_S)
        )
        self._far = 1 - rank

    def send(self, array: _Floats) -> None:
        dist.isend(torch.from_numpy(array), self._far).wait()

    def receive(self, size: int) -> _Floats:
        tensor = torch.empty(size)
        dist.irecv(tensor, self._far).wait()
        return tensor.numpy()

    def exchange(self, array: _Floats) -> None:
        sent = torch.from_numpy(array)
        received = torch.empty_like(sent)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, self._far), dist.P2POp(dist.irecv, received, self._far)]
        ):
            work.wait()


def _tcp_pair() -> tuple[StageLink, StageLink]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return StageLink(one), StageLink(other)


def new_link(kind: str, folder: str) -> tuple[Callable[[int], End], Callable[[], None]]:
    """What opens an end in a forked process, and what the parent calls after the fork."""
    if kind == "gloo":
        store = f"{folder}/{time.monotonic_ns()}"
        return lambda rank: GlooEnd(rank, store), lambda: None
    pair: tuple[StageLink, StageLink]
    if kind.startswith("shared"):
        pair = shared_pair(_KEPT + 2, max(SIZES.values()), min_bytes=1 << 14)
    else:
        pair = socket_pair() if kind == "socket" else _tcp_pair()

    def open_end(rank: int) -> End:
        pair[1 - rank].forget()
        return LinkEnd(pair[rank], copies=kind == "shared, copied out")

    def forget() -> None:
        for end in pair:
            end.forget()

    return open_end, forget


@contextlib.contextmanager
def two_processes(kind: str, folder: str, run: Callable[..., None], *args: Any) -> Any:
    """Fork `run(rank, end, pipe, *args)` for both ranks; yields processes and pipes."""
    context = multiprocessing.get_context("fork")
    open_end, forget = new_link(kind, folder)
    pipes: list[tuple[Connection, Connection]] = [context.Pipe() for _ in range(2)]

    def main(rank: int) -> None:
        keep_freed_memory()
        torch.set_num_threads(1)
        run(rank, open_end(rank), pipes[rank][1], *args)

    processes = [context.Process(target=main, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    forget()
    try:
        yield processes, [pipe[0] for pipe in pipes]
    finally:
        for process in processes:
            process.join(2 * _GLOO_TIMEOUT_S)
            process.kill()


def run_sizes(rank: int, end: End, pipe: Connection, megabytes: int) -> None:
    """Measure all sizes, and send (latency_us, seconds, cpu_s, megabytes) of each."""
    results: dict[str, tuple[float, float, float, float]] = {}
    for name, size_bytes in SIZES.items():
        array = np.ones(size_bytes // 4, np.float32)
        times_s: list[float] = []
        for number in range(_WARM + _ROUND_TRIPS):
            began_s = time.perf_counter()
            if rank == 0:
                end.send(array)
                end.receive(array.size)
            else:
                end.receive(array.size)
                end.send(array)
            if number >= _WARM:
                times_s.append((time.perf_counter() - began_s) / 2)
        messages = max(_MIN_MESSAGES, min(_MAX_MESSAGES, megabytes * 10**6 // size_bytes))
        kept: deque[_Floats] = deque(maxlen=_KEPT)
        began_s = cpu_s = 0.0
        for number in range(_WARM + messages):
            if number == _WARM:
                began_s, cpu_s = time.perf_counter(), time.process_time()
            if rank == 0:
                end.send(array)
            else:
                kept.append(end.receive(array.size))
                kept[-1].sum()
        if rank == 0:
            end.receive(1)
        else:
            end.send(array[:1])
        seconds, used_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        results[name] = (1e6 * statistics.median(times_s), seconds, used_s, messages * size_bytes / 1e6)
        kept.clear()
    pipe.send(results)


def copy_ms_per_mb(size_bytes: int) -> float:
    """Processor time of one copy of an array into another one."""
    one, other = np.ones(size_bytes // 4, np.float32), np.zeros(size_bytes // 4, np.float32)
    copies = max(1, 2 * 10**8 // size_bytes)
    began_s = time.process_time()
    for _ in range(copies):
        np.copyto(other, one)
    return 1e3 * (time.process_time() - began_s) / (copies * size_bytes / 1e6)


def measure(kind: str, megabytes: int, folder: str) -> dict[str, Row]:
    """One round of one kind."""
    with two_processes(kind, folder, run_sizes, megabytes) as (_, pipes):
        one, other = (pipe.recv() for pipe in pipes)
    rows = {}
    for size, size_bytes in SIZES.items():
        latency_us, seconds, send_s, megabytes_sent = one[size]
        receive_s = other[size][2]
        rows[size] = Row(
            latency_us, megabytes_sent / seconds, 1e3 * send_s / megabytes_sent, 1e3 * receive_s / megabytes_sent,
            copy_ms_per_mb(size_bytes),
        )  # fmt: skip
    return rows


# --- a peer that dies


def run_survivor(rank: int, end: End, pipe: Connection, does: str) -> None:
    array = np.ones(max(SIZES.values()) // 4, np.float32)
    if rank == 0:
        end.exchange(array[:1])
        pipe.send(None)
        try:
            while True:
                if does == "receives":
                    end.receive(array.size)
                elif does == "sends":
                    end.send(array)
                else:
                    end.exchange(array)
        except Exception as exc:
            pipe.send((time.monotonic(), f"{type(exc).__name__}: {exc}"))
    else:
        end.exchange(array[:1])
        pipe.send(None)
        signal.pause()


def death(kind: str, does: str, folder: str) -> tuple[float, str]:
    """Seconds from the death of the other process to the error of the one that `does`, and the error."""
    with two_processes(kind, folder, run_survivor, does) as (processes, pipes):
        for pipe in pipes:
            pipe.recv()
        time.sleep(_SETTLE_S)
        killed_s = time.monotonic()
        os.kill(processes[1].pid, signal.SIGKILL)
        if not pipes[0].poll(2 * _GLOO_TIMEOUT_S):
            return float("inf"), "none"
        ended_s, error = pipes[0].recv()
    return ended_s - killed_s, error


def run_exchanges(rank: int, end: End, pipe: Connection) -> None:
    array = np.ones(SIZES["64 kB"] // 4, np.float32)
    began_s = time.monotonic()
    for _ in range(_EXCHANGES):
        end.exchange(array)
    pipe.send(time.monotonic() - began_s)


def exchanges(folder: str) -> float:
    """Seconds of `batch_isend_irecv` in both directions at once; infinite if it hangs."""
    with two_processes("gloo", folder, run_exchanges) as (_, pipes):
        if not pipes[0].poll(3 * _GLOO_TIMEOUT_S):
            return float("inf")
        seconds: float = pipes[0].recv()
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all kinds")
    parser.add_argument(
        "--megabytes", type=int, default=200, help="sent per round, kind and size, within 20 to 2000 messages"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    rows: dict[str, dict[str, list[Row]]] = {size: {kind: [] for kind in KINDS} for size in SIZES}
    deaths: dict[str, tuple[float, str]] = {}
    with tempfile.TemporaryDirectory(prefix="doll-bench-") as folder:
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
            for kind in KINDS:
                for size, row in measure(kind, args.megabytes, folder).items():
                    rows[size][kind].append(row)
        for kind in KINDS:
            for does in ("receives", "sends", "exchanges"):
                deaths[f"{kind}, {does}"] = death(kind, does, folder)
        exchanged_s = exchanges(folder)
    print("| message | link | latency us | MB/s | CPU ms / MB: send | receive | both | of the socket's | in copies |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for size, kinds in rows.items():
        socket_ms = statistics.median(row.cpu_ms_per_mb for row in kinds["socket"])
        for kind, measured in kinds.items():
            middle = Row(
                *(statistics.median(values) for values in zip(*(asdict(row).values() for row in measured), strict=True))
            )
            both_ms = statistics.median(row.cpu_ms_per_mb for row in measured)
            print(
                f"| {size} | {kind} | {middle.latency_us:.0f} | {middle.mb_per_s:.0f} | "
                f"{middle.send_cpu_ms_per_mb:.3f} | {middle.receive_cpu_ms_per_mb:.3f} | {both_ms:.3f} | "
                f"{both_ms / socket_ms:.2f} | {both_ms / middle.copy_ms_per_mb:.1f} |"
            )
    for what, (seconds, error) in deaths.items():
        print(f"{what}: {1e3 * seconds:.1f} ms after the other's SIGKILL: {error.splitlines()[0][:160]}")
    print(f"gloo, {_EXCHANGES} times batch_isend_irecv of 64 kB in both directions: {exchanged_s:.2f} s")
    if args.out is not None:
        result = {"rows": {s: {k: [asdict(r) for r in m] for k, m in ks.items()} for s, ks in rows.items()}}
        args.out.write_text(json.dumps(result | {"deaths": deaths, "exchanges_s": exchanged_s}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
