"""The roles of a job: one function for each, independent of how its process is started.

`doll up` forks a role by a function such as `ps_role`. The arguments of these functions are strings and numbers,
because they are sent between processes. Commands such as `doll ps` run a role as a separate process, also in containers
(`JobProcess.alone`). Each method imports the modules of its role when it is called, because torch takes seconds to
load.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, ParamSpec

from doll import telemetry
from doll.config import JobConfig, load
from doll.errors import ConfigError, DollError
from doll.kafka import topics
from doll.kafka.foreign_topic import with_partitions
from doll.ledger.admission import AFTER_TERM_ENV, ENDED_TERM_ENV, RUN_ID_ENV, recorded_partitions
from doll.process.files import write_json
from doll.process.platform import lower_priority
from doll.ps.standby import LeaderCheck
from doll.run.folder import RunFolder
from doll.service_checks import require_kafka, require_services
from doll.services import BLOBS_ENV, CONTROL_ENV, Services
from doll.storage.stores import open_store

if TYPE_CHECKING:
    from doll.run.target import Target

LOOPBACK_ADDRESS: Final = "127.0.0.1:0"  # any free port
P = ParamSpec("P")

# While training uses all processors, Linux gives a process of this priority 3 % of one of them: an evaluation must not
# slow down the training, and must come to its end.
_EVALUATOR_NICENESS: Final = 15


@dataclass(frozen=True)
class JobProcess:
    """One process of a job. Each role method runs the role in this process, and returns the exit code.

    Attributes:
        after_term: terms up to this one belong to earlier runs on the same topics, as the parent process has
            determined.
        run_id: id of a session of `doll up` or `doll resume`, which makes the names of its shared objects unique.
    """

    config: JobConfig
    services: Services
    run_folder: Path
    after_term: int = 0
    run_id: str = ""

    @classmethod
    def forked(cls, name: str, job_path: str, kafka: str, redis: str, run_folder: str) -> JobProcess:
        """Return a process that `doll up` has forked. Other values than the arguments are in its environment."""
        config = load(Path(job_path))
        telemetry.configure(config.log.format, process=name)
        services = Services(kafka, redis, os.environ.get(BLOBS_ENV, ""), os.environ.get(CONTROL_ENV, ""))
        after_term, run_id = int(os.environ.get(AFTER_TERM_ENV) or 0), os.environ.get(RUN_ID_ENV, "")
        return cls(config, services, Path(run_folder), after_term, run_id)

    @classmethod
    def alone(
        cls,
        target: Target,
        name: str,
        *,
        redis: Literal["required", "optional", "unused"] = "required",
        topics_exist: bool = True,
        has_checkpoints: bool = False,
    ) -> JobProcess:
        """Return a separate process, whose services answer and whose topics fit the job.

        Args:
            redis: "optional": the address of Redis must be known, but Redis need not answer.
            topics_exist: whether the topics must exist. False: the role creates missing topics.
            has_checkpoints: whether the newest checkpoint determines how many partitions of `data.topic` the job reads.

        Raises:
            ConfigError: an address is missing, or the number of partitions of a topic differs from that of the job.
            ServiceUnavailableError: a service does not answer.
        """
        config = target.config
        telemetry.configure(config.log.format, process=name)
        services = target.services(needs_redis=redis != "unused")
        (require_services if redis == "required" else require_kafka)(config, services)
        if config.data.asks_kafka:
            recorded = recorded_partitions(open_store(config, target.run.path)) if has_checkpoints else None
            config = with_partitions(config, services, recorded=recorded)
        if topics_exist:
            topics.check(config, services)
        return cls(config, services, target.run.path)

    def producer(self, *, until_finished: bool = False) -> int:
        """Send the job's source to the samples topic."""
        from doll.producers.main import run_producer

        return run_producer(self.config, self.services, self.run_folder, until_finished=until_finished)

    def joiner(self, number: int) -> int:
        """Join the topics of `data.join` into the samples topic."""
        from doll.join.main import run_joiner

        return run_joiner(self.config, self.services, number)

    def worker(self, slot: int) -> int:
        from doll.consumers.main import run_worker

        return run_worker(self.config, self.services, slot, self.run_folder)

    def stage(self, slot: int, number: int, listen: str = LOOPBACK_ADDRESS) -> int:
        """Run stage `number` of worker `slot`."""
        from doll.consumers.pipeline.stage_main import run_stage
        from doll.pipeline.links.tcp import parse_address

        return run_stage(self.config, self.services, slot, number, parse_address(listen))

    def parameter_server(
        self, *, standby: bool = False, takeover: bool = False, fresh: bool = False, check_only: bool = False
    ) -> int:
        """Run the parameter server.

        Args:
            standby: wait until the leader is silent, then take over.
            takeover: replace a leader.
            fresh: begin a new generation on topics that contain an earlier run.
            check_only: return 0 if the job may run, before any topic or checkpoint is claimed.

        Raises:
            FencedError: another parameter server leads, and neither `standby` nor `takeover` is set.
        """
        watch: LeaderCheck | contextlib.nullcontext[None] = contextlib.nullcontext()
        if not (standby or takeover or check_only):
            topics.ensure(self.config, self.services)
            watch = LeaderCheck(self.config, self.services)
        with watch as leader_check:
            from doll.ps.main import run_ps

            return run_ps(
                self.config, self.services, self.run_folder, standby=standby, leader_check=leader_check, fresh=fresh,
                after_term=self.after_term, run_id=self.run_id, check_only=check_only,
            )  # fmt: skip

    def shard(self, number: int | None) -> int:
        """Hold a slice of the model, if `ps.shards` divides it. None: any number that is free."""
        from doll.ps.shard_main import run_shard

        return run_shard(self.config, self.services, self.run_folder, number)

    def evaluator(self) -> int:
        lower_priority(_EVALUATOR_NICENESS)  # before the imports, which take seconds
        from doll.evaluation.main import run_evaluator

        ended_term = int(os.environ.get(ENDED_TERM_ENV) or 0)
        return run_evaluator(
            self.config, self.services, self.run_folder, after_term=self.after_term, ended_term=ended_term
        )

    def page(self, port: int) -> int:
        """Serve the page of the job on loopback."""
        lower_priority()
        from doll.dashboard.server import JobPage, serve_page
        from doll.dashboard.sources import RunningJob
        from doll.process.http_access import LOOPBACK, listen

        job = RunningJob(self.config, self.run_folder, after_term=self.after_term)
        with listen(LOOPBACK, port) as listener, job.followed(self.services):
            serve_page(JobPage(job), listener)
        return 0


