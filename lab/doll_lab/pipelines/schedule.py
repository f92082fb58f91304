"""The schedule of one virtual worker: the tasks of its stages over time (the HetPipe paper, section 4). Pure.

A virtual worker is a pipeline of k stages. Minibatch p goes forward through stages 0 to k - 1 and backward to stage 0,
where it is complete. The last stage runs both passes in one task. A stage runs its tasks one at a time, in the order of
their arrival; so minibatches complete in order, which the bounds of WSP require. Minibatch p starts when minibatch
p - N_m is complete and p is admitted.

Figure 1 of the paper, four stages with tasks of one second, and four minibatches in flight:

>>> timeline = simulate([StageTimes(1.0, 1.0)] * 4, in_flight=4, minibatches=7)
>>> timeline.order(0)
'F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7'
>>> timeline.order(3)
'FB1 FB2 FB3 FB4 FB5 FB6 FB7'
>>> [timeline.max_in_flight(stage) for stage in range(4)]
[4, 4, 3, 1]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from doll_lab.pipelines.timeline import Kind, Span, Timeline

Jitter = Callable[[int, Kind, int], float]
"""(stage, kind, minibatch) -> factor on the task's time."""


class StageTimes(NamedTuple):
    """The seconds of a stage's tasks for one minibatch, including the time to receive their input."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


class Pipeline:
    """The stages of one virtual worker in operation; the caller keeps the time.

    After each call that may make stages busy, call `dispatch`, once for all events of one moment: only then the order
    of arrivals is known.

    Attributes:
        started: number of started minibatches; these are 1 to `started`.
        completed: number of complete minibatches.
        spans: tasks so far, in the order of their start.
        busy: stages that compute.
    """

    def __init__(
        self,
        stages: Sequence[StageTimes],
        in_flight: int,
        *,
        jitter: Jitter | None = None,
        forward_first: bool = False,
    ) -> None:
        """
        Args:
            stages: times of the stages, first stage first.
            in_flight: N_m, maximum number of minibatches between their start and their completion.
            jitter: factor on the time of each task; None: 1.
            forward_first: whether the forward task comes first if two tasks arrive at the same moment. Backward first
                keeps fewer activations.

        Raises:
            ValueError: there is no stage or no minibatch in flight, or a time is below 0.
        """
        if not stages or in_flight < 1:
            raise ValueError(
                f"expected a stage and a minibatch in flight at least, got {len(stages)} stages and {in_flight}"
            )
        for number, times in enumerate(stages):
            if not min(times) >= 0.0:
                raise ValueError(f"stage {number}: expected times of 0 s or more, got {times}")
        self.stages = tuple(stages)
        self.in_flight = in_flight
        self.started = 0
        self.completed = 0
        self.busy = 0
        self.spans: list[Span] = []
        self._jitter = jitter
        self._forward_first = forward_first
        self._last = len(stages) - 1
        # The arrived tasks in order: (moment, minibatch).
        self._forward: list[deque[tuple[float, int]]] = [deque() for _ in stages]
        self._backward: list[deque[tuple[float, int]]] = [deque() for _ in stages]
        self._running: list[Span | None] = [None] * len(stages)
        self._touched: set[int] = set()  # stages that may have a task to start

    @property
    def has_room(self) -> bool:
        """Whether the next minibatch may start, if it is admitted."""
        return self.started - self.completed < self.in_flight

    def start(self, now: float) -> int:
        """Start the next minibatch: it arrives at the first stage. Return its number.

        Raises:
            ValueError: the minibatch N_m places before it is not complete.
        """
        if not self.has_room:
            raise ValueError(
                f"minibatch {self.started + 1}: expected {self.started + 1 - self.in_flight} to be complete, "
                f"got {self.completed} complete ones"
            )
        self.started += 1
        self._forward[0].append((now, self.started))
        self._touched.add(0)
        return self.started

    def end(self, stage: int, now: float) -> int | None:
        """End the task of this stage; its result arrives at the next stage.

        Returns:
            The minibatch that is now complete, or None.
        """
        span = self._running[stage]
        if span is None:
            raise ValueError(f"stage {stage}: expected a task under way, got none")
        self._running[stage] = None
        self.busy -= 1
        self._touched.add(stage)
        if span.kind == "F":
            self._forward[stage + 1].append((now, span.minibatch))
            self._touched.add(stage + 1)
        elif stage:
            self._backward[stage - 1].append((now, span.minibatch))
            self._touched.add(stage - 1)
        else:
            self.completed += 1
            return span.minibatch
        return None

    def dispatch(self, now: float) -> list[tuple[float, int]]:
        """Let idle stages start the task that arrived first.

        Returns:
            (end in seconds, stage) of each started task.
        """
        begun: list[tuple[float, int]] = []
        for stage in sorted(self._touched):
            if self._running[stage] is not None:
                continue
            task = self._next(stage)
            if task is None:
                continue
            kind, minibatch = task
            times = self.stages[stage]
            seconds = times.forward_s if kind == "F" else times.backward_s if kind == "B" else sum(times)
            if self._jitter is not None:
                seconds *= self._jitter(stage, kind, minibatch)
            span = Span(stage, kind, minibatch, now, now + seconds)
            self._running[stage] = span
            self.busy += 1
            self.spans.append(span)
            begun.append((span.end_s, stage))
        self._touched.clear()
        return begun

    def _next(self, stage: int) -> tuple[Kind, int] | None:
        """Take the task that arrived first."""
        forward, backward = self._forward[stage], self._backward[stage]
        if forward and backward:
            came, gone = forward[0][0], backward[0][0]
            is_forward = came < gone or (came == gone and self._forward_first)
        else:
            is_forward = bool(forward)
        if is_forward:
            return "FB" if stage == self._last else "F", forward.popleft()[1]
        return ("B", backward.popleft()[1]) if backward else None


def simulate(
    stages: Sequence[StageTimes],
    in_flight: int,
    minibatches: int,
    *,
    jitter: Jitter | None = None,
    admitted_s: Callable[[int], float] | None = None,
    forward_first: bool = False,
    pipeline: type[Pipeline] = Pipeline,
) -> Timeline:
    """Run one virtual worker in virtual time.

    Args:
        stages: times of the stages, first stage first.
        in_flight: N_m.
        minibatches: number of minibatches.
        jitter: factor on the time of each task; None: 1.
        admitted_s: function that returns when a minibatch (1, 2, ...) is admitted; None: all at the beginning.
        forward_first: whether the forward task comes first if two tasks arrive at the same moment.
        pipeline: class with another rule of scheduling.

    Raises:
        ValueError: there is no stage or no minibatch in flight, or a time is below 0.
    """
    line = pipeline(stages, in_flight, jitter=jitter, forward_first=forward_first)
    events: list[tuple[float, int]] = [(0.0, -1)]  # (seconds, stage whose task ends; -1: a minibatch is admitted)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            stage = heappop(events)[1]
            if stage >= 0:
                line.end(stage, now)
        while line.has_room and line.started < minibatches:
            if admitted_s is not None and (at_s := admitted_s(line.started + 1)) > now:
                heappush(events, (at_s, -1))
                break
            line.start(now)
        for begun in line.dispatch(now):
            heappush(events, begun)
    return Timeline(len(line.stages), in_flight, tuple(line.spans))


def simulate_as_measured(measured: Timeline, *, admitted_s: Callable[[int], float] | None = None) -> Timeline:
    """Return the schedule that follows from the durations of measured tasks, to compare a measured order with it.

    Args:
        measured: all tasks of minibatches 1, 2, ....
        admitted_s: function that returns when a minibatch was admitted; None: all at the beginning.

    Raises:
        ValueError: a task is missing.
    """
    durations = {(span.stage, span.kind, span.minibatch): span.end_s - span.start_s for span in measured.spans}

    def seconds(stage: int, kind: Kind, minibatch: int) -> float:
        duration = durations.get((stage, kind, minibatch))
        if duration is None:
            raise ValueError(f"expected all tasks of minibatch {minibatch}, got no {kind} of stage {stage}")
        return duration / 2.0 if kind == "FB" else duration

    minibatches = len(measured.completions_s)
    stages = [StageTimes(1.0, 1.0)] * measured.num_stages
    return simulate(stages, measured.in_flight, minibatches, jitter=seconds, admitted_s=admitted_s)
