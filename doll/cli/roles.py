"""Commands that run one process of a job (produce, worker, ps, evaluate, otel), and health, which probes one."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Annotated, Literal

import typer

from doll.cli.options import FRESH_HELP, JobOptions, RunFolderOption, RunOptions, duration, interval
from doll.process.platform import lower_priority
from doll.records.bounded import printable

_PROBE_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 1_000_000


def produce(
    job: JobOptions,
    stdin: Annotated[bool, typer.Option("--stdin", help="Send the lines of standard input, not the source.")] = False,
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="End when the job has finished, not when the source ends.")
    ] = False,
    run_folder: RunFolderOption = None,
) -> None:
    """Send the job's source to its samples topic.

    Example: cat events.jsonl | doll produce --job my.yaml --stdin
    """
    from doll.config import StdinSource
    from doll.kafka.foreign_topic import require_own_topic
    from doll.run.local.roles import JobProcess

    job_target = job.target(run_folder)
    if stdin:
        require_own_topic(job_target.config, "doll produce")
        from_stdin = job_target.config.model_copy(update={"source": StdinSource(kind="stdin")})
        job_target = dataclasses.replace(job_target, config=from_stdin)
    elif job_target.config.source is None:
        if until_finished:  # a service of a stack whose job has its own producer
            sys.stderr.write("doll: the job file has no source: nothing to send\n")
            raise typer.Exit(0)
        require_own_topic(job_target.config, "doll produce")
        raise typer.BadParameter("the job file has no source: add one, or send lines with --stdin")
    process = JobProcess.alone(job_target, "producer", redis="unused", topics_exist=False)
    raise typer.Exit(process.producer(until_finished=until_finished))


def join(
    job: JobOptions,
    number: Annotated[
        int, typer.Option("--joiner", envvar="DOLL_JOINER", min=0, help="Number of this joiner, from 0.")
    ] = 0,
    run_folder: RunFolderOption = None,
) -> None:
    """Join the topics of data.join, features and labels, into the samples topic.

    Joiners with different numbers share the partitions; any number of them may run. Of two joiners with one number, the
    later one goes on.

    Exit code 0: the job has ended, or the joiner received SIGTERM. Exit code 4: records were deleted before they were
    joined.

    Example: doll join --job my.yaml --joiner 1
    """
    from doll.run.local.roles import JobProcess

    process = JobProcess.alone(job.target(run_folder), f"joiner-{number}", redis="unused", topics_exist=False)
    raise typer.Exit(process.joiner(number))


def worker(
    job: JobOptions,
    slot: Annotated[
        int | None,
        typer.Option("--worker", envvar="DOLL_WORKER", min=0, help="Slot n, 0 to data.max_workers - 1 [default: 0]."),
    ] = None,
    any_slot: Annotated[
        bool, typer.Option("--any-slot", help="Without --worker: take any slot that no other worker holds.")
    ] = False,
    from_imds: Annotated[
        bool,
        typer.Option("--from-imds", help="Read the slot from the tags of this EC2 instance; leave on spot notices."),
    ] = False,
    run_folder: RunFolderOption = None,
) -> None:
    """Run worker n: form batches from the samples of partition n, and compute the gradients of granted batches.

    Exit code 0: the job has ended, the worker received SIGTERM, or another process has taken its slot.

    With --any-slot, all workers are started with the same command. If all slots are taken, a worker waits for a free
    one.

    Example: doll worker --job my.yaml --worker 3
    """
    from doll.run.local.roles import JobProcess

    job_target = job.target(run_folder)
    if from_imds:
        if any_slot:
            raise typer.BadParameter("expected --from-imds or --any-slot, got both")
        from doll.consumers.lifecycle.spot_notices import slot_of_this_machine

        slot = slot_of_this_machine(slot)
    if slot is not None and slot >= (places := job_target.config.data.places):
        raise typer.BadParameter(f"--worker: expected 0 .. {places - 1} (data.max_workers), got {slot}")
    if slot is None and any_slot:
        from doll.consumers.any_slot import run_any_worker

        process = JobProcess.alone(job_target, "worker")
        raise typer.Exit(run_any_worker(process.config, process.services, process.run_folder))
    slot = slot or 0
    raise typer.Exit(JobProcess.alone(job_target, f"worker-{slot}").worker(slot))


def stage(
    job: JobOptions,
    slot: Annotated[int, typer.Option("--worker", envvar="DOLL_WORKER", min=0, help="Worker of this stage.")] = 0,
    stage_number: Annotated[
        int, typer.Option("--stage", envvar="DOLL_STAGE", min=0, help="Number of this stage, from 0.")
    ] = 0,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", envvar="DOLL_LISTEN",
            help="Address of this machine for the links of the pipeline; port 0: any free port.",
        ),
    ] = "127.0.0.1:0",
    run_folder: RunFolderOption = None,
) -> None:  # fmt: skip
    """Run one stage of a worker, for a job with worker.pipeline.remote: true. The worker finds it through Redis.

    The stage serves one process of its worker after the other. Links are authenticated by a secret in the run's Redis,
    but are not encrypted: use a network that you trust.

    Exit code 0: the job has ended, or the stage received SIGTERM.

    Example: doll stage --job my.yaml --worker 0 --stage 2 --listen 10.0.0.3:7400
    """
    from doll.run.local.roles import JobProcess

    process = JobProcess.alone(job.target(run_folder), f"stage-{slot}-{stage_number}")
    raise typer.Exit(process.stage(slot, stage_number, listen))


def ps(
    job: JobOptions,
    run_folder: RunFolderOption = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait until the leader has been silent for ps.lease_s; then take over.")
    ] = False,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="Start immediately and replace a running leader, if there is one.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", envvar="DOLL_FRESH", help=FRESH_HELP)] = False,
    check_only: Annotated[
        bool, typer.Option("--check", help="Only check whether the job can run, and create its topics; then exit.")
    ] = False,
) -> None:
    """Run the parameter server: form groups, apply updates, write checkpoints.

    Exit code 2: the topics hold an earlier run whose checkpoints are missing, or the checkpoints belong to a samples
    topic that was deleted or truncated. With --fresh, a new generation begins; it continues from checkpoints that
    match.

    Exit code 1: another parameter server is the leader. With --standby, the command waits until the leader has ended
    and then takes over; both must use the same checkpoint.folder.

    Example: doll ps --job my.yaml --run-folder /var/lib/doll/my
    """
    from doll.run.local.roles import JobProcess

    process = JobProcess.alone(job.target(run_folder), "ps", topics_exist=False, has_checkpoints=True)
    raise typer.Exit(process.parameter_server(standby=standby, takeover=takeover, fresh=fresh, check_only=check_only))


def shard(
    job: JobOptions,
    shard: Annotated[
        int | None,
        typer.Option(
            "--shard",
            envvar="DOLL_SHARD",
            min=0,
            show_default=False,
            help="Number of the shard, 0 to ps.shards - 1 [default: one that no other process has].",
        ),
    ] = None,
    run_folder: RunFolderOption = None,
) -> None:
    """Hold a slice of the model for the parameter server, if the job file divides it (ps.shards).

    A shard computes the optimizer's step of its slice, publishes it, and writes its part of each checkpoint. Start as
    many processes as ps.shards says, on any machines that reach Redis and the checkpoints.

    Exit code 0: the job has ended, the shard received SIGTERM, or another process has taken its number.

    Example: doll shard --job my.yaml
    """
    from doll.run.local.roles import JobProcess

    process = JobProcess.alone(job.target(run_folder), "shard" if shard is None else f"shard-{shard}")
    raise typer.Exit(process.shard(shard))


def evaluate(
    job: JobOptions,
    run_folder: RunFolderOption = None,
) -> None:
    """Evaluate published weights on held-out samples until the job ends. Writes evaluations.csv and updates.csv.

    Example: doll evaluate --job my.yaml
    """
    from doll.run.local.roles import JobProcess

    # Without Redis, the evaluator reads the last checkpoint.
    process = JobProcess.alone(job.target(run_folder), "evaluator", redis="optional")
    raise typer.Exit(process.evaluator())


def prometheus(job: JobOptions) -> None:
    """Serve the metrics of all processes of a job at /metrics on 127.0.0.1. The port is $DOLL_HEALTH_PORT or 9464.

    Example: doll prometheus my.yaml
    """
    lower_priority()
    from doll.monitor.views.prometheus import serve_metrics
    from doll.run.local.roles import JobProcess

    process = JobProcess.alone(job.target(), "prometheus", redis="unused")
    raise typer.Exit(serve_metrics(process.config, process.services))


def notify(
    job: JobOptions,
    url: Annotated[str, typer.Option(metavar="URL", help="Address that gets each event as a POST of JSON.")],
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--event", metavar="KIND",
            help="Send only events of this kind; may be repeated: server, worker, records, model, gate, alias, drift, "
            "alarm, end, job [default: all but server, worker and job].",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Send the events of a job to a webhook: drift, versions that pass gates or are held back, alarms, bad records.

    Each event is a JSON object with job, kind, text, version and time. If $DOLL_WEBHOOK_SECRET is set, the header
    X-Doll-Signature has the HMAC-SHA256 of X-Doll-Time, a dot and the body. Events of before the start are not sent. A
    receiver that is away gets them later; up to 1,000 wait.

    Example: doll notify my.yaml --url https://hooks.example.com/doll --event drift --event alias
    """
    lower_priority()
    from doll.monitor.webhooks import DEFAULT_KINDS, KINDS
    from doll.monitor.webhooks import notify as send_events
    from doll.run.local.roles import JobProcess

    if unknown := [kind for kind in kinds or () if kind not in KINDS]:
        raise typer.BadParameter(f"--event: expected one of {', '.join(KINDS)}, got {unknown[0]!r}")
    process = JobProcess.alone(job.target(), "notifier", redis="unused")
    raise typer.Exit(send_events(process.config, process.services, url, kinds or DEFAULT_KINDS))


