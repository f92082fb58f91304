"""A virtual worker in memory: the production core, k stages whose weights are sets of steps, and a server that grants,
takes back, forgets and starts again. A step is the number of the computation that it came from."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from doll.pipeline.runtime.messages import Backward, Commit, Forward, StageOrders
from doll.pipeline.runtime.virtual_worker import (
    Action,
    Done,
    Missing,
    PullWeights,
    SendDown,
    StartBatch,
    Submission,
    VirtualWorkerCore,
    Void,
    Wave,
    Weights,
)

Steps = frozenset[int]
NOTHING: Steps = frozenset()


@dataclass
class Flight:
    """One grant of one batch; `step` is of its newest computation."""

    term: int
    grant: int
    batch: int
    min_version: int
    step: int = -1
    scale: float = 0.0
    view: Steps = NOTHING
    fails_at: int = -1


@dataclass
class Memory:
    """What is shared between the processes: one thing at a time may use it."""

    user: object = None
    written: list[Steps] = field(default_factory=list)

    def take(self, user: object) -> None:
        assert self.user is None, f"{user} uses shared memory that {self.user} uses"
        self.user, self.written = user, []

    def free(self) -> None:
        self.user = None


class ModelStage:
    """As `doll.pipeline.runtime.stage.Stage` and its process."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.weights: Steps = NOTHING
        self.version = -1
        self.wave: Steps = NOTHING
        self.waves: list[tuple[int, Steps]] = []
        self.slots: dict[int, tuple[Flight, int]] = {}  # with the step

    def commit(self, commit: Commit) -> None:
        if commit.slot >= 0:
            held = self.slots.pop(commit.slot, None)
            if commit.scale:
                assert held is not None, "a step without a gradient"
                self.weights |= {held[1]}
                self.wave |= {held[1]}
        if commit.ends_wave and self.wave:
            self.waves.append((commit.batch + 1, self.wave))
            self.wave = NOTHING

    def use(self, version: int, included: int) -> None:
        if version == self.version:
            return
        shared = self.world.pulled
        assert shared is not None
        assert shared[0].version == version, "the weights were overwritten before they were adopted"
        self.waves = [wave for wave in self.waves if wave[0] > included]
        self.weights = shared[1].union(self.wave, *(steps for _, steps in self.waves))
        self.version = version
        self.world.controls_up[self.number].append(("adopted", version))

    def take(self, message: Forward | StageOrders, flight: Flight | None) -> None:
        down = self.world.down
        is_last = self.number == len(down) - 1
        for commit in message.commits:
            self.commit(commit)
        if isinstance(message, Forward):
            assert flight is not None
            self.use(message.version, message.included)
            if flight.fails_at == self.number:
                self.slots.pop(message.slot, None)
                if not is_last and self.world.settles_after_failure:
                    settle = StageOrders(commits=message.commits, version=message.version, included=message.included)
                    down[self.number + 1].append((settle, None))
                self.back(message, flight, "fails")
                return
            assert self.slots.get(message.slot, (flight,))[0] is flight, "two minibatches share a slot"
            self.slots[message.slot] = (flight, flight.step)
            assert self.weights == flight.view, (
                f"stage {self.number}, batch {flight.batch}: lacks {sorted(flight.view - self.weights)}, has "
                f"{sorted(self.weights - flight.view)} too much"
            )
            if is_last:
                self.back(message, flight, "")
            else:
                down[self.number + 1].append((message, flight))
            return
        if message.forget_from is not None:
            self.waves = [wave for wave in self.waves if wave[0] <= message.forget_from]
            self.wave, self.version = NOTHING, -1
        if message.version >= 0:
            self.use(message.version, message.included)
        if message.store is not None:
            steps = [steps for until, steps in self.waves if until == message.store]
            self.world.pushed.written.append(steps[0] if steps else NOTHING)
        if message.show:
            self.world.pushed.written.append(self.weights)
        if message.store is not None or message.show:
            assert self.world.pushed.user is not None
            self.world.controls_up[self.number].append(("stored", message.store))
        if not is_last:
            down[self.number + 1].append((message, None))

    def back(self, message: Forward | Backward, flight: Flight, problem: str) -> None:
        if problem:
            self.slots.pop(message.slot, None)
        back = Backward(batch=message.batch, slot=message.slot, num_samples=message.num_samples, problem=problem)
        self.world.up[self.number].append((back, flight))


