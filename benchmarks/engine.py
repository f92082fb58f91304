"""What one event costs the parameter server's engine, in microseconds of the processor, as the number of workers grows,
or that of partitions on eight workers.

    python -m benchmarks.engine [--quick] [--partitions] [--out engine.json] [--docs]

Every worker always has a batch waiting, and answers each grant; its batches are of its partitions in turn. Bars, under
every policy, from 10 to 10,000 workers, and from 8 to 1,000 partitions, with a checkpoint every 100 updates: an event
costs at most twice as much, and brings at most twice as many messages to workers. `--docs` puts the table into
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import Any

from doll.config.policy import POLICIES, PolicyConfig, policy_section
from doll.ps.engine.engine import Engine
from doll.ps.engine.events import (
    CheckpointStored,
    Event,
    FetchGradient,
    GradientFetched,
    StoreCheckpoint,
    Tick,
)
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies import make_policy
from doll.records.control import Alive, Announce, BatchRange, Grant, Join, NewVersion, Push, PushedBatch, Welcome

from benchmarks.results import DOCS, commit, update_section
from benchmarks.tables import Table

SIZES = (10, 100, 1_000, 10_000)
MAX_GROWTH = 2.0
PARTITIONS, PARTITION_WORKERS, CHECKPOINT_EVERY = (8, 100, 1_000), 8, 100
MARK, COMMAND = "bench-engine", "make bench-engine BENCH=--docs"
PARTITIONS_MARK, PARTITIONS_COMMAND = "bench-partitions", 'make bench-engine BENCH="--partitions --docs"'
_MAX_CHANGE = 1e-4  # of a step; the bound of `vap` lets a view miss some dozens of these
_TERM = 1
_NEVER = 1 << 40


class Driver:
    """An engine whose workers have batches without end and compute without delay.

    Gradients are empty; steps, under policies whose workers send these, have a size.

    Attributes:
        num_events: that the engine was given.
        num_messages: to workers, that it has ordered: Welcome, Grant, NewVersion.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        num_workers: int,
        *,
        num_partitions: int | None = None,
        checkpoint_every_updates: int = _NEVER,
    ) -> None:
        """`num_partitions`: as many as workers by default."""
        p = num_workers if num_partitions is None else num_partitions
        settings = EngineSettings(
            num_workers=num_workers, records_per_batch=8, max_pending_batches=_NEVER, lease_s=8.0,
            grant_timeout_s=30.0, checkpoint_every_updates=checkpoint_every_updates, checkpoint_every_s=1e18,
        )  # fmt: skip
        self.engine = Engine(settings, make_policy(policy), term=_TERM, now=0.0, origins=[0] * p)
        self.num_events = 0
        self.num_messages = 0
        self._key = "u" if policy.sends_steps else ""
        self._now = 0.0
        self._sessions = [0] * num_workers
        self._announced = [0] * p
        self._partitions = [deque(range(number, p, num_workers)) for number in range(num_workers)]
        self._grants: deque[Grant] = deque()
        for worker in range(num_workers):
            self.handle(Join(worker=worker, process=f"w{worker}"))
        self._size = policy.batches_per_push
        for worker in range(num_workers):
            for _ in range(max(2, self._size)):
                self.announce(worker)

    def handle(self, event: Event) -> None:
        """Give the engine one event and carry out its actions."""
        self.num_events += 1
        self._now += 1e-6
        for action in self.engine.handle(event, self._now):
            if isinstance(action, Grant):
                self.num_messages += 1
                self._grants.append(action)
            elif isinstance(action, NewVersion):
                self.num_messages += 1
            elif isinstance(action, FetchGradient):
                self.handle(GradientFetched(grant_id=action.grant_id, max_change=_MAX_CHANGE))
            elif isinstance(action, Welcome):
                self.num_messages += 1
                self._sessions[action.worker] = action.session
            elif isinstance(action, StoreCheckpoint):
                self.handle(CheckpointStored(version=action.version))

    def announce(self, worker: int) -> None:
        """One more batch of this worker is complete, of the next of its partitions."""
        partition = self._partitions[worker][0]
        self._partitions[worker].rotate(-1)
        first = self._announced[partition]
        self._announced[partition] = first + 1
        runs = (BatchRange(partition, first, first + 1),)
        self.handle(Announce(worker=worker, session=self._sessions[worker], runs=runs))

    def round(self) -> None:
        """A set of one worker: its gradient, as many batches more, a heartbeat, and the server's own clock."""
        grant = self._grants.popleft()
        numbers = list(grant.grant_ids)
        while (grant.first + len(numbers)) % self._size and self._grants and self._grants[0].worker == grant.worker:
            numbers += self._grants.popleft().grant_ids  # of the same wave
        batches = tuple(
            PushedBatch(batch=batch, grant_id=number, n_samples=8, loss_sum=0.0)
            for batch, number in enumerate(numbers, grant.first)
        )
        push = Push(
            worker=grant.worker, session=grant.session, term=_TERM, version=grant.version, key=self._key,
            batches=batches,
        )  # fmt: skip
        self.handle(push)
        for _ in batches:
            self.announce(grant.worker)
        self.handle(Alive(worker=grant.worker, session=grant.session))
        self.handle(Tick())