def otel(
    job: JobOptions,
    endpoint: Annotated[str, typer.Option(metavar="URL", help="OTLP over HTTP, such as http://localhost:4318.")],
    max_per_s: Annotated[float, typer.Option("--max-per-second", min=0.001, max=1000, help="Traced batches.")] = 5.0,
    interval_s: Annotated[
        float | None, duration("Time between two sendings of the metrics [default: 15].", "--interval")
    ] = None,
    only: Annotated[
        Literal["traces", "metrics"] | None, typer.Option("--only", help="Send only these [default: both].")
    ] = None,
) -> None:
    """Send traces of batches and the metrics of a job to OpenTelemetry.

    A trace has the steps of a batch: wait, fetch, compute, push, group, checkpoint. If the first record of a batch has
    the header traceparent, the batch continues the producer's trace. The metrics are those of doll prometheus. Both are
    made from the records of the job, so training waits for nothing.

    Example: doll otel my.yaml --endpoint http://localhost:4318
    """
    lower_priority()  # it must not slow down the training
    from doll.monitor.otel import export_job
    from doll.monitor.otel_metrics import DEFAULT_INTERVAL_S
    from doll.run.local.roles import JobProcess

    every_s = interval(interval_s, DEFAULT_INTERVAL_S)
    process = JobProcess.alone(job.target(), "otel", redis="unused")
    raise typer.Exit(
        export_job(
            process.config, process.services, endpoint, max_per_s=max_per_s, interval_s=every_s, only=only
        )
    )  # fmt: skip