class World:
    """One stream, computed by one virtual worker after the other.

    Attributes:
        high: batches below it may be granted.
        seen: what has happened how often.
    """

    def __init__(
        self, seed: int, stages: int, in_flight: int, core: type[VirtualWorkerCore] = VirtualWorkerCore,
        *, settles_after_failure: bool = True,
    ) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.settles_after_failure = settles_after_failure
        self.k, self.n, self.core_class = stages, in_flight, core
        self.high = 0
        self.seen: Counter[str] = Counter()
        self.is_calm = False
        # the server
        self.term, self.version, self.applied, self.content = 1, 0, 0, NOTHING
        self.snapshots = [(0, 0, NOTHING)]
        self.published: dict[str, Steps] = {"1:0": NOTHING}
        self.is_gone = False  # the newest weights, from the blob store
        self.grants: dict[int, int] = {}  # of batches that are computed
        self.next_grant = self.next_step = 0
        self.granted_until = 0
        self.min_version = 0
        self.start_process()

    def start_process(self) -> None:
        self.core = self.core_class(self.n, self.n)
        self.stages = [ModelStage(self, number) for number in range(self.k)]
        self.down: list[deque[tuple[Forward | StageOrders, Flight | None]]] = [deque() for _ in self.stages]
        self.up: list[deque[tuple[Backward, Flight]]] = [deque() for _ in self.stages]
        self.controls_up: list[deque[tuple[str, int | None]]] = [deque() for _ in self.stages]
        self.pulled: tuple[Weights, Steps] | None = None  # in the memory that all stages read
        self.pushed = Memory()
        self.answers: Counter[tuple[str, int | None]] = Counter()
        self.orders: deque[tuple[Submission, Weights]] = deque()
        self.in_stages: deque[Flight] = deque()
        self.in_flight: deque[Flight] = deque()  # started, and not complete
        self.returned: list[tuple[Backward, Flight]] = []
        self.suspect: Flight | None = None
        self.is_showing = False
        self.committed: list[Flight] = []  # with own steps, in order; flights that may be void are taken out
        self.kept: list[Flight] = []
        self.stored: dict[int, tuple[Steps, int]] = {}  # with the version
        self.storing: Wave | None = None
        self.rest: int | None = None
        self.answered = -1  # the batch of the last answer
        self.owed: dict[int, int] = {}

    # --- the server -------------------------------------------------------------------------------------------------

    def key(self) -> str:
        return f"{self.term}:{self.version}"

    def grant(self) -> None:
        limit = min(self.high, (self.applied // self.n + 2) * self.n, self.applied + 2 * self.n)
        if self.granted_until >= limit:
            return
        batch, self.granted_until = self.granted_until, self.granted_until + 1
        self.next_grant += 1
        self.grants[batch] = self.next_grant
        self.min_version = max(self.min_version, self.version - self.random.randrange(3))
        num_samples = 0 if (batch * 7919 + 13) % 9 == 0 else 8
        flight = Flight(self.term, self.next_grant, batch, self.min_version)
        submitted = Submission(batch, self.term, self.min_version, num_samples, flight)
        self.orders.append((submitted, Weights(self.term, self.version, self.key(), self.applied)))

    def take_back(self, batch: int) -> None:
        self.granted_until = min(self.granted_until, batch)
        self.grants = {number: grant for number, grant in self.grants.items() if number < batch}

    def new_term(self) -> None:
        self.seen["new term"] += 1
        self.version, self.applied, self.content = self.random.choice(self.snapshots[-3:])
        self.snapshots = [item for item in self.snapshots if item[1] <= self.applied]
        self.term += 1
        self.published[self.key()], self.is_gone = self.content, False
        self.min_version = 0
        self.granted_until = self.applied
        self.grants, self.owed, self.kept = {}, {}, []

    def is_wanted(self, flight: Flight) -> bool:
        return flight.term == self.term and self.owed.get(flight.batch) == flight.grant

    def push(self, flights: Sequence[Flight], steps: Steps) -> None:
        standing = [item for item in flights if item.term == self.term and self.grants.get(item.batch) == item.grant]
        for item in standing:
            self.owed.pop(item.batch, None)
        if len(standing) < len(flights):
            if standing:
                self.seen["partly void"] += 1
                self.take_back(min(item.batch for item in standing))
            return
        assert [item.batch for item in flights] == list(range(self.applied, self.applied + len(flights)))
        assert steps == {item.step for item in flights if item.scale}, "a push of other steps than its batches'"
        if not self.is_calm and self.random.random() < 0.1:
            self.seen["blob lost"] += 1
            self.take_back(flights[0].batch)
            return
        self.content |= steps
        self.applied = flights[-1].batch + 1
        for item in flights:
            del self.grants[item.batch]
        self.version += 1
        self.published[self.key()], self.is_gone = self.content, False
        if self.random.random() < 0.3:
            self.snapshots.append((self.version, self.applied, self.content))

    def offer(self) -> None:
        self.do(self.core.offer(Weights(self.term, self.version, self.key(), self.applied)))

    # --- the worker -------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        submitted, weights = self.orders.popleft()
        flight: Flight = submitted.token
        if flight.term != self.term or self.grants.get(flight.batch) != flight.grant:
            return
        self.owed[flight.batch] = flight.grant
        self.kept = [item for item in self.kept if item.batch < flight.batch]
        is_new = not self.committed or flight.term == self.committed[-1].term
        self.committed = [item for item in self.committed if item.batch < flight.batch and is_new]
        self.do(self.core.submit(submitted, weights))

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case PullWeights(weights):
                    self.pull(weights)
                case StartBatch(message, submitted):
                    self.start(message, submitted.token)
                case SendDown(message, wave):
                    if message.store is not None or message.show:
                        self.pushed.take(wave or "show")
                    if wave is not None:
                        assert wave.until == message.store
                        self.storing = wave
                    if message.show:
                        assert not any(flight for queue in self.down for _, flight in queue), "a stage computes"
                        assert not any(self.up), "a stage computes"
                    self.down[0].append((message, None))
                case Done(submitted, version, wave):
                    self.done(submitted, version, wave)
                case Void(submitted):
                    self.owed_no_more(submitted.token)
                case Missing(submitted):
                    self.missing(submitted.token)

    def pull(self, weights: Weights) -> None:
        if self.is_gone and weights.key == self.key():
            self.seen["weights missing"] += 1
            self.do(self.core.pulled(weights, is_there=False))
            return
        self.pulled = (weights, self.published[weights.key])
        self.do(self.core.pulled(weights, is_there=True))

    def start(self, message: Forward, flight: Flight) -> None:
        assert len(self.in_flight) < self.n, "p starts before p - N_m is complete"
        self.in_flight.append(flight)
        self.send(message, flight)

    def send(self, message: Forward, flight: Flight) -> None:
        self.next_step += 1
        flight.step = self.next_step
        base = self.published[f"{flight.term}:{message.version}"]
        own = {item.step for item in self.committed if item.scale and item.batch >= message.included}
        flight.view = base | own
        assert len(base & own) == 0, "the weights hold an own step that is said not to be in them"
        flight.fails_at = self.random.randrange(self.k) if not self.is_calm and self.random.random() < 0.05 else -1
        self.in_stages.append(flight)
        self.down[0].append((message, flight))

    def owed_no_more(self, flight: Flight) -> None:
        if self.is_wanted(flight):
            del self.owed[flight.batch]

    def missing(self, flight: Flight) -> None:
        if not self.is_wanted(flight):
            return
        self.owed_no_more(flight)
        if self.grants.get(flight.batch) == flight.grant:
            self.take_back(flight.batch)
            self.is_gone = False

    def done(self, submitted: Submission, version: int, wave: int | None) -> None:
        flight: Flight = submitted.token
        assert version >= flight.min_version, "computed on older weights than the grant allows"
        steps = NOTHING
        if wave is not None:
            assert wave in self.stored, "a wave is answered before it is stored"
            steps, pushed_version = self.stored.pop(wave)
            assert pushed_version == version, "the blob names another version than the push"
        if not self.is_wanted(flight):
            return
        if self.kept:
            assert flight.batch == self.kept[-1].batch + 1, "answers out of order"
        self.kept.append(flight)
        if (flight.batch + 1) % self.n == 0:
            pushed, self.kept = self.kept, []
            self.push(pushed, steps)

    def judge(self) -> None:
        """Those that have come back, in order."""
        while self.suspect is None and self.in_stages:
            first = self.in_stages[0]
            at = next((at for at, (_, flight) in enumerate(self.returned) if flight is first), None)
            if at is None:
                return
            self.in_stages.popleft()
            self.judge_one(*self.returned.pop(at))

    def judge_one(self, message: Backward, flight: Flight) -> None:
        if not self.is_wanted(flight):
            self.complete(flight, 0.0, is_void=True)
        elif message.problem or (not self.is_calm and self.random.random() < 0.07):
            self.seen["suspect"] += 1
            self.suspect = flight
            self.core.hold()
        else:
            self.complete(flight, 1.0)

    def complete(self, flight: Flight, scale: float, *, is_void: bool = False) -> None:
        assert self.in_flight.popleft() is flight
        flight.scale = scale
        if not is_void and not self.core.is_void(flight.batch):
            self.committed.append(flight)
        self.do(self.core.completed(flight.batch, scale=scale, weight=8.0 if scale else 0.0, is_void=is_void))

    def inspect_if_due(self) -> None:
        if self.suspect is None or self.is_showing or self.core.is_storing:
            return
        if len(self.in_stages) == len(self.returned):
            self.is_showing = True
            self.do(self.core.show())

    def inspected(self) -> None:
        flight = self.suspect
        assert flight is not None
        assert self.pushed.written == [self.pushed.written[0]] * self.k
        self.pushed.free()
        self.suspect, self.is_showing = None, False
        self.do(self.core.stored(None))
        if self.core.is_void(flight.batch):
            self.complete(flight, 0.0, is_void=True)
        elif self.random.random() < 0.5:
            self.seen["dropped"] += 1
            self.complete(flight, 0.0)
        else:
            self.seen["again"] += 1
            message = self.core.again(flight.batch, 7)
            self.send(message, flight)
            self.in_stages.rotate(1)
        self.do(self.core.go_on())

    def hear(self, number: int) -> None:
        what, which = self.controls_up[number].popleft()
        self.answers[what, which] += 1
        if self.answers[what, which] < self.k:
            return
        del self.answers[what, which]
        if what == "adopted":
            assert which is not None
            self.do(self.core.adopted(which))
        elif which is None:
            self.inspected()
        else:
            wave = self.storing
            assert wave is not None
            assert wave.until == which
            written = self.pushed.written
            assert written == [written[0]] * self.k, "stages have stored other batches' steps"
            self.stored[which] = (written[0], wave.version)
            self.pushed.free()
            if which == self.rest:
                self.rest, pushed = None, self.kept
                self.kept = []
                self.push(pushed, self.stored.pop(which)[0])
            self.do(self.core.pushed(which))

    # --- events -----------------------------------------------------------------------------------------------------

    def deliver(self) -> bool:
        """One message, of any link; whether there was one."""
        choices: list[tuple[str, int]] = [
            (kind, number)
            for kind in ("down", "up", "controls_up")
            for number, queue in enumerate(getattr(self, kind))
            if queue
        ]
        if self.orders:
            choices.append(("orders", 0))
        if not choices:
            return False
        kind, number = self.random.choice(choices)
        if kind == "orders":
            self.submit()
        elif kind == "down":
            self.stages[number].take(*self.down[number].popleft())
        elif kind == "controls_up":
            self.hear(number)
        else:
            message, flight = self.up[number].popleft()
            if number:
                self.stages[number - 1].back(message, flight, message.problem)
            else:
                self.returned.append((message, flight))
        self.judge()
        self.inspect_if_due()
        return True

    def disturb(self) -> None:
        kind = self.random.random()
        if kind < 0.3 and self.grants:
            self.seen["timeout"] += 1
            self.take_back(self.applied)
        elif kind < 0.4:
            self.new_term()
        elif kind < 0.6:
            self.is_gone = True  # until somebody misses them
        elif kind < 0.75 and self.orders:
            self.orders.popleft()  # lost, and granted again
            self.take_back(self.applied)
        elif kind < 0.8:
            self.leave()

    def leave(self) -> None:
        """SIGTERM: what is under way is finished, the part of a wave is pushed, and another process begins."""
        self.seen["left"] += 1
        self.do(self.core.stop())
        while self.deliver():
            pass
        assert not self.in_flight
        if self.kept:
            self.rest, actions = self.core.close_wave()
            if self.rest is None:
                self.push(self.kept, NOTHING)
            self.do(actions)
            while self.deliver():
                pass
            self.seen["left within a wave"] += bool(self.applied % self.n)
        self.take_back(self.applied)
        self.owed = {}
        self.start_process()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            what = self.random.random()
            if what < 0.1:
                self.high += 1
            elif what < 0.3:
                self.grant()
            elif what < 0.34:
                self.offer()
            elif what < 0.36:
                self.disturb()
            else:
                self.deliver()

    def settle(self) -> None:
        """Nothing goes wrong any more: whole waves are all applied."""
        self.is_calm = True
        self.take_back(self.applied)  # what was lost or void is due
        self.is_gone = False
        goal = self.high = (self.high // self.n + 2) * self.n
        while self.applied < goal:
            before = self.granted_until
            self.grant()
            assert self.deliver() or before < self.granted_until, f"it stops at {self.applied} of {goal} batches"
