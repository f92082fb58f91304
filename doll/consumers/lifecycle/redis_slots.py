"""Slots for identical workers. Each worker process leases a slot in Redis.

Containers of one service (`docker compose up --scale worker=8`) get the same command, so they have no number. A process
takes the lowest slot that is not leased, and renews its lease. If no slot is free, the process waits as a spare. The
only purpose of leases is that processes do not fence each other. If two processes still have the same slot (Redis was
wiped, a process was frozen), the parameter server fences the earlier process.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any, Final

import redis

from doll import telemetry
from doll.config import JobConfig
from doll.process.health import heartbeat_of
from doll.storage.blobs import key_prefix, scope_of
from doll.storage.redis_client import WorkerCount

log = telemetry.get_logger(__name__)

_RETRY_S: Final = 0.5
_FIRST_LEASE_S: Final = 60.0  # while torch is loaded, no other thread of the process runs for seconds
_LOG_AGAIN_S: Final = 30.0
_SETTLED_S: Final = 15.0  # replicas start within seconds: a slot that is free after this time stays free
# Each script is atomic: between a GET and the next command, another process could take the slot.
_RENEW: Final = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class SlotLeases:
    """The leases of a job's slots, as one process sees them. Calls raise RedisError if Redis does not answer.

    `job` identifies the job on this Redis. `workers` is the number of workers in the job file; the job may have been
    scaled later. A lease ends `ttl_s` seconds after its last renewal.
    """

    def __init__(self, client: redis.Redis, job: str, workers: int, ttl_s: float) -> None:
        self._client: Any = client  # redis-py's types mix synchronous and asynchronous answers
        self._job = job
        self._job_workers = workers
        self._count = WorkerCount(client, job)
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._holder = uuid.uuid4().hex.encode()  # a unique name of this process

    def take(self, at_least_s: float = 0.0) -> int | None:
        """Lease the lowest free slot, for at least `at_least_s` at first. Return None if all slots are leased."""
        first_ms = max(self._ttl_ms, round(at_least_s * 1000))
        for slot in self.free():
            if self._client.set(self._key(slot), self._holder, nx=True, px=first_ms):
                return slot
        return None

    @property
    def workers(self) -> int:
        """The number of slots, which is the requested number of workers."""
        return self._count.get(self._job_workers)

    def free(self) -> list[int]:
        holders = self._client.mget([self._key(slot) for slot in range(self.workers)])
        return [slot for slot, holder in enumerate(holders) if holder is None]

    def renew(self, slot: int) -> bool:
        """Renew the lease of `slot`, also if Redis has lost the lease. Return False if another process has the slot."""
        return bool(self._client.eval(_RENEW, 1, self._key(slot), self._holder, self._ttl_ms))

    def release(self, slot: int) -> None:
        self._client.eval(_RELEASE, 1, self._key(slot), self._holder)

    def _key(self, slot: int) -> str:
        return f"{key_prefix(self._job)}:slot:{slot}"


class HeldSlot:
    """A slot that this process holds until the context ends. After `start_renewing`, a thread renews its lease."""

    def __init__(self, slots: SlotLeases, number: int, config: JobConfig, leave: Callable[[], None]) -> None:
        self.number = number
        self.lost = False  # True: another process has taken it; this process leaves and may take another slot
        self._slots = slots
        self._config = config
        self._leave = leave
        self._exited = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_exit, name="slot", daemon=True)

    def start_renewing(self) -> None:
        self._thread.start()

    def __enter__(self) -> HeldSlot:
        return self

    def __exit__(self, *exc: object) -> None:
        self._exited.set()
        if self._thread.is_alive():
            self._thread.join()
        if not self.lost:
            try:
                self._slots.release(self.number)
            except redis.RedisError as error:  # the lease expires by itself
                log.info("slot_not_released", worker=self.number, reason=str(error))

    def _renew_until_exit(self) -> None:
        pause_s = self._config.worker.lease_s / 4
        started_s = time.monotonic()
        logged_s = float("-inf")
        pauses = chain([0.0], repeat(pause_s))
        while not self._exited.wait(next(pauses)):
            try:
                if not self._slots.renew(self.number):
                    self.lost = True
                    log.warning("slot_lost", worker=self.number, action="leaving; another process has taken it")
                    self._leave()
                    return
                now_s = time.monotonic()
                if now_s - started_s >= _SETTLED_S and now_s - logged_s >= _LOG_AGAIN_S:
                    logged_s = now_s
                    self._warn_of_free_slots()
            except redis.RedisError:  # Redis is unreachable: other parts of the process wait for it and log it
                continue

    def _warn_of_free_slots(self) -> None:
        free, workers = self._slots.free(), self._slots.workers
        if free and self.number == min(set(range(workers)) - set(free), default=None):
            log.warning(
                "slots_without_worker", slots=free, workers=workers - len(free), needed=workers,
                hint="nothing of the partitions of these slots is learned: start more workers, or have fewer "
                "(doll scale)",
            )  # fmt: skip


@contextmanager
def lease_slot(
    config: JobConfig, client: redis.Redis, stop: threading.Event, leave: Callable[[], None], *, cluster: str = ""
) -> Iterator[HeldSlot | None]:
    """Yield a free slot of the job after waiting as long as needed; None if `stop` was set before.

    While it waits, the process answers health probes as `worker`: healthy but not ready. The first lease is long, so
    that torch can be loaded; call `start_renewing` after torch is loaded.

    Args:
        leave: function that is called, in another thread, when another process has leased the slot.
        cluster: Kafka's id of its cluster. It distinguishes jobs of the same name on the same Redis, because a process
            does not know yet to which run it belongs.
    """
    slots = SlotLeases(client, scope_of(config.job, cluster), config.data.workers, config.worker.lease_s)
    with heartbeat_of("worker", config) as heartbeat:
        heartbeat.set_waiting_for("a free slot")
        number = _wait(slots, config, stop)
    if number is None:
        yield None
        return
    log.info("slot_acquired", worker=number)
    with HeldSlot(slots, number, config, leave) as held:
        yield held


def _wait(slots: SlotLeases, config: JobConfig, stop: threading.Event) -> int | None:
    started_s = time.monotonic()
    logged_s = float("-inf")
    while not stop.is_set():
        now_s = time.monotonic()
        log_now = now_s - logged_s >= _LOG_AGAIN_S
        try:
            if (slot := slots.take(_FIRST_LEASE_S)) is not None:
                return slot
            if log_now and now_s - started_s >= config.worker.lease_s:  # an earlier lease has expired by then
                logged_s = now_s
                log.warning(
                    "waiting_as_spare", workers=slots.workers,
                    hint="all slots are held: this process takes over when one of them ends, or when the job is to "
                    "have more workers (doll scale)",
                )  # fmt: skip
        except redis.RedisError as error:
            if log_now:
                logged_s = now_s
                log.warning("redis_unavailable", reason=str(error), action="waiting")
        stop.wait(_RETRY_S)
    return None