def lineage(
    job: RunOptions,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Address that gets each event as a POST [default: print them].")
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the job in OpenLineage.")] = "doll",
    interval_s: Annotated[
        float | None, duration("Time between two events of a running job [default: 60].", "--interval")
    ] = None,
    run_folder: RunFolderOption = None,
) -> None:
    """Send the runs of a job as events of OpenLineage, until the job ends: its topics, its model, its counts.

    An event has the offsets of each partition that are in the newest checkpoint, with samples and dead letters. If
    $OPENLINEAGE_API_KEY is set, requests have it as Authorization: Bearer. A receiver that is away gets the events
    later.

    Example: doll lineage my.yaml --url http://localhost:5000/api/v1/lineage
    """
    from doll.monitor.openlineage import DEFAULT_INTERVAL_S, send_lineage
    from doll.run.local.roles import JobProcess
    from doll.run.status import generation_of
    from doll.storage.stores import checkpoint_location

    every_s, target = interval(interval_s, DEFAULT_INTERVAL_S), job.target(run_folder)
    process = JobProcess.alone(target, "lineage", redis="unused", has_checkpoints=True)
    model = checkpoint_location(process.config, process.run_folder)
    raise typer.Exit(
        send_lineage(
            process.config, process.services, model, url=url, write=typer.echo, namespace=namespace, interval_s=every_s,
            generation=generation_of(target),
        )
    )  # fmt: skip


def health(
    port: Annotated[int | None, typer.Option(help="Port of the health probe [default: $DOLL_HEALTH_PORT].")] = None,
    ready: Annotated[
        bool, typer.Option("--ready", help="Check whether the process is ready, not only whether it is alive.")
    ] = False,
) -> None:
    """Query the health probe of a process on this machine. Exit code 0 if the process is healthy, otherwise 1.

    Example: doll health --port 8080 --ready
    """
    import http.client

    from doll.process.health import HOST, PORT_ENV

    given = port if port is not None else os.environ.get(PORT_ENV, "")
    if not str(given).isdecimal() or not 0 < int(given) < 65_536:
        raise typer.BadParameter(f"expected a port, 1 to 65535, in --port or {PORT_ENV}, got {str(given)!r}")
    connection = http.client.HTTPConnection(HOST, int(given), timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/readyz" if ready else "/healthz")
        answer = connection.getresponse()
        text, good = answer.read(_MAX_ANSWER_BYTES).decode("utf-8", "replace"), answer.status == 200
    except (OSError, http.client.HTTPException) as error:
        text, good = f"no answer from {HOST}:{given} ({error})", False
    finally:
        connection.close()
    shown = printable(text, keep="\n").rstrip("\n")  # any process of this machine may answer at the port
    (sys.stdout if good else sys.stderr).write(f"{shown}\n")
    raise typer.Exit(0 if good else 1)