# --- entry points of forked processes


def _role(entry: Callable[P, int]) -> Callable[P, int]:
    """Return an entry point that exits with the exit code of its `DollError`. After code 2, it is not restarted."""

    @functools.wraps(entry)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return entry(*args, **kwargs)
        except DollError as error:
            if not isinstance(error, ConfigError) or error.__cause__ is not None:  # otherwise the message is sufficient
                traceback.print_exc()
            sys.stderr.write(f"doll: {error}\n")
            return error.exit_code

    return run


def _forked(name: str, run: Callable[..., int]) -> Callable[..., int]:
    """Return the entry point of a role. It calls `run` with the process and with the arguments after the run folder.

    Args:
        name: name of the process; each `{}` is replaced by one of these arguments.
    """

    @_role
    def entry(job_path: str, kafka: str, redis: str, run_folder: str, *more: int | str) -> int:
        return run(JobProcess.forked(name.format(*more), job_path, kafka, redis, run_folder), *more)

    return entry


ps_role = _forked("ps", lambda process: process.parameter_server(takeover=True))
"""The entry point of the parameter server. It replaces a running one."""
ps_standby_role = _forked("ps-standby", lambda process: process.parameter_server(standby=True))
worker_role = _forked("worker-{}", JobProcess.worker)
shard_role = _forked("shard-{}", JobProcess.shard)
stage_role = _forked("stage-{}-{}", JobProcess.stage)
evaluator_role = _forked("evaluator", JobProcess.evaluator)
producer_role = _forked("producer", JobProcess.producer)
joiner_role = _forked("joiner-{}", JobProcess.joiner)
page_role = _forked("page", JobProcess.page)


@_role
def invocation_role(job_path: str, run_folder: str, worker: int) -> int:
    """Run a worker in a function invocation. Its services are those of the job file or of the environment."""
    from doll.run.target import open_target

    return JobProcess.alone(open_target(Path(job_path), [], Path(run_folder)), f"worker-{worker}").worker(worker)


@_role
def provisioner_role(job_path: str, kafka: str, redis: str, run_folder: str, ray_address: str, is_own: bool) -> int:
    """Run the provisioner of a run whose workers are actors of Ray."""
    from doll.run.local.provisioning import ActorCluster, run_provisioner

    process = JobProcess.forked("provisioner", job_path, kafka, redis, run_folder)
    cluster = ActorCluster(ray_address, is_own, process.after_term)
    return run_provisioner(Path(job_path), process.services, process.run_folder, cluster)


@_role
def export_role(job_path: str, run_folder: str, out_folder: str) -> int:
    """Write the newest checkpoint as a model, in a process that has already loaded torch."""
    config = load(Path(job_path))
    telemetry.configure(config.log.format, process="export")
    from doll.run.export import export_model

    export_model(config, Path(run_folder), Path(out_folder))
    return 0


@_role
def model_role(job_path: str, run_folder: str) -> int:
    """Build the model for a trial. If the job begins with given weights, write a report on them to the folder. If
    `ps.shards` is auto, write its number to the job file."""
    from doll.run.local.preflight import check_model

    config, folder = load(Path(job_path)), RunFolder(Path(run_folder))
    begins = config.training.init_from is not None and not open_store(config, folder.path).versions()
    model = check_model(config, begins=begins)
    if model.init_from is not None:
        write_json(folder.init_from, model.init_from.to_dict() | {"text": model.init_from.text()})
    if config.ps.shards == "auto":
        folder.write_job(config.with_shards(model.shards))
    return 0