def cost(policy: PolicyConfig, num_workers: int, rounds: int, **driver_args: int) -> tuple[float, float]:
    """Microseconds of the processor per event, the driver's own share included, the best of three runs; and messages
    to workers per event."""
    costs = []
    for _ in range(3):
        driver = Driver(policy, num_workers, **driver_args)
        for _ in range(rounds // 4):
            driver.round()
        events, messages, started_s = driver.num_events, driver.num_messages, time.process_time()
        for _ in range(rounds):
            driver.round()
        events = driver.num_events - events
        costs.append((time.process_time() - started_s) / events * 1e6)
        messages = driver.num_messages - messages
    return min(costs), messages / events


def measure(sizes: tuple[int, ...], min_rounds: int) -> list[dict[str, Any]]:
    """One row per policy of DOLL's own."""
    rows: list[dict[str, Any]] = []
    for name in POLICIES.built_in:
        policy = policy_section(name)(name=name)
        # Whole rounds of `bsp`: its updates touch every worker, once for as many gradients.
        costs = {n: cost(policy, n, max(2 * n, min_rounds // n * n)) for n in sizes}
        cost_us, messages = ({n: pair[i] for n, pair in costs.items()} for i in range(2))
        growth, more = (per[sizes[-1]] / per[sizes[0]] for per in (cost_us, messages))
        ok = growth <= MAX_GROWTH and more <= MAX_GROWTH
        rows.append({"policy": name, "cost_us": cost_us, "messages": messages, "growth": growth, "ok": ok})
    return rows


def measure_partitions(rounds: int) -> list[dict[str, Any]]:
    """One row per policy of DOLL's own: cost by number of partitions, on as many workers."""
    rows: list[dict[str, Any]] = []
    for name in POLICIES.built_in:
        policy = policy_section(name)(name=name)
        costs = {
            p: cost(
                policy, PARTITION_WORKERS, rounds, num_partitions=p, checkpoint_every_updates=CHECKPOINT_EVERY
            )
            for p in PARTITIONS
        }  # fmt: skip
        cost_us, messages = ({p: pair[i] for p, pair in costs.items()} for i in range(2))
        growth, more = (per[PARTITIONS[-1]] / per[PARTITIONS[0]] for per in (cost_us, messages))
        ok = growth <= MAX_GROWTH and more <= MAX_GROWTH
        rows.append({"policy": name, "cost_us": cost_us, "messages": messages, "growth": growth, "ok": ok})
    return rows


def table(rows: list[dict[str, Any]], symbol: str = "N") -> Table:
    """Cost by number of workers (`symbol` N) or partitions (P), and messages with the fewest and the most."""
    sizes = list(rows[0]["cost_us"])
    result = Table(
        "Microseconds of the processor per event, and messages to workers per event",
        (
            "policy", *(f"{symbol} = {n:,}" for n in sizes), "growth",
            *(f"messages, {symbol} = {n:,}" for n in (sizes[0], sizes[-1])), "within 2x",
        ),
    )  # fmt: skip
    for row in rows:
        messages = [f"{row['messages'][n]:.2f}" for n in (sizes[0], sizes[-1])]
        costs = [f"{cost_us:.1f}" for cost_us in row["cost_us"].values()]
        verdict = "yes" if row["ok"] else "**NO**"
        result.rows.append([f"`{row['policy']}`", *costs, f"{row['growth']:.2f}", *messages, verdict])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 1,000 workers; fewer events")
    parser.add_argument("--partitions", action="store_true", help="by number of partitions, on 8 workers")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    sizes = SIZES[:-1] if args.quick else SIZES
    rounds = 2_000 if args.quick else 10_000
    rows = measure_partitions(rounds) if args.partitions else measure(sizes, rounds)
    result = table(rows, "P" if args.partitions else "N")
    print(result.text())
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if args.docs:
        when = f"{datetime.now():%Y-%m-%d}, commit {commit()}."
        mark, command = (PARTITIONS_MARK, PARTITIONS_COMMAND) if args.partitions else (MARK, COMMAND)
        update_section(DOCS / "benchmarks.md", mark, command, f"{when}\n\n{result.markdown()}")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
