"""Shards in threads of this process, with pipes in memory."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from doll.config import JobConfig
from doll.model.slices import Slices
from doll.ps.shard_main import TermOpener
from doll.ps.shards.messages import Begin
from doll.ps.shards.pipes import Mark, ShardEnd
from doll.ps.shards.shard import Shard, ShardTerm
from doll.ps.shards.sharded_host import ShardedHost
from doll.storage.blobs import Blobs
from doll.storage.checkpoints import CheckpointStore
from doll.tables.rows import TableShape
from doll.task.base import Task

_POLL_S = 5.0


class MemoryPipe:
    """All lists of one shard: what is in Redis.

    Attributes:
        lags: whether the shard carries out orders only while its server waits for it: as late as it can.
    """

    def __init__(self) -> None:
        self.lags = False
        self._waiting = 0
        self.lists: defaultdict[str, deque[bytes]] = defaultdict(deque)
        self.changed = threading.Condition()
        self.alive: dict[str, str] = {}  # the server that each process serves

    def push(self, name: str, data: bytes, *, alone: bool = False) -> None:
        with self.changed:
            if alone:
                self.lists[name].clear()
            self.lists[name].append(data)
            self.changed.notify_all()

    def pop(self, names: tuple[str, ...], timeout_s: float, late: tuple[str, ...] = ()) -> bytes | None:
        """`late`: further names, for a shard that may lag."""
        deadline_s = time.monotonic() + timeout_s
        with self.changed:
            while True:
                for name in names if self.lags and not self._waiting else (*names, *late):
                    if self.lists[name]:
                        return self.lists[name].popleft()
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    return None
                self.changed.wait(left_s)

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """While the server waits for the shard."""
        with self.changed:
            self._waiting += 1
            self.changed.notify_all()
        yield
        with self.changed:
            self._waiting -= 1


class MemoryServerEnd:
    """A `ServerEnd`."""

    gives_up = False  # whether `receive` ends although the shard is alive
    happens: Callable[[], object] = staticmethod(lambda: None)  # called before and after each order

    def __init__(self, pipe: MemoryPipe, server: str) -> None:
        self._pipe, self._server, self._has_begun = pipe, server, False

    def begin(self, data: bytes) -> None:
        self.happens()
        self._pipe.push("begin", data, alone=True)
        self.happens()

    def send(self, data: bytes) -> None:
        self.happens()
        self._pipe.push(f"{self._server}:orders", data)
        self.happens()

    def receive(self, timeout_s: float) -> bytes | None:
        name = f"{self._server}:answers"
        if not timeout_s:
            return self._pipe.pop((name,), 0.0)
        with self._pipe.waited_for():
            data = self._pipe.pop((name,), 0.05)
            while data is None and self._is_served() and not self.gives_up:
                data = self._pipe.pop((name,), 0.05)
        self._has_begun |= data is not None
        return data

    def _is_served(self) -> bool:
        return self._has_begun and self._server in self._pipe.alive.values()

    def receive_part(self, timeout_s: float) -> bytes | None:
        with self._pipe.waited_for():
            return self._pipe.pop((f"{self._server}:parts",), min(timeout_s, 0.05))

    def mark(self, process: str) -> Mark | None:
        return Mark(self._server, "host", 7, 0) if self._pipe.alive.get(process) == self._server else None


class MemoryShardEnd:
    """A `ShardEnd`."""

    def __init__(self, pipe: MemoryPipe, process: str) -> None:
        self._pipe, self.process = pipe, process
        self.serve("")

    def receive(self, server: str, timeout_s: float) -> bytes | None:
        return self._pipe.pop(("begin", "wake"), _POLL_S, (f"{server}:orders",)) or None

    def serve(self, server: str) -> None:
        self._pipe.alive[self.process] = server

    def send(self, server: str, data: bytes) -> None:
        self._pipe.push(f"{server}:answers", data)

    def send_part(self, server: str, data: bytes) -> None:
        self._pipe.push(f"{server}:parts", data)

    def close(self) -> None:
        self._pipe.alive.pop(self.process, None)


class ShardThreads:
    """The shards of one job. `host` makes the host of a server, whose orders they carry out."""

    def __init__(
        self, config: JobConfig, task: Task, store: CheckpointStore, blobs: Blobs,
        happens: Callable[[int], object] = lambda number: None,
    ) -> None:  # fmt: skip
        """`happens`: is called before and after a server sends an order to the shard of this number. It may kill it."""
        self._happens = happens
        self._config, self._store, self._blobs = config, store, blobs
        self._opener, self._building = TermOpener(config, task, store, blobs), threading.Lock()
        self.pipes = [MemoryPipe() for _ in range(config.ps.num_shards)]
        self._threads: list[tuple[threading.Thread, threading.Event]] = []
        self._count = 0
        for number in range(config.ps.num_shards):
            self._threads.append(self._started(number))

    def host(
        self, term: int, slices: Slices, *, wait: Callable[[str], object] | None = None, keeps_gradients: bool = False,
        tables: Mapping[str, TableShape] | None = None, run_id: str = "",
    ) -> ShardedHost:  # fmt: skip
        self._count += 1
        name = f"server-{self._count}"
        ends = [MemoryServerEnd(pipe, name) for pipe in self.pipes]
        for number, end in enumerate(ends):
            end.gives_up, end.happens = wait is not None, partial(self._happens, number)
        return ShardedHost(
            self._config, term, slices, ends, self._blobs, run_id=run_id, process=name,
            wait=wait or (lambda waits_for: None), keeps_gradients=keeps_gradients, tables=tables or {},
        )  # fmt: skip

    def kill(self, number: int) -> None:
        """End a shard with all that it has; `revive` starts another one."""
        thread, leaves = self._threads[number]
        leaves.set()
        self.pipes[number].push("wake", b"")
        thread.join()
        self.pipes[number].alive.clear()

    def revive(self) -> None:
        for number, (thread, _) in enumerate(self._threads):
            if not thread.is_alive():
                self.pipes[number].lists.clear()
                self._threads[number] = self._started(number)

    def close(self) -> None:
        for number in range(len(self.pipes)):
            self.kill(number)

    def _open(self, begin: Begin) -> ShardTerm:
        with self._building:  # the seed of the weights belongs to the process
            return self._opener(begin)

    def _started(self, number: int) -> tuple[threading.Thread, threading.Event]:
        leaves = threading.Event()
        self._count += 1
        end: ShardEnd = MemoryShardEnd(self.pipes[number], f"shard-{self._count}")
        shard = Shard(end, self._store, self._open, leave=leaves.is_set)
        thread = threading.Thread(target=shard.run, daemon=True)
        thread.start()
        return thread, leaves
