"""A fleet in memory on a virtual clock: it records every call, and fails and interrupts as a test asks.

It passes the contract suite of the real adapters (tests/contract/test_fleet.py), so a test of a controller may trust
it. It is the world, not a handle on it: a controller that crashes and starts again is given the same object.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from doll.errors import ServiceUnavailableError
from doll.provisioner.fleets.port import EndReason, Fleet, Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.provisioner.planning.state import Market

CallName = Literal["launch", "instances", "terminate"]
DEFAULT_POOLS = ("c5.xlarge/zone-a", "m5.xlarge/zone-a", "c5.xlarge/zone-b", "m5.xlarge/zone-b")


class VirtualClock:
    """A clock that moves only by `advance`."""

    def __init__(self, start_s: float = 1_700_000_000.0) -> None:
        self.now_s = start_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let this much time pass.

        Raises:
            ValueError: it would go back.
        """
        if not seconds >= 0:
            raise ValueError(f"expected 0 seconds or more, got {seconds}")
        self.now_s += seconds


@dataclass(frozen=True)
class Call:
    """One call of the port, whatever came of it.

    Attributes:
        at_s: when.
        order: of a launch.
        ids: of a terminate.
    """

    name: CallName
    at_s: float
    order: Order | None = None
    ids: frozenset[str] = frozenset()


