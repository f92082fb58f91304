"""Three brokers, one killed every 20 s in turn: does the job stand still? `python -m benchmarks.cluster`.

    python -m benchmarks.cluster [--kills 12] [--every-s 20] [--out FILE.json]

`doll up` on a cluster of three real brokers (each topic on all of them, writes acknowledged by two). After a quiet time
one broker gets SIGKILL every 20 s and is started again at once, the others in turn; one that is not back in all of its
partitions yet puts the next kill off, which is counted. Bars: nothing lost, nothing twice, and no pause between two
updates above 5 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from doll.config import JobConfig
from doll.kafka.clients import kafka_settings
from doll.local.kafka_broker import KafkaCluster
from doll.records.control import AnyRecord, Update
from doll.run.folder import RunFolder
from doll.run.local.context import RunHook
from doll.run.local.up import run_up

from benchmarks.harness import GAUSSIANS, job

if TYPE_CHECKING:
    from doll.local.stack import Stack
    from doll.local.supervisor import Supervisor
    from doll.monitor.views.display import Display

BROKERS: Final = 3
BAR_S: Final = 5.0
_QUIET_S: Final = 20.0  # before the first kill, and after the last
_LOOK_EVERY_S: Final = 0.5


def cluster_job() -> JobConfig:
    """A stream that two cores follow with ease: what stands still then does so because of a broker."""
    return job(
        "cluster",
        task="benchmarks.heldout_task:HeldOutGaussian",
        args={"features": 20, "classes": 4, "hidden": [64]},
        kafka={"replication_factor": BROKERS},
        data={"workers": 3, "batch_size": 32},
        source={"kind": "python", "of": GAUSSIANS, "args": {"features": 20, "classes": 4}},
        arrivals={"process": "poisson", "rate_per_s": 250},
        training={"policy": {"name": "doll", "group_size": 4}, "optimizer": {"name": "sgd", "lr": 0.02}},
    )


class BrokerKiller(RunHook):
    """Kills one broker after the other, while a job learns.

    Attributes:
        kills: Unix seconds of each, with the number of the broker.
        updates: Unix seconds of each update.
        late: kills that had to wait for the broker before to be back.
    """

    def __init__(self, config: JobConfig, display: Display, *, kills: int, every_s: float) -> None:
        self._config = config
        self._display = display
        self._number = kills
        self._every_s = every_s
        self._next_s = float("inf")
        self._look_s = 0.0
        self._admin: Any = None
        self._ended_s = 0.0
        self.kills: list[tuple[float, int]] = []
        self.updates: list[float] = []
        self.late = 0

    @property
    def advertised_ports(self) -> Sequence[Mapping[str, int]]:
        return ({},) * BROKERS

    def feed(self, record: AnyRecord) -> None:
        if isinstance(record, Update):
            if not self.updates:
                self._next_s = time.monotonic() + _QUIET_S
            self.updates.append(record.time_s)

    def tick(self, supervisor: Supervisor, stack: Stack) -> str | None:
        now = time.monotonic()
        if now < self._next_s or now < self._look_s:
            return None
        if len(self.kills) == self._number:
            self._ended_s = time.time()
            return f"cluster: {self._number} kills"
        self._look_s = now + _LOOK_EVERY_S
        assert isinstance(stack.kafka, KafkaCluster)
        if not self._is_whole(stack):
            return None
        self.late += now - self._next_s > 2 * _LOOK_EVERY_S
        number = len(self.kills) % BROKERS
        self._display.say(f"kill {len(self.kills) + 1} of {self._number}: broker {number + 1}")
        self.kills.append((time.time(), number + 1))
        stack.kafka.nodes[number].kill()  # whoever runs the job starts it again
        self._next_s = now + (self._every_s if len(self.kills) < self._number else _QUIET_S)
        return None

    def _is_whole(self, stack: Stack) -> bool:
        """Whether every replica of the job's topics is in sync."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        if self._admin is None:
            self._admin = AdminClient(kafka_settings(self._config, stack.services))
        try:
            topics = self._admin.list_topics(timeout=2.0).topics
        except KafkaException:
            return False
        return all(
            len(partition.isrs) == BROKERS
            for name, topic in topics.items()
            if name.startswith(f"doll.{self._config.job}.")
            for partition in topic.partitions.values()
        )

    def report_fields(self) -> dict[str, Any]:
        results = pauses(self.updates, self.kills, self._ended_s)
        return {"broker_kills": len(self.kills), "late_kills": self.late, **results}


def pauses(updates: Sequence[float], kills: Sequence[tuple[float, int]], ended_s: float) -> dict[str, Any]:
    """The longest time between two updates: before the first kill, and after each one until the next. Pure.

    Args:
        updates: Unix seconds, in order.
        kills: Unix seconds and broker, in order.
        ended_s: when the job was ended: an update that has not come by then is a pause too.
    """
    times = [at for at, _ in kills]

    def longest(lo: float, hi: float) -> float:
        # A pause belongs to where it ends: it may have begun before the kill.
        return max((b - a for a, b in itertools.pairwise((*updates, ended_s)) if lo < b <= hi), default=0.0)

    after = [round(longest(lo, hi), 3) for lo, hi in itertools.pairwise((*times, float("inf")))]
    before = [b - a for a, b in itertools.pairwise(updates) if not times or b <= times[0]]
    return {
        "pauses_s": after,
        "pause_p50_s": round(statistics.median(after), 3) if after else None,
        "pause_max_s": max(after, default=None),
        "quiet_pause_max_s": round(max(before), 3) if before else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--every-s", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cluster.json"))
    options = parser.parse_args(arguments)
    config = cluster_job()
    runs: list[RunFolder] = []

    def hook(run: RunFolder, display: Display) -> BrokerKiller:
        runs.append(run)
        return BrokerKiller(config, display, kills=options.kills, every_s=options.every_s)

    with tempfile.TemporaryDirectory(prefix="doll-cluster-") as folder:
        code = run_up(config, Path(folder), hook=hook)["exit_code"]
        report = json.loads(runs[0].report.read_text(encoding="utf-8"))
    audit = report["audit"] or {}
    kept = ("broker_kills", "late_kills", "pauses_s", "pause_p50_s", "pause_max_s", "quiet_pause_max_s", "updates")
    results = {name: report.get(name) for name in kept} | {
        "exit_code": code, "missing": audit.get("missing"), "twice": audit.get("duplicate"),
        "applied": audit.get("applied"), "every_s": options.every_s, "load": os.getloadavg()[0],
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    sound = code == 0 and (results["missing"], results["twice"]) == (0, 0)
    return 0 if sound and results["pause_max_s"] is not None and results["pause_max_s"] <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
