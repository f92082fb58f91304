"""What one event costs the parameter server's engine, in microseconds of the processor, as the number of workers grows.

    python -m benchmarks.engine [--quick] [--out engine.json]

Every worker always has a batch waiting, and answers each grant. Bar: an event with 10,000 workers costs at most 4 times
what it costs with 10, under every policy; caches of the processor, which a larger job fills, are allowed for.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from pathlib import Path

from doll.config.policy import POLICIES, PolicyConfig, policy_section
from doll.ps.engine import Engine
from doll.ps.events import CheckpointStored, Event, SendGrant, SendWelcome, StoreCheckpoint, Tick
from doll.ps.policies import make_policy
from doll.ps.state import EngineSettings
from doll.records import Alive, Announce, Join, Push, PushedBatch

SIZES = (10, 100, 1_000, 10_000)
MAX_GROWTH = 4.0
_TERM = 1
_NEVER = 1 << 40


class Driver:
    """An engine whose workers have batches without end and compute without delay; gradients are empty.

    Attributes:
        num_events: that the engine was given.
    """

    def __init__(self, policy: PolicyConfig, num_workers: int, *, checkpoint_every_updates: int = _NEVER) -> None:
        settings = EngineSettings(
            num_workers=num_workers, records_per_batch=8, max_pending_batches=_NEVER, lease_s=8.0,
            grant_timeout_s=30.0, checkpoint_every_updates=checkpoint_every_updates, checkpoint_every_s=1e18,
        )  # fmt: skip
        self.engine = Engine(settings, make_policy(policy), term=_TERM, now=0.0, origins=[0] * num_workers)
        self.num_events = 0
        self._now = 0.0
        self._sessions = [0] * num_workers
        self._announced = [0] * num_workers
        self._grants: deque[SendGrant] = deque()
        for worker in range(num_workers):
            self.handle(Join(worker=worker, process=f"w{worker}"))
        for worker in range(num_workers):
            self.announce(worker)
            self.announce(worker)

    def handle(self, event: Event) -> None:
        """Give the engine one event and carry out its actions."""
        self.num_events += 1
        self._now += 1e-6
        for action in self.engine.handle(event, self._now):
            if isinstance(action, SendGrant):
                self._grants.append(action)
            elif isinstance(action, SendWelcome):
                self._sessions[action.worker] = action.session
            elif isinstance(action, StoreCheckpoint):
                self.handle(CheckpointStored(version=action.version))

    def announce(self, worker: int) -> None:
        """One more batch of this worker is complete."""
        first = self._announced[worker]
        self._announced[worker] = first + 1
        self.handle(Announce(worker=worker, session=self._sessions[worker], first=first, until=first + 1))

    def round(self) -> None:
        """A set of one worker: its gradient, as many batches more, a heartbeat, and the server's own clock."""
        grant = self._grants.popleft()
        batches = tuple(
            PushedBatch(batch=batch, grant_id=number, n_samples=8, loss_sum=0.0)
            for batch, number in enumerate(grant.grant_ids, grant.first)
        )
        push = Push(
            worker=grant.worker, session=grant.session, term=_TERM, version=grant.version, key="", batches=batches
        )
        self.handle(push)
        for _ in batches:
            self.announce(grant.worker)
        self.handle(Alive(worker=grant.worker, session=grant.session))
        self.handle(Tick())


def cost_us(policy: PolicyConfig, num_workers: int, rounds: int) -> float:
    """Microseconds of the processor per event, the driver's own share included; the best of three runs."""
    costs = []
    for _ in range(3):
        driver = Driver(policy, num_workers)
        for _ in range(rounds // 4):
            driver.round()
        events, started_s = driver.num_events, time.process_time()
        for _ in range(rounds):
            driver.round()
        costs.append((time.process_time() - started_s) / (driver.num_events - events) * 1e6)
    return min(costs)


def measure(sizes: tuple[int, ...], min_rounds: int) -> list[dict[str, object]]:
    """One row per policy of DOLL's own."""
    rows: list[dict[str, object]] = []
    for name in POLICIES.built_in:
        policy = policy_section(name)(name=name)
        # Whole rounds of `bsp`: its updates touch every worker, once for as many gradients.
        costs = {n: cost_us(policy, n, max(2 * n, min_rounds // n * n)) for n in sizes}
        growth = costs[sizes[-1]] / costs[sizes[0]]
        rows.append({"policy": name, "cost_us": costs, "growth": growth, "ok": growth <= MAX_GROWTH})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 1,000 workers")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    sizes = SIZES[:-1] if args.quick else SIZES
    rows = measure(sizes, 2_000 if args.quick else 10_000)
    print("µs per event  " + "".join(f"N = {n:<9,}" for n in sizes) + "growth")
    for row in rows:
        costs: dict[int, float] = row["cost_us"]  # type: ignore[assignment]
        print(f"{row['policy']:12}  " + "".join(f"{cost:<13.1f}" for cost in costs.values()) + f"{row['growth']:.2f}")
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
