"""The main part of a run, from the start of the first role to the last checkpoint and the last evaluation."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence

from doll.errors import ServiceUnavailableError
from doll.local.forks import Role
from doll.local.supervisor import Handle, Supervisor
from doll.monitor.views.run_report import INTERRUPTED
from doll.process.files import is_full, write_json
from doll.run.folder import display_path
from doll.run.local.challengers import LocalChallengers
from doll.run.local.context import PARAMETER_SERVERS, LocalRun
from doll.run.local.follower import POLL_S, RunFollower

# After the end of the source: a policy of another package may leave the last group incomplete.
IDLE_AFTER_SOURCE_S = 5.0
# Multiple of `worker.grant_timeout_s`: workers decode or compute, but without a result.
_GIVE_UP_TIMEOUTS = 10
PS_STOP_S = 30.0
LAST_EVALUATION_TIMEOUT_S = 60.0
SOURCE_ENDED = "the source has ended"


class Learning:
    """Starts the roles of a job, keeps them and their services running until the job ends, and ends them in order."""

    def __init__(self, run: LocalRun, follower: RunFollower) -> None:
        self._run = run
        self._follower = follower
        self._model = follower.model
        self._supervisor = Supervisor(run.launch, on_restart=follower.role_restarted)
        self._producer_started = False
        self._pids: dict[str, int] = {}
        self._is_full = False
        self._challengers = LocalChallengers(run.config, run.folder, run.stack.services, follower.add_event)
        self._workers = set(range(run.config.data.workers))  # started, and not ended for serving no partition

    def start_roles(self) -> None:
        """Start all roles except the producer."""
        config, say = self._run.config, self._run.display.say
        say(f"starting the parameter server and {config.data.workers} workers (the first waits for torch's import)")
        for spec in self._run.parameter_servers():
            self._supervisor.start(spec)
        for spec in [*self._run.shards(), *self._run.joiners()]:
            self._supervisor.start(spec)
        for slot in range(config.data.workers):
            self._start_stages(slot)
        self._run.hook.start_workers(self._run, self._supervisor)
        if config.evaluation.enabled:
            self._supervisor.start(self._run.evaluator())
        if config.data.topic is not None:
            say(
                f"learning from topic {config.data.topic} at {self._run.stack.services.kafka}, "
                f"{config.data.num_partitions} partitions; a new job begins at {config.data.start}"
            )
        elif config.data.join is not None:
            labels = ", ".join(label.topic for label in config.data.join.labels)
            say(f"joining {config.data.join.features.topic} with {labels} at {self._run.stack.services.kafka}")
        elif config.source is None:
            say(
                f"no source in the job file: waiting for samples on topic {config.topic('samples')} at "
                f"{self._run.stack.services.kafka}, or from: doll produce --job "
                f"{display_path(self._run.folder.path)} --stdin"
            )

    def follow(self) -> str:
        """Follow the job until it ends; return the reason.

        Raises:
            DollError: a role or the broker cannot be kept running.
        """
        started_s = idle_since_s = time.monotonic()
        version, said = -1, False
        while True:
            self._follower.follow()
            self._start_producer(time.monotonic() - started_s)
            if self._follower.finished:
                finished = self._model.history.finished
                return finished.reason if finished is not None else "finished"
            if self._run.interrupts.stop_requested:
                self._run.display.say("stopping: the parameter server writes a last checkpoint (again to stop at once)")
                return INTERRUPTED
            self._supervisor.poll()
            self._match_workers()
            self._note_full_disk()
            self._write_pids()
            self._restart_dead_services()
            self._challengers.tick(self._model.drifts)
            if (reason := self._run.hook.tick(self._supervisor, self._run.stack)) is not None:
                return reason
            codes = self._supervisor.exit_codes()
            if codes.get("ps") == 0:
                self._follower.read_to_end()
                if not self._follower.finished:
                    raise ServiceUnavailableError(
                        f"the parameter server ended before the job; see {self._run.folder.logs / 'ps.log'}"
                    )
                continue
            # The workers' lag is reported up to two seconds late; so wait from the end of the source.
            if codes.get("producer") != 0 or self._model.history.version != version:
                idle_since_s, version, said = time.monotonic(), self._model.history.version, False
            waited_s = time.monotonic() - idle_since_s
            if codes.get("producer") == 0 and self._all_read() and self._idle(waited_s):
                left = self._follower.unlearned()
                give_up_s = _GIVE_UP_TIMEOUTS * self._run.config.worker.grant_timeout_s
                if left == 0 or self._model.waits_for_more() or waited_s > give_up_s:
                    return SOURCE_ENDED
                if left and not said:
                    said = True
                    self._run.display.say(f"the source has ended: {left} records are read, and not learned yet")

    def _start_producer(self, waited_s: float) -> None:
        """Start the source when the workers are live, because earlier samples would be learned in one burst."""
        # Not read from the supervisor: a hook may temporarily remove the producer from it.
        if self._run.config.source is None or self._producer_started:
            return
        if self._run.after_term and not self._model.history.term:
            return  # a file source resumes from the first record of the new generation
        if self._run.hook.workers_ready(self._model, waited_s):
            self._producer_started = True
            self._run.display.say("starting the producer")
            self._supervisor.start(self._run.producer())

    def _match_workers(self) -> None:
        """Start workers up to the number of `doll scale`, and end workers that do not serve a partition any more.

        If a hook manages the workers, this method does nothing.
        """
        supervised, wanted, say = self._supervisor.exit_codes(), self._model.num_workers, self._run.display.say
        if "worker-0" not in supervised:
            return
        for slot in range(wanted):
            # A drill may temporarily remove the process of a started worker from the supervisor.
            if slot not in self._workers and supervised.get(f"worker-{slot}", 0) is not None:
                self._workers.add(slot)
                say(f"starting worker {slot}: the job is to have {wanted}")
                self._start_stages(slot)
                self._supervisor.start(self._run.worker(slot))
        for line in self._model.worker_lines():
            handle = self._supervisor.handles().get(f"worker-{line.worker}")
            if line.is_spare and line.worker >= wanted and line.worker in self._workers and handle is not None:
                self._workers.remove(line.worker)
                say(f"ending worker {line.worker}: the job is to have {wanted}")
                handle.terminate()

    def _start_stages(self, slot: int) -> None:
        for spec in self._run.stages(slot):
            # Stages outlive a worker that was scaled away.
            if self._supervisor.exit_codes().get(spec.name, 0) is not None:
                self._supervisor.start(spec)

    def _note_full_disk(self) -> None:
        """Report when a full disk begins or stops to block the job, because its other errors appear only in logs."""
        full = is_full(self._run.folder.path)
        if full != self._is_full:
            self._is_full = full
            place = display_path(self._run.folder.path)
            todo = "free some: until then no checkpoint is saved, and Kafka may end"
            text = f"no space is left on the disk of {place}: {todo}" if full else f"there is space again for {place}"
            self._model.add_event(text, time.monotonic())
            self._run.display.say(text)

    def _write_pids(self) -> None:
        """Keep `roles.json` current: it contains process ids by name, for drills and users."""
        pids = {name: handle.pid for name, handle in self._supervisor.handles().items()}
        pids |= self._run.hook.pids()
        if pids != self._pids:
            self._pids = pids
            write_json(self._run.folder.roles, pids)

    def _all_read(self) -> bool:
        """Return whether the workers are live and have read all records, as the parameter server reports."""
        lines = [line for line in self._model.worker_lines() if not line.is_spare]
        return all(line.is_live and line.lag_records == 0 for line in lines)

    def _idle(self, waited_s: float) -> bool:
        """Return whether the last update is older than the time for a group whose batches are computed in sequence."""
        group_s = self._run.config.group_size * self._model.history.service_s()
        return waited_s > max(IDLE_AFTER_SOURCE_S, 3 * group_s if math.isfinite(group_s) else 0.0)

    def _restart_dead_services(self) -> None:
        """Restart a local broker or Redis that has died. The roles wait for it."""
        kafka, redis = self._run.stack.kafka, self._run.stack.redis
        if kafka is not None and (dead := kafka.dead_nodes()):
            for number in dead:
                self._follower.service_restarted(
                    "kafka", "Kafka" if len(kafka.nodes) == 1 else f"Kafka's broker {number}"
                )
            kafka.restart_dead()
        if redis is not None and redis.pid is None:
            self._follower.service_restarted("redis", "Redis")
            redis.start()

    def shut_down(self) -> None:
        """Stop the producer, make the parameter server save and finish the job, then wait for the last evaluation."""
        handles, say = self._supervisor.handles(), self._run.display.say
        self._challengers.stop()
        if (producer := handles.get("producer")) is not None:
            producer.terminate()
        if servers := [handles[name] for name in PARAMETER_SERVERS if name in handles]:
            say("saving the last checkpoint")
            if not self._finish_job(servers):
                say(f"the parameter server did not end within {PS_STOP_S:g} s: killed")
                for server in servers:
                    server.kill()
        if (evaluator := handles.get("evaluator")) is not None:
            say("evaluating the last version")
            self._await(evaluator, LAST_EVALUATION_TIMEOUT_S if self._follower.finished else POLL_S)

    def stop(self) -> None:
        """End the remaining processes."""
        self._challengers.stop()
        order = ("producer", "joiner-*", "ps*", "shard-*", "worker-*", "stage-*", "evaluator")
        self._supervisor.stop(order, grace_s=self._run.config.worker.drain_s)

    def _finish_job(self, servers: Sequence[Handle]) -> bool:
        """Make the parameter server end the job; return False if it, or its standby, does not end in time."""
        for _ in range(round(PS_STOP_S)):
            # SIGINT ends the job, SIGTERM would only end the process. It is sent again each second, because a process
            # that has just started does not handle it yet; a standby ignores it.
            for server in servers:
                if not self._follower.finished and isinstance(server, Role):
                    server.send_signal(signal.SIGINT)
            if all(self._await(server, 1.0) for server in servers):
                return True
        return False

    def _await(self, handle: Handle, timeout_s: float) -> bool:
        """Follow the job until a process has ended; return False if the time limit passes first."""
        deadline_s = time.monotonic() + timeout_s
        while handle.poll() is None:
            if time.monotonic() > deadline_s:
                return False
            self._follower.follow()
        return True


def ended_early(stop: Mapping[str, float], failures: Mapping[str, tuple[int, str]]) -> str:
    """Return the error of a run whose source ended before a stop rule was met.

    Args:
        failures: for each role that ended with an error, the number of failures and the last line of its log.
    """
    rules = ", ".join(f"{name} {value:g}" for name, value in stop.items())
    failed = "; ".join(
        f"{name} failed {count} times, last with: {line}" for name, (count, line) in sorted(failures.items())
    )
    return f"the source ended before the stop rule ({rules}) was met: {failed or 'give it more samples'}"