class FakeFleet:
    """`Fleet` in a dict.

    Args:
        clock: Unix seconds, e.g. a `VirtualClock`.
        pools: in order of preference; a launch takes the first that has room and is not to be avoided.
        boot_s: how long an instance is PENDING.
        ending_s: how long it is ENDING after `terminate`.
        keep_ended_s: how long an ended one is still listed.

    Attributes:
        calls: every call of the port, in order.
        pools: their names.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        pools: Sequence[str] = DEFAULT_POOLS,
        boot_s: float = 0.0,
        ending_s: float = 0.0,
        keep_ended_s: float = 3600.0,
    ) -> None:
        self.calls: list[Call] = []
        self._clock = clock
        self.pools = tuple(pools)
        self._boot_s = boot_s
        self._ending_s = ending_s
        self._keep_ended_s = keep_ended_s
        self._machines: dict[str, Instance] = {}
        self._orders: dict[tuple[str, int, int, Market, int], str] = {}
        self._ending_at_s: dict[str, float] = {}
        self._taken_at_s: dict[str, float] = {}
        self._capacity: dict[tuple[str, Market], int] = {}
        self._failures: defaultdict[CallName, deque[Exception]] = defaultdict(deque)
        self._lost_responses = 0

    # --- the port ---------------------------------------------------------------------------------------------------

    def launch(self, order: Order) -> Instance:
        self.calls.append(Call("launch", self._clock(), order=order))
        key = (order.run, order.slot, order.incarnation, order.market, order.attempt)
        # The port: the same order returns the same instance. A fleet that is short of machines returns it too; only a
        # fleet that does not answer hides it.
        if key not in self._orders or self._hides_next_launch():
            self._fail("launch")
        if key not in self._orders:
            self._orders[key] = self._buy(order)
        if self._lost_responses:
            self._lost_responses -= 1
            raise LaunchError(
                "the answer was lost: the same order again finds out",
                failure=LaunchFailure.THROTTLED,
                code="ConnectionError",
            )
        return self._now(self._orders[key])

    def instances(self) -> Sequence[Instance]:
        self.calls.append(Call("instances", self._clock()))
        self._fail("instances")
        return self.all_instances(ended_s=self._keep_ended_s)

    def terminate(self, ids: Collection[str]) -> None:
        self.calls.append(Call("terminate", self._clock(), ids=frozenset(ids)))
        self._fail("terminate")
        for id_ in ids:
            if id_ in self._machines and self._now(id_).is_endable:
                self._ending_at_s[id_] = self._clock() + self._ending_s
                self._put(id_, state=InstanceState.ENDING)

    def close(self) -> None:
        pass

    # --- what a test does -------------------------------------------------------------------------------------------

    def all_instances(self, ended_s: float = float("inf")) -> list[Instance]:
        """All instances except instances that ended more than `ended_s` ago; no call of the port."""
        now_s = self._clock()
        instances = [self._now(id_) for id_ in self._machines]
        return [
            instance
            for instance in instances
            if instance.state is not InstanceState.ENDED
            or now_s - self._ending_at_s.get(instance.id, instance.ended_s or now_s) <= ended_s
        ]

    def alive(self) -> list[Instance]:
        """What runs or boots; no call of the port."""
        return [instance for instance in self.all_instances() if instance.is_alive]

    def fail_next(self, call: CallName, *errors: Exception | LaunchFailure) -> None:
        """The next calls of this name fail, one error each: a `LaunchFailure` as the `LaunchError` for it."""
        for error in errors:
            if isinstance(error, LaunchFailure):
                error = LaunchError(f"failure of the test: {error.value}", failure=error, code=f"Fake.{error.value}")
            self._failures[call].append(error)

    def become_unavailable(self, calls: int = 1) -> None:
        """The next calls of each kind fail as if the fleet did not answer."""
        for _ in range(calls):
            self.fail_next("launch", LaunchFailure.THROTTLED)
            self.fail_next("instances", ServiceUnavailableError("the fleet does not answer: a failure of the test"))
            self.fail_next("terminate", ServiceUnavailableError("the fleet does not answer: a failure of the test"))

    def lose_next_response(self) -> None:
        """The next launch does its work, but the caller gets an error: it cannot know."""
        self._lost_responses += 1

    def set_capacity(self, pool: str, market: Market, machines: int | None) -> None:
        """How many more instances of this market the pool gives; None: as many as one likes (the default)."""
        self._known(pool)
        if machines is None:
            self._capacity.pop((pool, market), None)
        else:
            self._capacity[pool, market] = machines

    def interrupt(self, id_: str, notice_s: float = 120.0, *, announced: bool = True) -> float:
        """The owner of the spot market gives notice, and takes the instance `notice_s` later; returns that time.

        Args:
            announced: False: it is taken without a notice.

        Raises:
            ValueError: it is not alive, or not on spot.
        """
        machine = self._now(id_)
        if not machine.is_alive or machine.market != "spot":
            raise ValueError(f"{id_}: expected one on spot that is alive, got {machine.market} {machine.state}")
        at_s = self._clock() + notice_s
        self._taken_at_s[id_] = at_s
        if announced:
            self._put(id_, notice_s=at_s)
        return at_s

    def stop_instance(self, id_: str) -> None:
        """A person stops the machine, which keeps its volume."""
        self._put(id_, state=InstanceState.STOPPED, ended_s=self._clock(), end_reason=EndReason.TERMINATED)

    def start_instance(self, id_: str) -> None:
        """A person starts a stopped machine, which launches it again."""
        self._put(id_, state=InstanceState.RUNNING, launched_s=self._clock(), ended_s=None, end_reason=EndReason.NONE)

    def fail_instance(self, id_: str) -> None:
        """The machine ends by itself."""
        if self._now(id_).is_alive:
            self._put(id_, state=InstanceState.ENDED, ended_s=self._clock(), end_reason=EndReason.FAILED)

    # --- the machines -----------------------------------------------------------------------------------------------

    def _buy(self, order: Order) -> str:
        for pool in self.pools:
            room = self._capacity.get((pool, order.market))
            if pool in order.avoid or room == 0:
                continue
            if room is not None:
                self._capacity[pool, order.market] = room - 1
            id_ = f"i-{len(self._machines):017x}"
            self._machines[id_] = Instance(
                id=id_, slot=order.slot, incarnation=order.incarnation, market=order.market, pool=pool,
                state=InstanceState.PENDING, launched_s=self._clock(), machines=order.machines,
            )  # fmt: skip
            return id_
        raise LaunchError(
            f"worker {order.slot}, incarnation {order.incarnation}: no pool has room on {order.market}",
            failure=LaunchFailure.CAPACITY,
            code="InsufficientInstanceCapacity",
            pools=[pool for pool in self.pools if pool not in order.avoid],
        )

    def _now(self, id_: str) -> Instance:
        """The machine as time has made it by now."""
        machine = self._machines[id_]
        now_s = self._clock()
        taken_at_s = self._taken_at_s.get(id_, math.inf)
        if machine.is_alive and now_s >= taken_at_s:
            self._put(id_, state=InstanceState.ENDED, ended_s=taken_at_s, end_reason=EndReason.INTERRUPTED)
        elif machine.state is InstanceState.PENDING and now_s >= machine.launched_s + self._boot_s:
            self._put(id_, state=InstanceState.RUNNING)
        elif machine.state is InstanceState.ENDING and now_s >= self._ending_at_s[id_]:
            ended_s = self._ending_at_s[id_] if machine.ended_s is None else machine.ended_s
            self._put(id_, state=InstanceState.ENDED, ended_s=ended_s, end_reason=EndReason.TERMINATED)
        return self._machines[id_]

    def _put(self, id_: str, **changes: Any) -> None:
        self._machines[id_] = dataclasses.replace(self._machines[id_], **changes)

    def _known(self, pool: str) -> None:
        if pool not in self.pools:
            raise ValueError(f"expected one of {', '.join(self.pools)}, got {pool!r}")

    def _hides_next_launch(self) -> bool:
        failures = self._failures["launch"]
        return bool(failures) and getattr(failures[0], "failure", None) in (None, LaunchFailure.THROTTLED)

    def _fail(self, call: CallName) -> None:
        if self._failures[call]:
            raise self._failures[call].popleft()


_fleet: type[Fleet] = FakeFleet
