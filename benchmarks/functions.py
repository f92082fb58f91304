"""Workers in functions with a short time limit, against the same workers whose limit is not reached.

    python -m benchmarks.functions --seconds 300 --limits 900,60

An example, digits or ratings, runs on a broker and a Redis of its own. Its workers are invocations of a function on
AWS's runtime interface emulator (`tests/support/function_world.py` says what it needs). For each limit: batches per
second, causes of the ends of invocations, the bill, and the audit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from doll.config import dump, load
from doll.kafka import topics
from doll.kafka.reader import Tail
from doll.ledger.audit import audit
from doll.local import processes
from doll.local.kafka_broker import LocalKafka
from doll.local.redis_server import LocalRedis
from doll.records.control import Finished, Update
from doll.services import KAFKA_ENV, REDIS_ENV, Services
from doll.storage.stores import open_store

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))


def run(folder: Path, example: Path, limit_s: int, seconds: float, overrides: list[str]) -> dict[str, Any]:
    """Run the job for some seconds after its first update, end it, and audit it."""
    from function_world import NAME, FunctionWorld

    folder.mkdir(parents=True)
    with LocalKafka(folder / "kafka") as kafka, LocalRedis(folder / "redis") as redis:
        services = Services(kafka.address, redis.address)
        addresses = {KAFKA_ENV: services.kafka, REDIS_ENV: services.redis}
        function_env = {**addresses, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        with FunctionWorld(folder / "functions", function_env, limit_s) as world:
            fleet = (
                f"{{kind: lambda, function: {NAME}, region: us-east-1, timeout_s: {limit_s}, start_s: 20, "
                f"folder: {example}}}"
            )
            config = load(example / "job.yaml", [
                "stop={}", "stop.updates=10000000", f"fleet={fleet}", "plan.deadline_s=1000000000", "worker.drain_s=4",
                "provision.every_s=1", "data.workers=3", "training.policy.group_size=3", "evaluation.enabled=false",
                f"checkpoint.folder={folder}/run/checkpoints", *overrides,
            ])  # fmt: skip
            job = folder / "job.yaml"
            job.write_text(dump(config) + f"base_folder: {example}\n")
            topics.ensure(config, services)
            aws = {"AWS_ENDPOINT_URL": world.url, "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}

            def start(*command: str) -> Any:
                words = [sys.executable, "-m", "doll", *command, "--job", str(job), "--run-folder", str(folder / "run")]
                return processes.spawn(words, folder / f"{command[0]}.log", {**addresses, **aws})

            server, producer, provisioner = start("ps"), start("produce"), start("provision", "run")
            tail = Tail(config, services, (config.topic("updates"),))
            batches: list[tuple[float, int]] = []
            finished = False
            end_s = time.monotonic() + 600
            while time.monotonic() < end_s and not finished:
                for entry in tail.poll(0.2):
                    if isinstance(entry.record, Update):
                        if not batches:
                            end_s = time.monotonic() + seconds
                        batches.append((time.monotonic(), entry.record.batches_total))
                    finished = finished or isinstance(entry.record, Finished)
            measured = [each for each in batches if each[0] <= end_s]
            server.send_signal(signal.SIGINT)
            for process in (server, provisioner):
                process.wait(120)
            producer.kill()
            answered = list(world.answered)
            report = audit(config, services, open_store(config, folder / "run"))
            tail.close()
    journal = [json.loads(line) for line in next((folder / "run").glob("provision-*.jsonl")).read_text().splitlines()]
    decision = [entry for entry in journal if entry["kind"] == "decision"][-1]
    took_s = measured[-1][0] - measured[0][0]
    return {
        "limit_s": limit_s, "seconds": round(took_s, 1),
        "batches_per_s": round((measured[-1][1] - measured[0][1]) / took_s, 2),
        "longest_pause_s": round(max(b[0] - a[0] for a, b in itertools.pairwise(measured)), 2),
        "causes": dict(Counter(str(each.answer.get("cause")) for each in answered)),
        "invocations": len(answered), "cold": sum(each.cold for each in answered),
        "seconds_per_invocation": round(statistics.mean(each.answer["billed_ms"] for each in answered) / 1000, 1),
        "spent_usd": decision["spent_usd"], "audit_ok": report.ok, "missing": len(report.missing),
        "twice": len(report.twice), "applied": report.applied,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--example", default="digits", help="with data.workers and group_size of 3")
    parser.add_argument("--seconds", type=float, default=300.0, help="measured time of each run")
    parser.add_argument("--limits", default="900,60", help="limits of an invocation, one run each")
    parser.add_argument("--set", action="append", default=[], help="a key of the job file, as with doll --set")
    options = parser.parse_args()
    from function_world import unavailable_reason

    if (reason := unavailable_reason()) is not None:
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="doll-functions-", ignore_cleanup_errors=True) as folder:
        for number, limit_s in enumerate(map(int, options.limits.split(","))):
            place, example = Path(folder) / str(number), ROOT / "examples" / options.example
            print(json.dumps(run(place, example, limit_s, options.seconds, options.set)), flush=True)


if __name__ == "__main__":
    main()
