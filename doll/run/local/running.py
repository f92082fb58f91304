"""The middle of a run, from the first role to the reason why the job ends."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from doll.config import JobConfig
from doll.errors import ServiceUnavailableError
from doll.local.forks import ForkServer
from doll.local.stack import Stack
from doll.local.supervisor import Supervisor
from doll.monitor.views.display import Display
from doll.process.files import write_json
from doll.process.signals import Interrupts
from doll.run.folder import RunFolder, display_path
from doll.run.local.follower import RunFollower
from doll.run.local.hooks import RunHook, WorkerPool
from doll.run.local.role_specs import RoleSpecs

# After the end of the source, fewer batches than a group may remain: no update will come of them.
IDLE_AFTER_SOURCE_S = 5.0
PRODUCER_START_TIMEOUT_S = 20.0
INTERRUPTED = "stopped by you"
SOURCE_ENDED = "the source has ended"


class Learning:
    """Starts the roles of a job and keeps them and their services running until the job ends.

    Args:
        after_term: terms up to this one belong to earlier runs on the same topics.
    """

    def __init__(
        self,
        config: JobConfig,
        run: RunFolder,
        display: Display,
        interrupts: Interrupts,
        stack: Stack,
        supervisor: Supervisor,
        follower: RunFollower,
        specs: RoleSpecs,
        hook: RunHook,
        worker_pool: WorkerPool | None,
        after_term: int,
    ) -> None:
        self._config = config
        self._run = run
        self._display = display
        self._interrupts = interrupts
        self._stack = stack
        self._supervisor = supervisor
        self._follower = follower
        self._model = follower.model
        self._specs = specs
        self._hook = hook
        self._worker_pool = worker_pool
        self._after_term = after_term
        self._producer_started = False
        self._pids: dict[str, int] = {}

    def start_roles(self, forks: ForkServer) -> None:
        """Start everything but the producer."""
        config = self._config
        self._display.say(
            f"starting the parameter server and {config.data.workers} workers (the first waits for torch's import)"
        )
        for spec in self._specs.parameter_servers():
            self._supervisor.start(spec)
        if self._worker_pool is not None:
            self._worker_pool.start_workers(forks, self._stack, self._specs.instance)
        else:
            for slot in range(config.data.workers):
                self._supervisor.start(self._specs.worker(slot))
        if config.evaluation.enabled:
            self._supervisor.start(self._specs.evaluator())
        if config.source is None:
            self._display.say(
                f"no source in the job file: waiting for samples on topic {config.topic('samples')} at "
                f"{self._stack.services.kafka}, or from: doll produce --job {display_path(self._run.path)} --stdin"
            )

    def run(self) -> str:
        """Follow the job until it ends; returns the reason.

        Raises:
            DollError: a role, or the broker, cannot be kept alive.
        """
        started_s = idle_since_s = time.monotonic()
        version = -1
        while True:
            self._follower.follow()
            self._start_producer(time.monotonic() - started_s)
            if self._follower.finished:
                finished = self._model.history.finished
                return finished.reason if finished is not None else "finished"
            if self._interrupts.stop_requested:
                self._display.say("stopping: the parameter server writes a last checkpoint (again to stop at once)")
                return INTERRUPTED
            self._supervisor.poll()
            self._write_pids()
            self._restart_dead_services()
            if (reason := self._hook.tick(self._supervisor, self._stack)) is not None:
                return reason
            codes = self._supervisor.exit_codes()
            if codes.get("ps") == 0:
                self._follower.read_to_end()
                if not self._follower.finished:
                    raise ServiceUnavailableError(
                        f"the parameter server ended before the job; see {self._run.logs / 'ps.log'}"
                    )
                continue
            # The workers' lag is reported up to two seconds late: the wait begins when the source has ended.
            if codes.get("producer") != 0 or self._model.history.version != version:
                idle_since_s, version = time.monotonic(), self._model.history.version
            if codes.get("producer") == 0 and self._all_read() and self._idle(time.monotonic() - idle_since_s):
                return SOURCE_ENDED

    def _start_producer(self, waited_s: float) -> None:
        """Start the source when the workers are live: samples that arrive earlier would be learned in one burst."""
        # Kept here, not asked from the supervisor: a hook may take the producer from it for a while.
        if self._config.source is None or self._producer_started:
            return
        if self._after_term and not self._model.history.term:
            return  # a source that is a file resumes from the new generation's first record
        waited = waited_s > PRODUCER_START_TIMEOUT_S or all(line.is_live for line in self._model.worker_lines())
        if self._worker_pool.workers_ready if self._worker_pool is not None else waited:
            self._producer_started = True
            self._display.say("starting the producer")
            self._supervisor.start(self._specs.producer())

    def _write_pids(self) -> None:
        """Keep `roles.json` current: process ids by name, for drills and for people."""
        pids = {name: handle.pid for name, handle in self._supervisor.handles().items()}
        pids |= self._worker_pool.pids() if self._worker_pool is not None else {}
        if pids != self._pids:
            self._pids = pids
            write_json(self._run.roles, pids)

    def _all_read(self) -> bool:
        """Whether the workers are live and have read all records, as the parameter server reports."""
        return all(line.is_live and line.lag_records == 0 for line in self._model.worker_lines())

    def _idle(self, waited_s: float) -> bool:
        """Whether no more updates will come: none has for longer than a group takes, even computed one by one."""
        group_s = self._config.group_size * self._model.history.service_s()
        return waited_s > max(IDLE_AFTER_SOURCE_S, 3 * group_s if math.isfinite(group_s) else 0.0)

    def _restart_dead_services(self) -> None:
        """Restart a local broker or Redis that has died; the roles wait for it."""
        kafka, redis = self._stack.kafka, self._stack.redis
        if kafka is not None and (dead := kafka.dead_nodes()):
            for number in dead:
                self._follower.service_restarted(
                    "kafka", "Kafka" if len(kafka.nodes) == 1 else f"Kafka's broker {number}"
                )
            kafka.restart_dead()
        if redis is not None and redis.pid is None:
            self._follower.service_restarted("redis", "Redis")
            redis.start()


def ended_early(stop: Mapping[str, float], failures: Mapping[str, tuple[int, str]]) -> str:
    """The error of a run whose source ended before a stop rule was met.

    Args:
        failures: of roles that ended with an error: how often, and the last lines of their logs.
    """
    rules = ", ".join(f"{name} {value:g}" for name, value in stop.items())
    failed = "; ".join(
        f"{name} failed {count} times, last with: {line}" for name, (count, line) in sorted(failures.items())
    )
    return f"the source ended before the stop rule ({rules}) was met: {failed or 'give it more samples'}"
